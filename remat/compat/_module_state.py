"""The attributes of a module, as they were when a function was called."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor

from remat._frozen import Held
from remat._spaces import GONE, same_items
from remat._stock import PRIVATE


class ModuleState:
    """The attributes of a module, but for those by which modules work. Which dict has its children, but not these."""

    __slots__ = ("_before", "_count", "_names", "_parameters", "_sizes")

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = names = vars(module)
        self._count = len(names)
        self._before = own = _own(names)
        self._parameters = _parameters(names)
        self._sizes = _sizes(names, own)

    @property
    def values(self) -> Iterable[Any]:
        """Of the attributes, until it is frozen."""
        return (value for name, value in self._before.items() if name != _CHILDREN)

    def has_changed(self) -> bool:
        """Whether the attributes are not what they were."""
        now = map(self._names.get, self._before, itertools.repeat(GONE))
        return len(self._names) != self._count or not all(map(operator.is_, now, self._before.values()))

    def has_built(self) -> bool:
        """Whether the module has got parameters, buffers or what is in sets, until it is frozen."""
        names = self._names
        return not same_items(_parameters(names), self._parameters) or _sizes(names, _own(names)) != self._sizes

    def freeze(self, read: Container[int]) -> None:
        """The forward is over. Of tensors, hold only those that it has `read`, by identity."""
        before = self._before
        for name, value in before.items():
            if isinstance(value, Tensor) and id(value) not in read:
                before[name] = Held(value, None)
        self._parameters, self._sizes = {}, []

    def now(self) -> dict[str, Any]:
        """What the module has, for `restore`."""
        return dict(self._names)

    def put_back(self, value: Callable[[Any, Any], Any]) -> None:
        """Make the attributes what they were.

        **Arguments:**

        - `value`: what an attribute has to be, by what it was and what it is now.
        """
        if self.has_changed():
            names = self._names
            for name in names.keys() - self._before.keys() - PRIVATE:
                del names[name]
            for name, before in self._before.items():
                if (now := names.get(name, GONE)) is not before:
                    names[name] = value(before, now)

    def restore(self, found: dict[str, Any]) -> None:
        """Undo that, and what the rerun has assigned."""
        names = self._names
        if not same_items(names, found):
            for name in names.keys() - found.keys():
                del names[name]
            names.update(found)


def _own(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in _OTHERS}


_CHILDREN = "_modules"
_OTHERS = PRIVATE - {_CHILDREN}  # an nn.Sequential from which one is taken gets a new dict of them


def _parameters(names: dict[str, Any]) -> dict[str, Any]:
    return dict(names.get("_parameters", {}).items())


def _sizes(names: dict[str, Any], own: dict[str, Any]) -> list[int]:
    """Of what does not begin again."""
    return [len(names.get("_buffers", ())), *(len(v) for v in own.values() if type(v) is set)]
