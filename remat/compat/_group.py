"""One recompute for several backward passes."""

from __future__ import annotations

import weakref
from typing import Any

from typing_extensions import Self

from remat import _torch_internals as internals

recomputed_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""What was recomputed under each `GraphExecGroup`, torch's too."""


class GraphExecGroup:
    """Within it, the backward passes together run a checkpointed region again at most once.

    They must not need the same saved tensor, as where the outputs of a region are differentiated one by one with
    respect to different things. It has no meaning for the reentrant variant.

    **Raises:** `RuntimeError` where one is entered inside of another; `CheckpointError` where two backward passes need
    the same saved tensor.

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
