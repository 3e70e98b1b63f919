"""The tensors that a run reads, and those that it makes without a derivative.

NOTE [survivors]: a function may keep a tensor that it makes, and a rerun then finds it. That is right for a table that
is made on first use. It is wrong for a running average, `self.mean = 0.9 * self.mean + x`: the rerun would go on from
the new mean. The reads tell them apart. An *occasion* is a position in the signature, and the torch function that reads
there, with the place among its arguments. The rerun may read a survivor only on an occasion on which the forward read
it as it is now: the forward reads the new mean later than the old one, and changes an accumulator after it has read it.
If both have the same occasion, the reads are counted, beginning with the survivor's: the rerun reads one tensor more
there. All tensors that a run makes are counted together, because the rerun makes other tensors than the forward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from remat import _torch_internals as internals
from remat._signature import hash_of

Occasion = tuple[int, Any]
"""A position in the signature, and the `Reader`: or, in a nested call, the occasion there."""

kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, living tensors that runs made without a derivative. Reruns of other calls must not read them."""


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
    """The `Reader`, or the occasion in a nested call."""


class Survivor(NamedTuple):
    """A tensor that a run made without a derivative and read, and that is still alive: NOTE [survivors]."""

    ref: weakref.ref[Tensor]
    version: int
    times: dict[Occasion, int]
    """On each occasion, how often a tensor was read, beginning with this one."""


class Made:
    """Holds the tensors by weak references, and notes the occasions on which they are read."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Tensor]] = {}
        """By identity."""
        self.times: defaultdict[Occasion, int] = defaultdict(int)
        """How often one of the tensors was read on each occasion."""
        self._occasions: dict[int, dict[Occasion, tuple[int, int]]] = {}
        """By identity: on each occasion, how many reads came before that of the tensor; its version then."""

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
        occasions, version = self._occasions.setdefault(id(tensor), {}), internals.version(tensor)
        if occasions.get(occasion, (0, None))[1] != version:
            occasions[occasion] = self.times[occasion], version
        self.times[occasion] += 1

    def adopt(self, inner: Made, position: int) -> None:
        """Take over the notes of a nested run, which has ended at this position of the signature."""
        self.refs.update(inner.refs)
        for key, occasions in inner._occasions.items():
            of_tensor = self._occasions.setdefault(key, {})
            for occasion, (before, version) in occasions.items():
                of_tensor[position, occasion] = before + self.times[position, occasion], version
        for occasion, times in inner.times.items():
            self.times[position, occasion] += times

    def keep(self) -> list[tuple[int, Tensor]]:
        """The tensors that are still alive, by identity. Reruns of other calls must not read them."""
        alive = [(key, tensor) for key, ref in self.refs.items() if (tensor := ref()) is not None]
        for key, tensor in alive:
            kept[key] = tensor
        return alive

    def survivors(self, outside: Iterable[Read]) -> list[Survivor]:
        """The tensors that are read and still alive.

        **Arguments:**

        - `outside`: the `Read`s of outside tensors. A tensor is left out if one of its shape was read on the same
            occasion: it may have replaced that one.
        """
        found = []
        for key, tensor in self.keep():
            occasions, now = self._occasions.get(key), internals.version(tensor)
            if occasions is not None:
                shape = hash_of(tensor)
                alike = {(r.position, r.reader) for r in outside if hash_of(r.tensor) == shape}
                if alike.isdisjoint(occasions):
                    times = {o: self.times[o] - before for o, (before, version) in occasions.items() if version == now}
                    found.append(Survivor(self.refs[key], now, times))
        return found
