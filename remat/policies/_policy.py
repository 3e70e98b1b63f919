"""The base class of policies, and policies that are given by ops or functions."""

from __future__ import annotations

import abc
import difflib
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy

from remat import _torch_internals as internals
from remat import policies
from remat._context import RandomState
from remat._errors import RematError, comes_from_inside, function_name, shown
from remat.policies import _ops

Decide = Callable[..., CheckpointPolicy]

PolicyLike: TypeAlias = (
    Callable[..., CheckpointPolicy | bool] | list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any] | None
)
"""The type of `policy=`: a policy, a function with the same signature, a collection of ops, or None."""

policy_around: ContextVar[Policy | None] = ContextVar("remat_policy_around", default=None)
"""The policy of the function under remat that is running, for `custom_remat`; None where `f` itself runs."""

_DRAWS = (
    "remat: the policy {} draws random numbers from torch's global generator, for {}. The function would draw others "
    "in its rerun, which asks no policy. Draw from a generator of your own: torch.rand((), generator=g), or Python's "
    "random.random()."
)

by_identity: weakref.WeakValueDictionary[int, Policy] = weakref.WeakValueDictionary()
"""All policies, by `id`: torch.compile passes on numbers, but not objects."""


class Policy(abc.ABC):
    """Decides for each result of an op whether it is kept or recomputed.

    Policies are values: they can be compared, hashed, printed and pickled. The functions of this module make policies,
    and operators combine them: `p | q` keeps a value if `p` or `q` keeps it, `p & q` if both keep it, `~p` if `p` does
    not keep it, and `p - q` if `p` keeps it and `q` does not.

    `policy(ctx, op, *args, **kwargs)` returns the decision on one op that has run, a `CheckpointPolicy`. This is also
    the signature of torch's selective checkpointing, so `create_selective_checkpoint_contexts` takes these policies.

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
            raise RuntimeError("remat: make a policy outside the function that is compiled, and use it there by name.")
        policy = super().__new__(cls)
        by_identity[id(policy)] = policy
        return policy

    @abc.abstractmethod
    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """The decision on one op.

        **Arguments:**

        - `ctx`: torch's `SelectiveCheckpointContext`, or an object with the same attributes: `op_output` is the result
            of the op, a tensor, a tuple or list of tensors, or a number.
        - `op`: the op, an overload such as `torch.ops.aten.mm.default`.
        - `args`, `kwargs`: the arguments of the op, below all transforms.
        """

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        """The decision on an op if it depends on the op alone; else None."""
        del op
        return None

    def start(self) -> Decide:
        """Return the function that decides in one run: the policy itself, unless it counts ops.

        `remat` calls it for each run. With torch's selective checkpointing, call it yourself in the
        `context_fn`: `lambda: create_selective_checkpoint_contexts(policy.start())`.

        **Returns:** a function of the same signature as the policy.
        """
        return self

    def __bool__(self) -> bool:
        raise TypeError("A policy is neither true nor false: write p & q, p | q, ~p in place of and, or, not.")

    def __or__(self, other: PolicyLike) -> Policy:
        return policies.any_of(self, other)

    def __and__(self, other: PolicyLike) -> Policy:
        return policies.all_of(self, other)

    def __invert__(self) -> Policy:
        return policies._combined.Combined("~", (self,))

    def __sub__(self, other: PolicyLike) -> Policy:
        return policies._combined.Combined("-", (self, as_policy(other)))


@dataclass(frozen=True, repr=False)
class Printable(Policy):
    """A policy that prints as the expression that makes it, `text`."""

    text: str

    def __repr__(self) -> str:
        return self.text


def call(maker: str, *args: Any) -> str:
    """The expression that makes a policy, for its repr."""
    return f"{maker}({', '.join(map(repr, args))})"


# Policies that decide by op, are constant, or ask a function.


@dataclass(frozen=True, repr=False)
class ByOp(Printable):
    """One decision for the listed ops, another for the rest."""

    ops: tuple[str, ...] = ()
    listed: CheckpointPolicy = CheckpointPolicy.MUST_SAVE
    other: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE

    def __call__(self, _: Any = None, op: Any = None, /, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op is None:
            raise TypeError(f"{self} is a policy already: leave out the ().")
        return self.listed if op in _ops.overloads(self.ops) else self.other

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        return self(None, op)


@dataclass(frozen=True, repr=False)
class Constant(ByOp):
    """`everything_saveable` keeps each result that the backward pass or the rerun reads; `nothing_saveable` keeps none.

    So `everything_saveable` keeps less than a function without remat. `nothing_saveable` keeps as much as a function
    without a policy, but its rerun skips ops that nothing needs.

    **Source:** `jax.checkpoint_policies`.

    Examples:
        >>> from remat.policies import everything_saveable, nothing_saveable
        >>> everything_saveable, nothing_saveable
        (everything_saveable, nothing_saveable)
    """


everything_saveable: Policy = Constant("everything_saveable", other=CheckpointPolicy.MUST_SAVE)
nothing_saveable: Policy = Constant("nothing_saveable", other=CheckpointPolicy.MUST_RECOMPUTE)


@dataclass(frozen=True, repr=False)
class Function(Printable):
    """A policy that asks a user's function."""

    fun: Callable[..., Any]
    is_predicate: bool = False

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, state = function_name(self.fun), RandomState(())
        try:
            result = self.fun(ctx, op, *args, **kwargs)
        except TypeError as error:
            if comes_from_inside(error):
                raise
            raise TypeError(
                f"remat: {name} can't be called as policy(ctx, op, *args, **kwargs), with the arguments of {op}."
            ) from error
        if not state.is_current():
            raise RematError(_DRAWS.format(name, op))
        if isinstance(result, bool) or str(getattr(result, "dtype", "")) == "bool":  # NumPy's
            return CheckpointPolicy.MUST_SAVE if result else CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(result, CheckpointPolicy) and not self.is_predicate:
            return result
        got = f"got {shown(result)} for {op}"
        if self.is_predicate:
            raise TypeError(f"save_if: the predicate {name} must return a bool; {got}.")
        raise TypeError(f"remat: the policy {name} must return a bool or a CheckpointPolicy; {got}.")


def as_policy(value: PolicyLike) -> Policy:
    """Make a policy from any argument that `remat(policy=...)` takes.

    **Arguments:**

    - `value`: a policy; a function `(ctx, op, *args, **kwargs)` that returns a `CheckpointPolicy` or a bool (True:
        `MUST_SAVE`, False: `PREFER_RECOMPUTE`), as for torch's selective checkpointing; a collection of ops to save; or
        None, which saves nothing.

    **Returns:** the policy. If it asks a function, it checks the type of each result.

    **Raises:** `TypeError` for anything else, and as `save_ops`.

    Examples:
        >>> import torch
        >>> from remat.policies import as_policy
        >>> as_policy(["aten.mm", "aten.bmm"])
        save_ops('aten.bmm', 'aten.mm')
        >>> def big(ctx, op, *args, **kwargs):
        ...     out = ctx.op_output
        ...     return isinstance(out, torch.Tensor) and out.numel() > 1000
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
        names = _ops.spell_all("remat: policy", value)
        return ByOp(call("save_ops", *names), names)
    if isinstance(value, (str, *internals.OP_KINDS)):
        if policy := _written(value):
            raise TypeError(f"remat: {value!r} is the name of a policy. Write policy={policy}.")
        if close := difflib.get_close_matches(str(value).lower(), policies.__all__, n=1, cutoff=0.8):
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
    if getattr(policies, function_name(value), None) is value:
        raise TypeError(f"remat: {function_name(value)} is a function that makes a policy: call it.")
    return Function(f"as_policy({function_name(value)})", value)


def _written(value: Any) -> str | None:
    """The expression for a policy that was given by name or in a list; None if it is no policy."""
    if isinstance(value, Policy):
        return repr(value)
    if (name := next((n for n in (value, f"{value}_saveable") if n in policies.__all__), None)) is None:
        return None
    return f"remat.policies.{name}" + ("" if isinstance(getattr(policies, name), Policy) else "(...)")
