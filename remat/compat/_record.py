"""What the forward run of a watched checkpoint notes for its rerun."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import CheckpointError
from remat._native import Meta, check_version, version
from remat._run import ARRAY_CHANGED

_SMALL = 1000
"""The elements of a tensor that is computed sooner than it is spared."""


class Result(NamedTuple):
    """What a call returned, without its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_view: bool

    @property
    def is_large(self) -> bool:
        """Whether it takes longer to compute than to spare."""
        return self.size.numel() > _SMALL

    def allocate(self) -> Tensor:
        """Memory for it: zeros, for an extension may read them out of sight."""
        memory = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        memory.untyped_storage().fill_(0)  # type: ignore[attr-defined]
        return memory.requires_grad_(self.requires_grad)


make_result: Callable[[Any], Result] = functools.partial(tuple.__new__, Result)  # what `Result` calls, but sooner


def results_of(noted: Any) -> list[Result]:
    """The tensors in what was noted of a call."""
    return [r for r in (noted if type(noted) is list else [noted]) if type(r) is Result]


class Outside:
    """A tensor that the forward read and did not make."""

    __slots__ = ("array", "last_read", "ref", "saved", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self.read(tensor)
        self.last_read = self.version
        self.tensor: Tensor | None = None
        self.saved: Any = None

    def read(self, tensor: Tensor) -> None:
        """These are the values that count."""
        self.version, self.array = version(tensor), internals.array_digest(tensor)

    def keep(self, around: Any) -> None:
        """The forward is over: hold the tensor. What the run around it made is for that to hold."""
        tensor = self.ref()
        if tensor is not None and around is not None and around.is_made(tensor) and id(tensor) not in around.given:
            self.saved = internals.save(tensor)
        else:
            self.tensor = tensor

    def check(self) -> None:
        """Raise if the values are not the ones any more that the forward read."""
        if self.tensor is not None:
            check_version(self.tensor, self.version)
            if self.array is not None and self.array != internals.array_digest(self.tensor):
                raise CheckpointError(
                    ARRAY_CHANGED.format("checkpoint: the function", list(self.tensor.shape), self.tensor.dtype)
                )


class Record:
    """What the rerun has to know of the forward."""

    __slots__ = (
        "calls",
        "holders",
        "is_simple",
        "metas",
        "needed",
        "outside",
        "reads",
        "shapes_of_shared",
        "tail",
        "written",
    )

    def __init__(self) -> None:
        self.is_simple = False
        """Whether the function reads and writes nothing but what it is given, and nothing is worth sparing."""
        self.calls: list[Any] = []
        """The function of each torch call."""
        self.needed = 0
        """How many of them lead to what the backward needs: a rerun that makes these is right."""
        self.outside: list[Outside] = []
        self.reads: dict[int, dict[int, Outside]] = {}
        """By the number of the call, and that of the tensor among its arguments."""
        self.tail: list[Any] = []
        """What the last calls returned: from the one on that saved the last tensor."""
        self.metas: list[Meta] = []
        """What was saved, where the run was watched."""
        self.holders: list[weakref.ref[Any]] = []
        self.written: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        """By identity, the tensors from outside that were changed in place, and what they were before."""
        self.shapes_of_shared: tuple[list[int], list[int]] | None = None
        """Of two of those that share memory."""
