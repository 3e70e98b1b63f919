"""A chain of 10,000 steps in segments of 20: memory is boundaries and one segment, time is linear in the steps.

Each step saves one activation (https://github.com/pytorch/pytorch/issues/125591). Memory is measured with the garbage
collector off, so that what lives on in cycles shows. The resident set (RSS) is that of a process of its own: how much
its greatest size grows in one run. It depends on where the allocator has room, and differs when the script runs again.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from _common import NOT_INSTALLED, UNAVAILABLE, WAYS, Benchmark, Fun, Jitted, Run, bytes_text, ratio, runs
from torch import Tensor
from torch.func import grad

SEGMENT, SIZE = 20, 4096
UNIT = 4 * SIZE


def segment(x: Tensor) -> Tensor:
    for _ in range(SEGMENT):
        x = torch.sin(x)
    return x


def chain(steps: int, way: Callable[[Fun], Fun]) -> Fun:
    part = way(segment)

    def loss(x: Tensor) -> Tensor:
        for _ in range(steps // SEGMENT):
            x = part(x)
        return x.sum()

    return loss


def start() -> Tensor:
    return torch.linspace(-1, 1, SIZE)


def backward(steps: int, way: Callable[[Fun], Fun]) -> Run:
    loss = chain(steps, way)
    return lambda: loss(start().requires_grad_()).backward()


def gradient(steps: int, way: Callable[[Fun], Fun]) -> Run:
    return lambda: grad(chain(steps, way))(start())


SETTINGS = {".backward()": backward, "grad": gradient}


def in_jax(steps: int) -> Run | str:
    try:
        import jax
    except ImportError:
        return NOT_INSTALLED

    def segment(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.fori_loop(0, SEGMENT, lambda _, x: jax.numpy.sin(x), x), None

    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(segment), x, None, length=steps // SEGMENT)[0].sum()

    return Jitted(jax.grad(loss), jax.numpy.linspace(-1, 1, SIZE))


def resident() -> int:
    """The greatest resident size of this process so far, in bytes (Linux). `getrusage` counts the parent's too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def send_growth(to: Connection, setting: str, way: str, steps: int) -> None:
    """Send how much this process grows by one run, or None if that fails."""
    try:
        SETTINGS[setting](SEGMENT, WAYS[way])()
        before = resident()
        SETTINGS[setting](steps, WAYS[way])()
    except Exception:  # the table tells of it
        to.send(None)
    else:
        to.send(resident() - before)


def growth(setting: str, way: str, steps: int) -> int | None:
    """The same, of a fork of this process, which has done nothing yet."""
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=send_growth, args=(sent, setting, way, steps))
    process.start()
    sent.close()
    grown: int | None = received.recv()
    process.join()
    return grown


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    steps = 400 if bench.fast else 10_000
    ways = ["remat"] if bench.fast else [way for way in WAYS if way not in UNAVAILABLE]
    grown = {(s, way): growth(s, way, steps) for s in SETTINGS for way in ways if sys.platform == "linux"}
    shorter = {steps // 4: f"remat, {steps // 4:,} steps"}
    works = {setting: runs(functools.partial(make, steps)) for setting, make in SETTINGS.items()}
    works["grad"]["jax.checkpoint, jitted"] = in_jax(steps)
    for setting, make in SETTINGS.items():
        works[setting] |= {name: make(n, WAYS["remat"]) for n, name in shorter.items()}
    for setting, rows in bench.measure(works, rounds=5).items():
        ours = rows["remat"]
        for way, row in rows.items():
            if row.seconds and (setting, way) in grown:
                row.notes["RSS grows by"] = bytes_text(grown[setting, way])
        quarter = rows[shorter[steps // 4]]
        bench.ratios |= {
            f"{setting}: peak / (boundaries + one segment)": ratio(ours.peak, (steps / SEGMENT + SEGMENT) * UNIT),
            f"{setting}: left to gc / peak": ratio(ours.left, ours.peak),
            f"{setting}: time per step / that at a quarter of the steps": ours.over(quarter) / 4,
        }
    bench.finish()


if __name__ == "__main__":
    main()
