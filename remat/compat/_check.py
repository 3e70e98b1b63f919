"""What `checkpoint` says of arguments that it can't work with."""

from __future__ import annotations

import functools
from typing import Any

import torch

from remat._errors import shown
from remat._remat import remat, runs_later
from remat.policies import Policy


def check_flag(what: str, value: Any) -> None:
    if value not in (0, 1):  # as NumPy's bools are
        raise TypeError(f"checkpoint: {what} must be a bool; got {shown(value)}.")


def check_function(function: Any) -> None:
    if not callable(function):
        hint = " Write checkpoint(layer, x), not checkpoint(layer(x))." if isinstance(function, torch.Tensor) else ""
        raise TypeError(f"checkpoint: function must be callable; got {shown(function)}.{hint}")
    called = function.func if type(function) is functools.partial else function
    if runs_later(called):
        remat(function)  # raises


def check_contexts(context_fn: Any) -> tuple[Any, Any]:
    """The two contexts that `context_fn` returns."""
    if isinstance(context_fn, Policy):
        raise TypeError(
            f"checkpoint: context_fn got a policy. Write context_fn=functools.partial("
            f"create_selective_checkpoint_contexts, {context_fn!r})."
        )
    if not callable(context_fn):
        raise TypeError(
            f"checkpoint: context_fn must be a function that returns two context managers; got {shown(context_fn)}."
        )
    contexts = context_fn()
    try:
        forward, rerun = contexts
    except (TypeError, ValueError):
        raise TypeError(
            "checkpoint: context_fn must return two context managers, for the forward and for the rerun; got "
            f"{shown(contexts)}."
        ) from None
    return forward, rerun
