"""Placeholders for saved tensors, in the graph of a call of `remat.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from remat._layers import innermost
from remat._saved import held_by


class Holder:
    """The placeholder for one saved tensor."""

    __slots__ = ("__weakref__", "index", "owner")

    def __init__(self, owner: Any, index: int) -> None:
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
