"""Checks of the arguments of `remat.random`, and their errors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeAlias

import torch
from torch import Tensor

P = ParamSpec("P")

Shape: TypeAlias = "int | Iterable[int]"
Real: TypeAlias = "float | Tensor"
"""A number, or a tensor that broadcasts with the others."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def what(x: object) -> str:
    """Describe an argument in an error."""
    if isinstance(x, Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {tuple(x.shape)}"
    return f"{x!r} of type {type(x).__name__}"


def check_key(who: str, key: object) -> Tensor:
    if isinstance(key, Tensor) and key.dtype == torch.uint32 and key.ndim >= 1 and key.shape[-1] == 2:
        return key
    signed = isinstance(key, Tensor) and key.dtype == torch.int32 and key.shape[-1:] == (2,)
    raise TypeError(
        f"remat.random.{who}: a key is a uint32 tensor of shape (2,), or (..., 2) for a batch of keys, as made by "
        f"remat.random.key(seed), split or fold_in; got {what(key)}."
        + (" View it back: .view(torch.uint32)." if signed else "")
    )


def check_shape(who: str, shape: Shape, name: str = "shape") -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, [shape] if isinstance(shape, int) else shape))
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        raise ValueError(f"remat.random.{who}: {name} must be an int >= 0, or a sequence of them; got {shape!r}.")
    return sizes


def check_size(who: str, size: int, name: str) -> int:
    if not hasattr(size, "__index__") or operator.index(size) < 0:
        raise ValueError(f"remat.random.{who}: {name} must be an int >= 0; got {what(size)}.")
    return operator.index(size)


def check_float(who: str, dtype: torch.dtype | None) -> torch.dtype:
    """Check a floating dtype. None stands for torch's default dtype."""
    return check_dtype(who, torch.get_default_dtype() if dtype is None else dtype, FLOATS)


def check_integer(who: str, dtype: torch.dtype | None) -> torch.dtype:
    """Check an integer dtype. None stands for int32, as in JAX."""
    return check_dtype(who, torch.int32 if dtype is None else dtype, INTEGERS)


def check_dtype(who: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    if dtype not in allowed:
        raise ValueError(f"remat.random.{who}: dtype must be one of {', '.join(map(str, allowed))}; got {dtype!r}.")
    return dtype


def broadcast(
    who: str, key: Tensor, shape: Shape | None, dtype: torch.dtype, *parameters: Real
) -> tuple[tuple[int, ...], list[Tensor]]:
    """Return the shape to draw (for None, that of the parameters) and the parameters as tensors of `dtype`."""
    if any(isinstance(p, (list, tuple)) for p in parameters):  # perhaps a shape in the position where torch has it
        raise _no_numbers(who, parameters)
    try:
        tensors = [
            torch.as_tensor(p, dtype=dtype, device=None if isinstance(p, Tensor) else key.device) for p in parameters
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_numbers(who, parameters) from error
    try:
        common = torch.broadcast_shapes(*(t.shape for t in tensors))
        sizes = tuple(common) if shape is None else check_shape(who, shape)
        fits = torch.broadcast_shapes(common, sizes) == sizes
    except RuntimeError:
        fits, sizes = False, ()
    if not fits:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"remat.random.{who}: the parameters must broadcast to one another and to `shape`; got parameters of shape "
            f"{shapes} and shape={shape!r}."
        )
    return sizes, tensors


def _no_numbers(who: str, parameters: tuple[object, ...]) -> TypeError:
    got = ", ".join(map(what, parameters))
    return TypeError(
        f"remat.random.{who}: the parameters must be numbers or tensors; got {got}. Pass a shape by name: shape=(...)."
    )


def sampler(fun: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Check the key, and map over a batch of keys, so that `fun` always gets a single key."""

    @functools.wraps(fun)
    def sample(key: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if check_key(fun.__name__, key).ndim == 1:
            return fun(key, *args, **kwargs)
        return torch.vmap(lambda one: sample(one, *args, **kwargs))(key)

    return sample  # type: ignore[return-value]  # the name of the first parameter is not part of the type
