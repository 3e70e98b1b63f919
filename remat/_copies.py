"""Copies of the tensors from outside that a run writes to: reruns start from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from remat._layers import requires_grad_at_any_level
from remat._memory import memory_of, overlap

Copy = Callable[[Tensor], Tensor | None]
"""Copies a tensor, or raises an error if the run may not write to it. None: it need not be copied."""


class Copies(dict[int, Tensor]):
    """By identity of the tensors in whose storage a run writes, copies of their earlier values.

    **Attributes:**

    - `written`: the identities of those that it wrote to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._memory: dict[int, list[int]] | None = None
        """By memory, the identities of the tensors from outside. None before the first write."""

    def note(self, key: int, outside: Mapping[int, Any], copied: Copy) -> None:
        """Note the memory of a tensor from outside. If the run has written beside it, copy it as well.

        `outside`: by identity, the tensors from outside, each as `value`.
        """
        value = outside[key].value
        if self._memory is not None and key not in (known := self._memory.setdefault(memory_of(value), [])):
            others = [outside[k].value for k in known if k in self]
            known.append(key)
            if others and not (any(overlap(value, t) for t in others) or requires_grad_at_any_level(value)):
                self._copy(key, value, copied)

    def before_write(self, written: Tensor, outside: Mapping[int, Any], copied: Copy) -> None:
        """Copy the tensors from outside in this storage before the run changes them."""
        if self._memory is None:
            self._memory = {}
            for key in outside:
                self.note(key, outside, copied)
        for key in self._memory.get(memory_of(written), ()):
            value = outside[key].value
            if key not in self:
                self._copy(key, value, copied)
            if key in self and overlap(written, value):
                self.written.add(key)

    def _copy(self, key: int, value: Tensor, copied: Copy) -> None:
        copy = copied(value)
        if copy is not None:
            self[key] = copy
