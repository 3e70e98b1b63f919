"""The normal distribution, and distributions that are arithmetic on normal draws."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import (
    FLOATS,
    Real,
    Shape,
    broadcast,
    check_dtype,
    check_float,
    check_shape,
    check_size,
    sampler,
    what,
)
from remat.random._key import split
from remat.random._uniform import rademacher, uniform

_PART = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@sampler
def normal(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal, by inverting the distribution function.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype. In complex64 and complex128,
        each of the two parts has variance 1/2.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.normal` up to rounding. For another mean
    and standard deviation write `mean + deviation * normal(key, shape)`, which is differentiable in both.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.normal(remat.random.key(0), (3,))
        tensor([ 1.6226,  2.0253, -0.4336])
    """
    dtype = check_dtype("normal", dtype or torch.get_default_dtype(), (*FLOATS, *_PART))
    if dtype in _PART:
        real, imaginary = normal(split(key), shape, _PART[dtype])
        return torch.complex(real, imaginary) / math.sqrt(2)
    # uniform(minval=the number after -1, maxval=1); doubling is exact. It is not in place: what `torch.func.linearize`
    # returns would change the same draw at each call.
    u = _threefry.uniform(key, check_shape("normal", shape), dtype) * 2 + (torch.finfo(dtype).eps / 2 - 1)
    return torch.erfinv(u) * math.sqrt(2)


@sampler
def truncated_normal(
    key: Tensor, lower: Real, upper: Real, shape: Shape | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Standard normal, conditioned on lying between two bounds.

    **Arguments:**

    - `key`: a key.
    - `lower`, `upper`: the bounds, numbers or tensors. Differentiable.
    - `shape`: the shape to draw, by default that of the bounds.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype` in the open interval (lower, upper), equal to that of
    `jax.random.truncated_normal` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or bounds and `shape` that do not
    fit.

    Examples:
        >>> import remat.random
        >>> remat.random.truncated_normal(remat.random.key(0), -1.0, 1.0, (3,))
        tensor([ 0.8619,  0.9413, -0.2910])
    """
    dtype = check_float("truncated_normal", dtype)
    sizes, (low, high) = broadcast("truncated_normal", key, shape, dtype, lower, upper)
    root = math.sqrt(2)
    u = uniform(key, sizes, dtype, minval=_erf(low / root), maxval=_erf(high / root))
    # Rounding can reach the bounds, so clamp to the next numbers inside them.
    first = torch.nextafter(low.detach(), torch.full_like(low, math.inf))
    last = torch.nextafter(high.detach(), torch.full_like(high, -math.inf))
    return torch.erfinv(u).mul(root).clamp(first, last)


# Eigen's rational approximation of erf(x) / x in the square of x, up to where erf rounds to 1
_ERF_ABOVE = (
    2.2905065861350646e-4,
    3.4082910107109506e-3,
    5.0955695062380861e-2,
    0.18520832239976145,
    1.128379143519084,
)
_ERF_BELOW = (
    *(-1.1791602954361697e-7, 2.3547966471313185e-5, 1.0179625278914885e-3, 1.4070470171167667e-2),
    *(0.11098505178285362, 0.49746925110067538, 1.0),
)
_ERF_IS_ONE = 3.832506856900711


def _erf(x: Tensor) -> Tensor:
    """erf, in float32 with XLA's rounding: far from 0, the last bit of a bound changes all draws."""
    erf = torch.erf(x)
    if x.dtype != torch.float32:
        return erf
    near = x.detach().clamp(-_ERF_IS_ONE, _ERF_IS_ONE)
    rounded = near * _polynomial(near * near, _ERF_ABOVE) / _polynomial(near * near, _ERF_BELOW)
    return erf + (rounded - erf.detach())  # exactly `rounded`, with the derivative of erf


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.zeros_like(x)
    for coefficient in coefficients:
        total = torch.addcmul(torch.full_like(x, coefficient), total, x)  # one rounding, as in XLA
    return total


@sampler
def multivariate_normal(
    key: Tensor,
    mean: Tensor,
    cov: Tensor,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
    method: Literal["cholesky", "eigh", "svd"] = "cholesky",
) -> Tensor:
    """Normal with a mean and a covariance matrix.

    **Arguments:**

    - `key`: a key.
    - `mean`: the mean, of shape (..., n). Differentiable.
    - `cov`: the covariance, positive definite, of shape (..., n, n). Differentiable.
    - `shape`: the batch shape to draw, by default that of `mean` and `cov`.
    - `dtype`: float32 or float64; by default the dtype of `mean` and `cov`.
    - `method`: how to factor `cov`; "eigh" and "svd" also take a singular one.

    **Returns:** a tensor of shape (*shape, n), equal to that of `jax.random.multivariate_normal` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for an unknown `method`, a bad `dtype`, or shapes that
    do not fit.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> key, mean, cov = remat.random.key(0), torch.zeros(2), torch.eye(2)
        >>> remat.random.multivariate_normal(key, mean, cov, (3,)).shape
        torch.Size([3, 2])
    """
    who = "remat.random.multivariate_normal"
    factors = {"cholesky": torch.linalg.cholesky, "eigh": _eigh_factor, "svd": _svd_factor}
    if method not in factors:
        raise ValueError(f"{who}: method must be one of {', '.join(factors)}; got {method!r}.")
    tensors = isinstance(mean, Tensor) and isinstance(cov, Tensor)
    if not tensors or mean.ndim < 1 or cov.ndim < 2 or cov.shape[-2:] != (mean.shape[-1], mean.shape[-1]):
        raise ValueError(
            f"{who}: mean must be a tensor of shape (..., n) and cov one of shape (..., n, n); got {what(mean)} and "
            f"{what(cov)}."
        )
    dtype = dtype or torch.promote_types(mean.dtype, cov.dtype)
    check_dtype("multivariate_normal", dtype, (torch.float32, torch.float64))  # LAPACK has no half precision
    sizes, _ = broadcast("multivariate_normal", key, shape, dtype, mean[..., 0], cov[..., 0, 0])
    z = normal(key, (*sizes, mean.shape[-1]), dtype)
    return mean.to(dtype) + (factors[method](cov.to(dtype)) @ z.unsqueeze(-1)).squeeze(-1)


def _eigh_factor(cov: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(cov)
    return vectors * values.sqrt().unsqueeze(-2)


def _svd_factor(cov: Tensor) -> Tensor:
    u, values, _ = torch.linalg.svd(cov)
    return u * values.sqrt().unsqueeze(-2)


@sampler
def lognormal(key: Tensor, sigma: Real = 1.0, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The exponential of a normal with mean 0 and standard deviation `sigma`.

    **Arguments:**

    - `key`: a key.
    - `sigma`: the standard deviation, a number or a tensor. Differentiable.
    - `shape`: the shape to draw, by default that of `sigma`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.lognormal` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.lognormal(remat.random.key(0), 0.5, (3,))
        tensor([2.2509, 2.7528, 0.8051])
    """
    dtype = check_float("lognormal", dtype)
    sizes, (deviation,) = broadcast("lognormal", key, shape, dtype, sigma)
    return (normal(key, sizes, dtype) * deviation).exp()


@sampler
def maxwell(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Maxwell: the length of a vector of three standard normals.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.maxwell` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.maxwell(remat.random.key(0), (3,))
        tensor([2.6311, 0.9910, 0.9649])
    """
    sizes = check_shape("maxwell", shape)
    return torch.linalg.vector_norm(normal(key, (*sizes, 3), check_float("maxwell", dtype)), dim=-1)


@sampler
def double_sided_maxwell(
    key: Tensor, loc: Real, scale: Real, shape: Shape = (), dtype: torch.dtype | None = None
) -> Tensor:
    """Maxwell with a random sign, scaled and moved.

    **Arguments:**

    - `key`: a key.
    - `loc`, `scale`: numbers or tensors. Differentiable.
    - `shape`: the leading shape. The shape of `loc` and `scale` follows it, twice if `shape` is (), as in JAX.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of shape (*shape, *shape of loc and scale), equal to that of
    `jax.random.double_sided_maxwell` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> key = remat.random.key(0)
        >>> remat.random.double_sided_maxwell(key, 0.0, 2.0, (3,)).shape
        torch.Size([3])
    """
    dtype = check_float("double_sided_maxwell", dtype)
    common, (middle, factor) = broadcast("double_sided_maxwell", key, None, dtype, loc, scale)
    sizes = (check_shape("double_sided_maxwell", shape) or common) + common
    for_length, for_sign = split(key)
    return rademacher(for_sign, sizes, dtype) * maxwell(for_length, sizes, dtype) * factor + middle


@sampler
def orthogonal(
    key: Tensor, n: int, shape: Shape = (), dtype: torch.dtype | None = None, m: int | None = None
) -> Tensor:
    """Orthogonal matrices, uniform over the group; semi-orthogonal matrices if m != n.

    **Arguments:**

    - `key`: a key.
    - `n`, `m`: the rows and the columns; `m` is `n` by default.
    - `shape`: the batch shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of shape (*shape, n, m), equal to that of `jax.random.orthogonal` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape`, `n`, `m` or `dtype`.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups", 2007, arXiv:math-ph/0609050.

    Examples:
        >>> import remat.random
        >>> q = remat.random.orthogonal(remat.random.key(0), 3)
        >>> (q @ q.T).round().abs()
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    dtype = check_float("orthogonal", dtype)
    rows = check_size("orthogonal", n, "n")
    columns = rows if m is None else check_size("orthogonal", m, "m")
    sizes = (*check_shape("orthogonal", shape), max(rows, columns), min(rows, columns))
    z = normal(key, sizes, dtype)
    q, r = torch.linalg.qr(z.to(torch.promote_types(dtype, torch.float32)))  # LAPACK has no half precision
    q = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(dtype)
    return q.mT if rows < columns else q
