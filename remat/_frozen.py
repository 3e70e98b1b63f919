"""Functions as they were: their cells, defaults and parts, without the functions themselves.

A call that is remembered must not hold the function: its cells go on to hold other things, the result of the call for
one, and that would be a cycle. `Freezer` takes a function apart, `Thawer` puts it together with operands in the place
of tensors.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import PURITY, CheckpointError


@functools.lru_cache(1000)
def written_names(code: types.CodeType, opcode: str) -> frozenset[str]:
    """The names that the code, or a function defined in it, assigns to: of cells (STORE_DEREF) or STORE_GLOBAL."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname == opcode}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = written_names(const, opcode)
            names |= inner & set(const.co_freevars) if opcode == "STORE_DEREF" else inner
    return frozenset(names)


ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


def parts(obj: Any) -> tuple[Any, ...]:
    """The objects that a callable is put together from, but for the contents of cells."""
    kind = type(obj)
    if kind is types.FunctionType:
        return (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values())
    if kind is types.MethodType:
        return (obj.__func__, obj.__self__)
    if issubclass(kind, functools.partial):
        return (obj.func, *obj.args, *obj.keywords.values())
    if hasattr(kind, "__remat_maker__"):
        return (obj.__wrapped__,)
    return ()


def _is_opaque(function: types.FunctionType) -> bool:
    """A function that torch.compile has made belongs to the compiler. Torch's own are known by who they are."""
    name = function.__name__
    return internals.is_compiled(function) or any(vars(s).get(name) is function for s in _OF_TORCH)


_OF_TORCH = (torch, torch.nn.functional, Tensor)


def cell_contents(roots: Iterable[Any]) -> dict[int, tuple[types.CellType, Any]]:
    """By identity, the cells that the roots and the callables in them read but do not write, with their contents."""
    found: dict[int, tuple[types.CellType, Any]] = {}
    todo = list(roots)
    while todo:
        obj = todo.pop()
        if isinstance(obj, types.FunctionType):
            if _is_opaque(obj):
                continue
            todo += parts(obj)
            if not obj.__closure__:
                continue
            written = written_names(obj.__code__, "STORE_DEREF")
            for name, cell in zip(obj.__code__.co_freevars, obj.__closure__, strict=True):
                if id(cell) not in found and name not in written:
                    with contextlib.suppress(ValueError):  # an empty cell
                        found[id(cell)] = cell, cell.cell_contents
                        todo.append(cell.cell_contents)
        elif isinstance(obj, tuple):
            todo += obj
        else:
            todo += parts(obj)
    return found


class Frozen:
    """What a `Freezer` makes of something that has to be put together again."""


class _Gone(Tensor):
    """In the place of a tensor that is gone: no torch call has read its values, but perhaps that it is there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _TOLD:
            shape = next((f" of shape {list(t.shape)}" for t in args if isinstance(t, _Gone)), "")
            raise CheckpointError(f"remat: {name} in a rerun got a tensor{shape} {_REPLACED} {PURITY}")
        return super().__torch_function__(func, types, args, kwargs)


_TOLD = {"__get__", "__hash__", "__len__", "dim", "element_size", "is_complex", "is_floating_point", "numel", "size"}
_REPLACED = (
    "from an attribute, a dict or a list, which its forward run replaced without reading it: the values are gone."
)


class Held(Frozen):
    """A tensor: the operand at `position`, or no operand (None)."""

    def __init__(self, tensor: Tensor, position: int | None) -> None:
        self.original = weakref.ref(tensor)
        self.position = position
        with internals.DisableTorchFunction():  # nobody has read it
            self._meta = () if tensor.is_nested else tensor.shape, tensor.dtype, tensor.device

    def operand(self, operands: Sequence[Any]) -> Tensor | None:
        """The operand, or the tensor itself, if it still lives."""
        return self.original() if self.position is None else operands[self.position]

    def stand_in(self) -> Tensor:
        """What to find in the place of one that is gone: to compute with it is an error."""
        shape, dtype, device = self._meta
        with internals.DisableTorchFunction(), internals.DisableTorchDispatch():  # the function has not called it
            return torch.empty((), dtype=dtype, device=device).expand(shape).as_subclass(_Gone)


@dataclass
class _Made(Frozen):
    """The result of `maker(*args, **kwargs)`: a tuple, a partial, a method, a remat'd function."""

    maker: Any
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass
class _Function:
    """A function, taken apart."""

    code: types.CodeType
    globals: dict[str, Any]
    name: str
    defaults: Any
    kwdefaults: dict[str, Any]
    attributes: dict[str, Any]
    cells: list[Any]  # keys of contents, or cells that are shared with the function


@dataclass
class _Reference(Frozen):
    """A function, by its key: functions may refer to each other, and what is frozen has no cycles."""

    key: int


@dataclass
class Table:
    """The functions, and the contents of their cells, that frozen things refer to."""

    functions: dict[int, _Function] = field(default_factory=dict)
    contents: dict[int, Any] = field(default_factory=dict)
    has_cycles: bool = False
    """Whether a function refers to itself, maybe by others."""


class Freezer:
    """Takes things apart: `freeze(obj)` is `obj` where there is nothing to it."""

    def __init__(self, contents: dict[int, tuple[types.CellType, Any]], position: dict[int, int]) -> None:
        self._before = contents
        self._position = position
        self._begun: set[int] = set()
        self.table = Table()

    def __call__(self, obj: Any) -> Any:
        if type(obj) in ATOMS:
            return obj
        if isinstance(obj, Tensor):
            return Held(obj, self._position.get(id(obj)))
        if isinstance(obj, types.FunctionType):
            return obj if _is_opaque(obj) else self._function(obj)
        if isinstance(obj, tuple):
            items = [self(x) for x in obj]
            maker = type(obj) if hasattr(obj, "_fields") else _tuple
            return _Made(maker, items, {}) if any(isinstance(x, Frozen) for x in items) else obj
        if isinstance(obj, types.MethodType):
            function = self(obj.__func__)
            return _Made(types.MethodType, [function, obj.__self__], {}) if isinstance(function, Frozen) else obj
        if isinstance(obj, functools.partial):
            args = [self(x) for x in (obj.func, *obj.args)]
            kwargs = {k: self(v) for k, v in obj.keywords.items()}
            anything = any(isinstance(x, Frozen) for x in (*args, *kwargs.values()))
            return _Made(functools.partial, args, kwargs) if anything else obj
        if hasattr(type(obj), "__remat_maker__"):
            function = self(obj.__wrapped__)
            return _Made(obj.__remat_maker__(), [function], {}) if isinstance(function, Frozen) else obj
        return obj

    def _function(self, old: types.FunctionType) -> Any:
        key = id(old)
        if key in self._begun:
            self.table.has_cycles |= key not in self.table.functions
            return _Reference(key)
        defaults = self(old.__defaults__)
        kwdefaults = {k: self(v) for k, v in (old.__kwdefaults__ or {}).items()}
        if not old.__closure__ and not any(isinstance(x, Frozen) for x in (defaults, *kwdefaults.values())):
            return old
        self._begun.add(key)
        cells: list[Any] = []
        for cell in old.__closure__ or ():
            if id(cell) not in self._before:
                cells.append(cell)
                continue
            cells.append(id(cell))
            if id(cell) not in self.table.contents:
                self.table.contents[id(cell)] = None
                self.table.contents[id(cell)] = self(self._before[id(cell)][1])
        self.table.functions[key] = _Function(
            old.__code__, old.__globals__, old.__name__, defaults, kwdefaults, dict(vars(old)), cells
        )
        return _Reference(key)


def _tuple(*items: Any) -> tuple[Any, ...]:
    return items


class Thawer:
    """Puts things together again, each function once."""

    def __init__(self, table: Table, operands: Sequence[Any]) -> None:
        self._table = table
        self._operands = operands
        self._cells: dict[int, types.CellType] = {}
        self._functions: dict[int, types.FunctionType] = {}

    def __call__(self, frozen: Any) -> Any:
        if not isinstance(frozen, Frozen):
            return frozen
        if isinstance(frozen, Held):
            return frozen.operand(self._operands)
        if isinstance(frozen, _Reference):
            return self._functions.get(frozen.key) or self._function(frozen.key)
        assert isinstance(frozen, _Made)
        kwargs = {k: self(v) for k, v in frozen.kwargs.items()}
        return frozen.maker(*map(self, frozen.args), **kwargs)

    def _function(self, key: int) -> types.FunctionType:
        old = self._table.functions[key]
        fresh = [c for c in old.cells if isinstance(c, int) and c not in self._cells]
        self._cells.update((c, types.CellType()) for c in fresh)
        cells = tuple(self._cells[c] if isinstance(c, int) else c for c in old.cells)
        new = types.FunctionType(old.code, old.globals, old.name, self(old.defaults), cells or None)
        new.__kwdefaults__ = {k: self(v) for k, v in old.kwdefaults.items()} or None
        new.__dict__.update(old.attributes)
        self._functions[key] = new
        for c in fresh:
            self._cells[c].cell_contents = self(self._table.contents[c])
        return new

    def empty(self) -> None:
        """Break cycles of new functions. Others may be called later: by a hook that the function has set, say."""
        for cell in self._cells.values() if self._table.has_cycles else ():
            with contextlib.suppress(ValueError):  # it is empty already
                del cell.cell_contents
        self._cells.clear()
        self._functions.clear()
