"""The end of a function, whose values no backward reads.

A transformer's block ends in a product and a sum: `x + linear(h)`. The backward of a product reads its operands, and
that of a sum reads nothing, so a rerun needs the graph of both and the values of neither. In a rerun such a last
product is not computed: its op returns memory that nobody has written.

NOTE [when nobody reads]: the forward finds out, call by call. After the product there must be nothing but calls whose
derivatives and results do not depend on values (`keeps_no_value`), on tensors that the run has seen to be made, with
grad mode on (it is off in an `autograd.Function`, which may save what it likes). A rerun that does anything else there
is an error. A result that outlives the rerun all the same, in a list of the user's for one, is computed then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals

_LEAST = 2**20  # multiplications: less is computed sooner than it is spared


def _named(names: str) -> frozenset[Any]:
    spaces = (Tensor, torch, torch.nn.functional)
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_PRODUCTS = _named("linear matmul __matmul__ mm bmm addmm baddbmm")
_VALUE_FREE = _named("""
    add __add__ __radd__ sub __sub__ rsub __rsub__ alias
    view view_as reshape flatten unflatten transpose swapaxes permute movedim squeeze unsqueeze contiguous
    size dim numel nelement stride is_floating_point is_complex is_contiguous
""") | {torch.ops.aten.alias.default}
_GETTER = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
_GIVES_VALUES = {"data", "grad", "_grad", "real", "imag", "H", "mH"}


def is_product(func: Any) -> bool:
    """Whether a torch call is a matrix product."""
    return func in _PRODUCTS


def keeps_no_value(func: Any) -> bool:
    """Whether neither the backward of a torch call, nor what the caller learns by it, depends on values."""
    if type(func) is _GETTER:
        return func.__self__.__name__ not in _GIVES_VALUES
    return func in _VALUE_FREE


def can_be_hooked(func: Any) -> bool:
    """Whether it is `register_hook`, of a hook for which a value that it holds can be computed when the rerun is over.

    Where a `vmap` or `jvp` of the rerun has wrapped that value, it can't be.
    """
    if func is not Tensor.register_hook:
        return False
    return internals.active_transforms() <= {internals.TransformType.Grad}


def is_large(product: Tensor, args: Any) -> bool:
    """Whether the product of the last two tensors in `args`, or of the first two, is worth being spared."""
    widths = [t.shape[-1] for t in args[:3] if isinstance(t, Tensor) and t.dim() > 1]
    return bool(widths) and product.numel() * min(widths) >= _LEAST


def _mm(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1])


_aten = torch.ops.aten
_SHAPES: dict[Any, Callable[..., tuple[int, ...]]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: lambda _, a, b: _mm(a, b),
    _aten.baddbmm.default: lambda _, a, b: _mm(a, b),
}


class _WithoutProducts(internals.TorchDispatchMode):
    """Within it, products return memory that nobody has written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = _SHAPES.get(func)
        if shape is None or any(type(t) not in _PLAIN or t.layout is not torch.strided for t in args):
            return func(*args, **(kwargs or {}))
        return args[-1].new_empty(shape(*args))


_PLAIN = {Tensor, torch.nn.Parameter}


class Spared:
    """The calls of a rerun from its last product on."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, weakref.ref[Tensor] | None]] = []

    def product(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call, without the product."""
        with _WithoutProducts():
            return func(*args, **kwargs)

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a call."""
        self._calls.append((func, args, kwargs, weakref.ref(out) if isinstance(out, Tensor) else None))

    def settle(self) -> None:
        """The rerun is over and its results are gone: what is left of them has to be right."""
        calls, self._calls = self._calls, []
        while calls and not (calls[-1][-1] is not None and calls[-1][-1]() is not None):
            calls.pop()
        with torch.no_grad():
            for func, args, kwargs, ref in calls:
                out = None if ref is None else ref()
                if out is not None and not internals.is_wrapper(out):
                    out.detach().copy_(func(*args, **kwargs))
