"""The primitive: give values that are already computed the derivative of a function that is run again.

`attach(fn, values, operands)` takes the values of `fn(*operands)`, computed on the current stack of transforms. It
drops their graph, and attaches a node that saves only the operands. Its backward is
`run(vjp(fn), operands + cotangents)`: the derivative of a remat'd function is a remat'd function. So one rule for each
kind of level gives derivatives of every order, under every nesting:

| level on top | rule |
|---|---|
| none | detach the values; a node saves the operands |
| grad | unwrap, attach one level down (`under_grad(fn)` above other kinds of levels), wrap; a node saves the operands |
| vmap | unwrap, attach `vmap(fn)` one level down, wrap |
| jvp | unwrap, attach one level down, wrap |
| functionalize | unwrap, attach one level down, wrap |
| (a value that carries a tangent) | attach `jvp(fn)` to values and tangents, make duals |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from remat import _torch_internals as internals
from remat._derived import (
    Batch,
    Derived,
    Link,
    at_front,
    functionalize,
    jvp,
    make_dual,
    pick,
    under_grad,
    vjp,
    vmap,
)
from remat._errors import HOOKED, CheckpointError, RematError
from remat._layers import (
    alias_of,
    requires_grad_at_any_level,
    requires_grad_below,
    unpack_dual,
    unwrap_dead,
    version_of,
)
from remat._memory import apart, sharing_memory
from remat._nested_mode import unseen
from remat._sealed import seal, unseal

Values = list[Tensor]
Pullback = Callable[[Sequence[Batch]], Derived]
"""The derivative of a node, for cotangents that are batched in this way."""


_HOOKED_TANGENTS = (
    "remat: {} is called under saved_tensors_hooks, with an argument or captured tensor that has a tangent, which the "
    "hooks would lose. Call it outside of the hooks."
)
_CHANGED = (
    "remat: {} that {} was given or captured has been modified by an inplace operation between its forward run and the "
    "backward, where it runs again. Write h = h + f(h) in place of h += f(h), or change a copy: "
    "x = x.clone()."
)
_ONE_NODE = (
    "remat: this is the backward of a function under remat. Its results share one node, which a backward pass frees. "
    "Do one for all of them, torch.autograd.backward([a, b]), or pass retain_graph=True to all but the last."
)


# Nodes.


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """The saved operands of a node. Raises an error if they were written to since the forward."""
    link: Link = ctx.link
    try:
        operands: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "a second time" in str(error):
            error.add_note(_ONE_NODE)
        if "modified by an inplace operation" not in str(error):
            raise
        raise CheckpointError(f"{_CHANGED.format('a tensor', link.fn.call.name)} {error}") from None
    operands = tuple(link.held.get(i, t) for i, t in enumerate(operands)) if link.held else operands
    with internals.DisableTorchFunction():
        for i, before in link.versions.items():
            if version_of(operands[i]) != before:
                which = f"a tensor of shape {list(operands[i].shape)}, {operands[i].dtype}"
                raise CheckpointError(_CHANGED.format(which, link.fn.call.name))
    return operands


def _unshared(values: Values, shared: set[int]) -> tuple[Tensor, ...]:
    """The values that a node returns. Those at `shared` share memory with each other or with an operand.

    These are returned as views, because torch raises if a view that a custom node returned is changed in place. Such a
    change would have to reach the derivatives of the others.
    """
    if not shared:
        return tuple(values)
    with torch.enable_grad():  # for the levels below: their nodes are attached already
        return tuple(alias_of(v) if i in shared else v for i, v in enumerate(values))


@internals.called_directly
class RematNode(internals.SingleLevelFunction):
    """The node that gives values the derivative of `link.fn`."""

    @staticmethod
    def forward(ctx: Any, link: Link, values: Values, shared: set[int], *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.level, ctx.hands_on = link, link.level, link.fn.call.hands_on
        ctx.tape = link.fn.call.tape
        ctx.save_for_backward(*(None if i in link.held else t for i, t in enumerate(operands)))
        ctx.set_materialize_grads(False)
        return _unshared(values, shared)

    @staticmethod
    @internals.left_alone_by_dynamo
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        needed = internals.wanted(ctx, ctx.needs_input_grad[3:], ctx.level)
        grads: list[Any] = [None] * len(needed)
        given = [i for i, c in enumerate(cotangents) if c is not None]
        wrt = [i for i, n in enumerate(needed) if n]
        if given and wrt:  # else a later node cut the graph, and this node may be freed
            operands = _saved(ctx)
            outs, records = [ctx.link.outs[i] for i in given], torch.is_grad_enabled()
            pullback = functools.partial(vjp, ctx.link, wrt, outs, records)
            found = _gradients(ctx.link, pullback, operands, [unseal(cotangents[i]) for i in given])
            grads = _replace(grads, wrt, found if ctx.level else apart(found, [operands[i].is_leaf for i in wrt]))
        if not internals.graph_is_retained():
            ctx.link = ctx.tape = None  # frees the closure with the saved operands
        return None, None, None, *grads


def _gradients(link: Link, pullback: Pullback, operands: Sequence[Tensor], cotangents: Values) -> list[Any]:
    """The gradients of a node's operands. This empties `cotangents`: NOTE [handed on]."""
    call = link.fn.call
    if call.tape is not None:
        with internals.DisableTorchFunction():  # no variable may hold the cotangents meanwhile
            differentiated = any(map(requires_grad_below, (*filter(call.tape.was_read, operands), *cotangents)))
        call.last_rerun = not (differentiated or internals.graph_is_retained())
    try:
        with unseen():
            return internals.with_subclasses(lambda: _differentiate(link, pullback, operands, cotangents, ()))
    finally:
        call.clean(operands)


def _differentiate(
    link: Link, pullback: Pullback, operands: Sequence[Tensor], cotangents: Values, batches: Sequence[Batch]
) -> list[Any]:
    """Run the derivative of a node at the level of the stack where it belongs.

    A `vmap` that began after the forward maps over cotangents only. So the rerun runs below it, and repeats the
    draws of the forward. In the backward pass of `torch.func.grad` itself, everything runs one level down: there
    nothing is recorded at the level that is about to end. See NOTE [who asked for this derivative].
    """
    if any(map(internals.is_legacy_batched, cotangents)):  # `is_grads_batched=True` has an older vmap of its own
        legacy = [internals.is_legacy_batched(c) for c in cotangents]
        with internals.without_legacy_vmap() as (unwrap, wrap):
            plain = [unwrap(c) if b else c for c, b in zip(cotangents, legacy, strict=True)]
            batch = plain[legacy.index(True)].shape[0], [0 if b else None for b in legacy]
            results = _differentiate(link, pullback, operands, plain, (batch, *batches))
        return [None if r is None else wrap(r) for r in results]
    top = internals.top_transform()
    if top is None:
        return _derivative(pullback(batches), operands, cotangents)
    level = top.level
    if top.kind is internals.TransformType.Vmap and level >= link.level:
        pairs = [internals.unwrap_batched(unwrap_dead(c), level) for c in cotangents]
        dims = [d for _, d in pairs]
        batched = dims.count(None) < len(dims)
        with top.lower():
            batches = ((top.batch_size(), dims), *batches) if batched else batches
            results = _differentiate(link, pullback, operands, [c for c, _ in pairs], batches)
        return [r if r is None or not batched else internals.wrap_batched(r, 0, level) for r in results]
    at_own_level = top.kind is internals.TransformType.Grad and internals.level_of(operands[0]) == level
    if at_own_level and internals.called_by_grad_transform(link.thread):
        with top.lower():
            inputs = [internals.unwrap_grad(t, level) for t in operands]
            cotangents[:] = [internals.unwrap_grad(c, level) for c in cotangents]
            results = _derivative(pullback(batches), inputs, cotangents)
        return [None if r is None else internals.wrap_grad(r, level) for r in results]
    if at_own_level and level in link.fn.call.hooked and torch.is_grad_enabled():
        raise RematError(HOOKED.format(link.fn.call.name, "torch.autograd.grad(create_graph=True) in a transform"))
    return _derivative(pullback(batches), operands, cotangents)


def _derivative(fn: Derived, operands: Sequence[Tensor], cotangents: Values) -> list[Any]:
    """Compute the derivative on the current stack."""
    inputs = [*map(unwrap_dead, (*operands, *cotangents))]
    if fn.call.hands_on and not (torch.is_grad_enabled() and _is_differentiated(inputs)):
        inputs[len(operands) :] = map(seal, inputs[len(operands) :])
        cotangents.clear()
    return run(fn, inputs)


def run(fn: Derived, operands: Values) -> list[Any]:
    """Call `fn(*operands)`, and replace the graph of the results by a remat'd derivative."""
    fn.since = internals.next_sequence_number()
    values = fn.run(*operands)
    if not torch.is_grad_enabled():
        return values
    present = [i for i, v in enumerate(values) if v is not None]
    return _replace(values, present, attach(pick(fn, present), [values[i] for i in present], operands))


# The rules.


def _is_differentiated(values: Values) -> bool:
    """Whether something may differentiate one of these values."""
    return any(map(requires_grad_at_any_level, values)) or (internals.forward_ad_active() and bool(values))


def attach(fn: Derived, values: Values, operands: Values) -> Values:
    """Replace the graph of `values` by the remat'd derivative of `fn` at `operands`.

    **Returns:** the new values; the same list if nothing differentiates them.
    """
    if not _is_differentiated(values):
        return values
    top = internals.top_transform()
    kind = None if top is None else top.kind
    if internals.forward_ad_active() and kind in _CARRIES_TANGENTS:
        return _attach_duals(_RULES[kind], top, fn, values, operands)
    return _RULES[kind](top, fn, values, operands)


def _connected(operands: Values, reached: Container[int], level: int = 0) -> Values:
    """The operands that a node saves. Those that its values do not depend on are cut off their graph at its level."""
    return [t if i in reached or not t.requires_grad else _cut(t, level) for i, t in enumerate(operands)]


def _cut(tensor: Tensor, level: int) -> Tensor:
    """Take a tensor off its graph at a level, but keep its tangent, which a value computed in no_grad may have used."""
    primal, tangent = unpack_dual(tensor)
    primal = internals.wrap_grad(internals.unwrap_grad(primal, level), level) if level else primal.detach()
    return primal if tangent is None else forward_ad.make_dual(primal, tangent, level=0)


def _attach_at_base(top: None, fn: Derived, values: Values, operands: Values) -> Values:
    outs = [i for i, v in enumerate(values) if v.requires_grad]
    if not outs or (internals.tracing() and not internals.compiling()):
        return values  # recorded ops can be differentiated later
    kept = [values[i] for i in outs]
    reached = fn.prove(kept, operands)
    link = Link(fn, outs, operands)
    saved = _connected(operands, reached)
    if not any(t.requires_grad for t in saved):
        return values  # they depend only on leaves that the function made
    if internals.saved_tensors_hooks() is not None and any(unpack_dual(t).tangent is not None for t in saved):
        raise RematError(_HOOKED_TANGENTS.format(fn.call.name))
    with internals.forward_ad_disabled():  # for the node, the tangents of its operands are constants
        if internals.saved_tensors_hooks() is not None:
            link.hold_leaves(saved)
        link.cut |= {i for i, (t, s) in enumerate(zip(operands, saved, strict=True)) if t is not s}
        nodes = RematNode.apply(link, [v.detach() for v in kept], sharing_memory(kept, operands), *saved)
    return _replace(values, outs, nodes)


def _attach_at_grad(top: Any, fn: Derived, values: Values, operands: Values) -> Values:
    level = top.level
    inner = below = [internals.unwrap_grad(v, level) for v in values]
    if _is_differentiated(below):
        with top.lower():
            leaves = [i for i, t in enumerate(operands) if t.requires_grad]
            next_top = internals.top_transform()
            is_last = leaves and next_top is not None and next_top.kind is not internals.TransformType.Grad
            lower = under_grad(fn, leaves) if is_last else fn
            inner = attach(lower, below, [internals.unwrap_grad(t, level) for t in operands])
    outs = [i for i, v in enumerate(values) if v.requires_grad and v is not below[i]]
    if inner is below and not outs:
        return values
    lifted = [internals.wrap_grad(v, level) for v in inner]
    lifted_operands = [internals.wrap_grad(t, level) for t in operands]
    reached = fn.prove([values[i] for i in outs], lifted_operands, drops=inner is not below) if outs else ()
    saved = _connected(lifted_operands, reached, level)
    if not any(t.requires_grad for t in saved):
        return values if inner is below else lifted
    link = Link(fn, outs, lifted_operands, level)
    shared = sharing_memory([values[i] for i in outs], operands)
    with internals.forward_ad_disabled():
        nodes = internals.apply_at_level(RematNode, link, [lifted[i] for i in outs], shared, *saved)
    return _replace(lifted, outs, nodes)


def _attach_at_vmap(top: Any, fn: Derived, values: Values, operands: Values) -> Values:
    level, size = top.level, top.batch_size()
    pairs = [internals.unwrap_batched(v, level) for v in values]
    batched = [d is not None for _, d in pairs]
    raw = [internals.unwrap_batched(t, level) for t in operands]
    with top.lower():
        mapped = vmap(fn, [d for _, d in raw], batched, size, top.randomness())
        below = [at_front(v, d, size) if d is not None else v for v, d in pairs]
        inner = attach(mapped, below, [t for t, _ in raw])
    if inner is below:
        return values
    return [internals.wrap_batched(v, 0, level) if b else v for v, b in zip(inner, batched, strict=True)]


def _attach_at_functionalize(top: Any, fn: Derived, values: Values, operands: Values) -> Values:
    level, reapply_views = top.level, top.reapplies_views()
    below = [internals.unwrap_functional(v, reapply_views=reapply_views) for v in values]
    raw = [internals.unwrap_functional(t, reapply_views=reapply_views) for t in operands]
    with top.lower():
        inner = attach(functionalize(fn, reapply_views), below, raw)
    return values if inner is below else [internals.wrap_functional(v, level) for v in inner]


def _attach_duals(rule: Callable[..., Values], top: Any, fn: Derived, values: Values, operands: Values) -> Values:
    """Apply a rule to values that may carry tangents at the top of the stack.

    A level of `jvp` has no backward pass: primals and tangents go down together, as the results of `jvp(fn)`. The
    tangents of operands go with them, because the node of a nested call may depend on these even if no value does. At
    other levels the backward of a primal result reads the operands with their tangents, as in plain autograd.
    """
    duals = [unpack_dual(v) for v in values]
    outs = [i for i, (_, tangent) in enumerate(duals) if tangent is not None]
    is_jvp = top is not None and top.kind is internals.TransformType.Jvp
    if not outs and (not is_jvp or internals.in_inference_mode()):  # torch can't unpack a plain tensor there
        return rule(top, fn, values, operands)
    pairs = [unpack_dual(t) for t in operands]
    moving = [i for i, (_, tangent) in enumerate(pairs) if tangent is not None]
    if not outs and not moving:
        return rule(top, fn, values, operands)
    primals, tangents = [p for p, _ in duals], [duals[i].tangent for i in outs]
    inputs = [p for p, _ in pairs] + [pairs[i].tangent for i in moving]
    pushforward = jvp(fn, moving, outs)
    count = len(values)
    if is_jvp:
        together = primals + tangents
        attached = rule(top, pushforward, together, inputs)
        if attached is together:
            return values
        new_primals, new_tangents = attached[:count], attached[count:]
    else:
        new_tangents = rule(top, pick(pushforward, range(count, count + len(outs))), tangents, inputs)
        new_primals = rule(top, fn, primals, operands)
        if new_primals is primals and new_tangents is tangents:
            return values
    made = [make_dual(new_primals[i], t) for i, t in zip(outs, new_tangents, strict=True)]
    return _replace(new_primals, outs, made)


def _replace(values: Values, outs: Sequence[int], new: Sequence[Tensor]) -> Values:
    result = list(values)
    for i, value in zip(outs, new, strict=True):
        result[i] = value
    return result


_CARRIES_TANGENTS = (None, internals.TransformType.Grad, internals.TransformType.Jvp)
_RULES: dict[Any, Callable[..., Values]] = {
    None: _attach_at_base,
    internals.TransformType.Grad: _attach_at_grad,
    internals.TransformType.Jvp: _attach_at_grad,  # nothing requires grad at such a level
    internals.TransformType.Vmap: _attach_at_vmap,
    internals.TransformType.Functionalize: _attach_at_functionalize,
}
