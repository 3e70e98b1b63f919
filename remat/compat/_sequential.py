"""`checkpoint_sequential`."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch

from remat._errors import shown
from remat.compat._checkpoint import checkpoint, warn_use_reentrant


def checkpoint_sequential(
    functions: torch.nn.Sequential | Iterable[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run functions one after the other, checkpointing all but the last of some segments of the sequence.

    **Arguments:**

    - `functions`: an `nn.Sequential`, or the functions; each is given what the one before returned.
    - `segments`: into how many segments to divide them, from 1 to their number.
    - `input`: what the first is given.
    - `use_reentrant`, `preserve_rng_state`: as for `checkpoint`.

    **Returns:** what the last function returned.

    **Raises:** `TypeError` for what is no function among them, and for none; `ValueError` for a number of segments that
    is no int or out of range, and for other keywords.

    Examples:
        >>> import torch
        >>> from remat import checkpoint_sequential
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
        >>> checkpoint_sequential(model, 2, torch.ones(2, 3), use_reentrant=False).shape
        torch.Size([2, 3])
    """
    if use_reentrant is None:
        warn_use_reentrant("checkpoint_sequential")
        use_reentrant = True
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    steps = [*(functions.children() if isinstance(functions, torch.nn.Sequential) else functions)]
    if not steps or not all(map(callable, steps)):
        raise TypeError(
            "checkpoint_sequential: functions must be a Sequential or an iterable of callables, one at least; got "
            f"{shown(functions)}."
        )
    if not isinstance(segments, numbers.Integral) or not 1 <= segments <= len(steps):
        raise ValueError(
            f"checkpoint_sequential: segments must be in 1…{len(steps)}, the number of functions; got "
            f"{shown(segments)}."
        )
    size = len(steps) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        segment = functools.partial(_one_after_another, steps[start : start + size])
        input = checkpoint(segment, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _one_after_another(steps[last:], input)


def _one_after_another(steps: Iterable[Callable[[Any], Any]], input: Any) -> Any:
    for step in steps:
        input = step(input)
    return input
