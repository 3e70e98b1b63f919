"""Counts: geometric, Poisson, binomial and multinomial.

As in JAX, the loops draw for a whole tensor at a time, from keys (b, 2) for parameters (b, n), until a row is done. So
a batch of keys gives the same counts as its keys one by one, and the counts are JAX's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import Real, Shape, broadcast, check_float, check_integer, sampler
from remat.random._key import split


def _rows(key: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    keys = key.reshape(-1, 2)
    n = math.prod(parameters[0].shape[key.ndim - 1 :])
    return keys, *(p.reshape(len(keys), n) for p in parameters)


def _uniforms(keys: Tensor, like: Tensor) -> Tensor:
    return _threefry.uniform(keys, like.shape[1:], like.dtype)


def _poisson_op(key: Tensor, lam: Tensor) -> Tensor:
    keys, rate = _rows(key, lam)
    small = rate.isnan() | (rate < 10)
    counts = torch.where(
        small,
        _poisson_by_products(keys, torch.where(small, rate, 0)),
        _poisson_by_rejection(keys, torch.where(small, 1e5, rate)),
    )
    return torch.where(rate == 0, 0, counts).reshape(lam.shape)


def _poisson_by_products(keys: Tensor, rate: Tensor) -> Tensor:
    """Knuth, The Art of Computer Programming, 3.4.1: count the uniforms whose product is above exp(-rate)."""
    count, log_product = torch.zeros_like(rate), torch.zeros_like(rate)
    while (going := log_product > -rate).any():
        keys, once = split(keys).unbind(1)
        count += going
        log_product += _uniforms(once, rate).log()
    return count - 1


def _poisson_by_rejection(keys: Tensor, rate: Tensor) -> Tensor:
    """Hormann, "The transformed rejection method for generating Poisson random variables", 1993."""
    b = 0.931 + 2.53 * rate.sqrt()
    a = -0.059 + 0.02483 * b
    inverse_alpha = 1.1239 + 1.1328 / (b - 3.4)
    v_r = 0.9277 - 3.6224 / (b - 2)
    counts, done = torch.full_like(rate, -1), torch.zeros_like(rate, dtype=torch.bool)
    while not done.all():
        open_row = ~done.all(1, keepdim=True)
        keys, for_u, for_v = split(keys, 3).unbind(1)
        u, v = _uniforms(for_u, rate) - 0.5, _uniforms(for_v, rate)
        edge = 0.5 - u.abs()
        k = ((2 * a / edge + b) * u + rate + 0.43).floor()
        impossible = (k < 0) | ((edge < 0.013) & (v > edge))
        log_ratio = (v * inverse_alpha / (a / (edge * edge) + b)).log()
        accepted = ~impossible & (log_ratio <= -rate + k * rate.log() - torch.lgamma(k + 1))
        accepted |= (edge >= 0.07) & (v <= v_r)
        # As in JAX, the last accepted proposal of an element counts, until all of its row is accepted.
        counts = torch.where(accepted & open_row, k, counts)
        done |= accepted
    return counts


def _binomial_op(key: Tensor, n: Tensor, p: Tensor) -> Tensor:
    keys, trials, chance = _rows(key, n, p)
    q = torch.where(chance < 0.5, chance, 1 - chance)
    impossible, wrong = trials.isnan() | (trials < 0), q.isnan() | (q < 0)
    q = torch.where(wrong, 0.01, q)
    small = impossible | (trials * q <= 10)
    trials = trials.floor()
    counts = torch.where(
        small,
        _binomial_by_waiting(keys, torch.where(small, trials, 0), q),
        _binomial_by_rejection(keys, torch.where(small, 1e4, trials), torch.where(small, 0.5, q)),
    )
    counts = torch.where(trials.isinf() & ~wrong & ~impossible, torch.inf, counts)
    counts = torch.where(impossible | wrong, torch.nan, counts)
    mirrored = ~(chance < 0.5) & ~impossible & ~q.isnan() & ~trials.isinf()
    return torch.where(mirrored, trials - counts, counts).reshape(n.shape)


def _binomial_by_waiting(keys: Tensor, trials: Tensor, p: Tensor) -> Tensor:
    """Devroye, Non-Uniform Random Variate Generation, 1986, X.4.3: count the waits for a success within the trials."""
    count, waited = torch.zeros_like(p), torch.zeros_like(p)
    while (going := waited <= trials).any():
        once, keys = split(keys).unbind(1)
        count += going
        waited += (_uniforms(once, p).log() / torch.log1p(-p)).ceil()
    return count - 1


def _binomial_by_rejection(keys: Tensor, trials: Tensor, p: Tensor) -> Tensor:
    """Hormann, "The generation of binomial random variates", 1993, algorithm BTRS."""
    deviation = (trials * p * (1 - p)).sqrt()
    b = 1.15 + 2.53 * deviation
    a = -0.0873 + 0.0248 * b + 0.01 * p
    c = trials * p + 0.5
    v_r = 0.92 - 4.2 / b
    odds = p / (1 - p)
    alpha = (2.83 + 5.1 / b) * deviation
    mode = ((trials + 1) * p).floor()
    at_mode = (mode + 0.5) * ((mode + 1) / (odds * (trials - mode + 1))).log() + _tail(mode) + _tail(trials - mode)
    counts, done = torch.full_like(p, -1), torch.zeros_like(p, dtype=torch.bool)
    while not done.all():
        open_row = ~done.all(1, keepdim=True)
        keys, for_u, for_v = split(keys, 3).unbind(1)
        u, v = _uniforms(for_u, p) - 0.5, _uniforms(for_v, p)
        edge = 0.5 - u.abs()
        k = ((2 * a / edge + b) * u + c).floor()
        impossible = (k < 0) | (k > trials)
        rest = trials - k + 1
        bound = (trials + 1) * ((trials - mode + 1) / rest).log() + (k + 0.5) * (odds * rest / (k + 1)).log()
        bound += at_mode - _tail(k) - _tail(trials - k)
        accepted = ~impossible & ((v * alpha / (a / (edge * edge) + b)).log() <= bound)
        accepted |= (edge >= 0.07) & (v <= v_r)
        counts = torch.where(accepted & open_row, k, counts)
        done |= accepted
    return counts


def _tail(k: Tensor) -> Tensor:
    """The error of Stirling's formula for log(k!). As in JAX, k is clamped to at most 9."""
    k = k.clamp(0, 9)
    return torch.lgamma(k + 1) - (k + 0.5) * (k + 1).log() + (k + 1) - 0.5 * math.log(2 * math.pi)


_poisson = _threefry.define_op(
    _poisson_op, "(Tensor key, Tensor lam) -> Tensor", lambda key, lam: torch.empty_like(lam), inline=False
)
_binomial = _threefry.define_op(
    _binomial_op, "(Tensor key, Tensor n, Tensor p) -> Tensor", lambda key, n, p: torch.empty_like(n), inline=False
)


def _to_integer(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as XLA does: a number out of range becomes the nearest one of `dtype`, and nan becomes 0."""
    limits = torch.iinfo(dtype)
    counts = counts.to(torch.promote_types(counts.dtype, torch.float32)).nan_to_num()
    # The largest number of a wide dtype is not a float, and the nearest float would overflow.
    return torch.where(counts < limits.max, counts.clamp(limits.min, limits.max).to(dtype), limits.max)


@sampler
def geometric(key: Tensor, p: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Geometric: how many trials until the first success.

    **Arguments:**

    - `key`: a key.
    - `p`: the probability of success, a number or a floating tensor, in (0, 1).
    - `shape`: the shape to draw, by default that of `p`.
    - `dtype`: an integer dtype, by default int32.

    **Returns:** a tensor of `shape` and `dtype`, all >= 1, equal to that of `jax.random.geometric` (except where
    the rounding of a logarithm decides: 3 in 100,000 at p = 1e-3, 2 in 100 at 1e-6). A count that is too large for
    `dtype` becomes the largest number of `dtype`.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.geometric(remat.random.key(0), 0.2, (3,))
        tensor([1, 1, 5], dtype=torch.int32)
    """
    dtype = check_integer("geometric", dtype)
    working = p.dtype if isinstance(p, Tensor) and p.is_floating_point() else torch.get_default_dtype()
    sizes, (chance,) = broadcast("geometric", key, shape, working, p)
    u = _threefry.uniform(key, sizes, working)
    u = torch.where(u == 0, 1, u)
    return _to_integer((u.log() / torch.log1p(-chance)).floor() + 1, dtype)


@sampler
def poisson(key: Tensor, lam: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Poisson.

    **Arguments:**

    - `key`: a key.
    - `lam`: the rate, a number or a tensor >= 0.
    - `shape`: the shape to draw, by default that of `lam`.
    - `dtype`: an integer dtype, by default int32.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.poisson` (except where rounding decides
    whether a proposal is rejected: 2 in 10,000 at a rate of 1000, 3 in 100 at 1e6); -1 where `lam` is negative or nan.
    A count that is too large for `dtype` becomes the largest number of `dtype`.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or a `shape` that does not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.poisson(remat.random.key(0), 4.0, (3,))
        tensor([0, 1, 5], dtype=torch.int32)
    """
    dtype = check_integer("poisson", dtype)
    sizes, (rate,) = broadcast("poisson", key, shape, torch.float32, lam)
    counts = _poisson(key, rate.detach().expand(sizes))
    return torch.where(counts == -1, -1, _to_integer(counts, dtype))  # -1 wraps in an unsigned dtype


@sampler
def binomial(key: Tensor, n: Real, p: Real, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Binomial: the number of successes in `n` trials.

    **Arguments:**

    - `key`: a key.
    - `n`: the number of trials, a number or a tensor >= 0.
    - `p`: the probability of success, a number or a tensor in [0, 1].
    - `shape`: the shape to draw, by default that of the parameters.
    - `dtype`: a floating dtype, by default torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.binomial` (except where rounding decides
    whether a proposal is rejected: 1 in 10,000 at n = 1e8); nan where a parameter is out of range.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or shapes that do not fit.

    Examples:
        >>> import remat.random
        >>> remat.random.binomial(remat.random.key(0), 10, 0.3, (3,))
        tensor([2., 2., 1.])
    """
    dtype = check_float("binomial", dtype)
    working = p.dtype if isinstance(p, Tensor) and p.is_floating_point() else torch.get_default_dtype()
    working = torch.promote_types(working, torch.float32)
    sizes, (trials, chance) = broadcast("binomial", key, shape, working, n, p)
    return _binomial(key, trials.detach().expand(sizes), chance.detach().expand(sizes)).to(dtype)


@sampler
def multinomial(
    key: Tensor, n: Real, p: Tensor, *, shape: Shape | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Multinomial: the number of trials, out of `n`, in each category.

    **Arguments:**

    - `key`: a key.
    - `n`: the number of trials, a number or a tensor >= 0 that broadcasts to `shape[:-1]`.
    - `p`: the probabilities of the categories, of shape (..., k).
    - `shape`: the shape to draw with the categories in its last dimension, by default that of `p`.
    - `dtype`: a floating dtype, by default torch's default dtype.

    **Returns:** a tensor of `shape` and `dtype`, equal to that of `jax.random.multinomial` as far as `binomial` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `dtype`, or shapes that do not fit.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> p = torch.tensor([0.2, 0.3, 0.5])
        >>> remat.random.multinomial(remat.random.key(0), 10, p).sum()
        tensor(10.)
    """
    dtype = check_float("multinomial", dtype)
    sizes, (chances,) = broadcast("multinomial", key, shape, torch.promote_types(dtype, torch.float32), p)
    _, (rest,) = broadcast("multinomial", key, sizes[:-1], chances.dtype, n)
    chances, rest = chances.expand(sizes), rest.expand(sizes[:-1])
    remaining = chances.flip(-1).cumsum(-1).flip(-1)
    ratios = (chances / torch.where(remaining == 0, 1, remaining)).clamp(0, 1)
    counts = []
    for once, ratio in zip(split(key, sizes[-1]), ratios.unbind(-1), strict=True):
        counts.append(binomial(once, rest, ratio, dtype=rest.dtype))
        rest = rest - counts[-1]
    return torch.stack(counts, -1).to(dtype)
