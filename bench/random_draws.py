"""remat.random beside torch's generators and, where jax is installed, jitted jax.random: time and peak memory.

Everything draws the same amount on the same CPU, in turn (A B C A B C …). The ratios at the end are the targets:
uniform at most 2.5 times torch.rand and faster than jitted jax.random.uniform, normal at most 4 times torch.randn,
peak memory at most 4 times the result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

import remat.random as rr
from remat.debug import LiveBytes
from remat.random import _threefry

Draw = Callable[[], object]


def competitors(n: int) -> dict[str, dict[str, Draw]]:
    """What is measured: for each kind of draw, the same draw by each library."""
    key, logits, x = rr.key(0), torch.zeros(n // 64, 64), torch.ones(n)
    kinds: dict[str, dict[str, Draw]] = {
        "uniform": {"torch": lambda: torch.rand(n), "remat": lambda: rr.uniform(key, n)},
        "normal": {"torch": lambda: torch.randn(n), "remat": lambda: rr.normal(key, n)},
        "bernoulli": {"torch": lambda: torch.empty(n).bernoulli_(0.5), "remat": lambda: rr.bernoulli(key, 0.5, n)},
        "dropout": {"torch": lambda: torch.dropout(x, 0.5, True), "remat": lambda: rr.dropout(key, x, 0.5)},
        "randint": {"torch": lambda: torch.randint(100, (n,)), "remat": lambda: rr.randint(key, n, 0, 100)},
        "categorical": {
            "torch": lambda: torch.distributions.Categorical(logits=logits, validate_args=False).sample(),
            "remat": lambda: rr.categorical(key, logits),
        },
        "gamma": {
            "torch": lambda: torch.distributions.Gamma(2.0, 1.0, validate_args=False).sample((n // 16,)),
            "remat": lambda: rr.gamma(key, 2.0, (n // 16,)),
        },
        "one key split": {"remat": lambda: rr.split(key)},
    }
    with contextlib.suppress(ImportError):
        import jax

        k = jax.random.key(0)
        ones, zeros = jax.numpy.ones(n), jax.numpy.zeros((n // 64, 64))
        functions = {
            "uniform": lambda k: jax.random.uniform(k, (n,)),
            "normal": lambda k: jax.random.normal(k, (n,)),
            "bernoulli": lambda k: jax.random.bernoulli(k, 0.5, (n,)),
            "dropout": lambda k: jax.numpy.where(jax.random.bernoulli(k, 0.5, (n,)), ones * 2, 0),
            "randint": lambda k: jax.random.randint(k, (n,), 0, 100),
            "categorical": lambda k: jax.random.categorical(k, zeros),
            "gamma": lambda k: jax.random.gamma(k, 2.0, (n // 16,)),
            "one key split": jax.random.split,
        }
        for kind, function in functions.items():
            jitted = jax.jit(function)
            kinds[kind]["jax, jitted"] = lambda jitted=jitted: jitted(k).block_until_ready()
    return kinds


@contextlib.contextmanager
def open_ops() -> Iterator[None]:
    """Within it the draws run as plain Python, so that the meter sees the memory that they use inside."""
    ops = {name: getattr(_threefry, name) for name in ("uniform", "bernoulli", "bits", "fold_in")}
    for name in ops:
        setattr(_threefry, name, getattr(_threefry, f"_{name}"))
    try:
        yield
    finally:
        for name, op in ops.items():
            setattr(_threefry, name, op)


def peak(draw: Draw) -> float:
    """Peak live bytes of a draw over the bytes of its result."""
    with open_ops(), LiveBytes() as meter:
        result = draw()
    assert isinstance(result, torch.Tensor)
    return meter.peak / result.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=4_000_000, help="elements of a draw")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    kinds = competitors(options.n)
    seconds: dict[tuple[str, str], list[float]] = {}
    for kind, draws in kinds.items():
        for draw in draws.values():
            draw()
        for _ in range(options.rounds):
            for library, draw in draws.items():
                start = time.perf_counter()
                draw()
                seconds.setdefault((kind, library), []).append(time.perf_counter() - start)

    def milliseconds(kind: str, library: str) -> str:
        if (kind, library) not in seconds:
            return "-"
        times = [1e3 * t for t in seconds[kind, library]]
        return f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"

    def ratio(kind: str, a: str, b: str) -> float | None:
        """The median of a's times over b's of the same round."""
        if (kind, a) not in seconds or (kind, b) not in seconds:
            return None
        pairs = zip(seconds[kind, a], seconds[kind, b], strict=True)
        return statistics.median(x / y for x, y in pairs)

    libraries = ["torch", "jax, jitted", "remat"]
    title = f"{options.n:,} elements, milliseconds: median (least-greatest) of {options.rounds}"
    table = Table("", *libraries, "remat / torch", "remat / jax", "peak / result", title=title)
    for kind, draws in kinds.items():
        ratios = [ratio(kind, "remat", other) for other in libraries[:2]]
        shown = ["-" if r is None else f"{r:.2f}" for r in ratios]
        memory = f"{peak(draws['remat']):.2f}" if kind != "one key split" else "-"
        table.add_row(kind, *(milliseconds(kind, library) for library in libraries), *shown, memory)
    console = Console(width=150)
    console.print(table)
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()} with {os.cpu_count()} CPUs"
    )
    targets = [
        ("uniform / torch.rand", ratio("uniform", "remat", "torch"), 2.5),
        ("uniform / jitted jax.random.uniform", ratio("uniform", "remat", "jax, jitted"), 1.0),
        ("normal / torch.randn", ratio("normal", "remat", "torch"), 4.0),
        ("peak memory of uniform / its result", peak(kinds["uniform"]["remat"]), 4.0),
        ("peak memory of normal / its result", peak(kinds["normal"]["remat"]), 4.0),
    ]
    for name, value, target in targets:
        verdict = "not measured" if value is None else f"{value:.2f}, {'met' if value <= target else 'MISSED'}"
        console.print(f"{name} <= {target}: {verdict}")


if __name__ == "__main__":
    main()
