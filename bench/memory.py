"""Peak of live bytes of 20 blocks of 10 `sin`, in units of one activation, under each transform.

Three ways: plain; the obvious checkpointing (an autograd.Function that saves its inputs and takes the vjp of a second
run in its backward); and remat. Then recursive halving of n ops with remat: the peak grows as log n.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from remat import remat
from remat.debug import LiveBytes

SIZE = 16384
UNIT = 4 * SIZE
Fun = Callable[[Tensor], Tensor]


def block(x: Tensor) -> Tensor:
    for _ in range(10):
        x = torch.sin(x)
    return x


class Obvious(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return block(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return vjp(block, *ctx.saved_tensors)[1](cotangent)[0]


WAYS: dict[str, Fun] = {"plain": block, "obvious": Obvious.apply, "remat": remat(block)}


def loss(way: Fun) -> Fun:
    def of_x(x: Tensor) -> Tensor:
        for _ in range(20):
            x = way(x)
        return x.sum()

    return of_x


def one(*batch: int) -> Tensor:
    return torch.linspace(-1, 1, SIZE).expand(*batch, SIZE).clone()


def backward(f: Fun) -> Tensor | None:
    x = one().requires_grad_()
    f(x).backward()
    return x.grad


TRANSFORMS: dict[str, Callable[[Fun], Any]] = {
    "grad": lambda f: grad(f)(one()),
    "vmap(grad) of 3": lambda f: vmap(grad(f))(one(3)),
    "grad(grad)": lambda f: grad(lambda x: grad(f)(x).sum())(one()),
    "jvp(grad)": lambda f: jvp(grad(f), (one(),), (one(),)),
    ".backward()": backward,
    "an open vjp holds": lambda f: vjp(f, one()),
}


def units(run: Callable[[], Any], *, held: bool = False) -> str:
    """The peak, or what is `held` while the result is; a dash where torch can't do it."""
    with LiveBytes() as meter:
        try:
            result = run()
        except RuntimeError:
            return "-"
        left = meter.current
        del result
    return f"{(left if held else meter.peak) / UNIT:.0f}"


def halved(n: int) -> Fun:
    if n == 1:
        return torch.sin
    first, second = remat(halved(n // 2)), halved(n // 2)
    return remat(lambda x: second(first(x)))


def main() -> None:
    table = Table("", *WAYS, title="peak of live bytes, in activations")
    for name, transform in TRANSFORMS.items():
        runs = [lambda way=way, t=transform: t(loss(way)) for way in WAYS.values()]
        table.add_row(name, *(units(run, held="holds" in name) for run in runs))
    depths = Table("n", "grad", ".backward()", title="recursive halving of n ops with remat")
    for n in (16, 64, 256, 1024):
        chain = halved(n)
        f = lambda x, chain=chain: chain(x).sum()  # noqa: E731
        depths.add_row(str(n), *(units(lambda t=t, f=f: TRANSFORMS[t](f)) for t in ("grad", ".backward()")))
    console = Console(width=100)
    console.print(table, depths)
    console.print(f"torch {torch.__version__}, {platform.machine()} with {os.cpu_count()} CPUs; the same on every run")


if __name__ == "__main__":
    main()
