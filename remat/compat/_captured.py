"""Functions, taken apart for as long as a call is remembered: they hold their cells, and so what it gave."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._frozen import Freezer, Table, Thawer, cell_contents, parts, written_names


def _is_function(obj: Any) -> bool:
    """Whether an object is a function, or made of one."""
    return isinstance(obj, types.FunctionType) or bool(parts(obj))


class _Closure:
    """A function whose cells hold neither functions nor what it assigns itself, taken apart."""

    __slots__ = ("_contents", "_fun", "_tensors")

    def __init__(self, fun: types.FunctionType, contents: list[Any], tensors: list[tuple[int, int]]) -> None:
        """`tensors`: of each tensor in a cell, the number of the cell and the position among the operands."""
        self._fun = fun.__code__, fun.__globals__, fun.__name__
        self._contents = contents
        self._tensors = tensors
        for cell, _ in tensors:
            contents[cell] = None

    def __call__(self, operands: Sequence[Tensor]) -> types.FunctionType:
        contents = list(self._contents)
        for cell, position in self._tensors:
            contents[cell] = operands[position]
        return types.FunctionType(*self._fun, None, tuple(map(types.CellType, contents)))


def _simple_contents(fun: types.FunctionType) -> list[Any] | None:
    """What the cells hold of a function that `_Closure` is enough for."""
    if fun.__defaults__ or fun.__kwdefaults__ or fun.__dict__ or written_names(fun.__code__, "STORE_DEREF"):
        return None
    try:
        contents = [cell.cell_contents for cell in fun.__closure__ or ()]
    except ValueError:  # an empty cell
        return None
    for content in contents:
        if not isinstance(content, _SIMPLE) and (isinstance(content, tuple) or parts(content) or callable(content)):
            return None
    return contents


_SIMPLE = (Tensor, torch.nn.Module, int, float, str, type, types.ModuleType, types.BuiltinFunctionType)


class Captured:
    """A function and others that it is given, with what they capture. Neither they nor tensors in cells are held.

    **Attributes:**

    - `tensors`: those in cells, until `freeze`.
    """

    __slots__ = ("_contents", "_fun", "_given", "_table", "tensors")

    def __init__(self, fun: Any, leaves: list[Any]) -> None:
        self._fun = fun
        self._table: Table | None = None
        self._given: list[Any] = []
        self._contents: Any = None
        functions = [x for x in leaves if _is_function(x)]
        if not functions:
            self._contents = _simple_contents(fun) if type(fun) is types.FunctionType else None
            if not _is_function(fun):
                self._contents = []
        if self._contents is not None:
            self.tensors = [content for content in self._contents if isinstance(content, Tensor)]
        else:
            self._given = [fun, *functions]
            self._contents = cell_contents(self._given)
            self.tensors = _tensors((*self._given, *(content for _, content in self._contents.values())))

    def freeze(self, leaves: list[Any], tensors: Sequence[Tensor]) -> None:
        """Let go of functions: they are put together again.

        **Arguments:**

        - `leaves`: what was given. The functions among them are replaced.
        - `tensors`: the tensors that a rerun will be given.
        """
        if self._given:
            freezer = Freezer(self._contents, {id(t): i for i, t in enumerate(tensors)})
            self._fun = freezer(self._fun)
            for i, leaf in enumerate(leaves):
                if _is_function(leaf):
                    leaves[i] = freezer(leaf)
            self._table = freezer.table
        elif self._contents:
            first = len(tensors) - len(self.tensors)
            cells = [i for i, content in enumerate(self._contents) if isinstance(content, Tensor)]
            self._fun = _Closure(self._fun, self._contents, [(cell, first + i) for i, cell in enumerate(cells)])
        self._given, self._contents, self.tensors = [], None, []

    def thawed(self, leaves: list[Any], tensors: Sequence[Tensor]) -> tuple[Any, list[Any], Thawer | None]:
        """The function and the leaves, with `tensors` in the place of those in cells; and what put them together."""
        if self._table is None:
            fun = self._fun
            return fun(tensors) if type(fun) is _Closure else fun, list(leaves), None
        thaw = Thawer(self._table, tensors)
        return thaw(self._fun), [*map(thaw, leaves)], thaw


def _tensors(objects: Iterable[Any]) -> list[Tensor]:
    """The tensors among objects, and among what callables and tuples are put together from."""
    found = []
    todo = list(objects)
    for obj in todo:
        if isinstance(obj, Tensor):
            found.append(obj)
        else:
            todo += obj if isinstance(obj, tuple) else parts(obj)
    return found
