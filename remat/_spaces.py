"""Where a function keeps state: namespaces, cells, dicts and lists, with what they held when it was called.

A rerun starts from what the forward found, and leaves no trace: what the function assigns (statistics, a count) comes
about once, and what somebody else has assigned since (`training`, say) is not seen.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from remat._frozen import Held

GONE: Any = object()


# Dicts and lists are read and written past the methods of their own classes. These may make what they return, or fetch
# it, and what they keep besides is in attributes, which are looked at themselves.


def _base(held: Any) -> Any:
    """The class of Python's that has the items."""
    if isinstance(held, dict):
        return OrderedDict if isinstance(held, OrderedDict) else dict
    return list


def content_of(held: Any, start: int = 0) -> dict[Any, Any]:
    """What a dict holds, or a list from `start` on: a copy."""
    if type(held) is dict:
        return dict(held)
    base = _base(held)
    if base is list:
        return dict(enumerate(list.__getitem__(held, slice(start, None)), start))
    return {key: dict.__getitem__(held, key) for key in base.__iter__(held)}


def values_of(held: Any) -> Iterable[Any]:
    """The values in a dict, a list or a tuple."""
    if isinstance(held, dict):
        return content_of(held).values()
    return list.__iter__(held) if isinstance(held, list) else tuple.__iter__(held)


def item_of(held: Any, key: Any) -> Any:
    """An item of a dict or a list, or GONE."""
    base = _base(held)
    if base is list:
        return list.__getitem__(held, key) if key < list.__len__(held) else GONE
    return base.get(held, key, GONE)


def set_item(held: Any, key: Any, value: Any) -> None:
    """Put an item there."""
    _base(held).__setitem__(held, key, value)


def as_it_was(before: Any, now: Any, operands: Sequence[Any], replaced: Container[int | None] = ()) -> Any:
    """What a name has to mean in a rerun, by what it meant in the forward and what it means now.

    **Arguments:**

    - `replaced`: positions of operands that have to take the place of the tensors themselves.
    """
    if not isinstance(before, Held):
        return before
    if now is not None and now is before.original() and before.position not in replaced:
        return now
    operand = before.operand(operands)
    return before.stand_in() if operand is None else operand


class Space:
    """A namespace that the function reads, and may assign to."""

    _held: Sequence[str] = ()
    """The names of tensors, once it is frozen."""

    def __init__(self, names: dict[str, Any], only: frozenset[str] | None = None) -> None:
        self.names = names
        self.only = only
        self.before = self.now()

    @property
    def place(self) -> Any:
        """What holds the names."""
        return self.names

    def now(self) -> dict[str, Any]:
        return content_of(self.names) if self.only is None else {n: item_of(self.names, n) for n in self.only}

    def has_changed(self) -> bool:
        """Whether a name means something else than it meant."""
        before = {n: v.original() if isinstance(v, Held) else v for n, v in self.before.items() if v is not GONE}
        return not same_items(self.now(), before)

    def freeze(self, position: dict[int, int]) -> bool:
        """Hold tensors by their position, now that the forward is over: whether names mean something else by now."""
        now, before = self.now(), self.before
        changed = not same_items(now, before)
        if changed:
            before.update(dict.fromkeys(now.keys() - before.keys(), GONE))
        self._held = [name for name, value in before.items() if isinstance(value, Tensor)]
        for name in self._held:
            before[name] = Held(before[name], position.get(id(before[name])))
        return changed

    def assign(self, wanted: dict[str, Any]) -> None:
        """Make the names mean what they mean in `wanted`."""
        for name, value in wanted.items():
            if value is GONE:
                _base(self.names).pop(self.names, name, None)
            elif item_of(self.names, name) is not value:
                set_item(self.names, name, value)

    def put_back(self, value: Callable[[Any, Any], Any]) -> Any:
        """Make the names mean what they meant at the call. What it returns is for `restore`.

        **Arguments:**

        - `value`: what the name of a tensor has to mean, by what it meant and what it means now.
        """
        now, wanted = self.now(), self.before
        if self._held:
            wanted = {**wanted, **{n: value(wanted[n], now.get(n, GONE)) for n in self._held}}
        if not same_items(now, wanted):
            self.assign({**wanted, **dict.fromkeys(now.keys() - wanted.keys(), GONE)})
        return now

    def restore(self, found: Any) -> None:
        """Undo that, and what the rerun has assigned."""
        now = self.now()
        if not same_items(now, found):
            self.assign({**found, **dict.fromkeys(now.keys() - found.keys(), GONE)})


class Members(Space):
    """The same for what descriptors of Python's read and write in an object: its slots, or the content of a cell."""

    def __init__(self, owner: Any, members: Iterable[Any]) -> None:
        self.owner = owner
        self.members = members
        super().__init__({})

    @property
    def place(self) -> Any:
        """What has the members."""
        return self.owner

    def now(self) -> dict[Any, Any]:
        return {member: self._item(member) for member in self.members}

    def _item(self, member: Any) -> Any:
        try:
            return member.__get__(self.owner, type(self.owner))
        except (AttributeError, ValueError):  # a cell that is empty
            return GONE

    def assign(self, wanted: dict[Any, Any]) -> None:
        for member, value in wanted.items():
            now = self._item(member)
            if value is GONE and now is not GONE:
                member.__delete__(self.owner)
            elif value is not now:
                member.__set__(self.owner, value)


class ClassSpace(Space):
    """The same for a class."""

    def __init__(self, kind: type, only: frozenset[str]) -> None:
        self.kind = kind
        super().__init__({}, only)

    @property
    def place(self) -> Any:
        """What has the names."""
        return self.kind

    def now(self) -> dict[str, Any]:
        own = vars(self.kind)
        return {name: own.get(name, GONE) for name in self.only or ()}

    def assign(self, wanted: dict[str, Any]) -> None:
        for name, value in wanted.items():
            now = vars(self.kind).get(name, GONE)
            if value is GONE and now is not GONE:
                delattr(self.kind, name)
            elif value is not now:
                _set_of_class(self.kind, name, value)


def _set_of_class(kind: type, name: str, value: Any) -> None:
    """Past what a metaclass of the user's says of that. Those of C have ways of their own."""
    try:
        type.__setattr__(kind, name, value)
    except TypeError:
        setattr(kind, name, value)


_CONTENTS = (vars(types.CellType)["cell_contents"],)


def of_cell(cell: types.CellType) -> Space:
    """The space that a cell is."""
    return Members(cell, _CONTENTS)


class ClassNames(NamedTuple):
    """What there is in a class, and in its bases."""

    own: tuple[int, Any]
    """What changes with the names of the class."""
    data: frozenset[str]
    """Its names that do not say what it does."""
    slots: tuple[Any, ...]
    """The descriptors of slots, also of its bases."""


_names_of: weakref.WeakKeyDictionary[type, ClassNames] = weakref.WeakKeyDictionary()


def names_of_class(kind: type) -> ClassNames:
    """What is known of a class."""
    own = vars(kind)
    shape = len(own), next(reversed(own), None)
    known = _names_of.get(kind)
    if known is None or known.own != shape:
        data = (n for n, value in own.items() if not n.startswith("__") and not hasattr(type(value), "__get__"))
        members = ((k, m) for k in kind.__mro__ if "__slots__" in vars(k) for m in vars(k).values())
        slots = (m for k, m in members if isinstance(m, types.MemberDescriptorType) and m.__objclass__ is k)
        known = _names_of[kind] = ClassNames(shape, frozenset(data), tuple(slots))
    return known


def attributes_of(obj: Any) -> list[Any]:
    """What the attributes of an object hold, in a dict or in slots."""
    return [*getattr(obj, "__dict__", {}).values(), *Members(obj, names_of_class(type(obj)).slots).now().values()]


class Items(Space):
    """The same for a dict or a list."""

    def __init__(self, held: dict[Any, Any] | list[Any], start: int = 0) -> None:
        """The items of a list from `start` on."""
        self.held = held
        self.start = start
        super().__init__({})

    @property
    def place(self) -> Any:
        """What holds the items."""
        return self.held

    def now(self) -> dict[Any, Any]:
        return content_of(self.held, self.start)

    def _holds(self, items: dict[Any, Any]) -> bool:
        now = self.now()
        return _are_same(now.values(), items.values()) if isinstance(self.held, list) else same_items(now, items)

    def assign(self, wanted: dict[Any, Any]) -> None:
        """Hold what is wanted, and nothing else."""
        items = {key: value for key, value in wanted.items() if value is not GONE}
        if self._holds(items):
            return
        if isinstance(self.held, list):
            list.__setitem__(self.held, slice(self.start, None), items.values())
        else:
            _base(self.held).clear(self.held)
            for key, value in items.items():
                set_item(self.held, key, value)


_SHARED = {"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"}


def is_shared(obj: Any) -> bool:
    """Whether all threads or processes use an object: it changes at any time, and is to stay as it is."""
    module = str(type(obj).__module__)
    return module.partition(".")[0] in _SHARED or module.startswith("torch.distributed.")


def items_of(held: list[Any] | dict[Any, Any], limit: int) -> Items | None:
    """What to note of a dict or a list: all that it holds, but of a long list (a history) only what is appended."""
    if len(held) <= limit:
        return Items(held)
    return Items(held, len(held)) if isinstance(held, list) else None


def same_items(some: dict[Any, Any], others: dict[Any, Any]) -> bool:
    """Whether two dicts hold the very same, in the same order."""
    return _are_same(some, others) and _are_same(some.values(), others.values())


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
