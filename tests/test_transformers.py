"""Transformers' own switch with our `checkpoint` behind it, on small models that are made here."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CountOps
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.models.t5.modeling_t5 import T5Block

from remat import RematError, policies
from remat.debug import LiveBytes
from remat.integrations.transformers import enable
from remat.nn import apply_remat

VOCABULARY, LENGTH, LAYERS = 20, 12, 4
SIZE: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
NARROW: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    **SIZE,
}


def gpt2(**options: Any) -> nn.Module:
    names = {"n_embd": 16, "n_head": 2, "n_layer": LAYERS, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**names, **SIZE, **options}))


def llama(**options: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**NARROW, "attention_dropout": 0.1, **options}))


def bert(**options: Any) -> nn.Module:
    return BertForMaskedLM(BertConfig(**{**NARROW, **options}))


MODELS = [gpt2, llama, bert]
NO_DROPOUT: dict[Any, dict[str, float]] = {
    gpt2: {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    llama: {"attention_dropout": 0.0},
    bert: {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
}
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
each_policy = pytest.mark.parametrize("policy", [None, policies.dots_with_no_batch_dims_saveable], ids=str)


def made(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """A model in training, in doubles; the same every time."""
    torch.manual_seed(0)
    model = make(**options).double().train()
    model.config.use_cache = False
    return model


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **SIZE, dropout_rate=0.0, use_cache=False))


def tokens(samples: int = 3) -> Tensor:
    return torch.randint(VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(0))


def backward(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(1)  # of dropout
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def per_sample(model: nn.Module, randomness: str = "error") -> dict[str, Tensor]:
    def loss(params: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(model, params, (), {"input_ids": ids[None], "labels": ids[None]}).loss

    params = {n: p.detach() for n, p in model.named_parameters()}
    torch.manual_seed(1)
    return vmap(grad(loss), in_dims=(None, 0), randomness=randomness)(params, tokens())


def peak(run: Callable[[], Any]) -> int:
    with LiveBytes() as meter:
        run()
    return meter.peak


@each_model
@each_policy
def test_loss_and_gradients_with_dropout(make: Any, policy: Any) -> None:
    expected = backward(made(make))
    model = made(make)
    enable(model, policy=policy)
    with CountOps() as ops:
        torch.testing.assert_close(backward(model), expected, rtol=0, atol=0)
    assert ops["_softmax"] == 2 * LAYERS


@each_model
def test_dropout_is_active(make: Any) -> None:
    model = made(make)
    enable(model)
    torch.manual_seed(1)
    first, second = (model(input_ids=tokens(), labels=tokens()).loss for _ in range(2))
    assert first != second


@each_model
def test_memory(make: Any) -> None:
    plain, model = made(make), made(make)
    enable(model)
    assert peak(lambda: backward(model)) < 0.7 * peak(lambda: backward(plain))


def test_a_policy_saves_work() -> None:
    model = made(gpt2)
    enable(model, policy=policies.dots_with_no_batch_dims_saveable)
    with CountOps() as ops:
        backward(model)
    plain = made(gpt2)
    with CountOps() as plain_ops:
        backward(plain)
    assert ops["addmm"] == plain_ops["addmm"]
    assert ops["_softmax"] == 2 * plain_ops["_softmax"]


@each_model
@each_policy
def test_per_sample_gradients(make: Any, policy: Any) -> None:
    expected = per_sample(made(make, **NO_DROPOUT[make]))
    model = made(make, **NO_DROPOUT[make])
    enable(model, policy=policy)
    torch.testing.assert_close(per_sample(model), expected)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_per_sample_gradients_with_dropout(randomness: str) -> None:
    expected = per_sample(made(gpt2), randomness)
    model = made(gpt2)
    enable(model)
    torch.testing.assert_close(per_sample(model, randomness), expected)


def test_per_sample_gradients_take_less_memory() -> None:
    """Those of a soft prompt, for the gradients of all parameters would take most of it."""

    def run(model: nn.Module) -> None:
        def loss(prompt: Tensor) -> Tensor:
            return model(inputs_embeds=prompt[None]).logits.square().sum()

        vmap(grad(loss))(torch.ones(4, LENGTH, 16, dtype=torch.float64))

    plain, model = (made(gpt2, n_layer=12, **NO_DROPOUT[gpt2]) for _ in range(2))
    enable(model)
    assert peak(lambda: run(model)) < peak(lambda: run(plain)) / 2


@each_model
def test_the_library_alone_does_not_do_that(make: Any) -> None:
    model = made(make, **NO_DROPOUT[make])
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match=r"functorch|torch\.func|have vmap support"):
        per_sample(model)
    model.disable_input_require_grads()
    with pytest.raises(RuntimeError, match=r"functorch|torch\.func|have vmap support"):
        per_sample(model)


def test_the_switch_is_the_library_s() -> None:
    model = made(gpt2)
    assert not model.is_activation_checkpointing
    enable(model)
    assert model.is_activation_checkpointing
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    with CountOps() as ops:
        backward(model)
    assert ops["_softmax"] == LAYERS


def test_in_evaluation_it_is_off() -> None:
    model = made(gpt2).eval()
    enable(model)
    with CountOps() as ops:
        backward(model)
    assert ops["_softmax"] == LAYERS


def test_every_nth_layer() -> None:
    model = made(gpt2)
    enable(model, every=2)
    with CountOps() as ops:
        torch.testing.assert_close(backward(model), backward(made(gpt2)), rtol=0, atol=0)
    assert ops["_softmax"] == LAYERS + 2 + LAYERS  # and the plain model


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(way: Any) -> None:
    model = made(gpt2)
    enable(model, policy=policies.dots_saveable)
    with CountOps() as ops:
        torch.testing.assert_close(backward(way(model)), backward(made(gpt2)), rtol=0, atol=0)
    assert ops["_softmax"] == 3 * LAYERS


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = tokens(6)[i]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_trainer(tmp_path: Path) -> None:
    def train(change: Callable[[nn.Module], None]) -> tuple[dict[str, Tensor], list[float]]:
        model = made(gpt2)
        change(model)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Samples())
        trainer.train()
        assert trainer.state.global_step == 3
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 3
        return model.state_dict(), losses

    before = made(gpt2).state_dict()
    expected = train(lambda model: None)
    with CountOps() as ops:
        found = train(enable)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any(not torch.equal(before[n], p) for n, p in found[0].items())
    assert ops["_softmax"] == 3 * 2 * LAYERS


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Linear(2, 2), TypeError, "must be a PreTrainedModel of transformers; got Linear"),
        (3, TypeError, "got int"),
    ],
)
def test_other_models(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        enable(model)


def test_models_without_checkpointing() -> None:
    model = made(gpt2)
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match="GPT2LMHeadModel does not support gradient checkpointing"):
        enable(model)


def test_models_with_a_way_of_their_own() -> None:
    model = made(gpt2)
    model._set_gradient_checkpointing = lambda module, value=False: None
    with pytest.raises(ValueError, match="its own checkpointing mechanism"):
        enable(model)


@pytest.mark.parametrize("every", [0, 1.5])
def test_every_has_to_be_a_positive_number(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a positive number"):
        enable(made(gpt2), every=every)


@each_model
def test_prefix_tuning(make: Any) -> None:
    """The layers drop a cache under the library's switch: another loss, and no gradient, silently."""
    model = made(make)
    prefix = DynamicCache(config=model.config)
    keys = torch.ones(3, model.config.num_attention_heads, 2, 16 // model.config.num_attention_heads).double()
    for layer in range(LAYERS):
        prefix.update(keys, keys, layer)
    enable(model)
    enable(model, every=2)
    with pytest.raises(RematError, match=r"is given past_key_values of length 2, as in prefix tuning"):
        model(input_ids=tokens(), past_key_values=prefix)
    model(input_ids=tokens(), past_key_values=DynamicCache(config=model.config))
    model.eval()(input_ids=tokens(), past_key_values=prefix)


def test_t5_under_torch_func_needs_apply_remat() -> None:
    model = made(t5)
    enable(model)
    with pytest.raises(RematError, match=r"T5Block\.forward makes a tensor of shape .* that requires grad"):
        per_sample(model)
    model = made(t5)
    apply_remat(model, T5Block)
    torch.testing.assert_close(per_sample(model), per_sample(made(t5)))
