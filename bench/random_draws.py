"""remat.random beside torch's generators and jitted jax.random: time and peak memory of 4 million draws.

Everything draws the same amount on the same CPU. The peak is that of remat's own draw, over the bytes of its result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from _common import NOT_INSTALLED, Benchmark, Run
from torch import Tensor

import remat.random as rr
from remat.debug import LiveBytes
from remat.random import _threefry

SPLIT = "one key split"


def draws(n: int) -> dict[str, dict[str, Run | str]]:
    """For each kind of draw, the same draw by each library."""
    key, logits, x = rr.key(0), torch.zeros(n // 64, 64), torch.ones(n)
    categorical = torch.distributions.Categorical(logits=logits, validate_args=False)
    gamma = torch.distributions.Gamma(2.0, 1.0, validate_args=False)
    kinds: dict[str, dict[str, Run | str]] = {
        "uniform": {"torch": lambda: torch.rand(n), "remat": lambda: rr.uniform(key, n)},
        "normal": {"torch": lambda: torch.randn(n), "remat": lambda: rr.normal(key, n)},
        "bernoulli": {"torch": lambda: torch.empty(n).bernoulli_(0.5), "remat": lambda: rr.bernoulli(key, 0.5, n)},
        "dropout": {"torch": lambda: torch.dropout(x, 0.5, True), "remat": lambda: rr.dropout(key, x, 0.5)},
        "randint": {"torch": lambda: torch.randint(100, (n,)), "remat": lambda: rr.randint(key, n, 0, 100)},
        "categorical": {"torch": categorical.sample, "remat": lambda: rr.categorical(key, logits)},
        "gamma": {"torch": lambda: gamma.sample((n // 16,)), "remat": lambda: rr.gamma(key, 2.0, (n // 16,))},
        SPLIT: {"remat": lambda: rr.split(key)},
    }
    for kind, run in in_jax(n).items():
        kinds[kind]["jax, jitted"] = run
    return kinds


def in_jax(n: int) -> dict[str, Run | str]:
    try:
        import jax
    except ImportError:
        return dict.fromkeys(("uniform", "normal"), NOT_INSTALLED)
    ones, zeros = jax.numpy.ones(n), jax.numpy.zeros((n // 64, 64))
    functions: dict[str, Any] = {
        "uniform": lambda key: jax.random.uniform(key, (n,)),
        "normal": lambda key: jax.random.normal(key, (n,)),
        "bernoulli": lambda key: jax.random.bernoulli(key, 0.5, (n,)),
        "dropout": lambda key: jax.numpy.where(jax.random.bernoulli(key, 0.5, (n,)), ones * 2, 0),
        "randint": lambda key: jax.random.randint(key, (n,), 0, 100),
        "categorical": lambda key: jax.random.categorical(key, zeros),
        "gamma": lambda key: jax.random.gamma(key, 2.0, (n // 16,)),
        SPLIT: jax.random.split,
    }
    key = jax.random.key(0)
    jitted = {kind: jax.jit(function) for kind, function in functions.items()}
    return {kind: lambda draw=draw: jax.block_until_ready(draw(key)) for kind, draw in jitted.items()}


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


def peak(draw: Run) -> float:
    """Peak live bytes of a draw over the bytes of its result."""
    with open_ops(), LiveBytes() as meter:
        result = draw()
    assert isinstance(result, Tensor)
    return meter.peak / result.nbytes


def main() -> None:
    bench = Benchmark(__file__, __doc__)
    kinds = draws(100_000 if bench.fast else 4_000_000)
    found = bench.measure(kinds, rounds=9, weighed=False)
    peaks = {kind: peak(ways["remat"]) for kind, ways in kinds.items() if kind != SPLIT}
    for kind, rows in found.items():
        for other in ("torch", "jax, jitted"):
            if other in rows and not rows[other].error:
                rows["remat"].notes[f"time / {other}"] = f"{rows['remat'].over(rows[other]):.2f}"
        if kind in peaks:
            rows["remat"].notes["peak / result"] = f"{peaks[kind]:.2f}"
    by_jax = found["uniform"]["jax, jitted"]
    bench.ratios = {
        "uniform / torch.rand": found["uniform"]["remat"].over(found["uniform"]["torch"]),
        "uniform / jitted jax.random.uniform": None if by_jax.error else found["uniform"]["remat"].over(by_jax),
        "normal / torch.randn": found["normal"]["remat"].over(found["normal"]["torch"]),
        "uniform: peak / result": peaks["uniform"],
        "normal: peak / result": peaks["normal"],
    }
    bench.finish()


if __name__ == "__main__":
    main()
