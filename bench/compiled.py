"""Peak memory of one step compiled by inductor: without remat, with it, with a policy.

Compiled code allocates without a torch op, so memory is what the allocator's events in a profile say.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import Benchmark, Row
from torch import Tensor
from torch.func import grad, vmap
from torch.profiler import ProfilerActivity, profile

from remat import policies, remat

WS = tuple(torch.randn(128, 128) / 16 for _ in range(4))
X = torch.randn(512, 128)


def block(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.sin(x @ w).exp().cos()
    return x


def loss_of(decorate: Any) -> Callable[..., Tensor]:
    def loss(ws: Any, x: Tensor) -> Tensor:
        for w in ws:
            x = decorate(block)(w, x)
        return x.sum()

    return loss


def backward(loss: Any) -> Callable[[], Any]:
    fun = torch.compile(loss, fullgraph=True)

    def step() -> Any:
        leaves = tuple(w.clone().requires_grad_() for w in WS)
        fun(leaves, X).backward()
        return [w.grad for w in leaves]

    return step


def transformed(transform: Any) -> Callable[[Any], Callable[[], Any]]:
    def make(loss: Any) -> Callable[[], Any]:
        fun = torch.compile(transform(loss), fullgraph=True)
        return lambda: fun(WS, X)

    return make


def over_samples(fun: Any) -> Any:
    return lambda ws, x: vmap(fun, in_dims=(None, 0))(ws, x.view(8, 64, 128))


STEPS = {
    ".backward()": backward,
    ".backward() of vmap": lambda loss: backward(lambda ws, x: over_samples(loss)(ws, x).sum()),
    "grad": transformed(grad),
    "vmap(grad)": transformed(lambda loss: over_samples(grad(loss))),
    ".backward() of grad": lambda loss: backward(lambda ws, x: sum(g.sin().sum() for g in grad(loss)(ws, x))),
}
WAYS = {"no remat": lambda f: f, "remat": remat, "remat, saving dots": remat(policy=policies.save_ops("mm", "bmm"))}


def peak(step: Callable[[], Any]) -> int:
    """In bytes, of a step after its first."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        most = max(most, live)
    return most


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    works = {name: STEPS[name] for name in ([".backward()"] if bench.fast else STEPS)}
    for name, make in works.items():
        bench.sections[name] = {}
        for way, decorate in WAYS.items():
            torch.compiler.reset()
            bench.sections[name][way] = Row(peak=peak(make(loss_of(decorate))))
    bench.finish()


if __name__ == "__main__":
    main()
