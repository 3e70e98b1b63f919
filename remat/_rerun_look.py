"""Watch a rerun and compare it with the forward: its signature, and which tensors it reads when.

A loop also runs its body on trial, before the real run.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._effects import Effects, tensors_in
from remat._errors import PURITY, CheckpointError, RematError, call_site, not_replaced
from remat._graph import is_made_since
from remat._labels import kept
from remat._layers import below_grad_levels, layers, nodes_of, requires_grad_at_any_level
from remat._look import MADE_INSIDE, Look, level_of, stack_depth
from remat._memory import memory_of
from remat._operands import Operands, Plan
from remat._places import is_in_reach
from remat._signature import ELSEWHERE, NO_LEVEL, Signature, name_of
from remat._tail import without_products

_CACHE_OR_STATE = (
    " If it is a cache that the forward has filled (use_cache=True), switch the cache off. If it is a state that the "
    "function replaces (self.h = ...), pass it as an argument and return the new one. If it is a table that is made on "
    "first use, call the function once before, in torch.no_grad()."
)
_STATE = (
    "If the function replaces a state (self.mean = ..., self.last = x), makes one on first use and changes it, or "
    "fills a cache, write in place (self.mean.copy_(...)), which happens once, to a tensor that is made outside, or "
    "pass it as an argument. If it draws from Python's random or NumPy, draw outside, and pass the numbers. If it sets "
    "up a table on first use, call it once before, in torch.no_grad(). "
)
_OTHER_INPUTS = (
    "Or it has gradients of other inputs there: under a transform, torch.autograd.grad gives none of what only plain "
    "autograd differentiates. Call torch.func.grad inside. "
)
_DIFFERS = (
    "remat: the rerun of {} differs from its forward run: at call {} it calls {}, at {}, where the forward {}. {}{}"
)
_OTHER_WRITE = (
    "remat: the rerun of {} changes a tensor in place by {}, at {}, with other tensors, numbers or flags than its "
    "forward. {}{}"
)
_NOT_WRITTEN = (
    "remat: {} has changed a tensor of shape {}, {} in place in its forward run, and does not in the rerun, which "
    "starts from the earlier value. The forward may have set a flag (self.ready = True) that the rerun finds set. Make "
    "the change before, in a call of its own in torch.no_grad()."
)
_KEPT = (
    "remat: {} has kept a tensor that it computed (self.aux_loss = ...), and a rerun has put its own there, whose "
    "graph ends at the inputs of the function. Return the tensor, or add it to what is differentiated first."
)
_UNKNOWN_READ = (
    "remat: the rerun of {} reads a tensor of shape {}, {} from outside at {}, which its forward did not read. {}{}"
)

_OTHER_HOOKS = (
    "remat: the rerun of {} puts hooks on other tensors than its forward, perhaps because x.requires_grad differs. "
    "Put the hook on the result, outside of the function."
)


def _ends_here(name: str, _: Tensor) -> None:
    """A hook on an input of a rerun, where the graph of what the function has kept ends."""
    raise RematError(_KEPT.format(name))


class TrialLook(Look):
    """Watches a trial run. Its hooks must not be called: the real run puts them on the same tensors."""

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        return internals.leaf_of_nothing(), *args[1:]


class RerunLook(Look):
    """Watches a rerun: puts operands in place of the tensors that the function finds, and compares the signature.

    **Attributes:**

    - `objects`: the function and its arguments: where to search for tensors that it has not made.
    - `skips_tail`: whether the product or nested call that begins the tail may be skipped.
    """

    is_rerun = True
    skips_tail = False
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
        self.sees_custom = forward.under_transform
        self._hooks: defaultdict[tuple[int, ...], int] = defaultdict(int)
        """How many hooks it has set at each position of the signature."""
        self._level = level
        self._suspects: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        """By identity, tensors that it may have made unseen, each with the error message if it has not."""

    def begin(self, outer: Look | None) -> None:
        self.outside = dict.fromkeys(map(id, self._given))
        for t in self._given:
            if id(t) in self._plan.labels:
                self.labels.note(t, self._plan.labels[id(t)])

    def read(self, tensor: Tensor, wrapped_inside: bool = False) -> Tensor:
        key = id(tensor)
        is_inner = level_of(tensor) > self.depth  # NOTE [inner wrappers]
        if not is_inner and self.labels.has(tensor):
            return tensor
        if key in self._plan.survivors:
            value = below_grad_levels(tensor)
            if internals.is_wrapper(value) and level_of(value) not in (level for level, *_ in internals.vmap_levels()):
                raise CheckpointError(self._unknown_read(tensor))
            self.labels.note_plain(value, *self._plan.survivors[key])
            return value
        if key not in self._plan.labels:
            return self._read_other(tensor, is_inner)
        operand = self.stand_in(tensor)
        self.labels.note(operand, self._plan.labels[key])
        return operand

    def _unknown_read(self, tensor: Tensor) -> str:
        hint = MADE_INSIDE if isinstance(tensor, torch.nn.Parameter) else _CACHE_OR_STATE
        shape = "nested" if tensor.is_nested else list(tensor.shape)
        return _UNKNOWN_READ.format(self.name, shape, tensor.dtype, call_site(), PURITY, hint)

    def _read_other(self, tensor: Tensor, is_inner: bool) -> Tensor:
        """Handle a read of a tensor that the forward was not seen to read."""
        if self._is_in_jvp():  # a tangent of an operand
            return tensor
        key = id(tensor)
        wraps = is_inner or internals.is_dead(tensor)
        # The sequence numbers of each thread are its own.
        tells_age = self._forward.thread == threading.get_ident()
        is_new = isinstance(tensor, internals.FakeTensor) or (tells_age and is_made_since(tensor, self.since))
        has_graph = tensor.grad_fn is not None if wraps else nodes_of(tensor)
        is_old = tells_age and has_graph and not is_new
        is_above = level_of(tensor) > stack_depth()  # only the forward ran there
        is_kept = kept.get(key) is tensor and not self.labels.has(tensor)  # else a nested call has returned it
        is_found = not (is_inner or is_new) and is_in_reach(tensor, self.objects)
        inside = tensor
        while internals.is_grad_wrapper(inside) and (is_above or not is_inner):
            inside = internals.unwrapped(inside)
            if id(inside) in self._plan.labels:  # a `to` that changes nothing has wrapped what the forward has read
                return self.read(inside)
        if is_above or is_old or is_kept or is_found:
            raise CheckpointError(self._unknown_read(tensor))
        if wraps:
            inner = internals.unwrapped(tensor)
            value = self.read(inner, wrapped_inside=True)
            if value is not inner and is_inner:
                raise not_replaced(self.name, name_of(self._reader), inner)
            return tensor if value is inner else value
        if not is_new:
            self._suspects[key] = weakref.ref(tensor), self._unknown_read(tensor)
        self.labels.note(tensor, None)
        return tensor

    def expects(self, tensor: Tensor) -> bool:
        """Whether the forward has read this tensor, or the rerun has made it or read it already."""
        return id(tensor) in self._plan.labels or self.labels.has(tensor)

    def has_made(self, tensor: Tensor) -> bool:
        return super().has_made(tensor) and id(tensor) not in self._suspects

    @property
    def _at_tail(self) -> bool:
        return self.skips_tail and self.position == self._forward.tail

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        at_product = self._at_tail and self._forward.tail_call is None
        if at_product and effects.multiplies and torch.is_grad_enabled() and not self._is_in_jvp():
            given = tensors_in((*args, *kwargs.values()))
            if any(map(requires_grad_at_any_level, given)):  # else it comes before the tail: `x + a @ b @ x`
                return without_products(func, args, kwargs)
        return self._do(func, args, kwargs)

    def call_to_skip(self) -> Any:
        is_last = self.signature.nests + 1 == self._forward.nests
        return self._forward.tail_call if self._at_tail and is_last else None

    def before_write(self, written: Tensor) -> None:
        """Note that the rerun wrote to an operand. It is a copy already."""
        if self._plan.to_write:
            self._plan.to_write.pop(memory_of(written), None)

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        if id(args[0]) in self.outside:  # the forward has put it on the tensor itself
            return (internals.leaf_of_nothing(), *args[1:])
        here = (self.position, *inner)
        levels = [level for position, level in self._forward.hooks if position == here]
        number = self._hooks[here]
        self._hooks[here] += 1
        level = levels[number] if number < len(levels) else ELSEWHERE  # set only `if x.requires_grad`, say
        if level not in (NO_LEVEL, self._level):
            if args[0].grad_fn is not None:
                self.unhooked.add(internals.sequence_number(args[0].grad_fn))
            return (internals.leaf_of_nothing(), *args[1:])  # the hook must not be called here
        return args

    def _note(self, func: Any, shape: int, given: int | None) -> None:
        if self._is_in_jvp():
            return
        position = self.position
        calls = self._forward.calls
        hint = ""
        if position == len(calls):
            then = "had ended"
        elif calls[position][0] != func:
            then = f"called {name_of(calls[position][0])}"
        elif calls[position][1] != shape:
            then = "got another shape or dtype, or was given another number or flag"
            hint = _OTHER_INPUTS if func is torch.autograd.grad else ""
        elif given is not None and calls[position][2] not in (given, None):
            then, hint = "was given other tensors", _STATE
        else:
            self.position = position + 1
            return
        where = self.name, position + 1, name_of(func), call_site(), then
        raise CheckpointError(_DIFFERS.format(*where, hint, PURITY))

    def _note_write(self, func: Any, call: int | None) -> None:
        if call is not None and self._forward.writes.isdisjoint((call, None)):
            raise CheckpointError(_OTHER_WRITE.format(self.name, name_of(func), call_site(), _STATE, PURITY))

    def check_what_is_left(self, operands: Iterable[Tensor], of_call: Operands) -> None:
        """Called when the rerun's graph is freed. A suspect that is still alive was not made by the rerun.

        If a differentiated tensor that the rerun made is still alive, nobody may differentiate it. `of_call`: the
        record of the operands, whose originals the user holds.
        """
        for ref, message in () if internals.tracing() else self._suspects.values():  # a tracer keeps tensors alive
            if ref() is not None:
                raise CheckpointError(message)
        if any(ref() is not None for ref in self.labels.results):
            known = (*operands, *of_call.still_there())
            reached = {id(layer) for t in known for layer in layers(t)}  # by the user, or by a pass around this one
            for leaf in self._given:
                if leaf.is_leaf and leaf.requires_grad and id(leaf) not in reached:
                    leaf.register_hook(functools.partial(_ends_here, self.name))

    def finish(self) -> None:
        """Check that the rerun made all calls and writes of the forward."""
        self.objects = ()
        self.labels.keep()
        for t in self._plan.to_write.values():
            raise CheckpointError(_NOT_WRITTEN.format(self.name, list(t.shape), t.dtype))
        for position, level in self._forward.hooks:
            missing = sum(p == position for p, _ in self._forward.hooks) - self._hooks[position]
            if level == self._level and not 0 <= missing <= self._forward.hooks_of_torch.count(position):
                raise RematError(_OTHER_HOOKS.format(self.name))
        calls = self._forward.calls
        if self.position < len(calls):
            raise CheckpointError(
                f"remat: the rerun of {self.name} ended after {self.position} of {len(calls)} torch calls; the "
                f"forward went on with {name_of(calls[self.position][0])}. {PURITY}"
            )
