"""Peak of live bytes of 20 blocks of 10 `sin` under each transform, in activations.

Beside the peers: the obvious checkpointing, an autograd.Function that saves its inputs and takes the vjp of a second
run in its backward. Under `torch.func.grad` it saves nothing, as the backward pass is itself recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _common import UNAVAILABLE, WAYS, Benchmark, Fun, Run, ratio
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

SIZE = 16384
UNIT = 4 * SIZE


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


def loss(way: Callable[[Fun], Fun], blocks: int) -> Fun:
    wrapped = way(block)

    def of(x: Tensor) -> Tensor:
        for _ in range(blocks):
            x = wrapped(x)
        return x.sum()

    return of


def one(*batch: int) -> Tensor:
    return torch.linspace(-1, 1, SIZE).expand(*batch, SIZE).clone()


TRANSFORMS: dict[str, Callable[[Fun], Any]] = {
    ".backward()": lambda f: f(one().requires_grad_()).backward(),
    "grad": lambda f: grad(f)(one()),
    "vmap(grad) of 3": lambda f: vmap(grad(f))(one(3)),
    "grad(grad)": lambda f: grad(lambda x: grad(f)(x).sum())(one()),
    "jvp(grad)": lambda f: jvp(grad(f), (one(),), (one(),)),
}
# Those that are compared with torch's checkpoint: how the ratio is called, and for how many samples.
COMPARED = {".backward()": (".backward()", 1), "grad": ("grad", 1), "vmap(grad) of 3": ("vmap(grad), a sample", 3)}


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    blocks = 3 if bench.fast else 20
    ways = WAYS | {"obvious": lambda _: Obvious.apply}
    works: dict[str, dict[str, Run | str]] = {
        name: {way: UNAVAILABLE.get(way) or functools.partial(of, loss(wrap, blocks)) for way, wrap in ways.items()}
        for name, of in TRANSFORMS.items()
    }
    found = bench.measure(works, rounds=0)
    for rows in found.values():
        for row in rows.values():
            if row.peak is not None:
                row.notes["activations"] = f"{row.peak / UNIT:.0f}"
    by_torch = found[".backward()"]["torch, non-reentrant"].peak
    for transform, (title, samples) in COMPARED.items():
        peak = ratio(found[transform]["remat"].peak, by_torch) / samples
        bench.ratios[f"{title}: peak / torch's .backward()"] = peak
    bench.finish()


if __name__ == "__main__":
    main()
