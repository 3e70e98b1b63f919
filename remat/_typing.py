"""Protocols that modules share."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from torch import Tensor


class RepeatableCall(Protocol):
    """A call of a user's function, as the node that saves its operands knows it."""

    name: str
    random: Any
    """The draws to repeat, None where there were none."""
    tape: Any
    """What a policy keeps, None without one."""
    level: int | None
    """During a rerun: the level whose derivative it is for, 0 below all transforms."""
    last_rerun: bool
    """Where there is a tape: whether the rerun that is about to come is known to be the last."""

    @property
    def hooked(self) -> AbstractSet[int]:
        """The levels of the tensors that the function has put hooks on."""

    @property
    def needs_level(self) -> bool:
        """Whether reruns have to be under a transform, as the forward was."""

    def __call__(self, *operands: Tensor) -> list[Any]:
        """The results of the function for some operands."""

    def settle(self) -> None:
        """Called when the results of a rerun are gone and only its graph is left."""

    def clean(self) -> None:
        """Called when the rerun's graph is gone."""

    def finish(self) -> None:
        """Called when the derivative is there."""


class OwnGraph(Protocol):
    """The native graph of a call, as the node over it knows it."""

    may_skip: bool
    """Whether `skip` does anything: no other result has a part in the graph."""

    def operands(self) -> list[Tensor]:
        """What the function was given and found. Raises where that was changed in place."""

    def skip(self) -> None:
        """Called where the running backward pass differentiates nothing in this graph."""
