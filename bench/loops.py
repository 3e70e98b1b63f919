"""Loops with k checkpoints: memory and runs of the body at 10,000 steps, and time per step beside other loops.

The memory is that of a chain of sines, with carries of 16 KiB. The schedule allows k carries; to these come three, and
what one step needs on its way back. The body runs as often as in revolve, and once more.

The time is that of a recurrent layer, `tanh(h @ w)`. The arithmetic of a schedule is a plain gradient, and the forward
of the steps that run again: what remat adds is compared with that.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Any

import torch
from _common import NOT_INSTALLED, Benchmark, Fun, Jitted, Row, Run, ratio
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, vmap

import remat

SIZE = 4096
UNIT = 4 * SIZE
ONE_STEP = 4  # carries: the operand of a step, its result, and a cotangent of each
ROWS, WIDTH = 128, 512  # of the recurrent layer
KNOB = [140, 38, 14]


def repeats(steps: int, k: int) -> int:
    r = 0
    while comb(k + r, k) < steps:
        r += 1
    return r


def revolve(steps: int, k: int) -> int:
    """Runs of the body by the schedule of Griewank and Walther."""
    r = repeats(steps, k)
    return steps + r * steps - comb(k + r, k + 1)


def smallest(steps: int) -> int:
    """The checkpoints with which no step runs more than three times."""
    return next(k for k in range(1, steps + 1) if repeats(steps, k) <= 2)


# Memory.


def sines(steps: int, k: int) -> Callable[[Tensor], Tensor]:
    def loss(scale: Tensor) -> Tensor:
        start = torch.linspace(-1, 1, SIZE)
        return remat.fori_loop(0, steps, lambda i, c: torch.sin(c * scale), start, checkpoints=k).sum()

    return loss


def backward(fun: Fun) -> Run:
    return lambda: fun(torch.tensor(1.001, requires_grad=True)).backward()


# Each setting makes a run of a function of a scalar, and multiplies carries by the size of its batch.
SETTINGS: dict[str, tuple[Callable[[Fun], Run], int]] = {
    ".backward()": (backward, 1),
    "grad": (lambda fun: lambda: grad(fun)(torch.tensor(1.001)), 1),
    "vmap(grad)": (lambda fun: lambda: vmap(grad(fun))(torch.tensor([1.001, 1.002])), 2),
}


# Time.


def halved(step: Fun, n: int) -> Fun:
    if n == 1:
        return step
    first, second = remat.remat(halved(step, n // 2)), halved(step, n - n // 2)
    return lambda h: second(first(h))


def recurrent(loop: Callable[[Fun, Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The loss of a loop, and the weight to differentiate it by."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    start = torch.randn(ROWS, WIDTH, generator=generator)
    return (lambda w: loop(lambda h: torch.tanh(h @ w), start).square().mean()), weight


def plain(steps: int) -> Callable[[Fun, Tensor], Tensor]:
    def loop(step: Fun, h: Tensor) -> Tensor:
        for _ in range(steps):
            h = step(h)
        return h

    return loop


def ours(steps: int, k: int) -> Callable[[Fun, Tensor], Tensor]:
    return lambda step, h: remat.fori_loop(0, steps, lambda i, h: step(h), h, checkpoints=k)


def in_jax(steps: int, k: int) -> dict[str, Run | str]:
    names = "jax: lax.scan + checkpoint, jitted", f"equinox, checkpoints={k}, jitted"
    try:
        import jax
        from jax import numpy as jnp
    except ImportError:
        return dict.fromkeys(names, NOT_INSTALLED)
    key = jax.random.key(0)
    weight, start = jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, jax.random.normal(key, (ROWS, WIDTH))

    def by_lax(w: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None))
        return jnp.square(jax.lax.scan(step, start, None, length=steps)[0]).mean()

    ways: dict[str, Run | str] = {names[0]: Jitted(jax.grad(by_lax), weight), names[1]: NOT_INSTALLED}
    try:
        import equinox.internal as eqxi
    except ImportError:
        return ways

    def by_equinox(w: jax.Array) -> jax.Array:
        end, _ = eqxi.scan(
            lambda h, _: (jnp.tanh(h @ w), None), start, None, length=steps, kind="checkpointed", checkpoints=k
        )
        return jnp.square(end).mean()

    return {**ways, names[1]: Jitted(jax.grad(by_equinox), weight)}


def gradient(loop: Callable[[Fun, Tensor], Tensor]) -> Run:
    loss, weight = recurrent(loop)

    def run() -> None:
        w = weight.clone().requires_grad_()
        loss(w).backward()

    return run


def forward(loop: Callable[[Fun, Tensor], Tensor]) -> Run:
    loss, weight = recurrent(loop)

    def run() -> None:
        with torch.no_grad():
            loss(weight)

    return run


def picture(rows: dict[int, Row], times: dict[str, Row], steps: int) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    ks = sorted(set(range(min(rows), max(rows) + 1)))
    left.plot(ks, [revolve(steps, k) / steps for k in ks], "k--", label="revolve")
    left.plot(list(rows), [row.ops["sin"] / steps for row in rows.values()], "o", label="remat, .backward()")
    left.set(title=f"{steps:,} steps: the body's runs", xlabel="checkpoints", ylabel="runs of each step", xscale="log")
    left.legend()
    done = {way: row for way, row in times.items() if row.seconds}
    right.barh(list(done), [1e3 * row.median for row in done.values()])
    right.invert_yaxis()
    right.set(title="time of a gradient, ms")
    return figure


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    steps = 200 if bench.fast else 10_000
    knob = [smallest(steps), 9] if bench.fast else KNOB
    works: dict[str, dict[str, Any]] = {
        f"{steps:,} steps, {setting}": {
            f"remat, checkpoints={k}": make(sines(steps, k)) for k in (knob if setting == ".backward()" else knob[1:2])
        }
        for setting, (make, _) in SETTINGS.items()
    }
    found = bench.measure(works, rounds=0)
    curve: dict[int, Row] = {}
    for (setting, (_, batch)), rows in zip(SETTINGS.items(), found.values(), strict=True):
        for row, k in zip(rows.values(), knob if setting == ".backward()" else knob[1:2], strict=True):
            row.notes |= {
                "carries": f"{(row.peak or 0) / UNIT / batch:.1f}",
                "runs of a step": f"{row.ops['sin'] / steps:.3f}",
            }
            if setting == ".backward()":
                curve[k] = row
            if k in knob[:2]:
                name = KNOB[knob.index(k)]  # the same with --fast
                most = (k + 3 + ONE_STEP) * batch * UNIT
                bench.ratios |= {
                    f"{setting}, checkpoints={name}: peak / (k + 3 carries + one step)": ratio(row.peak, most),
                    f"{setting}, checkpoints={name}: runs / (revolve + 1)": ratio(
                        row.ops["sin"], revolve(steps, k) + 1
                    ),
                }

    short = 20 if bench.fast else 100
    most, least = smallest(short), 4
    ways: dict[str, Run | str] = {
        "the forward alone, no_grad": forward(plain(short)),
        "no remat": gradient(plain(short)),
        "remat, halved": gradient(lambda step, h: halved(step, short)(h)),
        f"remat, checkpoints={most}": gradient(ours(short, most)),
        f"remat, checkpoints={least}": gradient(ours(short, least)),
        **in_jax(short, most),
    }
    work = f"{short} steps of tanh(h @ w), {ROWS} x {WIDTH}"
    times = bench.measure({work: ways}, rounds=7)[work]
    for k in (most, least):
        row, again = times[f"remat, checkpoints={k}"], revolve(short, k) / short - 1
        arithmetic = times["no remat"].median + again * times["the forward alone, no_grad"].median
        bench.ratios[f"checkpoints={'k' if k == most else 'few'}: time / the schedule's arithmetic"] = (
            row.median / arithmetic if row.seconds else float("nan")
        )
    for row in times.values():
        if row.seconds:
            row.notes["a step"] = f"{1e6 * row.median / short:.0f} µs"
    bench.finish(picture(curve, times, steps))


if __name__ == "__main__":
    main()
