"""Settings that a context manager makes: each thread and each context has its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from remat._errors import shown

early_stop: ContextVar[bool | None] = ContextVar("early_stop", default=None)
debug_enabled: ContextVar[bool | None] = ContextVar("debug_enabled", default=None)


def _checked(who: str, what: str, value: bool | None) -> bool | None:
    if value not in (True, False, None):
        raise TypeError(f"{who}: {what} must be a bool or None; got {shown(value)}.")
    return value


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool | None) -> Iterator[None]:
    """Set whether reruns stop once all that the backward needs is there, whatever the calls of `checkpoint` say.

    It has to be active in the forward alone, and holds for this thread and context.

    **Arguments:**

    - `enable`: whether they do; None leaves it to the argument of `checkpoint`.

    **Returns:** a context, within which it holds.

    **Raises:** `TypeError` for anything else.

    **Source:** `torch.utils.checkpoint.set_checkpoint_early_stop`.

    Examples:
        >>> import torch
        >>> from remat.compat import checkpoint, set_checkpoint_early_stop
        >>> x = torch.ones(3, requires_grad=True)
        >>> with set_checkpoint_early_stop(False):
        ...     y = checkpoint(torch.sin, x, use_reentrant=False)
        >>> y.sum().backward()
    """
    token = early_stop.set(_checked("set_checkpoint_early_stop", "enable", enable))
    try:
        yield
    finally:
        early_stop.reset(token)


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Set whether errors of the determinism check show the ops of both runs, whatever the calls of `checkpoint` say.

    It has to be active in the forward alone, and holds for this thread and context.

    **Arguments:**

    - `enabled`: whether they do; None leaves it to the argument `debug` of `checkpoint`.

    **Returns:** a context, within which it holds.

    **Raises:** `TypeError` for anything else.

    **Source:** `torch.utils.checkpoint.set_checkpoint_debug_enabled`.

    Examples:
        >>> import torch
        >>> from remat.compat import checkpoint, set_checkpoint_debug_enabled
        >>> x = torch.ones(3, requires_grad=True)
        >>> with set_checkpoint_debug_enabled(True):
        ...     y = checkpoint(torch.sin, x, use_reentrant=False)
        >>> y.sum().backward()
    """
    token = debug_enabled.set(_checked("set_checkpoint_debug_enabled", "enabled", enabled))
    try:
        yield
    finally:
        debug_enabled.reset(token)
