"""Native graphs that save nothing: what their nodes would save is computed again when it is asked for.

Saved-tensor hooks put a `Holder` in the place of each tensor that the graph would save, unless something else holds its
memory anyway: that is `Held`. The first `Holder` to be unpacked in a backward pass runs the function again, which
collects those tensors by position. They belong to the backward pass: each goes as it is unpacked, and the rest go when
the pass ends or fails. Nothing else holds them.
"""

from __future__ import annotations

import contextlib
import operator
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import CheckpointError

Saved = list[tuple[Tensor, int] | None]
"""The saved tensors of a run, detached, by number, and the version of each; None where nobody will ask for it."""


Meta = tuple[torch.Size, torch.dtype, torch.device]
meta_of: Callable[[Tensor], Meta] = operator.attrgetter("shape", "dtype", "device")
_version = operator.attrgetter("_version")


class Holder:
    """What the graph keeps in the place of a tensor."""

    __slots__ = ("__weakref__", "index", "owner")

    def __init__(self, owner: Graph, index: int) -> None:
        self.owner = owner
        self.index = index


Held = tuple[Tensor, int, str, weakref.ref[Tensor]]
"""What the graph keeps of a tensor in memory that is held anyway: itself, how often it was written to, and whose it is.

The weak reference makes `swap_tensors` refuse to put another one in its place, as it does where a plain graph has
saved it.
"""


def unpack(packed: Holder | Held) -> Tensor:
    """The hook."""
    if isinstance(packed, Holder):
        return packed.owner.unpack(packed.index)
    tensor, before, name, _ = packed
    if tensor._version != before:
        raise modified(tensor, before, name)
    return tensor


def same(tensor: Tensor) -> Tensor:
    """The hook that does nothing."""
    return tensor


class _Recomputed:
    """The saved tensors of a graph for one backward pass. None: nobody asks for it, or it was unpacked."""

    __slots__ = ("__weakref__", "key", "saved")

    def __init__(self, key: Any, saved: Saved) -> None:
        self.key = key
        self.saved = saved

    def clear(self) -> None:
        """The backward pass is over."""
        self.saved = []


groups: weakref.WeakKeyDictionary[Any, list[_Recomputed]] = weakref.WeakKeyDictionary()
"""What was recomputed under each `GraphExecGroup`."""


_ZERO = torch.zeros(())


class Graph(ABC):
    """The native graph of one call, which saves nothing."""

    who = "remat.checkpoint"
    """Whose errors are raised."""
    name = "a checkpointed function"
    """What ran."""
    joins_groups = True
    """Whether the backward passes of a `GraphExecGroup` share what is computed again."""
    metas: list[Meta]
    """Of what the graph would save, where it may be skipped."""
    _recomputed: weakref.ref[_Recomputed] | None = None
    _skipped: Any = None

    @abstractmethod
    def rerun(self) -> Saved:
        """Run the function again. It must save what the forward saved, or raise."""

    @abstractmethod
    def held(self) -> Sequence[Any]:
        """What it holds for that: tensors, or what hooks have put in their place."""

    def error(self, message: str) -> CheckpointError:
        """An error, with what is known about the call."""
        return CheckpointError(f"{self.who}: {message}")

    def skip(self) -> None:
        """The running backward pass differentiates nothing in this graph. Its nodes unpack all the same: give zeros."""
        self._skipped = internals.graph_task()

    def _is_skipped(self, key: Any) -> bool:
        """Whether a backward pass differentiates nothing in this graph."""
        return key == self._skipped

    def _recompute(self, key: Any, group: Any) -> _Recomputed:
        recomputed = _Recomputed(key, internals.with_subclasses(self.rerun))
        if key == -1:  # outside of a backward pass: `grad_fn._saved_self`
            return recomputed
        self._recomputed = weakref.ref(recomputed)
        if group is None:
            internals.at_end_of_graph_task(recomputed.clear)
        else:
            groups.setdefault(group, []).append(recomputed)
        return recomputed

    def unpack(self, index: int) -> Tensor:
        """The saved tensor with this number."""
        group = internals.graph_exec_group() if self.joins_groups else None
        key = internals.graph_task() if group is None else group
        recomputed = None if self._recomputed is None else self._recomputed()
        if recomputed is None or recomputed.key != key:
            if self._is_skipped(key):
                return _ZERO.expand(self.metas[index][0])
            recomputed = self._recompute(key, group)
        entry = recomputed.saved[index]
        recomputed.saved[index] = None
        if entry is None:
            raise self.error(_UNPACKED_TWICE if group is None else _UNPACKED_TWICE_IN_GROUP)
        tensor, before = entry
        if before != -1 and before != tensor._version:
            raise modified(tensor, before, self.name)
        return tensor


def tensors_held(nodes: Iterable[Any]) -> list[Tensor]:
    """The plain tensors that nodes hold, themselves or by checkpoints inside. No function runs for it."""
    held = [h for node in nodes for h in internals.held_by(node)]
    graphs: set[Graph] = set()
    for h in held:
        if isinstance(h, Holder) and h.owner not in graphs:
            graphs.add(h.owner)
            held += h.owner.held()
    return [internals.innermost(h) for h in held if isinstance(h, Tensor)]


def version(tensor: Tensor) -> int:
    """How often the memory of a tensor was written to, where torch counts that."""
    return -1 if tensor.is_inference() else tensor._version


def check_version(tensor: Tensor, before: int, name: str = Graph.name) -> None:
    """Raise if a tensor that a function was given, or has read, was written to."""
    if version(tensor) != before:
        raise modified(tensor, before, name)


def modified(tensor: Tensor, before: int, name: str) -> RuntimeError:
    """The error for a tensor that was written to since it was at a version. `name`: of the function."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}], which {name} was given, reads from outside or saves for its rerun, "
        f"is at version {tensor._version}; expected version {before} instead. Change it after the backward, or "
        "change a copy: x = x.clone()."
    )


class Call(Protocol):
    """A call, as its graph knows it."""

    name: str
    operands: list[Tensor]
    versions: list[int]
    last_rerun: bool
    """Where there is a tape: whether the rerun that is about to come is known to be the last."""

    @property
    def stays(self) -> frozenset[int]:
        """The positions of operands that others hold for good: what modules have."""

    @property
    def nests(self) -> bool:
        """Whether the function calls functions under remat."""

    def forward(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any = None) -> Any:
        """The user's own call. `mode`: what looks on."""

    def again(self, operands: list[Tensor]) -> Any:
        """The call again, with operands in the place of the tensors that it was given and found."""


class CallGraph(Graph):
    """The native graph of a call of which it is known what it is given and finds.

    Inside of another such call, what it is given is saved through the hooks of that one, which computes it again.
    """

    _operands: list[Any]
    _saved_outside: Mapping[int, Any] = types.MappingProxyType({})
    """By position, the operands that hooks around the call have packed."""
    _unpacked: tuple[int, list[Tensor], list[int]] | None = None
    may_skip = False
    """Whether no other result has a part in the graph."""

    def __init__(self, call: Call, under_node: bool) -> None:
        """`under_node`: whether a node of ours is between the graph and its results."""
        self._call = call
        self.name = call.name
        self._operands = held = call.operands
        if internals.saved_tensors_hooks_active():
            stays = call.stays
            self._saved_outside = {i: internals.save(t) for i, t in enumerate(call.operands) if i not in stays}
            self._operands = [None if i in self._saved_outside else t for i, t in enumerate(call.operands)]
            held = [t for t in self._operands if t is not None]
        self._held = {id(t): weakref.ref(t) for t in held}
        self._under_node = under_node
        self.joins_groups = not under_node  # what one result does not need is unpacked all the same
        self._holders: dict[int, weakref.ref[Holder]] = {}
        """By number, what is not held."""
        self.metas = []

    @property
    def who(self) -> str:  # type: ignore[override]
        """As of a graph."""
        return f"remat: {self.name}" if self._under_node else Graph.who

    def operands(self) -> list[Tensor]:
        """The operands, unless they were changed in place."""
        operands, versions = self._given()
        if [*map(_version, operands)] != versions:
            for tensor, before in zip(operands, versions, strict=True):
                check_version(tensor, before, self.name)
        if self._saved_outside and not self.may_skip:  # the rerun asks for them too, and they are unpacked once
            self._unpacked = internals.graph_task(), operands, versions
            internals.at_end_of_graph_task(self._forget_unpacked)
        return operands

    def _forget_unpacked(self) -> None:
        self._unpacked = None

    def _given(self) -> tuple[list[Tensor], list[int]]:
        """The operands, and how often each had been written to."""
        if not self._saved_outside:
            return self._operands, self._call.versions
        if self._unpacked is not None and self._unpacked[0] == internals.graph_task():
            return self._unpacked[1:]
        operands, versions = [*self._operands], [*self._call.versions]
        for i, saved in self._saved_outside.items():
            operands[i] = tensor = saved.unpack()
            versions[i] = tensor._version
        return operands, versions

    def held(self) -> Sequence[Any]:
        """As of a graph."""
        saved = map(internals.held_in, self._saved_outside.values())
        return [*(t for t in self._operands if t is not None), *saved]

    def skip(self) -> None:
        """As of a graph, if all results are under the node."""
        if self.may_skip:
            super().skip()

    def _record(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
        internals.push_saved_tensors_hooks(self._pack, unpack)
        try:
            return self._call.forward(fun, args, kwargs, mode)
        finally:
            internals.pop_saved_tensors_hooks()

    def _pack(self, tensor: Tensor) -> Holder | Held:
        """The hook: what stands for a tensor."""
        number = len(self.metas)
        self.metas.append(meta_of(tensor))
        held = self._held.get(id(tensor))
        if held is not None:
            return tensor, tensor._version, self.name, held
        holder = Holder(self, number)
        self._holders[number] = weakref.ref(holder)
        return holder


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def at_the_base() -> contextlib.AbstractContextManager[None]:
    """Within it, a rerun may run: a backward pass of the base may be called inside of a transform."""
    return internals.base_level() if internals.transforms_active() else _NOTHING


WRONG_COUNT = (
    "A different number of tensors was saved during the original forward and recomputation.\n"
    "Number of tensors saved during forward: {}\nNumber of tensors saved during recomputation: {}"
)
Difference = tuple[int, Meta, Meta]
"""What was saved with another shape, dtype or device: its number, and those of the forward and of the rerun."""


def wrong_metadata(different: list[Difference]) -> str:
    """What to say about that."""
    lines = ["Recomputed values for the following tensors have different metadata than during the forward pass."]
    for index, forward, rerun in different:
        names = ("shape", "dtype", "device")
        parts = [
            f"{n} {f} in the forward, {r} in the rerun" for n, f, r in zip(names, forward, rerun, strict=True) if f != r
        ]
        lines.append(f"tensor at position {index}: " + "; ".join(parts))
    return "\n".join(lines)


_UNPACKED_TWICE = (
    "Unpack is being triggered for a tensor that was already unpacked once in this backward pass. If "
    "your autograd.Function reads ctx.saved_tensors in its backward, it has to do so only once."
)
_UNPACKED_TWICE_IN_GROUP = (
    f"{_UNPACKED_TWICE} Two backward passes that need the same saved tensor can't be made under one GraphExecGroup."
)
