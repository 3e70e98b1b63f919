"""Policies: they decide which results of ops are kept between forward and backward instead of recomputed."""

import difflib as _difflib

from torch.utils.checkpoint import CheckpointPolicy

from remat.policies._by_name import (
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_only_these_names,
)
from remat.policies._by_op import offload_ops, recompute_ops, save_at_least, save_at_most, save_every, save_if, save_ops
from remat.policies._combined import all_of, any_of, first_of, save_from_both_policies
from remat.policies._dots import (
    checkpoint_dots,
    checkpoint_dots_with_no_batch_dims,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    offload_dot_with_no_batch_dims,
)
from remat.policies._policy import Policy, as_policy, everything_saveable, nothing_saveable

__all__ = [
    "CheckpointPolicy",
    "Policy",
    "all_of",
    "any_of",
    "as_policy",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "first_of",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "offload_ops",
    "recompute_ops",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_at_least",
    "save_at_most",
    "save_every",
    "save_from_both_policies",
    "save_if",
    "save_only_these_names",
    "save_ops",
]


def __getattr__(name: str) -> object:
    close = _difflib.get_close_matches(name, __all__, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}", name=name)
