"""Policies on 8 layers of a matrix multiplication and a tanh: what is saved is not computed again, and held once.

Each layer is under checkpointing by itself. `everything_saveable` is to hold what autograd holds without remat, and
`dots_saveable` to multiply no matrices again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from _common import NOT_INSTALLED, UNAVAILABLE, Benchmark, Fun, Jitted, Run, ratio, selective
from torch import Tensor
from torch.func import grad

from remat import policies, remat

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


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    width, rows = (16, 64) if bench.fast else (256, 2048)
    ws, x = [torch.randn(width, width) / width**0.5 for _ in range(DEPTH)], torch.randn(rows, width)
    works: dict[str, dict[str, Run | str]] = {}
    for setting, make in {".backward()": backward, "grad": gradient}.items():
        works[setting] = {name: UNAVAILABLE.get(name.split(",")[0]) or make(ws, x, way) for name, way in WAYS.items()}
    works["grad"] |= in_jax(width, rows)
    for setting, found in bench.measure(works, rounds=11).items():
        without, everything = found["no remat"], found["remat, everything_saveable"]
        dots = found["remat, dots_saveable"]
        bench.ratios |= {
            f"{setting}: everything_saveable, peak / no remat": ratio(everything.peak, without.peak),
            f"{setting}: everything_saveable, FLOPs / no remat": ratio(everything.flops, without.flops),
            f"{setting}: dots_saveable, FLOPs / no remat": ratio(dots.flops, without.flops),
        }
    bench.finish()


if __name__ == "__main__":
    main()
