"""Selective checkpointing: reruns get the results that a policy kept in the forward.

The tape is that of `remat(policy=)`. Two errors of torch are added: for a rerun that runs an op more often than the
forward did, and for a kept result that was changed in place, unless that is allowed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, noop_context_fn

from remat import _compile, _recorder, _replay, _tree
from remat import _torch_internals as internals
from remat._errors import CheckpointError, shown, warn
from remat._ops import tensors
from remat._remat import remat
from remat._saved import is_custom, nodes_behind
from remat._tape import KEEP, Tape
from remat._values import Key, Op, Value
from remat.compat._call import Contexts
from remat.compat._look import CheckpointLook
from remat.policies import CheckpointPolicy, Policy, as_policy
from remat.policies._ops import spell

OpOverloadPacket, OpOverload = internals.OP_KINDS
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_BYPASSED = (
    "checkpoint: A saved_tensors_hooks context (e.g. save_on_cpu) is active around a selective activation checkpoint "
    "region. In later versions, kept values will go through it. Pass respect_saved_tensors_hooks=True or False."
)
_PACKET = " Please update the OpOverloadPacket to a specific OpOverload, such as {}.{}."
_MUTATED = (
    "checkpoint: Tensor cached during selective activation checkpoint has been mutated: a result of {}. If the "
    "function changes it, as recurrent layers do, pass allow_cache_entry_mutation=True to "
    "create_selective_checkpoint_contexts; elsewhere, change a copy: x = x.clone()."
)
_NOT_FOUND = (
    "checkpoint: {} invocation index {} encountered during backward but not found in storage: the forward did not run "
    "it as often. The function is not deterministic, or depends on something that has changed since, such as a cache "
    "that the forward has filled (use_cache=True)."
)


@functools.cache
def _is_ignored(func: Any) -> bool:
    """Whether torch ignores an op, or it only asks something of a tensor, in C++, where no error can be raised.

    The hooks of FSDP2 call the profiler's ops, and not as often in a rerun.
    """
    return func in SAC_IGNORED_OPS or func.namespace in ("prim", "profiler")


class _Packed:
    """A kept value, as packed by the user's hooks."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def fetch(self) -> None:
        """Do nothing: `get` unpacks it."""

    def get(self) -> Tensor:
        """The value, as a new tensor over the same memory."""
        return internals.sharing_versions(self._unpack(self._packed))


class Recorder(_recorder.Recorder):
    """Records the forward.

    **Attributes:**

    - `counts`: how often each op ran, by its identity. Those of a backward inside the function do not count: they
        need not be the same in both runs.
    - `mutated`: the values that the policy keeps and that a later op has changed.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.start())
        self.counts: Counter[int] = Counter()
        self.mutated: set[Value] = set()
        self._graph_task = internals.graph_task()
        self._saved = {}  # the region tells what the graph saves

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_ignored(func):
            return func(*args, **kwargs)
        if internals.graph_task() == self._graph_task:
            self.counts[id(func)] += 1
        return super()._op(func, args, kwargs)

    def _note(self, op: Op, outputs: Sequence[Any], changed: list[Tensor], decision: CheckpointPolicy) -> None:
        values = (self._content(t.untyped_storage()).value for t in changed)
        self.mutated.update(value for value in values if value.decision in KEEP)
        super()._note(op, outputs, changed, decision)
        if op.facts.is_custom and decision in KEEP:  # its derivative may read them, so without them it would run again
            for t in tensors(outputs, {}):
                self.saves(t)


class Replay(_replay.Replay):
    """Returns kept results in a rerun."""

    is_about_functions = True

    def __init__(self, tape: Tape, counts: Counter[int], mutated: set[Value] | None) -> None:
        """`mutated`: the values that must not have been changed in place; None if all may be."""
        super().__init__(tape, _in_last_backward())
        self._counts, self._runs, self._mutated = counts, Counter[int](), mutated
        self._graph_task = internals.graph_task()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_ignored(func):
            return func(*args, **kwargs)
        if internals.graph_task() == self._graph_task and not self.has_looked_inside:  # which ops may vary
            index = self._runs[id(func)]
            if index == self._counts[id(func)]:
                raise CheckpointError(_NOT_FOUND.format(func, index))
            self._runs[id(func)] += 1
        return super()._op(func, args, kwargs)

    _op_of_remat = _replay.Replay._op  # an op of remat's own reads values, but does not count

    def _known(self, key: Key) -> Op | None:
        op = super()._known(key)
        if op is not None and self._mutated is not None and not self._mutated.isdisjoint(op.values):
            raise CheckpointError(_MUTATED.format(op.facts.func))
        return op

    def _kept(self, op: Op) -> dict[Value, Tensor]:
        expected = self._tape.kept.keys() & op.values
        found = super()._kept(op)
        if self._mutated is not None and len(found) < len(expected):
            raise CheckpointError(_MUTATED.format(op.facts.func))
        return found

    def saves(self, tensor: Tensor) -> None:
        """The graph is about to save a tensor: compute it, if it was skipped."""
        self.accessed(None, (tensor,), {})


class Selective:
    """The values that a policy keeps for one checkpointed call.

    **Attributes:**

    - `policy`: the policy.
    - `recorder`: the context of the forward.
    """

    def __init__(self, policy: Policy, allows_mutation: bool, hooks: Hooks | None) -> None:
        """`hooks`: the saved-tensor hooks that kept values go through, or None."""
        self.policy, self._allows_mutation, self._hooks = policy, allows_mutation, hooks
        self.recorder = Recorder(policy)
        torch.clear_autocast_cache()  # a cast from before the run is not one of its ops

    def finish(self, look: CheckpointLook, out: Any) -> None:
        """Called when the forward is over, which returned `out`."""
        self._tape = self.recorder.tape([])
        found = look.outside.items()
        self._origins = {key: self._tape.origins(seen.value, key in look.copies) for key, seen in found}
        results = [t.grad_fn for t in _tree.flatten(out)[0] if isinstance(t, Tensor)]
        reads_unseen = look.reads_unseen or any(map(is_custom, nodes_behind(results, look.since)))
        self._tape.skips = self._tape.skips and not reads_unseen
        if self._hooks is not None:
            pack, unpack = self._hooks
            kept: dict[Value, Any] = self._tape.kept
            with torch.no_grad():
                for value, k in kept.items():
                    if not k.offloaded and (packed := pack(k.memory)) is not k.memory:
                        kept[value] = _Packed(packed, unpack)

    def replay(self) -> Replay:
        """The context of a rerun: ops whose results were kept return them."""
        return Replay(self._tape, self.recorder.counts, None if self._allows_mutation else self.recorder.mutated)

    def stand_in(self, replay: Replay, values: Mapping[int, Tensor]) -> None:
        """Tell a replay which tensors the rerun reads in place of those of the forward.

        `values`: the tensors that the rerun reads, by identity of those that the forward read.
        """
        for key, tensor in values.items():
            replay.stands_for(tensor, self._origins.get(key, ()))


def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Contexts:
    """Make two contexts for the `context_fn` of `checkpoint`: results that the policy keeps are not recomputed.

    **Arguments:**

    - `policy_fn_or_list`: a function `(ctx, op, *args, **kwargs)` that returns a `CheckpointPolicy` (or a bool); a
        collection of ops whose results are saved; or a policy of `remat.policies`.
    - `allow_cache_entry_mutation`: kept results may be changed in place later, and are recomputed then. Without it,
        that is an error on backward.

    **Returns:** the context of the forward and that of the rerun.

    **Raises:** `TypeError` for anything else, and if the function returns something else; `ValueError` if an item of
    the collection is not an op. A warning names ops that can never run.

    **Source:** `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    Examples:
        >>> import functools, torch
        >>> from remat import compat
        >>> saves_products = functools.partial(
        ...     compat.create_selective_checkpoint_contexts,
        ...     [torch.ops.aten.mm.default],
        ... )
        >>> x = torch.ones(3, 3, requires_grad=True)
        >>> y = compat.checkpoint(
        ...     lambda x: (x @ x).tanh(),
        ...     x,
        ...     use_reentrant=False,
        ...     context_fn=saves_products,
        ... )
        >>> y.sum().backward()
    """
    if isinstance(policy_fn_or_list, Policy):
        policy = policy_fn_or_list
    elif isinstance(policy_fn_or_list, Collection) and not isinstance(policy_fn_or_list, (str, bytes)):
        policy, never_seen = _policy_of_ops(frozenset(policy_fn_or_list))
        for reason in never_seen:
            warn(reason)
    elif callable(policy_fn_or_list) and not isinstance(policy_fn_or_list, (*internals.OP_KINDS, type)):
        policy = as_policy(policy_fn_or_list)
    else:
        raise TypeError(
            "create_selective_checkpoint_contexts: policy_fn_or_list must be either a function or a list of ops; "
            f"got {shown(policy_fn_or_list)}."
        )
    # torch's checkpoint can use these too. Ours reads only their policy, and has a tape for each call.
    return internals.create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation)


@functools.cache  # to look through all ops takes milliseconds
def _policy_of_ops(ops: frozenset[Any]) -> tuple[Policy, list[str]]:
    """The policy that keeps the results of these ops, and why some of them can never run."""
    seen, never_seen = [], []
    for op in ops:
        if not isinstance(op, (OpOverload, internals.HigherOrderOperator)):
            hint = _PACKET.format(op, op.overloads()[0]) if isinstance(op, OpOverloadPacket) else ""
            raise ValueError(
                f"create_selective_checkpoint_contexts: Expected op in `op_list` to be an OpOverload but got: {op!r} "
                f"of type {type(op)}.{hint}"
            )
        try:
            seen.append(spell("create_selective_checkpoint_contexts", op))
        except (TypeError, ValueError) as error:
            never_seen.append(str(error))
    return as_policy(seen), never_seen


def for_one_call(contexts: Contexts, respects_hooks: bool | None) -> Selective | None:
    """The policy of selective contexts, for one call of `checkpoint`: several calls may share the contexts.

    **Arguments:**

    - `respects_hooks`: whether kept values go through the user's hooks. None: they do not, with a warning.
    """
    selective = internals.selective_policy(*contexts)
    if selective is None:
        return None
    hooks = internals.saved_tensors_hooks_of_user() if respects_hooks is not False else None
    if hooks is not None and respects_hooks is None:
        warn(_BYPASSED, FutureWarning)
    policy, allows_mutation = selective
    return Selective(as_policy(policy), allows_mutation, hooks if respects_hooks else None)


def call_compiled(context_fn: Any, preserve_rng_state: bool, fun: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that torch.compile is tracing."""
    if context_fn is noop_context_fn:
        return _compile.call(remat, None, preserve_rng_state, fun, args, kwargs)
    if isinstance(context_fn, functools.partial) and context_fn.args and isinstance(context_fn.args[0], Policy):
        return _compile.call(remat, context_fn.args[0], preserve_rng_state, fun, args, kwargs)
    return _compile.call(remat, context_fn, preserve_rng_state, fun, args, kwargs, _policy_of)


def _policy_of(context_fn: Any) -> Policy:
    contexts = context_fn()
    selective = internals.selective_policy(*contexts)
    if selective is None:
        raise TypeError(
            "checkpoint: under torch.compile, context_fn must generate a tuple of two `TorchDispatchMode`s by "
            f"create_selective_checkpoint_contexts. Got {shown(contexts[0])}."
        )
    return as_policy(selective[0])


def _in_last_backward() -> bool:
    """Whether a backward pass runs that goes through all of the graph behind its results, and frees it."""
    runs = internals.graph_task() != -1
    return runs and not internals.graph_is_retained() and internals.accumulates_into_all_leaves()
