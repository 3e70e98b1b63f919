"""Selective checkpointing: what a policy keeps of the forward is given back to the reruns.

The tape is that of `remat(policy=)`. What is added is torch's: an error where the rerun runs an op more often than the
forward did, and one where a kept result was changed in place, unless that is allowed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS, noop_context_fn

from remat import _compile, _recorder, _replay
from remat import _torch_internals as internals
from remat._errors import CheckpointError, shown, warn
from remat._ops import tensors
from remat._remat import remat
from remat._tape import KEEP, Tape
from remat._values import Key, Op, Value
from remat.compat._call import Contexts
from remat.policies import CheckpointPolicy, Policy, as_policy
from remat.policies._ops import OpOverload, OpOverloadPacket, spell

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_BYPASSED = (
    "checkpoint: A saved_tensors_hooks context (e.g. save_on_cpu) is active around a selective activation checkpoint "
    "region. What the policy keeps does not go through it, which later versions of torch.utils.checkpoint change. Pass "
    "respect_saved_tensors_hooks=True to have that now, or False to leave it without this warning."
)
_PACKET = " Please update the OpOverloadPacket to a specific OpOverload, such as {}.{}."
_MUTATED = (
    "checkpoint: Tensor cached during selective activation checkpoint has been mutated: a result of {}. If the "
    "function changes it, as recurrent layers do, pass allow_cache_entry_mutation=True to "
    "create_selective_checkpoint_contexts; elsewhere, change a copy: x = x.clone()."
)
_NOT_FOUND = (
    "checkpoint: {} invocation index {} encountered during backward but not found in storage: the forward did not run "
    "it as often. The function is not deterministic, or depends on something that changed in the meantime."
)


class _Packed:
    """A kept value that the user's hooks have made something else of."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def fetch(self) -> None:
        """It comes when it is asked for."""

    def get(self) -> Tensor:
        """The tensor, for the rerun to have as its own."""
        return internals.alias(self._unpack(self._packed))


class Recorder(_recorder.Recorder):
    """Sees the forward.

    **Attributes:**

    - `counts`: how often each op ran, by its identity. Those of a backward inside of the function do not count: they
        need not be the same in both runs.
    - `mutated`: the values that the policy keeps and a later op has changed.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.start())
        self.counts: Counter[int] = Counter()
        self.mutated: set[Value] = set()
        self._graph_task = internals.graph_task()
        self._saved = {}  # the region tells what the graph saves

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in SAC_IGNORED_OPS:
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
    """Sees a rerun."""

    is_about_functions = True

    def __init__(self, tape: Tape, counts: Counter[int], mutated: set[Value] | None) -> None:
        """`mutated`: what must not have been changed in place; None where all may be."""
        super().__init__(tape, internals.in_last_backward())
        self._counts, self._runs, self._mutated = counts, Counter[int](), mutated
        self._graph_task = internals.graph_task()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if internals.graph_task() == self._graph_task:
            index = self._runs[id(func)]
            if index == self._counts[id(func)]:
                raise CheckpointError(_NOT_FOUND.format(func, index))
            self._runs[id(func)] += 1
        return super()._op(func, args, kwargs)

    _op_of_remat = _replay.Replay._op  # it reads values, but does not count

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
    """What a policy keeps of one checkpointed call.

    **Attributes:**

    - `policy`: the policy.
    - `recorder`: the context of the forward.
    """

    def __init__(self, policy: Policy, allows_mutation: bool, hooks: Hooks | None) -> None:
        """`hooks`: what is kept goes through them."""
        self.policy, self._allows_mutation, self._hooks = policy, allows_mutation, hooks
        self.recorder = Recorder(policy)
        torch.clear_autocast_cache()  # a cast from before the run is no op of it

    def finish(self, outside: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """The forward is over. `outside`: by identity, what it has read from outside, and what stood for it."""
        self._tape = self.recorder.tape([])
        self._origins = {key: self._tape.origin(value) for key, (_, value) in outside.items()}
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
        """A rerun is given tensors in the place of those that the forward has read. `values`: by their identity."""
        for key, tensor in values.items():
            replay.stands_for(tensor, self._origins.get(key))


def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Contexts:
    """Two contexts for the `context_fn` of `checkpoint`: what the policy keeps is not computed again.

    **Arguments:**

    - `policy_fn_or_list`: a function `(ctx, op, *args, **kwargs)` that returns a `CheckpointPolicy` (or a bool); a
        collection of ops that are saved; or a policy of `remat.policies`.
    - `allow_cache_entry_mutation`: what is kept may be changed in place later: it is computed again then. Without it,
        that is an error on backward.

    **Returns:** the context of the forward and that of the rerun.

    **Raises:** `TypeError` where it is none of these, and where the function returns something else; `ValueError` for
    what is no op. Ops in a collection that can never run are warned of.

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
    elif callable(policy_fn_or_list) and not isinstance(policy_fn_or_list, (OpOverload, OpOverloadPacket, type)):
        policy = as_policy(policy_fn_or_list)
    else:
        raise TypeError(
            "create_selective_checkpoint_contexts: policy_fn_or_list must be either a function or a list of ops; "
            f"got {shown(policy_fn_or_list)}."
        )
    # Torch's checkpoint can use these. Ours takes them for what they say, and has a tape for each call.
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation)


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
    """What selective contexts say, for one call of `checkpoint` alone: a pair may be given to several.

    **Arguments:**

    - `respects_hooks`: whether what is kept goes through the user's hooks; None warns that it will.
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
            "checkpoint: under torch.compile, context_fn must generate a tuple of two `TorchDispatchMode`s, those of "
            f"create_selective_checkpoint_contexts: the compiler asks their policy. Got {shown(contexts[0])}."
        )
    return as_policy(selective[0])
