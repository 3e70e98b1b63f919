"""Selective checkpointing: two contexts, of which the first keeps what a policy says and the second gives it back.

They use the tape of `remat(policy=)`. What they add is torch's: an error where the rerun runs an op more often than the
forward did, and one where a kept result was changed in place, unless that is allowed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from remat import _compile
from remat import _torch_internals as internals
from remat._context import OwnCasts
from remat._errors import CheckpointError, shown, warn
from remat._recorder import Recorder
from remat._remat import remat
from remat._replay import Replay
from remat._tape import KEEP, Origin, Tape
from remat._values import Key, Op, Value
from remat.compat._region import Contexts, Options
from remat.policies import CheckpointPolicy, Policy, as_policy
from remat.policies._ops import OpOverload, OpOverloadPacket, spell

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_BYPASSED = (
    "checkpoint: A saved_tensors_hooks context (e.g. save_on_cpu) is active around a selective activation checkpoint "
    "region. What the policy keeps does not go through it, which later versions of torch.utils.checkpoint change. Pass "
    "respect_saved_tensors_hooks=True to have that now, or False to leave it without this warning."
)
_MUTATED = (
    "checkpoint: Tensor cached during selective activation checkpoint has been mutated: a result of {}. If the "
    "function changes it, as recurrent layers do, pass allow_cache_entry_mutation=True to "
    "create_selective_checkpoint_contexts; elsewhere, change a copy: x = x.clone()."
)
_NOT_FOUND = (
    "checkpoint: {} encountered during backward but not found in storage: the forward did not run it as often. The "
    "function is not deterministic, or depends on something that changed in the meantime."
)

SAC_IGNORED_OPS: set[Any] = {*torch.utils.checkpoint.SAC_IGNORED_OPS}
"""`detach`, which autograd calls as often as it likes, and look-ups, which are ops for tensor subclasses."""


class _Packed:
    """A kept value that the user's hooks have made something else of."""

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed, self._unpack = packed, unpack

    def fetch(self) -> None:
        """It comes when it is asked for."""

    def get(self) -> Tensor:
        """The tensor, for the rerun to have as its own."""
        return internals.alias(self._unpack(self._packed))


class _Recorder(Recorder):
    """Sees the forward.

    **Attributes:**

    - `counts`: how often each op ran, by its identity. Those of a backward inside of the function do not count: they
        need not be the same in both runs.
    - `mutated`: the values that the policy keeps and a later op has changed.
    """

    def __init__(self, policy: Policy, alone: bool) -> None:
        super().__init__(policy.start(), alone=alone)
        self.counts: Counter[int] = Counter()
        self.mutated: set[Value] = set()
        self._graph_task = internals.graph_task()
        if internals.saved_tensors_hooks() is not None:
            self._saved = {}  # they tell what the graph saves

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


class _Replay(Replay):
    """Sees a rerun."""

    is_about_functions = True

    def __init__(self, forward: Selective) -> None:
        super().__init__(forward.tape, internals.in_last_backward(), alone=not forward.of_region)
        self._left = forward.recorder.counts.copy()
        self._mutated = set() if forward.allow_cache_entry_mutation else forward.recorder.mutated
        self._allows_mutation = forward.allow_cache_entry_mutation
        self._graph_task = internals.graph_task()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if internals.graph_task() == self._graph_task:
            if not self._left[id(func)]:
                raise CheckpointError(_NOT_FOUND.format(func))
            self._left[id(func)] -= 1
        return super()._op(func, args, kwargs)

    _op_of_remat = Replay._op  # it reads values, but does not count

    def _known(self, key: Key) -> Op | None:
        op = super()._known(key)
        if op is not None and not self._mutated.isdisjoint(op.values):
            raise CheckpointError(_MUTATED.format(op.facts.func))
        return op

    def _kept(self, op: Op) -> dict[Value, Tensor]:
        expected = self._tape.kept.keys() & op.values
        found = super()._kept(op)
        if not self._allows_mutation and len(found) < len(expected):
            raise CheckpointError(_MUTATED.format(op.facts.func))
        return found

    def saves(self, tensor: Tensor) -> None:
        """The graph is about to save a tensor: compute it, if it was skipped."""
        with internals.DisableTorchFunction():
            self.accessed(None, (tensor,), {})


@contextlib.contextmanager
def _told_of_saved_tensors(tell: Callable[[Tensor], None]) -> Iterator[None]:
    """Within it, `tell` is called with each tensor before the active hooks pack it."""
    hooks = internals.saved_tensors_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    @internals.hook_of_checkpoint
    @internals.left_alone_by_dynamo
    def tells(tensor: Tensor) -> Any:
        tell(tensor)
        return pack(tensor)

    internals.push_saved_tensors_hooks(tells, unpack)
    try:
        yield
    finally:
        internals.pop_saved_tensors_hooks()


class _Context:
    """A context that can be entered again and again."""

    def _entered(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def __enter__(self) -> None:
        self._context = self._entered()
        self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


class Selective(_Context):
    """The context of the forward.

    **Attributes:**

    - `tape`: what was kept.
    - `recorder`: what has seen the forward.
    """

    tape: Tape
    recorder: _Recorder

    def __init__(
        self, policy: Policy, allow_cache_entry_mutation: bool, hooks: Hooks | None = None, of_region: bool = False
    ) -> None:
        """`of_region`: whether a `Region` uses it, which looks at the calls of the function."""
        self.policy, self.allow_cache_entry_mutation, self._hooks = policy, allow_cache_entry_mutation, hooks
        self.of_region = of_region

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        recorder = _Recorder(self.policy, not self.of_region)
        torch.clear_autocast_cache()  # a cast from before the run is no op of it
        with _told_of_saved_tensors(recorder.saves), recorder:
            yield
        self.recorder, self.tape = recorder, recorder.tape([])
        if self._hooks is not None:
            with torch.no_grad():
                self._pack(*self._hooks)

    def _pack(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        kept: dict[Value, Any] = self.tape.kept
        for value, k in kept.items():
            if not k.offloaded and (packed := pack(k.memory)) is not k.memory:
                kept[value] = _Packed(packed, unpack)


class GivenBack(_Context):
    """The context of the rerun: ops whose results were kept return them."""

    def __init__(self, forward: Selective) -> None:
        self._forward = forward

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._replay = _Replay(self._forward)
        try:
            with _told_of_saved_tensors(self._replay.saves), self._replay, OwnCasts():
                yield
        finally:
            if not self._forward.of_region:  # which does it when the frames of the function are gone
                self.settle()

    def settle(self) -> None:
        """The rerun is over: compute what it has skipped and somebody keeps, an attribute of a module, say."""
        self._replay.settle()

    def stands_for(self, copy: Tensor, origin: Origin) -> None:
        """The rerun is given a tensor in the place of one that the forward has read."""
        self._replay.stands_for(copy, origin)


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
        >>> from remat.compat import checkpoint, create_selective_checkpoint_contexts
        >>> context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        >>> x = torch.ones(3, 3, requires_grad=True)
        >>> y = checkpoint(lambda x: (x @ x).tanh(), x, use_reentrant=False, context_fn=context_fn)
        >>> y.sum().backward()
    """
    if isinstance(policy_fn_or_list, Policy):
        policy = policy_fn_or_list
    elif isinstance(policy_fn_or_list, Collection) and not isinstance(policy_fn_or_list, (str, bytes)):
        policy = _policy_of_ops(policy_fn_or_list)
    elif callable(policy_fn_or_list) and not isinstance(policy_fn_or_list, (OpOverload, OpOverloadPacket, type)):
        policy = as_policy(policy_fn_or_list)
    else:
        raise TypeError(
            "create_selective_checkpoint_contexts: policy_fn_or_list must be either a function or a list of ops; "
            f"got {shown(policy_fn_or_list)}."
        )
    forward = Selective(policy, allow_cache_entry_mutation)
    return forward, GivenBack(forward)


def _policy_of_ops(ops: Collection[Any]) -> Policy:
    """The policy that keeps the results of these ops. It warns of those that can never run."""
    for op in ops:
        if not isinstance(op, (OpOverload, internals.HigherOrderOperator)):
            is_packet = isinstance(op, OpOverloadPacket)
            hint = f" Name one of its overloads, as in {op}.{op.overloads()[0]}." if is_packet else ""
            raise ValueError(
                f"create_selective_checkpoint_contexts: Expected op in `op_list` to be an OpOverload but got: {op!r} "
                f"of type {type(op)}.{hint}"
            )
        if (reason := _why_never_seen(op)) is not None:
            warn(reason)
    return _policy_of_seen(frozenset(op for op in ops if _why_never_seen(op) is None))


@functools.cache  # to look through all ops takes milliseconds
def _why_never_seen(op: Any) -> str | None:
    try:
        spell("create_selective_checkpoint_contexts", op)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


_policy_of_seen = functools.cache(as_policy)


def for_one_region(forward: Any, rerun: Any, respects_hooks: bool | None) -> Contexts:
    """The contexts, for one call of `checkpoint` alone: a pair may be given to several.

    **Arguments:**

    - `respects_hooks`: whether what is kept goes through the user's hooks; None warns that it will.
    """
    if not isinstance(forward, Selective) and internals.selective_policy(forward) is None:
        return forward, rerun
    hooks = internals.saved_tensors_hooks_of_user() if respects_hooks is not False else None
    if hooks is not None and respects_hooks is None:
        warn(_BYPASSED, FutureWarning)
    if not isinstance(forward, Selective):
        return forward, rerun
    forward = Selective(forward.policy, forward.allow_cache_entry_mutation, hooks if respects_hooks else None, True)
    return forward, GivenBack(forward)


def call_compiled(options: Options, fun: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that torch.compile is tracing."""
    given: Any = options.context_fn
    policy_of: Callable[[Any], Policy] = _policy_of
    if given is noop_context_fn:
        given, policy_of = None, as_policy
    elif isinstance(given, functools.partial) and given.args and isinstance(given.args[0], Policy):
        given, policy_of = given.args[0], as_policy
    return _compile.call(remat, given, options.preserve_rng_state, fun, args, kwargs, policy_of)


def _policy_of(context_fn: Any) -> Policy:
    forward, _ = context_fn()
    if isinstance(forward, Selective):
        return forward.policy
    decides = internals.selective_policy(forward)
    if decides is None:
        raise TypeError(
            "checkpoint: under torch.compile the context_fn must return what create_selective_checkpoint_contexts "
            f"returns: the compiler asks its policy. Got {type(forward).__name__} {forward!r}."
        )
    return as_policy(decides)
