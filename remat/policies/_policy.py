"""What a policy is, and the ones that are given by ops or functions."""

from __future__ import annotations

import abc
import difflib
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.utils.checkpoint

from remat._errors import shown
from remat.policies import _ops
from remat.policies._enum import CheckpointPolicy

MUST_SAVE = CheckpointPolicy.MUST_SAVE
PREFER_SAVE = CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
MUST_CPU_OFFLOAD = CheckpointPolicy.MUST_CPU_OFFLOAD
PREFER_CPU_OFFLOAD = CheckpointPolicy.PREFER_CPU_OFFLOAD

Decide = Callable[..., CheckpointPolicy]

PolicyLike: TypeAlias = (
    Callable[..., CheckpointPolicy | bool] | list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any] | None
)
"""The type of `policy=`: a policy, a function with the same signature, a collection of ops, or None."""

policy_around: ContextVar[Policy | None] = ContextVar("remat_policy_around", default=None)
"""The policy of the function under remat that is running, for `custom_remat`; None where its rules are not followed."""

by_identity: weakref.WeakValueDictionary[int, Policy] = weakref.WeakValueDictionary()
"""All policies, by `id`: a number is all that torch.compile lets through."""


class Policy(abc.ABC):
    """Says of each result of an op whether it is kept or computed again.

    Policies are values: they can be compared, hashed, printed and pickled. The functions of this module make
    them, and they combine to new ones: `p | q` keeps what either keeps, `p & q` what both keep, `~p` what `p`
    does not keep, and `p - q` what `p` keeps without what `q` keeps.

    `policy(ctx, op, *args, **kwargs)` is the decision on one op that has run, a `CheckpointPolicy`. It is the
    protocol of `torch.utils.checkpoint.create_selective_checkpoint_contexts`, which takes these policies too.

    Examples:
        >>> from remat.policies import dots_saveable, save_ops
        >>> policy = dots_saveable - save_ops("bmm")
        >>> policy
        dots_saveable - save_ops('aten.bmm')
        >>> policy == dots_saveable - save_ops("aten::bmm")
        True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "remat: make a policy outside of the function that is compiled, and use it there by name."
            )
        policy = super().__new__(cls)
        by_identity[id(policy)] = policy
        return policy

    @abc.abstractmethod
    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """The decision on one op.

        **Arguments:**

        - `ctx`: torch's `SelectiveCheckpointContext`, or one with the same attributes: `op_output` is what
            the op returned, a tensor, a tuple or list of tensors, or a number.
        - `op`: the op, an overload such as `torch.ops.aten.mm.default`.
        - `args`, `kwargs`: what the op was called with, below all transforms.
        """

    @property
    def looks_at_calls(self) -> bool:
        """Whether a decision may depend on `ctx.call`, which it takes time to have ready."""
        return True

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        """The decision on all that an op returns, where nothing but the op counts; else None."""
        del op
        return None

    def start(self) -> Decide:
        """What decides on the ops of one run: the policy itself, unless it counts.

        `remat` calls it for each run. With torch's selective checkpointing, call it yourself in the
        `context_fn`: `lambda: create_selective_checkpoint_contexts(policy.start())`.

        **Returns:** a function of the same signature as the policy.
        """
        return self

    def __or__(self, other: PolicyLike) -> Policy:
        return _combined.any_of(self, other)

    def __and__(self, other: PolicyLike) -> Policy:
        return _combined.all_of(self, other)

    def __invert__(self) -> Policy:
        return _combined.opposite(self)

    def __sub__(self, other: PolicyLike) -> Policy:
        return _combined.without(self, other)


CALLED = "{0} is a policy already: leave out the ()."
"""For who makes a policy of one that JAX, too, has as a value."""

# Policies that look at nothing, at the op, or ask a function.


@dataclass(frozen=True, repr=False)
class Constant(Policy):
    """The same decision for every op: `everything_saveable` and `nothing_saveable`.

    To save everything is not to go without remat: values that neither the backward pass nor the rerun reads
    are not kept. To save nothing is to keep what a function without a policy keeps, and not to compute again what
    nobody needs.

    **Source:** `jax.checkpoint_policies`.

    Examples:
        >>> from remat.policies import everything_saveable, nothing_saveable
        >>> everything_saveable, nothing_saveable
        (everything_saveable, nothing_saveable)
    """

    name: str
    decision: CheckpointPolicy
    looks_at_calls = False

    def __call__(self, ctx: Any = None, op: Any = None, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del ctx, args, kwargs
        if op is None:
            raise TypeError(CALLED.format(self))
        return self.by_op(op)

    def by_op(self, op: Any) -> CheckpointPolicy:
        del op
        return self.decision

    def __repr__(self) -> str:
        return self.name


everything_saveable: Policy = Constant("everything_saveable", MUST_SAVE)
nothing_saveable: Policy = Constant("nothing_saveable", MUST_RECOMPUTE)

_MAKERS = {MUST_SAVE: "save_ops", MUST_RECOMPUTE: "recompute_ops", MUST_CPU_OFFLOAD: "offload_ops"}


@dataclass(frozen=True, repr=False)
class ByOp(Policy):
    """One decision for the listed ops, another for the rest."""

    ops: frozenset[str]
    listed: CheckpointPolicy
    other: CheckpointPolicy
    looks_at_calls = False

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del ctx, args, kwargs
        return self.by_op(op)

    def by_op(self, op: Any) -> CheckpointPolicy:
        return self.listed if op in _ops.overloads(self.ops) else self.other

    def __repr__(self) -> str:
        return call(_MAKERS[self.listed], *sorted(self.ops))


def name_of(fun: Any) -> str:
    """How a function that decides is called in messages and reprs."""
    return getattr(fun, "__qualname__", None) or repr(fun)


def ask(fun: Callable[..., Any], ctx: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a user's function says of an op."""
    try:
        return fun(ctx, op, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # the function's own: it has begun
        raise TypeError(
            f"remat: {name_of(fun)} can't be called as policy(ctx, op, *args, **kwargs), with the arguments of {op}."
        ) from error


@dataclass(frozen=True, repr=False)
class Function(Policy):
    """What a user's function says. That of `save_if` says yes or no."""

    fun: Callable[..., Any]
    maker: str = "as_policy"

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        result, name = ask(self.fun, ctx, op, args, kwargs), name_of(self.fun)
        if isinstance(result, bool):
            return MUST_SAVE if result else PREFER_RECOMPUTE
        if self.maker == "save_if":
            raise TypeError(f"save_if: the predicate {name} must return a bool; got {shown(result)} for {op}.")
        if isinstance(result, (CheckpointPolicy, torch.utils.checkpoint.CheckpointPolicy)):
            return result
        raise TypeError(
            f"remat: the policy {name} must return a bool or a CheckpointPolicy; got {shown(result)} for {op}."
        )

    def __repr__(self) -> str:
        return f"{self.maker}({name_of(self.fun)})"


def as_policy(value: PolicyLike) -> Policy:
    """Make a policy of what the `policy` argument of `remat` takes.

    **Arguments:**

    - `value`: a policy; a function `(ctx, op, *args, **kwargs)` that returns a `CheckpointPolicy` or a bool
        (True: `MUST_SAVE`, False: `PREFER_RECOMPUTE`), as torch's selective checkpointing takes it; a
        collection of ops to be saved; or None, which saves nothing.

    **Returns:** the policy. One made of a function checks each of its results.

    **Raises:** `TypeError` for anything else, and as `save_ops`.

    Examples:
        >>> import torch
        >>> from remat.policies import as_policy
        >>> as_policy(["aten.mm", "aten.bmm"])
        save_ops('aten.bmm', 'aten.mm')
        >>> def big(ctx, op, *args, **kwargs):
        ...     return isinstance(ctx.op_output, torch.Tensor) and ctx.op_output.numel() > 1000
        >>> as_policy(big) | ["aten.mm"]
        any_of(as_policy(big), save_ops('aten.mm'))
    """
    if value is None:
        return nothing_saveable
    if isinstance(value, Policy):
        return value
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping)):
        for entry in value:
            if policy := _written(entry):
                raise TypeError(f"remat: {entry!r} is a policy, not an op. Write policy={policy}, and | for several.")
        return ByOp(_ops.spell_all("remat: policy", value), MUST_SAVE, PREFER_RECOMPUTE)
    if isinstance(value, (str, _ops.OpOverload, _ops.OpOverloadPacket)):
        if policy := _written(value):
            raise TypeError(f"remat: {value!r} is the name of a policy. Write policy={policy}.")
        close = difflib.get_close_matches(str(value), sys.modules[__package__].__all__, n=1, cutoff=0.8)
        if close:
            raise TypeError(f"remat: there is no policy {value!r}. Did you mean policy={_written(close[0])}?")
        _ops.spell("remat: policy", value)  # raises where it is no op that a policy can name
        raise TypeError(f"remat: {value!r} is one op, not a policy. Write [{value!r}].")
    if inspect.isbuiltin(value) or inspect.ismethoddescriptor(value):
        raise TypeError(
            f"remat: the builtin {value.__name__} is no policy: it can't be called as policy(ctx, op, *args, **kwargs)."
            f" An op goes in a list, by its name: policy=[{value.__name__!r}]."
        )
    if not callable(value) or isinstance(value, type):
        raise TypeError(
            "remat: policy must be a policy, a function (ctx, op, *args, **kwargs), a collection of ops or "
            f"None; got {shown(value)}."
        )
    if getattr(sys.modules[__package__], name_of(value), None) is value:
        raise TypeError(f"remat: {name_of(value)} is a function that makes a policy: call it.")
    return Function(value)


def _written(value: Any) -> str | None:
    """How a policy is written that was given by its name or in a list; None for what is no policy."""
    if isinstance(value, Policy):
        return repr(value)
    module = sys.modules[__package__]
    if not isinstance(value, str) or value not in module.__all__:
        return None
    return f"remat.policies.{value}" + ("" if isinstance(getattr(module, value), Policy) else "(...)")


def call(maker: str, *args: Any) -> str:
    """The expression that makes a policy, for its repr."""
    return f"{maker}({', '.join(map(repr, args))})"


from remat.policies import _combined  # noqa: E402  # it needs what is above
