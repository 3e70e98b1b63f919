"""The engine of the non-reentrant variant: the graph is the native one, what it would save is computed again.

Saved-tensor hooks put a `Holder` in the place of each tensor that the graph would save. The first one to be unpacked in
a backward pass runs the function again, which collects those tensors by position. They belong to the backward pass:
each goes as it is unpacked, and the rest go when the pass ends or fails. Nothing else holds them.

Regions nest: what the inner one is given is saved through the hooks of the outer one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import CheckpointError
from remat.compat._call import NO_CONTEXTS, NOTHING, Call, Contexts, UsesTransforms, at_the_base
from remat.compat._watch import Collector, Holder, Rerun

TIP = (
    "To find the cause, pass debug=True to checkpoint, or call it under set_checkpoint_debug_enabled(True): the error "
    "then names the first op that differs, with both call sites."
)


class Options(NamedTuple):
    """How to run a region."""

    preserve_rng_state: bool = True
    determinism_check: bool = True
    early_stop: bool = True


def _unpack(holder: Holder) -> Tensor:
    return holder.owner.unpack(holder.index)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Recomputed:
    """The saved tensors of a region for one backward pass. None: nobody asks for it, or it was unpacked."""

    __slots__ = ("__weakref__", "key", "tensors")

    def __init__(self, key: Any, tensors: list[tuple[Tensor, int] | None]) -> None:
        self.key = key
        self.tensors = tensors

    def clear(self) -> None:
        """The backward pass is over."""
        self.tensors = []


groups: weakref.WeakKeyDictionary[Any, list[_Recomputed]] = weakref.WeakKeyDictionary()
"""What was recomputed under each `GraphExecGroup`."""


class Region:
    """One checkpointed call."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        contexts: Contexts,
    ) -> None:
        self.forward_context, self.rerun_context = contexts
        self.explain: Callable[[CheckpointError], CheckpointError] | None = None
        """What makes a more detailed error of one: for debugging."""
        self._options = options
        may_be_pure = contexts is NO_CONTEXTS and not internals.function_modes_active()
        self._call = Call(fun, args, kwargs, options.preserve_rng_state, may_be_pure)
        self._saved = [internals.save(t) for t in self._call.tensors]
        self._under_context = contexts is not NO_CONTEXTS
        self._is_complete = False
        self._recomputed: weakref.ref[_Recomputed] | None = None

    def run(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward: the user's own call."""
        forward = None if self._call.is_pure else self._call.watch(self, self._under_context)
        try:
            with self.forward_context:
                internals.push_saved_tensors_hooks(self._pack if forward is None else forward.pack, _unpack)
                try:
                    with forward or NOTHING:
                        out = fun(*args, **kwargs)
                finally:
                    internals.pop_saved_tensors_hooks()
        except RuntimeError as error:
            if forward is not None and internals.refuses_hooks(error):
                self._call.undo(forward)
                raise UsesTransforms from None
            raise
        self._call.finish(forward)
        self._saved = self._call.unwritten(self._saved)
        self._is_complete = True
        return out

    def _pack(self, tensor: Tensor) -> Holder:
        """The hook for a forward that is not watched."""
        del tensor
        holders = self._call.record.holders
        holder = Holder(self, len(holders))
        holders.append(weakref.ref(holder))
        return holder

    def unpack(self, index: int) -> Tensor:
        """The hook: the saved tensor with this number."""
        group = internals.graph_exec_group()
        key = internals.graph_task() if group is None else group
        if key == -1:  # outside of a backward pass: `grad_fn._saved_self`
            entry = self._rerun()[index]
        else:
            recomputed = None if self._recomputed is None else self._recomputed()
            if recomputed is None or recomputed.key != key:
                recomputed = _Recomputed(key, self._rerun())
                self._recomputed = weakref.ref(recomputed)
                if group is None:
                    internals.at_end_of_graph_task(recomputed.clear)
                else:
                    groups.setdefault(group, []).append(recomputed)
            entry = recomputed.tensors[index]
            recomputed.tensors[index] = None
        if entry is None:
            raise self._error(_UNPACKED_TWICE if group is None else _UNPACKED_TWICE_IN_GROUP)
        tensor, version = entry
        if version != -1 and version != tensor._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}], saved inside of a checkpointed function, is at version "
                f"{tensor._version}; expected version {version} instead."
            )
        return tensor

    def _rerun(self) -> list[tuple[Tensor, int] | None]:
        """Run the function again: the tensors that its graph saves."""
        with at_the_base():
            collector = self._collect()
            if isinstance(collector, Rerun) and collector.was_misled:
                collector = self._collect(trusting=False)
        if self._is_complete:
            self._check(collector)
        return collector.saved

    def _collect(self, trusting: bool = True) -> Collector:
        call = self._call
        unpacked: list[Any] = [None if s is None else s.unpack() for s in self._saved]
        tensors = call.given(unpacked) if call.record.written else unpacked
        early_stop = self._options.early_stop and self._is_complete
        rerun: Rerun | None = None
        if call.record.is_simple:
            collector = Collector(call.record, early_stop)
        else:
            collector = rerun = Rerun(call.record, tensors, early_stop, self._under_context, trusting)
        context = self.rerun_context
        if self._under_context and not self._is_complete:  # a backward inside of the forward, and of its context
            context = internals.DisableTorchDispatch()
        is_seen = not call.is_pure or internals.function_modes_active()
        internals.push_saved_tensors_hooks(collector.pack if is_seen else collector.collect, _same)
        try:
            call.rerun(rerun, tensors, context)
        except Exception:
            if rerun is None or not rerun.was_misled:
                raise
        finally:
            internals.pop_saved_tensors_hooks()
        return collector

    def _check(self, rerun: Collector) -> None:
        """Raise unless the rerun saved what the forward saved."""
        expected, found = len(self._call.record.holders), len(rerun.saved)
        if found != expected:
            raise self._error(_WRONG_COUNT.format(expected, found, TIP))
        if rerun.different and self._options.determinism_check:
            raise self._error(_WRONG_METADATA.format("\n".join(map(_difference, rerun.different)), TIP))

    def _error(self, message: str) -> CheckpointError:
        error = CheckpointError(message)
        return error if self.explain is None else self.explain(error)


def _difference(different: tuple[int, Any, Any]) -> str:
    index, forward, rerun = different
    names = ("shape", "dtype", "device")
    parts = [
        f"{n} {f} in the forward, {r} in the rerun" for n, f, r in zip(names, forward, rerun, strict=True) if f != r
    ]
    return f"tensor at position {index}: " + "; ".join(parts)


_WRONG_COUNT = (
    "remat.checkpoint: A different number of tensors was saved during the original forward and recomputation.\n"
    "Number of tensors saved during forward: {}\nNumber of tensors saved during recomputation: {}\n{}"
)
_WRONG_METADATA = (
    "remat.checkpoint: Recomputed values for the following tensors have different metadata than during the forward "
    "pass.\n{}\n{}"
)
_UNPACKED_TWICE = (
    "remat.checkpoint: Unpack is being triggered for a tensor that was already unpacked once in this backward pass. If "
    "your autograd.Function reads ctx.saved_tensors in its backward, it has to do so only once."
)
_UNPACKED_TWICE_IN_GROUP = (
    f"{_UNPACKED_TWICE} Two backward passes that need the same saved tensor can't be made under one GraphExecGroup."
)
