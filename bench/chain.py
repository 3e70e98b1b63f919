"""A chain of 10,000 steps in segments of 20: memory is boundaries and one segment, time is linear in the steps.

Each step saves one activation (https://github.com/pytorch/pytorch/issues/125591). Memory is measured with the garbage
collector off, so that what lives on in cycles shows. The resident set (RSS) is that of a process of its own: how much
its greatest size grows in one run.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _common import NOT_INSTALLED, WAYS, Benchmark, Fun, Jitted, Run, bytes_text, ratio, runs
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


def growth(setting: str, way: str, steps: int, processes: int) -> str:
    """How much a process of its own grows by one run: the least, the median and the greatest of several."""
    if sys.platform != "linux":
        return "Linux only"
    command = [sys.executable, __file__, "--rss", setting, way, str(steps)]
    outputs = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(processes))
    grown = sorted(map(int, outputs))
    return " - ".join(map(bytes_text, (grown[0], grown[processes // 2], grown[-1])))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rss", nargs=3, metavar=("SETTING", "WAY", "STEPS"), help="run once and print the RSS's growth"
    )


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1, add_options=add_options)
    if bench.options.rss:
        setting, way, steps = bench.options.rss
        SETTINGS[setting](SEGMENT, WAYS[way])()
        before = resident()
        SETTINGS[setting](int(steps), WAYS[way])()
        print(resident() - before)
        return

    steps = 400 if bench.fast else 10_000
    shorter = {n: f"remat, {n:,} steps" for n in (steps // 4, steps // 2)}
    works = {setting: runs(functools.partial(make, steps)) for setting, make in SETTINGS.items()}
    works["grad"]["jax.checkpoint, jitted"] = in_jax(steps)
    for setting, make in SETTINGS.items():
        works[setting] |= {name: make(n, WAYS["remat"]) for n, name in shorter.items()}
    for setting, rows in bench.measure(works, rounds=5).items():
        ours = rows["remat"]
        for way, row in rows.items():
            if row.seconds and way in WAYS and (not bench.fast or (setting, way) == ("grad", "remat")):
                row.notes["RSS grows by"] = growth(setting, way, steps, 1 if bench.fast else 3)
        quarter = rows[shorter[steps // 4]]
        bench.ratios |= {
            f"{setting}: peak / (boundaries + one segment)": ratio(ours.peak, (steps / SEGMENT + SEGMENT) * UNIT),
            f"{setting}: left to gc / peak": ratio(ours.left, ours.peak),
            f"{setting}: time per step / that at a quarter of the steps": ours.over(quarter) / 4,
        }
    bench.finish()


if __name__ == "__main__":
    main()
