"""How checkpoints look at their runs.

The graph of a checkpointed function stays, so nothing is out of sight: a run may call modules that `fully_shard` or
`parallelize_module` has prepared, and may write to what is differentiated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from remat import _torch_internals as internals
from remat._effects import effects_of
from remat._graph import is_made_since
from remat._look import CONTAINERS, SCALARS, Look, Read

is_wrapper = internals.is_wrapper


class ForwardLook(Look):
    """Looks at the forward of a checkpoint: what it reads from outside, and what that was before it was written to.

    **Attributes:**

    - `gathered`: by identity, tensors that hooks gather whole, as those of ZeRO-3 and FSDP2 do. They do it in the
        rerun too.
    - `saves_unwritten`: whether an op saves memory that its kernel is yet to write: a rerun can't stop before that.
    """

    def __init__(self, name: str, given: Iterable[Tensor], random: Any) -> None:
        """A look at a run of the function `name`, which is given tensors. `random`: what to tell of generators."""
        super().__init__(name, given, random)
        self.gathered: set[int] = set()
        self.saves_unwritten = False
        self._unkept: list[weakref.ref[Tensor]] = []
        self._was_lazy: set[int] = set()
        """Parameters that have got their memory in this run. A rerun finds them as they are."""
        self._since = internals.next_sequence_number()
        self._is_alone = True
        """Whether nothing can stand for a tensor, and nobody else gathers any."""

    def begin(self, outer: Look | None) -> None:
        super().begin(outer)
        self._is_alone = outer is None and not self.is_rerun and not internals.uses_fully_shard()

    def forget(self) -> None:
        """What it has seen was noted: hold nothing."""
        self.outside.clear()
        self._memory = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiling():  # `torch.cond` is compiled under the active modes
            return func(*args, **(kwargs or {}))
        delegate = self.delegate
        if delegate is not None:
            return delegate.__torch_function__(func, types, args, kwargs)
        known = self._known
        given = args, kwargs
        for a in args:
            kind = type(a)
            if kind in SCALARS or (id(a) in known and kind not in CONTAINERS):
                continue
            if kind is Parameter and self._is_alone and self._memory is None:
                self.outside[id(a)] = Read(a, a, 0, 0, func)
                known.add(id(a))
            elif isinstance(a, Tensor) or kind in CONTAINERS:
                args = self._seen(args)
                break
        effects = effects_of(func)
        if kwargs or effects.acts:
            named = dict(zip(kwargs, self._seen(kwargs.values()), strict=True)) if kwargs else {}
            return self._call(effects, func, args, named, given)
        self.call = func, args, {}
        out = func(*args)
        self.call = None
        kind = type(out)
        if kind is Tensor and not is_wrapper(out):
            known.add(id(out))
            if not out.requires_grad and id(out) not in self.outside:
                self._unkept.append(weakref.ref(out))
        elif kind not in SCALARS:
            with internals.DisableTorchFunction():
                self.add_results(func, out)
        return out

    def _mark_draw(self, func: Any) -> None:
        super()._mark_draw(func)
        self.saves_unwritten = self.saves_unwritten or "rrelu" in func.__name__

    def before_write(self, written: Tensor) -> None:
        if id(written) not in self._was_lazy and not internals.fully_shard_at_work():
            super().before_write(written)  # what FSDP2's hooks write, they write again

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        if is_lazy(tensor):
            self._was_lazy.add(id(tensor))
        elif tensor.shape == data.shape:
            self.before_write(tensor)
        else:
            self.gathered.add(id(tensor))

    def _add_fresh(self, tensor: Tensor) -> None:
        self._known.add(id(tensor))
        if id(tensor) not in self.outside:
            self._unkept.append(weakref.ref(tensor))

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        key = id(tensor)
        if key in self._known:
            return tensor
        if internals.level_of(tensor) > self.depth:
            self.read(internals.unwrapped(tensor), handed_on=True)
            self._known.add(key)
            return tensor
        if internals.fully_shard_at_work():
            return tensor
        value = self._swaps.get(key, tensor) if self.outer is None else self.outer.read(tensor, handed_on)
        if handed_on:
            self.handed_on.add(key)
        self._add(tensor, value)
        return value

    def has_made(self, tensor: Tensor) -> bool:
        # Another tensor may have got the identity of one that has died.
        return super().has_made(tensor) and (
            is_made_since(tensor, self._since) or any(ref() is tensor for ref in self._unkept)
        )

    def _copied(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            return value.clone().requires_grad_(value.requires_grad)

    def _with_hook(self, args: Any) -> Any:
        self.sets_hooks = self.sets_hooks or not self.has_made(args[0])
        return args if self.outer is None else self.outer._with_hook(args)

    def _note(self, func: Any, shape: int) -> None:
        """Checkpoints compare what runs save, and not their calls."""


class RerunLook(ForwardLook):
    """Looks at a rerun: copies stand for what the forward wrote to, and what was read has to be as it was."""

    is_rerun = True

    def __init__(
        self,
        name: str,
        given: Iterable[Tensor],
        swaps: Iterable[tuple[Tensor, Tensor]],
        stale: dict[int, RuntimeError],
    ) -> None:
        """A look at a rerun of the function `name`, which is given tensors.

        **Arguments:**

        - `swaps`: tensors, and what stands for them.
        - `stale`: by identity, what to raise where tensors are read that were changed since the forward.
        """
        super().__init__(name, [t for t in given if id(t) not in stale], None)
        self._swaps = {id(tensor): stand_in for tensor, stand_in in swaps}
        self._stale = stale

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        key = id(tensor)
        if key in self._stale:
            raise self._stale[key]
        if key in self._known:
            return tensor
        stand_in = self._swaps.get(key)
        if stand_in is not None:
            return stand_in
        self._add(tensor, tensor)
        return tensor

    def before_write(self, written: Tensor) -> None:
        """What the forward wrote to is a copy here."""

    def notice(self, generator: torch.Generator) -> None:
        """It draws again what the forward drew."""

    def _with_hook(self, args: Any) -> Any:
        if id(args[0]) in self.outside:  # the forward has put it on the tensor itself
            return (internals.leaf_of_nothing(), *args[1:])
        return args
