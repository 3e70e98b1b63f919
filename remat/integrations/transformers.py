"""Hugging Face Transformers: the library's own switch for gradient checkpointing, with `remat.checkpoint`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from remat._errors import RematError
from remat.nn import checkpoint_with
from remat.policies._policy import PolicyLike

__all__ = ["enable"]

_CACHE = (
    "remat: {} is given past_key_values of length {}, as in prefix tuning, and its layers drop these in training with "
    "gradient checkpointing. Use prompt tuning or LoRA, or train without checkpointing."
)


def enable(model: Any, *, policy: PolicyLike = None, every: int = 1) -> None:
    """Turn on gradient checkpointing in a model of Transformers, by `remat.checkpoint`.

    This uses the library's own switch, `model.activation_checkpointing_enable()` (earlier called
    `gradient_checkpointing_enable`). While the model is in training mode, its layers run again in the backward pass.
    `model.activation_checkpointing_disable()` turns it off. With `remat.checkpoint`, the model also works under the
    transforms of `torch.func`, and a policy can keep some results of the layers.

    If the library turns its switch on again, it replaces our function by its own. So leave `gradient_checkpointing` of
    `TrainingArguments` at False.

    **Arguments:**

    - `model`: a `PreTrainedModel`.
    - `policy`: which results of ops are kept instead of recomputed, as for `remat`; None keeps nothing.
    - `every`: checkpoint the first layer and each `every`-th after it.

    In training, a filled cache that the model is given, as by prefix tuning, is a `RematError`: its layers drop it.

    **Raises:** `TypeError` if `model` is no model of the library; `ValueError` if the model has no gradient
    checkpointing, or has its own mechanism.

    Examples:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from remat import policies
        >>> from remat.integrations import transformers
        >>> tokens = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": 0}
        >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=2, **tokens))
        >>> transformers.enable(model, policy=policies.dots_saveable)
        >>> model.is_activation_checkpointing
        True
    """
    kind = type(model).__name__
    switch = getattr(model, "_set_gradient_checkpointing", None)
    if switch is None:
        raise TypeError(f"enable: model must be a PreTrainedModel of transformers; got {kind}.")
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"enable: {kind} does not support gradient checkpointing. Use remat.nn.apply_remat.")
    if "gradient_checkpointing_func" not in inspect.signature(switch).parameters:
        raise ValueError(f"enable: {kind} has its own checkpointing mechanism. Use remat.nn.apply_remat.")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"enable: every must be a positive number; got {every!r}.")
    options = {} if every == 1 else {"every_n_layers": every}
    switch(enable=True, gradient_checkpointing_func=checkpoint_with(policy), **options)
    for part in model.modules():  # peft may call an inner model
        if hasattr(part, switch.__name__) and _refuse_cache not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def _refuse_cache(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook. With checkpointing, the library's layers drop a cache that the model is given, silently."""
    del args
    cache = kwargs.get("past_key_values")
    if cache is None or not (model.training and torch.is_grad_enabled()):
        return
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache)
    if length and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise RematError(_CACHE.format(type(model).__name__, length))
