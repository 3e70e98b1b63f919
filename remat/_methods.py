"""The methods that a call of an object may run: what they find in globals counts as it was, as for a function."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

_KNOWN = {*sys.stdlib_module_names, "remat", "torch"}
"""Packages whose methods keep nothing in globals that a rerun should not find as it is."""


_DECORATORS = 10  # around each other: an object may say that it wraps itself


@functools.cache
def is_known(module: Any) -> bool:
    """Whether a module, by what a class says is its name, belongs to such a package."""
    return isinstance(module, str) and module.partition(".")[0] in _KNOWN


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes in the code, and in functions that are defined in it."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def methods_of(kind: type, name: str) -> list[types.FunctionType]:
    """The method with this name, those that it names and so on, in all classes of an object but those of torch.

    With `super()` it may be any of these classes. Of what is decorated, both functions.
    """
    found: list[types.FunctionType] = []
    if is_known(kind.__module__):
        return found
    spaces = [vars(k) for k in kind.__mro__ if not is_known(k.__module__)]
    names, todo = set[str](), {name}
    while todo:
        names |= todo
        new = [f for space in spaces for n in todo & space.keys() for f in _functions(space[n])]
        found += new
        todo = set[str]().union(*(names_in(f.__code__) for f in new)) - names
    return found


def called_method(obj: Any) -> tuple[type, str] | None:
    """The class and the name of the method that a call of an object runs."""
    if isinstance(obj, types.MethodType):
        return type(obj.__self__), getattr(obj.__func__, "__name__", "__call__")
    return (type(obj), "__call__") if callable(obj) and not isinstance(obj, type) else None


def _functions(value: Any) -> Iterator[types.FunctionType]:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    for _ in range(_DECORATORS):
        if isinstance(value, types.FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)
