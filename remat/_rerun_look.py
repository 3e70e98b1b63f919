"""Watch a rerun and compare it with the forward: its signature, and which tensors it reads when."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._effects import Effects, effects_of, tensors_in
from remat._errors import PURITY, CheckpointError, RematError, call_site
from remat._graph import is_made_since
from remat._look import MADE_INSIDE, Look, level_of, stack_depth
from remat._made import Occasion, kept
from remat._memory import memory_of
from remat._operands import HANDED_ON, Plan
from remat._places import is_in_reach
from remat._signature import ELSEWHERE, NO_LEVEL, Signature, function_of, name_of
from remat._tail import without_products

_TOO_EARLY = (
    "remat: the rerun of {} reads a tensor of shape {}, {} from outside at {}, earlier than its forward did: the "
    "function has replaced a tensor, or made one on first use and changed it, or tensors have changed places since. "
    "Write in place (self.mean.copy_(...)), which happens once, to a tensor that is made outside, or pass it as an "
    "argument. {}"
)
_REPLACED = (
    "remat: the rerun of {} goes on from a tensor of shape {}, {} that its forward has made and put in the place of "
    "another: a running average, a cache. Write in place (self.mean.copy_(...)), which happens once, or pass it as an "
    "argument and return the new one. {}"
)
_NOT_WRITTEN = (
    "remat: {} has changed a tensor of shape {}, {} in place in its forward run, and does not in the rerun, which "
    "starts from the earlier value. The forward may have set a flag (self.ready = True) that the rerun finds set. Make "
    "the change before, in a call of its own in torch.no_grad()."
)
_STRANGER = (
    "remat: the rerun of {} reads a tensor of shape {}, {} from outside at {}, which its forward did not read. {}{}"
)
_CACHE_OR_STATE = (
    " If it is a cache that the forward has filled (use_cache=True), switch the cache off. If it is a state that the "
    "function replaces (self.h = ...), pass it as an argument and return the new one. If it is a table that is made on "
    "first use, call the function once before, in torch.no_grad()."
)

_OTHER_HOOKS = (
    "remat: the rerun of {} puts hooks on other tensors than its forward, perhaps because x.requires_grad differs. "
    "Put the hook on the result, outside of the function."
)


class RerunLook(Look):
    """Watches a rerun: puts operands in place of the tensors that the function finds, and compares the signature.

    **Attributes:**

    - `objects`: the function and its arguments: where to search for tensors that it has not made.
    - `spares_tail`: whether the product or nested call that begins the tail may be skipped.
    """

    is_rerun = True
    spares_tail = False
    objects: Iterable[Any] = ()

    def __init__(
        self, name: str, forward: Signature, plan: Plan, operands: Sequence[Tensor], level: int | None
    ) -> None:
        """Watch a rerun of the function `name`.

        **Arguments:**

        - `forward`: the signature of the forward.
        - `plan`: the tensors that the rerun may read, and those that operands replace.
        - `operands`: the tensors that the rerun is given.
        - `level`: the level whose derivative the rerun is for.
        """
        super().__init__(name, operands, None)
        self._swaps = plan.swaps
        self._plan = plan
        self._forward = forward
        self._position = 0
        self._hooks: Counter[tuple[int, ...]] = Counter()
        """How many hooks it has set at each position of the signature."""
        self._level = level
        self._revived: dict[tuple[int, Occasion], tuple[int, str]] = {}
        """By identity of a survivor, and occasion of a read: how many reads there may be by then; else the error."""
        self._suspects: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """By identity, tensors that it may have made unseen, each with the error message if it has not."""

    def begin(self, outer: Look | None) -> None:
        self.outside = dict.fromkeys(map(id, self._given))
        self._known.update(key for key in self.outside if self._plan.reads[key] == 0)

    def _count(self) -> int:
        return self._position

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        key = id(tensor)
        is_inner = level_of(tensor) > self.depth  # NOTE [inner wrappers]
        if not is_inner and (key in self._known or self._reads_own(tensor)):
            return tensor
        if (occasions := self._plan.survivors.get(key)) is not None:
            how = self._position, self._reader
            if how not in occasions:
                raise self._too_early(tensor)
            error = _REPLACED.format(self.name, list(tensor.shape), tensor.dtype, PURITY)
            self._revived.setdefault((key, how), (self._own.times[how] + occasions[how], error))
            self._own.times[how] += 1
            value = internals.below_grad_levels(tensor)
            if internals.is_wrapper(value) and level_of(value) not in (level for level, *_ in internals.vmap_levels()):
                raise CheckpointError(self._stranger(tensor))
            self._known.add(id(value))
            return value
        position = self._plan.reads.get(key)
        if position is None:
            return self._read_other(tensor, is_inner)
        _, operand = self._swaps.get(key, (tensor, tensor))
        if self._position >= position:
            self._known.add(id(operand))
        elif not effects_of(function_of(self._reader)).is_metadata:  # the guard of a cache may ask only in reruns
            raise self._too_early(tensor)
        return operand

    def _too_early(self, tensor: Tensor) -> CheckpointError:
        return CheckpointError(_TOO_EARLY.format(self.name, list(tensor.shape), tensor.dtype, call_site(), PURITY))

    def _stranger(self, tensor: Tensor) -> str:
        hint = MADE_INSIDE if isinstance(tensor, torch.nn.Parameter) else _CACHE_OR_STATE
        return _STRANGER.format(self.name, list(tensor.shape), tensor.dtype, call_site(), PURITY, hint)

    def _read_other(self, tensor: Tensor, is_inner: bool) -> Tensor:
        """Handle a read of a tensor that the forward was not seen to read."""
        if self._is_in_jvp():  # a tangent of an operand
            return tensor
        key = id(tensor)
        wraps = is_inner or internals.is_dead(tensor)
        # The sequence numbers of each thread are its own.
        tells_age = self._forward.thread == threading.get_ident()
        is_new = isinstance(tensor, internals.FakeTensor) or (tells_age and is_made_since(tensor, self.since))
        has_graph = tensor.grad_fn is not None if wraps else internals.nodes_of(tensor)
        is_old = tells_age and has_graph and not is_new
        is_above = level_of(tensor) > stack_depth()  # only the forward ran there
        is_kept = kept.get(key) is tensor and not self._own.has(tensor)  # else a nested call has returned it
        is_found = not (is_inner or is_new) and is_in_reach(tensor, self.objects)
        if is_above or is_old or is_kept or is_found:
            raise CheckpointError(self._stranger(tensor))
        if wraps:
            inner = internals.unwrapped(tensor)
            value = self.read(inner, handed_on=True)
            if value is not inner and is_inner:
                reader = name_of(self._reader)
                raise RematError(HANDED_ON.format(self.name, reader, list(inner.shape), inner.dtype))
            return tensor if value is inner else value
        if not is_new:
            self._suspects[key] = weakref.ref(tensor), self._stranger(tensor)
        self._known.add(key)
        return tensor

    def expects(self, tensor: Tensor) -> bool:
        """Whether the forward has read this tensor, or the rerun has made it or read it already."""
        return id(tensor) in self._plan.reads or id(tensor) in self._known

    def has_survived(self, tensor: Tensor) -> bool:
        return id(tensor) in self._plan.survivors

    def has_made(self, tensor: Tensor) -> bool:
        return super().has_made(tensor) and id(tensor) not in self._suspects

    @property
    def _at_tail(self) -> bool:
        return self.spares_tail and self._position == self._forward.tail

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        at_product = self._at_tail and self._forward.tail_call is None
        if at_product and effects.multiplies and torch.is_grad_enabled() and not self._is_in_jvp():
            given = tensors_in((*args, *kwargs.values()))
            if any(map(internals.requires_grad_at_any_level, given)):  # else it comes before the tail: `x + a @ b @ x`
                return without_products(func, args, kwargs)
        return func(*args, **kwargs)

    def spared_call(self) -> Any:
        is_last = self.signature.nests + 1 == self._forward.nests
        return self._forward.tail_call if self._at_tail and is_last else None

    def before_write(self, written: Tensor) -> None:
        """Note that the rerun wrote to an operand. It is a copy already."""
        if self._plan.to_write:
            self._plan.to_write.pop(memory_of(written), None)

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        if id(args[0]) in self.outside:  # the forward has put it on the tensor itself
            return (internals.leaf_of_nothing(), *args[1:])
        here = (self._position, *inner)
        levels = [level for position, level in self._forward.hooks if position == here]
        number = self._hooks[here]
        self._hooks[here] += 1
        level = levels[number] if number < len(levels) else ELSEWHERE  # set only `if x.requires_grad`, say
        if level not in (NO_LEVEL, self._level):
            return (internals.leaf_of_nothing(), *args[1:])  # the hook must not be called here
        return args

    def _note(self, func: Any, shape: int) -> None:
        if self._is_in_jvp():
            return
        position = self._position
        calls = self._forward.calls
        if position < len(calls) and calls[position] == (func, shape):
            self._position = position + 1
            return
        if position == len(calls):
            then = "had ended"
        elif calls[position][0] is func:
            then = "got another shape or dtype, or was given another number or flag"
        else:
            then = f"called {name_of(calls[position][0])}"
        raise CheckpointError(
            f"remat: the rerun of {self.name} differs from its forward run: at call {position + 1} it calls "
            f"{name_of(func)}, at {call_site()}, where the forward {then}. {PURITY}"
        )

    def check_suspects(self) -> None:
        """Called when the rerun's graph is freed. A tensor that is still alive was not made by the rerun."""
        for ref, message in () if internals.tracing() else self._suspects.values():  # a tracer keeps tensors alive
            if ref() is not None:
                raise CheckpointError(message)

    def finish(self) -> None:
        """Check that the rerun made all calls and writes of the forward, and did not read survivors more often."""
        self.objects = ()
        self._own.keep()
        for t in self._plan.to_write.values():
            raise CheckpointError(_NOT_WRITTEN.format(self.name, list(t.shape), t.dtype))
        for (_, how), (times, error) in self._revived.items():
            if self._own.times[how] > times:
                raise CheckpointError(error)
        for position, level in self._forward.hooks:
            missing = sum(p == position for p, _ in self._forward.hooks) - self._hooks[position]
            if level == self._level and not 0 <= missing <= self._forward.hooks_of_torch.count(position):
                raise RematError(_OTHER_HOOKS.format(self.name))
        calls = self._forward.calls
        if self._position < len(calls):
            raise CheckpointError(
                f"remat: the rerun of {self.name} ended after {self._position} of {len(calls)} torch calls; the "
                f"forward went on with {name_of(calls[self._position][0])}. {PURITY}"
            )
