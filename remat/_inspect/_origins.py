"""The origins of residuals: the op that made a tensor, or its name outside the function."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

import optree
import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._closure import parts_of
from remat._dispatch_mode import DispatchMode
from remat._errors import call_site
from remat._inspect._forward import tensors
from remat._names import current_name
from remat._ops import facts_of

# Tensors that the function makes.


class _Origin:
    """The op that computed the content of a storage."""

    def __init__(self, tensor: Tensor, func: Any) -> None:
        self.storage = weakref.ref(tensor.untyped_storage())
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self.changed_by(func)

    def changed_by(self, func: Any) -> None:
        self.why, self.where = f"output of {func}", call_site()

    def named(self, name: str) -> None:
        self.why, self.where = f"named {name!r}", call_site()


class Origins(DispatchMode):
    """Records the storages that a function makes, and where it first reads other storages."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, _Origin] = {}
        self.read: dict[int, tuple[Any, str]] = {}

    def of(self, storage: Any) -> _Origin | None:
        """The origin of a storage, if the function made it."""
        origin = self.made.get(id(storage))
        return origin if origin is not None and origin.storage() is storage else None

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # its argument is new, from `torch.tensor`
            for storage in (t.untyped_storage() for t in tensors((args, kwargs))):
                if self.of(storage) is None and id(storage) not in self.read:
                    self.read[id(storage)] = storage, call_site()
        out = func(*args, **kwargs)
        for t in tensors(out):
            storage = t.untyped_storage()
            origin = self.of(storage)
            if id(storage) in self.read:
                continue
            if origin is None:
                self.made[id(storage)] = _Origin(t, func)
            elif facts_of(func).writes and not facts_of(func).is_view:
                origin.changed_by(func)
            elif (name := current_name()) is not None:
                origin.named(name)
        return out


# Names of tensors from outside.


def _argument_names(fun: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, str]]:
    """The leaves of the arguments of a call, each with a name such as `x['w']`."""
    try:
        arguments = inspect.signature(fun).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # some builtins have no signature
        arguments = {"args": args, **kwargs}
    for name, value in arguments.items():
        accessors, leaves, _ = optree.tree_flatten_with_accessor(value, none_is_leaf=True, namespace="torch")
        yield from zip(leaves, (a.codify(name) for a in accessors), strict=True)


def _globals_of(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    return names.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _near(obj: Any, path: str, owner: str) -> Iterator[tuple[Any, str, str]]:
    """The contents of an object, each as (content, its name, the function that holds it)."""
    if isinstance(obj, types.FunctionType):
        name = obj.__name__
        named = inspect.getclosurevars(obj).nonlocals if obj.__closure__ else {}
        used = {n: obj.__globals__[n] for n in _globals_of(obj.__code__) if n in obj.__globals__}
        parameters = obj.__code__.co_varnames[: obj.__code__.co_argcount]
        defaults = dict(zip(parameters[::-1], (obj.__defaults__ or ())[::-1], strict=False))
        for n, value in {**used, **(obj.__kwdefaults__ or {}), **defaults, **named}.items():
            yield value, n, name
    elif isinstance(obj, types.MethodType):
        yield obj.__self__, "self", obj.__func__.__name__
        yield obj.__func__, path, owner
    elif pieces := parts_of(obj):
        for piece in pieces:
            yield piece, path, owner
    elif isinstance(obj, torch.nn.Module):
        for n, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            yield tensor, f"{path}.{n}".lstrip("."), owner or type(obj).__name__
        yield type(obj).forward, path, owner
    elif isinstance(obj, dict):
        for key, value in obj.items():
            yield value, f"{path}[{key!r}]", owner
    elif isinstance(obj, (list, tuple)):
        for i, value in enumerate(obj):
            yield value, f"{path}[{i}]", owner
    elif not isinstance(obj, (type, types.ModuleType)):
        for n, value in getattr(obj, "__dict__", {}).items():
            yield value, f"{path}.{n}".lstrip("."), owner or type(obj).__name__


class Names:
    """The names of the tensors that a call takes from outside."""

    def __init__(self, fun: Any, args: Any, kwargs: Any) -> None:
        self._names: dict[int, tuple[Any, str]] = {}
        self._fun = getattr(fun, "__name__", type(fun).__name__)
        others = []
        for leaf, name in _argument_names(fun, args, kwargs):
            if isinstance(leaf, Tensor):
                self.add(leaf, f"from the argument {name}")
            elif not isinstance(leaf, (int, float, str, type(None))):
                others.append((leaf, name))
        for root, path in others:
            for tensor, name, _ in self._reachable(root, path):
                self.add(tensor, f"from the argument {name}")
        for tensor, name, owner in self._reachable(fun, ""):
            self.add(tensor, f"captured {name} (closure of {owner or self._fun})")

    @staticmethod
    def _reachable(root: Any, path: str) -> Iterator[tuple[Tensor, str, str]]:
        """The tensors that can be reached from an object, nearest first, up to a limit."""
        seen: set[int] = set()
        level = [(root, path, "")]
        for _ in range(8):
            following: list[tuple[Any, str, str]] = []
            for obj, name, owner in level:
                if isinstance(obj, Tensor):
                    yield obj, name, owner
                elif id(obj) not in seen and len(seen) < 10_000:
                    seen.add(id(obj))
                    following += _near(obj, name, owner)
            level = following

    def add(self, tensor: Tensor, why: str) -> None:
        raw = internals.innermost(tensor)
        if raw.layout == torch.strided:
            storage = raw.untyped_storage()
            self._names.setdefault(id(storage), (storage, why))

    def rank(self, why: str) -> int:
        """The sort key of a residual: arguments and captured tensors in the order of the call, then the others."""
        found = [i for i, (_, name) in enumerate(self._names.values()) if name == why]
        return found[0] if found else len(self._names)

    def of(self, storage: Any) -> str:
        return self._names.get(id(storage), (None, f"captured a tensor (closure of {self._fun})"))[1]
