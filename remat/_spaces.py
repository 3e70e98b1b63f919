"""Where a function keeps state: namespaces, cells, dicts and lists, with what they held when it was called.

A rerun starts from what the forward found, and leaves no trace: what the function assigns (statistics, a count) comes
about once, and what somebody else has assigned since (`training`, say) is not seen.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

from torch import Tensor

from remat._frozen import Held

GONE: Any = object()


def as_it_was(before: Any, now: Any, operands: Sequence[Any], replaced: Container[int | None] = ()) -> Any:
    """What a name has to mean in a rerun, by what it meant in the forward and what it means now.

    **Arguments:**

    - `replaced`: positions of operands that have to take the place of the tensors themselves.
    """
    if not isinstance(before, Held):
        return before
    if now is before.original() and before.position not in replaced:
        return now
    operand = before.operand(operands)
    return GONE if operand is None else operand


class Space:
    """A namespace that the function reads, and may assign to."""

    def __init__(self, names: dict[str, Any], only: frozenset[str] | None = None) -> None:
        self.names = names
        self.only = only
        self.before = self.now()
        self._others: dict[Any, Any] = {}

    @property
    def place(self) -> Any:
        """What holds the names."""
        return self.names

    def now(self) -> dict[str, Any]:
        return dict(self.names) if self.only is None else {n: self.names.get(n, GONE) for n in self.only}

    def freeze(self, position: dict[int, int]) -> None:
        """Hold tensors by their position, now that the forward is over."""
        for name in self.now().keys() - self.before.keys():
            self.before[name] = self._others.pop(name, GONE)
        self._others.clear()
        for name, value in self.before.items():
            if isinstance(value, Tensor):
                self.before[name] = Held(value, position.get(id(value)))

    def assign(self, wanted: dict[str, Any]) -> None:
        """Make the names mean what they mean in `wanted`."""
        for name, value in wanted.items():
            if value is GONE:
                self.names.pop(name, None)
            elif self.names.get(name, GONE) is not value:
                self.names[name] = value

    def put_back(self, value: Callable[[Any, Any], Any]) -> Any:
        """Make the names mean what they meant at the call. What it returns is for `restore`.

        **Arguments:**

        - `value`: what a name has to mean, by what it meant and what it means now.
        """
        now = self.now()
        self.assign({n: value(v, now.get(n, GONE)) for n, v in self.before.items()})
        return now

    def restore(self, found: Any) -> None:
        """Undo that, and what the rerun has assigned."""
        self.assign({n: found.get(n, GONE) for n in self.before})


class CellSpace(Space):
    """The same for a cell that the function assigns to."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell
        super().__init__({})

    def now(self) -> dict[str, Any]:
        try:
            return {"": self.cell.cell_contents}
        except ValueError:
            return {"": GONE}

    def assign(self, wanted: dict[str, Any]) -> None:
        if wanted.get("", GONE) is not GONE:
            self.cell.cell_contents = wanted[""]


class Tensors(Space):
    """The same for a dict or a list: for the tensors, and tuples of some, in it.

    It may count or log besides, as often as it runs.
    """

    def __init__(self, held: dict[Any, Any] | list[Any], grows: bool = False) -> None:
        """`grows`: whether tensors that a rerun adds to it stay there too."""
        self.held = held
        self._grows = grows
        super().__init__({})
        self._others = {k: v for k, v in self._items() if k not in self.before}

    @property
    def place(self) -> Any:
        return self.held

    def _items(self) -> Iterable[tuple[Any, Any]]:
        return self.held.items() if isinstance(self.held, dict) else enumerate(self.held)

    def as_found(self) -> Any:
        """For `restore`, without `put_back`."""
        return dict(self._items()), dict(self._items())

    def now(self) -> dict[Any, Any]:
        return {k: v for k, v in self._items() if has_tensors(v)}

    def put_back(self, value: Callable[[Any, Any], Any]) -> Any:
        now, items = dict(self._items()), {}
        for key, v in {**now, **self.before}.items():
            if key in self.before:
                v = value(v, now.get(key, GONE))
            elif has_tensors(v):  # somebody has put it there since
                continue
            if v is not GONE:
                items[key] = v
        self._fill(items)
        return now, items

    def restore(self, found: Any) -> None:
        items, before = found
        keys = list(before)
        for key, v in self._items():
            if isinstance(self.held, list):
                key = keys[key] if key < len(keys) else len(items)
            if not has_tensors(v) and before.get(key, GONE) is not v:
                items[key] = v
            elif self._grows and key not in before:
                items.setdefault(key, v)
        self._fill(items)

    def _fill(self, items: dict[Any, Any]) -> None:
        if isinstance(self.held, list):
            if not _are_same(self.held, items.values()):
                self.held[:] = items.values()
        elif not (_are_same(self.held, items) and _are_same(self.held.values(), items.values())):
            self.held.clear()
            self.held.update(items)


def has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a tuple with some."""
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(has_tensors, value)))


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
