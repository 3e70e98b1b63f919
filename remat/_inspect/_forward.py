"""Run a function for inspection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._errors import RematError
from remat._holder import Holder, tensors_held
from remat._saved import nodes_behind, unpacked_by_hooks


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return [x for x in _tree.flatten(tree)[0] if isinstance(x, Tensor)]


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Turn grad mode on in the block, and restore the generators after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.enable_grad(), torch.random.fork_rng(devices):
        yield


def graph_of(out: Any) -> list[Any]:
    """The nodes of the graph behind the results."""
    return nodes_behind(internals.gradient_edge(t).node for t in tensors(out) if t.requires_grad)


def tensors_behind(nodes: list[Any]) -> list[Tensor]:
    """The plain tensors that nodes hold, also those that saved-tensor hooks have packed."""
    return tensors([*tensors_held(nodes), *unpacked_by_hooks(nodes, Holder)])


def check(who: str, fun: Any) -> None:
    """Raise if `fun` can't be inspected, or not inside a transform."""
    if not callable(fun):
        raise TypeError(f"{who}: the function comes first, then its arguments; got {type(fun).__name__}.")
    if isinstance(fun, type) and issubclass(fun, torch.nn.Module):
        raise TypeError(f"{who}: got a class of modules, {fun.__qualname__}. Make a module of it first.")
    if internals.transforms_active():
        raise RematError(f"{who}: call it outside all transforms, not inside one.")


def forward(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Run a function such that its result has a graph, if possible. Returns the result and the arguments.

    If no argument and no captured tensor requires grad, all arguments do, as under `torch.func.grad`.
    """
    with trial():
        out = fun(*args, **kwargs)
        if any(t.requires_grad for t in tensors(out)):
            return out, args, kwargs
        given = _tree.Picked((args, kwargs), lambda t: t.is_floating_point() or t.is_complex())
        args, kwargs = given.replaced([t.detach().requires_grad_() for t in given.tensors])
    with trial():
        return fun(*args, **kwargs), args, kwargs


@contextlib.contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set the variable to the value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
