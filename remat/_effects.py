"""What a torch function may do besides computing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import _torch_internals as internals

_STATISTICS: dict[Any, tuple[int, ...]] = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.batch_norm_update_stats: (1, 2),
    torch.fused_moving_avg_obs_fake_quant: (3, 4, 5, 6),
    torch.instance_norm: (3, 4),
    torch.native_batch_norm: (3, 4),
}
"""Functions that write to arguments, by position, without saying so in their names."""
GIVES_MEMORY_AWAY = {
    Tensor.__array__,
    Tensor.__cuda_array_interface__.__get__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.numpy,
}
"""Functions after which others may read the memory of a tensor, and write to it."""
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_LOGIC = ["and", "or", "xor", "lshift", "rshift"]
_RANDOM_NAMES = """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ cauchy_ dropout dropout_ dropout1d dropout2d dropout3d
    exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ geometric_
    gumbel_softmax log_normal_ multinomial native_dropout normal normal_ poisson rand rand_like randint
    randint_like randn randn_like random_ randperm rrelu rrelu_ trunc_normal_ uniform_
"""
_RANDOM = frozenset(_RANDOM_NAMES.split())
_ASSIGNMENTS = {"__setitem__", *(f"__i{op}__" for op in _ARITHMETIC + _LOGIC)}


@functools.cache
def may_write(func: Any) -> bool:
    """Whether a torch function writes to an argument, by its name."""
    name = getattr(func, "__name__", "")
    if name in ("requires_grad_", "detach_", "rename_", "share_memory_"):
        return False
    return func in _STATISTICS or name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


class Kind(NamedTuple):
    """What a torch function may do besides computing."""

    writes: bool
    draws: bool
    sets_hooks: bool
    """Whether it is how torch itself moves hooks to a new node: with a lock that looking at `grad_fn` waits for."""
    sets_data: bool
    """Whether it is `x.data = ...`."""
    gives_data: bool
    """Whether it is `x.data` or `x.detach()`: the same memory, out of autograd's sight."""


@functools.cache
def kind_of(func: Any) -> Kind:
    is_data = func in (Tensor.data.__get__, Tensor.detach, torch.detach)  # type: ignore[attr-defined]
    draws = getattr(func, "__name__", "") in _RANDOM
    return Kind(may_write(func), draws, internals.moves_hooks(func), func == SET_DATA, is_data)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a call of `func` writes to."""
    found: list[Any] = []
    positions = _STATISTICS.get(func)
    if positions is not None:
        found += [args[i] for i in positions if i < len(args)]
        found += [kwargs.get(name) for name in ("running_mean", "running_var", "running_min", "running_max")]
    elif may_write(func) or kwargs.get("inplace"):
        found += args[:1] or list(kwargs.values())[:1]
        if found and isinstance(found[0], (list, tuple)):  # `_foreach_add_`
            found = [*found[0]]
    out = kwargs.get("out")
    found += out if isinstance(out, (tuple, list)) else [out]
    return [t for t in found if isinstance(t, Tensor)]
