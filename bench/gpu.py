"""A large transformer on a GPU, in bf16 with flash attention: peak memory and time, of all that remat does.

24 blocks of width 2048 with 16 heads, on 4 x 2048 tokens. Offloading is compared with saving under the same policy: if
the copies overlap with the computation, both take the same time. `scan` runs over the blocks, with their parameters
stacked. The draws of `remat.random` are compared with those on the CPU, bit by bit.

Each table is printed when it is measured. What is there is kept after each, and when the script is interrupted or
terminated. With `--fast` it runs on a CPU, as a test of the script.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable

import torch
from _common import UNAVAILABLE, WAYS, Benchmark, Fun, Row, Run, bytes_text, selective
from _transformer import Params, Transformer, backward, gradient, params_of, per_sample_gradients
from torch import Tensor
from torch.func import functional_call, grad

import remat.random as rr
from remat import remat, scan
from remat.policies import (
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    offload_dot_with_no_batch_dims,
    offload_ops,
    save_ops,
)

# Saving, and offloading the same.
PAIRS = {
    "addmm": (save_ops("addmm"), offload_ops("addmm")),
    "dots": (dots_with_no_batch_dims_saveable, offload_dot_with_no_batch_dims()),
}
OURS: dict[str, Callable[[Fun], Fun]] = {
    "no remat": WAYS["no remat"],
    "remat": remat,
    "remat, everything_saveable": remat(policy=everything_saveable),
}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda key: rr.uniform(key, (1000, 1000)),
    "normal": lambda key: rr.normal(key, (1000, 1000)),
    "normal, bf16": lambda key: rr.normal(key, (1000, 1000), dtype=torch.bfloat16),
    "bernoulli": lambda key: rr.bernoulli(key, 0.3, (1000, 1000)),
    "randint": lambda key: rr.randint(key, (1000, 1000), 0, 1 << 20),
}


def policies() -> dict[str, Callable[[Fun], Fun]]:
    found: dict[str, Callable[[Fun], Fun]] = {}
    for name, (saving, offloading) in PAIRS.items():
        found |= {
            f"torch selective, saving {name}": selective(saving),
            f"remat, saving {name}": remat(policy=saving),
            f"remat, offloading {name}": remat(policy=offloading),
        }
    return found


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


def by_scan(model: Transformer, x: Tensor, checkpoints: int | None) -> Run:
    """The gradient of a scan over the blocks; a loop without remat if there are no checkpoints."""
    params: list[Params] = [params_of(block) for block in model.blocks]
    stacked = {name: torch.stack([p[name] for p in params]) for name in params[0]}
    block = model.blocks[0]

    def of(stacked: Params, x: Tensor) -> Tensor:
        if checkpoints is None:
            for i in range(len(params)):
                x = functional_call(block, {name: p[i] for name, p in stacked.items()}, (x,))
        else:
            x, _ = scan(lambda x, p: (functional_call(block, p, (x,)), None), x, stacked, checkpoints=checkpoints)
        return x.square().mean()

    return functools.partial(grad(of, argnums=(0, 1)), stacked, x)


def bits_that_differ(draw: Callable[[Tensor], Tensor], device: torch.device) -> int:
    """Between the same draw on the CPU and on the device."""
    here, there = (draw(rr.key(0, device=d)).cpu().contiguous().view(torch.uint8) for d in ("cpu", device))
    return int(((here ^ there).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).sum())


def measure(bench: Benchmark, title: str, ways: dict[str, Run | str]) -> dict[str, Row]:
    """Measure, print and keep one table."""
    ways = {name: run if isinstance(run, str) else synchronized(run) for name, run in ways.items()}
    rows = bench.measure({title: ways}, rounds=5)[title]
    if torch.cuda.is_available():
        for way, row in rows.items():
            run = ways[way]
            if not row.error and not isinstance(run, str):
                row.notes["peak, allocated"] = bytes_text(allocated(run))
    bench.show(title)
    bench.keep()
    return rows


def measure_all(bench: Benchmark) -> None:
    depth, width, heads, batch, tokens = (2, 64, 2, 2, 32) if bench.fast else (24, 2048, 16, 4, 2048)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = {
        name: Row(notes={"bits that differ from the CPU's": str(bits_that_differ(draw, device))})
        for name, draw in DRAWS.items()
    }
    bench.sections["remat.random, a million draws"] = rows
    bench.ratios["random draws: bits that differ from the CPU's"] = sum(
        int(bits) for row in rows.values() for bits in row.notes.values()
    )
    model = Transformer(depth, width, heads, fused=True).to(device, torch.bfloat16)
    x = torch.randn(batch, tokens, width, device=device, dtype=torch.bfloat16)
    ways = WAYS | {"remat, everything_saveable": OURS["remat, everything_saveable"]} | policies()
    offloading: list[float] = []
    for setting, make in {".backward()": backward, "grad": gradient}.items():
        step = functools.partial(make, model, x)
        rows = measure(bench, setting, {n: UNAVAILABLE.get(n) or step(way) for n, way in ways.items()})
        offloading += [rows[f"remat, offloading {name}"].over(rows[f"remat, saving {name}"]) for name in PAIRS]
        worst = torch.tensor(offloading).max().item()  # nan where one has failed
        bench.ratios["offloading: time / the same policy with saving"] = worst
    step = functools.partial(per_sample_gradients, model, x)
    measure(bench, "per-sample gradients", {name: step(way) for name, way in OURS.items()})
    loops: dict[str, Run | str] = {"no remat": by_scan(model, x, None)}
    loops |= {f"remat.scan, checkpoints={k}": by_scan(model, x, k) for k in ((2,) if bench.fast else (6, 3))}
    measure(bench, "grad of a scan over the blocks", loops)


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    if not (bench.fast or torch.cuda.is_available()):
        raise SystemExit("gpu.py: there is no CUDA device here. With --fast it runs on a CPU, as a test of the script.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure_all(bench)
    finally:
        bench.finish()


if __name__ == "__main__":
    main()
