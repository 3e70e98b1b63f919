"""How often a loop's steps run, and which states it keeps.

NOTE [the schedule]: a segment of n steps has k checkpoints, one of which is its first state. It is split into a first
part of m steps and a rest of n - m steps with k - 1 checkpoints. The first part is a remat'd function, so it keeps only
its first state. Its rerun is a segment with k checkpoints again, because the rest has freed its own by then. With the
right m this is the optimal schedule, the revolve of Griewank and Walther: if n <= C(k + r, k), each step runs at most
r + 1 times.
"""

from __future__ import annotations

import itertools
from math import comb

import torch

from remat import _compile

_MOST_REPEATS = 40
"""The most reruns of a step. Reruns nest to this depth, and torch's autograd changes threads at a depth of 60."""


def repeats(n: int, k: int) -> int:
    """The smallest r with n <= C(k + r, k)."""
    return next(r for r in itertools.count() if n <= comb(k + r, k))


def parts_of(n: int, k: int) -> list[tuple[int, int]]:
    """The parts of a segment, NOTE [the schedule]: (steps, checkpoints) of each. The last part is a single step."""
    parts = []
    while n > 1:
        r = repeats(n, k)
        m = max(1, comb(k + r - 2, k), n - comb(k + r - 1, k - 1))
        parts.append((m, k))
        n, k = n - m, k - 1
    return [*parts, (1, 0)]


def _fewest(n: int, r: int) -> int:
    """The fewest checkpoints with which none of n steps runs again more than r times."""
    return next(k for k in itertools.count(1) if n <= comb(k + r, k))


def checkpoints_for(who: str, n: int, k: int | None) -> int:
    """The number of checkpoints for n steps. None: the fewest with which no step runs more than three times."""
    if _compile.tracing() or not torch.is_grad_enabled():
        return n  # one after the other: the compiler sees a chain of remat'd steps, and without gradients none is kept
    k = _fewest(n, 2) if k is None else k
    if n > comb(k + _MOST_REPEATS, k):
        raise ValueError(
            f"{who}: checkpoints={k} is too few for {n:,} steps: steps would run up to {repeats(n, k) + 1:,} times, "
            f"and {_MOST_REPEATS + 1} is the most. Give at least checkpoints={_fewest(n, _MOST_REPEATS)}."
        )
    return k
