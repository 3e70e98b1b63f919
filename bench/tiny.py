"""What remat adds to a tiny function, on one thread: the cost of Python alone.

A function of a few ops on 4 x 4 numbers, so that what is measured is not its arithmetic. What a library adds is its
time less that of the same work without remat.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
from _common import NOT_INSTALLED, WAYS, Benchmark, Fun, Jitted, Row, Run, leaf, runs
from torch import Tensor, nn
from torch.func import grad, vmap

N, BATCH = 4, 3
LAYERS = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))
FROZEN = nn.Sequential(*(nn.Linear(N, N) for _ in range(6))).requires_grad_(False)


def tanh(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def sin(x: Tensor, w: Tensor) -> Tensor:
    del w
    return torch.sin(x)


def layers(x: Tensor, w: Tensor) -> Tensor:
    del w
    return LAYERS(x)


def frozen(x: Tensor, w: Tensor) -> Tensor:
    del w
    return FROZEN(x)


COMPARED = ("no remat", "torch, non-reentrant", "remat")
FUNCTIONS: dict[str, Fun] = {"tanh(x @ w)": tanh, "sin(x)": sin, "two linear layers": layers}
CALLED: dict[str, Fun] = {"tanh(x @ w)": tanh, "a module of 12 parameters": frozen}


def backward(fun: Fun) -> Run:
    x, w = leaf(torch.randn(N, N)), leaf(torch.randn(N, N))
    return lambda: fun(x, w).sum().backward()


def gradient(fun: Fun) -> Run:
    of = grad(lambda x, w: fun(x, w).sum(), argnums=(0, 1))
    return functools.partial(of, torch.randn(N, N), torch.randn(N, N))


def per_sample_gradients(fun: Fun) -> Run:
    of = vmap(grad(lambda x, w: fun(x, w).sum()), in_dims=(0, None))
    return functools.partial(of, torch.randn(BATCH, N, N), torch.randn(N, N))


def call(fun: Fun) -> Run:
    return functools.partial(fun, torch.randn(N, N), torch.randn(N, N))


def call_without_grad(fun: Fun) -> Run:
    return torch.no_grad()(call(fun))


SETTINGS: dict[str, Callable[[Fun], Run]] = {
    ".backward()": backward,
    "grad": gradient,
    "vmap(grad)": per_sample_gradients,
}
CALLS: dict[str, Callable[[Fun], Run]] = {"no_grad": call_without_grad, "nothing requires grad": call}


def with_jax() -> dict[str, dict[str, Run | str]]:
    """`tanh` in jax, by setting."""
    try:
        import jax
    except ImportError:
        return {setting: {"jax.checkpoint": NOT_INSTALLED} for setting in ("grad", "vmap(grad)")}
    key = jax.random.key(0)
    x, xs, w = (jax.random.normal(key, shape) for shape in ((N, N), (BATCH, N, N), (N, N)))
    fun = jax.checkpoint(lambda x, w: jax.numpy.tanh(x @ w))
    derivative = jax.grad(lambda x, w: fun(x, w).sum(), argnums=(0, 1))
    per_sample = jax.vmap(jax.grad(lambda x, w: fun(x, w).sum()), in_axes=(0, None))

    def both(derivative: Fun, x: jax.Array) -> dict[str, Run | str]:
        return {
            "jax.checkpoint": lambda: jax.block_until_ready(derivative(x, w)),
            "jax.checkpoint, jitted": Jitted(derivative, x, w),
        }

    return {"grad": both(derivative, x), "vmap(grad)": both(per_sample, xs)}


def added(rows: dict[str, Row], way: str) -> float:
    """Seconds that a way adds to the plain function."""
    pairs = zip(rows[way].seconds, rows["no remat"].seconds, strict=True)
    return statistics.median(a - b for a, b in pairs)


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    works: dict[str, dict[str, Run | str]] = {}
    for title, fun in FUNCTIONS.items():
        for setting, make in SETTINGS.items():
            ways = runs(lambda way, make=make, fun=fun: make(way(fun)))
            works[f"{title}, {setting}"] = ways if fun is tanh else {way: ways[way] for way in COMPARED}
    for setting, ways in with_jax().items():
        works[f"tanh(x @ w), {setting}"] |= ways
    calls: dict[str, dict[str, Run | str]] = {
        f"{title}, call, {setting}": {way: make(WAYS[way](fun)) for way in COMPARED}
        for title, fun in CALLED.items()
        for setting, make in CALLS.items()
    }
    found = bench.measure(works, rounds=21, repeats=20, weighed=False)
    found |= bench.measure(calls, rounds=21, repeats=200, weighed=False)  # of what takes microseconds, more
    for ways in found.values():
        for way, row in ways.items():
            if row.seconds and way != "no remat":
                row.notes["adds"] = f"{1e6 * added(ways, way):.1f} µs"
    for title in FUNCTIONS:
        by_torch = added(found[f"{title}, .backward()"], "torch, non-reentrant")
        per_sample = found[f"{title}, vmap(grad)"]
        ratios = {
            ".backward(): remat adds / torch adds": added(found[f"{title}, .backward()"], "remat") / by_torch,
            "grad: remat adds / torch adds to .backward()": added(found[f"{title}, grad"], "remat") / by_torch,
            "vmap(grad): remat / no remat": per_sample["remat"].over(per_sample["no remat"]),
        }
        bench.ratios |= {f"{title}, {name}": value for name, value in ratios.items()}
    bench.ratios |= {f"{title}: remat adds, in µs": 1e6 * added(found[title], "remat") for title in calls}
    bench.finish()


if __name__ == "__main__":
    main()
