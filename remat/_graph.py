"""The proof: autograd has written down what the results of a run depend on.

NOTE [the proof]: a run has dropped or will drop its graph, and a rerun stands for it. That is right if each edge that
leaves the graph leads to an operand. So the graph is walked, at each level of the stack where a node is attached, from
the results down to nodes older than the run. An edge to a tensor that is no operand is a `Stranger`: a captured tensor
that no torch call was seen to read. It can't be missed silently, and no torch call needs to be seen for that.

A node is known to be older by its sequence number, which is counted in each thread. The node of a leaf, which adds to
its `.grad`, has the highest number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from remat import _torch_internals as internals


class Stranger(Exception):
    """The results of a run depend on a tensor that is no operand.

    **Attributes:**

    - `edge`: where it is in the graph: a node, and which of its outputs.
    - `leaf`: the tensor itself, where it is a leaf of the graph; else None.
    - `reader`: the node whose backward gives it a gradient.
    """

    def __init__(self, edge: tuple[Any, int], reader: Any) -> None:
        super().__init__()
        self.edge = edge
        self.leaf: Tensor | None = getattr(edge[0], "variable", None)
        self.reader = reader

    def __str__(self) -> str:
        """The op that has read the tensor, with its shape and dtype."""
        op = self.reader.name().removesuffix("0").removesuffix("Backward")
        if self.leaf is not None:
            return f"{op} reads a tensor of shape {list(self.leaf.shape)}, {self.leaf.dtype}"
        shape, dtype = internals.metadata_of(*self.edge)
        maker = self.edge[0].name().removesuffix("0").removesuffix("Backward")
        return f"{op} reads a tensor of shape {list(shape)}, {dtype}, a result of {maker}"


def edges_of(tensor: Tensor, since: int) -> list[tuple[Any, int]]:
    """The edges of a graph that lead to a tensor, at the level of its outermost wrapper.

    Forward-mode AD makes aliases when it takes a dual apart: one or two nodes since then.
    """
    node = tensor.grad_fn
    if node is None:
        return []
    edge = (node, tensor.output_nr)
    found = [edge]
    while _is_since(edge[0], since) and len(edge[0].next_functions) == 1:
        edge = edge[0].next_functions[0]
        found.append(edge)
    return found


def _is_since(node: Any, since: int) -> bool:
    return node is not None and since <= internals.sequence_number(node) < internals.LEAF_NUMBER


def prove(
    values: Sequence[Tensor], operands: Sequence[Tensor], since: int, is_own: Callable[[Tensor], bool]
) -> list[Any]:
    """The nodes made since `since` that values depend on, at the top level. Raises `Stranger`: NOTE [the proof].

    **Arguments:**

    - `is_own`: whether the run has made a leaf itself.
    """
    ends: set[tuple[Any, int]] = set()
    leaves: set[int] = set()
    for t in operands:
        if t.requires_grad:
            edges = edges_of(t, since)
            ends.update(edges)
            if not edges:
                leaves.add(id(t))
            elif edges[-1][0] is not None and hasattr(edges[-1][0], "variable"):
                leaves.add(id(edges[-1][0].variable))
    seen: set[Any] = set()
    nodes: list[Any] = []
    for v in values:
        node = v.grad_fn
        if node is not None and node not in seen and (node, v.output_nr) not in ends:
            if internals.sequence_number(node) < since:
                raise Stranger((node, v.output_nr), node)
            seen.add(node)
            nodes.append(node)
    for reader in nodes:  # it grows
        for edge in reader.next_functions:
            node = edge[0]
            if node is None or node in seen or edge in ends:
                continue
            leaf = getattr(node, "variable", None)
            number = internals.sequence_number(node)
            if number >= since and leaf is None:  # one that raises, for an op without a derivative, has the highest too
                seen.add(node)
                nodes.append(node)
            elif leaf is None or not (id(leaf) in leaves or is_own(leaf) or _is_of_one(node, operands)):
                raise Stranger(edge, reader)
    return nodes


def _is_of_one(accumulator: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether gradients of one of the tensors are added up by this node. One that hooks have saved is a copy."""
    return any(t.requires_grad and t.is_leaf and internals.gradient_edge(t).node is accumulator for t in tensors)


def layers(tensor: Tensor) -> list[Tensor]:
    """A tensor and those below its wrappers."""
    found = [tensor]
    while internals.is_wrapper(found[-1]):
        found.append(internals.unwrapped(found[-1]))
    return found


def is_made_since(tensor: Tensor, since: int) -> bool:
    """Whether autograd knows, at any level, that a tensor was made since `since`, of what is differentiated."""
    for t in layers(tensor) if internals.is_wrapper(tensor) else (tensor,):
        node = t.grad_fn
        if node is not None and since <= internals.sequence_number(node):
            return True
    return False
