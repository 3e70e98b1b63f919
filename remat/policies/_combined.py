"""Combinations of policies.

NOTE [the order of decisions]: a decision has two parts: how much a value is wanted (0 to 3), and where it is kept (0:
in CPU memory, 1: on its device). Both are ordered, so policies form a lattice: `|` takes the greater of each part, `&`
the smaller. A value that is not kept has the place 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.policies._enum import (
    MUST_CPU_OFFLOAD,
    MUST_RECOMPUTE,
    MUST_SAVE,
    PREFER_CPU_OFFLOAD,
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    CheckpointPolicy,
)
from remat.policies._policy import (
    Decide,
    Policy,
    PolicyLike,
    as_policy,
    call,
    everything_saveable,
    nothing_saveable,
)

_ORDER = {
    MUST_RECOMPUTE: (0, 0),
    PREFER_RECOMPUTE: (1, 0),
    PREFER_CPU_OFFLOAD: (2, 0),
    PREFER_SAVE: (2, 1),
    MUST_CPU_OFFLOAD: (3, 0),
    MUST_SAVE: (3, 1),
}
_DECISION = {order: decision for decision, order in _ORDER.items()}
_OPPOSITE = {
    MUST_RECOMPUTE: MUST_SAVE,
    PREFER_RECOMPUTE: PREFER_SAVE,
    PREFER_CPU_OFFLOAD: PREFER_RECOMPUTE,
    PREFER_SAVE: PREFER_RECOMPUTE,
    MUST_CPU_OFFLOAD: MUST_RECOMPUTE,
    MUST_SAVE: MUST_RECOMPUTE,
}


def _any(decisions: list[CheckpointPolicy]) -> CheckpointPolicy:
    wanted, where = zip(*map(_ORDER.__getitem__, decisions), strict=True)
    return _DECISION[max(wanted), max(where)]


def _all(decisions: list[CheckpointPolicy]) -> CheckpointPolicy:
    wanted, where = zip(*map(_ORDER.__getitem__, decisions), strict=True)
    return _DECISION[min(wanted), min(where)]


def _first(decisions: list[CheckpointPolicy]) -> CheckpointPolicy:
    opinions = (d for d in decisions if d in (MUST_SAVE, MUST_CPU_OFFLOAD, MUST_RECOMPUTE))
    return next(opinions, decisions[-1])


def _without(decisions: list[CheckpointPolicy]) -> CheckpointPolicy:
    kept, dropped = decisions
    if dropped in (MUST_RECOMPUTE, PREFER_RECOMPUTE):
        return kept  # `kept & ~dropped` could turn a MUST into a PREFER
    return _all([kept, _OPPOSITE[dropped]])


_COMBINE: dict[str, Callable[[list[CheckpointPolicy]], CheckpointPolicy]] = {
    "any_of": _any,
    "all_of": _all,
    "first_of": _first,
    "~": lambda decisions: _OPPOSITE[decisions[0]],
    "-": _without,
}


@dataclass(frozen=True, repr=False)
class _Combined(Policy):
    how: str
    parts: tuple[Decide, ...]

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Ask every part about every op, whatever the others say: a part may count ops.
        return _COMBINE[self.how]([p(ctx, op, *args, **kwargs) for p in self.parts])

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        decisions = [p.by_op(op) if isinstance(p, Policy) else None for p in self.parts]
        known = [d for d in decisions if d is not None]
        return _COMBINE[self.how](known) if len(known) == len(decisions) else None

    def start(self) -> Decide:
        parts = tuple(p.start() if isinstance(p, Policy) else p for p in self.parts)
        return self if parts == self.parts else _Combined(self.how, parts)

    def __repr__(self) -> str:
        if self.how not in "~-":
            return call(self.how, *self.parts)
        shown = [f"({p!r})" if isinstance(p, _Combined) and p.how == "-" else repr(p) for p in self.parts]
        return f"~{shown[0]}" if self.how == "~" else " - ".join(shown)


def _combined(how: str, policies: tuple[PolicyLike, ...], alone: Policy) -> Policy:
    """A combination, flattened: `(p | q) | r` equals `p | (q | r)`."""
    parts: list[Any] = []
    for policy in map(as_policy, policies):
        parts += policy.parts if isinstance(policy, _Combined) and policy.how == how else [policy]
    return _Combined(how, tuple(parts)) if len(parts) > 1 else (parts or [alone])[0]


def opposite(policy: Policy) -> Policy:
    """Keep the values that the policy does not keep: `~policy`."""
    return _Combined("~", (policy,))


def without(policy: Policy, other: PolicyLike) -> Policy:
    """Keep the values that the policy keeps and the other does not: `policy - other`."""
    return _Combined("-", (policy, as_policy(other)))


def any_of(*policies: PolicyLike) -> Policy:
    """Keep the values that at least one of the policies keeps; `p | q` is `any_of(p, q)`.

    If one policy offloads a value and another saves it, it is saved.

    **Arguments:**

    - `policies`: policies, or other arguments of `as_policy`. Without arguments, the result is `nothing_saveable`.

    **Returns:** the policy.

    **Raises:** `TypeError` where one of them is no policy.

    Examples:
        >>> from remat.policies import any_of, dots_saveable, save_only_these_names
        >>> any_of(dots_saveable, save_only_these_names("attn"))
        any_of(dots_saveable, save_only_these_names('attn'))
    """
    return _combined("any_of", policies, nothing_saveable)


def all_of(*policies: PolicyLike) -> Policy:
    """Keep the values that all of the policies keep; `p & q` is `all_of(p, q)`.

    If one of the policies offloads the value, it is offloaded.

    **Arguments:**

    - `policies`: policies, or other arguments of `as_policy`. Without arguments, the result is `everything_saveable`.

    **Returns:** the policy.

    **Raises:** `TypeError` where one of them is no policy.

    Examples:
        >>> from remat.policies import all_of, dots_saveable, save_at_most
        >>> all_of(dots_saveable, save_at_most(1_000_000))
        all_of(dots_saveable, save_at_most(1000000))
    """
    return _combined("all_of", policies, everything_saveable)


def first_of(*policies: PolicyLike) -> Policy:
    """Follow the first policy that has an opinion.

    An opinion is a decision with `MUST`: save, offload or recompute. `save_ops("mm")` has an opinion only on `mm`, and
    `recompute_ops("exp")` only on `exp`. If no policy has an opinion, the last one decides.

    **Arguments:**

    - `policies`: policies, or other arguments of `as_policy`; at least one.

    **Returns:** the policy.

    **Raises:** `TypeError` where one of them is no policy; `ValueError` where there is none.

    Examples:
        >>> import torch
        >>> from remat.policies import everything_saveable, first_of
        >>> from remat.policies import offload_ops, recompute_ops
        >>> policy = first_of(
        ...     recompute_ops("exp"), offload_ops("mm"), everything_saveable
        ... )
        >>> aten = torch.ops.aten
        >>> ops = aten.exp.default, aten.mm.default, aten.sin.default
        >>> [policy(None, op).name for op in ops]
        ['MUST_RECOMPUTE', 'MUST_CPU_OFFLOAD', 'MUST_SAVE']
    """
    if not policies:
        raise ValueError("first_of: give at least one policy; got none.")
    return _combined("first_of", policies, nothing_saveable)


def save_from_both_policies(policy_1: PolicyLike, policy_2: PolicyLike) -> Policy:
    """Save the values that at least one of two policies saves: JAX's name for `policy_1 | policy_2`.

    **Arguments:**

    - `policy_1`, `policy_2`: policies, or other arguments of `as_policy`. Unlike in JAX, they may offload.

    **Returns:** the policy.

    **Raises:** `TypeError` where one of them is no policy.

    **Source:** `jax.checkpoint_policies.save_from_both_policies`.

    Examples:
        >>> from remat.policies import dots_saveable, save_from_both_policies
        >>> from remat.policies import save_only_these_names
        >>> attention = save_only_these_names("attn")
        >>> policy = save_from_both_policies(dots_saveable, attention)
        >>> policy == dots_saveable | attention
        True
    """
    return any_of(policy_1, policy_2)
