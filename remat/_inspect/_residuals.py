"""Residuals: values that are held between forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remat._call import Call
from remat._inspect._origins import Names, Origins
from remat._inspect._tables import bytes_text, table


@dataclass(frozen=True)
class Residual:
    """A storage that is held between forward and backward. `saved_residuals` lists them.

    **Attributes:**

    - `shape`, `dtype`: of the tensor that was computed, passed or captured; or of the largest view that is held.
    - `device`: the device that holds the value: the CPU, if it is offloaded.
    - `nbytes`: bytes of the whole storage.
    - `why`: "from the argument x['w']", "captured w (closure of block)", "named 'attn'" or "output of
        aten.mm.default".
    - `where`: file:line of the code that computed the value; for an argument or a captured tensor, of the code that
        first read it.

    Examples:
        >>> import torch
        >>> from remat import remat, saved_residuals
        >>> [residual] = saved_residuals(remat(lambda x: x.sin()), torch.zeros(3))
        >>> residual.shape, residual.nbytes, residual.why
        ((3,), 12, 'from the argument x')
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    why: str
    where: str

    @property
    def is_view(self) -> bool:
        """Whether the tensor is a part of the storage."""
        return math.prod(self.shape) * self.dtype.itemsize < self.nbytes

    @property
    def computed(self) -> bool:
        """Whether the function computed it. Arguments and captured tensors would be in memory anyway."""
        return not self.why.startswith(("from the argument ", "captured "))


class Held:
    """The values that a graph holds."""

    def __init__(self, names: Names, origins: Origins | None) -> None:
        self.names = names
        self.origins = origins
        self.residuals: list[Residual] = []
        """Each storage once."""
        self._seen: dict[int, Any] = {}  # keeps storages alive that only a user's unpack hook has made
        self._saved: dict[int, Tensor] = {}
        """By storage, the largest view that a node has saved."""

    def _add(self, shape: Any, dtype: Any, storage: Any, why: str, where: str) -> None:
        if id(storage) not in self._seen and storage.nbytes():
            self._seen[id(storage)] = storage
            self.residuals.append(Residual(tuple(shape), dtype, storage.device, storage.nbytes(), why, where))

    def add_saved(self, tensor: Tensor, where: str) -> None:
        """Add a tensor that a node has saved."""
        storage = tensor.untyped_storage()
        known = self._saved.get(id(storage))
        self._saved[id(storage)] = tensor if known is None or known.nbytes < tensor.nbytes else known
        origin = None if self.origins is None else self.origins.of(storage)
        if origin is None:
            read = self.origins.read.get(id(storage), (None, where))[1] if self.origins is not None else where
            self._add(tensor.shape, tensor.dtype, storage, self.names.of(storage), read)

    def add_kept(self, call: Call) -> None:
        """Add the values that a policy has kept in a call."""
        for kept in call.tape.kept.values() if call.tape is not None else ():
            if self.origins is not None and not kept.offloaded:
                continue  # `add_made` lists it
            why = f"output of {kept.func}" if kept.name is None else f"named {kept.name!r}"
            self._add(kept.size, kept.dtype, kept.memory.untyped_storage(), why, kept.where)

    def add_made(self) -> None:
        """Add the tensors that the function made and that are still alive."""
        for origin in self.origins.made.values() if self.origins is not None else ():
            if (storage := origin.storage()) is not None:
                held = self._saved.get(id(storage), origin)
                self._add(held.shape, held.dtype, storage, origin.why, origin.where)


def _tensor(r: Residual) -> str:
    text = f"{str(r.dtype).removeprefix('torch.')}{list(r.shape)}"
    return f"{text}, view of {bytes_text(r.nbytes)}" if r.is_view else text


def format_residuals(residuals: Sequence[Residual]) -> str:
    """Residuals as a table."""
    rows = [(bytes_text(r.nbytes), _tensor(r), str(r.device), r.why, r.where) for r in residuals]
    return table(("size", "tensor", "device", "why", "where"), rows, left=(1, 2, 3, 4))


def total_bytes(residuals: Iterable[Residual]) -> int:
    """The bytes of the residuals that the function computed."""
    return sum(r.nbytes for r in residuals if r.computed)
