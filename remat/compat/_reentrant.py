"""The reentrant variant: one node for the whole function, whose backward runs it again and differentiates that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._derived import Derived
from remat._errors import RematError
from remat._leaks import foreign_edges
from remat._native import at_the_base
from remat._primitive import Link, gradients
from remat._unwatched import UnwatchedCall, unwatched
from remat.compat._call import Call, UsesTransforms, versions_of
from remat.compat._devices import warn_without_grad
from remat.compat._rerun import CHANGES, OUT_OF_MEMORY, Rerun, rebuilt

_NOT_NECESSARY = "none of output has requires_grad=True, this checkpoint() is not necessary"
_GATHERED = (
    "checkpoint: with use_reentrant=True, parameters that are gathered inside of the function, as fully_shard does, "
    "get gradients from .backward() without inputs alone; got another backward pass and a parameter of shape {}. Use "
    "use_reentrant=False."
)


class CheckpointFunction(torch.autograd.Function):
    """The node of the reentrant variant; `checkpoint(fn, *args, use_reentrant=True)` applies it.

    Its inputs are the tensors among the arguments and the differentiated ones that the function was seen to read from
    outside. So it works under `torch.autograd.grad` and `.backward(inputs=...)` too.

    **Arguments:** of `apply`:

    - `run_function`: the function.
    - `preserve_rng_state`: whether the rerun draws the same random numbers.
    - `args`: what the function is called with.

    **Returns:** what the function returns.

    **Source:** `torch.utils.checkpoint.CheckpointFunction`.

    Examples:
        >>> import torch
        >>> from remat.compat import CheckpointFunction
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = CheckpointFunction.apply(torch.sin, True, x)
    """

    @classmethod
    def apply(cls, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function on the arguments, which are positional."""
        return cls.run(run_function, preserve_rng_state, args)

    @classmethod
    def run(cls, function: Callable[..., Any], preserve_rng_state: bool, args: tuple[Any, ...]) -> Any:
        """The same."""
        if not warn_without_grad(args) or not torch.is_grad_enabled():
            with torch.no_grad():
                return function(*args)
        known = unwatched(function, getattr(function, "__qualname__", type(function).__qualname__), args, {})
        if isinstance(known, UnwatchedCall):
            operands = known.operands
            out, new = known.record_nothing(function, args, preserve_rng_state=preserve_rng_state)
            return new.replaced(super().apply(known, [], 0, new.tensors, *operands)) if new.tensors else out
        call = Call(function, args, {}, preserve_rng_state)
        given = call.tensors
        versions = versions_of(given)
        forward = call.watch()
        with torch.no_grad(), forward:
            out = function(*args)
        if forward.saw_wrappers:
            call.undo(forward)
            raise UsesTransforms
        identities = set(map(id, given))
        with internals.DisableTorchFunction():
            whole = _taken_whole(call, identities)
        call.finish(forward)
        read = [
            t
            for outside in call.record.outside
            if (t := outside.ref()) is not None and t.requires_grad and id(t) not in identities
        ]
        gathered = [t for t in read if id(t) in whole]
        captured = [t for t in read if id(t) not in whole]
        written = call.record.written
        for t, before, now in zip(given, versions, versions_of(given), strict=True):
            is_changed, is_known = now != before, id(t) in written
            if (is_changed or is_known) if t.requires_grad else (is_changed and not is_known):
                raise RematError(CHANGES.format(list(t.shape), t.dtype))
        for t in gathered:
            if id(t) in written:
                raise RematError(CHANGES.format(list(t.shape), t.dtype))
        returned = out if isinstance(out, tuple) else (out,)
        positions = [forward.made[id(v)][1] for v in returned if isinstance(v, Tensor) and forward.is_made(v)]
        call.record.needed = 0 if forward.saw_compiled else max(forward.last_change, *positions, 0)
        with internals.DisableTorchFunction():
            values = [
                v.detach() if isinstance(v, Tensor) and not forward.is_made(v) else v  # it belongs to somebody else
                for v in returned
            ]
        results = super().apply(call, gathered, len(given), values, *call.unwritten(given), *captured)
        return rebuilt(type(out), results) if isinstance(out, tuple) else results[0]

    @staticmethod
    def forward(
        ctx: Any,
        call: Call | UnwatchedCall,
        gathered: list[Tensor],
        count: int,
        values: list[Any],
        *operands: Tensor | None,
    ) -> Any:
        """Attach the node to the values of the forward run, which is over."""
        ctx.call, ctx.gathered, ctx.count = call, gathered, count
        # What is unpacked may be another object.
        ctx.originals = [None if t is None else weakref.ref(t) for t in operands]
        ctx.save_for_backward(*(None if t is None else internals.savable(t) for t in operands))
        results = tuple(values)
        values.clear()
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Run the function again, and differentiate that."""
        if isinstance(ctx.call, UnwatchedCall):
            link = Link(Derived(ctx.call, ctx.call), range(len(cotangents)))
            found = gradients(link, ctx.saved_tensors, ctx.needs_input_grad[4:], cotangents)
            if all(g is None for g in found):
                raise RuntimeError(_NOT_NECESSARY)
            return (None, None, None, None, *found)
        is_last = not internals.graph_is_retained()
        with at_the_base():
            originals = [None if ref is None else ref() for ref in ctx.originals]
            given = ctx.call, ctx.saved_tensors, originals, ctx.gathered, ctx.count, cotangents
            found = internals.with_subclasses(lambda: _gradients_when_watched(*given))
        if is_last:  # as for what is saved: the call may hold what leads to this node
            ctx.call, ctx.gathered = None, []
        return (None, None, None, None, *found)


def _taken_whole(call: Call, given: set[int]) -> set[int]:
    """By identity, parameters that hooks gather inside of the function: NOTE [gathered parameters].

    FSDP2's are known. ZeRO-3 gives a parameter its memory with `p.data = ...`, and takes it away after each use.
    """
    found = internals.gathered_by_fully_shard()
    written = call.record.written
    for key, (ref, before) in [*written.items()]:
        t = ref()
        if t is None or t.numel() or not t.is_leaf or not t.requires_grad or key in given:
            continue
        if before.numel():
            raise RematError(CHANGES.format(list(before.shape), before.dtype))
        found.add(key)
        del written[key]
    return found


def _gradients_when_watched(
    call: Call,
    operands: Sequence[Tensor | None],
    originals: Sequence[Tensor | None],
    gathered: Sequence[Tensor],
    count: int,
    cotangents: Sequence[Any],
) -> list[Tensor | None]:
    """The gradients of the operands: the tensors that the function was given, `count` of them, and those it read.

    None are those that the function changes, which are not differentiated.

    NOTE [gathered parameters]: hooks inside of the function gather whole parameters for it and, in the backward pass of
    the rerun, reduce their `.grad` and free them. So they are no operands, whose gradients come later: the rerun reads
    them themselves, and its backward pass accumulates into them.
    """
    create_graph = torch.is_grad_enabled()
    accumulates = not create_graph and internals.accumulates_into_all_leaves()
    if gathered:
        if not accumulates:
            raise RematError(_GATHERED.format(list(gathered[0].shape)))
        internals.begin_forward_of_fully_shard()
    stand_ins: list[Any] = [None if t is None else _stand_in(t, create_graph) for t in operands]
    # What the function reads and has written to can't begin again: perhaps the first call alone does that.
    has_begun = any(id(t) in call.record.written for t in originals[count:])
    memory = {internals.memory_of(t) for t in operands[count:] if t is not None}
    for trusting in (False,) if has_begun else (True, False):
        given = call.given(stand_ins)
        rerun = Rerun(call.record, given, early_stop=False, trusting=trusting)
        for original, stand_in in zip(originals[count:], stand_ins[count:], strict=True):
            if original is not None:
                rerun.swap(original, stand_in)
        rerun.unwritable, rerun.gathered = memory, gathered
        since = internals.next_sequence_number()
        try:
            out = call.rerun(rerun, given)
        except Exception as error:
            if isinstance(error, OUT_OF_MEMORY) or not rerun.was_misled:
                raise
        else:
            if rerun.was_misled or not trusting:
                rerun.check_replaced()
            if not rerun.was_misled:
                break
        out = None
    pairs = [
        (o, c)
        for o, c in zip(out if isinstance(out, (tuple, list)) else (out,), cotangents, strict=False)
        if isinstance(o, Tensor) and o.requires_grad
    ]
    if not pairs:
        raise RuntimeError(_NOT_NECESSARY)
    outputs, given = [o for o, _ in pairs], [c for _, c in pairs]
    # What the forward has seen and did not differentiate may require grad by now: that is not this derivative's.
    known = {id(o.tensor) for o in call.record.outside if o.tensor is not None}
    constant = known.difference(map(id, originals), map(id, gathered))
    own = [t for t in stand_ins if t is not None]
    reached, leaves, is_closed = _reached(outputs, own, originals, constant, since, create_graph, accumulates)
    targets = {i: t for i, t in enumerate(stand_ins) if t is not None and t.requires_grad}
    if not accumulates:
        inputs = [*targets.values(), *reached.values()]
        found = torch.autograd.grad(outputs, inputs, given, allow_unused=True, create_graph=create_graph)
        return _sums(len(operands), zip((*targets, *reached), found, strict=True))
    others: Sequence[Tensor | None] = ()
    if reached:
        others = torch.autograd.grad(outputs, [*reached.values()], given, allow_unused=True, retain_graph=True)
    inputs = [*targets.values(), *leaves]
    if is_closed:
        torch.autograd.backward(outputs, given)  # as torch: its own reentrant checkpoint inside refuses `inputs`
    elif inputs:
        torch.autograd.backward(outputs, given, inputs=inputs)
    own_grads = ((i, t.grad) for i, t in targets.items())
    return _sums(len(operands), (*own_grads, *zip(reached, others, strict=True)))


def _sums(count: int, found: Iterable[tuple[int, Tensor | None]]) -> list[Tensor | None]:
    """The sums of gradients by position."""
    sums: list[Tensor | None] = [None] * count
    for i, gradient in found:
        before = sums[i]
        sums[i] = gradient if before is None else before if gradient is None else before + gradient
    return sums


def _stand_in(operand: Tensor, create_graph: bool) -> Tensor:
    """What the rerun reads in the place of an operand: the hooks of that are not for the rerun to call."""
    if create_graph and operand.requires_grad:
        return operand.view_as(operand)
    return operand.detach().requires_grad_(operand.requires_grad)


def _reached(
    outputs: Sequence[Tensor],
    stand_ins: Sequence[Tensor],
    originals: Sequence[Tensor | None],
    constant: set[int],
    since: int,
    create_graph: bool,
    accumulates: bool,
) -> tuple[dict[int, Tensor], list[Tensor], bool]:
    """What the rerun's graph reaches itself: out of sight, by an `autograd.Function` or an extension.

    **Arguments:**

    - `constant`: by identity, leaves that do not count.
    - `since`: the sequence number of the first node of the rerun.
    - `accumulates`: whether the backward pass is one that accumulates into all leaves.

    **Returns:** operands, and leaves that are none. `.backward()` accumulates into these straight away. And whether
    these leaves are all: the graph leads to nothing else.
    """
    reached: dict[int, Tensor] = {}
    leaves: list[Tensor] = []
    is_closed = True
    for node, number in foreign_edges(outputs, stand_ins, since):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in constant:
            is_closed = False
            continue
        position = next(
            (i for i, t in enumerate(originals) if t is not None and internals.is_end_of(node, number, t)), None
        )
        original = None if position is None else originals[position]
        if variable is not None and accumulates:
            leaves.append(variable)
        # Its hooks would be called twice; and with create_graph, the stand-ins lead to the originals too.
        elif position is not None and original is not None and not original._backward_hooks and not create_graph:
            reached[position] = original
        else:
            raise RematError(
                f"checkpoint: with use_reentrant=True, the function takes {_what(variable, node)} from outside where "
                "no torch function was seen to read it: by an autograd.Function, an extension, a ScriptModule or code "
                "that torch.compile has made, or it did not require grad then. Pass it as an argument, use "
                "use_reentrant=False, or call .backward() without inputs."
            )
    return reached, leaves, is_closed and not reached


def _what(variable: Tensor | None, node: Any) -> str:
    return f"a result of {node.name()}" if variable is None else f"a tensor of shape {list(variable.shape)}"
