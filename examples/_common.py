"""What the examples share: a meter and a table."""

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from remat.debug import LiveBytes

MIB = 2**20
console = Console(width=88)


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--fast", action="store_true", help="a few seconds: less of everything")
    return result


def progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


@dataclass(frozen=True)
class Measured:
    """One run: its result, its CPU time (the least of several, in seconds) and the live bytes of its tensors."""

    result: Any
    seconds: float
    peak: int
    history: list[tuple[float, int]]


def measure(run: Callable[[], Any], times: int = 3) -> Measured:
    """Run it `times` times for the time, and once under the meter; 0 takes the time under the meter too."""

    def timed() -> tuple[float, Any]:
        start = time.process_time()  # what else the machine does makes no difference
        result = run()
        return time.process_time() - start, result

    seconds = [timed()[0] for _ in range(times)]
    with LiveBytes() as meter:
        metered, result = timed()
    return Measured(result, min(seconds, default=metered), meter.peak, meter.history)


def compare(title: str, ways: dict[str, Callable[[], Any]], times: int = 3) -> dict[str, Measured]:
    """Measure several ways to the same result; print a table of them, each beside the first."""
    measured = {name: measure(run, times) for name, run in ways.items()}
    first = next(iter(measured.values()))
    table = Table("", "peak memory", "", "CPU time", "", "differs by", title=title)
    for name, m in measured.items():
        table.add_row(
            name,
            f"{m.peak / MIB:.1f} MiB" if m.peak > MIB / 10 else f"{m.peak / 1024:.1f} KiB",
            f"{m.peak / first.peak:.0%}",
            f"{m.seconds:.2f} s",
            f"{m.seconds / first.seconds:.2f}x",
            f"{difference(first.result, m.result):.0e}",
        )
    console.print(table)
    console.print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    return measured


def difference(a: Any, b: Any) -> float:
    """The greatest difference between two trees of tensors, relative to the greatest value."""
    pairs = list(zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))
    return max((x - y).abs().max().item() for x, y in pairs) / max(x.abs().max().item() for x, _ in pairs)
