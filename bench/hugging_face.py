"""Models of Transformers with each layer checkpointed by the library's switch: torch's checkpoint and ours behind it.

8 layers, forward and backward: of width 32 on 2 x 8 tokens, where all is Python, and of width 256 on 4 x 256 tokens.
Then the gradients of each of 4 samples, of 4 layers of width 128 on 128 tokens. The policy keeps the results of
products with weights.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from _common import Benchmark, Run, ratio, selective
from _transformer import Params, params_of
from torch import Tensor
from torch.func import functional_call, grad, vmap

from remat import policies
from remat.integrations.transformers import enable

POLICY = policies.dots_with_no_batch_dims_saveable
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(width: int, layers: int) -> Any:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0, **NO_DROPOUT
    )
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager")


def llama(width: int, layers: int) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=100,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")


def by_the_library(model: Any) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})


def selectively(model: Any) -> None:
    way = selective(POLICY)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=lambda fun, *args: way(fun)(*args))


# How the library's switch is turned on.
SWITCHES: dict[str, Callable[[Any], None]] = {
    "no remat": lambda model: None,
    "torch, non-reentrant": by_the_library,
    "torch, selective": selectively,
    "remat": enable,
    "remat, policy": functools.partial(enable, policy=POLICY),
}


def loss(model: Any, params: Params, tokens: Tensor) -> Tensor:
    batch = {"input_ids": tokens[None], "labels": tokens[None], "use_cache": False}
    return functional_call(model, params, (), batch).loss


def step(model: Any, tokens: Tensor) -> Run:
    def run() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()

    return run


def per_sample_gradients(model: Any, tokens: Tensor) -> Run:
    gradients = vmap(grad(functools.partial(loss, model)), in_dims=(None, 0))
    return functools.partial(gradients, params_of(model), tokens)


def runs(model: Any, tokens: Tensor, make: Callable[[Any, Tensor], Run]) -> dict[str, Run | str]:
    """The same work in each way."""
    found: dict[str, Run | str] = {}
    for way, switch in SWITCHES.items():
        switched = copy.deepcopy(model).train()
        switch(switched)
        found[way] = make(switched, tokens)
    return found


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="There is a performance drop")
    layers = 2 if bench.fast else 8
    models = {"GPT-2": gpt2, "Llama": llama}
    for title, batch, length, repeats in ((32, 2, 8, 5), (256, 4, 256, 1)):
        width, length = (32, 8) if bench.fast else (title, length)
        tokens = torch.randint(100, (batch, length))
        works = {
            f"{name}, width {title}, {batch} x {length} tokens": runs(make(width, layers), tokens, step)
            for name, make in models.items()
        }
        for name, rows in zip(models, bench.measure(works, rounds=7, repeats=repeats).values(), strict=True):
            ours, torchs = rows["remat"], rows["torch, non-reentrant"]
            bench.ratios |= {
                f"{name}, width {title}: time / torch's": ours.over(torchs),
                f"{name}, width {title}: peak / torch's": ratio(ours.peak, torchs.peak),
            }
    width, length = (32, 8) if bench.fast else (128, 128)
    tokens = torch.randint(100, (4, length))
    works = {
        f"{name}, gradients of each sample": runs(make(width, layers // 2), tokens, per_sample_gradients)
        for name, make in models.items()
    }
    bench.measure(works, rounds=7)
    for rows in bench.sections.values():
        for way, row in rows.items():
            if row.seconds and way != "no remat":
                row.notes["of no remat"] = f"{row.over(rows['no remat']):.2f}"
    bench.finish()


if __name__ == "__main__":
    main()
