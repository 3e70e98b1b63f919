"""Policies: they decide which results of ops are kept between forward and backward instead of recomputed."""

import difflib as _difflib

from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from remat.policies._by_name import save_and_offload_only_these_names as save_and_offload_only_these_names
from remat.policies._by_name import save_any_names_but_these as save_any_names_but_these
from remat.policies._by_name import save_anything_except_these_names as save_anything_except_these_names
from remat.policies._by_name import save_only_these_names as save_only_these_names
from remat.policies._by_op import offload_ops as offload_ops
from remat.policies._by_op import recompute_ops as recompute_ops
from remat.policies._by_op import save_at_least as save_at_least
from remat.policies._by_op import save_at_most as save_at_most
from remat.policies._by_op import save_every as save_every
from remat.policies._by_op import save_if as save_if
from remat.policies._by_op import save_ops as save_ops
from remat.policies._combined import all_of as all_of
from remat.policies._combined import any_of as any_of
from remat.policies._combined import first_of as first_of
from remat.policies._combined import save_from_both_policies as save_from_both_policies
from remat.policies._dots import checkpoint_dots as checkpoint_dots
from remat.policies._dots import checkpoint_dots_with_no_batch_dims as checkpoint_dots_with_no_batch_dims
from remat.policies._dots import dots_saveable as dots_saveable
from remat.policies._dots import dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable
from remat.policies._dots import offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims
from remat.policies._policy import Policy as Policy
from remat.policies._policy import as_policy as as_policy
from remat.policies._policy import everything_saveable as everything_saveable
from remat.policies._policy import nothing_saveable as nothing_saveable

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
