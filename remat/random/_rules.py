"""The table of torch's random functions, each with a rule to draw from a key.

A rule is called with `next_key`, torch's function and its arguments. The rules are in `_stateful` and
`_stateful_layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import RematError

NextKey = Callable[[], Tensor]

DRAWS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The rule for each of torch's random functions."""

_COMPOSITES = (
    "torch.autograd.backward",
    "torch.autograd.grad",
    "torch.nn.functional.alpha_dropout",
    "torch.nn.functional.dropout",
    "torch.nn.functional.dropout1d",
    "torch.nn.functional.dropout2d",
    "torch.nn.functional.dropout3d",
    "torch.nn.functional.feature_alpha_dropout",
    "torch.nn.functional.gumbel_softmax",
    "torch.nn.functional.multi_head_attention_forward",
    "torch.nn.functional.rrelu",
    "torch.Tensor.backward",
)
"""Python functions of torch that call random functions."""

_MAKERS = ("empty", "zeros", "ones", "full")
_FRESH = (
    "torch.Tensor.new",
    "torch.empty_strided",
    "torch.Tensor.new_empty_strided",
    *(f"torch.{maker}" for maker in _MAKERS),
    *(f"torch.{maker}_like" for maker in _MAKERS),
    *(f"torch.Tensor.new_{maker}" for maker in _MAKERS),
)
"""Functions that make constant tensors, which code may then fill in place."""


def _find(name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], torch)


def _past_the_modes(func: FunctionType) -> Callable[..., Any]:
    """A copy of `func` that does not offer itself to the modes, as torch's Python functions do.

    Otherwise the modes would not see the functions that it calls.
    """
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


COMPOSITES = {func: _past_the_modes(func) for func in map(_find, _COMPOSITES)}
FRESH = frozenset(map(_find, _FRESH))


def rule_for(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        DRAWS.update(dict.fromkeys(map(_find, names), rule))
        return rule

    return register


def key_on(device: torch.device | str | int | None, next_key: NextKey) -> Tensor:
    return next_key().to(_default_device() if device is None else device)


@internals.constant_for_dynamo
def _default_device() -> torch.device:
    return torch.get_default_device()


def require(function: str, rule: str, holds: bool | Tensor) -> None:
    """Refuse the parameters that torch's function refuses. The values of a tensor are checked if they can be read."""
    if isinstance(holds, Tensor):
        holds = torch.compiler.is_compiling() or holds.is_meta or bool(internals.vmap_levels()) or bool(holds.all())
    if not holds:
        raise ValueError(f"remat.random.keyed: {function} needs {rule}.")


def write(self: Tensor, value: Tensor) -> Tensor:
    try:
        return self.copy_(value)
    except RuntimeError as error:
        raise RematError(
            "remat.random.keyed: a draw in place into a tensor that is the same for all keys: under a vmap over keys "
            "it would have to become different for each. Draw out of place: inplace=False, or torch.rand instead of "
            "x.uniform_()."
        ) from error
