"""Watch the runs of a checkpointed function.

Its graph is autograd's own. So it may call modules that `fully_shard` or `parallelize_module` has prepared, and may
write to differentiated tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import Parameter, is_lazy

from remat import _torch_internals as internals
from remat._effects import Effects, effects_of, tensors_in
from remat._errors import CheckpointError
from remat._look import Look
from remat._memory import memory_of
from remat._signature import HOLDER, kind_of

_SCALARS = frozenset({bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device})
_HANDED_ON = (
    "checkpoint: {} hands a tensor of shape {} to a transform inside, and the tensor is not as it was in the forward. "
    "Pass it as an argument."
)


class Seen(NamedTuple):
    """A tensor that a run was given or has read from outside, and its stand-in: the tensor to read in its place."""

    tensor: Tensor
    value: Tensor


class CheckpointLook(Look):
    """Watches a run of a checkpointed function: the tensors that it reads from outside or writes to.

    A rerun reads copies of what the forward wrote to. If it reads another tensor that has changed since, that is an
    error. Both runs have the same class, because torch.compile compiles code anew under a mode of another class.

    **Attributes:**

    - `outside`: by identity, the tensors that it has read from outside, or was given.
    - `gathered`: by identity, parameters that hooks gather, as in ZeRO-3 and FSDP2. The rerun gathers them too.
    - `saves_unwritten`: whether an op ran that saves memory before its kernel writes to it, as `rrelu` does. A rerun
        that stops as soon as everything is saved would then stop too early.
    """

    outside: dict[int, Seen]
    gathered: frozenset[int] = frozenset()
    saves_unwritten = False
    _stale: Mapping[int, RuntimeError] = MappingProxyType({})
    _was_lazy: frozenset[int] = frozenset()
    """Parameters that a lazy module initialised in this run. A rerun finds them initialised."""

    @classmethod
    def at_rerun(
        cls, name: str, given: Iterable[Tensor], swaps: dict[int, tuple[Tensor, Tensor]], stale: dict[int, RuntimeError]
    ) -> CheckpointLook:
        """A look at a rerun of the function `name`, which is given tensors.

        **Arguments:**

        - `swaps`: by identity, tensors of the forward, each with its stand-in.
        - `stale`: by identity of tensors that have changed since the forward, the error to raise if one is read.
        """
        look = cls(name, [t for t in given if id(t) not in stale], None)
        look.is_rerun, look._stale, look._swaps = True, stale, swaps
        return look

    def begin(self, outer: Look | None) -> None:
        self._known: set[int] = set()
        """The identities of the tensors that it was given, has read or has made."""
        self._own_memory: set[int] = set()
        """The memory that it has made. No call shows who makes a parameter, of a module that is made on first use."""
        super().begin(outer)
        # Whether no tensor has a stand-in, and FSDP2 gathers none.
        self._is_alone = outer is None and not self.is_rerun and not internals.uses_fully_shard()

    def adopt(self, inner: Look) -> None:
        super().adopt(inner)
        self._known |= self.labels.keys() | self.labels.plain.keys()
        if isinstance(inner, CheckpointLook):
            self._own_memory |= inner._own_memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # It does less than `Look`: to compare calls would take half of the time.
        if is_dynamo_compiling():  # `torch.cond` is compiled under the active modes
            return func(*args, **(kwargs or {}))
        delegate = self.delegate
        if delegate is not None:
            return delegate.__torch_function__(func, types, args, kwargs)
        effects = effects_of(func)
        if effects.is_metadata:
            return func(*args, **kwargs) if kwargs else func(*args)
        known = self._known
        given = args, kwargs
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Tensor):
                if id(a) in known:
                    continue
                if type(a) is Parameter and self._is_alone:
                    self._add(a, a)
                    continue
            elif kind_of(a.__class__) is not HOLDER or (type(a) is tuple and _SCALARS.issuperset(map(type, a))):
                continue
            args = self._seen(func, args)
            kwargs = dict(zip(kwargs, self._seen(func, kwargs.values()), strict=True)) if kwargs else None
            break
        acts = effects.acts and (effects.writes or not effects.draws)
        if acts or (kwargs and ("out" in kwargs or kwargs.get("inplace"))):
            return self._call(effects, func, args, kwargs or {}, given)
        if effects.acts:
            self._mark_draw(func)
        self.call = func, args, kwargs or {}
        out = func(*args, **kwargs) if kwargs else func(*args)
        self.call = None
        if type(out) is Tensor and not internals.is_wrapper(out):
            self._add_own(out)
            if not (out.requires_grad or self.is_rerun):
                self._own_memory |= {memory_of(out)}.difference(map(memory_of, tensors_in((args, kwargs))))
        elif kind_of(out.__class__) is HOLDER:
            with internals.DisableTorchFunction():
                self.add_results(func, out)
        return out

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        """Skip nothing: a rerun stops as soon as it has recomputed all that the graph saves."""
        return func(*args, **kwargs)

    def _mark_draw(self, func: Any) -> None:
        super()._mark_draw(func)
        self.saves_unwritten = self.saves_unwritten or "rrelu" in func.__name__

    def before_write(self, written: Tensor) -> None:
        if self.is_rerun or id(written) in self._was_lazy or internals.fully_shard_at_work():
            return  # the rerun writes to copies; what FSDP2's hooks write, they write again
        if memory_of(written) in self._own_memory:
            return
        super().before_write(written)

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        if is_lazy(tensor):
            self._was_lazy |= {id(tensor)}
        elif tensor.shape != data.shape:
            self.gathered |= {id(tensor)}
        elif tensor.dtype != data.dtype or not tensor.is_set_to(data):  # else `module.to` changes nothing
            self.before_write(tensor)

    def _add(self, tensor: Tensor, value: Tensor) -> None:
        self.outside[id(tensor)] = Seen(tensor, value)
        self._known.add(id(value))
        if self._memory is not None:
            self._memory.setdefault(memory_of(value), []).append(id(tensor))

    def add_call(self, name: str, out: Any, inner: Any = None, remembered: Any = None) -> None:
        self.signature.nests += 1
        self.add_results(name, out)

    def add_results(self, func: Any, out: Any, *_: Any, **__: Any) -> None:
        for t in tensors_in(out):
            self._known.update(map(id, internals.layers_up_to(t, self.depth)))
            self._add_own(t)

    def _add_own(self, tensor: Tensor) -> None:
        key = id(tensor)
        self._known.add(key)
        if key not in self.outside:
            self.labels.note(tensor, None)

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        key = id(tensor)
        if key in self._stale:
            raise self._stale[key]
        if key in self._known:
            return tensor
        if internals.level_of(tensor) > self.depth:
            inner = internals.unwrapped(tensor)
            if self.read(inner) is not inner and not inner.requires_grad:
                raise CheckpointError(_HANDED_ON.format(self.name, list(inner.shape)))
            self._known.add(key)
            return tensor
        if internals.fully_shard_at_work():
            return tensor
        value = self._swaps.get(key, (tensor, tensor))[1] if self.outer is None else self.outer.read(tensor, handed_on)
        self._add(tensor, value)
        return value

    def has_made(self, tensor: Tensor) -> bool:
        return id(tensor) not in self.outside and self.labels.has(tensor)

    def label_of(self, tensor: Tensor) -> int | None:
        """Tells a tensor from others of this run. No rerun compares it."""
        return id(tensor)

    def _copied(self, value: Tensor) -> Tensor:
        copy = value.detach().clone()
        return copy.requires_grad_() if value.requires_grad else copy

    def _check_graph(self, *args: Any, **kwargs: Any) -> None:
        """Any graph may be differentiated: it is there in the rerun."""

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        if self.is_rerun:  # the forward has put it on the tensor from outside itself
            return (internals.leaf_of_nothing(), *args[1:]) if id(args[0]) in self.outside else args
        self.sets_hooks = self.sets_hooks or not self.has_made(args[0])
        return args if self.outer is None else self.outer._with_hook(args, (self._count(), *inner))
