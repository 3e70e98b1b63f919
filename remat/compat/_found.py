"""What a function finds without being given it - globals, what modules hold - as it was when it was called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from remat import _torch_internals as internals
from remat._spaces import GONE, Space, as_it_was
from remat._state import State


class Found(State):
    """The state that a function finds, to be put back for its reruns."""

    def __init__(self, roots: Iterable[Any]) -> None:
        super().__init__(roots)
        self._hooks = internals.hooks_so_far()  # how many modules have got
        self._sizes_of_sets = [*map(len, self.sets)]
        self._has_built = False

    def finish(self, given: Sequence[int]) -> None:
        """The forward is over. `given`: the identities of the tensors that a rerun will be given."""
        position = {key: i for i, key in enumerate(given)}
        changed = [space.freeze(position) for space in self._flags]
        if any(changed) and self._builds():
            self._has_built = True
            for space in self.buffers:
                space.only = frozenset(space.before)
        for space in (*self.names, *self.buffers):
            space.freeze(position)

    def _builds(self) -> bool:
        """Whether modules have got parameters, children or hooks: behind a flag, which has to be as it is now."""
        return (
            any(self.empty)
            or any(self._builds_children(space) for space in self.children)
            or any(space.has_changed() for space in self.parameters)
            or any(len(space.names) != len(space.before) for space in self.buffers)
            or [*map(len, self.sets)] != self._sizes_of_sets
            or internals.has_hooks_since(self._hooks, self.modules.values())
        )

    def _builds_children(self, space: Space) -> bool:
        """Whether a child is new, and not one without parameters and buffers that has taken the place of another."""
        for name, child in space.now().items():
            if child is not None and id(child) not in self.modules:
                modules: Iterator[nn.Module] = child.modules()
                if space.before[name] in (None, GONE) or any(m._parameters or m._buffers for m in modules):
                    return True
        return False

    @property
    def _flags(self) -> list[Space]:
        """What has to be as it is now where modules were built."""
        return [*self.attributes, *self.children, *self.others]

    @property
    def _spaces(self) -> list[Space]:
        return [*self.names, *self.buffers, *self._flags]

    def undo(self) -> None:
        """Put back what the forward, which is not over, has put into names and modules."""
        for space in self._spaces:
            space.put_back(lambda before, now: before)

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a module has a tensor."""
        return any(
            tensor is held
            for m in self.modules.values()
            for names in (vars(m), m._buffers, m._parameters)
            for held in names.values()
        )

    @contextlib.contextmanager
    def restored(self, with_state: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within it, what was found is as it was; after it, as it was before.

        So a loop variable has not moved on for the rerun, and what the function itself assigns comes about once.

        **Arguments:**

        - `with_state`: whether this goes for modules and containers too.
        - `tensors`: what the rerun is given.
        """

        def was(before: Any, now: Any) -> Any:
            return as_it_was(before, now, tensors)

        put_back, stays = list(self.names), list[Space]()
        (put_back if with_state else stays).extend(self.buffers)
        (put_back if with_state and not self._has_built else stays).extend(self._flags)
        found = [(space, space.now()) for space in stays]
        try:
            for space in put_back:
                found.append((space, space.put_back(was)))
            yield
        finally:
            for space, now in reversed(found):  # two functions may name the same global
                space.restore(now)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to restore."""
        return not (self.names or self.modules or self.others)

    @property
    def has_other_buffers(self) -> bool:
        """Whether modules have got others than they had."""
        return any(space.has_changed() for space in self.buffers)
