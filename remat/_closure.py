"""Capture what a function closes over at the call, and rebuild the function for a rerun.

A rerun comes later, when a loop variable may have another value. So the function is taken apart at the call: its cells,
defaults, partial arguments and bound `self`, and all functions in those. A rerun puts the parts together again, with
operands in place of tensors. The parts do not hold the function itself. Its cells may later hold the result of the
call, and that would be a reference cycle.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type})
_OF_TORCH = frozenset(
    f for space in (torch, torch.nn.functional, Tensor) for f in vars(space).values() if type(f) is types.FunctionType
)
_EMPTY: Any = object()


class Operand:
    """Stands for the operand at `index`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Made:
    """Stands for `maker(*args, **kwargs)`: a tuple, a partial, a method, a remat'd function."""

    __slots__ = ("args", "kwargs", "maker")

    def __init__(self, maker: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.maker = maker
        self.args = args
        self.kwargs = kwargs


class _Reference:
    """Stands for the function with this key. Keys avoid cycles of functions that refer to each other."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key


class _Function:
    """A function, taken apart. `cells` are keys of cell contents."""

    __slots__ = ("annotations", "attributes", "cells", "code", "defaults", "globals", "kwdefaults", "names")

    def __init__(
        self,
        old: types.FunctionType,
        defaults: Any,
        kwdefaults: dict[str, Any],
        attributes: dict[str, Any],
        cells: list[int],
    ) -> None:
        self.code = old.__code__
        self.globals = old.__globals__
        self.names = old.__name__, old.__qualname__, old.__doc__
        self.annotations = old.__annotations__
        self.attributes = attributes
        self.defaults = defaults
        self.kwdefaults = kwdefaults
        self.cells = cells


_PARTS = (Operand, _Made, _Reference)


def is_part(obj: Any) -> bool:
    """Whether `obj` stands for an object that a `Rebuilder` has to make."""
    return type(obj) in _PARTS


def parts_of(obj: Any) -> tuple[Any, ...]:
    """The objects that a callable is made of, the contents of its cells among them."""
    kind = type(obj)
    if kind is types.FunctionType:
        cells = [c.cell_contents for c in obj.__closure__ or () if _is_full(c)]
        return (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values(), *cells)
    if kind is types.MethodType:
        return (obj.__func__, obj.__self__)
    if issubclass(kind, functools.partial):
        return (obj.func, *obj.args, *obj.keywords.values())
    return (obj.__wrapped__,) if hasattr(kind, "__remat_maker__") else ()


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_opaque(function: types.FunctionType) -> bool:
    """Whether a function belongs to torch or its compiler, so that no object of the user is in it."""
    return function in _OF_TORCH or internals.is_compiled(function)


class Closure:
    """Functions and other objects, taken apart.

    **Attributes:**

    - `objects`: the functions and other objects that were met: where to search for more tensors. See `close`.
    """

    def __init__(self, operand_of: Callable[[Tensor], Any]) -> None:
        """`operand_of`: gives the `Operand` that stands for a tensor, or the tensor if it is not an operand."""
        self._operand_of = operand_of
        self._functions: dict[int, _Function] = {}
        self._contents: dict[int, Any] = {}
        self._whole: set[int] = set()  # functions with nothing to take apart
        self._is_recursive = False
        self._begun: dict[int, Any] = {}  # kept alive, because keys are identities
        self.objects: list[Any] = []

    def take_apart(self, obj: Any) -> Any:
        """Return the part that stands for `obj`, or `obj` itself if no part of it is an operand or may change."""
        kind = type(obj)
        if kind in ATOMS:
            return obj
        if isinstance(obj, Tensor):
            return self._operand_of(obj)
        if kind is types.FunctionType:
            if not (obj.__closure__ or obj.__defaults__ or obj.__kwdefaults__):
                self.objects.append(obj)
                return obj
            return obj if _is_opaque(obj) else self._function(obj)
        if kind is tuple or (isinstance(obj, tuple) and hasattr(obj, "_fields")):
            return self._made(kind if hasattr(obj, "_fields") else _tuple, obj, obj, {})
        if kind is types.MethodType:
            return self._made(types.MethodType, obj, (obj.__func__, obj.__self__), {})
        if isinstance(obj, functools.partial):
            return self._made(functools.partial, obj, (obj.func, *obj.args), obj.keywords)
        if hasattr(kind, "__remat_maker__"):
            return self._made(obj.__remat_maker__(), obj, (obj.__wrapped__,), {})
        self.objects.append(obj)
        return obj

    def _made(self, maker: Callable[..., Any], obj: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        new_args = [self.take_apart(x) for x in args]
        new_kwargs = {k: self.take_apart(v) for k, v in kwargs.items()} if kwargs else kwargs
        if any(map(is_part, new_args)) or any(map(is_part, new_kwargs.values())):
            return _Made(maker, new_args, new_kwargs)
        return obj

    def _function(self, old: types.FunctionType) -> Any:
        key = id(old)
        if key in self._functions:
            return _Reference(key)
        if key in self._whole:
            return old
        if key in self._begun:
            self._is_recursive = True
            return _Reference(key)
        self._begun[key] = old
        self.objects.append(old)
        defaults = self.take_apart(old.__defaults__) if old.__defaults__ else None
        kwdefaults = {k: self.take_apart(v) for k, v in old.__kwdefaults__.items()} if old.__kwdefaults__ else {}
        attributes = {k: self.take_apart(v) for k, v in vars(old).items()}
        cells = []
        for cell in old.__closure__ or ():
            cells.append(id(cell))
            if id(cell) not in self._contents:
                self._begun[id(cell)] = cell
                self._contents[id(cell)] = _EMPTY
                if _is_full(cell):
                    self._contents[id(cell)] = self.take_apart(cell.cell_contents)
        if not cells and not is_part(defaults) and not any(map(is_part, kwdefaults.values())):
            self._whole.add(key)
            return old
        self._functions[key] = _Function(old, defaults, kwdefaults, attributes, cells)
        return _Reference(key)

    def flags(self) -> dict[int, types.CellType]:
        """The cells that hold a plain value: a context around a rerun may set a flag in one."""
        cells = (c for c in self._begun.values() if type(c) is types.CellType)
        return {id(c): c for c in cells if type(self._contents[id(c)]) in ATOMS}

    def close(self) -> list[Any]:
        """Free what only `take_apart` needs. Returns the `objects`."""
        objects, self.objects = self.objects, []
        self._begun.clear()
        del self._operand_of
        return objects

    def rebuilder(self, operands: Sequence[Any]) -> Rebuilder:
        """A `Rebuilder` for one rerun with these operands."""
        return Rebuilder(self._functions, self._contents, self._is_recursive, operands)


def _tuple(*items: Any) -> tuple[Any, ...]:
    return items


class Rebuilder:
    """Puts functions together again for one rerun, each once, with operands in place of tensors."""

    def __init__(
        self, functions: dict[int, _Function], contents: dict[int, Any], recursive: bool, operands: Sequence[Any]
    ) -> None:
        self._old = functions
        self._contents = contents
        self._is_recursive = recursive
        self._operands = operands
        self._cells: dict[int, types.CellType] = {}
        self._functions: dict[int, types.FunctionType] = {}

    def keep(self, cells: dict[int, types.CellType]) -> None:
        """Use these existing cells, not new ones."""
        self._cells.update(cells)

    def __call__(self, part: Any) -> Any:
        """Make the object that `part` stands for."""
        kind = type(part)
        if kind is Operand:
            return self._operands[part.index]
        if kind is _Reference:
            return self._functions.get(part.key) or self._function(part.key)
        if kind is _Made:
            return part.maker(*map(self, part.args), **{k: self(v) for k, v in part.kwargs.items()})
        return part

    def _function(self, key: int) -> types.FunctionType:
        old = self._old[key]
        fresh = [c for c in old.cells if c not in self._cells]
        for c in fresh:
            self._cells[c] = types.CellType()
        cells = tuple([self._cells[c] for c in old.cells]) or None
        new = types.FunctionType(old.code, old.globals, old.names[0], self(old.defaults), cells)
        _, new.__qualname__, new.__doc__ = old.names
        new.__annotations__ = old.annotations
        self._functions[key] = new
        if old.kwdefaults:
            new.__kwdefaults__ = {k: self(v) for k, v in old.kwdefaults.items()}
        for name, attribute in old.attributes.items():
            setattr(new, name, self(attribute))
        for c in fresh:
            content = self._contents[c]
            if content is not _EMPTY:
                self._cells[c].cell_contents = self(content)
        return new

    def clear(self) -> None:
        """Break the cycles of recursive functions. Others are left as they are: a hook may call them later."""
        if self._is_recursive:
            for key, cell in self._cells.items():
                if is_part(self._contents[key]):
                    with contextlib.suppress(ValueError):  # it is empty already
                        del cell.cell_contents
