"""Run a function for inspection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from remat import _torch_internals as internals
from remat import _tree
from remat._errors import RematError
from remat._holder import Holder, tensors_held
from remat._saved import unpacked_by_hooks


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree that have storages."""
    leaves: list[Any] = optree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Turn grad mode on in the block, and restore the generators after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.enable_grad(), torch.random.fork_rng(devices):
        yield


def root_nodes(out: Any) -> list[Any]:
    """The nodes that made the results."""
    return [get_gradient_edge(t).node for t in tensors(out) if t.requires_grad]


def tensors_behind(nodes: list[Any]) -> list[Tensor]:
    """The plain tensors that nodes hold, also those that saved-tensor hooks have packed."""
    found = [*tensors_held(nodes), *unpacked_by_hooks(nodes, Holder)]
    return [t for t in found if t.layout == torch.strided]


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
        leaves, spec = _tree.flatten((args, kwargs))
        for i, t in enumerate(leaves):
            if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
                leaves[i] = t.detach().requires_grad_()
        args, kwargs = _tree.unflatten(spec, leaves)
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


def is_leaf(node: Any) -> bool:
    """Whether a node is an `AccumulateGrad` node, which adds to the `.grad` of a leaf."""
    return hasattr(node, "variable")
