"""The reentrant variant: one node for the whole function. Its backward differentiates a rerun."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._derived import is_bare_leaf
from remat._errors import RematError, warn
from remat._graph import UnknownInput, prove
from remat._memory import apart
from remat._places import item, still_filled
from remat.compat._call import Call

_CHANGES = (
    "checkpoint: with use_reentrant=True, {} changes a tensor of shape {}, {} in place that is differentiated. Its "
    "rerun would start from the changed value. Change a copy instead: x = x.clone(), or use use_reentrant=False."
)
_OUT_OF_SIGHT = (
    "checkpoint: with use_reentrant=True, in {}, {}. It is from outside, and no torch function was seen to read it. "
    "Pass it as an argument, use use_reentrant=False, or call .backward() without inputs and create_graph."
)
_GATHERED = (
    "checkpoint: with use_reentrant=True, parameters that fully_shard gathers inside of the function get gradients "
    "from .backward() without inputs alone; got a parameter of shape {}. Use use_reentrant=False."
)


class CheckpointFunction(torch.autograd.Function):
    """The node of the reentrant variant; `checkpoint(fn, *args, use_reentrant=True)` applies it.

    Its inputs are the tensors among the arguments and the differentiated ones that the function was seen to read from
    outside. So it works under `torch.autograd.grad` and `.backward(inputs=...)` too.

    **Arguments:** of `apply`:

    - `run_function`: the function.
    - `preserve_rng_state`: whether the rerun draws the same random numbers.
    - `args`: its arguments.

    **Returns:** the function's result.

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
        differentiates = any(x.requires_grad for x in args if isinstance(x, Tensor))
        if not differentiates:
            warn("None of the inputs have requires_grad=True. Gradients will be None")
        if not differentiates or not torch.is_grad_enabled():
            with torch.no_grad():
                return run_function(*args)
        with internals.DisableTorchFunction():
            call = Call(run_function, args, {}, preserve_rng_state)
            look = call.look()
        with torch.no_grad(), look:
            out = run_function(*args)
        with internals.DisableTorchFunction():
            written = [weakref.ref(look.outside[key].value) for key, t in look.copies.items() if t.requires_grad]
            # The rerun starts from copies of those that the function wrote to.
            given = call.operands[: call.arguments]
            arguments = [None if id(t) in look.copies else t for t in given]
            values = [
                v.detach() if isinstance(v, Tensor) and not look.has_made(v) else v  # the function only passes it on
                for v in (out if isinstance(out, tuple) else (out,))
            ]
            call.finish(out, packs=False)  # the node holds them: to unpack one would run the outer function now
            if kept := [t for ref in written if (t := ref()) is not None]:  # else the function has made it, unseen
                raise RematError(_CHANGES.format(call.name, list(kept[0].shape), kept[0].dtype))
            captured = {r.key: r.value() for r in call.reads if r.requires_grad and not r.is_written}
            rest = [captured.pop(key) for key in look.gathered if key in captured]
            results = super().apply(call, captured, rest, values, *arguments, *captured.values())
            if look.outer is not None:
                look.outer.add_call(call.name, results)
        return _rebuilt(type(out), results) if isinstance(out, tuple) else results[0]

    @staticmethod
    def forward(ctx: Any, call: Call, captured: Any, gathered: Any, values: Any, *inputs: Any) -> Any:
        """Attach the node to the values of the forward run, which is over."""
        ctx.call, ctx.captured, ctx.gathered = call, captured, gathered
        ctx.save_for_backward(*(None if t is None else internals.savable(t) for t in inputs[: call.arguments]))
        results = tuple(values)
        values.clear()
        return results

    @staticmethod
    @internals.left_alone_by_dynamo
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Run the function again, and differentiate the rerun."""
        with internals.base_level() if internals.transforms_active() else internals.NOTHING:
            found = internals.with_subclasses(lambda: _gradients(ctx, cotangents))
        if not internals.graph_is_retained():  # freed as saved tensors are: it may lead to this node
            ctx.call, ctx.captured, ctx.gathered = None, {}, []
        return (None, None, None, None, *found)


def _rebuilt(kind: Any, items: Sequence[Any]) -> Any:
    """A tuple, or one with names."""
    if hasattr(kind, "_fields"):
        return kind._make(items)
    return kind(items) if kind.__module__ == "torch.return_types" else tuple(items)


def _stand_in(operand: Tensor, create_graph: bool) -> Tensor:
    """The tensor that the rerun reads in place of an operand, whose hooks it must not call."""
    if create_graph and operand.requires_grad:
        return operand.view_as(operand)
    return operand.detach().requires_grad_(operand.requires_grad)


@contextlib.contextmanager
def _without_hooks(leaves: Iterable[Any]) -> Iterator[None]:
    """Within it, leaves have no hooks: these are called when the gradient that is found is accumulated."""
    hooks = [(t, t._backward_hooks) for t in leaves if t is not None and t._backward_hooks]
    for t, _ in hooks:
        t._backward_hooks = None
    try:
        yield
    finally:
        for t, held in hooks:
            t._backward_hooks = held


def _taken(leaf: Tensor) -> Tensor | None:
    """The gradient of a stand-in. A module may still hold what a hook has computed from this, as pruning does."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _gradients(ctx: Any, cotangents: Any) -> list[Tensor | None]:
    """The gradients of the arguments and of captured tensors.

    NOTE [gathered parameters]: hooks inside the function gather parameters. In the backward pass of the rerun, they
    reduce the `.grad` of these and free them. So the parameters are not operands, whose gradients come later: the
    rerun reads the parameters themselves, and its backward pass accumulates into them.
    """
    call, gathered, create_graph = ctx.call, ctx.gathered, torch.is_grad_enabled()
    accumulates = not create_graph and internals.accumulates_into_all_leaves()
    if gathered:
        if not accumulates:
            raise RematError(_GATHERED.format(list(gathered[0].shape)))
        internals.begin_forward_of_fully_shard()
    saved = ctx.saved_tensors
    arguments = [None if t is None else _stand_in(t, create_graph) for t in saved]
    originals = [*saved, *ctx.captured.values()]
    keeps_leaves = not (create_graph or accumulates)  # as their own stand-ins: other threads may use the module
    stand_ins = {
        key: t if keeps_leaves and is_bare_leaf(t) else _stand_in(t, create_graph) for key, t in ctx.captured.items()
    }
    own = [*arguments, *stand_ins.values()]
    looks = not accumulates or bool(stand_ins)
    since = internals.next_sequence_number()
    out, look = call.rerun(arguments, stand_ins=stand_ins, looks=looks, finds_leaves=accumulates)
    results = zip(out if isinstance(out, tuple) else (out,), cotangents, strict=False)
    pairs = [(o, c) for o, c in results if isinstance(o, Tensor) and o.requires_grad]
    if not pairs:
        raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
    outputs, given = [o for o, _ in pairs], [c for _, c in pairs]
    targets = [t for t in own if t is not None and t.requires_grad]
    unknown: list[UnknownInput] = []
    is_own = look.has_made if look and not accumulates else lambda _: False
    reached = prove(outputs, targets, since, is_own, unknown.append).reached
    # Those that an autograd.Function has got: no mode sees that below all transforms.
    unseen = {i: t for i, t in enumerate(originals) if t is not None and any(s.stands_for(t) for s in unknown)}
    others = {s.edge: s for s in unknown if not any(s.stands_for(t) for t in unseen.values())}
    if (unknown if create_graph else others) and not accumulates:  # with create_graph, stand-ins lead to leaves
        raise RematError(_OUT_OF_SIGHT.format(call.name, next(iter(others.values()), unknown[0])))
    ids = {id(targets[i]) for i in reached}
    fill = [
        (place, t)
        for key, t in stand_ins.items()
        if id(t) in ids
        for place in call.places.get(key, ())
        if not accumulates or id(item(*place)) != key  # else what is found there accumulates
    ]
    with still_filled(fill):
        if accumulates and (gathered or not unseen):
            torch.autograd.backward(outputs, given)
            return [None if t is None else _taken(t) for t in own]
        wrt = [*targets, *unseen.values(), *(s.target for s in others.values())]
        with _without_hooks(s.leaf for s in unknown):
            found = iter(torch.autograd.grad(outputs, wrt, given, allow_unused=True, create_graph=create_graph))
    gradients = [next(found) if t is not None and t.requires_grad else None for t in own]
    for i in unseen:
        parts = [g for g in (gradients[i], next(found)) if g is not None]
        gradients[i] = sum(parts[1:], parts[0]) if parts else None
    for other, gradient in zip(others.values(), found, strict=True):
        if gradient is not None:
            torch.autograd.backward(other.target, gradient)
    return apart(gradients, [t is not None and t.is_leaf for t in originals])
