"""Placeholders for saved tensors, in the graph of a call of `remat.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from remat._layers import innermost
from remat._saved import held_by


class Owner(Protocol):
    """A call of `remat.checkpoint`, which owns the placeholders in its graph."""

    def unpack(self, index: int) -> Tensor:
        """Run the function again, and return the saved tensor with this number."""

    def held(self) -> Sequence[Any]:
        """The tensors that it holds for the rerun, or the objects that hooks have packed them into."""


class Holder:
    """The placeholder for one saved tensor."""

    __slots__ = ("__weakref__", "index", "owner")

    def __init__(self, owner: Owner, index: int) -> None:
        self.owner = owner
        self.index = index


def tensors_held(nodes: Iterable[Any]) -> list[Tensor]:
    """The plain tensors that autograd nodes hold, also through nested checkpoints. No function is run for this."""
    held = [h for node in nodes for h in held_by(node)]
    owners: set[Any] = set()
    for h in held:  # the loop appends to it
        if isinstance(h, Holder) and h.owner not in owners:
            owners.add(h.owner)
            held += h.owner.held()
    return [innermost(h) for h in held if isinstance(h, Tensor)]
