"""Properties of aten ops and of tensors that do not depend on values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from remat import _torch_internals as internals
from remat._layers import inner_tensors, innermost

_WRITE_STATISTICS = """
    _batch_norm_impl_index batch_norm batch_norm_update_stats cudnn_batch_norm instance_norm miopen_batch_norm
    native_batch_norm
"""
"""These write to their statistics, although their schemas do not say so."""
STATISTICS = "running_mean", "running_var"
TRAINING = {"training": False, "use_input_stats": True}
"""Flags, without which statistics are only read, and their defaults in `torch.nn.functional`."""

DETACH = torch.ops.aten.detach.default
CHECKS = {torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.default}
"""Ops that only check a value and return nothing. A rerun need not check it again."""


class OpFacts:
    """The properties of an op.

    **Attributes:**

    - `func`: the op.
    - `is_custom`: whether it is not torch's own. Its derivative may then read memory in Python.
    - `draws`: whether it draws random numbers.
    - `is_view`: whether it computes nothing, and its results lie in the memory of its arguments.
    - `is_inplace_view`: whether it changes only the shape, as `squeeze_` does. Torch counts that as a write.
    - `writes`, `writes_statistics`: whether it writes to arguments; whether to running statistics, as BatchNorm does.
    - `counts_writes`: whether torch increments the version counters of these arguments under a mode.
    - `is_opaque`: whether it is a higher-order op, such as `torch.cond`, of which nothing else is known.
    """

    draws = is_view = is_inplace_view = writes = writes_statistics = False
    is_custom = counts_writes = True
    is_opaque = False

    def __init__(self, func: Any) -> None:
        if isinstance(func, internals.HigherOrderOperator):
            self.func, self.is_opaque = func, True
            return
        returns = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        arguments = [*enumerate(func._schema.arguments)]
        self.func = func
        self.is_custom = func.namespace not in ("aten", "prims", "prim")
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.is_inplace_view = torch.Tag.inplace_view in func.tags
        self.is_view = self.is_inplace_view or not all(r.is_write for r in returns)
        self.counts_writes = "_foreach_" not in func._schema.name
        self._written = [(i, a.name) for i, a in arguments if is_written(func, a)]
        self._flag = next(((i, a.name) for i, a in arguments if a.name in TRAINING), None)
        self.writes = bool(self._written)
        self.writes_statistics = any(name in STATISTICS for _, name in self._written)

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that a call writes to."""
        if not self.writes:
            return []
        in_training = self._flag is None or argument(*self._flag, args, kwargs)
        found: list[Any] = []
        for i, name in self._written:
            if in_training or name not in STATISTICS:
                found += flat(argument(i, name, args, kwargs))
        return [innermost(t) for x in found for t in flat(x) if isinstance(t, Tensor)]  # of a gather, a list of lists

    def count_writes(self, args: Any, kwargs: Any) -> None:
        """Increment the version counters of the tensors that a call has written to, where torch does not."""
        if self.writes and not self.counts_writes:
            increment_version(self.written(args, kwargs))


def argument(i: int, name: str, args: Any, kwargs: Any, default: Any = None) -> Any:
    """An argument of a call, by its position and name."""
    return args[i] if i < len(args) else kwargs.get(name, default)


def is_written(func: Any, argument: Any) -> bool:
    """Whether an op may write to an argument. Some schemas do not say so."""
    namespace, name = func._schema.name.split("::")
    if namespace == "c10d":
        return name.endswith("_") and not argument.name.startswith("input")
    if argument.name in STATISTICS and name in _WRITE_STATISTICS.split():
        return True
    return argument.alias_info is not None and argument.alias_info.is_write


FACTS: dict[int, OpFacts] = {}
"""The properties so far, by the identity of the op: to hash an op would take longer than the lookup saves."""


def facts_of(func: Any) -> OpFacts:
    """The properties of an op, cached."""
    facts = FACTS.get(id(func))
    if facts is None:
        facts = FACTS[id(func)] = OpFacts(func)
    return facts


def flat(out: Any) -> Sequence[Any]:
    """An argument or result of an op as a sequence."""
    return out if isinstance(out, (list, tuple)) else (out,)


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments of an op."""
    found: list[Tensor] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [t for t in x if isinstance(t, Tensor)]
    return found


def is_plain(kind: type[Tensor]) -> bool:
    """Whether ops treat tensors of a class as ordinary tensors."""
    return kind is torch.nn.Parameter or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def plain(tensor: Tensor) -> bool:
    """Whether memory and layout determine a tensor. Not so for sparse, quantized, nested, zero ones, and subclasses."""
    if not is_plain(type(tensor)) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor())


def storages(found: Iterable[Tensor]) -> list[Any]:
    """The storages of the tensors that have one, plain or not, and of the tensors inside of subclasses."""
    return [t.untyped_storage() for x in found for t in inner_tensors(x) if t.layout is torch.strided]


class Layout(NamedTuple):
    """The layout of a tensor in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def over(self, storage: Any) -> Tensor:
        """A tensor with this layout over a storage."""
        with internals.DisableTorchDispatch():
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            return self.flagged(empty.set_(storage, self.offset, self.size, self.stride))

    def flagged(self, tensor: Tensor) -> Tensor:
        """A view with the lazy conjugation and negation of this layout."""
        tensor = tensor.conj() if self.is_conj else tensor
        return internals.negative_view(tensor) if self.is_neg else tensor


_make_layout: Callable[[Any], Layout] = functools.partial(tuple.__new__, Layout)  # faster than the constructor


def layout_of(t: Tensor) -> Layout:
    """The layout of a tensor in its storage."""
    return _make_layout((t.size(), t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg()))


def bytes_of(storage: Any) -> Tensor:
    """A tensor of bytes over a whole storage."""
    with internals.DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
