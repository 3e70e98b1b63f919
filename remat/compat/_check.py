"""What `checkpoint` says of arguments that it can't work with. It looks at most of them when a call has failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from remat._errors import shown
from remat._remat import remat, runs_later
from remat.policies import Policy


def check_flag(what: str, value: Any) -> None:
    if value not in (0, 1):  # as NumPy's bools are
        raise TypeError(f"checkpoint: {what} must be a bool; got {shown(value)}.")


def check_function(function: Any) -> None:
    if isinstance(function, torch.Tensor):
        raise TypeError(
            f"checkpoint: function must be callable; got {shown(function)}. Write checkpoint(layer, x), not "
            "checkpoint(layer(x))."
        )
    if not callable(function):
        raise TypeError(f"checkpoint: function must be callable; got {shown(function)}.")


def check_body(function: Any) -> None:
    """Raise for a function whose body runs after the call, as `remat` does."""
    called = function.func if type(function) is functools.partial else function
    if runs_later(called):
        remat(function)


def check_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> None:
    """Raise a better error than the one that a call has raised, where there is one."""
    check_function(function)
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        name = function.__qualname__
        raise TypeError(
            f"checkpoint: got a class of modules, {name}. Make a module of it: checkpoint({name}(...), x)."
        ) from error
    if "policy" in kwargs and "unexpected keyword argument 'policy'" in str(error):
        raise TypeError(f"checkpoint: {error}{hint(kwargs)}.") from error
    if not args and not kwargs and not _takes_nothing(function):
        raise TypeError(
            f"checkpoint: {error}. checkpoint calls the function at once. The decorator, jax.checkpoint, is "
            "remat.remat; with the options of checkpoint it is checkpoint(use_reentrant=False)."
        ) from error


def _takes_nothing(function: Any) -> bool:
    """Whether a function can be called without arguments."""
    try:
        inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).bind()
    except (TypeError, ValueError):  # ValueError: there is no signature, and no code that would have begun
        return False
    return True


def hint(kwargs: dict[str, Any]) -> str:
    """What is meant by a keyword of `jax.checkpoint`."""
    if "policy" not in kwargs:
        return ""
    return (
        ". jax.checkpoint is remat.remat. Here a policy is given by use_reentrant=False and "
        "context_fn=functools.partial(create_selective_checkpoint_contexts, policy)"
    )


def check_steps(functions: Iterable[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
    """The functions of `checkpoint_sequential`."""
    must = "checkpoint_sequential: functions must be a Sequential or an iterable of callables"
    try:
        steps = iter(functions.children() if isinstance(functions, torch.nn.Sequential) else functions)
    except TypeError:
        raise TypeError(f"{must}; got {shown(functions)}.") from None
    found = list(steps)
    for step in found:
        if not callable(step):
            raise TypeError(f"{must}; got {shown(step)} in a {type(functions).__name__}.")
    if not found:
        raise ValueError("checkpoint_sequential: functions is empty: there is nothing to run.")
    return found


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
