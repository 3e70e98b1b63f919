"""Dropout with a key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remat.random._check import sampler, what
from remat.random._uniform import bernoulli


@sampler
def dropout(key: Tensor, x: Tensor, rate: float = 0.5, *, broadcast_dims: Sequence[int] = ()) -> Tensor:
    """Set a random fraction of the elements of `x` to zero, and scale the others up to keep the mean.

    **Arguments:**

    - `key`: a key.
    - `x`: a floating tensor. Differentiable.
    - `rate`: the probability of zero, in [0, 1]. With 0 the result is `x`, with 1 it is 0.
    - `broadcast_dims`: dimensions along which all elements are kept or dropped together: `(-2, -1)` drops whole
        channels, as `torch.nn.Dropout2d` does.

    **Returns:** a tensor like `x`.

    **Raises:** `TypeError` if `key` is not a key or `x` is not floating, `ValueError` for a `rate` outside [0, 1]
    or a dimension that `x` does not have.

    Source: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> remat.random.dropout(remat.random.key(1), torch.ones(2, 4), 0.5)
        tensor([[2., 0., 2., 2.],
                [0., 0., 0., 0.]])
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"remat.random.dropout: rate must be a probability, in [0, 1]; got {rate!r}.")
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"remat.random.dropout: x must be a floating tensor; got {what(x)}.")
    shape = list(x.shape)
    for dim in broadcast_dims:
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"remat.random.dropout: broadcast_dims must be in [-{x.ndim}, {x.ndim}) for x of shape "
                f"{tuple(x.shape)}; got {dim}."
            )
        shape[dim] = 1
    scale = 1 / (1 - rate) if rate < 1 else 0.0
    return torch.where(bernoulli(key, 1 - rate, shape), x * scale, 0)
