"""Tables and quantities as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> str:
    """Rows in aligned columns: left-aligned for the columns in `left`, right-aligned for the others."""
    columns = []
    for i, column in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, column))
        columns.append([c.ljust(width) if i in left else c.rjust(width) for c in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _in_units(n: float, step: int, units: str) -> str:
    """A number in the smallest unit in which it is below `step`. Each unit is `step` times the one before."""
    names = units.split()
    while n >= step and len(names) > 1:
        n /= step
        del names[0]
    return f"{n:.0f} {names[0]}" if float(n).is_integer() else f"{n:.1f} {names[0]}"


def bytes_text(nbytes: int) -> str:
    """Bytes as text."""
    return _in_units(nbytes, 1024, "B KiB MiB GiB TiB")


def flops_text(flops: int) -> str:
    """Floating point operations as text."""
    return _in_units(flops, 1000, "FLOP kFLOP MFLOP GFLOP TFLOP PFLOP")


def seconds_text(seconds: float) -> str:
    """Seconds as text."""
    return _in_units(seconds * 1e9, 1000, "ns us ms s")
