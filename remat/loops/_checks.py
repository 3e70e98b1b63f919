"""Checks of loops: options, lengths, and that the carry keeps its structure, shapes and dtypes."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from remat import _compile, _tree
from remat import _torch_internals as internals
from remat._errors import shown
from remat.policies import as_policy
from remat.policies._policy import PolicyLike


def kinds_of(leaves: Iterable[Any], skip: int = 0) -> list[Any]:
    """What must not change from step to step: shape (without `skip` leading dimensions) and dtype, or the type."""
    with internals.DisableTorchFunction():  # `.shape` is a torch call, which no mode need see
        return [(tuple(x.shape[skip:]), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]


def named(kind: Any) -> str:
    return f"{list(kind[0])}, {kind[1]}" if isinstance(kind, tuple) else f"of type {kind.__name__}"


def paths(spec: _tree.PyTreeSpec, root: str) -> list[str]:
    return [accessor.codify(root) for accessor in spec.accessors()]


def differ(one: _tree.PyTreeSpec, other: _tree.PyTreeSpec) -> bool:
    return not _compile.tracing() and one != other  # dynamo can't compare them


def structure(spec: _tree.PyTreeSpec) -> str:
    return str(spec).removeprefix("PyTreeSpec(").removesuffix(", NoneIsLeaf, namespace='torch')")


class CarryCheck:
    """Checks the carries that a body returns, and returns them.

    It is no function, because remat would freeze the closure of a function in each call.
    """

    def __init__(self, who: str, what: str, init: Any) -> None:
        """`what`: the name of the body in errors. No tensor of `init` is held."""
        leaves, self._spec = _tree.flatten(init)
        self._kinds = kinds_of(leaves)
        self._must, self._what = f"{who}: {what} must return a carry of the", what

    def __call__(self, carry: Any) -> Any:
        found, spec = _tree.flatten(carry)
        if differ(spec, self._spec):
            init, got = structure(self._spec), structure(spec)
            raise TypeError(f"{self._must} structure of init, {init}; got {got} (* is a leaf).")
        for i, (kind, new) in enumerate(zip(self._kinds, kinds_of(found), strict=True)):
            if new != kind:
                path = paths(spec, "carry")[i]
                is_tensor_now = isinstance(new, tuple) and not isinstance(kind, tuple)
                hint = " Begin with a tensor: torch.tensor(...)." if is_tensor_now else ""
                raise TypeError(
                    f"{self._must} shapes and dtypes of init. {path} is {named(kind)} in init, and {named(new)} in "
                    f"the result of {self._what}.{hint}"
                )
        return carry


def check_options(who: str, checkpoints: Any, policy: PolicyLike, **functions: Any) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{who}: {name} must be a function; got {shown(function)}.")
    if checkpoints is not None and (not isinstance(checkpoints, numbers.Integral) or isinstance(checkpoints, bool)):
        raise TypeError(f"{who}: checkpoints must be an int or None; got {shown(checkpoints)}.")
    if checkpoints is not None and checkpoints < 1:
        raise ValueError(f"{who}: checkpoints must be at least 1: the initial state is one; got {checkpoints}.")
    as_policy(policy)


def as_int(who: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # torch's, for a tensor that a vmap maps over
        hint = "If a tensor says how many steps there are, write remat.while_loop." if isinstance(value, Tensor) else ""
        raise TypeError(f"{who}: {name} must be an int; got {shown(value)}. {hint}".rstrip()) from None


def steps_of(xs: Any, length: Any) -> int:
    """The number of steps of a scan."""
    n = None if length is None else as_int("remat.scan", "length", length)
    if n is not None and n < 0:
        raise ValueError(f"remat.scan: length must not be negative; got {n}.")
    leaves, spec = _tree.flatten(xs)
    first: int | None = None

    def path(i: int | None) -> str:
        return "length" if i is None else paths(spec, "xs")[i]

    for i, x in ((i, x) for i, x in enumerate(leaves) if x is not None):
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or x.dim() == 0:
            raise TypeError(f"remat.scan: {path(i)} must be a tensor, its leading dimension the steps; got {shown(x)}.")
        if n is not None and x.shape[0] != n:
            raise ValueError(f"remat.scan: {path(first)} says {n} steps, but {path(i)} has {x.shape[0]}.")
        n, first = x.shape[0], i
    if n is None:
        raise ValueError("remat.scan: how many steps? Give xs, or length.")
    return n
