"""Labels tell the tensors of a run apart, in the forward and in a rerun.

NOTE [labels]: the signature says of each call which tensors it was given, by their labels. A tensor from outside has a
number, in the order of the first reads. A differentiated tensor that the run made has the position of its call in the
signature. Any other, and the result of an autograd.Function, has the call that computed it, with the labels of what
that call was given, and the number of writes since: value numbering. So a table that is made on first use and kept has
the same label in a rerun, which finds it. A running average that is replaced (`self.mean = 0.9 * self.mean + x`), an
argument that is kept for the next call (`self.last = x`), or two tensors that have changed places have other labels,
and the rerun notices.

| label | of |
|---|---|
| 0, 4, 8, ... | a tensor from outside |
| -4, -8, ... | the first differentiated result of a call; other multiples of 4: its other results |
| n, where n mod 4 is 2 | in a nested run, a tensor that the outer run knows by one of the labels above |
| odd | a tensor that was computed without a derivative, or the result of an autograd.Function |
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from remat import _torch_internals as internals
from remat._effects import tensors_in
from remat._layers import layers, unwrap_dead, version_of
from remat._signature import plain_in

kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, living tensors that runs made without a derivative. Reruns of other calls must not read them."""


class Read(NamedTuple):
    """A tensor that a run was given or has read from outside, at the first read."""

    value: Tensor
    """The tensor. In an outer rerun, the operand that was read in its place."""
    version: int
    """How often the value had been written to."""
    label: int | None
    reader: Any
    """The torch function that read it."""


class Survivor(NamedTuple):
    """A plain tensor that is still alive after the run: what is known of it, and its version."""

    ref: weakref.ref[Tensor]
    label: int | None
    begun: int
    version: int


Known = tuple["weakref.ref[Tensor]", "int | None", int]
"""What is known of a tensor: a weak reference, its label, and its version when the run made it, or `FIXED`."""
FIXED = -2
"""In place of a version. A write does not change the label of a differentiated tensor, or of one from outside."""


class Labels(dict[int, Known]):
    """By identity, the tensors that a run knows. A label of None tells nothing: the run may have made it unseen.

    **Attributes:**

    - `results`: the differentiated tensors that calls have returned.
    """

    def __init__(self, depth: int) -> None:
        """`depth`: how many transforms there are around the run."""
        super().__init__()
        self._depth = depth
        self.results: list[weakref.ref[Tensor]] = []
        self._read_at: dict[int, int] = {}
        """By identity, plain tensors that the run has read, and their versions then."""

    def note(self, tensor: Tensor, label: int | None, begun: int = FIXED) -> None:
        """Give a label to a tensor. `begun`: its version when the run made it, if that is without a derivative."""
        self[id(tensor)] = weakref.ref(tensor), label, begun

    def note_plain(self, tensor: Tensor, label: int | None, begun: int | None = None) -> None:
        """Give a label to a tensor that a run made without a derivative. `begun`: its version then, if not now."""
        self._read_at.pop(id(tensor), None)  # the identity may have belonged to a dead tensor
        self.note(tensor, label, version_of(tensor) if begun is None else begun)

    def note_result(self, out: Tensor, position: int, is_new: Any) -> None:
        """Give a label to the result of the call at this position, unless the call has returned what it was given."""
        if not is_new:
            may_wrap = internals.is_wrapper(out) and not internals.is_grad_wrapper(out)  # `grad` wraps only what is new
            if (id(out) in self and self.has(out)) or (may_wrap and self.returns(out)):
                return
        ref = weakref.ref(out)
        self[id(out)] = ref, -4 * position - 4, FIXED  # as `of_result` says
        self.results.append(ref)

    def note_alias(self, tensor: Tensor, outside: Container[int]) -> bool:
        """Note what `as_subclass` has made, unseen, of a tensor that the run has made. False for any other tensor."""
        base = tensor._base
        if base is None or id(base) in outside or not self.has(base):
            return False
        self.note(tensor, None)
        return True

    def forget(self, tensor: Tensor) -> None:
        """Tell nothing of a plain tensor that the run has made: its versions no longer count all writes."""
        if self.has(tensor) and (begun := self[id(tensor)][2]) != FIXED:
            self.note(tensor, None, begun)

    def has(self, tensor: Tensor) -> bool:
        """Whether the run knows this tensor."""
        return (entry := self.get(id(tensor))) is not None and entry[0]() is tensor

    def of(self, tensor: Tensor) -> int | None:
        """The label of a tensor that the run reads. A transform inside may have wrapped it."""
        tensor = unwrap_dead(tensor)
        while not (is_known := self.has(tensor)) and internals.level_of(tensor) > self._depth:
            tensor = internals.unwrapped(tensor)
        if not is_known:
            return None
        _, label, begun = self[id(tensor)]
        if begun == FIXED:
            return label
        version = self._read_at[id(tensor)] = version_of(tensor)
        if label is None or (tensor.requires_grad and tensor.grad_fn is None):
            return None
        return hash((label, version - begun, _custom(tensor.grad_fn))) | 1

    def of_all(self, args: Any) -> list[int | None]:
        """The labels of all tensors in the arguments of a call."""
        return [*map(self.of, tensors_in(args))]

    def returns(self, out: Tensor) -> bool:
        """Whether a call has returned what it was given, perhaps wrapped by a transform around the run.

        Then that has the same label: a rerun below the transform gets the tensor itself.
        """
        known = next(filter(self.has, layers(out)), None)
        if known is not None and known is not out:
            self.note(out, *self[id(known)][1:])
        return known is not None

    def replace(self, values: Iterable[Tensor], attached: Iterable[Tensor]) -> None:
        """A nested call returns its results with a derivative attached. Some may have tangents only."""
        for before, after in zip(values, attached, strict=True):
            if self.has(before) and (begun := self[id(before)][2]) != FIXED:
                self.note_plain(after, self[id(before)][1], version_of(after) - version_of(before) + begun)

    def adopt(self, inner: Labels, outside: Container[int]) -> None:
        """Take over the living tensors that a nested run has made, all but those from `outside` of it."""
        for key, (ref, label, begun) in inner.items():
            if key not in outside and ref() is not None:
                self[key] = ref, _out_of_nested(label) if begun == FIXED else label, begun
        self._read_at.update((key, version) for key, version in inner._read_at.items() if key in self)

    def keep(self) -> list[tuple[int, Tensor]]:
        """The plain tensors that are alive. Reruns of other calls must not read them."""
        plain = (entry for entry in self.items() if entry[1][2] != FIXED)
        alive = [(key, tensor) for key, entry in plain if (tensor := entry[0]()) is not None]
        kept.update(alive)
        return alive

    def any_alive(self, but: Container[int]) -> bool:
        """Whether a tensor that the run made is still alive, besides plain ones with these identities."""
        plain = (entry[0] for key, entry in self.items() if entry[2] != FIXED and key not in but)
        return any(ref() is not None for ref in (*self.results, *plain))

    def survivors(self) -> list[Survivor]:
        """The plain tensors that were read as they are now, and are still alive."""
        alive = [(self[key], version_of(tensor), self._read_at.get(key)) for key, tensor in self.keep()]
        return [Survivor(*entry, now) for entry, now, read in alive if now == read]


def _custom(node: Any) -> Any:
    """Identify the node of an autograd.Function: its name, and the numbers and flags that it holds.

    None for a node of torch's own: a view has one if its base was written to, below some transforms only.
    """
    held = getattr(node, "__dict__", None)
    return None if held is None else (node.name(), *filter(None, map(plain_in, held.values())))


def of_outside(number: int) -> int:
    """The label of the tensor from outside with this number."""
    return 4 * number


def of_result(position: int, i: int = 0) -> int:
    """The label of a differentiated result of the call at this position."""
    return -4 * (position + 1) if i == 0 else 4 * hash((position, i))


def in_nested(label: int | None) -> int | None:
    """The label of a tensor in a nested run. If calls tell what computed it, the label is odd, and the same there."""
    return label if label is None or label & 1 else 4 * label + 2


def _out_of_nested(label: int | None) -> int | None:
    """The label in the run around a nested one of what that has read from outside, and perhaps wrapped."""
    return label // 4 if label is not None and label & 3 == 2 else label


_MIRRORED = {Tensor.lt: Tensor.gt, Tensor.le: Tensor.ge}
_SYMMETRIC = {Tensor.__eq__, Tensor.eq, Tensor.ne}


def in_order(func: Any, labels: Sequence[int | None]) -> tuple[Any, Sequence[int | None]]:
    """A comparison and the labels of its operands, whichever Python asks first: a parameter, but not its stand-in."""
    if len(labels) == 2 and func in _MIRRORED:
        return _MIRRORED[func], labels[::-1]
    return func, sorted(labels, key=str) if func in _SYMMETRIC else labels


def combined(labels: Iterable[int | None]) -> int | None:
    """One label for several tensors, in order. None if one of them tells nothing."""
    found = tuple(labels)
    return None if None in found else hash(found)
