"""Discrete choices: permutations, choices, categories."""

from __future__ import annotations

import math
import operator
from typing import Literal

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import Shape, broadcast, check_float, check_shape, sampler, what
from remat.random._continuous import gumbel
from remat.random._key import split
from remat.random._uniform import randint, uniform


@sampler
def permutation(key: Tensor, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """A shuffled tensor, or a shuffled range.

    **Arguments:**

    - `key`: a key.
    - `x`: a tensor, or an int n (also as a tensor with no dimensions) for the int64 tensor 0 … n - 1.
    - `axis`: the axis to shuffle along.
    - `independent`: whether each vector along the axis gets its own permutation.

    **Returns:** a tensor with the shape and dtype of `x`, ordered as `jax.random.permutation` orders it.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` if `x` has no such `axis`, or is neither a tensor nor an
    int >= 0.

    Examples:
        >>> import remat.random
        >>> remat.random.permutation(remat.random.key(0), 5)
        tensor([0, 1, 4, 3, 2])
    """
    x = _population("permutation", "x", x)
    if not isinstance(x, Tensor):
        x = torch.arange(x, device=key.device)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"remat.random.permutation: axis must be in [-{x.ndim}, {x.ndim}) for {what(x)}; got {axis}.")
    if not independent and x.ndim > 1:
        return x.index_select(axis, permutation(key, x.shape[axis]).to(x.device))
    # Sort by random 32-bit words, often enough that ties do not matter. The sign flip orders the words as unsigned.
    for _ in range(math.ceil(3 * math.log(max(1, x.numel())) / math.log(2**32 - 1))):
        key, once = split(key)
        words = _threefry.bits(once, x.shape, 32).to(torch.int32) ^ -(2**31)
        x = x.take_along_dim(words.argsort(dim=axis, stable=True), axis)
    return x


@sampler
def choice(
    key: Tensor,
    a: int | Tensor,
    shape: Shape = (),
    replace: bool = True,
    p: Tensor | None = None,
    axis: int = 0,
    mode: Literal["low", "high"] | None = None,
) -> Tensor:
    """Elements of a tensor, or of a range, chosen at random.

    **Arguments:**

    - `key`: a key.
    - `a`: a tensor, or an int n (also as a tensor with no dimensions) for 0 … n - 1.
    - `shape`: the shape to draw.
    - `replace`: whether an element can be chosen more than once.
    - `p`: the probabilities, of shape (n,); equal by default.
    - `axis`: the axis of `a` to choose along.
    - `mode`: as for `gumbel`, to choose by `p` without replacement.

    **Returns:** a tensor of shape (*a.shape[:axis], *shape, *a.shape[axis + 1:]), equal to that of `jax.random.choice`
    (with `p`, except where rounding decides); int64 if `a` is an int.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a bad `a`, `shape` or `axis`, a `p` that does not
    fit, nothing to choose from, or more to choose than there is.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> a = torch.tensor([2.0, 3.0, 5.0])
        >>> remat.random.choice(remat.random.key(0), a, (4,))
        tensor([3., 2., 5., 3.])
    """
    who, sizes = "remat.random.choice", check_shape("choice", shape)
    a = _population("choice", "a", a)
    ndim = a.ndim if isinstance(a, Tensor) else 1
    if not -ndim <= axis < ndim:
        raise ValueError(f"{who}: axis must be in [-{ndim}, {ndim}) for {what(a)}; got {axis}.")
    axis %= ndim
    n, count = a.shape[axis] if isinstance(a, Tensor) else a, math.prod(sizes)
    if (count and n <= 0) or (count > n and not replace):
        raise ValueError(f"{who}: can't choose {count} of {n} {'with' if replace else 'without'} replacement.")
    if p is not None and not (isinstance(p, Tensor) and p.is_floating_point() and tuple(p.shape) == (n,)):
        raise ValueError(
            f"{who}: p must be a floating tensor of shape ({n},), a probability for each element; got {what(p)}."
        )
    if p is None and replace:
        index = randint(key, sizes, 0, max(n, 1)).flatten()
    elif p is None:
        index = permutation(key, n)[:count]
    elif replace:
        bounds = p.cumsum(0)
        index = torch.searchsorted(bounds, bounds[-1] * (1 - uniform(key, sizes, p.dtype))).flatten()
    else:
        index = (gumbel(key, (n,), p.dtype, mode) + p.log()).topk(count).indices
    if not isinstance(a, Tensor):
        return index.to(torch.int64).reshape(sizes)
    return a.index_select(axis, index.to(a.device)).reshape((*a.shape[:axis], *sizes, *a.shape[axis + 1 :]))


def _population(who: str, name: str, x: int | Tensor) -> int | Tensor:
    """A tensor of one or more dimensions, or an int."""
    if isinstance(x, Tensor) and x.ndim:
        return x
    try:
        n = operator.index(x)
    except (TypeError, RuntimeError):  # no integer, or one inside a transform
        n = -1
    if n < 0:
        raise ValueError(
            f"remat.random.{who}: {name} must be a tensor of shape (n, ...) or an int n >= 0 (also as an integer "
            f"tensor with no dimensions whose value can be read: not one that vmap maps over); got {what(x)}."
        )
    return n


@sampler
def categorical(
    key: Tensor,
    logits: Tensor,
    axis: int = -1,
    shape: Shape | None = None,
    replace: bool = True,
    mode: Literal["low", "high"] | None = None,
) -> Tensor:
    """Draw categories by their logits.

    **Arguments:**

    - `key`: a key.
    - `logits`: a floating tensor of unnormalized log probabilities.
    - `axis`: the axis of the categories.
    - `shape`: the shape to draw, by default that of `logits` without the axis. It may have more leading dimensions.
    - `replace`: if False, the draws along these leading dimensions are all different.
    - `mode`: as for `gumbel`; "high" for probabilities below 1e-7 (in float32).

    **Returns:** an int64 tensor of `shape`, equal to that of `jax.random.categorical` (except where rounding decides).

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for bad `logits`, a missing `axis`, a `shape` that does
    not fit, or more draws without replacement than categories.

    Source: Kool, van Hoof, Welling, "Stochastic beams and where to find them", ICML 2019, arXiv:1903.06059.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> logits = torch.tensor([0.0, 1.0, 2.0])
        >>> remat.random.categorical(remat.random.key(0), logits, shape=(5,))
        tensor([1, 1, 2, 1, 2])
    """
    who = "remat.random.categorical"
    if not isinstance(logits, Tensor) or logits.ndim < 1:
        raise ValueError(f"{who}: logits must be a floating tensor of shape (..., n); got {what(logits)}.")
    if not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"{who}: axis must be in [-{logits.ndim}, {logits.ndim}) for {what(logits)}; got {axis}.")
    dtype = check_float("categorical", logits.dtype)
    logits = logits.movedim(axis, -1)
    sizes, _ = broadcast("categorical", key, shape, dtype, logits[..., 0])
    front = sizes[: len(sizes) - (logits.ndim - 1)]
    axis %= logits.ndim
    if replace:
        # Draw the noise in the original layout of the logits.
        layout = list(sizes[len(front) :])
        layout.insert(axis, logits.shape[-1])
        noise = gumbel(key, (*front, *layout), dtype, mode).movedim(len(front) + axis, -1)
        return (noise + logits).argmax(-1)
    count = math.prod(front)
    if count > logits.shape[-1]:
        raise ValueError(f"{who}: can't draw {count} of {logits.shape[-1]} categories without replacement.")
    noise = gumbel(key, logits.movedim(-1, axis).shape, dtype, mode).movedim(axis, -1)
    return (noise + logits).topk(count).indices.movedim(-1, 0).reshape(sizes)
