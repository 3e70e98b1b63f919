"""Policies on 8 layers of a matrix multiplication and a tanh: what is saved is not computed again, and held once.

Each layer is under checkpointing by itself. `everything_saveable` is to hold what autograd holds without remat, and
`dots_saveable` to multiply no matrices again.

Then what a policy costs in Python: 200 ops on 8 x 8 numbers, of which the products are kept. What is added to an op of
the forward is the time above that of the plain forward. What is added to one of the rerun is the time of the backward
above the plain backward, and above the plain forward of the ops that run again.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from _common import NOT_INSTALLED, UNAVAILABLE, Benchmark, Fun, Jitted, Row, Run, leaf, ratio, selective
from torch import Tensor
from torch.func import grad

from remat import compat, policies, remat

DEPTH = 8


def layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def torch_remat_saving_dots(_: Fun) -> Fun:
    """The layer with torch-remat, which marks in the code what to save."""
    import torch_remat

    def marked(w: Tensor, x: Tensor) -> Tensor:
        dot = torch_remat.region(torch.matmul, "dot", recompute=False)(x, w)
        torch_remat.recompute_needs_tensor(dot)
        return torch.tanh(dot)

    return torch_remat.checkpoint(region_name="layer")(marked)


WAYS: dict[str, Callable[[Fun], Fun]] = {
    "no remat": lambda fun: fun,
    "torch selective, everything_saveable": selective(policies.everything_saveable),
    "torch selective, dots_saveable": selective(policies.dots_saveable),
    "torch-remat, saving dots": torch_remat_saving_dots,
    "remat, nothing_saveable": remat,
    "remat, everything_saveable": remat(policy=policies.everything_saveable),
    "remat, dots_saveable": remat(policy=policies.dots_saveable),
}


def loss(way: Callable[[Fun], Fun]) -> Callable[[list[Tensor], Tensor], Tensor]:
    wrapped = way(layer)

    def of(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = wrapped(w, x)
        return x.square().mean()

    return of


def backward(ws: list[Tensor], x: Tensor, way: Callable[[Fun], Fun]) -> Run:
    ws = [w.detach().clone().requires_grad_() for w in ws]
    of = loss(way)

    def run() -> None:
        of(ws, x).backward()
        for w in ws:
            w.grad = None

    return run


def gradient(ws: list[Tensor], x: Tensor, way: Callable[[Fun], Fun]) -> Run:
    return functools.partial(grad(loss(way)), ws, x)


def in_jax(width: int, rows: int) -> dict[str, Run | str]:
    names = ["nothing_saveable", "everything_saveable", "dots_saveable"]
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return {f"jax, {name}": NOT_INSTALLED for name in names}

    def run(policy: Fun) -> Jitted:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=policy)

        def of(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for w in ws:
                x = layer(w, x)
            return jnp.square(x).mean()

        return Jitted(jax.grad(of), [jnp.eye(width)] * DEPTH, jnp.ones((rows, width)))

    return {f"jax, {name}": run(getattr(jax.checkpoint_policies, name)) for name in names}


# An op.

OPS, RUN_AGAIN = 200, 150
PRODUCTS = [torch.ops.aten.mm.default]


def many_ops(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(OPS // 4):
        x = torch.tanh(x @ w * w + 0.5)
    return x


def saving_products(library: Any) -> Fun:
    contexts = functools.partial(library.create_selective_checkpoint_contexts, PRODUCTS)
    return functools.partial(library.checkpoint, many_ops, use_reentrant=False, context_fn=contexts)


OF_MANY_OPS: dict[str, Fun] = {
    "no remat": many_ops,
    "torch selective": saving_products(torch.utils.checkpoint),
    "remat": remat(many_ops, policy=policies.save_ops("mm")),
    "remat.checkpoint": saving_products(compat),
}


def forwards_and_steps() -> dict[str, dict[str, Run | str]]:
    x, w = leaf(torch.randn(8, 8)), leaf(torch.randn(8, 8) / 8)
    return {
        f"{OPS} ops, forward": {way: functools.partial(fun, x, w) for way, fun in OF_MANY_OPS.items()},
        f"{OPS} ops, forward and backward": {
            way: lambda fun=fun: fun(x, w).sum().backward() for way, fun in OF_MANY_OPS.items()
        },
    }


def added(forwards: dict[str, Row], steps: dict[str, Row]) -> dict[str, tuple[float, float]]:
    """Seconds that each way adds to an op of the forward, and to one of the rerun."""
    plain = [*zip(forwards["no remat"].seconds, steps["no remat"].seconds, strict=True)]
    found = {}
    for way in (name for name in OF_MANY_OPS if name != "no remat"):
        ours = zip(forwards[way].seconds, steps[way].seconds, strict=True)
        pairs = [
            (forward - plain_forward, step - forward - (plain_step - plain_forward) - plain_forward * RUN_AGAIN / OPS)
            for (forward, step), (plain_forward, plain_step) in zip(ours, plain, strict=True)
        ]
        of_forward, of_rerun = (statistics.median(seconds) / OPS for seconds in zip(*pairs, strict=True))
        found[way] = of_forward, of_rerun
    return found


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    width, length = (16, 64) if bench.fast else (256, 2048)
    ws, x = [torch.randn(width, width) / width**0.5 for _ in range(DEPTH)], torch.randn(length, width)
    works: dict[str, dict[str, Run | str]] = {}
    for setting, make in {".backward()": backward, "grad": gradient}.items():
        works[setting] = {name: UNAVAILABLE.get(name.split(",")[0]) or make(ws, x, way) for name, way in WAYS.items()}
    works["grad"] |= in_jax(width, length)
    for setting, found in bench.measure(works, rounds=5).items():
        without, everything = found["no remat"], found["remat, everything_saveable"]
        dots = found["remat, dots_saveable"]
        bench.ratios |= {
            f"{setting}: everything_saveable, peak / no remat": ratio(everything.peak, without.peak),
            f"{setting}: everything_saveable, FLOPs / no remat": ratio(everything.flops, without.flops),
            f"{setting}: dots_saveable, FLOPs / no remat": ratio(dots.flops, without.flops),
        }
    forwards, steps = bench.measure(forwards_and_steps(), rounds=15, repeats=3, weighed=False).values()
    adds = added(forwards, steps)
    for way, seconds in adds.items():
        for rows, adds_to_op, by_torch, part in zip(
            (forwards, steps), seconds, adds["torch selective"], ("forward", "rerun"), strict=True
        ):
            rows[way].notes[f"added to an op of the {part}"] = f"{1e6 * adds_to_op:.1f} µs"
            if way != "torch selective":
                bench.ratios |= {
                    f"{way}, an op of the {part}: adds / torch's selective adds": adds_to_op / by_torch,
                    f"{way}, an op of the {part}: adds, in µs": 1e6 * adds_to_op,
                }
    bench.finish()


if __name__ == "__main__":
    main()
