"""How to compute, after all, what a rerun has skipped."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import RandomState
from remat._ops import Layout, OpFacts, bytes_of, flat

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_numbers = itertools.count()


class Cell:
    """What a recipe reads or computes.

    **Attributes:**

    - `storage`: where the value is; None where it is to be computed.
    - `recipe`: how.
    """

    __slots__ = ("__weakref__", "recipe", "storage")

    def __init__(self, storage: Any, recipe: Recipe | None = None) -> None:
        self.storage = storage
        self.recipe = recipe


class Operand(NamedTuple):
    """A tensor that a recipe reads."""

    cell: Cell
    layout: Layout


class Recipe:
    """A call of an op that was skipped, with an `Operand` in the place of each tensor."""

    def __init__(self, facts: OpFacts, args: Any, kwargs: dict[str, Any], before: RandomState | None) -> None:
        """A call. `before`: the state of the generators that it would have drawn from."""
        self.number = next(_numbers)
        self._facts, self._args, self._kwargs, self._before = facts, args, kwargs, before
        self._dtype = torch.get_default_dtype()
        self._outputs: dict[int, weakref.ref[Cell]] = {}
        self._writes: dict[int, weakref.ref[Cell]] = {}
        self.changes: list[Cell] = []
        """What it writes to: that is copied before."""

    def output(self, i: int) -> Cell:
        """The value of the i-th tensor that it returns."""
        cell = Cell(None, self)
        self._outputs[i] = weakref.ref(cell)
        return cell

    def write(self, i: int) -> Cell:
        """The value of the i-th tensor that it writes to."""
        cell = Cell(None, self)
        self._writes[i] = weakref.ref(cell)
        return cell

    def reads(self) -> Iterator[Cell]:
        """What has to be there before it can run."""
        for x in (*self._args, *self._kwargs.values()):
            yield from (o.cell for o in (x if isinstance(x, list) else (x,)) if isinstance(o, Operand))

    def run(self) -> None:
        """Compute all of its cells."""
        memory = {id(cell): cell.storage for cell in self.reads()}
        for cell in self.changes:
            memory[id(cell)] = bytes_of(cell.storage).clone().untyped_storage()
        args = [_filled(x, memory) for x in self._args]
        kwargs = {k: _filled(x, memory) for k, x in self._kwargs.items()}
        draws = _NOTHING if self._before is None else self._before.replayed()
        now = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with draws, internals.without_autocast(), internals.views_resolved():
                out = self._facts.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(now)
        _fill(self._outputs, flat(out))
        _fill(self._writes, self._facts.written(args, kwargs))


def _filled(x: Any, memory: dict[int, Any]) -> Any:
    if isinstance(x, Operand):
        return x.layout.over(memory[id(x.cell)])
    return [_filled(i, memory) for i in x] if isinstance(x, list) else x


def _fill(cells: dict[int, weakref.ref[Cell]], results: Any) -> None:
    for i, ref in cells.items():
        if (cell := ref()) is not None and isinstance(results[i], Tensor):
            cell.storage, cell.recipe = results[i].untyped_storage(), None


def compute(cells: Iterable[Cell]) -> None:
    """Compute the values of cells, and all that they are computed from."""
    recipes: dict[int, Recipe] = {}
    todo = [*cells]
    while todo:
        recipe = todo.pop().recipe
        if recipe is not None and recipe.number not in recipes:
            recipes[recipe.number] = recipe
            todo += recipe.reads()
    for number in sorted(recipes):
        recipes[number].run()
