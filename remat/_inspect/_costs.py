"""The costs of the ops in a function that a policy can name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from remat._dispatch_mode import DispatchMode
from remat._inspect._forward import check, forward, graph_of, setting, tensors, trial
from remat._inspect._tables import bytes_text, flops_text, seconds_text, table
from remat._names import current_name
from remat._ops import DETACH, storages
from remat._remat import plainly


@dataclass(frozen=True)
class OpCost:
    """The cost of an op in one run of a function.

    **Attributes:**

    - `op`: its name for policies: "aten.mm.default".
    - `count`: the number of its calls.
    - `nbytes`: bytes of all its results; 0 for a view.
    - `flops`: floating point operations; 0 if `torch.utils.flop_counter` does not know the op.
    - `seconds`: the time of all its calls.

    Examples:
        >>> import torch
        >>> from remat import list_ops
        >>> list_ops(torch.mm, torch.eye(3), torch.ones(3, 2))[0].flops
        36
    """

    op: str
    count: int
    nbytes: int
    flops: int
    seconds: float


class OpCosts(tuple[OpCost, ...]):
    """The ops of a function, the most expensive first: a sequence of `OpCost`.

    **Attributes:**

    - `ops`: the same as a tuple.

    Examples:
        >>> import torch
        >>> from remat import list_ops
        >>> ops = list_ops(lambda x: torch.sin(x).exp(), torch.ones(3))
        >>> sorted(o.op for o in ops)
        ['aten.exp.default', 'aten.sin.default']
    """

    __slots__ = ()

    @property
    def ops(self) -> tuple[OpCost, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        rows = [(o.op, str(o.count), bytes_text(o.nbytes), flops_text(o.flops), seconds_text(o.seconds)) for o in self]
        return table(("op", "count", "size", "FLOPs", "time"), rows, left=(0,))


class _Costs(DispatchMode):
    """Measures the ops that policies are asked about."""

    looks_inside = True

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, OpCost] = {}

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        start = time.perf_counter()
        out = func(*args, **kwargs)
        _wait_for(out)
        seconds = time.perf_counter() - start
        if func is not DETACH and current_name() is None:
            name = str(func)
            old = self.costs.get(name, OpCost(name, 0, 0, 0, 0.0))
            made = set(storages(tensors(out))).difference(storages(tensors((args, kwargs))))
            flops_of = flop_registry.get(getattr(func, "overloadpacket", None))
            self.costs[name] = OpCost(
                name,
                old.count + 1,
                old.nbytes + sum(s.nbytes() for s in made),
                old.flops + (0 if flops_of is None else flops_of(*args, **kwargs, out_val=out)),
                old.seconds + seconds,
            )
        return out


def costs_of_gradient(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, float]:
    """The floating point operations of a function and its backward, and their time in seconds."""
    _, args, kwargs = forward(fun, args, kwargs)
    with trial(), _Costs() as mode:
        _gradient(fun, args, kwargs)
    with trial():
        return sum(c.flops for c in mode.costs.values()), min(_gradient(fun, args, kwargs) for _ in range(3))


def _gradient(fun: Callable[..., Any], args: Any, kwargs: Any) -> float:
    start = time.perf_counter()
    out = fun(*args, **kwargs)
    results = [t for t in tensors(out) if t.requires_grad]
    leaves = [n.variable for n in graph_of(out) if hasattr(n, "variable")]
    out = None
    if results:
        _wait_for(torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True))
    return time.perf_counter() - start


def _wait_for(out: Any) -> None:
    for device in {t.device for t in tensors(out) if t.device.type not in ("cpu", "meta")}:
        torch.accelerator.synchronize(device)


def list_ops(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> OpCosts:
    """List the ops of a function that a policy can name, with their costs.

    These are the ops of the forward, below autograd and below every transform in the function. Under an outer `vmap`
    or `grad` the ops may differ: `mm` becomes `bmm`. `list_ops(vmap(fun), ...)` lists those.

    **Arguments:**

    - `fun`: any function, under remat or not.
    - `args`, `kwargs`: its arguments. The function runs at least twice, and the last run is measured.

    **Returns:** the ops, the slowest first. They print as a table.

    **Raises:** `TypeError` if `fun` is no function; `RematError` inside a transform of `torch.func`.

    Examples:
        >>> import torch
        >>> from remat import list_ops
        >>> from remat.policies import save_ops
        >>> def layer(w, x):
        ...     return torch.sin(x @ w)
        >>> ops = list_ops(layer, torch.eye(64), torch.ones(32, 64))
        >>> print(ops)
        op                count   size        FLOPs     time
        aten...
        >>> save_ops(*[o.op for o in ops if o.flops])
        save_ops('aten.mm.default')
    """
    check("list_ops", fun)
    with setting(plainly, True):
        _, args, kwargs = forward(fun, args, kwargs)
        with trial(), _Costs() as costs:
            fun(*args, **kwargs)
    return OpCosts(sorted(costs.costs.values(), key=lambda o: -o.seconds))
