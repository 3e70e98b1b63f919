"""Settings of `checkpoint` that hold within a context, and `GraphExecGroup`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

from remat import _torch_internals as internals
from remat._errors import shown

early_stop: ContextVar[bool | None] = ContextVar("early_stop", default=None)
debug_enabled: ContextVar[bool | None] = ContextVar("debug_enabled", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar[bool | None], what: str, value: bool | None) -> Iterator[None]:
    if value not in (True, False, None):
        raise TypeError(f"{what} must be a bool or None; got {shown(value)}.")
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def set_checkpoint_early_stop(enable: bool | None) -> contextlib.AbstractContextManager[None]:
    """Set whether reruns stop early. It overrides the argument `early_stop` of `checkpoint`.

    It has to be active only in the forward, and holds for the current thread and context.

    **Arguments:**

    - `enable`: whether they stop early; with None, the argument decides.

    **Returns:** a context manager.

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
    return _set(early_stop, "set_checkpoint_early_stop: enable", enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> contextlib.AbstractContextManager[None]:
    """Set whether errors list the ops of both runs. It overrides the argument `debug` of `checkpoint`.

    It has to be active only in the forward, and holds for the current thread and context.

    **Arguments:**

    - `enabled`: whether they do; with None, the argument decides.

    **Returns:** a context manager.

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
    return _set(debug_enabled, "set_checkpoint_debug_enabled: enabled", enabled)


recomputed_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""The tensors recomputed under each `GraphExecGroup`, also torch's."""


class GraphExecGroup:
    """A context in which several backward passes together rerun a checkpointed region at most once.

    No two of them may need the same saved tensor. The reentrant variant ignores the context.

    **Raises:** `RuntimeError` if one is entered inside another; `CheckpointError` if two backward passes need the same
    saved tensor.

    **Source:** `torch.utils.checkpoint.GraphExecGroup`.

    Examples:
        >>> import torch
        >>> from remat.compat import GraphExecGroup, checkpoint
        >>> x = torch.ones(3, requires_grad=True)
        >>> y, z = checkpoint(lambda x: (x.sin(), x.cos()), x, use_reentrant=False)
        >>> with GraphExecGroup():
        ...     y.sum().backward()
        ...     z.sum().backward()
    """

    def __enter__(self) -> Self:
        current = internals.graph_exec_group()
        if current is not None:
            raise RuntimeError(f"GraphExecGroup contexts cannot be nested. Already inside group {current}")
        internals.set_graph_exec_group(self)
        return self

    def __exit__(self, *args: object) -> None:
        internals.set_graph_exec_group(None)
        for recomputed in recomputed_in.pop(self, []):
            recomputed.clear()
