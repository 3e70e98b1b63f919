"""What a call of `checkpoint` adds to a tiny function: remat's beside torch's, on one thread.

Forward and backward on 4 x 4 numbers, so that what is measured is Python. What a call adds is its time less that of
the plain call.
"""

from __future__ import annotations

import functools

import torch.utils.checkpoint
from _common import Benchmark, Fun, Run
from tiny import FUNCTIONS, added, backward

import remat

CHECKPOINTS: dict[str, Fun] = {"torch": torch.utils.checkpoint.checkpoint, "remat": remat.checkpoint}


def ways(fun: Fun) -> dict[str, Run | str]:
    found: dict[str, Run | str] = {"no remat": backward(fun)}
    for library, checkpoint in CHECKPOINTS.items():
        for use_reentrant, variant in ((False, "non-reentrant"), (True, "reentrant")):
            wrapped = functools.partial(checkpoint, fun, use_reentrant=use_reentrant)
            found[f"{library}, {variant}"] = backward(wrapped)
    return found


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    found = bench.measure({title: ways(fun) for title, fun in FUNCTIONS.items()}, rounds=31, repeats=30, weighed=False)
    ratios = []
    for title, rows in found.items():
        for way, row in rows.items():
            if row.seconds and way != "no remat":
                row.notes["adds"] = f"{1e6 * added(rows, way):.1f} µs"
        ratios.append(added(rows, "remat, non-reentrant") / added(rows, "torch, non-reentrant"))
        bench.reported[f"{title}: checkpoint adds / torch adds"] = f"{ratios[-1]:.2f}"
    bench.ratios["checkpoint adds / torch adds"] = max(ratios)  # of the worst function
    bench.finish()


if __name__ == "__main__":
    main()
