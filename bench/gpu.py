"""A large transformer on a GPU, in bf16 with flash attention: peak memory and time, saving and offloading.

24 blocks of width 2048 with 16 heads, on 4 x 2048 tokens. Offloading is compared with saving under the same policy: if
the copies overlap with the computation, both take the same time. With `--fast` it runs on a CPU, as a test of the
script.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from _common import UNAVAILABLE, WAYS, Benchmark, Fun, Run, bytes_text, selective
from _transformer import Transformer, backward, gradient

from remat import remat
from remat.policies import dots_with_no_batch_dims_saveable, offload_dot_with_no_batch_dims, offload_ops, save_ops

# Saving, and offloading the same.
PAIRS = {
    "addmm": (save_ops("addmm"), offload_ops("addmm")),
    "dots": (dots_with_no_batch_dims_saveable, offload_dot_with_no_batch_dims()),
}


def synchronized(run: Run) -> Run:
    """The run, with the wait for what it has put on the device."""

    def then_wait() -> None:
        run()
        torch.cuda.synchronize()

    return then_wait if torch.cuda.is_available() else run


def allocated(run: Run) -> int:
    """The most bytes that torch's CUDA allocator has handed out during a run, beyond those before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    if not (bench.fast or torch.cuda.is_available()):
        raise SystemExit("gpu.py: there is no CUDA device here. With --fast it runs on a CPU, as a test of the script.")
    depth, width, heads, batch, tokens = (2, 64, 2, 2, 32) if bench.fast else (24, 2048, 16, 4, 2048)
    at = {"dtype": torch.bfloat16, "device": torch.device("cuda" if torch.cuda.is_available() else "cpu")}
    model, x = Transformer(depth, width, heads, fused=True).to(**at), torch.randn(batch, tokens, width, **at)

    policies: dict[str, Callable[[Fun], Fun]] = {}
    for name, (saving, offloading) in PAIRS.items():
        policies |= {
            f"torch selective, saving {name}": selective(saving),
            f"remat, saving {name}": remat(policy=saving),
            f"remat, offloading {name}": remat(policy=offloading),
        }
    works: dict[str, dict[str, Run | str]] = {}
    for setting, make in {".backward()": backward, "grad": gradient}.items():
        step = functools.partial(make, model, x)
        ways = WAYS | policies
        works[setting] = {n: UNAVAILABLE.get(n) or synchronized(step(way)) for n, way in ways.items()}
    found = bench.measure(works, rounds=7)
    if torch.cuda.is_available():
        for setting, rows in found.items():
            for way, row in rows.items():
                run = works[setting][way]
                if not row.error and not isinstance(run, str):
                    row.notes["peak, allocated"] = bytes_text(allocated(run))
    bench.ratios["offloading: time / the same policy with saving"] = max(
        rows[f"remat, offloading {name}"].over(rows[f"remat, saving {name}"])
        for rows in found.values()
        for name in PAIRS
    )
    bench.finish()


if __name__ == "__main__":
    main()
