"""What sees the torch calls of a user's function, and what such runs ask of those around them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals


class Watch(TorchFunctionMode):
    """Sees each torch call of one run of a function, before the runs around it do.

    In a rerun other tensors stand for some that the function finds. A run inside of it finds the originals, and has to
    keep what stands for them.
    """

    is_rerun = False
    paused = False
    """Whether it looks away."""

    def __init__(self) -> None:
        super().__init__()
        self._swaps: dict[int, Tensor] = {}
        self._originals: dict[int, int] = {}
        self._swapped: list[Tensor] = []  # keeps the identities in `_swaps`

    def swap(self, original: Tensor, operand: Tensor, key: int | None = None) -> None:
        """From now on `operand` stands for `original`.

        **Arguments:**

        - `key`: the identity that the original had in the forward, where it may be gone by now.
        """
        self._swaps[id(original)] = operand
        self._originals[id(operand)] = id(original) if key is None else key
        self._swapped.append(original)

    def swapped(self, tensor: Tensor) -> Tensor:
        """The operand that stands for `tensor`, or itself."""
        return self._swaps.get(id(tensor), tensor)

    def key_of(self, operand: Tensor) -> int | None:
        """The identity of what a tensor stands for; None: it stands for nothing."""
        return self._originals.get(id(operand))

    def original_of(self, operand: Any) -> Any:
        """The tensor that `operand` stands for, or itself."""
        key = self._originals.get(id(operand))
        return operand if key is None else next((t for t in self._swapped if id(t) == key), operand)

    def knows(self, key: int) -> bool:
        """Whether something stands for the tensor of this identity."""
        return key in self._swaps

    def resolve(self, tensor: Tensor, *, read: bool = True) -> Tensor:
        """What a run inside of this one has to keep in the place of a tensor.

        `read`: whether a torch call reads it, or it is but handed on.
        """
        return self.swapped(tensor)

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was given, or made inside."""
        raise NotImplementedError

    def adopt(self, tensor: Tensor, live: bool = True, same_as: Tensor | None = None) -> None:
        """Note a tensor that a run inside of this one has made, maybe as another one that has the same value."""


def active_watches() -> list[Watch]:
    """The runs that the current code is part of, innermost last."""
    if not internals.function_modes_active():
        return []
    return [mode for mode in internals.function_modes() if isinstance(mode, Watch) and not mode.paused]
