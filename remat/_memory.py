"""Which tensors share memory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from remat import _torch_internals as internals
from remat._layers import innermost, layers

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def sharing_memory(values: list[Tensor], others: list[Tensor]) -> set[int]:
    """The positions of the values that share their storage with another value, or with one of the others."""
    if not any(t._is_view() for value in values for t in layers(value)):
        return set()  # autograd tracks views, so nothing is shared
    storages = [memory_of(t) for t in (*values, *others)]
    return {i for i in range(len(values)) if storages.count(storages[i]) > 1}


def memory_of(tensor: Tensor) -> int:
    """What tells the memory of the plain tensor below all transforms from that of others, while it is there."""
    plain = innermost(tensor)
    if plain.layout == torch.sparse_coo:
        plain = innermost(plain._values())  # a transform wraps what it returns
    elif plain.layout in _COMPRESSED:
        plain = plain.values()
    has_storage = plain.layout == torch.strided and not (is_lazy(plain) or internals.is_legacy_batched(plain))
    return plain.untyped_storage()._cdata if has_storage else id(plain)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage."""
    plain = innermost(tensor)
    if plain.layout != torch.strided or plain.is_nested:
        return 0, 0
    begin = int(plain.storage_offset())
    return begin, begin + sum((n - 1) * stride for n, stride in zip(plain.shape, plain.stride(), strict=True))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same storage lie in the same stretch of it."""
    if one is other:
        return True
    (begin, end), (other_begin, other_end) = _byte_range(one), _byte_range(other)
    return begin <= other_end and other_begin <= end


def is_over(tensor: Tensor, data: Tensor) -> bool:
    """Whether `tensor.data = data` changes nothing, as in `module.to(x.device)`: it is over the same memory already."""
    one, other = innermost(tensor), innermost(data)
    if one.layout != torch.strided or one.is_nested or memory_of(one) != memory_of(other) or one.dtype != other.dtype:
        return False
    return (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())


def two_that_share_memory(tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two tensors that lie in the same stretch of the same storage, if there are such."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        others = found.setdefault(memory_of(tensor), [])
        for other in others:
            if overlap(other, tensor):
                return other, tensor
        others.append(tensor)
    return None


def apart(gradients: list[Any], of_leaves: Sequence[bool]) -> list[Any]:
    """Gradients, with a copy for each leaf whose gradient shares memory with another one.

    Torch takes what a node returns for a leaf as its `.grad`, and adds the next one to it in place.
    """
    seen: dict[int, Tensor] = {}
    for i in sorted(range(len(gradients)), key=of_leaves.__getitem__):
        g = gradients[i]
        if g is not None and seen.setdefault(memory_of(g), g) is not g and of_leaves[i]:
            gradients[i] = g.clone()
    return gradients


def digest(storage: Any) -> bytes:
    """What tells the bytes in CPU memory from others."""
    content = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    return hashlib.blake2b(content).digest()
