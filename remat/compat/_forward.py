"""The forward run of a watched checkpoint.

It notes, for each torch call, which tensors from outside it read, and keeps a copy of those that it changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat._compile import tracing
from remat._effects import GIVES_MEMORY_AWAY
from remat._native import Holder, meta_of, version
from remat._watch import active_watches
from remat.compat._draws import Draws
from remat.compat._record import Outside, Record, make_result, results_of
from remat.compat._rerun import REGISTERS, Rerun
from remat.compat._torch_calls import (
    BACKWARDS,
    CONTAINERS,
    RENORMALIZING,
    looks_up,
    may_change,
    targets_of,
    tensors_in,
    writes,
)

_PLAIN = (bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, type(None))


class Forward(TorchFunctionMode):
    """Notes what a forward run reads and writes."""

    def __init__(
        self,
        record: Record,
        given: Sequence[Tensor],
        draws: Draws | None,
        owner: Any,
        under_context: bool,
    ) -> None:
        """A run that is given tensors.

        **Arguments:**

        - `owner`: whose `unpack` is asked for what the graph would save.
        - `under_context`: whether a context of the user's is around it, which must see the function's own ops alone.
        """
        self.record = record
        self._given = given
        self.given = set(map(id, given))
        self.made = {id(t): (weakref.ref(t), 0) for t in given}
        """By identity, what was given or made inside, and by how many calls. The identity of what has died since may be
        another tensor's by now."""
        self.last_change = 0
        """By how many calls the last change in place of a tensor was made that was made inside."""
        self.saw_wrappers = False
        """Whether the function uses transforms: a tensor was read that one of them wraps."""
        self.saw_compiled = False
        """Whether the function calls code that torch.compile has made. What that does is not noted."""
        self._draws = draws
        self._owner = owner
        self._unseen: Any = internals.DisableTorchDispatch if under_context else contextlib.nullcontext
        self._outside: dict[int, Outside] = {}
        self._held: list[Tensor] = []  # a state that the function replaces has to live on
        self._since = internals.next_sequence_number()
        self._is_sharded = internals.uses_fully_shard()
        self._alone = not internals.function_modes_active()
        self._goes_backward = self._went_backward = False

    def pack(self, tensor: Tensor) -> Any:
        """The hook: what the graph keeps in the place of `tensor`."""
        record = self.record
        record.metas.append(meta_of(tensor))
        record.needed = len(record.calls)
        record.tail.clear()
        holder = Holder(self._owner, len(record.holders))
        record.holders.append(weakref.ref(holder))
        return holder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if tracing():  # what is compiled has to be the same in the rerun
            self.saw_compiled = True
            return func(*args, **kwargs) if kwargs else func(*args)
        if looks_up(func):
            return func(*args)
        if self._is_sharded and internals.fully_shard_at_work():  # its hooks make other calls in the rerun
            out = func(*args, **(kwargs or {}))
            with internals.DisableTorchFunction():
                self._result(out)
            return out
        made = self.made
        record = self.record
        for arg in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                known = made.get(id(arg))
                if known is not None and known[0]() is arg:
                    continue
            elif type(arg) not in CONTAINERS:
                continue
            self._note_reads(args, kwargs, writes(func, kwargs))
            break
        if may_change(func, kwargs):
            self._before_write(func, args, kwargs or {})
        record.calls.append(func)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if self._goes_backward:
            record.tail.clear()  # what a backward inside reads can't be spared
            self._goes_backward = False
        if self._alone:
            record.tail.append(self._result(out))
        else:  # other modes must not see what is done here
            with internals.DisableTorchFunction():
                record.tail.append(self._result(out))
        return out

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was given or made inside."""
        known = self.made.get(id(tensor))
        return known is not None and known[0]() is tensor

    def _note_made(self, tensor: Tensor) -> None:
        self.made[id(tensor)] = weakref.ref(tensor), len(self.record.calls)

    def _result(self, out: Any) -> Any:
        """What is noted of the result of a call; None: the call can't be spared."""
        if isinstance(out, Tensor):
            known = self._outside.get(id(out))
            if known is None or known.ref() is not out:  # `x.to(x.dtype)` is `x`
                self._note_made(out)
            if type(out) is not Tensor or out.layout is not torch.strided:
                return None
            return make_result((out.shape, out.stride(), out.dtype, out.device, out.requires_grad, out._is_view()))
        if isinstance(out, _PLAIN):
            return (out,)
        if isinstance(out, (list, tuple)):
            results = [self._result(o) for o in out]
            return None if None in results or list in map(type, results) else [type(out), *results]
        return None

    def _note_reads(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, writes: bool) -> None:
        """A call is about to read tensors from outside, perhaps."""
        reads = {}
        for number, tensor in enumerate(tensors_in(args if not kwargs else (*args, *kwargs.values()))):
            if not self.is_made(tensor):
                known = self._outside.get(id(tensor))
                if known is None or known.ref() is not tensor:
                    if internals.is_wrapper(tensor):
                        self.saw_wrappers = True
                        continue
                    with internals.DisableTorchFunction():
                        node = tensor.grad_fn
                        if node is not None and internals.sequence_number(node) >= self._since:
                            self._note_made(tensor)  # out of sight: by an autograd.Function, say
                            continue
                        self._outside[id(tensor)] = known = Outside(tensor)
                        self.record.outside.append(known)
                        if torch.is_grad_enabled() and not writes:  # else it may be an extension's own
                            self._held.append(tensor)
                elif not writes:
                    with internals.DisableTorchFunction():
                        known.last_read = version(tensor)
                reads[number] = known
        if reads:
            self.record.reads[len(self.record.calls)] = reads

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._draws is not None:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, torch.Generator):
                    self._draws.notice(arg)
        if func in BACKWARDS:
            self._goes_backward = self._went_backward = True
            return
        if func in GIVES_MEMORY_AWAY and self._owner is not None:
            self._owner.give_away(args[0])
        if func in RENORMALIZING and self._owner is None:
            return  # the reentrant variant may renormalize again: it comes to the same, and is differentiated
        written = self.record.written
        with internals.DisableTorchFunction(), self._unseen(), torch.no_grad():
            for target in targets_of(func, args, kwargs):
                t = self._source(target)
                is_made = self.is_made(t)
                if is_made:
                    self.last_change = len(self.record.calls) + 1
                if is_made and id(t) not in self.given:
                    continue
                known = written.get(id(t))
                if known is None or known[0]() is not t:
                    written[id(t)] = weakref.ref(t), self._seen(t).clone().requires_grad_(t.requires_grad)

    def _seen(self, tensor: Tensor) -> Tensor:
        """What the runs around this one read in the place of a tensor."""
        for run in () if self._alone else reversed(active_watches()):
            tensor = run.swapped(tensor)
        return tensor

    def _source(self, target: Tensor) -> Tensor:
        """The tensor from outside that a target is `.data` of, or detached from; else the target itself.

        In the rerun of a run around this one, it may be that of what stands for the tensor.
        """
        is_data = self.is_made(target) and id(target) not in self.given and target.grad_fn is None
        if is_data or not self._alone:
            for t in (*self._given, *(o.ref() for o in self.record.outside)):
                if t is None:
                    continue
                seen = self._seen(t)
                if seen is target or (is_data and internals.memory_of(seen) == internals.memory_of(target)):
                    return t
        return target

    def finish(self) -> None:
        """The run is over: hold what it read."""
        record = self.record
        if self.saw_compiled:  # of that the calls are others when a graph is recorded, and some are out of sight
            for noted in (record.calls, record.reads, record.tail):
                noted.clear()
            record.needed = 0
        if record.written:
            record.written = {key: pair for key, pair in record.written.items() if pair[0]() is not None}
            read = {id(t): t for t in (*self._given, *(o.ref() for o in record.outside)) if t is not None}
            with internals.DisableTorchFunction():
                shared = internals.two_that_share_memory(read[key] for key in record.written if key in read)
            record.shapes_of_shared = None if shared is None else (list(shared[0].shape), list(shared[1].shape))
        self._given = ()
        if record.outside:
            around = [] if self._alone else _watched_runs()[-1:]
            with internals.DisableTorchFunction():
                for outside in record.outside:
                    t = outside.ref()
                    if t is not None and id(t) in record.written:
                        outside.read(t)  # the run's own writes do not count
                    if t is None or not (t.requires_grad and id(t) in record.written):  # it may lead to this record
                        outside.keep(around[0] if around else None)
        self._held = []
        record.is_simple = not (
            self.saw_compiled
            or self._went_backward
            or record.outside
            or record.written
            or not REGISTERS.isdisjoint(record.calls)
            or any(r.is_large for result in record.tail for r in results_of(result))
        )

    def undo(self) -> None:
        """Take back what the run changed in place."""
        with internals.DisableTorchFunction(), torch.no_grad():
            for ref, before in self.record.written.values():
                tensor = ref()
                if tensor is not None:
                    tensor.copy_(before)


def _watched_runs() -> list[Any]:
    """The forwards and reruns that the current code is part of, innermost last."""
    return [mode for mode in internals.function_modes() if isinstance(mode, (Forward, Rerun))]
