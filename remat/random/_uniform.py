"""Random bits, and the draws made directly from them: uniform, Bernoulli, Rademacher, integers of a range."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import (
    FLOATS,
    INTEGERS,
    Real,
    Shape,
    broadcast,
    check_dtype,
    check_float,
    check_shape,
    sampler,
    what,
)
from remat.random._key import is_integer, split

_WIDTHS = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}


@sampler
def bits(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Uniform random bits.

    **Arguments:**

    - `key`: a key. As in all samplers, for a batch of keys the result has the batch dimensions in front.
    - `shape`: the shape to draw.
    - `dtype`: `torch.uint8`, `uint16`, `uint32` (the default) or `uint64`.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.bits` bit for bit.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.bits(remat.random.key(0), (2,))
        tensor([4070199207, 4202968722], dtype=torch.uint32)
    """
    sizes = check_shape("bits", shape)
    width = check_dtype("bits", dtype or torch.uint32, tuple(_WIDTHS))
    return _threefry.bits(key, sizes, _WIDTHS[width])


@sampler
def uniform(
    key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None, minval: Real = 0.0, maxval: Real = 1.0
) -> Tensor:
    """Uniform in [minval, maxval).

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.
    - `minval`, `maxval`: the bounds, numbers or tensors that broadcast to `shape`. Differentiable.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.uniform` bit for bit. A float32 has 23
    random bits, a bfloat16 has 7.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`, or bounds that do not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.uniform(remat.random.key(0), (3,))
        tensor([0.9477, 0.9786, 0.3323])
    """
    dtype = check_float("uniform", dtype)
    sizes = check_shape("uniform", shape)
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor) and (minval, maxval) == (0, 1):
        return _threefry.uniform(key, sizes, dtype)
    _, (low, high) = broadcast("uniform", key, sizes, dtype, minval, maxval)
    u = _threefry.uniform(key, sizes, dtype)
    # XLA fuses multiply and add into one rounding for these two dtypes, and addcmul does too.
    fused = dtype in (torch.float32, torch.float64)
    scaled = torch.addcmul(low, u, high - low) if fused else u * (high - low) + low
    return torch.maximum(scaled, low)


@sampler
def bernoulli(key: Tensor, p: Real = 0.5, shape: Shape | None = None, mode: Literal["low", "high"] = "low") -> Tensor:
    """True with probability p.

    **Arguments:**

    - `key`: a key.
    - `p`: the probability, a number in [0, 1], or a floating tensor. Elements above 1 count as 1, elements below 0 as
        0.
    - `shape`: the shape to draw, by default that of `p`.
    - `mode`: "high" draws twice the bits, for p below 1e-7 (in float32), which "low" can't resolve.

    **Returns:** a bool tensor of `shape`, equal to that of `jax.random.bernoulli`.

    **Raises:** `TypeError` if `key` is not a key or `p` is an integer tensor, `ValueError` for a number p outside [0,
    1], an unknown `mode`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.bernoulli(remat.random.key(0), 0.3, (4,))
        tensor([False, False, False, False])
    """
    if mode not in ("low", "high"):
        raise ValueError(f"remat.random.bernoulli: mode must be 'low' or 'high'; got {mode!r}.")
    if p.dtype not in FLOATS if isinstance(p, Tensor) else not hasattr(p, "__float__"):
        raise TypeError(f"remat.random.bernoulli: p must be a floating tensor or a number; got {what(p)}.")
    if not isinstance(p, Tensor) and not 0 <= p <= 1:
        raise ValueError(f"remat.random.bernoulli: p must be a probability, in [0, 1]; got {p}.")
    dtype = p.dtype if isinstance(p, Tensor) else torch.get_default_dtype()
    sizes, (chance,) = broadcast("bernoulli", key, shape, dtype, p)
    if mode == "high":
        u, finer = _threefry.uniform(key, (2, *sizes), dtype)
        return finer * (torch.finfo(dtype).eps) < chance - u
    if isinstance(p, Tensor):
        return _threefry.uniform(key, sizes, dtype) < chance
    return _threefry.bernoulli(key, sizes, dtype, p)


@sampler
def rademacher(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """-1 or 1 with equal probability.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: a signed integer or floating dtype, by default int32.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.rademacher`.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.rademacher(remat.random.key(0), (4,))
        tensor([-1, -1,  1,  1], dtype=torch.int32)
    """
    dtype = check_dtype("rademacher", dtype or torch.int32, (*INTEGERS[1:], *FLOATS))
    return bernoulli(key, 0.5, check_shape("rademacher", shape)).to(dtype) * 2 - 1


@sampler
def randint(
    key: Tensor, shape: Shape, minval: int | Tensor, maxval: int | Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Integers in [minval, maxval).

    The result is the remainder of a random number with twice as many bits. If the range is not a power of two, the bias
    is about `(maxval - minval) / 2**32` (2**64 for int64).

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `minval`, `maxval`: the bounds, ints or integer tensors that broadcast to `shape`. Ints must fit in 32 bits (for
        int64, in 64). Ints and tensors are clamped to the range of `dtype`. Where `maxval <= minval`, the result is
        `minval`.
    - `dtype`: an integer dtype except uint64. The default is int32 as in JAX, not torch's int64, because the random
        bits depend on the width.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.randint`.

    **Raises:** `TypeError` if `key` is not a key or a bound is not an integer, `ValueError` for a bad `shape` or
    `dtype`, or bounds that do not fit or are too large.

    Examples:
        >>> import remat.random
        >>> remat.random.randint(remat.random.key(0), (5,), 0, 10)
        tensor([9, 0, 2, 3, 1], dtype=torch.int32)
    """
    dtype = check_dtype("randint", dtype or torch.int32, (*INTEGERS, torch.uint16, torch.uint32))
    limits = torch.iinfo(dtype)
    first, last = min(limits.min, -(2**31)), min(max(limits.max + 1, 2**31), 2**63 - 1)
    for name, bound in (("minval", minval), ("maxval", maxval)):
        if not (is_integer(bound) if isinstance(bound, Tensor) else hasattr(bound, "__index__")):
            raise TypeError(
                f"remat.random.randint: {name} must be an int or an integer tensor; got {what(bound)}. The order is "
                "randint(key, shape, minval, maxval)."
            )
        if isinstance(bound, int) and not first <= bound <= last:
            raise ValueError(
                f"remat.random.randint: {name} must be in [{first}, {last}] for {dtype}; got {bound}. A wider dtype "
                "takes wider bounds."
            )
    # JAX clips the bounds to the dtype, but such that the maximum itself can be drawn.
    sizes, (low, high) = broadcast("randint", key, check_shape("randint", shape), torch.int64, minval, maxval)
    low = low.clamp(limits.min, limits.max)
    high = high.clamp(limits.min, min(limits.max + 1, 2**63 - 1))
    span = torch.where(high > low, high - low, 1)  # of 64 bits: unsigned, by wrapping

    # The remainder of a number with twice the bits, computed from its two halves modulo 2**width.
    width, offset = (64, _offset64) if dtype == torch.int64 else (32, _offset32)
    higher, lower = (_threefry.bits(k, sizes, width).to(torch.int64) for k in split(key))
    return (offset(higher, lower, span.expand(sizes)) + low).to(dtype)


def _offset32_op(higher: Tensor, lower: Tensor, span: Tensor) -> Tensor:
    square = (2**16 % span).square_().bitwise_and_(0xFFFFFFFF).remainder_(span)
    product = (higher % span).mul_(square)
    return product.add_(lower % span).bitwise_and_(0xFFFFFFFF).remainder_(span)


def _offset64_op(higher: Tensor, lower: Tensor, span: Tensor) -> Tensor:
    square = _remainder64(torch.full_like(span, 2**32), span).square()
    product = _remainder64(higher, span) * _remainder64(square, span)
    return _remainder64(product + _remainder64(lower, span), span)


def _remainder64(a: Tensor, n: Tensor) -> Tensor:
    """`a % n` for int64 tensors read as unsigned."""
    lowest = -(2**63)
    half = (a >> 1) & ~lowest
    # Twice the quotient of the half is the quotient, or one less. For n >= 2**63 the quotient is 0 or 1.
    rest = torch.where(n > 0, a - torch.div(half, n.clamp(min=1), rounding_mode="floor") * 2 * n, a)
    return torch.where(rest ^ lowest >= n ^ lowest, rest - n, rest)


_signature = "(Tensor higher, Tensor lower, Tensor span) -> Tensor"
_offset32 = _threefry.define_op(_offset32_op, _signature, lambda higher, *_: torch.empty_like(higher), inline=False)
# Never inlined: it wraps around, which the C++ of torch.compile must not see.
_offset64 = _threefry.define_op(_offset64_op, _signature, lambda higher, *_: torch.empty_like(higher), inline=False)
