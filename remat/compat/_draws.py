"""The draws of a run, to be repeated: from torch's generators, from Python's and from NumPy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._context import RandomState, has_accelerator
from remat._errors import CheckpointError
from remat.random._generators import PythonState, global_state, python_state, same_state, set_python_state
from remat.random._numpy_generator import numpy_state, set_numpy_state


class Draws:
    """The states of all generators before a run, to have it draw the same again."""

    __slots__ = ("_end", "_late", "_numpy", "_numpy_end", "_others", "_python", "_torch")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors`: what the run is given; the generators of their devices count."""
        self._torch = self._end = torch.default_generator.get_state()
        self._others = RandomState(tensors, of_torch_alone=True) if has_accelerator() else None
        self._python: PythonState | None = python_state()
        self._numpy = numpy_state()
        self._numpy_end: int | None = None  # a hash, when the run is over
        self._late: set[torch.device] = set()

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        if self._others is None:
            self._others = RandomState((), keyed=True, of_torch_alone=True)
        self._others.notice(generator)

    def finish(self, devices: Iterable[torch.device]) -> None:
        """The run is over. `devices`: those that came into play."""
        self._end = torch.default_generator.get_state()
        if self._python == python_state():
            self._python = None
        numpy = numpy_state()
        self._numpy_end = hash(numpy)
        if numpy == self._numpy:
            self._numpy = None
        if self._others is not None:
            self._late = {d for d in devices if d.type not in ("cpu", "meta")} - self._others._globals.keys()

    def undo(self) -> None:
        """Put all generators back."""
        self._set()
        if self._others is not None:
            self._others.put_back()

    def _set(self) -> None:
        torch.default_generator.set_state(self._torch)
        if self._python is not None:
            set_python_state(self._python)
        set_numpy_state(self._numpy)

    def begin(self) -> _Before:
        """From now on, the same draws come again."""
        before = _Before(
            torch.default_generator.get_state(),
            None if self._python is None else random.getstate(),
            numpy_state(),
            {device: global_state(device) for device in self._late},
            None if self._others is None else contextlib.ExitStack(),
        )
        self._set()
        if self._others is not None and before.others is not None:
            before.others.enter_context(self._others.replayed())
        return before

    def end(self, before: _Before) -> bool:
        """The generators are as they were before. Whether NumPy's had come where it should."""
        numpy = numpy_state()
        repeats_numpy = self._numpy_end in (None, hash(numpy)) or (self._numpy is None and numpy == before.numpy)
        if self._numpy is not None:
            set_numpy_state(before.numpy)
        if before.others is not None:
            before.others.close()
        torch.default_generator.set_state(before.torch)
        if before.python is not None:
            random.setstate(before.python)
        return repeats_numpy

    def check_other_calls(self) -> None:
        """Raise if a rerun that made other calls than the forward has drawn something else."""
        now = torch.default_generator.get_state()
        if not same_state(now, self._torch) and not same_state(now, self._end):
            raise CheckpointError(
                "checkpoint: the function draws random numbers, and its rerun makes other calls than its forward and "
                "draws others: a layer sets itself up in its first call, say. Call the function once before, without "
                "checkpoint."
            )

    def check(self, before: _Before, repeats_numpy: bool) -> None:
        """Raise if there were draws that could not be repeated."""
        if not repeats_numpy:
            raise CheckpointError(
                "checkpoint: the function draws from NumPy's global generator, and its rerun has drawn something else: "
                "that generator is not of NumPy's own kind (set_bit_generator), or the function does not do the same "
                "twice. Draw outside of it, or from one of torch's generators; with preserve_rng_state=False nothing "
                "is repeated."
            )
        for device, state in before.late.items():
            if not same_state(state, global_state(device)):
                raise CheckpointError(
                    f"checkpoint: the function draws from the generator of {device}, whose state was not kept: the "
                    "device came into play inside of the function. Give the function a tensor on it, or draw outside."
                )


class _Before(NamedTuple):
    """The states of the generators before a rerun."""

    torch: Tensor
    python: Any
    numpy: Any
    late: dict[torch.device, Tensor]
    others: contextlib.ExitStack | None
