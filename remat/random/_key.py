"""Keys, and new keys from keys.

A key is a plain tensor of two uint32 words on any device. A batch of keys has leading dimensions. Keys can be indexed,
stacked, sent to a device and mapped over with `torch.vmap`, like any other tensor. Use each key only once.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from remat.random import _threefry
from remat.random._check import Shape, check_key, check_shape, what


def key(seed: int | Tensor, *, device: torch.device | str | int | None = None) -> Tensor:
    """Make a key from a seed.

    **Arguments:**

    - `seed`: an int, or an integer tensor with no dimensions. As in JAX's default mode, only its low 32 bits are used:
        -1 is 2**32 - 1. An int has to be from -2**63 to 2**63 - 1.
    - `device`: the device of the key and of all draws from it; by default the seed's device, or torch's default
        device.

    **Returns:** a uint32 tensor of shape (2,), equal to `jax.random.key_data(jax.random.key(seed))`.

    **Raises:** `TypeError` for anything but an integer, `OverflowError` for one out of this range.

    Examples:
        >>> import remat.random
        >>> remat.random.key(42)
        tensor([ 0, 42], dtype=torch.uint32)
    """
    if isinstance(seed, Tensor) and seed.ndim == 0 and is_integer(seed):
        low = seed.to(dtype=torch.int32, device=device)
        return torch.stack([torch.zeros_like(low), low]).to(torch.uint32)
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or isinstance(seed, Tensor):
        raise TypeError(
            "remat.random.key: seed must be an int, or an integer tensor with no dimensions (for several seeds write "
            f"torch.vmap(key)(seeds)); got {what(seed)}."
        )
    if not -(2**63) <= number < 2**63:
        raise OverflowError(f"remat.random.key: seed must be from -2**63 to 2**63 - 1; got {number}. Take it % 2**63.")
    return torch.tensor([0, _wrap32(number)], dtype=torch.int32, device=device).view(torch.uint32)


PRNGKey = key


def split(key: Tensor, num: Shape = 2) -> Tensor:
    """Make new keys from a key. Do not use the old key again.

    **Arguments:**

    - `key`: a key, or a batch of shape (..., 2).
    - `num`: the number of new keys, or the shape of a batch of them.

    **Returns:** keys of shape (..., *num, 2). The i-th of them is `fold_in(key, i)`, whatever `num` is.

    **Raises:** `TypeError` if `key` is not a key; `ValueError` for a negative `num`.

    Examples:
        >>> import remat.random
        >>> for_weights, for_noise = remat.random.split(remat.random.key(0))
        >>> remat.random.split(for_noise, (3, 4)).shape
        torch.Size([3, 4, 2])
    """
    check_key("split", key)
    shape = check_shape("split", num, "num")
    count = torch.Size(shape).numel()
    index = torch.arange(count, device=key.device)
    return fold_in(key.unsqueeze(-2), index).reshape(*key.shape[:-1], *shape, 2)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Make a new key from a key and a number, such as a step, a rank or the index of a layer.

    **Arguments:**

    - `key`: a key, or a batch of shape (..., 2).
    - `data`: an int of 32 bits, signed or unsigned (-1 is 2**32 - 1); or an integer tensor that broadcasts with the
        batch of keys, of which the low 32 bits are used.

    **Returns:** a key for each element: shape (broadcast of `key.shape[:-1]` and `data.shape`, 2).

    **Raises:** `TypeError` if `key` is not a key or `data` is not an integer, `ValueError` if they do not broadcast, or
    for an int of more than 32 bits.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> key = remat.random.key(0)
        >>> remat.random.fold_in(key, 7)
        tensor([2716826189,  292468403], dtype=torch.uint32)
        >>> remat.random.fold_in(key, torch.arange(5)).shape
        torch.Size([5, 2])
    """
    check_key("fold_in", key)
    if isinstance(data, Tensor) and is_integer(data):
        number = data.to(torch.int32)
    elif not isinstance(data, Tensor) and hasattr(data, "__index__"):
        if not -(2**31) <= operator.index(data) < 2**32:
            raise ValueError(
                f"remat.random.fold_in: data must fit in 32 bits; got {data}. Fold in its high bits, then its low bits."
            )
        number = torch.full((), _wrap32(operator.index(data)), dtype=torch.int32, device=key.device)
    else:
        raise TypeError(f"remat.random.fold_in: data must be an int or an integer tensor; got {what(data)}.")
    try:
        shape = torch.broadcast_shapes(key.shape[:-1], number.shape)
    except RuntimeError:
        raise ValueError(
            f"remat.random.fold_in: a batch of keys and data must broadcast; got keys of shape {tuple(key.shape[:-1])} "
            f"and data of shape {tuple(number.shape)}."
        ) from None
    return _threefry.fold_in(key.expand(*shape, 2), number.expand(shape))


def clone(key: Tensor) -> Tensor:
    """Copy a key, to use it twice on purpose.

    **Arguments:** `key`: a key or a batch of keys.

    **Returns:** a copy of the tensor.

    **Raises:** `TypeError` if `key` is not a key.

    Examples:
        >>> import remat.random
        >>> remat.random.clone(remat.random.key(1))
        tensor([0, 1], dtype=torch.uint32)
    """
    return check_key("clone", key).clone()


def key_data(keys: Tensor) -> Tensor:
    """Return the words of keys, as `jax.random.key_data` does, to save them or to pass them to JAX.

    **Arguments:** `keys`: keys of shape (..., 2).

    **Returns:** `keys` itself, because a key is its data.

    **Raises:** `TypeError` if `keys` are not keys.

    Examples:
        >>> import remat.random
        >>> remat.random.key_data(remat.random.key(3)).tolist()
        [0, 3]
    """
    return check_key("key_data", keys)


def wrap_key_data(key_bits_array: Tensor) -> Tensor:
    """Make keys from their words, such as `torch.from_numpy(numpy.array(jax.random.key_data(k)))`.

    **Arguments:** `key_bits_array`: a uint32 tensor of shape (..., 2).

    **Returns:** the keys: the same tensor, checked.

    **Raises:** `TypeError` for another dtype or shape.

    Examples:
        >>> import remat.random
        >>> import torch
        >>> remat.random.wrap_key_data(torch.tensor([0, 3], dtype=torch.uint32))
        tensor([0, 3], dtype=torch.uint32)
    """
    return check_key("wrap_key_data", key_bits_array)


def _wrap32(number: int) -> int:
    """The int32 with the low 32 bits of a number."""
    return (number + 2**31) % 2**32 - 2**31


def is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
