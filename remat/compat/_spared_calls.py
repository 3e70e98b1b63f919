"""Calls at the end of a rerun that did not run: what they would return is computed if somebody reads it after all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import Ambient
from remat._errors import CheckpointError
from remat.compat._torch_calls import all_of, replaced, tensors_in


class _Spared(NamedTuple):
    """A call that did not run, and the memory that its results belong into.

    It may also be a view of such memory that was made, or a change of it in place that was not.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[weakref.ref[Tensor] | None]
    writes: bool
    ambient: Ambient

    @property
    def is_alive(self) -> bool:
        """Whether somebody has such memory."""
        return any(ref is not None and ref() is not None for ref in self.results)


class _Later(NamedTuple):
    """In the arguments of a spared call, the result of another: its memory is not held."""

    call: int
    number: int


class _OfRerun(torch.autograd.Function):
    """The node of a tensor that the rerun made after the last one that the backward needs, and that outlives it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        raise CheckpointError(
            "checkpoint: a tensor is differentiated that a checkpointed function put somewhere (an attribute, a list) "
            "when it was run again, in an earlier backward pass: it has its values, and no graph. Return the tensor "
            "from the function, or pass early_stop=False."
        )


class SparedCalls:
    """Those of one rerun, in order. True where there are such."""

    def __init__(self, unseen: Callable[[], AbstractContextManager[Any]]) -> None:
        """`unseen`: makes a context in which nobody sees what is done about them."""
        self._calls: list[_Spared] = []
        self._places: dict[int, tuple[weakref.ref[Tensor], _Later]] = {}  # by identity
        self._unseen = unseen

    def __bool__(self) -> bool:
        return bool(self._calls)

    def _place_of(self, tensor: Tensor) -> _Later | None:
        ref, place = self._places.get(id(tensor), (None, None))
        return place if ref is not None and ref() is tensor else None

    def has(self, tensor: Tensor) -> bool:
        """Whether what a tensor contains was not computed."""
        return self._place_of(tensor) is not None

    def add(
        self, func: Any, args: Any, kwargs: Any, out: Sequence[Any], *, is_view: bool = False, writes: bool = False
    ) -> None:
        """A call did not run, and `out` has the memory of its results; or `out` may be a view of such memory.

        **Arguments:**

        - `writes`: whether the call is a change in place, of memory or a view of it.
        """
        places = [*map(self._place_of, tensors_in(all_of(args, kwargs)))]
        if is_view and not any(places):
            return
        later = iter(places)
        args, kwargs = tuple([replaced(a, later) for a in args]), {k: replaced(v, later) for k, v in kwargs.items()}
        refs = [weakref.ref(t) if isinstance(t, Tensor) else None for t in out]
        for number, (t, ref) in enumerate(zip(out, refs, strict=True)):
            if ref is not None:
                self._places[id(t)] = ref, _Later(len(self._calls), number)
        refs = [None] * len(refs) if is_view or writes else refs
        self._calls.append(_Spared(func, args, kwargs, refs, writes, Ambient.current()))

    def compute(self) -> None:
        """Somebody reads what they return."""
        calls = self._calls
        self.clear()
        found: list[Any] = []
        for call in calls:
            args, kwargs = _filled(call.args, found), _filled(call.kwargs, found)
            with torch.no_grad(), call.ambient.restored():
                out = call.func(*args, **kwargs)
            found.append(out if isinstance(out, (list, tuple)) else (out,))
        with internals.DisableTorchFunction(), self._unseen():
            for call, computed in zip(calls, found, strict=True):
                for t, ref in zip(computed, call.results, strict=True):
                    memory = ref() if ref is not None else None
                    if memory is None:
                        continue
                    is_leaf = memory.requires_grad and memory.is_leaf  # else an autograd.Function has returned it
                    with torch.set_grad_enabled(is_leaf):
                        if is_leaf:
                            memory.requires_grad_(False)
                            t = _OfRerun.apply(t, torch.empty(0, requires_grad=True))
                        memory.copy_(t)

    def finish(self) -> None:
        """The function has returned and its result is gone: what is left of their memory belongs to somebody."""
        if not any(call.is_alive for call in self._calls):
            self.clear()
        while self._calls and not (self._calls[-1].is_alive or self._calls[-1].writes):
            self._calls.pop()
        self.compute()

    def clear(self) -> None:
        """Nobody will read what they return."""
        self._calls, self._places = [], {}


def _filled(arg: Any, found: list[Any]) -> Any:
    if type(arg) is _Later:
        return found[arg.call][arg.number]
    if type(arg) in (list, tuple):
        return type(arg)([_filled(a, found) for a in arg])
    if type(arg) is dict:
        return {k: _filled(v, found) for k, v in arg.items()}
    return arg
