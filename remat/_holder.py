"""What the graph of a checkpoint keeps in the place of the tensors that it would save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from remat import _torch_internals as internals


class Owner(Protocol):
    """One call under a checkpoint."""

    def unpack(self, index: int) -> Tensor:
        """The saved tensor with this number: the function runs again for it."""

    def held(self) -> Sequence[Any]:
        """What it holds to run again: tensors, or what hooks have put in their place."""


class Holder:
    """Stands for a saved tensor."""

    __slots__ = ("__weakref__", "index", "owner")

    def __init__(self, owner: Owner, index: int) -> None:
        self.owner = owner
        self.index = index


def tensors_held(nodes: Iterable[Any]) -> list[Tensor]:
    """The plain tensors that autograd nodes hold, themselves or by checkpoints inside. No function runs for it."""
    held = [h for node in nodes for h in internals.held_by(node)]
    owners: set[Any] = set()
    for h in held:  # it grows
        if isinstance(h, Holder) and h.owner not in owners:
            owners.add(h.owner)
            held += h.owner.held()
    return [internals.innermost(h) for h in held if isinstance(h, Tensor)]
