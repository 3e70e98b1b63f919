"""Calls that `torch.compile` traces.

NOTE [two compilers]: dynamo turns Python code into a graph, and does not know our modes. Then AOTAutograd runs that
graph on fake tensors and records the ops. So dynamo gets the plain function as the body of one op. It makes a graph of
the function, with the captured tensors as arguments. When that op runs, this module recomputes in one of two ways:

| derivative by | recomputed by |
|---|---|
| the compiler, for a later `.backward()` | the compiler's partitioner, which repeats the ops that the policy marks |
| `torch.func`, in the compiled code | `remat` itself; the rerun is recorded with the other ops (see `_traced.py`) |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import rerunning
from remat._errors import RematError
from remat._layers import requires_grad_at_any_level
from remat._memory import memory_of
from remat._names import current_name
from remat.policies import CheckpointPolicy, Policy, as_policy
from remat.policies._policy import by_identity
from remat.random._keyed import keyed, running

tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling

_TRANSFORMS_INSIDE = (
    "remat: a function under remat that uses torch.func itself can't be compiled where torch.func differentiates it, "
    "nor by the backend 'eager': the compiler has recorded the numbers of its levels. Compile the functions inside it "
    "instead, or differentiate the compiled function with .backward()."
)
_SHARED = (
    "remat: in compiled code, a function changes a tensor in place, and gets another one over the same memory, such as "
    "cache.T or cache[0]. Pass one of the two, and take the view inside: cache.transpose(0, 1)."
)


def call(
    remat: Callable[..., Any],
    policy: Any,
    preserve_rng_state: bool,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy_of: Callable[[Any], Policy] = as_policy,
) -> Any:
    """Call a function that dynamo is tracing, as one op of its graph.

    **Arguments:**

    - `remat`: the decorator `remat.remat`, which this module can't import.
    - `policy`, `preserve_rng_state`: the options of the decorator.
    - `policy_of`: turns `policy` into a `Policy`.
    """
    if not torch.is_grad_enabled():
        return fun(*args, **kwargs)
    # The body of an op does not see torch-function modes. (Dynamo can't trace `modes_of_user`.)
    if not all(type(mode).__module__.startswith(("remat.", "torch.")) for mode in internals.function_modes()):
        return fun(*args, **kwargs)  # a mode of the user's
    if (keys := running()) is not None:
        fun, args = keyed(fun), (keys.next_key("a function under remat"), *args)
    policy = id(policy) if isinstance(policy, Policy) else policy  # dynamo passes on only constants
    as_op = functools.partial(_as_op, remat, policy_of, policy, preserve_rng_state)
    return internals.call_lifted(as_op, fun, *args, **kwargs)


def _as_op(
    remat: Callable[..., Any], policy_of: Callable[[Any], Policy], policy: Any, preserve_rng_state: bool, graph: Any
) -> Callable[..., Any]:
    """Return the body of the op. `graph`: dynamo's graph of the user's function, or the function itself."""
    function = graph.forward if isinstance(graph, torch.nn.Module) else graph  # remat of a module is a module

    def run(*args: Any, **kwargs: Any) -> Any:
        # A rerun does what the forward did, although the level of `vjp` may be over.
        by_partitioner = internals.compiling() and not (internals.differentiating() or rerunning.get())
        if not by_partitioner and _uses_transforms(graph):
            internals.allow_saved_tensors_hooks()
            raise RematError(_TRANSFORMS_INSIDE)
        decides = by_identity[policy] if isinstance(policy, int) else policy_of(policy)
        if not by_partitioner:
            return remat(function, policy=decides, preserve_rng_state=preserve_rng_state)(*args, **kwargs)
        if not any(isinstance(a, Tensor) and requires_grad_at_any_level(a) for a in args):
            return graph(*args)  # without a backward graph, torch refuses draws that are marked
        changed = _changed_by(graph)
        memory = [memory_of(a) if isinstance(a, Tensor) else None for a in args]
        if any(changes and memory.count(m) > 1 for m, changes in zip(memory, changed, strict=True)):
            raise RematError(_SHARED)
        inputs = [_copied(a) if changes else a for a, changes in zip(args, changed, strict=True)]
        out = internals.run_marked(graph, inputs, _marking(decides.start()))
        given: dict[int, Any] = {}
        for before, after in zip(args, inputs, strict=True):
            if after is not before:
                before.copy_(after)
                given[id(after)] = before
        return internals.tree_map(lambda x: given.get(id(x), x), out)  # the function may return what it changes

    return run


def _copied(tensor: Tensor) -> Tensor:
    """A copy for the function to change in place. The backward graph, which recomputes, gets what is copied here."""
    copy = tensor * True  # the backend inductor takes out a clone
    internals.mark(copy, CheckpointPolicy.MUST_SAVE)
    return copy


def _marking(policy: Callable[..., CheckpointPolicy]) -> Callable[..., CheckpointPolicy]:
    """The policy for the partitioner. A decision on a named value also marks the op that computed the value."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision = policy(ctx, op, *args, **kwargs)
        if current_name() is not None and decision is not CheckpointPolicy.PREFER_RECOMPUTE:
            internals.mark(args[0], decision)
        return decision

    return decide


def _changed_by(graph: Any) -> list[bool]:
    """For each argument of a graph of dynamo, whether it is changed in place, and not differentiated.

    Dynamo has run the graph on fake tensors, which count the changes: also those before it, which do no harm here.
    """
    examples = [n.meta.get("example_value") for n in graph.graph.nodes if n.op == "placeholder"]
    return [isinstance(t, Tensor) and t._version > 0 and not t.requires_grad for t in examples]


def _uses_transforms(graph: Any) -> bool:
    """Whether a graph of dynamo contains transforms: it then contains the numbers of their levels."""
    modules = graph.modules() if isinstance(graph, torch.fx.GraphModule) else ()
    nodes = (n for m in modules if isinstance(m, torch.fx.GraphModule) for n in m.graph.nodes)
    return any("increment_nesting" in getattr(n.target, "__name__", "") for n in nodes)
