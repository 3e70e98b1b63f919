"""Selective checkpointing: two contexts, of which the first keeps what ops return and the second gives it back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from remat import _compile, _tree
from remat import _torch_internals as internals
from remat._context import drawn_from
from remat._errors import CheckpointError, shown, warn
from remat._names import current_name
from remat._ops import facts_of
from remat._remat import remat
from remat.compat._devices import noop_context_fn
from remat.compat._named_ops import named_in_vain, policy_of_ops, warn_in_vain
from remat.compat._region import Contexts
from remat.policies import CheckpointPolicy, Policy, as_policy
from remat.policies._ops import OpOverload, OpOverloadPacket

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_BYPASSED = (
    "checkpoint: what selective checkpointing keeps does not go through the saved_tensors_hooks around the call. Later "
    "versions of torch.utils.checkpoint change that. Pass respect_saved_tensors_hooks=True to have it now, or False to "
    "leave it as it is without this warning."
)
_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
_KEEP = (*_SAVE, *_OFFLOAD)
_NAMES = torch.ops.aten.alias.default
"""What `checkpoint_name` calls."""

SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,  # autograd calls it as often as it likes
    # Look-ups, which are ops for tensor subclasses.
    torch.ops.aten.is_contiguous.default,
    torch.ops.aten.is_contiguous.memory_format,
    torch.ops.aten.is_strides_like_format.default,
    torch.ops.aten.is_non_overlapping_and_dense.default,
    torch.ops.aten.size.default,
    torch.ops.aten.sym_size.default,
    torch.ops.aten.stride.default,
    torch.ops.aten.sym_stride.default,
    torch.ops.aten.storage_offset.default,
    torch.ops.aten.sym_storage_offset.default,
    torch.ops.aten.numel.default,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.dim.default,
    torch.ops.prim.device.default,
}


class SelectiveCheckpointContext:
    """What a policy is told besides the op and its arguments.

    **Attributes:**

    - `is_recompute`: always False: a policy is asked in the forward alone.
    - `op_output`: what the op returned.
    - `name`: the name that `checkpoint_name` is giving to it, None where it is giving none.

    **Source:** `torch.utils.checkpoint.SelectiveCheckpointContext`.

    Examples:
        >>> import torch
        >>> from remat.compat import CheckpointPolicy, SelectiveCheckpointContext
        >>> def small(ctx: SelectiveCheckpointContext, op, *args, **kwargs):
        ...     return CheckpointPolicy.MUST_SAVE if ctx.op_output.numel() < 100 else CheckpointPolicy.PREFER_RECOMPUTE
        >>> small(SelectiveCheckpointContext(is_recompute=False, op_output=torch.ones(3)), torch.ops.aten.sin.default)
        <CheckpointPolicy.MUST_SAVE: 0>
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output
        self.name = current_name()


class _Kept:
    """A tensor that an op returned."""

    def __init__(self, tensor: Tensor, offload: bool) -> None:
        self._device = tensor.device
        self._unpack: Callable[[Any], Tensor] | None = None
        self._packed: Any = None
        self._tensor = tensor.cpu() if offload else internals.alias(tensor)
        self.storage = self._tensor.untyped_storage()._cdata
        self._changes = False
        self._version = self._tensor._version

    def settle(self) -> None:
        """The op that returned it is over, which counts as a change if it was in place."""
        self._version = self._tensor._version

    def before_change(self) -> None:
        """The function is about to change the tensor in place: keep what it is now, if it is what the op returned."""
        if not self._changes and self._tensor._version == self._version:
            self._tensor, self._changes = self._tensor.clone(), True
            self._version = self._tensor._version

    def after_change(self) -> None:
        """The function has changed it in place: by `unsafe_chunk`, say, that does not show in its version."""
        self._version = -1

    def pack(self, hooks: Hooks) -> None:
        """The run is over: have the user's hooks make something else of it."""
        pack, self._unpack = hooks
        self._packed = pack(self._tensor)
        del self._tensor

    def get(self, func: Any) -> Tensor:
        """The tensor, for the rerun to have as its own."""
        if self._unpack is not None:
            return internals.alias(self._unpack(self._packed))
        if self._tensor._version != self._version:
            raise CheckpointError(
                "checkpoint: Tensor cached during selective activation checkpoint has been mutated: a result of "
                f"{func}. If the function changes it, as recurrent layers do, pass allow_cache_entry_mutation=True to "
                "create_selective_checkpoint_contexts; elsewhere, change a copy: x = x.clone()."
            )
        if self._tensor.device != self._device:
            return self._tensor.to(self._device)
        return self._tensor.clone() if self._changes else internals.alias(self._tensor)


class _Cache:
    """What was kept of one forward run, by the op and how many of it came before. None: it is to run again."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], Any] = {}
        self.kept: list[_Kept] = []
        """All of it, while the forward runs."""


class _Counter(internals.DispatchMode):
    """Numbers the calls of each op in one run.

    The ops of a backward inside of the function do not count: they need not be the same in both runs.
    """

    is_about_functions = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, int] = {}
        self._graph_task = -1

    def __enter__(self) -> Any:
        self._counts = {}
        self._graph_task = internals.graph_task()
        torch.clear_autocast_cache()  # a cast from before the run is no op of it: both begin without
        return super().__enter__()

    def ignores(self, func: Any) -> bool:
        """Whether a call of an op does not count."""
        return func in SAC_IGNORED_OPS or internals.graph_task() != self._graph_task

    def key(self, func: Any) -> tuple[int, int]:
        """The op, by its identity, for to hash it is a call of Python's, and its number."""
        number = self._counts.get(id(func), 0)
        self._counts[id(func)] = number + 1
        return id(func), number


class Selective(_Counter):
    """The context of the forward: asks the policy about each op, and keeps what it returned."""

    def __init__(self, policy: Policy, allow_cache_entry_mutation: bool, cache: _Cache, hooks: Hooks | None) -> None:
        super().__init__()
        self._hooks = hooks
        self.policy = policy
        self.allow_cache_entry_mutation = allow_cache_entry_mutation
        self.cache = cache
        self._decide: Any = None
        self._error: TypeError | None = None
        self._unsettled: list[_Kept] = []
        self._makers: dict[int, tuple[Any, torch.Size]] = {}
        """By storage, the op that has written to it last, and the shape of what it returned."""

    def __enter__(self) -> Any:
        self._decide = self.policy.start()
        self.cache.entries, self.cache.kept = {}, []
        return super().__enter__()

    def __exit__(self, *args: Any) -> Any:
        self._settle()
        super().__exit__(*args)
        if self._hooks is not None:
            with torch.no_grad():
                for kept in self.cache.kept:
                    kept.pack(self._hooks)
        self.cache.kept, self._makers = [], {}
        if self._error is not None:  # Python takes it for an unknown operand of `@`, and hides it
            error, self._error = self._error, None
            raise error from None

    def _settle(self) -> None:
        for kept in self._unsettled:
            kept.settle()
        self._unsettled = []

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.ignores(func):
            return func(*args, **kwargs)
        if self._unsettled:
            self._settle()
        mutable = _is_mutable(func)
        changed = self._written(func, args, kwargs) if mutable and self.cache.kept else []
        for kept in changed if self.allow_cache_entry_mutation else ():
            kept.before_change()
        key = self.key(func)
        self.cache.entries[key] = None  # if it raises, and the function goes on, the rerun is to raise as well
        out = func(*args, **kwargs)
        for kept in () if self.allow_cache_entry_mutation else changed:
            kept.after_change()
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        try:
            decision = self._decide(context, func, *args, **kwargs)
        except TypeError as error:
            self._error = error
            raise
        if context.name is not None and func is _NAMES:
            if decision is not CheckpointPolicy.PREFER_RECOMPUTE:
                self._decide_of_named(out, decision, key)
            return out
        if decision in _KEEP and _can_be_kept(func) and _is_strided(out):
            drawn = drawn_from(args, kwargs) if facts_of(func).draws else None
            self.cache.entries[key] = _signature(args, kwargs), drawn, *self._keep(out, decision in _OFFLOAD, mutable)
        if type(out) is Tensor and out.layout is torch.strided and not facts_of(func).draws:
            self._makers[out.untyped_storage()._cdata] = key, out.shape
        return out

    def _decide_of_named(self, tensor: Tensor, decision: CheckpointPolicy, key: Any) -> None:
        """A decision on a named value is about the op that computed it: the name itself computes nothing."""
        maker, shape = self._makers.get(tensor.untyped_storage()._cdata, (key, tensor.shape))
        key = maker if shape == tensor.shape else key
        keeps = decision in _KEEP and _is_strided(tensor)
        self.cache.entries[key] = (None, None, *self._keep(tensor, decision in _OFFLOAD, False)) if keeps else None

    def _keep(self, out: Any, offload: bool, mutable: bool) -> Any:
        leaves, spec = _tree.flatten(out)
        entry = [_Kept(x, offload) if isinstance(x, Tensor) else x for x in leaves]
        kept = [x for x in entry if isinstance(x, _Kept)]
        self.cache.kept += kept
        if mutable:
            self._unsettled += kept
        return entry, spec

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[_Kept]:
        """What of that which was kept an op writes to."""
        storages = {x.untyped_storage()._cdata for x in facts_of(func).written(args, kwargs)}
        return [kept for kept in self.cache.kept if kept.storage in storages]


class GivenBack(_Counter):
    """The context of the rerun: gives ops their kept results."""

    def __init__(self, cache: _Cache) -> None:
        super().__init__()
        self._cache = cache
        self._is_last = False

    def __enter__(self) -> Any:
        self._is_last = internals.in_last_backward()
        return super().__enter__()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.ignores(func):
            return func(*args, **kwargs)
        key = self.key(func)
        if key not in self._cache.entries:
            raise CheckpointError(
                f"checkpoint: {func} encountered during backward but not found in storage, call {key[1] + 1} of it in "
                "the rerun. The forward did not run it as often: the function is not deterministic, or depends on "
                "something that changed in the meantime."
            )
        entry = self._cache.entries[key]
        if entry is None:
            return func(*args, **kwargs)
        signature, drawn, kept, spec = entry
        if signature is not None and signature != _signature(args, kwargs):
            raise CheckpointError(
                f"checkpoint: call {key[1] + 1} of {func} in the rerun has other arguments than in the forward: the "
                "function is not deterministic, or depends on something that changed in the meantime."
            )
        if drawn is not None:  # so that the ops after it draw what they drew
            drawn.put_back()
        leaves = [x.get(func) if isinstance(x, _Kept) else x for x in kept]
        if self._is_last and _is_repeatable(func, drawn is not None):
            self._cache.entries[key] = None  # not held any longer: should another backward ask for it, the op runs
        if _is_mutable(func):
            return args[0].copy_(leaves[0])
        return _tree.unflatten(spec, leaves)


def _signature(args: Any, kwargs: Any) -> list[Any]:
    """What is compared of the arguments of an op."""
    leaves, _ = _tree.flatten((args, kwargs))
    return [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in leaves]


def _is_strided(out: Any) -> bool:
    leaves, _ = _tree.flatten(out)
    return all(x.layout is torch.strided for x in leaves if isinstance(x, Tensor))


@functools.cache
def _is_mutable(func: Any) -> bool:
    return isinstance(func, OpOverload) and bool(func._schema.is_mutable)


def _is_repeatable(func: Any, draws_again: bool) -> bool:
    """Whether an op may run again. `draws_again`: whether it draws what it has drawn."""
    return getattr(func, "namespace", "") == "aten" and (draws_again or not facts_of(func).draws)


@functools.cache
def _can_be_kept(func: Any) -> bool:
    """Whether an op returns something new, or only changes its first argument and returns that.

    A view costs nothing, and has to be one of the rerun's own tensors.
    """
    if not isinstance(func, OpOverload):
        return True
    if torch.Tag.inplace_view in func.tags:
        return False
    if not func._schema.is_mutable:
        return not any(r.alias_info is not None for r in func._schema.returns)
    writes = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    returns = func._schema.returns
    return writes == [0] and len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)


def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Contexts:
    """Two contexts for the `context_fn` of `checkpoint`: what the policy keeps is not computed again.

    **Arguments:**

    - `policy_fn_or_list`: a function `(ctx, op, *args, **kwargs)` that returns a `CheckpointPolicy` (or a bool); a
        collection of ops that are saved; or a policy of `remat.policies`. `MUST_` and `PREFER_` are the same here.
    - `allow_cache_entry_mutation`: what is kept may be changed in place by the function later: a copy is kept then.
        Without it, that is an error on backward.

    **Returns:** the context of the forward and that of the rerun.

    **Raises:** `TypeError` where it is none of these, and where the function returns something else; `ValueError` for
    what is no op. Ops that are named and can never run are warned of.

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
        policy = policy_of_ops(tuple(policy_fn_or_list))
    elif callable(policy_fn_or_list) and not isinstance(policy_fn_or_list, (OpOverload, OpOverloadPacket, type)):
        policy = as_policy(policy_fn_or_list)
        for named in dict.fromkeys(named_in_vain(policy_fn_or_list)):
            warn_in_vain(named)
    else:
        raise TypeError(
            "create_selective_checkpoint_contexts: policy_fn_or_list must be either a function or a collection of ops; "
            f"got {shown(policy_fn_or_list)}."
        )
    return _contexts(policy, allow_cache_entry_mutation)


def _contexts(policy: Policy, allow_cache_entry_mutation: bool, hooks: Hooks | None = None) -> Contexts:
    cache = _Cache()
    return Selective(policy, allow_cache_entry_mutation, cache, hooks), GivenBack(cache)


def for_one_region(forward: Any, rerun: Any, respects_hooks: bool | None) -> Contexts:
    """The contexts, for one call of `checkpoint` alone: a pair may be given to several.

    **Arguments:**

    - `respects_hooks`: whether what is kept goes through the user's hooks; None warns that it will.
    """
    if not isinstance(forward, Selective) and internals.selective_policy(forward) is None:
        return forward, rerun
    hooks = _hooks_of_user() if respects_hooks is not False else None
    if hooks is not None and respects_hooks is None:
        warn(_BYPASSED, FutureWarning)
    if not isinstance(forward, Selective):
        return forward, rerun
    return _contexts(forward.policy, forward.allow_cache_entry_mutation, hooks if respects_hooks else None)


def _hooks_of_user() -> Hooks | None:
    """The user's `saved_tensors_hooks` around a call, None where those of a checkpoint are around it."""
    hooks = internals.saved_tensors_hooks()
    of_checkpoints = ("remat.compat._region", "torch.utils.checkpoint")
    return None if hooks is None or getattr(hooks[0], "__module__", None) in of_checkpoints else hooks


def call_compiled(
    fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context_fn: Any, preserve_rng_state: bool
) -> Any:
    """Call a function that torch.compile is tracing."""
    if context_fn is noop_context_fn:
        return _compile.call(remat, None, preserve_rng_state, fun, args, kwargs)
    if isinstance(context_fn, functools.partial) and context_fn.args and isinstance(context_fn.args[0], Policy):
        return _compile.call(remat, context_fn.args[0], preserve_rng_state, fun, args, kwargs)
    return _compile.call(remat, context_fn, preserve_rng_state, fun, args, kwargs, _policy_of)


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
