"""How long `import remat` takes, after `import torch`.

Each round is a process of its own. One before them reads all files, so that the disk does not count, and writes the
bytecode, which `pip install` writes for users.
"""

from __future__ import annotations

import os
import subprocess
import sys

from _common import Benchmark, Row

MODULES = ("torch", "remat")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
PROGRAM = f"""
import importlib, time
for name in {MODULES}:
    start = time.perf_counter()
    importlib.import_module(name)
    print(time.perf_counter() - start)
"""


def seconds() -> list[float]:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    rounds = bench.options.rounds or (1 if bench.fast else 7)
    seconds()
    times = zip(*(seconds() for _ in range(rounds)), strict=True)
    rows = {f"import {name}": Row(seconds=list(each)) for name, each in zip(MODULES, times, strict=True)}
    bench.sections["one after the other"] = rows
    bench.ratios["import remat after import torch, in s"] = rows["import remat"].median
    bench.finish()


if __name__ == "__main__":
    main()
