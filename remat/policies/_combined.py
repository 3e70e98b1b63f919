"""Combinations of policies.

NOTE [the order of decisions]: a decision has two parts: how much a value is wanted (0 to 3), and where it is kept (0:
in CPU memory, 1: on its device). Both are ordered, so policies form a lattice: `|` takes the greater of each part, `&`
the smaller. A value is kept if it is wanted 2 or 3; else its place is 0. `~` takes 3 - wanted, and what it keeps stays
on its device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from remat.policies._policy import Policy, PolicyLike, as_policy, call, everything_saveable, nothing_saveable

_ORDER = {
    CheckpointPolicy.MUST_RECOMPUTE: (0, 0),
    CheckpointPolicy.PREFER_RECOMPUTE: (1, 0),
    CheckpointPolicy.PREFER_CPU_OFFLOAD: (2, 0),
    CheckpointPolicy.PREFER_SAVE: (2, 1),
    CheckpointPolicy.MUST_CPU_OFFLOAD: (3, 0),
    CheckpointPolicy.MUST_SAVE: (3, 1),
}
_DECISION = {order: decision for decision, order in _ORDER.items()}


def _each_part(pick: Callable[[Sequence[int]], int], decisions: Sequence[CheckpointPolicy]) -> CheckpointPolicy:
    wanted, where = zip(*map(_ORDER.__getitem__, decisions), strict=True)
    return _DECISION[pick(wanted), pick(where)]


def _first(decisions: Sequence[CheckpointPolicy]) -> CheckpointPolicy:
    return next((d for d in decisions if d.name.startswith("MUST")), decisions[-1])


def _opposite(decisions: Sequence[CheckpointPolicy]) -> CheckpointPolicy:
    wanted = 3 - _ORDER[decisions[0]][0]
    return _DECISION[wanted, int(wanted >= 2)]


def _without(decisions: Sequence[CheckpointPolicy]) -> CheckpointPolicy:
    kept, dropped = decisions
    if _ORDER[dropped][0] < 2:
        return kept  # `kept & ~dropped` could turn a MUST into a PREFER
    return _each_part(min, [kept, _opposite([dropped])])


_COMBINE: dict[str, Callable[[Sequence[CheckpointPolicy]], CheckpointPolicy]] = {
    "any_of": functools.partial(_each_part, max),
    "all_of": functools.partial(_each_part, min),
    "first_of": _first,
    "~": _opposite,
    "-": _without,
}


@dataclass(frozen=True, repr=False)
class Combined(Policy):
    """What a combinator makes. `how`: a key of `_COMBINE`."""

    how: str
    parts: tuple[Policy, ...]

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Ask every part about every op, whatever the others say: a part may count ops.
        return _COMBINE[self.how]([p(ctx, op, *args, **kwargs) for p in self.parts])

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        known = [d for p in self.parts if (d := p.by_op(op)) is not None]
        return _COMBINE[self.how](known) if len(known) == len(self.parts) else None

    def start(self) -> Policy:
        parts = tuple(as_policy(p.start()) for p in self.parts)
        return self if parts == self.parts else replace(self, parts=parts)

    def __repr__(self) -> str:
        if self.how not in "~-":
            return call(self.how, *self.parts)
        shown = [f"({p!r})" if isinstance(p, Combined) and p.how == "-" else repr(p) for p in self.parts]
        return f"~{shown[0]}" if self.how == "~" else " - ".join(shown)


def _combined(how: str, policies: Sequence[PolicyLike]) -> Policy:
    """A combination, flattened: `(p | q) | r` equals `p | (q | r)`."""
    parts: list[Policy] = []
    for policy in map(as_policy, policies):
        parts += policy.parts if isinstance(policy, Combined) and policy.how == how else [policy]
    return Combined(how, tuple(parts)) if len(parts) > 1 else parts[0]


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
    return _combined("any_of", policies or [nothing_saveable])


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
    return _combined("all_of", policies or [everything_saveable])


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
    return _combined("first_of", policies)


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
