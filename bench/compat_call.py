"""What a call of `checkpoint` adds to a tiny function: remat's beside torch's, on one thread.

Forward and backward on a few numbers, so that what is measured is Python. What a call adds is its time less that of
the plain call. How a function is written should not matter: one is measured with a side effect, too. Selective
checkpointing keeps the results of matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tiny
import torch
import torch.utils.checkpoint
from _common import Benchmark, Fun, Run
from tiny import added, backward
from torch import Tensor, nn

import remat.compat

CALLS: list[None] = []
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
NORMED = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())


def encoder(x: Tensor, w: Tensor) -> Tensor:
    del w
    return ENCODER(x.reshape(1, 2, 8))


def normed(x: Tensor, w: Tensor) -> Tensor:
    del w
    return NORMED(x)


class Rotary(nn.Module):
    """Attention with rotary embeddings, as in Llama."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer(
            "angles", torch.polar(torch.ones(2, width // heads // 2), torch.rand(2, width // heads // 2))
        )

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.angles).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = self.turned(q) @ self.turned(k).mT / v.shape[-1] ** 0.5
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


ROTARY = Rotary(8, 2)


def rotary(x: Tensor, w: Tensor) -> Tensor:
    del w
    return ROTARY(x.reshape(1, 2, 8))


def with_append(fun: Fun) -> Fun:
    """A function that appends to a list besides."""

    def counted(x: Tensor, w: Tensor) -> Tensor:
        CALLS.append(None)
        return fun(x, w)

    return counted


FUNCTIONS: dict[str, Fun] = {
    **tiny.FUNCTIONS,
    "tanh(x @ w), with an append": with_append(tiny.tanh),
    "a TransformerEncoderLayer": encoder,
    "a linear layer with BatchNorm": normed,
    "attention with rotary embeddings": rotary,
}
LIBRARIES: dict[str, Any] = {"torch": torch.utils.checkpoint, "remat": remat.compat}
DOTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
VARIANTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "non-reentrant": lambda library: {"use_reentrant": False},
    "reentrant": lambda library: {"use_reentrant": True},
    "selective": lambda library: {
        "use_reentrant": False,
        "context_fn": functools.partial(library.create_selective_checkpoint_contexts, DOTS),
    },
}


def ways(fun: Fun) -> dict[str, Run | str]:
    found: dict[str, Run | str] = {"no remat": backward(fun)}
    for name, library in LIBRARIES.items():
        for variant, options in VARIANTS.items():
            found[f"{name}, {variant}"] = backward(functools.partial(library.checkpoint, fun, **options(library)))
    return found


def main() -> None:
    bench = Benchmark(__file__, __doc__, threads=1)
    works = {title: ways(fun) for title, fun in FUNCTIONS.items()}
    for title, rows in bench.measure(works, rounds=21, repeats=20, weighed=False).items():
        for way, row in rows.items():
            if row.seconds and way != "no remat":
                row.notes["adds"] = f"{1e6 * added(rows, way):.1f} µs"
        for variant in VARIANTS:
            ratio = added(rows, f"remat, {variant}") / added(rows, f"torch, {variant}")
            bench.ratios[f"{title}, {variant}: remat adds / torch adds"] = ratio
    bench.finish()


if __name__ == "__main__":
    main()
