"""Continuous distributions that are a formula on one or two uniform or normal draws."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import Real, Shape, broadcast, check_float, check_shape, sampler
from remat.random._key import split
from remat.random._normal import normal
from remat.random._uniform import uniform


@sampler
def exponential(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Exponential with rate 1. Divide the result by another rate.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.exponential` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.exponential(remat.random.key(0), (3,))
        tensor([2.9501, 3.8434, 0.4039])
    """
    u = _threefry.uniform(key, check_shape("exponential", shape), check_float("exponential", dtype))
    return -torch.log1p(-u)


@sampler
def gumbel(
    key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None, mode: Literal["low", "high"] | None = None
) -> Tensor:
    """Standard Gumbel.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.
    - `mode`: "low" (the default) draws values up to about 16 in float32; "high" draws up to about 32, with twice the
        bits.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.gumbel` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape`, `dtype` or `mode`.

    Examples:
        >>> import remat.random
        >>> remat.random.gumbel(remat.random.key(0), (3,))
        tensor([ 2.9234,  3.8326, -0.0969])
    """
    sizes, dtype = check_shape("gumbel", shape), check_float("gumbel", dtype)
    info = torch.finfo(dtype)
    if mode not in (None, "low", "high"):
        raise ValueError(f"remat.random.gumbel: mode must be 'low', 'high' or None; got {mode!r}.")
    if mode == "high":
        u, finer = _threefry.uniform(key, (2, *sizes), dtype)
        u = torch.where(u >= 0.5, u, u + info.eps * finer + info.tiny)
        return -torch.log(-torch.log1p(-u))
    return -torch.log(-torch.log(uniform(key, sizes, dtype, minval=info.tiny, maxval=1.0)))


@sampler
def laplace(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard Laplace.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.laplace` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.laplace(remat.random.key(0), (3,))
        tensor([-2.2570, -3.1503,  0.4086])
    """
    sizes, dtype = check_shape("laplace", shape), check_float("laplace", dtype)
    u = uniform(key, sizes, dtype, minval=torch.finfo(dtype).eps / 2 - 1, maxval=1.0)
    return u.sign() * torch.log1p(-u.abs())


@sampler
def logistic(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard logistic.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.logistic` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.logistic(remat.random.key(0), (3,))
        tensor([ 2.8964,  3.8218, -0.6978])
    """
    sizes, dtype = check_shape("logistic", shape), check_float("logistic", dtype)
    u = uniform(key, sizes, dtype, minval=torch.finfo(dtype).tiny, maxval=1.0)
    return u.log() - torch.log1p(-u)


@sampler
def cauchy(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard Cauchy.

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.cauchy` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.cauchy(remat.random.key(0), (3,))
        tensor([ 6.0275, 14.8379, -0.5817])
    """
    sizes, dtype = check_shape("cauchy", shape), check_float("cauchy", dtype)
    return torch.tan(math.pi * (uniform(key, sizes, dtype, minval=torch.finfo(dtype).eps, maxval=1.0) - 0.5))


@sampler
def pareto(key: Tensor, b: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Pareto on [1, inf) with density `b / x**(b + 1)`.

    **Arguments:**

    - `key`: a key.
    - `b`: the exponent, a number or a tensor. Differentiable.
    - `shape`: the shape to draw, by default that of `b`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.pareto` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.pareto(remat.random.key(0), 3.0, (3,))
        tensor([2.6735, 3.6007, 1.1441])
    """
    dtype = check_float("pareto", dtype)
    sizes, (exponent,) = broadcast("pareto", key, shape, dtype, b)
    return (exponential(key, sizes, dtype) / exponent).exp()


@sampler
def rayleigh(key: Tensor, scale: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Rayleigh: the length of a vector of two normals with standard deviation `scale`.

    **Arguments:**

    - `key`: a key.
    - `scale`: a number or a tensor. Differentiable.
    - `shape`: the shape to draw, by default that of `scale`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.rayleigh` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.rayleigh(remat.random.key(0), 1.0, (3,))
        tensor([0.3279, 0.2081, 1.4844])
    """
    dtype = check_float("rayleigh", dtype)
    sizes, (deviation,) = broadcast("rayleigh", key, shape, dtype, scale)
    return deviation * (_threefry.uniform(key, sizes, dtype).log() * -2).sqrt()


@sampler
def weibull_min(
    key: Tensor, scale: Real, concentration: Real, shape: Shape = (), dtype: torch.dtype | None = None
) -> Tensor:
    """Weibull, the distribution of the minimum of many variables.

    **Arguments:**

    - `key`: a key.
    - `scale`, `concentration`: numbers or tensors. Differentiable.
    - `shape`: the shape to draw. As in JAX, the default is (), and the draws then broadcast with the parameters.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `dtype`, equal to that of `jax.random.weibull_min` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.weibull_min(remat.random.key(0), 1.0, 2.0, (3,))
        tensor([1.7176, 1.9605, 0.6355])
    """
    dtype = check_float("weibull_min", dtype)
    _, (factor, power) = broadcast("weibull_min", key, None, dtype, scale, concentration)
    return exponential(key, check_shape("weibull_min", shape), dtype) ** (1 / power) * factor


@sampler
def triangular(
    key: Tensor, left: Real, mode: Real, right: Real, shape: Shape | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Triangular on [left, right] with its peak at `mode`.

    **Arguments:**

    - `key`: a key.
    - `left`, `mode`, `right`: numbers or tensors, in ascending order. Differentiable.
    - `shape`: the shape to draw, by default that of the parameters.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.triangular` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or shapes that do not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.triangular(remat.random.key(0), 0.0, 1.0, 3.0, (3,))
        tensor([2.4396, 2.6415, 0.9984])
    """
    dtype = check_float("triangular", dtype)
    sizes, (low, peak, high) = broadcast("triangular", key, shape, dtype, left, mode, right)
    u = _threefry.uniform(key, sizes, dtype)
    rising = low + (u * (high - low) * (peak - low)).sqrt()
    falling = high - ((1 - u) * (high - low) * (high - peak)).sqrt()
    return torch.where(u < (peak - low) / (high - low), rising, falling)


@sampler
def wald(key: Tensor, mean: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Wald, the inverse Gaussian with scale 1.

    The sampler chooses one of two roots at random. The derivative of a draw with respect to `mean` is that of its root,
    as in JAX: the mean of such derivatives is not the derivative of an expectation.

    **Arguments:**

    - `key`: a key.
    - `mean`: a number or a tensor.
    - `shape`: the shape to draw, by default that of `mean`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.wald` up to rounding.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Source: Michael, Schucany, Haas, "Generating random variates using transformations with multiple roots", 1976.

    Examples:
        >>> import remat.random
        >>> remat.random.wald(remat.random.key(0), 1.0, (3,))
        tensor([0.3806, 0.4157, 0.4811])
    """
    dtype = check_float("wald", dtype)
    sizes, (mu,) = broadcast("wald", key, shape, dtype, mean)
    for_normal, for_choice = split(key)
    y = normal(for_normal, sizes, dtype).square()
    x = mu + mu.square() * y / 2 - mu / 2 * (4 * mu * y + (mu * y).square()).sqrt()
    return torch.where(_threefry.uniform(for_choice, sizes, dtype) <= mu / (mu + x), x, mu.square() / x)
