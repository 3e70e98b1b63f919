"""What the benchmarks share: measuring several ways of one work in turn, and keeping what was measured.

A benchmark has sections, and each section is one work that is done in several ways. A way is a function without
arguments, or a text that says why there is none ("not installed"). A way that raises has its error in the table.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from check import verdicts
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from remat import remat
from remat._torch_internals import TorchDispatchMode
from remat.debug import LiveBytes

RESULTS = Path(__file__).parent / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
NOT_INSTALLED = "not installed"

Run = Callable[[], Any]
Fun = Callable[..., Any]


def torch_remat(fun: Fun) -> Fun:
    """A function under checkpointing by Meta's torch-remat."""
    import torch_remat

    return torch_remat.checkpoint(region_name="f")(fun)


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# How a function is put under checkpointing: each takes a function and gives one that is called in the same way.
WAYS: dict[str, Callable[[Fun], Fun]] = {
    "no remat": lambda fun: fun,
    "torch, non-reentrant": lambda fun: functools.partial(checkpoint, fun, use_reentrant=False),
    "torch, reentrant": lambda fun: functools.partial(checkpoint, fun, use_reentrant=True),
    "torch-remat": torch_remat,
    "remat": remat,
}


def runs(make: Callable[[Callable[[Fun], Fun]], Run]) -> dict[str, Run | str]:
    """The same work in each of `WAYS`: `make(way)` gives the run."""
    missing = set() if is_installed("torch-remat") else {"torch-remat"}
    return {name: NOT_INSTALLED if name in missing else make(way) for name, way in WAYS.items()}


@dataclass
class Row:
    """What one way of doing the work took; `error` where it did not work."""

    seconds: list[float] = field(default_factory=list)  # of each round
    peak: int | None = None  # live bytes
    flops: int | None = None
    error: str | None = None
    notes: dict[str, str] = field(default_factory=dict)  # further columns

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else math.nan

    def over(self, other: Row) -> float:
        """The median of the ratios of times in the same round: a busy machine slows both."""
        pairs = zip(self.seconds, other.seconds, strict=False)
        return statistics.median([a / b for a, b in pairs] or [math.nan])

    def json(self) -> dict[str, Any]:
        kept = {key: value for key, value in asdict(self).items() if value or value == 0}
        if self.seconds:
            kept["seconds"] = {"median": self.median, "least": min(self.seconds), "greatest": max(self.seconds)}
        return kept


def peak(run: Run) -> int:
    """The most live bytes during a run."""
    with LiveBytes() as meter:
        result = run()
    del result
    return meter.peak


class CountFlops(TorchDispatchMode):
    """Adds up FLOPs by torch's formulas. Its `FlopCounterMode` also looks for modules, and fails under torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def flops(run: Run) -> int:
    with CountFlops() as counter:
        run()
    return counter.total


def ratio(a: float | None, b: float | None) -> float:
    return math.nan if a is None or not b else a / b


class Benchmark:
    """One script: its options, what it measured, and where that goes.

    **Arguments:**

    - `file`: the script's `__file__`; results are called after it.
    - `what`: the script's docstring; the first line is the title.
    - `threads`: of torch, unless told otherwise.
    - `add_options`: adds to the options of the command line.
    """

    def __init__(
        self,
        file: str,
        what: str | None,
        *,
        threads: int | None = None,
        add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    ) -> None:
        self.name = Path(file).stem
        self.title = (what or "").split("\n")[0]
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--fast", action="store_true", help="seconds instead of minutes; the figures mean nothing")
        parser.add_argument("--rounds", type=int, help="how often each way is timed")
        parser.add_argument("--threads", type=int, default=threads, help="threads of torch")
        parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of all threads, for a busy machine")
        parser.add_argument("--results", type=Path, help=f"where results go: {RESULTS.name}/ beside the script")
        if add_options:
            add_options(parser)
        self.options = parser.parse_args()
        self.fast: bool = self.options.fast
        if self.options.threads:
            torch.set_num_threads(self.options.threads)
        torch.manual_seed(0)
        warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # torch, reentrant
        self.sections: dict[str, dict[str, Row]] = {}
        self.ratios: dict[str, float | None] = {}
        self.reported: dict[str, str] = {}
        self._console = Console(width=140, record=True)
        gc.collect()
        gc.freeze()  # what torch and jax have made at import is not looked through again and again

    def measure(
        self,
        section: str,
        ways: dict[str, Run | str],
        *,
        rounds: int,
        repeats: int = 1,
        memory: bool = True,
        count_flops: bool = True,
    ) -> dict[str, Row]:
        """Do one work in several ways: time them in turn (A B C A B C ...), then weigh memory and count FLOPs.

        **Arguments:**

        - `section`: the work.
        - `ways`: a run for each way of doing it, or why there is none.
        - `rounds`: how often each is timed, unless told otherwise on the command line.
        - `repeats`: runs in a round; the time is that of one run.
        - `memory`, `count_flops`: whether these are measured.

        **Returns:** a row for each way.
        """
        clock = CLOCKS[self.options.clock]
        rounds = self.options.rounds or (3 if self.fast else rounds)
        repeats = 1 if self.fast else repeats
        rows, works = {}, {}
        for name, way in ways.items():
            rows[name] = Row()
            try:
                if isinstance(way, str):
                    rows[name].error = way
                    continue
                way()  # warm
                rows[name].peak = peak(way) if memory else None
                rows[name].flops = flops(way) if count_flops else None
                works[name] = way
            except Exception as e:
                rows[name].error = f"error: {type(e).__name__}: {textwrap.shorten(str(e), 60, placeholder=' ...')}"
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            for _ in progress.track(range(rounds), description=f"{self.name}: {section}"):
                for name, work in works.items():
                    gc.collect()
                    start = clock()
                    for _ in range(repeats):
                        work()
                    rows[name].seconds.append((clock() - start) / repeats)
        self.sections[section] = rows
        return rows

    def finish(self, figure: Figure | None = None) -> None:
        """Print the table and how the ratios meet their targets; keep them, and the picture."""
        columns = list({key: None for rows in self.sections.values() for row in rows.values() for key in row.notes})
        every = [row for rows in self.sections.values() for row in rows.values()]
        measured = {
            f"{self.options.clock} time (least - greatest)": (time_text, any(row.seconds for row in every)),
            "peak, live": (lambda row: bytes_text(row.peak), any(row.peak is not None for row in every)),
            "GFLOP": (
                lambda row: "" if row.flops is None else f"{row.flops / 1e9:.3f}",
                any(row.flops for row in every),
            ),
        }
        shown = {name: text for name, (text, has) in measured.items() if has}
        table = Table("", *shown, *columns, title=self.title)
        for section, rows in self.sections.items():
            table.add_row(f"[bold]{section}")
            for way, row in rows.items():
                cells = [text(row) for text in shown.values()]
                if row.error:
                    cells = [row.error, *[""] * (len(shown) - 1)]
                table.add_row(f"  {way}", *cells, *(row.notes.get(column, "") for column in columns))
            table.add_section()
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        versions = {"python": platform.python_version(), "threads": str(torch.get_num_threads())}
        for distribution in ("torch", "optree", "remat", "torch-remat", "jax"):
            if is_installed(distribution):
                versions[distribution] = importlib.metadata.version(distribution)
        if torch.cuda.is_available():
            machine += f", {torch.cuda.get_device_name()}"
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        self._console.print(table)
        for name, text in self.reported.items():
            self._console.print(f"{name}: {text}")
        results = {
            "title": self.title,
            "date": date,
            "machine": machine,
            "versions": versions,
            "fast": self.fast,
            "clock": self.options.clock,
            "sections": {s: {way: row.json() for way, row in rows.items()} for s, rows in self.sections.items()},
            "reported": self.reported,
            "ratios": {name: None if r is None or math.isnan(r) else round(r, 4) for name, r in self.ratios.items()},
        }
        for verdict in verdicts(self.name, results["ratios"]):
            self._console.print(verdict.text, style="red" if verdict.missed else "")
        self._console.print(
            f"{date}, {machine}; " + ", ".join(f"{k} {v}" for k, v in versions.items()), highlight=False
        )
        folder: Path = self.options.results or (RESULTS.with_name("results-fast") if self.fast else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(results, indent=1) + "\n")
        text = "\n".join(line.rstrip() for line in self._console.export_text().splitlines())
        (folder / f"{self.name}.txt").write_text(text + "\n")
        (figure or self._bars()).savefig(folder / f"{self.name}.png", dpi=80)

    def _bars(self) -> Figure:
        """Times and peaks of each section, as bars."""
        measures: dict[str, Callable[[Row], float]] = {"milliseconds": lambda row: 1e3 * row.median}
        if any(row.peak for rows in self.sections.values() for row in rows.values()):
            measures["peak, MiB"] = lambda row: (row.peak or 0) / 2**20
        height = sum(0.28 * len(rows) + 0.8 for rows in self.sections.values())
        figure = Figure(figsize=(5.5 * len(measures), max(height, 2)), layout="constrained")
        heights = [len(rows) + 2 for rows in self.sections.values()]
        grid = figure.subplots(len(self.sections), len(measures), squeeze=False, height_ratios=heights)
        for axes, (section, rows) in zip(grid, self.sections.items(), strict=True):
            done = {way: row for way, row in rows.items() if not row.error}
            for ax, (label, value) in zip(axes, measures.items(), strict=True):
                colors = ["C1" if way.startswith("remat") else "C0" for way in done]
                ax.barh(list(done), [value(row) for row in done.values()], color=colors)
                ax.invert_yaxis()
                ax.set_title(f"{section}: {label}", fontsize=9)
                ax.tick_params(labelsize=8)
        return figure


def time_text(row: Row) -> str:
    if not row.seconds:
        return ""
    scale, unit = next(
        pair for pair in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if row.median * pair[0] >= 1 or pair[0] == 1e6
    )
    least, median, greatest = (scale * s for s in (min(row.seconds), row.median, max(row.seconds)))
    return f"{median:.1f} {unit} ({least:.1f} - {greatest:.1f})"


def bytes_text(n: int | None) -> str:
    if n is None:
        return ""
    return f"{n / 2**20:.1f} MiB" if n >= 2**17 else f"{n / 2**10:.1f} KiB"


def flops_text(row: Row) -> str:
    return "" if row.flops is None else f"{row.flops / 1e9:.3f} G"


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
