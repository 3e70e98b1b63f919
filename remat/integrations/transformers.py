"""Hugging Face Transformers: the library's own switch for gradient checkpointing, with our `checkpoint` behind it."""

from __future__ import annotations

import inspect
from typing import Any

from remat.nn import checkpoint_with
from remat.policies._policy import PolicyLike

__all__ = ["enable"]


def enable(model: Any, *, policy: PolicyLike = None, every: int = 1) -> None:
    """Turn on gradient checkpointing in a model of Transformers, done by `remat.checkpoint`.

    It is the library's own switch, so all else is as with `model.activation_checkpointing_enable()`, which was called
    `gradient_checkpointing_enable` before: while the model is in training mode its layers run again on backward, and
    `model.activation_checkpointing_disable()` ends it. But the model works under the transforms of `torch.func` too,
    and a policy can say what the layers keep.

    When the library turns its switch on again, its own function takes the place of ours: leave `gradient_checkpointing`
    of `TrainingArguments` at False.

    **Arguments:**

    - `model`: a `PreTrainedModel`.
    - `policy`: which results of ops are kept instead of computed again, as for `remat`; None keeps nothing.
    - `every`: checkpoint the first layer and each `every`-th after it.

    **Raises:** `TypeError` for what is no model of the library; `ValueError` for a model that has no gradient
    checkpointing, or a way of its own.

    Examples:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from remat import policies
        >>> from remat.integrations import transformers
        >>> model = GPT2Model(GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=10, bos_token_id=0, eos_token_id=0))
        >>> transformers.enable(model, policy=policies.dots_with_no_batch_dims_saveable)
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
        raise ValueError(f"enable: {kind} has a way of its own to checkpoint. Use remat.nn.apply_remat.")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"enable: every must be a positive number; got {every!r}.")
    options = {} if every == 1 else {"every_n_layers": every}
    switch(enable=True, gradient_checkpointing_func=checkpoint_with(policy), **options)
