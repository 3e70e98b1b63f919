"""The proof, from autograd's graph, that the results of a run depend on operands only.

NOTE [the proof]: remat drops the graph of a run, and a rerun replaces it. That is right if each edge that leaves the
graph leads to an operand. So the graph is walked from the results to nodes older than the run, at each level of the
stack where a node is attached. If an edge leads to another tensor, `UnknownInput` is raised: the function has captured
a tensor, and no torch call was seen to read it. So no captured tensor is missed silently.

An older node has a lower sequence number. Each thread counts its own. The node of a leaf, which adds to its `.grad`,
has the highest number.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from remat import _torch_internals as internals
from remat._dispatch_mode import ops_of_remat
from remat._errors import HOOK_OF_INPUT, HOOKED, OTHER_GRAPH, RematError
from remat._signature import is_of_torch


class UnknownInput(Exception):  # noqa: N818  # always caught, and raised again as another
    """The results of a run depend on a tensor that is not an operand.

    **Attributes:**

    - `edge`: its place in the graph: a node, and the number of the output.
    - `leaf`: the tensor itself, if it is a leaf of the graph; else None.
    - `reader`: the node whose backward gives it a gradient; None if the tensor is itself a result.
    """

    def __init__(self, edge: tuple[Any, int], reader: Any, leaf: Tensor | None = None) -> None:
        super().__init__()
        self.edge = edge
        self.leaf: Tensor | None = _leaf_at(edge[0]) if leaf is None else leaf
        self.reader = reader

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether the results depend on this tensor."""
        return tensor is self.leaf if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr) == self.edge

    @property
    def target(self) -> Tensor | GradientEdge:
        """What `torch.autograd` takes for the tensor."""
        return GradientEdge(*self.edge) if self.leaf is None else self.leaf

    def __str__(self) -> str:
        """The op that has read the tensor, with its shape and dtype."""
        op = "the result" if self.reader is None else _op_of(self.reader)
        if self.leaf is not None:
            return f"{op} reads a tensor of shape {list(self.leaf.shape)}, {self.leaf.dtype}"
        shape, dtype = internals.metadata_of(*self.edge)
        return f"{op} reads a tensor of shape {list(shape)}, {dtype}, a result of {_op_of(self.edge[0])}"


def _op_of(node: Any) -> str:
    return node.name().removesuffix("0").removesuffix("Backward")


def edges_of(tensor: Tensor, since: int) -> list[tuple[Any, int]]:
    """The edges of a graph that lead to a tensor, at the level of its outermost wrapper.

    Forward-mode AD makes aliases when it unpacks a dual. Their nodes, one or two, are younger than `since`.
    """
    tensor = _with_node(tensor)
    node = tensor.grad_fn
    if node is None:
        return []
    edge: tuple[Any, int] = (node, tensor.output_nr)
    found = [edge]
    while _is_since(edge[0], since) and len(edge[0].next_functions) == 1:
        edge = edge[0].next_functions[0]
        found.append(edge)
    return found


def _with_node(tensor: Tensor) -> Tensor:
    """The tensor, or its base: under vmap and a dispatch mode, and in forward-mode AD, some views have no node."""
    base = tensor._base if tensor.grad_fn is None and tensor.requires_grad else None
    return tensor if base is None or not base.requires_grad else base


def _leaf_at(node: Any) -> Tensor | None:
    """The leaf that a node adds gradients to."""
    return node.variable if type(node) is internals.AccumulateGrad else None  # type: ignore[attr-defined]


def _is_since(node: Any, since: int) -> bool:
    return node is not None and since <= internals.sequence_number(node) < internals.LEAF_NUMBER


class Proof(NamedTuple):
    """The dependencies of values, at the level on top of the stack."""

    nodes: list[Any]
    """The nodes made since the run began."""
    reached: set[int]
    """Positions of the operands that the values depend on."""
    ambiguous: set[int]
    """Positions of operands that the graph can't tell apart: below a `vmap`, two may be the same tensor."""
    own: list[Tensor]
    """The leaves that the run made itself."""
    once_differentiable: bool
    """Whether a node of `once_differentiable` is in the graph. It raises, but is on no path to an operand."""


def _raise(unknown: UnknownInput) -> None:
    try:
        raise unknown
    finally:
        del unknown  # its traceback has this frame


def prove(
    values: Sequence[Tensor],
    operands: Sequence[Tensor],
    since: int,
    is_own: Callable[[Tensor], bool],
    on_unknown: Callable[[UnknownInput], None] = _raise,
) -> Proof:
    """Check that values depend on operands only. Raises `UnknownInput`: see NOTE [the proof].

    **Arguments:**

    - `is_own`: tells whether the run made a leaf itself.
    - `on_unknown`: if given, called with each `UnknownInput`. Then none is raised.
    """
    ends: dict[Any, int] = {}
    """The positions of operands by their edges; those of leaves also by identity."""
    reached: set[int] = set()
    ambiguous: set[int] = set()
    for i, t in enumerate(map(_with_node, operands)):
        if t.requires_grad:
            edges = () if t.grad_fn is None else edges_of(t, since)
            leaf = _leaf_at(edges[-1][0]) if edges else t
            for key in edges if leaf is None else (*edges, id(leaf)):
                first = ends.setdefault(key, i)
                if first != i:
                    ambiguous |= {i, first}
            if edges:
                ends[edges[0]] = i
    roots = []
    for value in values:
        v = _with_node(value)
        viewed = [i for i, t in enumerate(operands) if t._base is v] if v is not value else ()
        if viewed:  # it is a view of one of these
            reached.update(viewed)
        elif v.grad_fn is not None:
            roots.append((v.grad_fn, v.output_nr))
        elif id(v) in ends:
            reached.add(ends[id(v)])
        elif v.requires_grad and not is_own(v):
            on_unknown(UnknownInput((None, 0), None, v))
    sequence_number, leaf_number = internals.sequence_number, internals.LEAF_NUMBER
    seen: set[Any] = {None}
    nodes: list[Any] = []
    own: list[Tensor] = []
    once_differentiable = False
    for reader in itertools.chain((None,), nodes):  # the loop appends to them
        for edge in roots if reader is None else reader.next_functions:
            node = edge[0]
            if node in seen:
                continue
            if edge in ends:
                reached.add(ends[edge])
                continue
            number = sequence_number(node)
            if number < since:
                on_unknown(UnknownInput(edge, reader))
                continue
            seen.add(node)
            if number < leaf_number:
                nodes.append(node)
            elif (leaf := _leaf_at(node)) is None:  # an op without a derivative: its backward raises
                once_differentiable |= type(node) is internals.OnceDifferentiable
            else:
                position = ends.get(id(leaf))
                if position is None:
                    position = _of_one(node, operands)
                if position is not None:
                    reached.add(position)
                elif is_own(leaf):
                    own.append(leaf)
                else:
                    on_unknown(UnknownInput(edge, reader))
    return Proof(nodes, reached, ambiguous, own, once_differentiable)


def _of_one(accumulator: Any, tensors: Sequence[Tensor]) -> int | None:
    """The position of the leaf that an AccumulateGrad node belongs to. Hooks on saved tensors may have copied it."""
    with ops_of_remat():  # to find the node of a leaf takes an op
        for i, t in enumerate(tensors):
            if t.requires_grad and t.is_leaf and internals.gradient_edge(t).node is accumulator:
                return i
    return None


def is_made_since(tensor: Tensor, since: int) -> bool:
    """Whether a tensor has, at any level, a node with a sequence number of at least `since`."""
    while (node := tensor.grad_fn) is None or internals.sequence_number(node) < since:
        if not internals.is_wrapper(tensor):
            return False
        tensor = internals.unwrapped(tensor)
    return True


def inputs_reached(
    name: str,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    since: int,
    unhooked: AbstractSet[int],
    is_own: Callable[[Tensor], bool],
) -> tuple[bool, ...]:
    """Which inputs a derivative of outputs inside a function gives a gradient, at the levels of these tensors.

    It may go through one input to another. Raises `RematError` if a rerun would have another derivative.

    **Arguments:**

    - `name`: of the function.
    - `unhooked`: the sequence numbers of nodes whose hooks are left out of the run.
    - `is_own`: tells whether the function made a tensor itself.
    """
    for t in inputs:
        hooks = (t._backward_hooks or {}).values()
        if not (all(map(is_of_torch, hooks)) or is_own(t)):
            raise RematError(HOOK_OF_INPUT.format(name, list(t.shape), t.dtype))
    keys = [id(t) if t.grad_fn is None else (t.grad_fn, t.output_nr) for t in map(_with_node, inputs)]
    ends = set(keys)
    found: set[Any] = set()

    @functools.cache  # to look among the inputs takes time
    def key_of(edge: tuple[Any, int]) -> Any:
        """The edge, or of a leaf its identity, or that of the input over the same leaf."""
        leaf = _leaf_at(edge[0])
        if leaf is None or id(leaf) in ends:
            return edge if leaf is None else id(leaf)
        position = None if internals.transforms_active() else _of_one(edge[0], inputs)
        return None if position is None else keys[position]

    edges: list[tuple[Any, int]] = [(t.grad_fn, t.output_nr) for t in map(_with_node, outputs)]
    older: list[tuple[Any, int]] = []
    seen: set[Any] = {None}
    for edge in edges:  # the loops append to the lists
        node, key = edge[0], key_of(edge)
        if key in ends:
            found.add(key)
        if node in seen:
            continue
        number = internals.sequence_number(node)
        if number in unhooked:
            raise RematError(HOOKED.format(name, "torch.autograd.grad inside"))
        if number >= since:
            seen.add(node)
            edges += node.next_functions
        elif key in ends:
            older += node.next_functions
        else:
            older.append(edge)
    for edge in older:
        node = edge[0]
        if key_of(edge) in ends:
            raise RematError(OTHER_GRAPH.format(name))
        if node not in seen:
            seen.add(node)
            older += node.next_functions
    return tuple(key in found for key in keys)


def is_from_before(tensor: Tensor, since: int) -> bool:
    """Whether a tensor is older than `since`, or a view of a result that is.

    If that result was changed in place, torch makes the node of the view anew when the view is read.
    """
    if not is_made_since(tensor, since):
        return True
    base = tensor._base
    return base is not None and base.grad_fn is not None and not is_made_since(base, since)
