"""Labels tell the tensors of a run apart, in the forward and in a rerun.

NOTE [labels]: the signature says of each call which tensors it was given, by their labels. A tensor from outside has a
number, in the order of the first reads. A differentiated tensor that the run made has the position of its call in the
signature. Any other has the call that computed it, with the labels of what that call was given, and the number of
writes since: value numbering. So a table that is made on first use and kept has the same label in a rerun, which finds
it. A running average that is replaced (`self.mean = 0.9 * self.mean + x`), an argument that is kept for the next call
(`self.last = x`), or two tensors that have changed places have other labels, and the rerun notices.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from remat import _torch_internals as internals
from remat._effects import tensors_in

kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, living tensors that runs made without a derivative. Reruns of other calls must not read them."""

_NESTED = 1 << 40  # tells the labels of an outer run from those of a nested one


class Read(NamedTuple):
    """A tensor that a run was given or has read from outside, at the first read."""

    tensor: Tensor
    value: Tensor
    """The tensor that was read in its place, in an outer rerun; else the tensor itself."""
    version: int
    """How often the value had been written to."""
    label: int | None
    reader: Any
    """The torch function that read it."""


class Survivor(NamedTuple):
    """A tensor that a run made without a derivative and read, and that is still alive."""

    ref: weakref.ref[Tensor]
    version: int
    label: int | None
    begun: int
    """The version when it was made."""


class Labels(dict[int, tuple[weakref.ref[Tensor], int | None, int | None]]):
    """By identity, the tensors that a run knows: a weak reference, the label, and from which version on writes count.

    That is None if the label changes with each write. A label of None tells nothing: the run may have made the tensor
    unseen.
    """

    def __init__(self, depth: int) -> None:
        """`depth`: how many transforms there are around the run."""
        super().__init__()
        self._depth = depth
        self.results: list[weakref.ref[Tensor]] = []
        """The differentiated tensors that calls have returned."""
        self._read_at: dict[int, int] = {}
        """By identity, tensors that the run made without a derivative and read, and their versions then."""

    def note(self, tensor: Tensor, label: int | None) -> None:
        """Give a label to a tensor from outside, or to a differentiated one."""
        self[id(tensor)] = weakref.ref(tensor), label, None

    def note_plain(self, tensor: Tensor, label: int | None, begun: int | None = None) -> None:
        """Give a label to a tensor that a run made without a derivative. `begun`: its version then, if not now."""
        self._read_at.pop(id(tensor), None)  # the identity may have belonged to a dead tensor
        self[id(tensor)] = weakref.ref(tensor), label, internals.version(tensor) if begun is None else begun

    def has(self, tensor: Tensor) -> bool:
        """Whether the run knows this tensor."""
        entry = self.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def of(self, tensor: Tensor) -> int | None:
        """The label of a tensor that the run reads. A transform inside may have wrapped it."""
        tensor = internals.unwrap_dead(tensor)
        while not self.has(tensor) and internals.level_of(tensor) > self._depth:
            tensor = internals.unwrapped(tensor)
        if not self.has(tensor):
            return None
        _, label, begun = self[id(tensor)]
        if begun is None:
            return label
        version = self._read_at[id(tensor)] = internals.version(tensor)
        if label is None or tensor.requires_grad:  # an autograd.Function has returned it
            return None
        return hash((label, version - begun)) | 1

    def of_all(self, args: Any) -> list[int | None]:
        """The labels of all tensors in the arguments of a call."""
        return [*map(self.of, tensors_in(args))]

    def note_result(self, out: Tensor, label: int | None, is_new: Any) -> None:
        """Give a label to a differentiated result of a call, unless the call has returned what it was given."""
        entry = None if is_new else self.get(id(out))
        if entry is not None and entry[0]() is out:
            return
        if is_new or not (internals.is_wrapper(out) and self.returns(out)):
            ref = weakref.ref(out)
            self[id(out)] = ref, label, None
            self.results.append(ref)

    def returns(self, out: Tensor) -> bool:
        """Whether a call has returned what it was given, perhaps wrapped by a transform around the run.

        Then that has the same label: a rerun below the transform gets the tensor itself.
        """
        for layer in internals.layers(out):
            if self.has(layer):
                if layer is not out:
                    self[id(out)] = weakref.ref(out), *self[id(layer)][1:]
                return True
        return False

    def adopt(self, inner: Labels, outside: Container[int]) -> None:
        """Take over the living tensors that a nested run has made, all but those from `outside` of it."""
        own = {key: entry for key, entry in inner.items() if key not in outside and entry[0]() is not None}
        self.update(own)
        self._read_at.update((key, version) for key, version in inner._read_at.items() if key in own)

    def keep(self) -> list[tuple[int, Tensor]]:
        """The tensors made without a derivative that are alive. Reruns of other calls must not read them."""
        plain = [(key, ref()) for key, (ref, _, begun) in self.items() if begun is not None]
        alive = [(key, tensor) for key, tensor in plain if tensor is not None]
        kept.update(alive)
        return alive

    def any_alive(self, but: Container[int]) -> bool:
        """Whether a tensor that the run made is still alive, besides plain ones with these identities."""
        plain = (ref for key, (ref, _, begun) in self.items() if begun is not None and key not in but)
        return any(ref() is not None for ref in (*self.results, *plain))

    def survivors(self) -> list[Survivor]:
        """Those that were read as they are now, and are still alive."""
        found = []
        for key, tensor in self.keep():
            ref, label, begun = self[key]
            now = internals.version(tensor)
            if begun is not None and self._read_at.get(key) == now:
                found.append(Survivor(ref, now, label, begun))
        return found


def of_outside(number: int) -> int:
    """The label of the tensor from outside with this number."""
    return 2 * number


def of_result(position: int, i: int = 0) -> int:
    """The label of a differentiated result of the call at this position."""
    return -2 * (position + 1) if i == 0 else hash((position, i)) & ~1


def in_nested(label: int | None) -> int | None:
    """The label of a tensor in a nested run. If calls tell what computed it, the label is odd, and the same there."""
    return label if label is None or label & 1 else hash((_NESTED, label)) & ~1


def together(labels: Iterable[int | None]) -> int | None:
    """One label for several tensors, in order. None if one of them tells nothing."""
    found = tuple(labels)
    return None if None in found else hash(found)
