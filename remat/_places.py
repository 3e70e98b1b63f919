"""Where a function finds tensors: modules, containers, attributes and globals.

A place is a dict, list or deque, and a key of it. A rerun puts operands into the places of their originals: the forward
may have run in `functional_call`, which gives modules other tensors for a while, and code that no torch-function mode
sees may read a place (compiled code, an index that is a tensor). An index knows the places in modules. It is renewed
only if it does not know a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._closure import ATOMS, parts_of

Place = tuple[Any, Any]
"""A dict, list or deque, and a key of it."""

MISSING: Any = object()
_NEAR = 3, 2_000
_FAR = 7, 50_000
"""How deep a search goes, and how many objects it looks at."""
_MOST_HELD = 1_000
"""How many objects of a container it looks at: a vocabulary or a list of samples is not searched to its end."""
_MOST_NEAR = 100
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, deque, set, frozenset)


class _Index:
    """The places of the tensors in a module and its submodules. A tied parameter has several."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)
        self._holders: dict[int, list[tuple[weakref.ref[torch.nn.Module], str, str]]] = {}
        """By identity of a tensor: weak references to the modules that hold it, the name of the dict, and the key."""
        self._others: dict[int, weakref.ref[Tensor]] = {}
        """By identity, tensors that no module holds."""

    def look_up(self, tensors: Iterable[Tensor]) -> dict[int, list[Place]]:
        """By identity, the places of the tensors that modules hold."""
        found, missing = self._known(tensors)
        if missing:
            self._renew()
            more, missing = self._known(missing)
            found.update(more)
            self._others = {key: ref for key, ref in self._others.items() if ref() is not None}
            if not _fillings:  # else a module may hold an operand in the place of the tensor
                self._others.update((id(t), weakref.ref(t)) for t in missing)
        return found

    def _known(self, tensors: Iterable[Tensor]) -> tuple[dict[int, list[Place]], list[Tensor]]:
        """By identity, the places of tensors as far as they are known and up to date; and the other tensors."""
        found: dict[int, list[Place]] = {}
        unknown = []
        for t in tensors:
            places: list[Place] = []
            for ref, kind, name in self._holders.get(id(t), ()):
                names = getattr(ref(), kind, {})
                if names.get(name) is not t:  # the index is out of date
                    places.clear()
                    break
                places.append((names, name))
            if places:
                found[id(t)] = places
            elif (other := self._others.get(id(t))) is None or other() is not t:
                unknown.append(t)
        return found, unknown

    def _renew(self) -> None:
        root = self._root()
        assert root is not None
        self._holders = {}
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its tensors are not in Python
            ref = weakref.ref(module)
            for kind in ("_parameters", "_buffers", "__dict__"):
                for name, t in getattr(module, kind).items():
                    if isinstance(t, Tensor):
                        self._holders.setdefault(id(t), []).append((ref, kind, name))


_indices: weakref.WeakKeyDictionary[torch.nn.Module, _Index] = weakref.WeakKeyDictionary()


def places_in_modules(objects: Iterable[Any], tensors: Iterable[Tensor]) -> dict[int, list[Place]]:
    """By identity, the places of the tensors that modules in reach of the objects hold."""
    left = {id(t): t for t in tensors}
    found: dict[int, list[Place]] = {}
    for module in _modules_near(objects):
        if not left:
            break
        index = _indices.get(module) or _indices.setdefault(module, _Index(module))
        new = index.look_up(left.values())
        found.update(new)
        for key in new:
            del left[key]
    return found


def _modules_near(objects: Iterable[Any]) -> Iterator[torch.nn.Module]:
    """The outermost modules among the objects and among those that these hold."""
    for obj in objects:
        for near in (obj,) if isinstance(obj, torch.nn.Module) else (obj, *(held for _, held in _children(obj))):
            if isinstance(near, torch.nn.Module):
                yield near
            elif isinstance(near, _CONTAINERS):
                yield from (held for _, held in _children(near)[:_MOST_NEAR] if isinstance(held, torch.nn.Module))


def search(
    objects: Iterable[Any], wanted: Container[int] | None = None, far: bool = True
) -> Iterator[tuple[Tensor, Place]]:
    """Search the objects, and those in reach, for tensors: each with its place, the nearest first. Bounded.

    `wanted`: identities of those to find. Without it, all are.
    """
    for place, obj in _in_reach(objects, *(_FAR if far else _NEAR)):
        if place is not None and isinstance(obj, Tensor) and (wanted is None or id(obj) in wanted):
            yield obj, place


def is_in_reach(tensor: Tensor, objects: Iterable[Any]) -> bool:
    """Whether one of the objects, or of those in reach, holds the tensor. Bounded."""
    return any(obj is tensor for _, obj in _in_reach(objects, *_FAR))


def script_module_near(objects: Iterable[Any]) -> Any:
    """Search the objects, and those in reach, for a ScriptModule. Bounded."""
    found = (obj for _, obj in _in_reach(objects, _FAR[0], _NEAR[1]) if isinstance(obj, torch.jit.ScriptModule))
    return next(found, None)


def _in_reach(objects: Iterable[Any], depth: int, most: int) -> Iterator[tuple[Place | None, Any]]:
    """The objects, and those that they hold or are made of, the nearest first: each with its place, if it has one."""
    seen: set[int] = set()
    todo: deque[tuple[Place | None, Any, int]] = deque((None, obj, depth) for obj in objects)
    while todo and most:
        place, obj, depth = todo.popleft()
        yield place, obj
        most -= 1
        is_leaf = isinstance(obj, (Tensor, type, types.ModuleType))
        if depth and len(todo) < most and not is_leaf and id(obj) not in seen:
            seen.add(id(obj))
            todo += [(near, held, depth - 1) for near, held in _children(obj)]


def _children(obj: Any) -> list[tuple[Place | None, Any]]:
    """The objects that one object holds or is made of, each with its place, if it can be given another value."""
    if internals.is_of_dynamo(obj):
        return []  # what compiled functions close over leads far
    parts = [*parts_of(obj)]
    if isinstance(obj, (tuple, set, frozenset)):
        parts += _items(obj)
    method = vars(type(obj)).get("forward" if isinstance(obj, torch.nn.Module) else "__call__")
    if type(method) is types.FunctionType:
        parts.append(method)
    return [*_slots(obj), *((None, part) for part in parts)]


def _slots(obj: Any) -> list[tuple[Place, Any]]:
    """The places in one object, with what they hold, without numbers and strings: a configuration has many."""
    if isinstance(obj, (list, deque)):
        return [((obj, i), held) for i, held in enumerate(_items(obj)) if type(held) not in ATOMS]
    if type(obj) is types.FunctionType:
        names = names_in(obj.__code__) & obj.__globals__.keys()
        return [((obj.__globals__, name), obj.__globals__[name]) for name in names]
    holder = obj if isinstance(obj, dict) else getattr(obj, "__dict__", None)
    items = _items(holder) if isinstance(holder, dict) else ()
    return [((holder, key), held) for key, held in items if type(held) not in ATOMS]


def _items(obj: Any) -> list[Any]:
    """The items of a container, the first of many. Methods of the user's classes are not called."""
    kind = next(kind for kind in _CONTAINERS if isinstance(obj, kind))
    items = dict.items(obj) if kind is dict else kind.__iter__(obj)
    return [*itertools.islice(items, _MOST_HELD)]


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in the code, and in functions that are defined in it."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def item(names: Any, key: Any) -> Any:
    """The object that is in a place now, or `MISSING`."""
    try:
        return names[key]
    except (KeyError, IndexError):
        return MISSING


def _put(place: Place, value: Any) -> None:
    """Put a value into a place, or `MISSING` to empty it. A list that has become too short is left as it is."""
    names, key = place
    if value is MISSING:
        if isinstance(names, dict):
            names.pop(key, None)
    elif isinstance(names, dict) or key < len(names):
        names[key] = value


_places_lock = threading.RLock()
_fillings: dict[tuple[int, Any], list[Any]] = {}
"""By place: what was there, and then what the running reruns of all threads have put there."""
_fillings_lock = threading.Lock()


@contextlib.contextmanager
def _filling(fill: Sequence[tuple[Place, Tensor]], lock: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with lock:
        try:
            with _fillings_lock:
                for (names, key), tensor in fill:
                    _fillings.setdefault((id(names), key), [item(names, key)]).append(tensor)
                    _put((names, key), tensor)
            yield
        finally:
            with _fillings_lock:
                for (names, key), tensor in reversed(fill):
                    _take_out(names, key, tensor)


def _take_out(names: Any, key: Any, tensor: Tensor) -> None:
    """Put back what was in a place before this tensor, unless something else is there by now."""
    values = _fillings.get((id(names), key), [])
    found = [i for i, value in enumerate(values) if value is tensor]  # none if Ctrl-C came first
    if found and item(names, key) is values.pop(found[-1]):  # else the function, or another thread, has replaced it
        _put((names, key), values[-1])
    if len(values) == 1:
        del _fillings[id(names), key]


def filled(
    fill: Sequence[tuple[Place, Tensor]], lock: contextlib.AbstractContextManager[Any] = _places_lock
) -> contextlib.AbstractContextManager[None]:
    """A context for a rerun, in which the places hold operands. Reruns of other threads wait: they share the places."""
    fill = [(place, tensor) for place, tensor in fill if item(*place) is not tensor]
    return _filling(fill, lock) if fill else internals.NOTHING


def still_filled(fill: Sequence[tuple[Place, Tensor]]) -> contextlib.AbstractContextManager[None]:
    """A context for the backward pass of a rerun, in which places hold the operands on which its results depend.

    The backward of an `autograd.Function` may call a module, and differentiate that. No thread waits: the backward pass
    may go on in another thread.
    """
    return filled(fill, internals.NOTHING)
