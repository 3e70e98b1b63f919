"""What a function may keep state in, with what that held when the function was called.

It is looked for wherever the function leads: the globals that it reads, the cells that it assigns to, modules, and the
lists, dicts and attributes that are near by.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from remat._frozen import ATOMS, parts, written_names
from remat._methods import called_method, is_known, methods_of, names_in
from remat._spaces import ClassSpace, Items, Members, Space, is_shared, items_of, names_of_class, of_cell, values_of
from remat._stock import PRIVATE

_CONSTANT = (types.ModuleType, type, types.BuiltinFunctionType)
_ATOMS = ATOMS | {torch.dtype, torch.device, torch.Size, object}
_OPAQUE = (Tensor, types.ModuleType, types.BuiltinFunctionType)
_DEPTH = 4  # from a function or a module on
_MANY = 1000  # items: a table, not a state
_ROOM, _EACH = 4000, 10  # items in all, and what a container counts: a look around takes no longer than a small rerun


def _may_lead_on(value: Any) -> bool:
    """Whether there may be state behind a value."""
    return not issubclass(type(value), _OPAQUE)  # what a class says it is may be asked in Python


def _package(fun: types.FunctionType) -> str:
    return str(fun.__globals__.get("__name__")).partition(".")[0]


class State:
    """What the functions, modules and objects that are given, the roots, may keep state in.

    **Attributes:**

    - `names`: globals that functions read, cells that they assign to, and their attributes.
    - `modules`: by identity.
    - `attributes`, `parameters`, `buffers`, `children`: of the modules, where there are some.
    - `empty`: where there are none: the dicts for them. A ScriptModule has no such dicts.
    - `lazy`: a module that has yet to make its parameters, if there is one.
    - `sets`: in attributes of modules. What they hold is not put back.
    - `others`: lists, dicts, attributes of objects, and those of classes that the code names.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.lazy: torch.nn.Module | None = None
        self.names: list[Space] = []
        self.modules: dict[int, torch.nn.Module] = {}
        self.attributes: list[Space] = []
        self.parameters: list[Space] = []
        self.buffers: list[Space] = []
        self.children: list[Space] = []
        self.empty: list[dict[str, Any]] = []
        self.others: list[Space] = []
        self.sets: list[set[Any]] = []
        self._seen: set[Any] = set()  # by identity; of methods, by class and name
        self._kinds: dict[type, None] = {}
        self._codes: list[types.CodeType] = []
        self._room = _ROOM
        self._walk(roots, _DEPTH)
        for space in self._classes():
            self.others.append(space)
            self._walk(space.before.values(), _DEPTH - 1)
        self._seen, self._kinds, self._codes = set(), {}, []

    def _classes(self) -> list[Space]:
        """What the code names of what classes hold."""
        data = {kind: names for kind in self._kinds if (names := names_of_class(kind).data)}
        named = frozenset[str]().union(*map(names_in, self._codes)) if data else frozenset()
        return [ClassSpace(kind, found) for kind, names in data.items() if (found := names & named)]

    @property
    def of_modules(self) -> list[Space]:
        """All spaces of modules."""
        return [*self.attributes, *self.parameters, *self.buffers, *self.children]

    def _walk(self, values: Iterable[Any], depth: int) -> None:
        todo = [(v, depth) for v in values if _may_lead_on(v)]
        for obj, depth in todo:
            if id(obj) not in self._seen and (self._room > 0 or issubclass(type(obj), torch.nn.Module)):
                self._seen.add(id(obj))
                found, depth = self._look_at(obj, depth)
                todo += [(v, depth) for v in found if type(v) not in _ATOMS and _may_lead_on(v)]

    def _take_class(self, kind: type) -> None:
        if kind not in self._kinds and not is_known(kind.__module__):
            self._room -= _EACH
            self._kinds |= dict.fromkeys(k for k in kind.__mro__ if not is_known(k.__module__))

    def _look_at(self, obj: Any, depth: int) -> tuple[Iterable[Any], int]:
        """What an object leads to, and how far to go from there."""
        kind = type(obj)
        if kind is types.FunctionType:
            return self._function(obj), depth
        if issubclass(kind, torch.nn.Module):
            return self._module(obj), _DEPTH
        if issubclass(kind, tuple):
            return self._values_of(obj), depth
        if issubclass(kind, type):
            self._take_class(obj)
            return (), depth
        try:
            methods, pieces = self._methods(called_method(obj)), parts(obj)
            self._room -= _EACH * len(methods)
            if pieces or depth <= 0:
                return (*methods, *pieces), depth
            return (*methods, *self._near(obj)), depth - 1
        except Exception:  # of the object's own code, behind what looks like an attribute
            return (), depth

    def _function(self, fun: types.FunctionType) -> Iterator[Any]:
        namespace, package = fun.__globals__, _package(fun)
        if not is_known(package):
            made = written_names(fun.__code__, "STORE_GLOBAL") - namespace.keys()
            read = {name: namespace[name] for name in names_in(fun.__code__) if name in namespace}
            names = [name for name, value in read.items() if type(value) is not types.ModuleType]
            self._codes.append(fun.__code__)
            if names or made:
                self.names.append(Space(namespace, made.union(names)))
            self._room -= _EACH + len(names)
            for value in map(read.__getitem__, names):
                is_function = type(value) is types.FunctionType
                if not is_function or _package(value) == package or "__wrapped__" in vars(value):
                    yield value
        attributes = vars(fun)
        if 0 < len(attributes) <= _MANY:
            self.names.append(Space(attributes))
            yield from attributes.values()
        yield from parts(fun)
        assigned = written_names(fun.__code__, "STORE_DEREF")
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
            if name in assigned and id(cell) not in self._seen:
                self._seen.add(id(cell))
                self.names.append(of_cell(cell))
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents

    def _methods(self, called: tuple[type, str] | None) -> list[types.FunctionType]:
        """Those of a class, when it is met for the first time."""
        if called is None or called in self._seen:
            return []
        self._seen.add(called)
        return methods_of(*called)

    def _module(self, module: torch.nn.Module) -> Iterator[Any]:
        self.modules[id(module)] = module
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            self.lazy = module
        self._take_class(type(module))
        names = vars(module)
        self.attributes.append(Space(names))
        of_kind = (self.parameters, Space, module._parameters), (self.buffers, Space, module._buffers)
        for found, kind, held in (*of_kind, (self.children, Items, module._modules)):
            if held and isinstance(held, dict):
                found.append(kind(held))
            elif isinstance(held, dict):
                self.empty.append(held)
        yield from module._modules.values()
        yield from self._methods((type(module), "forward"))
        for name, value in names.items():
            if name not in PRIVATE:
                if type(value) is set:
                    self.sets.append(value)
                yield value

    def _near(self, obj: Any) -> Iterator[Any]:
        """A list or a dict, and the attributes of an object, in a dict or in slots."""
        if is_shared(obj):
            return
        self._take_class(type(obj))
        both: tuple[Any, Any] = obj, getattr(obj, "__dict__", None)
        for held in both:
            if not issubclass(type(held), (list, dict)) or self._room <= 0:
                continue
            limit = min(_MANY, self._room)
            space = items_of(held, limit) if held is obj else Space(held) if len(held) <= limit else None
            if space is not None:
                self.others.append(space)
                self._room -= _EACH
            yield from self._values_of(held)
        if self._room > 0 and (slots := names_of_class(type(obj)).slots):
            space = Members(obj, slots)
            self.others.append(space)
            self._room -= _EACH + len(slots)
            yield from space.before.values()

    def _values_of(self, held: Any) -> Iterable[Any]:
        """What a list, a dict or a tuple holds, if there is room for all of it."""
        if len(held) > min(_MANY, self._room):
            return ()
        self._room -= len(held)
        return values_of(held)
