"""The gamma distribution, and distributions made of gamma draws."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import Real, Shape, broadcast, check_float, check_shape, check_size, sampler, what
from remat.random._continuous import exponential
from remat.random._key import split
from remat.random._normal import normal
from remat.random._uniform import rademacher


def _gamma_op(key: Tensor, a: Tensor, log: bool) -> Tensor:
    """Marsaglia and Tsang's rejection, with a key for each element, until all are accepted."""
    flat = a.flatten()
    keys = split(key, math.prod(a.shape[key.ndim - 1 :])).reshape(-1, 2)
    d = torch.where(flat < 1, flat + 1, flat) - 1 / 3
    c = (1 / 3) / d.sqrt()
    cubes = torch.ones_like(d)
    keys, keys_to_boost = split(keys).unbind(1)
    open_, keys = torch.arange(len(d), device=d.device), keys
    while len(open_):
        keys, keys_x, keys_u = split(keys, 3).unbind(1)
        x, root = _normal_above(keys_x, c[open_])
        u = _threefry.uniform(keys_u, (), d.dtype)
        cube = root * root * root
        cubes[open_] = cube
        squeeze = u >= 1 - 0.0331 * x.square().square()
        exact = u.log() >= x.square() / 2 + d[open_] * (1 - cube + cube.log())
        rejected = squeeze & exact
        open_, keys = open_[rejected], keys[rejected]
    # A gamma draw for a < 1 is a draw for a + 1 times u**(1 / a).
    u = _threefry.uniform(keys_to_boost, (), d.dtype)
    if log:
        boost = torch.where((flat >= 1) | (u == 0), 0, torch.log1p(-u) / flat)
        return (d.log() + cubes.log() + boost).reshape(a.shape)
    return (d * cubes * torch.where(flat >= 1, 1, (1 - u) ** (1 / flat))).reshape(a.shape)


def _normal_above(keys: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return normals x, one for each key, with 1 + c * x > 0, and 1 + c * x."""
    x = torch.empty_like(c)
    open_ = torch.arange(len(c), device=c.device)
    while len(open_):
        keys, once = split(keys).unbind(1)
        x[open_] = _standard_normal(once, c.dtype)
        low = 1 + c[open_] * x[open_] <= 0
        open_, keys = open_[low], keys[low]
    return x, 1 + c * x


def _standard_normal(keys: Tensor, dtype: torch.dtype) -> Tensor:
    u = _threefry.uniform(keys, (), dtype)
    return u.mul_(2).add_(torch.finfo(dtype).eps / 2 - 1).erfinv_().mul_(math.sqrt(2))


_draw = _threefry.define_op(
    _gamma_op, "(Tensor key, Tensor a, bool log) -> Tensor", lambda key, a, log: torch.empty_like(a), inline=False
)


_slope_op = _threefry.define_op(
    lambda a, x: torch.ops.aten._standard_gamma_grad(a, x),
    "(Tensor a, Tensor x) -> Tensor",
    lambda a, x: torch.empty_like(x),
    inline=False,
    name="gamma_slope",
)


class _Slope(torch.autograd.Function):
    """The derivative of a gamma sample by `a` at a fixed quantile: Figurnov, Mohamed, Mnih, arXiv:1805.08498."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, x: Tensor) -> Tensor:
        return _slope_op(a, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise NotImplementedError(
            "remat.random.gamma: the implicit derivative of a gamma sample can be taken once; torch has no formula for "
            "its own derivative."
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> None:
        _Slope.backward(ctx, tangents[0])


class _Implicit(torch.autograd.Function):
    """A sample as a function of its parameter, at a fixed quantile."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, sample: Tensor, log: bool) -> Tensor:
        return sample.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        a, sample, ctx.log = inputs
        ctx.save_for_backward(a, sample)
        ctx.save_for_forward(a, sample)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * _slope(*ctx.saved_tensors, log=ctx.log), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent * _slope(*ctx.saved_tensors, log=ctx.log)


def _slope(a: Tensor, sample: Tensor, *, log: bool) -> Tensor:
    if not log:
        return _Slope.apply(a, sample)
    x = sample.exp().clamp(min=torch.finfo(sample.dtype).tiny)
    return _Slope.apply(a, x) / x


def _sample(who: str, key: Tensor, a: Real, shape: Shape | None, dtype: torch.dtype | None, log: bool) -> Tensor:
    dtype = check_float(who, dtype)
    # Half precision is too coarse for rejection: those draws are rounded float32 ones.
    working = torch.promote_types(dtype, torch.float32)
    sizes, (alpha,) = broadcast(who, key, shape, working, a)
    alpha = alpha.expand(sizes)
    return _Implicit.apply(alpha, _draw(key, alpha.detach(), log), log).to(dtype)


@sampler
def gamma(key: Tensor, a: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Gamma with shape parameter `a` and scale 1. Multiply the result by another scale.

    **Arguments:**

    - `key`: a key.
    - `a`: a number or a tensor > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw, by default that of `a`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, for float32 and float64 equal to that of `jax.random.gamma` up to
    rounding (except where rounding decides whether a proposal is rejected, about once in a million).

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Source: Marsaglia, Tsang, "A simple method for generating gamma variables", 2000.

    Examples:
        >>> import remat.random
        >>> remat.random.gamma(remat.random.key(0), 2.0, (3,))
        tensor([1.5898, 1.7599, 1.1290])
    """
    return _sample("gamma", key, a, shape, dtype, log=False)


@sampler
def loggamma(key: Tensor, a: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The logarithm of a gamma draw, also where the draw itself would be too small for its dtype.

    **Arguments:**

    - `key`: a key.
    - `a`: a number or a tensor > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw, by default that of `a`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`: the logarithm of `gamma` with the same key.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.loggamma(remat.random.key(0), 1e-3, (3,))
        tensor([ -110.6179,   -95.5481, -1370.2344])
    """
    return _sample("loggamma", key, a, shape, dtype, log=True)


@sampler
def beta(key: Tensor, a: Real, b: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Beta on [0, 1] with density proportional to `x**(a - 1) * (1 - x)**(b - 1)`.

    **Arguments:**

    - `key`: a key.
    - `a`, `b`: numbers or tensors > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw, by default that of the parameters.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.beta` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or shapes that do not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.beta(remat.random.key(0), 2.0, 3.0, (3,))
        tensor([0.2363, 0.4905, 0.6838])
    """
    dtype = check_float("beta", dtype)
    sizes, parameters = broadcast("beta", key, shape, dtype, a, b)
    logs = [loggamma(k, p, sizes, dtype) for k, p in zip(split(key), parameters, strict=True)]
    return torch.stack(logs).softmax(0)[0]


@sampler
def dirichlet(key: Tensor, alpha: Tensor, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Dirichlet: points of the simplex.

    **Arguments:**

    - `key`: a key.
    - `alpha`: the concentrations, > 0, of shape (..., n). Differentiable, implicitly, once.
    - `shape`: the batch shape to draw, by default that of `alpha`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of shape (*shape, n), equal to that of `jax.random.dirichlet` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for an `alpha` of no dimension, a bad `dtype`, or a
    `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> remat.random.dirichlet(remat.random.key(0), torch.ones(3), (4,)).sum(-1)
        tensor([1.0000, 1.0000, 1.0000, 1.0000])
    """
    dtype = check_float("dirichlet", dtype)
    if not isinstance(alpha, Tensor) or alpha.ndim < 1:
        raise ValueError(f"remat.random.dirichlet: alpha must be a tensor of shape (..., n); got {what(alpha)}.")
    sizes, _ = broadcast("dirichlet", key, shape, dtype, alpha[..., 0])
    return loggamma(key, alpha, (*sizes, alpha.shape[-1]), dtype).softmax(-1)


@sampler
def chisquare(key: Tensor, df: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Chi-square with `df` degrees of freedom.

    **Arguments:**

    - `key`: a key.
    - `df`: a number or a tensor > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw, by default that of `df`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.chisquare` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.chisquare(remat.random.key(0), 3.0, (3,))
        tensor([2.2051, 2.4900, 1.4557])
    """
    dtype = check_float("chisquare", dtype)
    sizes, (freedom,) = broadcast("chisquare", key, shape, dtype, df)
    return loggamma(key, freedom / 2, sizes, dtype).exp() * 2


@sampler
def f(key: Tensor, dfnum: Real, dfden: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """F: the quotient of two chi-squares over their degrees of freedom.

    **Arguments:**

    - `key`: a key.
    - `dfnum`, `dfden`: the degrees of freedom, numbers or tensors > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw, by default that of the parameters.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.f` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or shapes that do not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.f(remat.random.key(0), 3.0, 4.0, (3,))
        tensor([2.7039, 0.2260, 0.1584])
    """
    dtype = check_float("f", dtype)
    sizes, (above, below) = broadcast("f", key, shape, dtype, dfnum, dfden)
    for_below, for_above = split(key)
    return (chisquare(for_above, above, sizes, dtype) / above) / (chisquare(for_below, below, sizes, dtype) / below)


@sampler
def t(key: Tensor, df: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Student's t with `df` degrees of freedom.

    **Arguments:**

    - `key`: a key.
    - `df`: a number or a tensor > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw, by default that of `df`.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.t` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.t(remat.random.key(0), 3.0, (3,))
        tensor([ 0.6902, -3.2393, -1.6745])
    """
    dtype = check_float("t", dtype)
    sizes, (freedom,) = broadcast("t", key, shape, dtype, df)
    for_normal, for_gamma = split(key)
    half = freedom / 2
    return normal(for_normal, sizes, dtype) * (half / gamma(for_gamma, half, sizes, dtype)).sqrt()


@sampler
def generalized_normal(key: Tensor, p: Real, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Generalized normal with density proportional to `exp(-abs(x)**p)`.

    **Arguments:**

    - `key`: a key.
    - `p`: the exponent, a number > 0. Differentiable, implicitly, once.
    - `shape`: the shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.generalized_normal` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `shape` or `dtype`.

    Examples:
        >>> import remat.random
        >>> remat.random.generalized_normal(remat.random.key(0), 1.5, (3,))
        tensor([ 1.0604,  0.0892, -1.3751])
    """
    dtype = check_float("generalized_normal", dtype)
    sizes, (power,) = broadcast("generalized_normal", key, check_shape("generalized_normal", shape), dtype, p)
    for_gamma, for_sign = split(key)
    return rademacher(for_sign, sizes, dtype) * gamma(for_gamma, 1 / power, sizes, dtype) ** (1 / power)


@sampler
def ball(key: Tensor, d: int, p: float = 2, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Uniform in the unit ball of the Lp norm.

    **Arguments:**

    - `key`: a key.
    - `d`: the dimension of the ball.
    - `p`: the norm, > 0.
    - `shape`: the batch shape to draw.
    - `dtype`: float16, bfloat16, float32 or float64; the default is torch's default dtype.

    **Returns:** a tensor of shape (*shape, d), equal to that of `jax.random.ball` as far as `gamma` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `d`, `shape` or `dtype`.

    Source: Barthe, Guedon, Mendelson, Naor, "A probabilistic approach to the geometry of the l_p^n-ball", 2005,
    arXiv:math/0503650.

    Examples:
        >>> import remat.random
        >>> points = remat.random.ball(remat.random.key(0), 3, shape=(100,))
        >>> bool(points.norm(dim=-1).max() <= 1)
        True
    """
    sizes, dtype = check_shape("ball", shape), check_float("ball", dtype)
    for_direction, for_radius = split(key)
    g = generalized_normal(for_direction, p, (*sizes, check_size("ball", d, "d")), dtype)
    return g / ((g.abs() ** p).sum(-1) + exponential(for_radius, sizes, dtype)).pow(1 / p).unsqueeze(-1)
