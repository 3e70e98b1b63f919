"""Recursive halving of a chain of n ops: the peak grows as log n, the forward ops as n log n.

    def sines(n, x): return sin(x) if n == 1 else remat(sines)(n // 2, remat(sines)(n // 2, x))

A run of n ops keeps what its two halves were given and nothing else. So the peak is the log2(n) activations of one
path down, and a few of the ops at its end; and each op runs at most once in each of the runs that it is part of: in the
first run of all and in log2(n) reruns. A rerun that stops where its second half would begin runs half of its ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from _common import WAYS, Benchmark, Fun, Row, Run, ratio
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

SIZE = 16384
UNIT = 4 * SIZE
FEW = 4  # activations at the end of the path: operand, result, cotangent and gradient of the last op


def halved(n: int, way: Callable[[Fun], Fun]) -> Fun:
    if n == 1:
        return torch.sin
    half = halved(n // 2, way)

    def both(x: Tensor) -> Tensor:
        return way(half)(way(half)(x))

    return both


def start() -> Tensor:
    return torch.linspace(-1, 1, SIZE)


def backward(fun: Fun) -> Run:
    return lambda: fun(start().requires_grad_()).sum().backward()


def gradient(fun: Fun) -> Run:
    return lambda: grad(lambda x: fun(x).sum())(start())


def most_units(n: int) -> float:
    return math.log2(n) + FEW


def most_ops(n: int) -> float:
    return n * (math.log2(n) + 1)


# Each line of the picture: (setting, way, the greatest n).
LINES: dict[str, tuple[Callable[[Fun], Run], str, int]] = {
    ".backward(), no remat": (backward, "no remat", 4096),
    ".backward(), torch, non-reentrant": (backward, "torch, non-reentrant", 256),
    ".backward(), remat": (backward, "remat", 4096),
    "grad, no remat": (gradient, "no remat", 4096),
    "grad, remat": (gradient, "remat", 4096),
}


def picture(found: dict[str, dict[int, Row]], sizes: list[int]) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    memory, ops = figure.subplots(1, 2)
    for line, rows in found.items():
        done = {n: row for n, row in rows.items() if not row.error}
        memory.plot(list(done), [(row.peak or 0) / UNIT for row in done.values()], "o-", label=line)
        ops.plot(list(done), [row.ops["sin"] for row in done.values()], "o-", label=line)
    memory.plot(sizes, [most_units(n) for n in sizes], "k--", label=f"log2(n) + {FEW}")
    ops.plot(sizes, [most_ops(n) for n in sizes], "k--", label="n (log2(n) + 1)")
    memory.set(title="peak of live bytes, in activations", xlabel="n", xscale="log", yscale="log")
    ops.set(title="forward ops", xlabel="n", xscale="log", yscale="log")
    for axes in (memory, ops):
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.minorticks_off()
        axes.legend(fontsize=8)
    return figure


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    sizes = [4, 16] if bench.fast else [16, 64, 256, 1024, 4096]
    found: dict[str, dict[int, Row]] = {line: {} for line in LINES}
    for n in sizes:
        ways = {line: make(halved(n, WAYS[way])) for line, (make, way, most) in LINES.items() if n <= most}
        rows = bench.measure({f"n = {n}": ways}, rounds=3 if n <= 256 else 0)[f"n = {n}"]
        for line, row in rows.items():
            found[line][n] = row
            if not row.error:
                row.notes |= {
                    "peak, activations": f"{(row.peak or 0) / UNIT:.1f}",
                    "forward ops": f"{row.ops['sin']:,}",
                }
    for setting in (".backward()", "grad"):
        rows_of = found[f"{setting}, remat"]
        bench.ratios |= {
            f"{setting}: peak / (log2(n) + {FEW}) activations": max(
                ratio(row.peak, most_units(n) * UNIT) for n, row in rows_of.items()
            ),
            f"{setting}: forward ops / (n (log2(n) + 1))": max(
                ratio(row.ops["sin"], most_ops(n)) for n, row in rows_of.items()
            ),
        }
    bench.finish(picture(found, sizes))


if __name__ == "__main__":
    main()
