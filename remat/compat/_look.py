"""Watch the runs of a checkpointed function.

Its graph is autograd's own. So it may call modules that `fully_shard` or `parallelize_module` has prepared, and may
write to differentiated tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from remat import _torch_internals as internals
from remat import _tree
from remat._effects import Effects, effects_of, tensors_in, written_by
from remat._errors import CheckpointError, call_site
from remat._graph import is_from_before
from remat._labels import kept
from remat._layers import inner_tensors, layers_up_to, version_of
from remat._look import Look
from remat._memory import is_over, memory_of
from remat._nested_mode import current_look
from remat._signature import HOLDER, kind_of

_HANDED_ON = (
    "checkpoint: {} hands a tensor of shape {} to a transform inside, and the tensor is not as it was in the forward. "
    "Pass it as an argument."
)
_SET_UP = (
    "checkpoint: the forward of {} sets up a tensor of shape {}, and then changes it in place. Its rerun finds it set "
    "up, and would change it again. Set it up outside, or call the function once before, in torch.no_grad()."
)
_KEPT = (
    "checkpoint: the rerun of {} computes, at {}, what the backward needs from a tensor that another run has computed "
    "and kept. If it is a cache (use_cache=True), switch the cache off. If it is a state that the function replaces "
    "(self.h = ...), pass it as an argument and return the new one. If it is made of weights on first use, make it "
    "outside and pass it."
)

Swaps = dict[int, tuple[Tensor, Tensor]]
Undecided = dict[int, tuple[Any, str | None]]
Saved = Mapping[tuple[int, int], weakref.ref[Tensor]]

kept_by_runs: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, the differentiated tensors that runs made and that somebody keeps, besides the results of forwards."""


class Seen(NamedTuple):
    """A tensor that a run was given or has read from outside. In a rerun, and in calls in it, the stand-in."""

    value: Tensor
    first: Any
    """The first torch call that took it: the function if that returned an alias or set the data; else its number.

    None before that.
    """
    version: int
    """How often it had been written to."""


class CheckpointLook(Look):
    """Watches a run of a checkpointed function: the tensors that it reads from outside or writes to.

    A rerun reads copies of what the forward wrote to. If it reads another tensor that has changed since, that is an
    error. Both runs have the same class, because torch.compile compiles code anew under a mode of another class.

    **Attributes:**

    - `outside`: by identity, the tensors that it has read from outside, or was given.
    - `gathered`: by identity, parameters that hooks gather, as in ZeRO-3 and FSDP2. The rerun gathers them too.
    - `set_up`: by identity, tensors that it wrote to before it read them, and `Seen.first` of these: NOTE [state that
        is set up].
    - `saved`: by the number of a nested call and identity, the plain tensors that this call saves.
    - `hooks_are_set`: whether the forward has put hooks on tensors from outside, if this is a rerun.
    - `saves_unwritten`: whether an op ran that saves memory before its kernel writes to it, as `rrelu` does. A rerun
        that stops as soon as everything is saved would then stop too early.
    """

    outside: dict[int, Seen]
    in_checkpoint = True
    gathered: frozenset[int] = frozenset()
    saves_unwritten = hooks_are_set = _reads_tainted = False
    _stale: Mapping[int, str] = MappingProxyType({})
    _was_lazy: frozenset[int] = frozenset()
    """Parameters that a lazy module initialised in this run. A rerun finds them initialised."""

    def __init__(self, name: str, given: Iterable[Tensor], random: Any = None) -> None:
        super().__init__(name, given, random)
        self.set_up: dict[int, Any] = {}
        self.saved: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        self._to_save: dict[tuple[int, int], Tensor] = {}
        """In a rerun, those of the forward that are still alive."""
        self._as_it_is: set[int] = set()
        """By memory, tensors that the forward set up and that a rerun reads as they are."""
        self._clock = [1]
        """How many torch calls were made. A list, because looks inside count on."""
        self._must_write: frozenset[int] = frozenset()
        self._written: set[int] = set()
        """Both: in a rerun, the memory of the copies to which it must write, and of those to which it has written."""
        self._tainted: dict[int, weakref.ref[Tensor]] = {}
        """By identity, what a rerun has computed from tensors that a run kept and its own forward did not read. It may
        log a sum of losses, but the graph must not save one of them."""

    def prepare_rerun(
        self,
        swaps: Swaps,
        stale: Mapping[int, str],
        undecided: Undecided,
        copied: Iterable[Tensor],
        saved: Saved,
    ) -> None:
        """Make this the look at a rerun.

        **Arguments:**

        - `swaps`: by identity, tensors of the forward, each with its stand-in.
        - `stale`: by identity of tensors that have changed since the forward, the error message if one is read.
        - `undecided`: by identity, the tensors that the forward set up: `Seen.first`, and the error message if they
            have changed since.
        - `copied`: copies of the tensors that the forward wrote to.
        - `saved`: the attribute of the look at the forward.
        """
        self.is_rerun, self._swaps, self._stale, self.undecided = True, swaps, stale, undecided
        self._must_write = frozenset(map(memory_of, copied))
        self._to_save = {key: t for key, ref in saved.items() if (t := ref()) is not None}

    def begin(self, outer: Look | None) -> None:
        if isinstance(outer, CheckpointLook):
            self._clock, self._as_it_is = outer._clock, outer._as_it_is
        super().begin(outer)
        if not self.is_rerun:
            self.labels.clear()  # the first calls that take the given tensors are noted too
        # Whether no tensor has a stand-in, and FSDP2 gathers none.
        self._is_alone = outer is None and not self.is_rerun and not internals.uses_fully_shard()

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        # It does less than `Look`: to compare calls would take half of the time.
        effects = effects_of(func)
        if effects.is_metadata and not (args and id(args[0]) in self._swaps):
            return func(*args, **kwargs) if kwargs else func(*args)
        known = self.labels
        given = args, kwargs
        self._clock[0] += 1
        if self.undecided:
            self._decide(func, args, kwargs or {})
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Tensor):
                if (entry := known.get(id(a))) is not None and entry[0]() is a:
                    continue
                if self._is_alone and (type(a) is Parameter or id(a) in self.outside):
                    self._reader = func
                    self._add(a)
                    continue
            elif kind_of(a.__class__) is not HOLDER:
                continue
            args = self._seen(func, args)
            kwargs = dict(zip(kwargs, self._seen(func, kwargs.values()), strict=True)) if kwargs else None
            break
        acts = effects.acts and (effects.writes or not effects.draws)
        if acts or (kwargs and ("out" in kwargs or kwargs.get("inplace"))):
            out = self._call(effects, func, args, kwargs or {}, given)
            return self._taint(out, written_by(effects, args, kwargs or {})) if self._reads_tainted else out
        before = self._before_draw(func) if effects.acts else None
        out = self._do(func, args, kwargs or {})
        self._after_draw(before)
        if self._reads_tainted:
            self._taint(out)
        elif type(out) is Tensor and not internals.is_wrapper(out):
            known.note(out, None)
        elif kind_of(out.__class__) is HOLDER:
            with internals.DisableTorchFunction():
                self.add_results(func, out)
        return out

    def _decide(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Decide whether a rerun reads a tensor that the forward set up as it is, or sets up a copy of it.

        NOTE [state that is set up]: a forward may write to a tensor from outside before it reads it: it initialises a
        module that it makes on first use, or behind a flag. Its rerun then begins with a read, and needs the tensor
        as it is. If it begins with a write too, or with the same alias for a write, that is of a copy.
        """
        effects = effects_of(func)
        if effects.is_metadata:
            return
        found = self.undecided.keys() & {*map(id, tensors_in((args, kwargs)))}
        written = {*map(id, written_by(effects, args, kwargs))} if found else ()
        for key in found:
            first, message = self.undecided.pop(key)
            if key not in written and func != first:
                tensor, _ = self._swaps.pop(key)
                self._as_it_is.add(memory_of(tensor))
                if message is not None:
                    raise RuntimeError(message)

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        """Skip nothing: a rerun stops as soon as it has recomputed all that the graph saves."""
        return self._do(func, args, kwargs)

    def _before_draw(self, func: Any) -> Any:
        self.saves_unwritten = self.saves_unwritten or "rrelu" in func.__name__
        return super()._before_draw(func)

    def before_write(self, written: Tensor) -> None:
        if self._as_it_is and memory_of(written) in self._as_it_is:
            raise CheckpointError(_SET_UP.format(self.name, list(written.shape)))
        if self._must_write:
            self._written |= self._must_write & {memory_of(written)}
        if self.is_rerun or id(written) in self._was_lazy or internals.fully_shard_at_work():
            return  # the rerun writes to copies; what FSDP2's hooks write, they write again
        copied = {*self.copies}
        super().before_write(written)
        for key in self.copies.keys() - copied if isinstance(current_look(), CheckpointLook) else ():  # it has the time
            first = self.outside[key].first
            if first == self._clock[0] or not isinstance(first, (int, type(None))):
                self.set_up[key] = first

    def is_saved(self, tensor: Tensor) -> bool:
        # The hooks count what is saved. A rerun finds a table outside that a nested call has made on first use.
        key = self.signature.nests, id(tensor)
        if self.is_rerun and kept.get(id(tensor)) is tensor:
            is_given = any(tensor is t for t in self._given)
            if not (is_given or key in self._to_save or self.has_made(tensor)):
                return False
        self.saved[key] = weakref.ref(tensor)
        return True

    def is_written_around(self, tensor: Tensor) -> bool:
        """Whether a checkpointed run around this one has so far written to a tensor that is not differentiated."""
        around = self.outer
        while isinstance(around, CheckpointLook) and not tensor.requires_grad:
            written = {*around._written, *(memory_of(around.outside[key].value) for key in around.copies)}
            if written and memory_of(tensor) in written:
                return True
            around = around.outer
        return False

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        if is_lazy(tensor):
            self._was_lazy |= {id(tensor)}
            return
        if isinstance(tensor, Parameter) and tensor.shape != data.shape:
            self.gathered |= {id(tensor)}
            return
        if not is_over(tensor, data):
            self.before_write(tensor)

    def _add(self, value: Tensor) -> None:
        before = self.outside.get(id(value))
        if before is not None and before.first is not None:
            first = before.first
        elif self._reader is None:
            first = None  # it is given, and no call has taken it
        else:
            effects = effects_of(self._reader)
            is_alias = effects.gives_alias and not effects.is_metadata
            first = self._reader if is_alias or effects.sets_data else self._clock[0]
        self.outside[id(value)] = Seen(value, first, version_of(value))
        self.labels.note(value, None)
        self.copies.note(id(value), self.outside, self._copied)

    def add_call(self, name: str, out: Any, inner: Any = None, remembered: Any = None) -> None:
        self.signature.nests += 1
        self.add_results(name, _tree.flatten(out)[0])

    def add_results(self, func: Any, out: Any, *_: Any, **__: Any) -> None:
        for t in tensors_in(out):
            for layer in (t, *layers_up_to(t, self.depth), *inner_tensors(t)):
                self.labels.note(layer, None)

    def read(self, tensor: Tensor, wrapped_inside: bool = False) -> Tensor:
        key = id(tensor)
        if (stale := self._stale.get(id(self.stand_in(tensor)))) is not None:
            raise RuntimeError(stale)
        if self._is_tainted(tensor):
            if current_look() is not self:  # what it computes would not be known
                raise self.kept_error()
            self._reads_tainted = True
            return tensor
        if self.labels.has(tensor):
            return tensor
        if internals.is_traceable_wrapper_subclass(tensor) and not is_from_before(tensor, self.since):
            self.labels.note(tensor, None)  # unseen: DTensors are made in an autograd.Function
            return tensor
        if internals.level_of(tensor) > self.depth:
            inner = internals.unwrapped(tensor)
            if self._is_tainted(inner):
                raise self.kept_error()
            if self.read(inner) is not inner and not inner.requires_grad:
                raise CheckpointError(_HANDED_ON.format(self.name, list(inner.shape)))
            self.labels.note(tensor, None)
            return tensor
        if internals.fully_shard_at_work():
            return tensor
        if key in self.undecided:  # a look of another class watches the call, or a transform inside has wrapped it
            self._decide(self._reader, (tensor,), {})
        if self.outer is None:
            value = self.stand_in(tensor)
        else:
            self.outer._reader = self._reader
            value = self.outer.read(tensor, wrapped_inside)
        self._add(value)
        return value

    def _is_tainted(self, tensor: Tensor) -> bool:
        """Whether, in a rerun, a tensor is what a run kept and its forward did not read, or is computed from that."""
        key = id(tensor)
        if (ref := self._tainted.get(key)) is not None and ref() is tensor:
            return True
        if not self.is_rerun or kept_by_runs.get(key) is not tensor or self.labels.has(tensor) or key in self._swaps:
            return False
        # The rerun of an outer function may have put it in the place of what this forward read: then it is the same.
        return memory_of(tensor) not in map(memory_of, self._given)

    def _taint(self, out: Any, written: Iterable[Tensor] = ()) -> Any:
        """Note that a call has computed `out`, and what it wrote to, from what a run kept. Returns `out`."""
        self._reads_tainted = False
        for t in (*tensors_in(out), *written):
            self._tainted[id(t)] = weakref.ref(t)
            self.labels.pop(id(t), None)
        return out

    def saves_tainted(self, saved: Tensor) -> bool:
        """Whether a tensor that the running call saves for the backward depends on what a run kept."""
        return self._is_tainted(saved) or (self._reads_tainted and not self.labels.has(saved))

    def kept_error(self) -> CheckpointError:
        """The error for a rerun whose graph saves what it has computed from what a run kept."""
        return CheckpointError(_KEPT.format(self.name, call_site()))

    def keep(self, out: Any) -> None:
        """Note which differentiated tensors the run has made and somebody keeps, besides its results."""
        results = {*map(id, tensors_in(_tree.flatten(out)[0]))}
        for key, (ref, *_) in self.labels.items():
            if (t := ref()) is not None and t.grad_fn is not None and key not in results and self.has_made(t):
                kept_by_runs[key] = t

    def label_of(self, tensor: Tensor) -> int | None:
        """Tells a tensor from others of this run. No rerun compares it."""
        return id(tensor)

    def _copied(self, value: Tensor) -> Tensor:
        copy = value.detach().clone()
        return copy.requires_grad_() if value.requires_grad else copy

    def _check_graph(self, *args: Any, **kwargs: Any) -> None:
        """Any graph may be differentiated: it is there in the rerun."""

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        if self.is_rerun:  # the forward may have put it on the tensor from outside itself
            is_set = self.hooks_are_set and id(args[0]) in self.outside
            return (internals.leaf_of_nothing(), *args[1:]) if is_set else args
        self.sets_hooks = self.sets_hooks or not self.has_made(args[0])
        return args if self.outer is None else self.outer._with_hook(args, (self.position, *inner))
