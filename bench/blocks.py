"""Ten blocks of twelve small ops: what remat costs in each kind of derivative, and whatever the function looks like.

A block works on 8 x 16 numbers, so that what is measured is Python and not arithmetic. Each block is a function of its
own under checkpointing, and closes over a weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from _common import WAYS, Benchmark, Fun, Row, Run, leaf
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.overrides import TorchFunctionMode

BLOCKS, BATCH = 10, 3
WAYS_COMPARED = ("no remat", "torch, non-reentrant", "remat")
NEST = 60


def twelve_ops(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x * w + 0.5)
    return x


@dataclasses.dataclass
class Settings:
    """What some users close over."""

    scale: float = 1.0


def plainly(w: Tensor) -> Fun:
    return lambda x: twelve_ops(x, w)


def with_settings(w: Tensor) -> Fun:
    settings = Settings()

    def block(x: Tensor) -> Tensor:
        assert getattr(settings, "scale", None)
        return twelve_ops(x, w)

    return block


def with_try(w: Tensor) -> Fun:
    def block(x: Tensor) -> Tensor:
        try:
            return twelve_ops(x, w)
        except ValueError:
            return x

    return block


def with_store(w: Tensor) -> Fun:
    def block(x: Tensor) -> Tensor:
        parts = {"x": x}
        parts["y"] = twelve_ops(parts["x"], w)
        return parts["y"]

    return block


def in_a_module(w: Tensor) -> Fun:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(w.detach()))
    return lambda x: twelve_ops(x, module.w)


def with_in_place_ops(w: Tensor) -> Fun:
    def block(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * w).add_(0.5).tanh_()
        return x

    return block


KINDS: dict[str, Callable[[Tensor], Fun]] = {
    "a closure": plainly,
    "with a dataclass of settings": with_settings,
    "with a try": with_try,
    "with a dict store": with_store,
    "with a module": in_a_module,
    "with in-place ops": with_in_place_ops,
}


def chain(way: Callable[[Fun], Fun], kind: Callable[[Tensor], Fun]) -> Fun:
    blocks = [way(kind(leaf(torch.randn(8, 16)))) for _ in range(BLOCKS)]

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x.sum()

    return run


def backward(fun: Fun) -> Run:
    x = leaf(torch.randn(8, 16))
    return lambda: fun(x).backward()


def under(derivative: Callable[[Fun], Fun], *batch: int) -> Callable[[Fun], Run]:
    def make(fun: Fun) -> Run:
        x, of = torch.randn(*batch, 8, 16), derivative(fun)
        return lambda: of(x)

    return make


DERIVATIVES: dict[str, Callable[[Fun], Run]] = {
    "grad": under(grad),
    "vmap(grad)": under(lambda f: vmap(grad(f)), BATCH),
    "jvp(grad)": under(lambda f: lambda x: jvp(grad(f), (x,), (torch.ones_like(x),))),
    "grad(grad)": under(lambda f: grad(lambda x: grad(f)(x).sum())),
}


class Blind(TorchFunctionMode):
    """Sees each torch call, and does nothing about it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class ByHand(torch.autograd.Function):
    """Checkpointing without any check, for one argument and what the function closes over."""

    @staticmethod
    def forward(ctx: Any, fun: Fun, mode: Any, x: Tensor) -> Tensor:
        ctx.fun, ctx.mode = fun, mode
        ctx.save_for_backward(x)
        with mode:
            return fun(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ctx.mode:
            out = ctx.fun(x)
        out.backward(cotangent)
        return None, None, x.grad


def by_hand(mode: Callable[[], Any]) -> Callable[[Fun], Fun]:
    return lambda fun: lambda x: ByHand.apply(fun, mode(), x)


FLOORS = {"by hand": by_hand(contextlib.nullcontext), "by hand, under an empty mode": by_hand(Blind)}
"""What a checkpoint costs without any check, and under a mode that sees each torch call, as remat's does."""


def of_a_large_model(way: Callable[[Fun], Fun]) -> Run:
    """A function that closes over a model of 800 modules, and uses one."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(800))
    x = leaf(torch.randn(4, 4))
    return lambda: way(lambda x: model[400](x))(x).sum().backward()


def nest(way: Callable[[Fun], Fun]) -> Run:
    """A function that calls a function that calls a function ..., each under checkpointing."""

    def around(inner: Fun) -> Fun:
        return way(lambda x: inner(x).sin())

    fun = around(torch.sin)
    for _ in range(NEST - 1):
        fun = around(fun)
    return backward(lambda x: fun(x).sum())


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    compared = {name: WAYS[name] for name in WAYS_COMPARED}

    def measured(works: dict[str, dict[str, Run | str]], rounds: int, repeats: int) -> dict[str, dict[str, Row]]:
        return bench.measure(works, rounds=rounds, repeats=repeats, weighed=False)

    def over_torch(rows: dict[str, Row]) -> float:
        return rows["remat"].over(rows["torch, non-reentrant"])

    kinds = measured(
        {
            f".backward(), {name}": {way: backward(chain(ck, kind)) for way, ck in compared.items()}
            for name, kind in KINDS.items()
        },
        rounds=15,
        repeats=4,
    )
    for name, rows in kinds.items():
        bench.ratios[f"{name}: remat / torch"] = over_torch(rows)
    of_kinds = [rows["remat"].over(kinds[".backward(), a closure"]["remat"]) for rows in kinds.values()]
    bench.ratios["the dearest kind of function / a closure"] = max(of_kinds)
    derivatives = measured(
        {
            name: {way: make(chain(compared[way], plainly)) for way in ("no remat", "remat")}
            for name, make in DERIVATIVES.items()
        },
        rounds=15,
        repeats=2,
    )
    for name, rows in derivatives.items():
        bench.ratios[f"{name}: remat / no remat"] = rows["remat"].over(rows["no remat"])
    ways = {way: backward(chain(ck, plainly)) for way, ck in (compared | FLOORS).items()}
    (rows,) = measured({".backward(), without any check": ways}, rounds=15, repeats=4).values()
    for floor in FLOORS:
        bench.ratios[f".backward(), {floor} / torch"] = rows[floor].over(rows["torch, non-reentrant"])
    others = {"one of 800 modules": of_a_large_model, f"a nest of {NEST}": nest}
    found = measured(
        {name: {way: make(ck) for way, ck in compared.items()} for name, make in others.items()}, rounds=7, repeats=1
    )
    for name, rows in found.items():
        bench.ratios[f"{name}: remat / torch"] = over_torch(rows)
    bench.finish()


if __name__ == "__main__":
    main()
