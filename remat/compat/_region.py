"""The non-reentrant variant: the graph is autograd's own, and saves no intermediate results.

Saved-tensor hooks replace each tensor that the graph would save by a `Holder`. The first `Holder` that a backward pass
unpacks runs the function again, and collects these tensors by position. Each is freed when it is unpacked, and the rest
when the backward pass ends or fails.

Regions nest: the inputs of the inner one are saved through the hooks of the outer one.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._dispatch_mode import without_modes
from remat._errors import CheckpointError, RematError
from remat._holder import Holder
from remat._nested_mode import current_look
from remat._saved import graph_is_dropped
from remat.compat._call import NO_CONTEXTS, Call, Contexts, modified
from remat.compat._look import CheckpointLook
from remat.compat._selective import Replay, Selective
from remat.compat._settings import recomputed_in

_meta_of = operator.attrgetter("shape", "dtype", "device")

_TIP = (
    "To find the cause, pass debug=True to checkpoint, or call it under set_checkpoint_debug_enabled(True): the error "
    "then names the first op that differs, with both call sites. Pass a list for an iterator, which the forward has "
    "used up. Switch a cache off (use_cache=False) that the forward has filled. For a function under torch.compile:\n"
    "- Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions as dynamic.\n"
    "- Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache reordering."
)
_MORE = "trying to save more tensors during recomputation than during the original forward pass: {1} instead of {0}."
_FEWER = (
    "A different number of tensors was saved during the original forward and recomputation.\n"
    "Number of tensors saved during forward: {}\nNumber of tensors saved during recomputation: {}"
)
_DIFFERENT = "Recomputed values for the following tensors have different metadata than during the forward pass."
_TWICE = (
    "Unpack is being triggered for a tensor that was already unpacked once. If you are calling ctx.saved_tensors in "
    "backward, make sure to do so only once."
)
_OVERLAP = (
    "Unpack is being triggered for a tensor that was already unpacked once. Performing two backward calls that overlap "
    "(i.e. require the same saved activation in order to compute gradients) is not allowed under one GraphExecGroup."
)
_TRANSFORMS = (
    "checkpoint: {} calls torch.func.grad or the like, which torch does not allow under saved-tensor hooks, as here. "
    "Call remat.remat(function)(*args), which works with all transforms."
)
_SWALLOWED = (
    "remat.checkpoint: the forward context provided by context_fn suppressed an exception raised during the "
    "checkpointed forward, so there is no result. Catch it inside of the function, or around checkpoint."
)


class _Stop(BaseException):
    """Ends a rerun that has recomputed all that the backward needs. A user's `except Exception` must not catch it."""


class Options(NamedTuple):
    """The options of `checkpoint`, checked."""

    use_reentrant: bool
    preserve_rng_state: bool
    context_fn: Callable[[], Contexts]
    determinism_check: str
    debug: bool
    early_stop: bool
    respect_saved_tensors_hooks: bool | None


class _Recomputed:
    """The tensors that a rerun saves, for one backward pass.

    **Attributes:**

    - `saved`: the tensors with their versions; None for one that no node needs, or that was unpacked.
    - `last`: the position of the tensor after which the rerun stops.
    - `replay`: the context of the rerun, which returns the values that a policy has kept.
    """

    drops_graph = True
    replay: Replay | None = None

    def __init__(self, key: Any, holders: list[weakref.ref[Holder]], early_stop: bool) -> None:
        """`key`: identifies the backward pass."""
        self.key = key
        self.saved: list[tuple[Tensor, int] | None] = []
        self._holders = holders
        self.last = len(holders) - 1 if early_stop else sys.maxsize

    @internals.hook_of_checkpoint
    @internals.left_alone_by_dynamo
    def pack(self, tensor: Tensor) -> Tensor:
        """The hook: collects `tensor`."""
        with internals.DisableTorchFunction():
            index, holders = len(self.saved), self._holders
            wanted = index < len(holders) and holders[index]() is not None
            look = current_look()
            if wanted and isinstance(look, CheckpointLook) and look.saves_tainted(tensor):
                raise look.kept_error()
            if tensor.requires_grad:
                tensor = tensor.detach()
            if index > self.last:  # user code has caught `_Stop`
                return tensor
            if wanted and self.replay is not None:
                self.replay.saves(tensor)
            self.saved.append((tensor, -1 if tensor.is_inference() else tensor._version) if wanted else None)
            if index == self.last:
                raise _Stop
            return tensor

    def clear(self) -> None:
        """Called when the backward pass is over."""
        self.saved = []


@internals.left_alone_by_dynamo
def _unpack(holder: Holder) -> Tensor:
    return holder.owner.unpack(holder.index)


class Region:
    """One checkpointed call."""

    explain: Callable[[CheckpointError], CheckpointError] | None = None
    """Makes an error more detailed, for debugging."""
    traces: Contexts = NO_CONTEXTS
    """Modes that list the ops of the forward and of the rerun, for debugging."""
    _user_hooks: Any = None
    """The user's hooks around the forward, while it runs: for selective calls in it."""

    def __init__(
        self, fun: Any, args: Any, kwargs: Any, options: Options, contexts: Contexts, selective: Selective | None
    ) -> None:
        self.drops_graph = graph_is_dropped()
        """Whether it runs in a rerun of a region around."""
        if selective is not None and self.drops_graph:
            contexts, selective = NO_CONTEXTS, None
        self._options, self._contexts, self._selective = options, contexts, selective
        watches_cells = contexts is not NO_CONTEXTS and selective is None
        self._call = Call(fun, args, kwargs, options.preserve_rng_state, watches_cells)
        around = current_look()
        if isinstance(around, CheckpointLook):  # it recomputes what is in containers and in the closure too
            self._call.arguments = len(self._call.operands)
        given = self._call.operands[: self._call.arguments]
        self._saved: list[Any] = [internals.save(t) for t in given]
        self._holders: list[weakref.ref[Holder]] = []
        self._metas: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._recomputed: weakref.ref[_Recomputed] | None = None

    # The forward.

    def run(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward."""
        call, selective = self._call, self._selective
        with internals.DisableTorchFunction():
            look = call.look()
        context = self._contexts[0] if selective is None else selective.recorder
        returned = False
        self._user_hooks = internals.saved_tensors_hooks_of_user()
        internals.push_saved_tensors_hooks(self._pack, _unpack)
        try:
            with context, self.traces[0], look:
                out = fun(*args, **kwargs)
                returned = True
        except RuntimeError as error:
            if "don't yet support saved tensor hooks" in str(error):
                raise RematError(_TRANSFORMS.format(call.name)) from error
            raise
        finally:
            internals.pop_saved_tensors_hooks()
            self._user_hooks = None  # the graph holds the region
        if not returned:
            raise RuntimeError(_SWALLOWED)
        with internals.DisableTorchFunction():
            for i, operand in enumerate(call.operands[: call.arguments]):
                if id(operand) in look.copies:  # the rerun reads the copy, and this one's graph may lead to this region
                    self._saved[i] = None
            if look.saves_unwritten:
                self._options = self._options._replace(early_stop=False)
            if selective is not None:
                selective.finish(look, out)
            call.finish(out, packs=True)
            if look.outer is not None:
                look.outer.add_call(call.name, out)
        return out

    @internals.hook_of_checkpoint
    @internals.left_alone_by_dynamo
    def _pack(self, tensor: Tensor) -> Holder:
        """The hook: returns what the graph keeps in place of `tensor`."""
        with internals.DisableTorchFunction():
            self._metas.append(_meta_of(tensor))
            if self._selective is not None:
                self._selective.recorder.saves(tensor)
        holder = Holder(self, len(self._holders))
        self._holders.append(weakref.ref(holder))
        return holder

    # The backward.

    def held(self) -> Sequence[Any]:
        """The inputs that it holds for reruns: tensors, or what hooks have made of them."""
        reads = (r.saved for r in self._call.reads if not r.is_written)
        saved = [*self._saved, *(s for s in reads if not isinstance(s, torch.nn.Parameter))]
        return [s if isinstance(s, Tensor) else s.data for s in saved if s is not None]

    def unpack(self, index: int) -> Tensor:
        """The saved tensor with this number."""
        group = internals.graph_exec_group()
        key = internals.graph_task() if group is None else group
        recomputed = None if self._recomputed is None else self._recomputed()
        if recomputed is None or recomputed.key != key:
            recomputed = self._recompute(key, group)
        entry = recomputed.saved[index]
        recomputed.saved[index] = None
        if entry is None:
            raise self._error(_TWICE if group is None else _OVERLAP)
        tensor, before = entry
        if before != -1 and before != tensor._version:
            raise RuntimeError(modified(tensor, before, self._call.name))
        return tensor

    def _recompute(self, key: Any, group: Any) -> _Recomputed:
        look, early_stop = self._call.forward_look, self._options.early_stop
        if look is not None:  # a backward inside the forward: no further than that has got
            early_stop = not look.saves_unwritten
        recomputed = _Recomputed(key, self._holders, early_stop)
        internals.with_subclasses(lambda: self._rerun(recomputed))
        if key == -1:  # outside a backward pass: `grad_fn._saved_self`
            return recomputed
        self._recomputed = weakref.ref(recomputed)
        if group is None:
            internals.at_end_of_graph_task(recomputed.clear)
        else:
            recomputed_in.setdefault(group, []).append(recomputed)
        return recomputed

    def _rerun(self, recomputed: _Recomputed) -> None:
        """Run the function again, for the tensors that its graph saves."""
        with internals.base_level() if internals.transforms_active() else internals.NOTHING:
            arguments = [None if s is None else s.unpack() for s in self._saved]
            context, trace, tell = self._contexts[1], self.traces[1], None
            is_over = self._call.forward_look is None
            if not is_over:  # a backward inside the forward and its context
                context, trace = without_modes(), internals.NOTHING
            elif self._selective is not None:
                context = recomputed.replay = self._selective.replay()
                tell = functools.partial(self._selective.stand_in, context)
            internals.push_saved_tensors_hooks(recomputed.pack, _same)
            try:
                self._call.rerun(arguments, (context, trace), tell=tell)
            except (_Stop, Exception):
                if len(recomputed.saved) <= recomputed.last:
                    raise  # else user code has met `_Stop`, and may have raised another error
            finally:
                internals.pop_saved_tensors_hooks()
            if recomputed.replay is not None:
                recomputed.replay.settle()
        if is_over:
            self._check(recomputed.saved)

    def _check(self, saved: list[tuple[Tensor, int] | None]) -> None:
        """Raise unless the rerun saved what the forward saved."""
        if len(saved) != len(self._holders):
            message = _MORE if len(saved) > len(self._holders) else _FEWER
            raise self._error(f"{message.format(len(self._holders), len(saved))}\n{_TIP}")
        if self._options.determinism_check == "none":
            return
        lines = []
        for i, (entry, forward) in enumerate(zip(saved, self._metas, strict=True)):
            if entry is not None and (rerun := _meta_of(entry[0])) != forward:
                names = "shape", "dtype", "device"
                before, now = (dict(zip(names, meta, strict=True)) for meta in (forward, rerun))
                lines.append(f"tensor at position {i}: saved metadata: {before}; recomputed metadata: {now}")
        if lines:
            raise self._error("\n".join([_DIFFERENT, *lines, _TIP]))

    def _error(self, message: str) -> CheckpointError:
        error = CheckpointError(f"remat.checkpoint: {message}")
        return error if self.explain is None else self.explain(error)


def _same(tensor: Tensor) -> Tensor:
    """An unpack hook for tensors that are packed as they are."""
    return tensor
