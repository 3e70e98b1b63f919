"""Policies that decide by the op and its result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from remat import _torch_internals as internals
from remat._errors import function_name, shown
from remat._ops import flat
from remat.policies import _ops
from remat.policies._policy import ByOp, Function, Policy, Printable, call


def save_ops(*ops: Any) -> Policy:
    """Save the results of these ops.

    **Arguments:**

    - `ops`: each is an overload (`torch.ops.aten.mm.default`), a packet, which stands for all its overloads
        (`torch.ops.aten.mm`), or the name of either ("aten.mm.default", "aten.mm", "aten::mm", "mm").

    **Returns:** the policy.

    **Raises:** `TypeError` if an argument is no op; `ValueError` for an op that does not exist, or that no policy ever
    sees: `matmul` runs `mm` or `bmm`, and policies see these.

    Examples:
        >>> import torch
        >>> from remat.policies import save_ops
        >>> save_ops("mm", torch.ops.aten.bmm.default)
        save_ops('aten.bmm.default', 'aten.mm')
        >>> save_ops("matmul")
        Traceback (most recent call last):
        ValueError: save_ops: aten.matmul is never seen... aten.mm, aten.bmm, ...
    """
    names = _ops.spell_all("save_ops", ops)
    return ByOp(call("save_ops", *names), names)


def recompute_ops(*ops: Any) -> Policy:
    """Recompute the results of these ops, and save all others: the same as `~save_ops(*ops)`.

    **Arguments:**

    - `ops`: as for `save_ops`.

    **Returns:** the policy.

    **Raises:** as `save_ops`.

    Examples:
        >>> from remat.policies import dots_saveable, first_of, recompute_ops
        >>> first_of(recompute_ops("bmm"), dots_saveable)  # all dots but bmm
        first_of(recompute_ops('aten.bmm'), dots_saveable)
    """
    names = _ops.spell_all("recompute_ops", ops)
    return ByOp(call("recompute_ops", *names), names, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE)


def offload_ops(*ops: Any, device: str = "cpu") -> Policy:
    """Move the results of these ops to CPU memory until the backward pass reads them.

    **Arguments:**

    - `ops`: as for `save_ops`.
    - `device`: the device to move to; only "cpu".

    **Returns:** the policy.

    **Raises:** as `save_ops`, and `ValueError` for another device.

    Examples:
        >>> from remat.policies import dots_saveable, first_of, offload_ops
        >>> first_of(offload_ops("bmm"), dots_saveable)
        first_of(offload_ops('aten.bmm'), dots_saveable)
    """
    if device != "cpu":
        raise ValueError(f"offload_ops: device must be 'cpu', the only place to offload to; got {device!r}.")
    names = _ops.spell_all("offload_ops", ops)
    return ByOp(call("offload_ops", *names), names, CheckpointPolicy.MUST_CPU_OFFLOAD)


def save_if(predicate: Callable[..., bool]) -> Policy:
    """Save the results that a function selects.

    **Arguments:**

    - `predicate`: called as `predicate(ctx, op, *args, **kwargs)` after an op has run, with its result in
        `ctx.op_output`. Returns whether to save the result.

    **Returns:** the policy.

    **Raises:** `TypeError` if `predicate` is not a function, or later, if it does not return a bool.

    Examples:
        >>> import torch
        >>> from remat.policies import save_if
        >>> def is_random(ctx, op, *args, **kwargs):
        ...     return torch.Tag.nondeterministic_seeded in op.tags
        >>> save_if(is_random)
        save_if(is_random)
    """
    if not callable(predicate) or isinstance(predicate, (Policy, *internals.OP_KINDS)):
        raise TypeError(
            f"save_if: predicate must be a function (ctx, op, *args, **kwargs) -> bool; got {shown(predicate)}."
        )
    return Function(f"save_if({function_name(predicate)})", predicate, is_predicate=True)


@dataclass(frozen=True, repr=False)
class _SaveEvery(Printable):
    n: int
    ops: tuple[str, ...]
    counts: tuple[Iterator[int], Iterator[int]] | None = None
    """Count the ops of one run, and of its rerun: torch before 2.13 asks there again. None outside of a run."""

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        if self.counts is None:
            raise RuntimeError(
                f"{self!r} counts the ops of one run, so it has to be told where a run begins. Pass policy.start() to "
                "create_selective_checkpoint_contexts, inside the context_fn."
            )
        kept = op in _ops.overloads(self.ops) and next(self.counts[ctx.is_recompute]) % self.n == 0
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def by_op(self, op: Any) -> CheckpointPolicy | None:
        return None if op in _ops.overloads(self.ops) else CheckpointPolicy.PREFER_RECOMPUTE

    def start(self) -> Policy:
        return replace(self, counts=(itertools.count(), itertools.count()))


def save_every(n: int, *ops: Any) -> Policy:
    """Save the result of the first of these ops in a run, and then of every n-th.

    This saves some of the matrix multiplications: `save_every(2, "mm")` saves every second one.

    The count starts anew in each run. `remat` does this itself. With torch's selective checkpointing, write
    `context_fn=lambda: create_selective_checkpoint_contexts(policy.start())`.

    **Arguments:**

    - `n`: save one result in `n`; at least 1.
    - `ops`: the ops to count together, at least one, as for `save_ops`.

    **Returns:** the policy.

    **Raises:** as `save_ops`; `TypeError` if `n` is not an int; `ValueError` if it is below 1, or without ops.

    **Source:** selective activation checkpointing in torchtitan.

    Examples:
        >>> from remat.policies import save_every
        >>> save_every(2, "mm", "addmm")
        save_every(2, 'aten.addmm', 'aten.mm')
    """
    _check_int("save_every", "n", n, 1)
    if not ops:
        raise ValueError("save_every: name the ops to count, as in save_every(2, 'aten.mm'); got none.")
    names = _ops.spell_all("save_every", ops)
    return _SaveEvery(call("save_every", n, *names), n, names)


def _size_of(tensor: Tensor) -> int:
    """The size of a tensor, or of the memory that it keeps if that is larger: a view keeps what it views."""
    size = tensor.numel() * tensor.element_size()
    return max(size, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else size


@dataclass(frozen=True, repr=False)
class _BySize(Printable):
    least: float
    most: float

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del op, args, kwargs
        if ctx.is_recompute:
            raise RuntimeError(
                f"{self!r} decides by the result of an op. In torch's selective checkpointing before torch 2.13, the "
                "rerun does not tell it. Use remat.checkpoint, with the same arguments."
            )
        nbytes = sum(_size_of(x) for x in flat(ctx.op_output) if isinstance(x, Tensor))
        return CheckpointPolicy.MUST_SAVE if self.least <= nbytes <= self.most else CheckpointPolicy.PREFER_RECOMPUTE


def save_at_least(nbytes: int) -> Policy:
    """Save large results of ops.

    **Arguments:**

    - `nbytes`: the least size, in bytes of all tensors that the op returns; a view counts with all that it views,
        for that is kept. Under a `vmap`, this is the size of the whole batch.

    **Returns:** the policy.

    **Raises:** `TypeError` where `nbytes` is not an int; `ValueError` where it is negative.

    Examples:
        >>> from remat.policies import dots_saveable, save_at_least
        >>> dots_saveable - save_at_least(1_000_000)  # small dots
        dots_saveable - save_at_least(1000000)
    """
    _check_int("save_at_least", "nbytes", nbytes, 0)
    return _BySize(f"save_at_least({nbytes})", nbytes, math.inf)


def save_at_most(nbytes: int) -> Policy:
    """Save small results of ops.

    **Arguments:**

    - `nbytes`: the greatest size, in bytes of all tensors that the op returns; a view counts with all that it views,
        for that is kept. Under a `vmap`, this is the size of the whole batch.

    **Returns:** the policy.

    **Raises:** `TypeError` where `nbytes` is not an int; `ValueError` where it is negative.

    Examples:
        >>> from remat.policies import save_at_most
        >>> save_at_most(4096)
        save_at_most(4096)
    """
    _check_int("save_at_most", "nbytes", nbytes, 0)
    return _BySize(f"save_at_most({nbytes})", 0, nbytes)


def _check_int(who: str, what: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{who}: {what} must be an int; got {shown(value)}.")
    if value < least:
        raise ValueError(f"{who}: {what} must be at least {least}; got {value}.")
