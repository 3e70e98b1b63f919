"""Capture what a function closes over at the call, and rebuild the function for a rerun.

A rerun comes later, when a loop variable may have another value. So the function is taken apart at the call: its cells,
defaults, partial arguments and bound `self`, and all functions in those. A rerun puts the parts together again, with
operands in place of tensors. The parts do not hold the function itself. Its cells may later hold the result of the
call, and that would be a reference cycle. A function that is still there, and closes over the very same objects as at
the call, is called itself: a program may look it up by its identity.

NOTE [variables that change]: a hook of a module may write to a variable that the function reads (`nonlocal scale`). So
if the forward has changed a variable, it is the same in a rerun, with its value at the call. Afterwards it has its
present value again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type})
_EMPTY: Any = object()


@dataclass(slots=True, eq=False)
class Operand:
    """Stands for the operand at `index`."""

    index: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Made:
    """Stands for `maker(*args, **kwargs)`: a tuple, a partial, a method, a remat'd function."""

    maker: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    old: Callable[[], Any]
    """Gives the object itself, if it is still there."""

    def is_called_like(self, maker: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether this stands for a call of `maker` with as many arguments and the same names."""
        return self.maker == maker and len(self.args) == len(args) and [*self.kwargs] == [*kwargs]

    def is_like(self, maker: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether this stands for `maker(*args, **kwargs)`, with the very same arguments."""
        held, new = (*self.args, *self.kwargs.values()), (*args, *kwargs.values())
        return self.is_called_like(maker, args, kwargs) and all(map(operator.is_, held, new))


class _Attributes(dict[str, Any]):
    """The attributes of an object, to be taken apart, as no other dict is."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Function:
    """Stands for a function. Keys of its cells' contents avoid cycles of functions that refer to each other."""

    code: types.CodeType
    globals: dict[str, Any]
    name: str
    qualname: str
    cells: list[int]
    old: weakref.ref[types.FunctionType]


_PARTS = (Operand, _Made, _Function)

# By identity of what they stand for, the parts that calls hold. The calls of a nest share those of its inner functions.
_shared_functions: weakref.WeakValueDictionary[int, _Function] = weakref.WeakValueDictionary()
_shared_made: weakref.WeakValueDictionary[int, _Made] = weakref.WeakValueDictionary()


def is_part(obj: Any) -> bool:
    """Whether `obj` stands for an object that a `Rebuilder` has to make."""
    return type(obj) in _PARTS


def parts_of(obj: Any) -> tuple[Any, ...]:
    """The objects that a callable is made of, the contents of its cells among them."""
    if type(obj) is types.FunctionType:
        cells = [x for c in obj.__closure__ or () if (x := _content(c)) is not _EMPTY]
        return (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values(), *cells)
    recipe = None if isinstance(obj, tuple) else _recipe(obj)
    if recipe is None:
        return ()
    return (*(x for x in recipe[1] if type(x) is not _Attributes), *recipe[2].values())


def _recipe(obj: Any) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]] | None:
    """How to make a tuple, a method, a partial or a remat'd function: maker, args, kwargs. None for other objects."""
    kind = type(obj)
    if kind is _Attributes:
        return dict, (), obj
    if kind is types.MethodType:
        return kind, (obj.__func__, obj.__self__), {}
    if issubclass(kind, functools.partial):
        return _bare, (kind, _attributes(obj), obj.func, *obj.args), obj.keywords
    if kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return _bare, (kind, _attributes(obj), *obj), {}
    return (obj.__remat_maker__(), (obj.__wrapped__,), {}) if hasattr(kind, "__remat_maker__") else None


def _attributes_of(function: types.FunctionType) -> dict[str, Any]:
    """The attributes and defaults of a function."""
    attributes = vars(function).copy()
    if function.__defaults__:
        attributes["__defaults__"] = function.__defaults__
    if function.__kwdefaults__:
        attributes["__kwdefaults__"] = _Attributes(function.__kwdefaults__)
    return attributes


def _attributes(obj: Any) -> _Attributes | None:
    return _Attributes(held) if (held := getattr(obj, "__dict__", None)) else None


def _bare(kind: Any, attributes: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A tuple or a partial, without its class's constructor, which may change what it is given."""
    is_tuple = issubclass(kind, tuple)
    obj = tuple.__new__(kind, args) if is_tuple else functools.partial.__new__(kind, *args, **kwargs)
    if attributes:
        vars(obj).update(attributes)
    return obj


def _content(cell: types.CellType) -> Any:
    """What a cell holds, or `_EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _fill(cell: types.CellType, content: Any) -> None:
    """Make a cell hold an object, or nothing if that is `_EMPTY`."""
    cell.cell_contents = content
    if content is _EMPTY:
        del cell.cell_contents


def _reference(obj: Any) -> Callable[[], Any]:
    """A weak reference, which gives None where there can't be any: to a tuple."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return type(None)


class Closure:
    """Functions and other objects, taken apart.

    **Attributes:**

    - `objects`: the functions and other objects that were met: where to search for more tensors. See `close`.
    """

    def __init__(self, operand_of: Callable[[Tensor], Any]) -> None:
        """`operand_of`: gives the `Operand` that stands for a tensor, or the tensor if it is not an operand."""
        self._operand_of = operand_of
        self.attributes: dict[_Function, dict[str, Any]] = {}
        """The functions, each with its attributes and defaults."""
        self.contents: dict[int, Any] = {}
        self.is_recursive = False
        self.objects: list[Any] = []
        self.changed: dict[int, types.CellType] = {}
        """The cells that the forward has changed: NOTE [variables that change]."""
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        """By identity, cells and what they hold at the call."""
        self._parts: dict[int, Any] = {}
        """By identity of a function, what stands for it. `objects` keeps the function alive meanwhile."""

    def take_apart(self, obj: Any) -> Any:
        """Return the part that stands for `obj`, or `obj` itself if no part of it is an operand or may change."""
        kind = type(obj)
        if kind in ATOMS:
            return obj
        if isinstance(obj, Tensor):
            return self._operand_of(obj)
        if kind is types.FunctionType and (obj.__closure__ or obj.__defaults__ or obj.__kwdefaults__ or vars(obj)):
            return self._function(obj)
        recipe = _recipe(obj)
        if recipe is not None:
            return self._made(obj, *recipe)
        self.objects.append(obj)
        return obj

    def _made(self, obj: Any, maker: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        new_args = [self.take_apart(x) for x in args]
        new_kwargs = {k: self.take_apart(v) for k, v in kwargs.items()}
        if not (kwargs or any(map(is_part, new_args))):
            return obj  # nobody can change it
        part = _shared_made.get(id(obj))
        if part is None or part.old() is not obj or not part.is_like(maker, new_args, new_kwargs):
            part = _shared_made[id(obj)] = _Made(maker, new_args, new_kwargs, _reference(obj))
        return part

    def _function(self, old: types.FunctionType) -> Any:
        key = id(old)
        if key in self._parts:
            part = self._parts[key]
            self.is_recursive |= part not in self.attributes
            return part
        part = _shared_functions.get(key)
        if part is None or part.old() is not old or part.code is not old.__code__:
            cells = [id(cell) for cell in old.__closure__ or ()]
            names = old.__name__, old.__qualname__  # `functools.wraps` has changed them
            part = _Function(old.__code__, old.__globals__, *names, cells, weakref.ref(old))
            _shared_functions[key] = part
        self._parts[key] = part
        self.objects.append(old)
        attributes = {name: self.take_apart(value) for name, value in _attributes_of(old).items()}
        for cell in old.__closure__ or ():
            if id(cell) not in self.contents:
                self.contents[id(cell)] = _EMPTY
                content = _content(cell)
                self._cells[id(cell)] = cell, content
                if content is not _EMPTY:
                    self.contents[id(cell)] = self.take_apart(content)
            elif self.contents[id(cell)] is _EMPTY:  # this function is a part of what the cell holds
                self.is_recursive = True
        self.attributes[part] = attributes
        return part

    def flags(self) -> dict[int, types.CellType]:
        """The cells that hold a plain value: a context around a rerun may set a flag in one."""
        return {key: cell for key, (cell, _) in self._cells.items() if type(self.contents[key]) in ATOMS}

    def close(self) -> list[Any]:
        """Free what only `take_apart` needs. Returns the `objects`."""
        objects, self.objects = self.objects, []
        self._parts.clear()
        del self._operand_of
        return objects

    def note_changes(self) -> None:
        """Called after the forward. Notes the cells that it has changed."""
        self.changed = {key: cell for key, (cell, before) in self._cells.items() if _content(cell) is not before}
        self._cells.clear()


class Rebuilder:
    """Puts functions together again for one rerun, each once, with operands in place of tensors."""

    def __init__(self, closure: Closure, operands: Sequence[Any]) -> None:
        self._closure = closure
        self._operands = operands
        self._cells: dict[int, types.CellType] = {}
        self._functions: dict[_Function, types.FunctionType] = {}

    def keep(self, cells: dict[int, types.CellType]) -> None:
        """Use these existing cells, not new ones."""
        self._cells.update(cells)

    def as_at_call(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the variables that the forward has changed are as at the call."""
        return self._with_cells(self._closure.changed) if self._closure.changed else internals.NOTHING

    @contextlib.contextmanager
    def _with_cells(self, cells: dict[int, types.CellType]) -> Iterator[None]:
        now = {key: _content(cell) for key, cell in cells.items()}
        self.keep(cells)
        try:
            for key, cell in cells.items():
                _fill(cell, self(self._closure.contents[key]))
            yield
        finally:
            for key, cell in cells.items():
                _fill(cell, now[key])

    def __call__(self, part: Any) -> Any:
        """Make the object that `part` stands for."""
        kind = type(part)
        if kind is Operand:
            return self._operands[part.index]
        if kind is _Function:
            return self._functions.get(part) or self._function(part)
        if kind is _Made:
            uses: set[_Function] = set()
            if self._is(old := part.old(), part, uses) and uses.isdisjoint(self._changed):
                return old
            return part.maker(*map(self, part.args), **{k: self(v) for k, v in part.kwargs.items()})
        return part

    @functools.cached_property
    def _changed(self) -> set[_Function]:
        """The functions that are not as at the call, or close over such a function."""
        uses: dict[_Function, set[_Function]] = {was: set() for was in self._closure.attributes}
        changed = {was for was, used in uses.items() if not self._is_as_it_was(was, used)}
        while more := {was for was, used in uses.items() if not changed.isdisjoint(used)} - changed:
            changed |= more
        return changed

    def _is_as_it_was(self, was: _Function, uses: set[_Function]) -> bool:
        """Whether a function is there, closes over what it closed over at the call, and none of it is replaced.

        `uses`: the functions that it closes over are added to this.
        """
        function = was.old()
        if function is None:
            return False
        for cell, key in zip(function.__closure__ or (), was.cells, strict=True):
            if not self._is(_content(cell), self._closure.contents[key], uses):
                return False
        attributes = _attributes_of(function)
        parts = self._closure.attributes[was].items()
        return all(self._is(attributes.get(name, _EMPTY), part, uses) for name, part in parts)

    def _is(self, obj: Any, part: Any, uses: set[_Function]) -> bool:
        """Whether an object is what the part stands for, if the functions that it uses are."""
        kind = type(part)
        if kind is Operand:
            return obj is self._operands[part.index]
        if kind is _Function:
            uses.add(part)
            return obj is part.old()
        if kind is _Made:
            recipe = _recipe(obj)
            if recipe is None or not part.is_called_like(*recipe):
                return False
            held = zip((*recipe[1], *recipe[2].values()), (*part.args, *part.kwargs.values()), strict=True)
            return all(self._is(o, p, uses) for o, p in held)
        return obj is part

    def _function(self, part: _Function) -> types.FunctionType:
        function = part.old()
        if function is not None and part not in self._changed:
            self._functions[part] = function
            return function
        fresh = {c: types.CellType() for c in part.cells if c not in self._cells}
        self._cells.update(fresh)
        cells = tuple([self._cells[c] for c in part.cells])
        new = self._functions[part] = types.FunctionType(part.code, part.globals, part.name, None, cells or None)
        new.__qualname__ = part.qualname
        if function is not None:
            functools.update_wrapper(new, function, updated=())
            del vars(new)["__wrapped__"]
        for name, attribute in self._closure.attributes[part].items():
            setattr(new, name, self(attribute))
        for c, cell in fresh.items():
            content = self._closure.contents[c]
            if content is not _EMPTY:
                cell.cell_contents = self(content)
        return new

    def clear(self) -> None:
        """Break the cycles of recursive functions. Others are left as they are: a hook may call them later."""
        if not self._closure.is_recursive:
            return
        for key, cell in self._cells.items():
            if is_part(self._closure.contents[key]) and key not in self._closure.changed:
                del cell.cell_contents
        for part, function in self._functions.items():
            if function is not part.old():
                function.__defaults__ = function.__kwdefaults__ = None
                vars(function).clear()
