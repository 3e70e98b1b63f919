"""What a function finds without being given it - cells, globals, what modules hold - as it was when it was called."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._frozen import ATOMS, Freezer, Table, Thawer, cell_contents, parts, written_names
from remat._methods import called_method, methods_of
from remat._spaces import GONE, Items, as_it_was, is_shared, items_of, values_of
from remat.compat._module_state import ModuleState


def _is_function(obj: Any) -> bool:
    """Whether an object is a function, or made of one."""
    return isinstance(obj, types.FunctionType) or bool(parts(obj))


class _Cell:
    """A cell, as a namespace with a single name."""

    __slots__ = ("_cell",)

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, name: None, default: Any) -> Any:
        """What the cell holds."""
        try:
            return self._cell.cell_contents
        except ValueError:  # it is empty
            return default

    def pop(self, name: None, default: Any) -> None:
        """Empty the cell."""
        del self._cell.cell_contents

    def __setitem__(self, name: None, value: Any) -> None:
        self._cell.cell_contents = value


_Slot = tuple[Any, Any, Any]  # a namespace, a name, and what that meant


@functools.lru_cache(1000)
def _names(code: types.CodeType) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of the cells that the code assigns to, and of the globals that it reads or assigns to."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in _GLOBAL}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(_names(const)[1])
    return written_names(code, "STORE_DEREF"), tuple(names)


_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
_KEPT = ATOMS | {torch.dtype, torch.device, torch.Size, object}
_CONSTANT = (types.ModuleType, type, types.BuiltinFunctionType)


def _slots(fun: types.FunctionType) -> Iterator[_Slot]:
    """The cells that a function assigns to, and the globals that it reads."""
    assigned, read = _names(fun.__code__)
    if assigned:
        for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
            if name in assigned:
                with contextlib.suppress(ValueError):  # empty
                    yield _Cell(cell), None, cell.cell_contents
    namespace = fun.__globals__
    for name in read:
        value = namespace.get(name, GONE)
        if value is not GONE and not isinstance(value, _CONSTANT):
            yield namespace, name, value


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
    if fun.__defaults__ or fun.__kwdefaults__ or fun.__dict__ or _names(fun.__code__)[0]:
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

    __slots__ = (
        "_buffers",
        "_children",
        "_containers",
        "_contents",
        "_fun",
        "_given",
        "_has_built",
        "_hooks",
        "_modules",
        "_objects",
        "_seen",
        "_slots",
        "_states",
        "_table",
        "tensors",
    )

    def __init__(self, fun: Any, leaves: list[Any]) -> None:
        self._fun = fun
        self._table: Table | None = None
        self._slots: list[_Slot] = []
        self._buffers: list[_Slot] = []
        self._modules: dict[int, torch.nn.Module] = {}
        self._states: list[ModuleState] = []  # of these
        self._hooks = 0  # how many modules have got so far
        self._has_built = False
        self._children: dict[int, Items] = {}  # not of a ScriptModule
        self._containers: list[Items] = []  # that belong to no module
        self.tensors: list[Tensor] = []
        self._given: list[Any] = []
        self._contents: Any = None
        self._objects: list[Any] = []
        self._seen: set[Any] = set()  # functions, and methods by class and name
        functions = [x for x in leaves if _is_function(x)]
        if type(fun) is types.FunctionType and not functions:
            self._contents = _simple_contents(fun)
        elif not _is_function(fun) and not functions:
            self._contents = []
        if self._contents is not None:
            self._look_at([fun] if type(fun) is types.FunctionType else self._methods(called_method(fun)), [])
            for content in self._contents:
                if isinstance(content, Tensor):
                    self.tensors.append(content)
                else:
                    self._take_object(content)
        else:
            self._given = [fun, *functions]
            self._contents = cell_contents(self._given)
            self._look_at((*self._given, *(content for _, content in self._contents.values())), self.tensors)
        for leaf in (fun, *leaves):
            self._take_object(leaf)
        self._hooks = internals.hooks_so_far()
        for _ in range(_STEPS):
            near = [*self._objects, *(v for state in self._states for v in state.values)]
            self._containers, modules = _containers(near)
            known = len(self._modules)
            for module in modules:
                self._look_at_module(module)
            if len(self._modules) == known:
                break
        parents = ((k, m._modules) for k, m in self._modules.items() if m._modules)
        self._children = {k: Items(children) for k, children in parents if isinstance(children, dict)}
        self._objects, self._seen = [], set()

    def _look_at(self, objects: Sequence[Any], tensors: list[Tensor]) -> None:
        """Look at functions, what they are made of and what they hold. `tensors`: where to put those."""
        seen = set()
        todo = list(objects)
        for obj in todo:
            if isinstance(obj, types.FunctionType):
                if id(obj) not in seen:
                    seen.add(id(obj))
                    self._take_slots(obj)
                    todo += parts(obj)
            elif isinstance(obj, Tensor):
                tensors.append(obj)
            elif isinstance(obj, tuple):
                todo += obj
            else:
                self._take_object(obj)
                todo += (*parts(obj), *self._methods(called_method(obj)))

    def _methods(self, called: tuple[type, str] | None) -> list[types.FunctionType]:
        """Those of a class, when it is met for the first time."""
        if called is None or called in self._seen:
            return []
        self._seen.add(called)
        return methods_of(*called)

    def _take_slots(self, fun: types.FunctionType) -> None:
        if id(fun) in self._seen:
            return
        self._seen.add(id(fun))
        for slot in _slots(fun):
            self._slots.append(slot)
            self._take_object(slot[2])

    def _take_object(self, obj: Any) -> None:
        """A module, or something else that may hold state."""
        if isinstance(obj, torch.nn.Module):
            self._look_at_module(obj)
            return
        containers = [*_containers_of(obj)]
        if containers:
            self._objects.append(obj)
        for module in _modules_in(containers):
            self._look_at_module(module)

    def _look_at_module(self, module: torch.nn.Module) -> None:
        """A module may put others in the place of its buffers, and of its attributes."""
        todo: list[torch.nn.Module | None] = [module]
        functions: list[Any] = []
        for m in todo:
            if m is not None and id(m) not in self._modules:
                self._modules[id(m)] = m
                state = ModuleState(m)
                self._states.append(state)
                functions += self._methods((type(m), "forward"))
                if m._buffers and isinstance(m._buffers, dict):  # not of a ScriptModule
                    self._buffers += ((m._buffers, name, buffer) for name, buffer in m._buffers.items())
                if m._modules:
                    todo += m._modules.values()
                for value in _worth_a_look(state.values):
                    kind = type(value)  # what a class says it is may be asked in Python
                    if issubclass(kind, torch.nn.Module):
                        todo.append(value)
                    elif issubclass(kind, _HOLDERS):
                        todo += _modules_in([value])
                    elif callable(value) and _is_function(value):
                        functions.append(value)
        if functions:
            self._look_at((*functions, *(content for _, content in cell_contents(functions).values())), [])

    def finish(self, given: Sequence[int], read: Container[int]) -> None:
        """The forward is over. A tensor that it has read and dropped was there until now, to be noted.

        **Arguments:**

        - `given`: the identities of the tensors that a rerun will be given.
        - `read`: by identity, the tensors that it has read: others are not to be held.
        """
        if any(state.has_changed() for state in self._holders):
            self._has_built = self._builds()
        for state in self._states:
            state.freeze(read)
        position = {key: i for i, key in enumerate(given)} if self._containers else {}
        for container in (*self._containers, *self._children.values()):
            container.freeze(position)
        self._buffers = [
            (names, name, buffer)
            for names, name, buffer in self._buffers
            if buffer is None or id(buffer) in read or names.get(name, GONE) is not buffer
        ]

    def _builds(self) -> bool:
        """Whether modules have got parameters, children or hooks: behind a flag, which has to be as it is now."""
        before = {k: children.before for k, children in self._children.items()}
        children = (
            (child, before.get(k, {}).get(name)) for k, m in self._modules.items() for name, child in m._modules.items()
        )
        return (
            any(self._is_built(child, other) for child, other in children)
            or any(state.has_built() for state in self._states)
            or internals.has_hooks_since(self._hooks, self._modules.values())
        )

    def _is_built(self, child: torch.nn.Module | None, before: Any) -> bool:
        """Whether a child is new, and not one without parameters and buffers that has taken the place of another."""
        if child is None or id(child) in self._modules:
            return False
        return before is None or any(m._parameters or m._buffers for m in child.modules())

    def undo(self) -> None:
        """Put back what the forward, which is not over, has put into names and modules."""
        _put((*self._slots, *self._buffers))
        for state in self._holders:
            state.put_back(lambda before, now: before)

    @property
    def _holders(self) -> list[ModuleState | Items]:
        return [*self._states, *self._containers, *self._children.values()]

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a module has a tensor."""
        return any(
            tensor is held
            for m in self._modules.values()
            for names in (vars(m), m._buffers, m._parameters)
            for held in names.values()
        )

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

    @contextlib.contextmanager
    def restored(self, with_state: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within it, what was captured is as it was; after it, as it was before.

        So a loop variable has not moved on for the rerun, and what the function itself assigns comes about once.

        **Arguments:**

        - `with_state`: whether modules have the buffers that they had, containers the tensors, and the function its
            flags and counters.
        - `tensors`: what the rerun is given.
        """

        def was(before: Any, now: Any) -> Any:
            return as_it_was(before, now, tensors)

        states = self._holders
        items = [state.now() for state in states]
        slots = [(names, name, names.get(name, GONE)) for names, name, _ in (*self._slots, *self._buffers)]
        try:
            for state in states if with_state and not self._has_built else ():
                state.put_back(was)
            _put((*self._slots, *self._buffers) if with_state else self._slots)
            yield
        finally:
            _put(slots)
            for state, found in zip(states, items, strict=True):
                state.restore(found)

    @property
    def has_slots(self) -> bool:
        """Whether there is something to restore."""
        return bool(self._slots or self._buffers or self._states or self._containers)

    @property
    def has_other_buffers(self) -> bool:
        """Whether modules have got others than they had."""
        return any(names.get(name, GONE) is not buffer for names, name, buffer in self._buffers)

    def thawed(self, leaves: list[Any], tensors: Sequence[Tensor]) -> tuple[Any, list[Any], Thawer | None]:
        """The function and the leaves, with `tensors` in the place of those in cells; and what put them together."""
        if self._table is None:
            fun = self._fun
            return fun(tensors) if type(fun) is _Closure else fun, list(leaves), None
        thaw = Thawer(self._table, tensors)
        return thaw(self._fun), [*map(thaw, leaves)], thaw


_Container = list[Any] | dict[Any, Any]


def _containers(values: list[Any]) -> tuple[list[Items], list[torch.nn.Module]]:
    """Lists, dicts and attributes near to what is captured, where state may be that belongs to no module.

    **Returns:** these, and the modules in them.
    """
    found: dict[int, Items] = {}
    modules: list[torch.nn.Module] = []
    room = _ROOM
    values = _worth_a_look(values)
    for _ in range(_STEPS):
        near: list[Any] = []
        for container in (c for v in values for c in _containers_of(v)):
            if id(container) in found or room <= 0:
                continue
            limit = min(_MANY, room)
            if items := items_of(container, limit):
                found[id(container)] = items
                room -= _EACH
            if len(container) <= limit:
                room -= len(container)
                near += _worth_a_look(values_of(container))
        for v in near:
            modules += (m for m in (v if issubclass(type(v), tuple) else [v]) if issubclass(type(m), torch.nn.Module))
        values = near
    return [*found.values()], modules


def _worth_a_look(values: Iterable[Any]) -> list[Any]:
    return [v for v in values if type(v) not in _KEPT]


def _containers_of(value: Any) -> Iterator[_Container]:
    """A list or a dict, those in a tuple, and the attributes of an object."""
    kind = type(value)
    if kind in _KEPT or issubclass(kind, _NO_CONTAINERS) or _is_function(value) or is_shared(value):
        return
    if issubclass(kind, tuple):
        for item in value:
            yield from _containers_of(item)
    both: tuple[Any, Any] = value, getattr(value, "__dict__", None)
    yield from (found for found in both if issubclass(type(found), (list, dict)))


_HOLDERS = (list, tuple, dict)


def _modules_in(containers: Iterable[Any]) -> Iterator[torch.nn.Module]:
    for container in containers:
        if len(container) <= _MANY:
            yield from (m for m in values_of(container) if issubclass(type(m), torch.nn.Module))


_NO_CONTAINERS = (Tensor, torch.nn.Module, *_CONSTANT)
_MANY = 1000  # items: a table, not a state
_STEPS = 3
_ROOM, _EACH = 2000, 10  # items in all, and what a container counts: a look around takes no longer than a small rerun


def _put(slots: Iterable[_Slot]) -> None:
    """Make names mean what they meant."""
    for names, name, value in slots:
        if names.get(name, GONE) is value:
            continue
        if value is GONE:
            names.pop(name, None)
        else:
            names[name] = value
