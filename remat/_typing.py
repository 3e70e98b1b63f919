"""Protocols that modules share."""

from __future__ import annotations

from collections.abc import Container, Sequence
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
    leaves: frozenset[int]
    """The operands that were differentiated in the forward, at any level."""
    hooked: frozenset[int]
    """The levels of the tensors that the function has put hooks on."""

    @property
    def hands_on(self) -> bool:
        """Whether backward passes nest here, so that they hand their cotangents on."""

    @property
    def needs_level(self) -> bool:
        """Whether reruns have to be under a transform, as the forward was."""

    def __call__(self, *operands: Tensor) -> list[Any]:
        """The results of the function for some operands."""

    def prove(self, values: Sequence[Tensor], operands: Sequence[Tensor], since: int) -> Container[int]:
        """See that the results of the forward depend on nothing but operands, and on which. Raises `Stranger`."""

    def made_by_rerun(self, leaf: Tensor) -> bool:
        """Whether a rerun has made a leaf itself."""

    def compare_reached(self, operands: AbstractSet[int], complete: bool) -> None:
        """See that a rerun depends on the operands that the forward depended on. `complete`: of all its results."""

    def settle(self) -> None:
        """Called when the results of a rerun are gone and only its graph is left."""

    def clean(self) -> None:
        """Called when the rerun's graph is gone: nothing of the rerun may be left."""
