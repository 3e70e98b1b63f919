"""Shared by the examples: measurements, a table and a plot of time against memory."""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from matplotlib.ticker import LogLocator
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
    """Measure one run: the best time of `times` runs, and memory in another. With 0, one run measures both."""
    return measure_all({"": run}, times)[""]


def measure_all(ways: dict[str, Callable[[], Any]], times: int) -> dict[str, Measured]:
    """Measure several ways. The runs alternate, so that a busy minute of the machine affects all ways alike."""

    def seconds_of(run: Callable[[], Any]) -> float:
        start = time.process_time()  # other processes make little difference
        run()
        return time.process_time() - start

    seconds = dict.fromkeys(ways, math.inf)
    for _ in range(times):
        for name, run in ways.items():
            seconds[name] = min(seconds[name], seconds_of(run))
    measured = {}
    for name, run in ways.items():
        start = time.process_time()
        with LiveBytes() as meter:
            result = run()
        least = seconds[name] if times else time.process_time() - start
        measured[name] = Measured(result, least, meter.peak, meter.history)
    return measured


def compare(title: str, ways: dict[str, Callable[[], Any]], times: int = 3) -> dict[str, Measured]:
    """Measure several ways to the same result, and print a table that compares each with the first."""
    measured = measure_all(ways, times)
    first = next(iter(measured.values()))
    table = Table("", "peak memory", "", "CPU time", "", "differs by", title=title)
    for name, m in measured.items():
        table.add_row(
            name,
            f"{m.peak / MIB:.1f} MiB" if m.peak > MIB / 10 else f"{m.peak / 1024:.1f} KiB",
            f"{m.peak / first.peak:.0%}",
            f"{m.seconds:.2f} s",
            f"{m.seconds / first.seconds:.2f}x",
            f"{d:.0e}" if (d := difference(first.result, m.result)) else "0",
        )
    console.print(table)
    console.print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    return measured


def draw_frontier(axes: Any, measured: dict[str, Measured], what: str) -> None:
    """Plot time against memory. A line joins the ways "family: size" of one family. The first way is plain code."""
    families: dict[str, list[tuple[str, Measured]]] = {}
    for name, m in measured.items():
        family, _, size = name.partition(": ")
        families.setdefault(family, []).append((size, m))
    first = next(iter(measured.values()))
    for (family, members), marker in zip(families.items(), "sovD^P", strict=False):
        x, y = [m.peak / MIB for _, m in members], [m.seconds / first.seconds for _, m in members]
        axes.plot(x, y, marker=marker, label=family)
        for (size, _), *at in zip(members, x, y, strict=True):
            tilt = 0 if size.isdigit() else 25  # names are long
            axes.annotate(size, at, xytext=(4, 4), textcoords="offset points", fontsize="small", rotation=tilt)
    axes.axhline(1.7, color="gray", linewidth=0.8, linestyle=":")
    axes.axvline(first.peak / MIB / 4, color="gray", linewidth=0.8, linestyle=":")
    axes.set(title=what, xlabel="peak MiB (dotted: a quarter)", ylabel="CPU time, plain = 1 (dotted: 1.7)")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.legend(fontsize="small")


def difference(a: Any, b: Any) -> float:
    """The greatest difference between two trees of tensors, relative to the greatest value."""
    pairs = list(zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))
    return max((x - y).abs().max().item() for x, y in pairs) / max(x.abs().max().item() for x, _ in pairs)
