"""The engine of the non-reentrant variant: the graph is the native one, and the runs are watched.

Regions nest: what the inner one is given is saved through the hooks of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import CheckpointError
from remat._native import WRONG_COUNT, Graph, Saved, at_the_base, same, unpack, wrong_metadata
from remat.compat._call import NO_CONTEXTS, Call, Contexts, UsesTransforms
from remat.compat._rerun import OUT_OF_MEMORY, Collector, ReplacedError, Rerun
from remat.compat._selective import GivenBack, Selective

PASS_A_LIST = "Pass a list for an iterator, which the forward has used up."
TIP = (
    "To find the cause, pass debug=True to checkpoint, or call it under set_checkpoint_debug_enabled(True): the error "
    "then names the first op that differs, with both call sites."
)


class Options(NamedTuple):
    """How to run a region."""

    preserve_rng_state: bool = True
    determinism_check: bool = True
    early_stop: bool = True


class Region(Graph):
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
        forward, rerun = contexts
        self._selects = isinstance(forward, Selective)
        self._counter = rerun if isinstance(rerun, GivenBack) else None
        self.explain: Callable[[CheckpointError], CheckpointError] | None = None
        """What makes a more detailed error of one: for debugging."""
        self._options = options
        self._call = Call(fun, args, kwargs, options.preserve_rng_state)
        self._saved = [internals.save(t) for t in self._call.tensors]
        self._under_context = contexts is not NO_CONTEXTS
        self._is_complete = False

    def run(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward: the user's own call."""
        forward = self._call.watch(self, self._under_context)
        returned = False
        try:
            with self.forward_context:
                internals.push_saved_tensors_hooks(forward.pack, unpack)
                try:
                    with forward:
                        out = fun(*args, **kwargs)
                    returned = True
                finally:
                    internals.pop_saved_tensors_hooks()
        except RuntimeError as error:
            if internals.refuses_hooks(error):
                self._call.undo(forward)
                raise UsesTransforms from None
            raise
        if not returned:
            raise RuntimeError(
                "remat.checkpoint: the forward context of context_fn swallowed an exception that the function raised, "
                "so there is no result. Catch it inside of the function, or around checkpoint."
            )
        self._call.finish(forward)
        self._saved = self._call.unwritten(self._saved)
        self._is_complete = True
        return out

    def give_away(self, tensor: Tensor) -> None:
        """Others may write to the memory of a tensor from now on."""
        if isinstance(self.forward_context, Selective):
            self.forward_context.give_away(tensor)

    def held(self) -> list[Any]:
        """As of a graph."""
        outside = self._call.record.outside
        saved = [*self._saved, *(o.saved for o in outside)]
        return [internals.held_in(s) for s in saved if s is not None] + [o.tensor for o in outside]

    def rerun(self) -> Saved:
        """Run the function again: the tensors that its graph saves."""
        with at_the_base():
            unpacked = [None if s is None else s.unpack() for s in self._saved]
            outside = self._call.record.outside
            inner = {id(o): o.saved.unpack() for o in outside if o.saved is not None}
            collector = self._collect(unpacked, inner, self._may_begin_again)
            if isinstance(collector, Rerun) and collector.was_misled:
                collector.saved.clear()
                collector = self._begin_again(collector, unpacked, inner)
        if self._is_complete:
            self._check(collector)
        return collector.saved

    def _begin_again(self, misled: Rerun, unpacked: list[Any], inner: dict[int, Tensor]) -> Collector:
        """Another rerun, that begins with the state as it is now."""
        if misled.error is None:
            misled.check_replaced()
        try:
            return self._collect(unpacked, inner, trusting=False)
        except RuntimeError as error:
            first = misled.error
            if isinstance(first, CheckpointError) or (first is not None and isinstance(error, ReplacedError)):
                raise first from error
            raise
        finally:
            first = misled.error = None  # its traceback leads here

    @property
    def _may_begin_again(self) -> bool:
        """Whether there can be two reruns: a context of the user's may be entered once."""
        return not self._under_context or self._selects

    def _collect(self, unpacked: list[Any], inner: dict[int, Tensor], trusting: bool) -> Collector:
        call = self._call
        tensors = call.given(unpacked) if call.record.written else unpacked
        early_stop = self._options.early_stop and self._is_complete
        rerun: Rerun | None = None
        if call.record.is_simple:
            collector = Collector(call.record, early_stop)
        else:
            collector = rerun = Rerun(call.record, tensors, early_stop, self._under_context, trusting, inner)
            rerun.counter = self._counter
        context = self.rerun_context
        if self._under_context and not self._is_complete:  # a backward inside of the forward, and of its context
            context = internals.DisableTorchDispatch()
        internals.push_saved_tensors_hooks(collector.pack, same)
        try:
            call.rerun(rerun, tensors, context)
        except Exception as error:
            if rerun is None or isinstance(error, OUT_OF_MEMORY) or not rerun.was_misled:
                raise
            rerun.error = error
        finally:
            internals.pop_saved_tensors_hooks()
        if rerun is not None and not trusting:
            rerun.check_replaced()
        return collector

    def _check(self, rerun: Collector) -> None:
        """Raise unless the rerun saved what the forward saved."""
        expected, found = len(self._call.record.holders), len(rerun.saved)
        if found != expected:
            raise self.error(f"{WRONG_COUNT.format(expected, found)}\n{PASS_A_LIST}\n{TIP}")
        if rerun.different and self._options.determinism_check:
            raise self.error(f"{wrong_metadata(rerun.different)}\n{TIP}")

    def error(self, message: str) -> CheckpointError:
        """An error, with what is known about the call."""
        error = super().error(message)
        return error if self.explain is None else self.explain(error)
