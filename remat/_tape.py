"""The values that a policy keeps of a run."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from remat._layers import inner_tensors, innermost, version_of
from remat._offload import Offloaded
from remat._ops import Layout, bytes_of, layout_of, plain
from remat._values import Content, Key, Op, Value

_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, *_OFFLOAD)


class Kept:
    """A kept value.

    **Attributes:**

    - `offloaded`: whether it is held in CPU memory.
    - `memory`: a tensor over the storage that is held.
    """

    def __init__(self, value: Value, storage: Any, aliases: list[Tensor]) -> None:
        """`aliases`: results over the same memory, which have their own version counters."""
        self.offloaded = value.decision in _OFFLOAD
        self._layout = value.layout
        if self.offloaded:
            self._copy = Offloaded(bytes_of(storage))
            self.memory = self._copy.host
            return
        self.memory = value.layout.over(storage)
        self._watched = [self.memory, *aliases, *(counter for counter, _ in value.counters)]
        self._versions = [*map(version_of, self._watched)]

    def fetch(self) -> None:
        """Start the copy back, if it is offloaded."""
        if self.offloaded:
            self._copy.fetch()

    def get(self) -> Tensor | None:
        """Return the tensor as it was computed, or None if it was changed in place since."""
        if self.offloaded:
            return self._layout.over(self._copy.get().untyped_storage())
        return self.memory.detach() if [*map(version_of, self._watched)] == self._versions else None


class Origin(NamedTuple):
    """The value of a tensor from outside, and its layout in its storage."""

    value: Value
    layout: Layout
    nbytes: int


def origin_of(raw: Tensor, value: Value) -> Origin:
    return Origin(value, layout_of(raw), raw.untyped_storage().nbytes())


_latest = threading.local()
"""`offloading`: a weak reference to the latest tape of this thread that offloads values."""


@dataclass(eq=False)
class Tape:
    """The values that a run kept, and its ops, which say whether they have to run again.

    **Attributes:**

    - `ops`: the ops of the run, in order.
    - `by_key`: the ops with each key, in order. Each has its own memory.
    - `contents`: by identity, the storages that the run met and that outlive it.
    - `kept`: the kept values.
    - `skips`: whether a rerun may skip ops. Not if an autograd.Function or a nested tensor may read memory unseen: in
        Python, or by a kernel that is no op.
    """

    ops: list[Op]
    by_key: dict[Key, list[Op]]
    contents: dict[int, Content]
    kept: dict[Value, Kept]
    skips: bool = True
    _before: weakref.ref[Tape] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if any(k.offloaded for k in self.kept.values()):
            self._before = getattr(_latest, "offloading", None)
            _latest.offloading = weakref.ref(self)

    @property
    def matched(self) -> bool:
        """Whether the policy allows any value of the run to be kept."""
        return any(value.is_saveable for op in self.ops for value in op.values)

    @functools.cached_property
    def read(self) -> set[Value]:
        """The values that ops of the run have read."""
        return {value for op in self.ops for value in op.reads}

    def held(self) -> dict[Any, tuple[Value, Op]]:
        """By the storages that are held, the values in them and the ops that computed them."""
        return {kept.memory.untyped_storage(): (value, self.ops[value.op]) for value, kept in self.kept.items()}

    def content(self, storage: Any) -> Content | None:
        """What a storage holds at the end of the run; None if the run did not meet it."""
        content = self.contents.get(id(storage))
        return content if content is not None and content.storage() is storage else None

    def origins(self, tensor: Tensor, copied: bool) -> list[Origin | None]:
        """The origins of a tensor from outside, for reruns that get another one; None if the run did not read it.

        Another tensor has the same value only if it has the same layout. `copied`: whether it is a copy of what was
        there before the run, which may have changed it.
        """
        found = []
        for raw in inner_tensors(innermost(tensor)):
            content = self.content(raw.untyped_storage()) if plain(raw) else None
            value = None if content is None or content.made else content.first
            found.append(None if value is None or (value.is_replaced and not copied) else origin_of(raw, value))
        return found

    def was_read(self, tensor: Tensor) -> bool:
        """Whether the run may have read a tensor from outside, or a tensor that shares its memory."""
        raw = innermost(tensor)
        return not plain(raw) or ((content := self.content(raw.untyped_storage())) is not None and not content.made)

    def fetch(self) -> None:
        """Start to copy offloaded values back, for this rerun and the next."""
        # The backward goes from the latest tape to the earliest: the one before this is the next.
        before = None if self._before is None else self._before()
        for tape in (self, before):
            for kept in () if tape is None else tape.kept.values():
                kept.fetch()
