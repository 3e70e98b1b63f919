"""The rerun of a watched checkpoint.

It reads what the forward read, changes copies, and ends early without anybody noticing: once the last tensor that the
backward needs is there, calls return zeros, of the shape that they returned in the forward. If these are read for their
values after all, or outlive the rerun, they are computed then.

Nothing that is passed on says "stop": the exception that cuts the last needed call short is raised below a torch call
and caught in the frame around that call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._compile import tracing
from remat._effects import SET_DATA
from remat._errors import CheckpointError, RematError
from remat._native import Difference, meta_of, version
from remat._run import has
from remat._watch import Watch
from remat.compat._record import Outside, Record, Result, results_of
from remat.compat._spared_calls import SparedCalls
from remat.compat._torch_calls import (
    ARITHMETIC,
    BACKWARDS,
    CONTAINERS,
    RENORMALIZING,
    all_of,
    cuttable,
    looks_up,
    may_change,
    mutable,
    name_of,
    replaced,
    targets_of,
    tensors_in,
    writes,
)

CHANGES = (
    "checkpoint: with use_reentrant=True, the function changes a tensor of shape {}, {} in place that it was given or "
    "has read from outside. Its rerun would start from the changed value. Change a copy instead: x = x.clone(), or use "
    "use_reentrant=False."
)
STATE_WAS_SET_UP = (
    "checkpoint: the function writes to a tensor of shape {}, {} that it {}, and its rerun makes other calls than its "
    "forward: it would read what was written. Set up state before the first call, or keep it in tensors and in "
    "attributes of modules."
)
REPLACED = (
    "checkpoint: the function reads a tensor of shape {}, {} from outside, in the place of which its rerun finds "
    "another one, and a rerun that reads the one makes other calls than the forward: which of the two it has to read "
    "can't be told. Set up state before the first call, or keep it in tensors and in attributes of modules."
)


REGISTERS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
"""What registers hooks of tensors."""

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""What ends a rerun whatever it has read."""


class ReplacedError(CheckpointError):
    """A rerun has read a tensor in the place of another one, and it can't be told which is right."""


class _Cut(BaseException):
    """Leaves a torch call whose kernel need not run. Caught around that very call."""


class Collector:
    """Collects what a rerun saves."""

    def __init__(self, record: Record, early_stop: bool) -> None:
        self.saved: list[tuple[Tensor, int] | None] = []
        """What the graph would save, detached, and its version; None where nobody will ask for it."""
        self.different: list[Difference] = []
        self._record = record
        self._last = len(record.holders) - 1 if early_stop else -1

    _done = False
    """Whether all that the backward needs is there."""

    def pack(self, tensor: Tensor) -> Any:
        """The hook: collects `tensor`."""
        if internals.function_modes_active():
            with internals.DisableTorchFunction():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self._done:
            return tensor
        saved, holders = self.saved, self._record.holders
        index = len(saved)
        if index >= len(holders) or holders[index]() is None:
            saved.append(None)
        else:
            saved.append((tensor, version(tensor)))
            metas = self._record.metas
            if metas and metas[index] != (meta := meta_of(tensor)):
                self.different.append((index, metas[index], meta))
        if index == self._last:
            self._done = True
            self._stop()
        return tensor

    def _stop(self) -> None:
        """All that the backward needs is there."""


class Rerun(Collector, Watch):
    """Repeats a forward run: it reads and writes what that did, and does no more than it has to."""

    def __init__(
        self,
        record: Record,
        given: Sequence[Tensor],
        early_stop: bool,
        under_context: bool = False,
        trusting: bool = True,
        inner: dict[int, Tensor] | None = None,
    ) -> None:
        """A rerun that is given tensors.

        **Arguments:**

        - `inner`: by the identity of what was noted of them, tensors from outside that the run around saved.
        - `under_context`: as for the forward.
        - `trusting`: whether the rerun begins where the forward began: it reads what tensors were before the forward
            wrote to them, and a call that reads another tensor from outside than the same call of the forward is given
            that of the forward. It is right, for something may have been put in the place of the tensor, if all calls
            turn out to be the same. Otherwise the rerun `was_misled`: a cache is filled by now, or a flag is set, and
            calls are left out.
        """
        Collector.__init__(self, record, early_stop)
        Watch.__init__(self)
        self.drops_result = early_stop
        """Whether nobody needs what the function returns: spared memory in it need not be computed."""
        self._given = given
        self.given = set(map(id, given))
        self.made = {id(t): weakref.ref(t) for t in given}  # by identity, as in the forward
        self._since = internals.next_sequence_number()
        self._inner = inner or {}
        self._outside = {id(o.tensor): o for o in record.outside if o.tensor is not None}
        self.trusting = trusting
        self._is_sharded = internals.uses_fully_shard()
        self._under_context = under_context
        self._unseen: Any = internals.DisableTorchDispatch if under_context else contextlib.nullcontext
        # A context may count the function's ops: those that are computed later have to come in the same order.
        self._may_spare = not under_context or not any(r.is_view for result in record.tail for r in results_of(result))
        self.spared = SparedCalls(self._unseen)
        self._tail_begin = len(record.calls) - len(record.tail)
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    is_rerun = True
    is_state: Callable[[Tensor], bool] = staticmethod(lambda tensor: False)
    """Whether a module has a tensor."""
    unwritable: Container[int] = ()
    """The memory of tensors from outside that are differentiated: a copy can't take the place of those."""
    gathered: Sequence[Tensor] = ()
    """Such tensors that are themselves read in the rerun: hooks give them their memory with `.data = ...`."""
    _position = -1
    """The number of the call that is running, or was the last."""
    _aligned = True
    """Whether the forward made the same calls up to there."""
    _matching = 0
    """How many calls were the same."""
    writes = False
    """Whether the call may write to its arguments, where the rerun is not trusting."""
    _running: Any = None
    """Its function, while it is running."""
    may_be_misled = False
    """Whether it reads something else than it would find."""
    _replaced: tuple[list[int], torch.dtype] | None = None
    """Shape and dtype of the first tensor that it reads in the place of what it would find."""
    _lazy = False
    """Whether calls are spared from then on."""
    counter: Any = None
    """What counts the ops, and can take back what it has counted."""
    error: Exception | None = None
    """What ended it."""
    _counted = 0
    """How many ops it had counted when the call began."""

    def _stop(self) -> None:
        func = self._running
        if not self._may_spare:
            return
        if func is None:  # between two calls
            self._lazy = self._aligned and self._position + 1 == self._tail_begin
        elif self._aligned and self._position == self._tail_begin:
            self._lazy = True
            result = self._record.tail[0]
            if type(result) is Result and not result.is_view and result.is_large and self._may_cut(func):
                raise _Cut

    def _may_cut(self, func: Any) -> bool:
        """Whether the rest of a call need not run. If somebody reads its result after all, it runs as a whole."""
        if not cuttable(func) or (self._under_context and self.counter is None):
            return False
        if self.counter is not None:
            self.counter.rewind(self._counted)
        return True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if tracing():  # what is compiled, once for each run, has to be the same
            return func(*args, **kwargs) if kwargs else func(*args)
        if looks_up(func):
            return func(self.swapped(args[0]), *args[1:])
        kwargs = kwargs or {}
        if self._is_sharded and not self._done and internals.fully_shard_at_work():
            out = func(*args, **kwargs)
            self._adopt(out, args)
            return out
        record = self._record
        self._position = position = self._position + 1
        self._aligned = aligned = self._aligned and position < len(record.calls) and record.calls[position] == func
        if aligned:
            self._matching = position + 1
        if aligned and func in REGISTERS and (not self.is_made(args[0]) or id(args[0]) in self.given):
            return internals.RemovableHandle(OrderedDict())  # the forward has registered it
        self._writes = not self.trusting and writes(func, kwargs)
        made = self.made
        for arg in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                known = made.get(id(arg))
                if known is not None and known() is arg:
                    continue
            elif type(arg) not in CONTAINERS:
                continue
            reads = record.reads.get(position) if aligned else None
            if kwargs or not self._reads_the_same(args, reads):
                args, kwargs = self._resolve(args, kwargs, reads)
            break
        if changes := may_change(func, kwargs):
            args, kwargs = self._before_write(func, args, kwargs)
        if self._done:
            out = self._late(func, args, kwargs)
            return self.original_of(out) if changes else out
        self._running = func
        if self.counter is not None:
            self._counted = len(self.counter.seen)
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except _Cut:
            return self._spare(func, args, kwargs, record.tail[0])
        finally:
            self._running = None
        self._adopt(out, args)
        return self.original_of(out) if changes else out  # `m.count += 1` leaves there what the forward left there

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was given or made inside."""
        return has(self.made, tensor)

    def _adopt(self, out: Any, args: tuple[Any, ...] = ()) -> None:
        for item in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(item, Tensor) and not self.is_made(item) and not _is_among(item, args):
                self.made[id(item)] = weakref.ref(item)

    @property
    def was_misled(self) -> bool:
        """Whether the calls were not those of the forward, and tensors were replaced as if they were."""
        return self.may_be_misled and self.makes_other_calls

    @property
    def makes_other_calls(self) -> bool:
        """Whether the calls were not those of the forward."""
        return self._matching < self._record.needed

    def check_replaced(self) -> None:
        """Raise where a rerun that did not fail read other tensors than it would find, or than the forward read.

        One that is not trusting may do so where its calls are others.
        """
        if self._replaced is not None and (self.trusting or not self.makes_other_calls):
            raise ReplacedError(REPLACED.format(*self._replaced))

    # Reading and writing.

    def _reads_the_same(self, args: tuple[Any, ...], reads: dict[int, Outside] | None) -> bool:
        """Whether a call plainly reads from outside what it read in the forward."""
        if not reads or self._swaps:
            return False
        number = 0
        for arg in args:
            if isinstance(arg, Tensor):
                if not self.is_made(arg):
                    outside = reads.get(number)
                    if outside is None or outside.tensor is not arg or outside.version != version(arg):
                        return False
                number += 1
            elif type(arg) in CONTAINERS:
                return False
        return True

    def _resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reads: dict[int, Outside] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with what the forward read in the place of other tensors from outside."""
        given = enumerate(tensors_in(all_of(args, kwargs)))
        tensors = [self._read(t, reads.get(i) if reads else None) for i, t in given]
        if all(t is None for t in tensors):
            return args, kwargs
        read = iter(tensors)
        return tuple([replaced(a, read) for a in args]), {k: replaced(v, read) for k, v in kwargs.items()}

    def _read(self, tensor: Tensor, expected: Outside | None) -> Tensor | None:
        """What to read in the place of a tensor; None: itself."""
        if self.is_made(tensor):
            return None
        found = None
        if expected is not None and self._made_out_of_sight(tensor, expected):
            self.made[id(tensor)] = weakref.ref(tensor)
            return None
        if expected is not None and self.trusting:
            found = self._inner.get(id(expected), expected.tensor)
        elif expected is not None and expected.tensor is not None and expected.tensor is not tensor:
            self._replaced = self._replaced or (list(tensor.shape), tensor.dtype)
        if found is None:
            found = tensor
            expected = self._outside.get(id(tensor))
        if found is not tensor and self._replaced is None:
            self.may_be_misled, self._replaced = True, (list(found.shape), found.dtype)
        stand_in = self._swaps.get(id(found))
        if expected is not None:
            with internals.DisableTorchFunction():
                self._check(expected, stand_in)
            found = self._inner.get(id(expected), found)
        if stand_in is not None:
            return stand_in
        return None if found is tensor else found

    def _made_out_of_sight(self, tensor: Tensor, expected: Outside) -> bool:
        """Whether the rerun has made a tensor itself, of which the forward, in no_grad mode, could not tell that."""
        then = expected.tensor
        if then is None or then is tensor:
            return False
        with internals.DisableTorchFunction():
            node = tensor.grad_fn
            return node is not None and not then.requires_grad and internals.sequence_number(node) >= self._since

    def _check(self, outside: Outside, stand_in: Tensor | None) -> None:
        """Raise where a call reads something else than in the forward.

        A rerun that is not trusting begins with the state as it is now: as the forward read it, if that did not write
        to it later.
        """
        tensor = outside.tensor
        begins_with_it = not self.trusting and id(tensor) in self._record.written
        if begins_with_it or stand_in is None:
            outside.check()
        if tensor is None or not begins_with_it or self._writes:
            return
        if not tensor.is_floating_point():  # a flag: what it is now is what tells the function not to begin again
            return
        if outside.last_read != outside.version:
            raise CheckpointError(STATE_WAS_SET_UP.format(list(tensor.shape), tensor.dtype, "reads from outside"))

    def _before_write(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Nothing from outside is changed a second time: a copy is."""
        if func in BACKWARDS:
            if func is not torch.autograd.grad:
                self._before_backward()
            return args, kwargs
        if func == SET_DATA and any(t is args[0] for t in self.gathered):
            return args, kwargs
        with internals.DisableTorchFunction(), self._unseen():
            targets = targets_of(func, args, kwargs)
            if (self.unwritable or self.gathered) and func not in RENORMALIZING:
                gathered = {*map(internals.memory_of, self.gathered)}
                for t in targets:
                    if (memory := internals.memory_of(t)) in self.unwritable or memory in gathered:
                        raise RematError(CHANGES.format(list(t.shape), t.dtype))
            strange = [t for t in targets if not self.is_made(t) and self._was_there(t)]
            for t in strange:
                self.swap(t, copy_of(t))
        if strange:
            return self._resolve(args, kwargs, None)
        return args, kwargs

    def _was_there(self, tensor: Tensor) -> bool:
        """Whether the forward has read a tensor, or written to it, or a module has it. Others are made out of sight."""
        written = self._record.written.get(id(tensor))
        return (
            id(tensor) in self._outside
            or self.knows(id(tensor))
            or (written is not None and written[0]() is tensor)
            or self.is_state(tensor)
        )

    def swap(self, original: Tensor, operand: Tensor, key: int | None = None) -> None:
        """From now on `operand` is read and written in the place of `original`."""
        super().swap(original, operand, key)
        self.made.pop(id(original), None)
        self.made[id(operand)] = weakref.ref(operand)

    def _before_backward(self) -> None:
        """A backward inside of the function has added to `.grad` in the forward: once is enough."""
        if not self._grads:
            for t in (*self._given, *(o.ref() for o in self._record.outside)):
                if t is not None and t.requires_grad and t.is_leaf:
                    self._grads.append((t, t.grad))
                    with self._unseen():
                        t.grad = None if t.grad is None else t.grad.clone()

    # After the last needed tensor.

    def _late(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that nothing but the function itself needs."""
        at = self._position - self._tail_begin
        noted = self._record.tail[at] if self._lazy and self._aligned and 0 <= at < len(self._record.tail) else None
        if self._changes_spared(func, args, kwargs, noted):
            self.spared.add(func, args, kwargs, args[:1], writes=True)
            return args[0]
        if noted is None or mutable(func) or kwargs.get("out") is not None or name_of(func) == "data_ptr":
            self._lazy = False
            self.spared.compute()
        elif type(noted) is tuple and noted[0] is None and not [*tensors_in(all_of(args, kwargs))]:
            return func(*args, **kwargs)  # it sets something that later calls go by: grad mode
        elif type(noted) is tuple and self.counter is None:
            return noted[0]
        else:
            results = results_of(noted)
            # A view of spared memory will be right once that is. What is small is spared where it reads such memory.
            if not any(r.is_view for r in results) and (self.spared or any(r.is_large for r in results)):
                return self._spare(func, args, kwargs, noted)
        out = func(*args, **kwargs)
        self._adopt(out)
        if self.spared and not mutable(func):
            self.spared.add(func, args, kwargs, out if isinstance(out, (list, tuple)) else (out,), is_view=True)
        return out

    def _changes_spared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], noted: Any) -> bool:
        """Whether a call computes in place on what was not computed, and on nothing else."""
        if func not in ARITHMETIC or type(noted) is not Result or kwargs or not self.spared.has(args[0]):
            return False
        with internals.DisableTorchFunction():
            return args[0].requires_grad == noted.requires_grad

    def _spare(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        with internals.DisableTorchFunction(), self._unseen():
            many = type(result) is list
            out = [r.allocate() if type(r) is Result else r[0] for r in (result[1:] if many else [result])]
            self._adopt(out)
            self.spared.add(func, args, kwargs, out)
        return rebuilt(result[0], out) if many else out[0]

    def close(self) -> None:
        """Take back what a backward inside of the function has added to `.grad`, and let go of all tensors.

        The graph may hold its hooks, and so this rerun, which must not hold the graph.
        """
        for t, grad in self._grads:
            t.grad = grad
        self._grads, self._given, self._swapped, self._swaps = [], (), [], {}
        self.spared.clear()
        self._inner, self._outside = {}, {}


def _is_among(tensor: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result is one of the arguments."""
    if id(tensor) in map(id, args):
        return True
    return not CONTAINERS.isdisjoint(map(type, args)) and any(tensor is t for t in tensors_in(args))


def rebuilt(kind: Any, items: Sequence[Any]) -> Any:
    """A list, a tuple, or one with names."""
    if hasattr(kind, "_fields"):
        return kind._make(items)
    return kind(items) if kind is list or kind.__module__ == "torch.return_types" else tuple(items)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that can be changed in place, also where it is differentiated."""
    with internals.DisableTorchFunction(), torch.enable_grad():
        copy = tensor.detach().clone()
        return copy.requires_grad_().clone() if tensor.requires_grad else copy
