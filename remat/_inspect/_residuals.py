"""Residuals: values that are held between forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remat._errors import call_site
from remat._inspect._forward import check, forward, graph_of, tensors_behind
from remat._inspect._origins import Origins, names_of
from remat._inspect._tables import bytes_text, table
from remat._layers import inner_tensors
from remat._ops import storages


@dataclass(frozen=True)
class Residual:
    """A storage that is held between forward and backward. `saved_residuals` lists them.

    **Attributes:**

    - `shape`, `dtype`: of the tensor that was computed, passed or captured; or of the largest view that is held.
    - `device`: the device that holds the value: the CPU, if it is offloaded.
    - `nbytes`: bytes of the whole storage.
    - `why`: "from the argument x['w']", "captured w (closure of block)", "named 'attn'" or "output of
        aten.mm.default".
    - `where`: file:line of the code that computed the value; for an argument or a captured tensor, of the code that
        first read it.

    Examples:
        >>> import torch
        >>> from remat import remat, saved_residuals
        >>> [residual] = saved_residuals(remat(lambda x: x.sin()), torch.zeros(3))
        >>> residual.shape, residual.nbytes, residual.why
        ((3,), 12, 'from the argument x')
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    why: str
    where: str

    @property
    def is_view(self) -> bool:
        """Whether the tensor is a part of the storage."""
        return math.prod(self.shape) * self.dtype.itemsize < self.nbytes

    @property
    def computed(self) -> bool:
        """Whether the function computed it. Arguments and captured tensors would be in memory anyway."""
        return not self.why.startswith(("from the argument ", "captured "))


def _tensor(r: Residual) -> str:
    text = f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}"
    return f"{text}, view of {bytes_text(r.nbytes)}" if r.is_view else text


def format_residuals(residuals: Sequence[Residual]) -> str:
    """Residuals as a table."""
    rows = [(bytes_text(r.nbytes), _tensor(r), str(r.device), r.why, r.where) for r in residuals]
    return table(("size", "tensor", "device", "why", "where"), rows, left=(1, 2, 3, 4))


def total_bytes(residuals: Iterable[Residual]) -> int:
    """The bytes of the residuals that the function computed."""
    return sum(r.nbytes for r in residuals if r.computed)


def residual_of(shape: torch.Size, dtype: torch.dtype, storage: Any, why: str, where: str) -> Residual:
    """The residual of a storage. `shape`, `dtype`: of the tensor in it that is shown."""
    return Residual(tuple(shape), dtype, storage.device, storage.nbytes(), why, where)


def largest_views(found: Iterable[Tensor]) -> dict[Any, Tensor]:
    """By storage, the largest of the tensors that lie in it."""
    views = [t for x in found for t in inner_tensors(x)]
    return {s: t for t in sorted(views, key=lambda t: t.nbytes) for s in storages([t])}


def outside_residuals(
    fun: Any, args: Any, kwargs: Any, views: dict[Any, Tensor], read: dict[Any, str], where: str
) -> list[Residual]:
    """The residuals that a function did not compute: its arguments, then captured tensors.

    **Arguments:**

    - `views`: by storage, a tensor in it.
    - `read`: by storage, where the code first read it; `where` stands for those that are not known.
    """
    names = {s: why for s, why in names_of(fun, args, kwargs, views).items() if s.nbytes()}
    return [residual_of(views[s].shape, views[s].dtype, s, why, read.get(s, where)) for s, why in names.items()]


def saved_residuals(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Residual]:
    """List the values that are held in memory between the forward and the backward of a function.

    The function runs. Then each storage is listed that its graph holds: values that the function computed, and the
    arguments and captured tensors that the backward reads, which would be in memory anyway. The list includes the
    values that policies keep in remat'd functions and in calls of `remat.checkpoint`.

    The list assumes a `.backward()` to the tensors that require grad. If no argument and no captured tensor requires
    grad, it assumes the gradients of all arguments.

    **Arguments:**

    - `fun`: any function: a remat'd function, one that calls remat'd functions, or a plain one.
    - `args`, `kwargs`: its arguments.

    **Returns:** the residuals, each storage once: arguments, then captured tensors, then computed values.

    **Raises:** `TypeError` if `fun` is no function; `RematError` inside a transform of `torch.func`.

    **Source:** `jax.ad_checkpoint.saved_residuals`.

    Examples:
        >>> import torch
        >>> from remat import checkpoint_name, policies, remat, saved_residuals
        >>> def block(w, x):
        ...     return torch.sin(checkpoint_name(x @ w, "hidden"))
        >>> w, x = torch.eye(2), torch.ones(3, 2)
        >>> [r.why for r in saved_residuals(block, w, x)]
        ['from the argument w', 'from the argument x', "named 'hidden'"]
        >>> [r.why for r in saved_residuals(remat(block), w, x)]
        ['from the argument w', 'from the argument x']
    """
    check("saved_residuals", fun)
    here = call_site()
    origins = Origins()
    with origins:
        out, args, kwargs = forward(fun, args, kwargs)
    nodes = graph_of(out)
    out = None  # frees what only the result holds
    views = largest_views(tensors_behind(nodes))
    outside = {storage: t for storage, t in views.items() if storage not in origins.made}
    residuals = outside_residuals(fun, args, kwargs, outside, origins.read, here)
    for storage, origin in origins.made.items():
        if storage.nbytes():
            held = views.get(storage, origin)
            residuals.append(residual_of(held.shape, held.dtype, storage, origin.why, origin.where))
    return residuals
