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
import io
import json
import math
import os
import platform
import statistics
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from check import table_of, verdicts
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from remat import remat
from remat._torch_internals import TorchDispatchMode
from remat.debug import LiveBytes
from remat.policies import Policy

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


def selective(policy: Policy) -> Callable[[Fun], Fun]:
    """Torch's selective checkpointing, under a policy."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy.start())

    return lambda fun: functools.partial(checkpoint, fun, use_reentrant=False, context_fn=contexts)


# Those of them that can't be had, and why.
UNAVAILABLE = {} if is_installed("torch-remat") else {"torch-remat": NOT_INSTALLED}


def runs(make: Callable[[Callable[[Fun], Fun]], Run]) -> dict[str, Run | str]:
    """The same work in each of `WAYS`: `make(way)` gives the run."""
    return {name: UNAVAILABLE.get(name) or make(way) for name, way in WAYS.items()}


@dataclass
class Row:
    """What one way of doing the work took; `error` where it did not work."""

    seconds: list[float] = field(default_factory=list)  # of each round
    peak: int | None = None  # live bytes
    left: int | None = None  # bytes that only a garbage collection frees
    flops: int | None = None
    ops: Counter[str] = field(default_factory=Counter)
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
        kept: dict[str, Any] = {key: value for key, value in vars(self).items() if value or value == 0}
        kept.pop("ops", None)
        if self.seconds:
            kept["seconds"] = {"median": self.median, "least": min(self.seconds), "greatest": max(self.seconds)}
        return kept


class Count(TorchDispatchMode):
    """Counts ops, and FLOPs by torch's formulas. Its `FlopCounterMode` looks at modules too, and fails under grad."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops[func.overloadpacket.__name__] += 1
        if count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def weigh(run: Run) -> Row:
    """The peak of live bytes during a run, what it leaves to the garbage collector, and what it computes."""
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as meter, Count() as count:
            run()
        return Row(peak=meter.peak, left=meter.current, flops=count.flops, ops=count.ops)
    finally:
        gc.enable()


def _first_of_all() -> None:
    """What torch makes in the first backward pass that a meter sees is garbage that is not a benchmark's."""
    torch.ones(1, requires_grad=True).sin().sum().backward()


class Jitted:
    """A function compiled by jax, as a run. Memory and FLOPs (of all ops) are XLA's own figures for the program."""

    def __init__(self, fun: Fun, *args: Any) -> None:
        import jax

        self._compiled, self._args, self._ready = jax.jit(fun).lower(*args).compile(), args, jax.block_until_ready
        memory, cost = self._compiled.memory_analysis(), self._compiled.cost_analysis()
        self.row = Row(peak=memory.temp_size_in_bytes + memory.output_size_in_bytes, flops=int(cost.get("flops", 0)))

    def __call__(self) -> None:
        self._ready(self._compiled(*self._args))


def ratio(a: float | None, b: float | None) -> float:
    return math.nan if a is None or not b else a / b


class Benchmark:
    """One script: its options, what it measured, and where that goes.

    **Arguments:**

    - `file`: the script's `__file__`; results are called after it.
    - `what`: the script's docstring; the first line is the title.
    - `threads`: how many torch uses, unless told otherwise.
    """

    def __init__(
        self,
        file: str,
        what: str | None,
        *,
        threads: int | None = None,
    ) -> None:
        self.name = Path(file).stem
        self.title = (what or "").split("\n")[0]
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--fast", action="store_true", help="seconds instead of minutes; the figures mean nothing")
        parser.add_argument("--rounds", type=int, help="how often each way is timed")
        parser.add_argument("--threads", type=int, default=threads, help="threads of torch")
        parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of all threads, for a busy machine")
        parser.add_argument("--results", type=Path, help=f"where results go: {RESULTS.name}/ beside the script")
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
        self._rounds: set[int] = set()
        self._load = os.getloadavg()[0]

    def measure(
        self,
        works: dict[str, dict[str, Run | str]],
        *,
        rounds: int,
        repeats: int = 1,
        weighed: bool = True,
    ) -> dict[str, dict[str, Row]]:
        """Do works in several ways: weigh each, and then time all of them in turn (A B C A B C ...).

        **Arguments:**

        - `works`: for each work a run for each way of doing it, or why there is none.
        - `rounds`: how often each is timed, unless told otherwise on the command line.
        - `repeats`: runs in a round; the time is that of one run.
        - `weighed`: whether memory and FLOPs are measured.

        **Returns:** for each work a row for each way: new sections of the table.
        """
        clock = CLOCKS[self.options.clock]
        if rounds:  # else only weighed
            rounds = self.options.rounds or (1 if self.fast else rounds)
            self._rounds.add(rounds)
        repeats = 1 if self.fast else repeats
        found: dict[str, dict[str, Row]] = {}
        timed: list[tuple[Row, Run]] = []
        console = Console(stderr=True)
        if not console.is_terminal:
            console.print(f"{self.name}: {', '.join(works)}", highlight=False)
        if weighed:
            weigh(_first_of_all)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            for work, ways in progress.track(works.items(), description=f"{self.name}: memory"):
                rows = self.sections[work] = found[work] = {}
                for name, way in ways.items():
                    rows[name] = self._first(way, weighed)
                timed += [(row, ways[name]) for name, row in rows.items() if not row.error]
            gc.collect()
            gc.freeze()  # what imports have made, such as jax's, is not looked through again and again
            for _ in progress.track(range(rounds), description=f"{self.name}: time"):
                for row, run in timed:
                    gc.collect()
                    start = clock()
                    for _ in range(repeats):
                        run()
                    row.seconds.append((clock() - start) / repeats)
        return found

    def _first(self, way: Run | str, weighed: bool) -> Row:
        """The row of a way after its first run, which also warms up."""
        if isinstance(way, str):
            return Row(error=way)
        try:
            if weighed and not isinstance(way, Jitted):
                return weigh(way)
            way()
        except Exception as e:
            return Row(error=f"error: {type(e).__name__}: {textwrap.shorten(str(e), 60, placeholder=' ...')}")
        return way.row if isinstance(way, Jitted) and weighed else Row()

    def finish(self, figure: Figure | None = None) -> None:
        """Print the table and how the ratios meet their targets; keep them, and the picture."""
        self._print_to(Console(width=200))
        self.keep(figure)

    def keep(self, figure: Figure | None = None) -> None:
        """Write what is measured so far into the folder of results."""
        recorder = Console(width=200, record=True, file=io.StringIO())
        self._print_to(recorder)
        text = "\n".join(line.rstrip() for line in recorder.export_text().splitlines())
        folder: Path = self.options.results or (RESULTS.with_name("results-fast") if self.fast else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.txt").write_text(text + "\n")
        (folder / f"{self.name}.json").write_text(json.dumps(self._json(), indent=1) + "\n")
        if figure or any(row.seconds or row.peak for rows in self.sections.values() for row in rows.values()):
            (figure or self._bars()).savefig(folder / f"{self.name}.png", dpi=80)

    def show(self, section: str) -> None:
        """Print one section, while others are to come."""
        Console(width=200).print(self._table({section: self.sections[section]}))

    def _table(self, sections: dict[str, dict[str, Row]]) -> Table:
        columns = list({key: None for rows in sections.values() for row in rows.values() for key in row.notes})
        every = [row for rows in sections.values() for row in rows.values()]
        measured = {
            f"{self.options.clock} time (least - greatest)": (time_text, any(row.seconds for row in every)),
            "peak, live": (lambda row: bytes_text(row.peak), any(row.peak is not None for row in every)),
            "left to gc": (lambda row: bytes_text(row.left), any(row.left for row in every)),
            "FLOPs": (flops_text, any(row.ops and row.flops for row in every)),
        }
        shown = {name: text for name, (text, has) in measured.items() if has}
        table = Table(title=self.title)
        for column in ("", *shown, *columns):
            table.add_column(column, no_wrap=True)
        for section, rows in sections.items():
            table.add_row(f"[bold]{section}")
            for way, row in rows.items():
                cells = [text(row) for text in shown.values()]
                if row.error:
                    cells = [row.error, *[""] * (len(shown) - 1)]
                table.add_row(f"  {way}", *cells, *(row.notes.get(column, "") for column in columns))
            table.add_section()
        return table

    def _json(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "threads": str(torch.get_num_threads())}
        for distribution in ("torch", "optree", "remat", "torch-remat", "jax", "transformers"):
            if is_installed(distribution):
                versions[distribution] = importlib.metadata.version(distribution)
        machine = f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"
        if torch.cuda.is_available():
            machine += f", {torch.cuda.get_device_name()}"
        rounds = " or ".join(map(str, sorted(self._rounds))) or "no"
        return {
            "title": self.title,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine,
            "versions": versions,
            "how": f"{rounds} rounds, load at the start {self._load:.1f}",
            "fast": self.fast,
            "clock": self.options.clock,
            "sections": {s: {way: row.json() for way, row in rows.items()} for s, rows in self.sections.items()},
            "reported": self.reported,
            # A ratio of what has failed is left out, which is a miss; None says that a peer is not installed.
            "ratios": {n: r and round(r, 4) for n, r in self.ratios.items() if r is None or not math.isnan(r)},
        }

    def _print_to(self, console: Console) -> None:
        results = self._json()
        console.print(self._table(self.sections))
        for name, text in self.reported.items():
            console.print(f"{name}: {text}")
        if found := list(verdicts(self.name, results["ratios"])):
            console.print(table_of(found, "targets"))
        versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        console.print(f"{results['date']}, {results['machine']}; {results['how']}; {versions}", highlight=False)

    def _bars(self) -> Figure:
        """Times and peaks of each section, as bars."""
        every = [row for rows in self.sections.values() for row in rows.values()]
        measures: dict[str, Callable[[Row], float]] = {}
        if any(row.seconds for row in every):
            measures["milliseconds"] = lambda row: 1e3 * row.median
        if any(row.peak for row in every):
            measures["peak, MiB"] = lambda row: (row.peak or 0) / 2**20
        height = sum(0.28 * len(rows) + 0.8 for rows in self.sections.values())
        figure = Figure(figsize=(5.5 * len(measures), max(height, 2)), layout="constrained")
        heights = [sum(not row.error for row in rows.values()) + 2 for rows in self.sections.values()]
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
    if row.flops is None:
        return ""
    return f"{row.flops / 1e9:.2f} G" if row.flops >= 1e9 else f"{row.flops / 1e6:.2f} M"


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
