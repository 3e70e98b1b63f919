"""The origins of residuals: the op that made a tensor, or its name outside the function."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from remat._closure import parts_of
from remat._dispatch_mode import DispatchMode
from remat._errors import call_site
from remat._inspect._forward import tensors
from remat._layers import innermost
from remat._names import current_name
from remat._ops import facts_of, storages
from remat._places import names_in
from remat._values import CONSTANT

# Tensors that the function makes.


class Origin(NamedTuple):
    """The op that computed the content of a storage, and the tensor that made the storage."""

    shape: torch.Size
    dtype: torch.dtype
    why: str
    where: str


class Origins(DispatchMode):
    """Records the storages that a function makes, and where it first reads other storages."""

    looks_inside = is_about_functions = True  # so `_op_of_remat` runs for the copies that remat makes

    def __init__(self) -> None:
        super().__init__()
        self.made: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
        """By storage, those that are still alive."""
        self.read: dict[Any, str] = {}
        """By storage, the place in the user's code."""

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not CONSTANT:  # the argument of that is new
            for storage in storages(tensors((args, kwargs))):
                if storage not in self.made:
                    self.read.setdefault(storage, call_site())
        out = func(*args, **kwargs)
        name, facts = current_name(), facts_of(func)
        why = f"output of {func}" if name is None else f"named {name!r}"
        for tensor, storage in ((t, s) for t in tensors(out) for s in storages([t])):
            origin = self.made.get(storage)
            if origin is None and storage not in self.read:
                self.made[storage] = Origin(tensor.shape, tensor.dtype, why, call_site())
            elif origin is not None and (name is not None or (facts.writes and not facts.is_view)):
                self.made[storage] = origin._replace(why=why, where=call_site())
        return out

    def _op_of_remat(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An offloaded copy has the origin of its original."""
        out = self._op(func, args, kwargs)
        for source in storages(tensors(args))[-1:]:
            if source in self.made:
                self.made.update(dict.fromkeys(storages(tensors(out)), self.made[source]))
        return out


# Names of tensors from outside.


def names_of(fun: Any, args: Any, kwargs: Any, views: dict[Any, Tensor]) -> dict[Any, str]:
    """The names of storages that a call takes from outside: first those of tensors that are arguments.

    `views`: by storage, a tensor in it.
    """
    own = getattr(fun, "__name__", type(fun).__name__)
    leaves = sorted(_argument_names(fun, args, kwargs), key=lambda pair: not isinstance(pair[0], Tensor))
    found = [(t, f"from the argument {name}") for leaf, path in leaves for t, name, _ in _reachable(leaf, path)]
    captured = [*_reachable(fun, ""), *((t, "", own) for t in views.values())]  # so each of them gets a name
    found += [(t, f"captured {name or 'a tensor'} (closure of {owner or own})") for t, name, owner in captured]
    names: dict[Any, str] = {}
    for tensor, why in found:
        names |= dict.fromkeys((views.keys() & storages([innermost(tensor)])) - names.keys(), why)
    return names


def _argument_names(fun: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, str]]:
    """The leaves of the arguments of a call, each with a name such as `x['w']`."""
    try:
        arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # some builtins have no signature
        arguments = {"args": args, **kwargs}
    for name, value in arguments.items():
        accessors, leaves, _ = optree.tree_flatten_with_accessor(value, none_is_leaf=True, namespace="torch")
        yield from zip(leaves, (a.codify(name) for a in accessors), strict=True)


def _reachable(root: Any, path: str) -> Iterator[tuple[Tensor, str, str]]:
    """The tensors that can be reached from an object, nearest first, up to a limit."""
    seen: set[int] = set()
    todo = [(root, path, "")]
    for obj, name, owner in todo:  # the loop appends to it
        if isinstance(obj, Tensor):
            yield obj, name, owner
        elif id(obj) not in seen and len(seen) < 10_000:
            seen.add(id(obj))
            todo += _children(obj, name, owner)


def _children(obj: Any, path: str, owner: str) -> Iterator[tuple[Any, str, str]]:
    """The contents of an object, each as (content, its name, the function that holds it)."""
    if isinstance(obj, types.FunctionType):
        for name, value in _variables(obj).items():
            yield value, name, obj.__name__
    elif isinstance(obj, types.MethodType):
        yield obj.__self__, "self", obj.__func__.__name__
        yield obj.__func__, path, owner
    elif pieces := parts_of(obj):
        for piece in pieces:
            yield piece, path, owner
    elif isinstance(obj, (dict, list, tuple)):
        for key, value in obj.items() if isinstance(obj, dict) else enumerate(obj):
            yield value, f"{path}[{key!r}]", owner
    elif not isinstance(obj, (type, types.ModuleType)):
        attributes = getattr(obj, "__dict__", {})
        if isinstance(obj, torch.nn.Module):
            attributes = dict([*obj.named_parameters(), *obj.named_buffers()])
            yield type(obj).forward, path, owner
        for name, value in attributes.items():
            yield value, f"{path}.{name}".lstrip("."), owner or type(obj).__name__


def _variables(function: types.FunctionType) -> dict[str, Any]:
    """The variables that a function reads from outside: globals, defaults, and those that it closes over."""
    code, names = function.__code__, function.__globals__
    found = {name: names[name] for name in sorted(names_in(code) & names.keys())}
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        found[name] = parameter.default
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return found | {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
