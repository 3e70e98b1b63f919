"""The tensors that a run reads, and those that it makes without a derivative.

NOTE [survivors]: a function may keep a tensor that it makes, and a rerun then finds it. That is right for a table that
is made on first use. It is wrong for a running average, `self.mean = 0.9 * self.mean + x`: the rerun would go on from
the new mean. The reads tell them apart. An *occasion* is a position in the signature and the torch function that reads
there. The rerun may read a survivor only on an occasion on which the forward read it: the forward reads the new mean
later than the old one. If both have the same occasion, the reads are counted: the rerun reads one tensor more there.
All tensors that a run makes are counted together, because the rerun makes other tensors than the forward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from remat._signature import hash_of

Occasion = tuple[int, Any]
"""A position in the signature, and the torch function that reads: or, in a nested call, the occasion there."""

kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, living tensors that forwards made without a derivative. Reruns of other calls must not read them."""


class Read(NamedTuple):
    """A tensor that a run was given or has read from outside, at the first read."""

    tensor: Tensor
    value: Tensor
    """The tensor that was read in its place, in an outer rerun; else the tensor itself."""
    version: int
    """How often the value had been written to."""
    position: int
    """The length of the signature."""
    reader: Any
    """The torch function that read it."""


class Made:
    """Holds the tensors by weak references, and notes the occasions on which they are read."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Tensor]] = {}
        """By identity."""
        self.times: defaultdict[Occasion, int] = defaultdict(int)
        """How often one of the tensors was read on each occasion."""
        self._occasions: dict[int, set[Occasion]] = {}
        """By identity."""

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that was made."""
        if not self.has(tensor):
            self._occasions.pop(id(tensor), None)  # the identity may have belonged to a dead tensor
            self.refs[id(tensor)] = weakref.ref(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Whether the run made this tensor."""
        ref = self.refs.get(id(tensor))
        return ref is not None and ref() is tensor

    def count(self, tensor: Tensor, occasion: Occasion) -> None:
        """Note that the run reads a tensor that it made."""
        self._occasions.setdefault(id(tensor), set()).add(occasion)
        self.times[occasion] += 1

    def adopt(self, inner: Made, position: int) -> None:
        """Take over the notes of a nested run, which has ended at this position of the signature."""
        self.refs.update(inner.refs)
        for key, occasions in inner._occasions.items():
            self._occasions.setdefault(key, set()).update((position, occasion) for occasion in occasions)
        for occasion, times in inner.times.items():
            self.times[position, occasion] += times

    def survivors(self, outside: Iterable[Read]) -> list[tuple[weakref.ref[Tensor], dict[Occasion, int]]]:
        """The tensors that are read and still alive, with their occasions and how often one was read on each.

        **Arguments:**

        - `outside`: the `Read`s of outside tensors. A tensor is left out if one of its shape was read on the same
            occasion: it may have replaced that one.
        """
        found = []
        for key, ref in self.refs.items():
            tensor = ref()
            if tensor is None:
                continue
            kept[key] = tensor
            occasions = self._occasions.get(key)
            if occasions is not None:
                shape = hash_of(tensor)
                alike = {(r.position, r.reader) for r in outside if hash_of(r.tensor) == shape}
                if alike.isdisjoint(occasions):
                    found.append((ref, {occasion: self.times[occasion] for occasion in occasions}))
        return found
