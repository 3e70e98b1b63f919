"""What a function closes over, kept as it was when it was called.

A rerun comes later: by then a loop variable has moved on, and `torch.func.functional_call` has given a module its
own parameters back. For the rerun the function is put together again as it was, and modules get the tensors that they
held.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import RematError
from remat._frozen import ATOMS, Freezer, Frozen, Held, Table, Thawer, cell_contents, parts
from remat._methods import names_in
from remat._spaces import GONE, Space, as_it_was, content_of, item_of, set_item
from remat._state import State

_LAZY = (
    "remat: {} is lazy and has yet to make its parameters, and a rerun would begin after that. Call it once before, in "
    "torch.no_grad()."
)
_OPAQUE = (Tensor, type, types.ModuleType, str, bytes, int, float, complex, types.CodeType)
_Slot = tuple[Any, Any, Held | Frozen]  # a dict or list, a key of it, and what holds operands there


def _holds(value: Any, position: dict[int, int]) -> bool:
    """Whether `value` is an operand, or a tuple with some."""
    return id(value) in position or (isinstance(value, tuple) and any(_holds(x, position) for x in value))


def _slots(roots: Iterable[Any], position: dict[int, int], freeze: Freezer) -> Iterator[_Slot]:
    """Wherever operands are held that can be reached from `roots`: attributes, dicts, lists, globals. This is bounded.

    **Arguments:**

    - `roots`: the function and its arguments.
    - `position`: the operands looked for, by identity.
    - `freeze`: what to hold them by.
    """
    seen: set[int] = set()
    todo = [(root, 6) for root in roots]
    while todo and len(seen) < 20_000:
        obj, depth = todo.pop()
        if id(obj) in seen or isinstance(obj, _OPAQUE):
            continue
        seen.add(id(obj))
        nearby: list[Any] = list(parts(obj))
        if isinstance(obj, types.FunctionType):
            for cell in obj.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    nearby.append(cell.cell_contents)
            for name in names_in(obj.__code__) & obj.__globals__.keys():
                value = obj.__globals__[name]
                nearby.append(value)
                if _holds(value, position):
                    yield obj.__globals__, name, freeze(value)
        elif isinstance(obj, (dict, list)):
            for key, value in content_of(obj).items():
                nearby.append(value)
                if _holds(value, position):
                    yield obj, key, freeze(value)
        elif isinstance(obj, (tuple, set, frozenset)):
            nearby += obj
        else:
            nearby.append(getattr(obj, "__dict__", None))
        if depth:
            todo += [(o, depth - 1) for o in nearby]


class Closure:
    """A function and its static arguments, together with what they close over at the time of a call."""

    def __init__(self, fun: Callable[..., Any], statics: Iterable[Any]) -> None:
        self._live: Any = [fun, *statics]  # until it is frozen
        roots = [x for x in self._live if type(x) not in ATOMS]
        self._contents = cell_contents(roots)
        state = State(roots)
        if state.lazy is not None:
            raise RematError(_LAZY.format(type(state.lazy).__name__))
        self._spaces = [*state.names, *state.of_modules, *state.others]
        self._slots: list[_Slot] = []
        self._replaced: set[int] = set()
        self._originals: list[weakref.ref[Tensor]] = []
        self._frozen: list[Any] = []
        self._table = Table()

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """The user's own call."""
        return self._live[0](*args, **kwargs)

    def tensors(self) -> list[Tensor]:
        """The tensors directly in cells."""
        return [content for _, content in self._contents.values() if isinstance(content, Tensor)]

    def assigned(self) -> list[Tensor]:
        """The tensors that the function has replaced, in names of its own, by others."""
        found = []
        for space in self._spaces:
            now = space.now()
            found += [t for n, t in space.before.items() if isinstance(t, Tensor) and now.get(n, GONE) is not t]
        return found

    def freeze(self, originals: Sequence[Tensor], captured: int, in_rerun: bool) -> None:
        """Hold tensors by their position in `originals` alone, and functions as they were.

        **Arguments:**

        - `originals`: the operands of the call.
        - `captured`: the position from which on they are captured tensors, not arguments.
        - `in_rerun`: whether the call is part of the rerun of another.
        """
        position = {id(t): i for i, t in enumerate(originals)}
        self._originals = [weakref.ref(t) for t in originals]
        # A transform inside of the function wraps what it is given, out of sight: it must find the operand itself, for
        # a wrapper of the forward's stack means nothing on the rerun's.
        # In an outer rerun, what the function found is an operand of that rerun: gone from there afterwards.
        self._replaced = {i for i, t in enumerate(originals) if in_rerun or internals.is_wrapper(t)}
        freezer = Freezer(self._contents, position)
        wanted = {id(originals[i]): i for i in self._replaced if in_rerun or i >= captured}
        slots = list(_slots(self._live, wanted, freezer)) if wanted else []
        self._frozen = [freezer(x) for x in self._live]
        self._table = freezer.table
        self._live, self._contents = [], {}
        for space in self._spaces:
            space.freeze(position)
        if slots:
            self._slots = self._not_put_back(slots)

    def replace(self, positions: Iterable[int]) -> None:
        """From now on put the operands at `positions` wherever their originals are held."""
        self._replaced |= set(positions)
        originals = [ref() for ref in self._originals]
        wanted = {id(originals[i]): i for i in positions}
        thaw = self.thawer(originals)
        self._slots = self._not_put_back(_slots([thaw(x) for x in self._frozen], wanted, Freezer({}, wanted)))
        thaw.empty()

    def _not_put_back(self, slots: Iterable[_Slot]) -> list[_Slot]:
        """Those where no space puts something else: what is there now, the function may have put there itself."""
        before = {(id(s.place), n): v for s in self._spaces for n, v in s.before.items()}
        return [slot for slot in slots if before.get((id(slot[0]), slot[1]), now := item_of(*slot[:2])) is now]

    def thawer(self, operands: Sequence[Any]) -> Thawer:
        """What puts functions together again for one rerun."""
        return Thawer(self._table, operands)

    def restored(self, operands: Sequence[Tensor], thaw: Thawer) -> contextlib.AbstractContextManager[list[Any]]:
        """The function and its static arguments as they were, reading `operands`. What they assign is taken back."""
        if not self._spaces and not self._slots:
            return contextlib.nullcontext([thaw(x) for x in self._frozen])
        return self._restored(operands, thaw)

    @contextlib.contextmanager
    def _restored(self, operands: Sequence[Tensor], thaw: Thawer) -> Iterator[list[Any]]:
        def was(before: Any, now: Any) -> Any:
            return as_it_was(before, now, operands, self._replaced)

        found: list[tuple[Space, Any]] = []
        slots = []
        try:
            for space in self._spaces:
                found.append((space, space.put_back(was)))
            for container, key, held in self._slots:
                before = item_of(container, key)
                if before is not GONE:  # it is, where the function put it there itself
                    value = thaw(held)
                    set_item(container, key, value)
                    slots.append((container, key, before, value))
            yield [thaw(x) for x in self._frozen]
        finally:
            for container, key, before, value in reversed(slots):
                if item_of(container, key) is value:
                    set_item(container, key, before)
            for space, what in reversed(found):  # two functions may name the same global
                space.restore(what)
