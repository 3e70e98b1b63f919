"""Policies that decide by the names that `checkpoint_name` gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from remat._errors import shown
from remat._names import current_name
from remat.policies._policy import Policy, Printable, call


@dataclass(frozen=True, repr=False)
class _ByName(Printable):
    """A decision for each listed name (None: for values without one), another for the rest."""

    listed: dict[str | None, CheckpointPolicy] = field(hash=False)  # a dict has no hash
    other: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE

    def __call__(self, _ctx: Any, _op: Any, /, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return self.listed.get(current_name(), self.other)


def _listed(who: str, names: Iterable[str], decision: CheckpointPolicy) -> dict[str | None, CheckpointPolicy]:
    """The decision for each name, in their order."""
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str):
            hint = f" Unpack it: *{name!r}." if isinstance(name, (list, tuple, set, frozenset)) else ""
            raise TypeError(f"{who}: names are strings; got {shown(name)}.{hint}")
    return dict.fromkeys(sorted(names), decision)


def save_only_these_names(*names: str) -> Policy:
    """Save the values with these names, and no others.

    **Arguments:**

    - `names`: names given with `checkpoint_name`.

    **Returns:** the policy.

    **Raises:** `TypeError` where a name is not a string.

    **Source:** `jax.checkpoint_policies.save_only_these_names`.

    Examples:
        >>> import torch
        >>> from torch.func import grad
        >>> from remat import checkpoint_name, remat
        >>> from remat.policies import save_only_these_names
        >>> def block(w, x):
        ...     return checkpoint_name(torch.relu(x @ w), "hidden") @ w.mT
        >>> kept = remat(block, policy=save_only_these_names("hidden"))
        >>> grad(lambda w: kept(w, torch.ones(1, 2)).sum())(torch.eye(2))
        tensor([[2., 2.],
                [2., 2.]])
    """
    listed = _listed("save_only_these_names", names, CheckpointPolicy.MUST_SAVE)
    return _ByName(call("save_only_these_names", *listed), listed)


def save_any_names_but_these(*names: str) -> Policy:
    """Save all values with a name, except those with one of these names.

    **Arguments:**

    - `names`: names given with `checkpoint_name`.

    **Returns:** the policy.

    **Raises:** `TypeError` where a name is not a string.

    **Source:** `jax.checkpoint_policies.save_any_names_but_these`.

    Examples:
        >>> from remat.policies import save_any_names_but_these
        >>> save_any_names_but_these("scores")
        save_any_names_but_these('scores')
    """
    listed = _listed("save_any_names_but_these", names, CheckpointPolicy.PREFER_RECOMPUTE)
    text = call("save_any_names_but_these", *listed)
    return _ByName(text, {None: CheckpointPolicy.PREFER_RECOMPUTE, **listed}, CheckpointPolicy.MUST_SAVE)


def save_anything_except_these_names(*names: str) -> Policy:
    """Save all values, with a name or without, except those with one of these names.

    JAX's policy of this name saves the excepted values too, because it saves them before they get the name.

    **Arguments:**

    - `names`: names given with `checkpoint_name`.

    **Returns:** the policy.

    **Raises:** `TypeError` where a name is not a string.

    **Source:** `jax.checkpoint_policies.save_anything_except_these_names`.

    Examples:
        >>> from remat.policies import save_anything_except_these_names
        >>> save_anything_except_these_names("scores")
        save_anything_except_these_names('scores')
    """
    listed = _listed("save_anything_except_these_names", names, CheckpointPolicy.MUST_RECOMPUTE)
    return _ByName(call("save_anything_except_these_names", *listed), listed, CheckpointPolicy.PREFER_SAVE)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Policy:
    """Save the values with some names, offload those with others to CPU memory, and keep nothing else.

    **Arguments:**

    - `names_which_can_be_saved`: names of the values that stay on their device.
    - `names_which_can_be_offloaded`: names of the values that are moved to CPU memory.
    - `offload_src`: the source of the move; always "device".
    - `offload_dst`: the target of the move; always "pinned_host".

    **Returns:** the policy.

    **Raises:** `ValueError` if a name is in both, or for another source or target; `TypeError` if a name is not a
    string.

    **Source:** `jax.checkpoint_policies.save_and_offload_only_these_names`.

    Examples:
        >>> from remat.policies import save_and_offload_only_these_names
        >>> policy = save_and_offload_only_these_names(
        ...     names_which_can_be_saved=["attn"],
        ...     names_which_can_be_offloaded=["hidden"],
        ... )
    """
    who = "save_and_offload_only_these_names"
    check_places(who, offload_src, offload_dst)
    saved = _listed(who, names_which_can_be_saved, CheckpointPolicy.MUST_SAVE)
    offloaded = _listed(who, names_which_can_be_offloaded, CheckpointPolicy.MUST_CPU_OFFLOAD)
    given = f"names_which_can_be_saved={list(saved)}, names_which_can_be_offloaded={list(offloaded)}"
    if both := ", ".join(repr(name) for name in saved if name in offloaded):
        raise ValueError(f"{who}: a name is either saved or offloaded; got {both} in both of {given}.")
    return _ByName(f"{who}({given})", saved | offloaded)


def check_places(who: str, src: str, dst: str) -> None:
    """Check the source and target of JAX's offloading policies."""
    if (src, dst) != ("device", "pinned_host"):
        raise ValueError(
            f"{who}: offloading goes from offload_src='device' to offload_dst='pinned_host'; got {src!r} to {dst!r}."
        )
