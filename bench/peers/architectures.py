"""Every architecture of Transformers that can be made small: is a step with checkpointed layers the plain step?

Each is built with random weights, in training mode, and checkpointed by the library's own switch. Compared are loss,
gradients and buffers after `.backward()`, and then the gradients by `torch.func`: `grad`, those of each sample and a
Hessian-vector product. "plain fails": without checkpointing the model does not work that way, or not twice alike.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import inspect
import logging
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from transformers.models.auto import modeling_auto

from remat import checkpoint, policies, remat
from remat.nn import checkpoint_with

SMALL: dict[int, str] = {
    0: "num_kv_shared_layers",
    1: "n_group topk_group num_hidden_groups first_k_dense_replace moe_layer_start_index num_random_blocks",
    2: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_key_value_heads num_experts_per_tok type_vocab_size expand linear_num_key_heads
        linear_num_value_heads
    """,
    4: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts time_step_rank
    """,
    8: """
        head_dim d_kv kv_channels patch_size qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state
        linear_key_head_dim linear_value_head_dim sliding_window hidden_size_per_layer_input block_size attention_window
    """,
    16: "image_size moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank bottleneck_size",
    32: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim attention_hidden_size",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim n_inner",
    64: "vocab_size max_position_embeddings n_positions vocab_size_per_layer_input",
}
"""Options that tell how large a model is, by what they are set to."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
OPTIONS = {name: size for size, names in SMALL.items() for name in names.split()} | {**TOKENS, "use_cache": False}
MOST = 6_000_000  # parameters of a model that is tried
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
# Relative to the greatest number, absolute. In many models of doubles, norms and softmax are in single precision.
TOLERANCE = {torch.float64: (1e-6, 1e-9), torch.float32: (1e-3, 1e-5)}


def by_policy(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return remat(fun, policy=policies.dots_saveable)(*args, **kwargs)


WAYS: dict[str, Callable[..., Any]] = {
    "torch, non-reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "torch, reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "remat.checkpoint, non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "remat.checkpoint, reentrant": functools.partial(checkpoint, use_reentrant=True),
    "remat.checkpoint, dots_saveable": checkpoint_with(policies.dots_saveable),
    "remat": lambda fun, *args, **kwargs: remat(fun)(*args, **kwargs),
    "remat, dots_saveable": by_policy,
}
FUNCTIONAL = ("remat.checkpoint, non-reentrant", "remat.checkpoint, dots_saveable")
Result = dict[str, Tensor | None]


def architectures() -> dict[str, str]:
    """By name, the class of the model: with a task that has a loss, where there is one."""
    found: dict[str, str] = {}
    for table in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS), "MODEL_MAPPING_NAMES"):
        for name, kind in getattr(modeling_auto, table).items():
            found.setdefault(name, kind if isinstance(kind, str) else kind[0])
    return found


def shrink(config: Any) -> None:
    """Make a model small, and the models that it is made of."""
    for name, size in OPTIONS.items():
        with contextlib.suppress(Exception):
            if isinstance(getattr(config, name), int):
                setattr(config, name, size)
    with contextlib.suppress(Exception):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for part in [*vars(config).values()]:
        if isinstance(part, transformers.PretrainedConfig):
            shrink(part)


def configuration(name: str) -> Any:
    kind = transformers.CONFIG_MAPPING[name]
    config = kind()
    small = {n: size for n, size in OPTIONS.items() if isinstance(getattr(config, n, None), int)}
    try:
        config = kind(**small)
        if getattr(config, "is_encoder_decoder", False):
            config.decoder_start_token_id = TOKENS["decoder_start_token_id"]
    except Exception:  # each configuration has checks of its own
        vars(config).update(TOKENS)
    shrink(config)
    return config


def build(name: str, kind: str, dtype: torch.dtype) -> Any:
    config = configuration(name)
    with torch.device("meta"):
        count = sum(p.numel() for p in getattr(transformers, kind)(config).parameters())
    if count > MOST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).to(dtype).train()
    with contextlib.suppress(Exception):
        model.set_attn_implementation("eager")  # torch's own can't be differentiated twice
    return model


def inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = inspect.signature(model.forward).parameters
    name = model.main_input_name
    dtype = next(model.parameters()).dtype
    if name == "input_ids":
        tokens = torch.randint(3, 60, (2, 16), generator=generator)
        given: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "decoder_input_ids": tokens, "use_cache": False}
        if "labels" in parameters:
            del given["decoder_input_ids"]
        return {key: value for key, value in given.items() if key in parameters}
    size = getattr(model.config, "image_size", 16)
    shapes = {
        "pixel_values": (getattr(model.config, "num_channels", 3), *([size] * 2 if isinstance(size, int) else size)),
        "input_values": (4000,),
        "input_features": (getattr(model.config, "num_mel_bins", 80), 64),
    }
    return {name: torch.randn(2, *shapes[name], generator=generator, dtype=dtype)}


def loss_of(out: Any) -> Tensor:
    if getattr(out, "loss", None) is not None:
        return out.loss
    floats = [v for v in out.values() if isinstance(v, Tensor) and v.is_floating_point()]
    parts = [(v * torch.linspace(0.5, 1.5, v.numel(), dtype=v.dtype).view_as(v)).sum() for v in floats]
    return torch.stack(parts).sum()


def backward(model: Any) -> Result:
    loss = loss_of(model(**inputs(model)))
    loss.backward()
    return {
        "the loss": loss.detach(),
        **{n: p.grad for n, p in model.named_parameters()},
        **{f"the buffer {n}": b.detach() for n, b in model.named_buffers()},
    }


def functional(model: Any) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], given: dict[str, Any]) -> Tensor:
        return loss_of(functional_call(model, (params, buffers), (), given))

    return loss, params


def by_grad(model: Any) -> Result:
    loss, params = functional(model)
    return grad(loss)(params, inputs(model))


def per_sample(model: Any) -> Result:
    loss, params = functional(model)
    given = inputs(model)
    options = {key: value for key, value in given.items() if not isinstance(value, Tensor)}

    def of_one(params: dict[str, Tensor], sample: dict[str, Tensor]) -> Tensor:
        return loss(params, {key: value[None] for key, value in sample.items()} | options)

    samples = {key: value for key, value in given.items() if key not in options}
    return vmap(grad(of_one), in_dims=(None, 0), randomness="different")(params, samples)


def hessian_vector_product(model: Any) -> Result:
    loss, params = functional(model)
    direction = {n: torch.full_like(p, 0.01) for n, p in params.items()}
    return jvp(lambda params: grad(loss)(params, inputs(model)), (params,), (direction,))[1]


STEPS = {
    ".backward()": backward,
    "grad": by_grad,
    "per-sample gradients": per_sample,
    "Hessian-vector product": hessian_vector_product,
}


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def run(step: Callable[[Any], Result], name: str, kind: str, dtype: torch.dtype, way: str | None) -> Result:
    with limit(60):
        model = build(name, kind, dtype)
        if way is not None:
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=WAYS[way])
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        return step(model)


def difference(found: Result, expected: Result) -> str | None:
    """What is wrong, if anything is."""
    for name, e in expected.items():
        f = found.get(name)
        if f is None or e is None:
            if f is not e:
                return f"wrong: {name} is {'missing' if f is None else 'there'}"
            continue
        relative, absolute = TOLERANCE.get(e.dtype, (0.0, 0.0))
        error = (f.double() - e.double()).abs().nan_to_num().max().item() if f.numel() and f.shape == e.shape else 0.0
        if f.shape != e.shape or error > relative * e.double().abs().nan_to_num().max().item() + absolute:
            return f"wrong: {name}"
    return None


def tried(name: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """For each step and way of checkpointing, what came of it."""
    for title, step in STEPS.items():
        for dtype in TOLERANCE:
            try:
                expected = run(step, name, kind, dtype, None)
                failed = difference(run(step, name, kind, dtype, None), expected)
            except Exception as error:
                failed = str(error)
            if failed is None:
                break
        for way in WAYS if step is backward else FUNCTIONAL:
            if failed is not None:
                yield title, way, "plain fails"
                continue
            try:
                yield title, way, difference(run(step, name, kind, dtype, way), expected) or "right"
            except Exception as error:
                text = " ".join(str(error).split())[:150]
                yield title, way, f"{type(error).__name__}: {text}"


def has_switch(name: str, kind: str) -> bool:
    """Whether a small model can be built, and its layers be checkpointed by the library's switch."""
    try:
        with limit(60):
            model: nn.Module = build(name, kind, torch.float32)
            return bool(getattr(model, "supports_gradient_checkpointing", False))
    except Exception:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="of architectures: all, unless told otherwise")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    every = architectures()
    chosen = {name: kind for name, kind in every.items() if not options.names or name in options.names}
    counts: dict[tuple[str, str], Counter[str]] = {}
    notes: list[str] = []
    console = Console(width=150)
    small = 0
    for name, kind in track(chosen.items(), console=Console(stderr=True)):
        if not has_switch(name, kind):
            continue
        small += 1
        for step, way, what in tried(name, kind):
            summary = what if what in ("right", "plain fails") else "wrong" if what.startswith("wrong") else "error"
            counts.setdefault((step, way), Counter())[summary] += 1
            if summary in ("wrong", "error"):
                notes.append(f"{name}, {step}, {way}: {what}")
    columns = ("right", "wrong", "error", "plain fails")
    table = Table("", "", *columns, title=f"{small} architectures of {len(chosen)}")
    for (step, way), count in counts.items():
        table.add_row(step, way, *(str(count[column]) for column in columns))
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    console.print(", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers")))


if __name__ == "__main__":
    main()
