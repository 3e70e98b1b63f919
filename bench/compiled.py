"""Code compiled by inductor: peak and time of a step with remat, with a policy, and with torch's checkpoint.

4 blocks of 3 products of width 128, on 1024 rows; for `vmap(grad)` these are 8 samples. Compiled code allocates without
a torch op, so memory is what the allocator's events in a profile say. Torch's checkpoint works with `.backward()` only.
The gradients of each sample are larger than those of a batch, so peaks are compared beyond the gradients.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import WAYS, Benchmark, Fun, Run, ratio
from torch import Tensor
from torch.func import grad, vmap
from torch.profiler import ProfilerActivity, profile

from remat import policies, remat

BLOCKS, WIDTH, ROWS, SAMPLES = 4, 128, 1024, 8
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm"}


def block(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.sin(x @ w).exp().cos()
    return x


def loss_of(way: Any) -> Callable[..., Tensor]:
    def loss(ws: Any, x: Tensor) -> Tensor:
        for w in ws:
            x = way(block)(w, x)
        return x.sum()

    return loss


def backward(compiled: Fun, loss: Fun, ws: tuple[Tensor, ...], x: Tensor) -> Run:
    fun = compiled(loss)

    def step() -> Any:
        leaves = tuple(w.detach().requires_grad_() for w in ws)
        fun(leaves, x).backward()
        return [w.grad for w in leaves]

    return step


def gradient(compiled: Fun, loss: Fun, ws: tuple[Tensor, ...], x: Tensor) -> Run:
    fun = compiled(grad(loss))
    return lambda: fun(ws, x)


def per_sample_gradients(compiled: Fun, loss: Fun, ws: tuple[Tensor, ...], x: Tensor) -> Run:
    fun = compiled(vmap(grad(loss), in_dims=(None, 0)))
    samples = x.view(SAMPLES, -1, WIDTH)
    return lambda: fun(ws, samples)


OURS = {
    "no remat": WAYS["no remat"],
    "remat": remat,
    "remat, saving dots": remat(policy=policies.save_ops("mm", "bmm")),
}
STEPS: dict[str, tuple[Callable[..., Run], dict[str, Any]]] = {
    ".backward()": (backward, OURS | {"torch, non-reentrant": WAYS["torch, non-reentrant"]}),
    "grad": (gradient, OURS),
    "vmap(grad)": (per_sample_gradients, OURS),
}


def profiled(step: Run) -> tuple[int, int]:
    """The peak of a step beyond the gradients, in bytes, and how many products it computes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        gradients = step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    live = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        most = max(most, live)
    return most - sum(g.nbytes for g in gradients), sum(e.get("name") in PRODUCTS for e in events)


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    blocks, rows = (1, 64) if bench.fast else (BLOCKS, ROWS)
    ws, x = tuple(torch.randn(WIDTH, WIDTH) / 16 for _ in range(blocks)), torch.randn(rows, WIDTH)
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager" if bench.fast else "inductor")
    works = {
        setting: {way: make(compiled, loss_of(decorate), ws, x) for way, decorate in ways.items()}
        for setting, (make, ways) in STEPS.items()
    }
    with torch._dynamo.config.patch(recompile_limit=64):  # one code object serves all ways
        found = bench.measure(works, rounds=9, weighed=False)
    products: dict[tuple[str, str], int] = {}
    for setting, ways in found.items():
        for way, row in ways.items():
            if not row.error:
                row.peak, products[setting, way] = profiled(works[setting][way])
                row.notes["products"] = str(products[setting, way])
    torchs = found[".backward()"]["torch, non-reentrant"]
    for setting in ("grad", "vmap(grad)"):
        ours = found[setting]["remat"]
        saving = [products.get((setting, way)) for way in ("remat, saving dots", "no remat")]
        bench.ratios |= {
            f"{setting}: peak beyond the gradients / torch's checkpoint, .backward()": ratio(ours.peak, torchs.peak),
            f"{setting}: time / torch's checkpoint, .backward()": ours.over(torchs),
            f"{setting}: saving dots: products / no remat": ratio(*saving),
        }
    bench.finish()


if __name__ == "__main__":
    main()
