"""The signature of a run: the torch calls whose results are differentiated, which a rerun has to repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

ELSEWHERE = -1
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


class Signature:
    """The calls of a forward whose results are differentiated.

    **Attributes:**

    - `calls`: a function and a hash of its plain arguments and of the result's shapes for each call.
    - `tail`: the position of the last matrix product or call of a function under remat, if no later call reads values.
    - `tail_call`: what is remembered of that call, if it is one.
    - `hooks`: for each hook that the function sets, the level of its tensor. None for one inside of a transform of its
        own, `ELSEWHERE` for one that the rerun of an outer function has put on another tensor.
    """

    __slots__ = ("calls", "hooks", "tail", "tail_call")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.tail: int | None = None
        self.tail_call: Any = None
        self.hooks: list[int | None] = []


def hash_of(tensor: Tensor, args: Iterable[Any] = ()) -> int:
    """A hash of shape and dtype, or of dtype alone where a length is a symbol: nested, or compiled for any shape.

    And of plain arguments: a flag like `training`, a step, a scale. NaN differs from itself, and is left out.
    """
    plain = [a for a in args if type(a) in _PLAIN and a == a]
    if tensor.is_nested:
        return hash((tensor.dtype, *plain))
    try:
        return hash((tensor.shape, tensor.dtype, *plain))
    except TypeError:  # torch.SymInt
        return hash((tensor.dtype, *plain))


def name_of(func: Any) -> str:
    """What to call a function in an error."""
    if isinstance(func, tuple):  # a call of a function under remat, with a hash of its signature
        return str(func[0])
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)
