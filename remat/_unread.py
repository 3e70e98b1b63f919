"""Find the arguments whose values no derivative reads.

No derivative of `total + x` depends on the value of `total`. If a function only adds to an argument, takes views of it
and multiplies it by numbers, and does only this with the results, its reruns need the shape of the argument but not its
value. So the node does not save it. A rerun gets NaN in its place, so that a mistake would be loud.

Each read is noticed: as a torch call, by what an inner transform wraps, or by what a nested run has read. If code that
no mode sees has made a tensor, it may have read any argument.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._effects import Effects, reads_no_value, tensors_in
from remat._labels import Labels
from remat._tree import Picked

_Sources = frozenset[int]
_NONE: _Sources = frozenset()
_PLAIN = {Tensor, torch.nn.Parameter}


class Unread(dict[int, tuple["weakref.ref[Tensor]", _Sources]]):
    """By identity, the arguments whose values a run has not read, and the sums of these.

    With each comes a weak reference, and the identities of the arguments that are in the sum: its sources.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        """`given`: the tensors among the arguments of the run."""
        super().__init__(
            (id(t), (weakref.ref(t), frozenset([id(t)])))
            for t in given
            if type(t) is Tensor and t.layout is torch.strided and t.is_floating_point()
        )

    def sources(self, tensor: Any) -> _Sources:
        """The arguments in a sum. Empty if the tensor is no sum of unread arguments."""
        ref, sources = self.get(id(tensor), (None, _NONE))
        return sources if ref is not None and ref() is tensor else _NONE

    def among(self, operands: Sequence[Tensor]) -> frozenset[int]:
        """The positions of unread arguments. A rerun below a transform may take two operands for one tensor."""
        below = Counter(id(internals.innermost(t)) for t in operands)
        unread = (i for i, t in enumerate(operands) if id(t) in self.sources(t))
        return frozenset([i for i in unread if below[id(internals.innermost(operands[i]))] == 1])

    def note(self, effects: Effects, args: Any, kwargs: Any, out: Any) -> None:
        """Note that a torch call has returned `out`."""
        tensors = tensors_in([*args, *kwargs.values()])
        sources = _NONE.union(*map(self.sources, tensors))
        if not sources:
            return
        as_torch = _PLAIN.issuperset(map(type, tensors))  # a subclass may compute something else
        if effects.shows_strides or not as_torch or not reads_no_value(effects, args, kwargs):
            self.drop(sources)
        elif isinstance(out, Tensor):
            self.add(out, sources)

    def add(self, tensor: Tensor, sources: _Sources) -> None:
        """Note a sum of unread arguments."""
        if sources:
            self[id(tensor)] = weakref.ref(tensor), sources

    def drop(self, sources: _Sources) -> None:
        """Note that the run has read these arguments, or sums of them."""
        left = {key: (ref, s - sources) for key, (ref, s) in self.items() if s - sources}
        self.clear()
        self.update(left)

    def end(self, results: Picked, labels: Labels) -> None:
        """Called when the run has ended."""
        if not all(map(labels.has, results.tensors)):  # made unseen, perhaps from any of the arguments
            self.clear()
        returned = {*map(id, results.leaves)}
        for key, (ref, sources) in [*self.items()]:
            if sources != {key} and key not in returned and ref() is not None:  # kept, and somebody may read it
                self.drop(sources)

    def adopt(self, inner: Unread | None, read: Iterable[Any]) -> None:
        """Called when a nested run has ended. `read`: what it was given or has read from outside."""
        for value in (each.value for each in read):
            if inner is None or not inner.sources(value):
                self.drop(self.sources(value))

    def adopt_results(self, inner: Unread, returned: Sequence[Any], attached: Sequence[Any]) -> None:
        """Note what a nested run has returned: sums of its unread arguments. `attached`: with their derivative."""
        of = {source: self.get(source, (None, _NONE))[1] for _, sources in inner.values() for source in sources}
        for before, after in zip(returned, attached, strict=True):
            self.add(after, _NONE.union(*(of[source] for source in inner.sources(before))))
