"""Names of values, for policies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._errors import shown

T = TypeVar("T")

_current: ContextVar[str | None] = ContextVar("remat_name", default=None)


def current_name() -> str | None:
    """The name that `checkpoint_name` is giving, while its op runs; else None."""
    return _current.get()


class Kept(str):
    """The name of a value that every policy keeps."""

    __slots__ = ()


def keep(name: str, tree: Any) -> None:
    """Make every policy keep these values, if the backward reads them. `name` is for inspection."""
    _give(Kept(name), tree)


def checkpoint_name(x: T, /, name: str) -> T:
    """Name a value, so that a policy can say whether it is kept.

    A name alone has no effect. `remat(fun, policy=save_only_these_names("attn"))` keeps the values with that name, and
    any number of values can have it. The function has to use the returned value: `x = checkpoint_name(x, "attn")`.

    `checkpoint_name` works under every transform of `torch.func`, in modules, in the forward of an
    `autograd.Function`, and under torch's own selective checkpointing. It copies no tensors: it returns an alias of
    `x`, or `x` itself if no policy is active.

    **Arguments:**

    - `x`: a tensor, or a tree of tensors, which all get the name. Leaves of other types do not change.
    - `name`: the name.

    **Returns:** `x` with the same values.

    **Raises:** `TypeError` if `name` is not a string.

    **Source:** `jax.ad_checkpoint.checkpoint_name`.

    Examples:
        >>> import torch
        >>> from torch.func import grad
        >>> from remat import checkpoint_name, policies, remat
        >>> def f(x):
        ...     y = checkpoint_name(torch.sin(x), "y")
        ...     return torch.cos(y).sum()
        >>> policy = policies.save_only_these_names("y")
        >>> grad(remat(f, policy=policy))(torch.zeros(2))
        tensor([-0., -0.])
    """
    if not isinstance(name, str):
        raise TypeError(
            f"checkpoint_name: name must be a string; got {shown(name)}. The order is checkpoint_name(x, name)."
        )
    if torch.compiler.is_dynamo_compiling():
        return internals.call_lifted(functools.partial(_when_the_op_runs, name), _same, x)
    return _give(name, x)


def _give(name: str, tree: T) -> T:
    """The tree with aliases of its tensors, which have the name; the tree itself if no mode would see it."""
    if not (internals.dispatch_modes_active() or internals.function_modes_active()):
        return tree
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten(spec, _named(name, leaves))


def _named(name: str, leaves: Iterable[Any]) -> list[Any]:
    token = _current.set(name)
    try:
        # The op runs in the forward and in the rerun, with or without a policy, because the two are compared call by
        # call. Also in no_grad, an alias is differentiated as the tensor is.
        with torch.enable_grad():
            return [_alias(t) if isinstance(t, Tensor) else t for t in leaves]
    finally:
        _current.reset(token)


def _alias(tensor: Tensor) -> Tensor:
    # Nested tensors of torch 2.13 have no alias.
    return tensor.view_as(tensor) if tensor.layout is torch.jagged else torch.ops.aten.alias.default(tensor)


# Dynamo can't trace the functions above, so they are one op of its graph. See NOTE [two compilers].


def _same(x: Any) -> Any:
    with torch.enable_grad():
        return internals.tree_map(lambda t: t.view_as(t) if isinstance(t, Tensor) else t, x)


def _when_the_op_runs(name: str, graph: Any) -> Callable[..., Any]:
    return lambda *args: tuple(_named(name, graph(*args)))
