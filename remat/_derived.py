"""Functions derived from a call by transforms.

Each takes and returns flat lists of tensors, and runs on whatever stack it is called on.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from remat import _torch_internals as internals
from remat._call import Call
from remat._errors import HOOKED, RematError
from remat._graph import Proof, UnknownInput, prove
from remat._layers import alias_of, innermost, layers_and_tangents, unpack_dual, version_of
from remat._places import still_filled
from remat._sealed import hand_on, seal, unseal

_requires_grad = operator.attrgetter("requires_grad")
Batch = tuple[int, Sequence[int | None]]  # the size, and the batch dimension of each cotangent

_UNSEEN = (
    "remat: in the rerun of {}, {}. The function takes it from outside, and no torch function is seen to read it: an "
    "autograd.Function, an extension, a ScriptModule or compiled code gets it directly, or a hook or the backward of "
    "an autograd.Function reads it. Pass it as an argument, or use remat.checkpoint."
)
_ACCUMULATES = (
    "remat: {} calls .backward(), or an autograd.Function in it does, and that adds to the .grad of a tensor of shape "
    "{}, {}. In a rerun this would be lost, because that reads another tensor in its place. Call torch.autograd.grad, "
    "and return the gradients or use them."
)
_ONCE = (
    "remat: the second derivative of {} was asked for, but a backward in it can't be differentiated: that of an "
    "autograd.Function marked with @once_differentiable (write it with differentiable ops, and remove the mark), or of "
    "an op that says the same without remat."
)


@dataclass(eq=False)
class Derived:
    """A function derived from a call by transforms.

    **Attributes:**

    - `call`: the call.
    - `run`: the function, from tensors to a list of tensors.
    - `is_vjp`: whether it computes a gradient.
    - `is_whole`: whether it computes all results of the call, and no derivative of them.
    - `since`: all autograd nodes with higher sequence numbers were made in its run, or later.
    - `cut`: positions of operands that it is given detached, as `Link.cut`: it does not depend on them.
    """

    call: Call
    run: Callable[..., list[Any]]
    since: int
    is_vjp: bool = False
    is_whole: bool = True
    cut: AbstractSet[int] = frozenset()

    def then(self, run: Callable[..., list[Any]], is_vjp: bool = False, is_whole: bool = False) -> Derived:
        """Derive a function from this one. `run` computes it."""
        return Derived(self.call, run, self.since, self.is_vjp or is_vjp, self.is_whole and is_whole, self.cut)

    def prove(self, values: Sequence[Tensor], operands: Sequence[Tensor], drops: bool = False) -> Container[int]:
        """Check that values depend on operands only. Raises `UnknownInput`, or `RematError` if this is a vjp.

        `drops`: whether they lose their graph even if they depend on no operand.

        **Returns:** the positions of the operands that they may depend on.
        """
        if not self.is_vjp:
            return self.call.prove(values, operands, self.since)
        proof = self.prove_rerun(values, operands, self.since, drops)
        return proof.reached | proof.ambiguous

    def prove_rerun(self, values: Sequence[Tensor], inputs: Sequence[Tensor], since: int, drops: bool = True) -> Proof:
        """Check that the values of a rerun depend on its inputs only. `drops`: as in `prove`."""
        unknown: list[UnknownInput] = []
        proof = prove(values, inputs, since, self.call.made_by_rerun, unknown.append)
        if unknown and (drops or proof.reached or proof.ambiguous):
            raise RematError(_UNSEEN.format(self.call.name, unknown[0]))
        return proof


class Link:
    """The data of a node that gives values the derivative of `fn`, besides its saved operands."""

    def __init__(self, fn: Derived, outs: Sequence[int], operands: Sequence[Tensor], level: int = 0) -> None:
        """`level`: the level of the node; 0 below all transforms."""
        self.fn = fn
        self.outs = outs
        self.level = level
        self.count = len(operands)
        self.leaves = fn.call.leaves.union([i for i, t in enumerate(operands) if t.requires_grad])
        """Positions of differentiated operands. Each rerun differentiates them, for the forward's signature."""
        self.cut: AbstractSet[int] = fn.cut
        """Positions of differentiated operands that the node saves detached: its values do not depend on them."""
        self.thread = threading.get_ident()
        self.versions = dict(enumerate(map(version_of, operands))) if level else {}
        """By position, how often operands had been written to. At level 0, autograd checks what a node saves."""
        self.held: Mapping[int, Tensor] = {}
        """By position, the operands that the node does not save."""

    def hold_leaves(self, operands: Sequence[Tensor]) -> None:
        """Keep captured leaves from the user's hooks on saved tensors: the graph holds them, and maybe a module."""
        given = self.fn.call.operands.given
        self.held = {i: t for i, t in enumerate(operands) if i >= given and t.is_leaf and t.requires_grad}
        self.versions = {i: version_of(t) for i, t in self.held.items()}

    def original(self, i: int) -> Tensor | None:
        """The tensor that the forward found in the place of an operand, if it is still there."""
        originals = self.fn.call.operands.originals
        return originals[i].ref() if i < len(originals) else None


def vjp(link: Link, wrt: Sequence[int], outs: Sequence[int], records: bool, batches: Sequence[Batch]) -> Derived:
    """(operands, cotangents of `outs`) -> gradients of the operands at `wrt`, None where there is no path.

    **Arguments:**

    - `records`: whether the backward pass is recorded. In `no_grad`, that of `torch.func.grad` is, but one level down
        the mode is off.
    - `batches`: how the cotangents are batched, perhaps several times, outermost first. Then so are the gradients, at
        dimension 0.
    """
    fn, call, level, leaves = link.fn, link.fn.call, link.level, link.leaves

    def pullback(*args: Tensor) -> list[Any]:
        cotangents = [*map(unseal, args[link.count :])]
        operands = args[: link.count] if not internals.compiling() else _after(cotangents, args[: link.count])
        call.level = level
        hands_on = call.hands_on and not batches
        is_read, record = any(map(_requires_grad, args)), torch.is_grad_enabled()
        # Some of torch's formulas give tangents only if they are recorded: `slogdet` reads a saved `LU`.
        records_above = records and not record and internals.forward_ad_active()
        at_base = _may_run_at_base(call, operands, cotangents) and not records_above
        if at_base and record and is_read and call.random is None:
            # A leaf that the rerun makes would make results require grad that should not.
            at_base = all(operands[i].requires_grad or i in link.cut for i in leaves)
        if hands_on:
            cotangents = [*map(seal, cotangents)]

        if at_base:
            record = record and (is_read or internals.forward_ad_active())
        recorded = record or records_above

        def gradients(edges: list[GradientEdge], inputs: list[Tensor], own: list[Tensor], keep: bool) -> list[Any]:
            targets = [inputs[i] for i in wrt] + own
            with still_filled(call.fill):
                found = _batched(
                    lambda c: internals.run_backward(edges, targets, c, keep, recorded), cotangents, batches
                )
            return found[: len(wrt)]

        if at_base:
            # Faster than a functorch level, and an autograd.Function needs no functorch support.
            with internals.no_transforms(), torch.enable_grad():
                inputs = _leaves(operands, leaves, record, link)
                edges, own = _rerun(fn, inputs, outs, hands_on)
        else:
            if record and is_read and level == 0 and 0 in call.hooked:
                raise RematError(HOOKED.format(call.name, "create_graph=True, around a transform,"))
            with internals.grad_level() as lift:
                inputs = [lift(t) if i in leaves else t for i, t in enumerate(operands)]
                edges, own = _rerun(fn, inputs, outs, hands_on)
                if records_above or call.signature.has_custom:  # whose backward may begin levels above this one
                    found = gradients(edges, inputs, [], False)
                    return [None if g is None else internals.unwrap_grad(g, internals.stack_depth()) for g in found]
        # At the base, the graph of a recorded backward leads into the rerun's graph, which is then kept.
        keep = record and at_base
        # In `.backward()`, an autograd.Function on the way to a leaf made inside may add to the `.grad` of others.
        grads = gradients(edges, inputs, own if internals.accumulates_into_all_leaves() else [], keep)
        for i, t in enumerate(inputs) if at_base else ():
            if t.is_leaf and t.grad is not None and t is not operands[i]:
                raise RematError(_ACCUMULATES.format(call.name, list(t.shape), t.dtype))
        return [None if g is None else _detached(g) for g in grads] if keep and not is_read else grads

    derived = fn.then(pullback, is_vjp=True)
    derived.cut = link.cut
    return derived


def _rerun(
    fn: Derived, inputs: Sequence[Tensor], outs: Sequence[int], hands_on: bool
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Run a function again, check what it depends on, and keep only the graph: the results are freed.

    **Arguments:**

    - `hands_on`: whether the graph is given sealed cotangents: NOTE [handed on].

    **Returns:** the graph edge of each result at `outs`, and the leaves that the function has made.
    """
    since = internals.next_sequence_number()
    values = fn.run(*inputs)
    ends = [values[o] for o in outs]
    proof = fn.prove_rerun(ends, inputs, since)
    if proof.once_differentiable:
        raise RematError(_ONCE.format(fn.call.name))
    if fn.is_whole and not internals.forward_ad_active():
        fn.call.compare_reached(proof.reached, complete=len(outs) == len(values))
    if hands_on:
        ends = [*map(alias_of, ends)]
    edges = [*map(internals.gradient_edge, ends)]
    if hands_on:
        hand_on(proof.nodes, [edge.node for edge in edges])
    ends.clear()
    values.clear()
    fn.call.settle()
    return edges, proof.own


def _after(cotangents: Sequence[Tensor], operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The operands of a compiled rerun, as results of an op that reads the cotangents too.

    Else the compiler may run a part of the rerun before the backward pass gets there, and hold the results. Inputs of
    the compiled code need not wait if other operands do: a copy of all weights would take time.
    """
    waits_for = [t for c in cotangents for t in layers_and_tangents(c) if t.numel() and not internals.is_wrapper(t)]
    with internals.no_transforms():  # else the operands may become batched
        known = [t.flatten()[0].isnan() for t in waits_for]
        if not known:
            return operands
        flag = functools.reduce(torch.logical_or, known)
        numbers = {i for i, t in enumerate(operands) if t.is_floating_point() or t.is_complex()}  # no keys, say
        waits = {i for i in numbers if not internals.is_graph_input(innermost(operands[i]))} or numbers
    return tuple(torch.where(flag, t, t) if i in waits else t for i, t in enumerate(operands))


def _needs_level(call: Call, operands: Sequence[Tensor]) -> bool:
    """Whether a rerun must run under a transform: the call needs one, or an operand belongs to one."""
    return call.needs_level or any(map(internals.is_wrapper, operands))


def _may_run_at_base(call: Call, operands: Sequence[Tensor], cotangents: Sequence[Tensor]) -> bool:
    """Whether a rerun may run without functorch, which decomposes some ops in other ways, also random ones."""
    if internals.in_inference_mode() or any(map(Tensor.is_inference, operands)) or _needs_level(call, operands):
        return False  # in inference mode the base records nothing, and its tensors can't be saved
    return call.random is not None or not any(map(internals.is_wrapper, cotangents))


def _leaves(operands: Sequence[Tensor], leaves: Collection[int], record: bool, link: Link) -> list[Tensor]:
    """The inputs of a rerun: leaves of its graph. If it is recorded: aliases that lead to the graphs of the operands.

    An operand that is a leaf without hooks is its own input: then the rerun need not swap it, and other threads may use
    the module that holds it. (Hooks would be called twice.) A recorded rerun always takes an alias, because other
    operands may depend on the leaf.
    """
    inputs: list[Tensor] = []
    for i, t in enumerate(operands):
        if i not in leaves:
            inputs.append(t if record else _detached(t))
        elif record and t.requires_grad:
            inputs.append(alias_of(t))
        elif record:
            inputs.append(leaf := _detached(t, leaf=True))
            link.fn.call.made_for_reruns.append(weakref.ref(leaf))
        elif is_bare_leaf(t) and t is link.original(i):  # not an alias: hooks on saved tensors make one
            inputs.append(t)
        else:
            inputs.append(_detached(t, leaf=True))
    return inputs


def is_bare_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf without hooks, and carries no tangent."""
    if not tensor.is_leaf or not tensor.requires_grad or tensor._backward_hooks or internals.forward_ad_active():
        return False
    return not tensor._is_view()  # the primal of a dual made in no_grad looks like a leaf, and has no accumulator


def _batched(
    backward: Callable[[Sequence[Tensor]], Sequence[Any]], cotangents: Sequence[Tensor], batches: Sequence[Batch]
) -> list[Any]:
    """Run a backward pass, under a `vmap` for each batch of cotangents."""
    if not batches:
        return list(backward(cotangents))
    (size, dims), *inner = batches
    with internals.vmap_level(size, "same") as level:
        wrapped = [
            c if d is None else internals.wrap_batched(c, d, level) for c, d in zip(cotangents, dims, strict=True)
        ]
        grads = _batched(backward, wrapped, inner)
        pairs = [None if g is None else internals.unwrap_batched(g, level) for g in grads]
    return [None if p is None else at_front(*p, size) for p in pairs]


def _detached(tensor: Tensor, leaf: bool = False) -> Tensor:
    """Take a tensor off its graph, but keep its tangent. `leaf`: make the result require grad."""
    primal, tangent = unpack_dual(tensor)
    if leaf or tangent is not None or primal.requires_grad:
        primal = primal.detach()
    if leaf:
        primal.requires_grad_()
    if tangent is None:
        return primal
    tangent = tangent.detach() if tangent.requires_grad else tangent  # the older vmap has no rule for detach
    return forward_ad.make_dual(primal, tangent, level=0)


def jvp(fn: Derived, moving: Sequence[int], outs: Sequence[int]) -> Derived:
    """(operands, tangents of those at `moving`) -> (results, tangents of those at `outs`)."""

    def pushforward(*args: Tensor) -> list[Any]:
        if not fn.is_vjp and fn.call.level in fn.call.hooked:
            raise RematError(HOOKED.format(fn.call.name, "a backward through the tangents of forward-mode AD"))
        n = len(args) - len(moving)
        inputs = list(args[:n])
        # A function that drew outside of functorch would draw other numbers under it.
        plain = fn.call.random is not None and not _needs_level(fn.call, args)
        with internals.dual_level() if plain else internals.jvp_level() as level:
            for i, tangent in zip(moving, args[n:], strict=True):
                inputs[i] = make_dual(inputs[i], tangent)
            pairs = [unpack_dual(v) for v in fn.run(*inputs)]
            primals = [internals.unwrap_grad(p, level) for p, _ in pairs]
            tangents = [pairs[o].tangent for o in outs]
            return primals + [
                torch.zeros_like(primals[o]) if t is None else internals.unwrap_grad(t, level)
                for o, t in zip(outs, tangents, strict=True)
            ]

    return fn.then(pushforward)


def under_grad(fn: Derived, leaves: Collection[int]) -> Derived:
    """`fn` under a `grad` level that differentiates the operands at `leaves`, as in the forward.

    Elsewhere a function may run other ops: if it asks for `requires_grad`, as attention does with its mask.
    """

    def differentiated(*operands: Tensor) -> list[Any]:
        with internals.grad_level() as lift:
            level = internals.stack_depth()
            values = fn.run(*(lift(t) if i in leaves else t for i, t in enumerate(operands)))
            return [internals.unwrap_grad(v, level) for v in values]

    return fn.then(differentiated, is_whole=True)


def vmap(fn: Derived, in_dims: Sequence[int | None], batched: Sequence[bool], size: int, randomness: str) -> Derived:
    """`fn` over a batch; results at dimension 0 where `batched`."""

    def mapped(*operands: Tensor) -> list[Any]:
        with internals.vmap_level(size, randomness) as level:
            inputs = [
                t if d is None else internals.wrap_batched(t, d, level) for t, d in zip(operands, in_dims, strict=True)
            ]
            pairs = [internals.unwrap_batched(v, level) for v in fn.run(*inputs)]
        return [at_front(v, d, size) if b else v for (v, d), b in zip(pairs, batched, strict=True)]

    return fn.then(mapped, is_whole=True)


def functionalize(fn: Derived, reapply_views: bool) -> Derived:
    """`fn` without its mutations."""

    def functional(*operands: Tensor) -> list[Any]:
        with internals.functionalize_level(reapply_views) as level:
            values = fn.run(*(internals.wrap_functional(t, level) for t in operands))
            return [internals.unwrap_functional(v, reapply_views=reapply_views) for v in values]

    return fn.then(functional, is_whole=True)


def at_front(value: Tensor, dim: int | None, size: int) -> Tensor:
    """A batched value with its batch at dimension 0."""
    if dim == 0:  # no further view: views are checked for shared memory
        return value
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """Make a dual. A primal whose elements share memory can't carry a tangent, so it is copied first."""
    if 0 in primal.stride() and primal.numel() > 1:
        primal = primal.contiguous()
    return forward_ad.make_dual(primal, tangent, level=0)


def pick(fn: Derived, present: Sequence[int]) -> Derived:
    """`fn` with only its results at `present`."""

    def picked(*operands: Tensor) -> list[Any]:
        values = fn.run(*operands)
        return [values[i] for i in present]

    return fn.then(picked)
