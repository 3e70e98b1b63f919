"""Plain autograd for a rerun, also through captured tensors that no torch function was seen to read.

At the base, `autograd.Function.apply` and functions of C++ extensions take a tensor out of sight, so the rerun's
graph reaches the tensor itself in the place of the operand that stands for it. The graph shows such edges: they
lead out of the rerun. Then the function runs once more, with the operands in the places that hold the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from remat import _torch_internals as internals
from remat._errors import RematError
from remat._replay import Call
from remat._typing import RepeatableCall


def foreign_edges(outputs: Sequence[Tensor], inputs: Sequence[Tensor], since: int) -> list[tuple[Any, int]]:
    """The ends (node, its input) of the edges that lead from the graph of the rerun to what was there before."""
    own = {id(t) for t in inputs}
    seen: set[Any] = {t.grad_fn for t in inputs if t.grad_fn is not None}
    todo = [t.grad_fn for t in outputs if t.grad_fn is not None]
    found = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, number in node.next_functions:
            if following is None or following in seen:
                continue
            variable = getattr(following, "variable", None)
            if variable is None and internals.sequence_number(following) >= since:
                todo.append(following)
            elif variable is None or id(variable) not in own:
                found.append((following, number))
    return found


def graph_alone(
    call: RepeatableCall, values: list[Tensor], outs: Iterable[int], cotangents: Iterable[Tensor]
) -> tuple[list[GradientEdge | None], list[Tensor]]:
    """The graph of a rerun's results at `outs` (None where there is none), and the cotangents of those that have one.

    `values` is emptied: they are not needed again.
    """
    edges = [internals.gradient_edge(values[out]) if values[out].requires_grad else None for out in outs]
    values.clear()
    call.settle()
    return edges, [c for c, e in zip(cotangents, edges, strict=True) if e is not None]


def rerun_without_leaks(
    call: RepeatableCall, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """`run(*inputs)`, a rerun of `call`, with a graph that ends at the inputs."""
    if not isinstance(call, Call):
        return run(*inputs)
    for ref in call.originals:
        original = ref()
        if original is not None:
            _ = original.grad_fn  # makes the node of a view whose base was changed in place: before `since`
    since = internals.next_sequence_number()
    strangers = len(call.strangers)
    values = run(*inputs)
    leaked = _leaked(call, values, inputs, since)
    if leaked:
        call.replace(leaked)
        del call.strangers[strangers:]
        since = internals.next_sequence_number()
        values = run(*inputs)
        if _leaked(call, values, inputs, since):
            raise RematError(_OUT_OF_SIGHT.format(call.name, "a tensor"))
    return values


_OUT_OF_SIGHT = (
    "remat: the result of {} depends on {} that the function takes from outside and hands straight to an "
    "autograd.Function, an extension or compiled code, where no torch function is seen to read it. Pass it as an "
    "argument; of compiled code: compile around remat, torch.compile(remat(f)), or use remat.checkpoint."
)


def _leaked(call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor], since: int) -> set[int]:
    """The operands whose originals the rerun's graph reaches."""
    found = set()
    for node, number in foreign_edges(outputs, inputs, since):
        variable = getattr(node, "variable", None)
        for position, ref in enumerate(call.originals):
            original = ref()
            if original is not None and internals.is_end_of(node, number, original):
                found.add(position)
                break
        else:
            if variable is None:
                raise RematError(_OUT_OF_SIGHT.format(call.name, f"a result of {node.name()}"))
            call.suspect(variable)
    if found & call.cut:
        raise RematError(_OUT_OF_SIGHT.format(call.name, "a tensor"))
    return found
