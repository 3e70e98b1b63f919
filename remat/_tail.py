"""Skip the last product of a function in a rerun, if no backward reads its value.

A transformer block ends in a product and a sum: `x + linear(h)`. The backward of a product reads its operands. The
backward of a sum reads nothing, nor does that of a cast. So a rerun needs the graph of these calls but no values of
theirs: they are the *tail*. In a rerun its product returns memory filled with NaN, so that a mistake would be loud. The
forward notes, call by call, whether anything after a product reads values, and its graph confirms it. The function must
not keep a value of the tail either: none is alive after the call. A nested call at the end of a function is skipped in
the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._dispatch_mode import DispatchMode
from remat._labels import Survivor
from remat._layers import batched_at, requires_grad_at_any_level
from remat._ops import plain, tensors
from remat._saved import saves_tensors
from remat._signature import Signature

_LEAST, _LEAST_RESULTS = 2**20, 2**8
"""Multiplications, and elements of the result. To skip a smaller product takes longer than to compute it."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default}
"""The last two arguments of each but the convolution are the matrices."""


def is_large(product: Any, args: Any, convolves: bool) -> bool:
    """Whether a product is large enough to skip.

    **Arguments:**

    - `args`: the arguments that it was computed from.
    - `convolves`: whether it is a convolution.
    """
    if not isinstance(product, Tensor) or product.numel() < _LEAST_RESULTS:
        return False
    if convolves:
        widths = [t.numel() // len(t) for t in args[1:2]]  # the weight of one channel
    else:
        widths = [t.shape[-1] for t in args[:3] if isinstance(t, Tensor) and t.dim() > 1]
    return bool(widths) and product.numel() * min(widths) >= _LEAST


class _WithoutProducts(DispatchMode):
    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors(args, kwargs)
        if func not in _PRODUCTS or not all(map(plain, given)):
            return func(*args, **kwargs)
        if func is _aten.convolution.default and not all(map(_is_in_order, given)):  # the kernel knows the strides
            return func(*args, **kwargs)
        like = given[0]
        if func is _aten.convolution.default:
            with internals.DisableTorchDispatch():  # unseen by meters: nothing is computed
                shaped = func(*(t.to("meta") if isinstance(t, Tensor) else t for t in args), **kwargs)
            out = torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype, device=like.device)
        else:  # `addmm` on meta tensors takes 0.2 ms
            out = like.new_empty((*args[-2].shape[:-1], args[-1].shape[-1]))
        return out.fill_(float("nan"))


def _is_in_order(tensor: Tensor) -> bool:
    """Whether a tensor has the strides of a new one. `is_contiguous` allows others where there is one channel."""
    with internals.DisableTorchDispatch():
        return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def without_products(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function, but fill its products with NaN and do not compute them."""
    with _WithoutProducts():
        return func(*args, **kwargs)


def keep_no_tensors(nodes: Iterable[Any]) -> bool:
    """Whether none of these autograd nodes saves a tensor."""
    return not any(map(saves_tensors, {type(node) for node in nodes}))


class Returned(NamedTuple):
    """A differentiated tensor that a nested call returned."""

    kind: type[Tensor]
    stride: list[int]
    """Of the dimensions that are not 1: the stride of others may be anything."""
    batched: list[int]
    """The positions of the vmaps that map over it, among the active ones."""


def returned(tensor: Tensor) -> Returned | None:
    """Describe a result. None: nothing can stand in for it."""
    if tensor.layout is not torch.strided or tensor.is_nested or not requires_grad_at_any_level(tensor):
        return None
    if vars(tensor):  # attributes of the user's
        return None
    stride = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    return Returned(type(tensor), stride, batched_at(tensor))


def expanded(value: Tensor, shape: torch.Size, like: Returned) -> Tensor | None:
    """A tensor of this shape that is full of a value. None if it can't be like the result in all other respects."""
    strides = iter(like.stride)
    stride = [1 if n == 1 else next(strides) for n in shape]
    order = sorted(range(len(shape)), key=stride.__getitem__, reverse=True)
    full = value.expand([shape[d] for d in order]).clone(memory_format=torch.contiguous_format)
    if order != sorted(order):
        full = full.permute([order.index(d) for d in range(len(order))])
    return full if returned(full) == like else None


class Remembered(NamedTuple):
    """A nested call, as recorded by the outer forward, so that an outer rerun can skip it.

    It holds no tensor and no part of the function.
    """

    given: list[weakref.ref[Tensor]]
    """The tensors from arguments and cells."""
    found: list[weakref.ref[Tensor]]
    """The other outside tensors that it read."""
    cells: list[weakref.ref[Tensor]]
    """The other tensors from cells, unless the outer function makes them."""
    survivors: list[Survivor]
    signature: Signature
    unread: list[int]
    """Positions in `given` of the tensors from cells that it did not read."""
    reached: list[int]
    """Positions in `[*given, *found]` of the tensors that the results may depend on."""
    result: tuple[list[Any], _tree.PyTreeSpec]
    """The leaves that it returned, with None for each tensor, and their structure."""
    returned: list[tuple[int, torch.Size, torch.dtype, int | None]]
    """Position, shape, dtype and label of each differentiated tensor that it returned."""
    like: list[Returned]
    """What else a rerun may ask of these."""
    followed: Any
    """The policy that the rules of `custom_remat` were given."""
