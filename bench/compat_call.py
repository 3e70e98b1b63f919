"""What a call of `checkpoint` costs beyond the function: remat.compat beside torch.utils.checkpoint.

A tiny function, forward and backward, on one thread, so that the costs are those of Python. All run in turn (A B C
A B C …), and each is the median of its rounds. The target: remat adds at most half of what torch adds, both without
reentrant autograd.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import remat.compat

TARGET = 0.5


def plain(fun: Callable[..., Any], *args: Any) -> Any:
    return fun(*args)


CALLS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "remat": functools.partial(remat.compat.checkpoint, use_reentrant=False),
}


def functions() -> dict[str, tuple[Callable[..., Tensor], Tensor]]:
    """What is called, and with what."""
    x = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def tiny(x: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    return {"tanh(x @ w)": (tiny, x), "x.sin()": (torch.sin, x), "two linear layers": (layer, x)}


def seconds(call: Callable[..., Any], fun: Callable[..., Tensor], x: Tensor, repeats: int) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    for _ in range(repeats):
        call(fun, x).sum().backward()
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--repeats", type=int, default=50, help="calls in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)

    table = Table(
        "function", *CALLS, "torch adds", "remat adds", "remat / torch", title="microseconds: median (least-greatest)"
    )
    ratios = {}
    for name, (fun, x) in functions().items():
        times: dict[str, list[float]] = {call: [] for call in CALLS}
        for call in CALLS.values():
            seconds(call, fun, x, options.repeats)
        for _ in range(options.rounds):
            for label, call in CALLS.items():
                times[label].append(1e6 * seconds(call, fun, x, options.repeats))
        medians = {label: statistics.median(t) for label, t in times.items()}
        by_torch, by_remat = (medians[label] - medians["plain"] for label in ("torch", "remat"))
        ratios[name] = by_remat / by_torch
        shown = [f"{medians[label]:.1f} ({min(t):.1f}-{max(t):.1f})" for label, t in times.items()]
        table.add_row(name, *shown, f"{by_torch:.1f}", f"{by_remat:.1f}", f"{ratios[name]:.2f}")
    console = Console(width=150)
    console.print(table)
    console.print(f"torch {torch.__version__}, 1 thread, {platform.machine()} with {os.cpu_count()} CPUs")
    for name, ratio in ratios.items():
        console.print(f"{name}: remat / torch <= {TARGET}: {ratio:.2f}, {'met' if ratio <= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
