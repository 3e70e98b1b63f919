"""What a run kept under a policy, and which of its ops need not run again."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import RandomState
from remat._errors import CheckpointError
from remat._offload import Offloaded
from remat._values import (
    OpCall,
    Token,
    Values,
    flat,
    laid_over,
    plain,
)

DETACH = torch.ops.aten.detach.default  # how often it runs is up to autograd
CONSTANT = torch.ops.aten.lift_fresh.default


class Output(NamedTuple):
    """A tensor that an op returned: its value, and how it lies in the storage."""

    token: Token
    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conjugated: bool
    negated: bool

    def over(self, storage: Any) -> Tensor:
        """The tensor, over a storage with this value."""
        return laid_over(storage, self)


class Changed(NamedTuple):
    """The tensor that an op was given to write to, returned."""

    position: int


_KNOWN = {Output, Changed, bool, int, float, complex, type(None)}


class Op:
    """An op of a run.

    **Attributes:**

    - `call`: the call, and its `func`, `token` and `reads`.
    - `returns`: `Tensor`, or the sequence that was returned.
    - `outputs`: what was returned, flat: an `Output` or `Changed` for each tensor, else the value itself.
    - `writes`: the new values of storages that it wrote to.
    - `values`: all that it computed.
    - `can_be_spared`: whether all that it does is known: it computes values or returns numbers.
    - `draws`: whether it draws, or that is not known.
    - `before`, `after`: the states of the generators that it has drawn from: to draw the same again, and for a rerun
        that spares it to go on from.
    """

    __slots__ = (
        "after",
        "before",
        "call",
        "can_be_spared",
        "draws",
        "func",
        "outputs",
        "reads",
        "returns",
        "token",
        "values",
        "writes",
    )

    def __init__(self, call: OpCall, returns: Any, outputs: list[Any], writes: list[Token]) -> None:
        self.call = call
        self.func, self.token, self.reads = call.schema.func, call.token, call.reads
        self.returns = returns
        self.outputs = outputs
        self.writes = writes
        self.values = [o.token for o in outputs if type(o) is Output] + writes
        does = self.values or any(o is not None for o in outputs)
        self.can_be_spared = bool(does) and _KNOWN.issuperset(map(type, outputs))
        self.draws = call.schema.draws
        self.before: RandomState | None = None
        self.after: RandomState | None = None


def outputs_of(values: Values, call: OpCall, out: Any, changed: list[Tensor]) -> list[Any]:
    """What an op returned, with the value of each tensor. Tensors that share a storage share its value."""
    if isinstance(out, Tensor) and not changed:
        return [_output(call.token, out, out.untyped_storage())]
    found: list[Any] = []
    first: dict[int, Token] = {}
    positions = {id(t.untyped_storage()): Changed(i) for i, t in enumerate(changed)}
    for i, t in enumerate(flat(out)):
        if not isinstance(t, Tensor):
            found.append(t)
            continue
        storage = t.untyped_storage()
        if id(storage) in positions:
            found.append(positions[id(storage)])
            continue
        found.append(_output(first.setdefault(id(storage), values.number(call.token, i)), t, storage))
    return found


_make_output: Callable[[Any], Output] = functools.partial(tuple.__new__, Output)


def _output(token: Token, t: Tensor, storage: Any) -> Output:
    size, stride, offset = t.size(), t.stride(), int(t.storage_offset())
    return _make_output((token, storage.nbytes(), size, stride, offset, t.dtype, t.device, t.is_conj(), t.is_neg()))


def write_token(values: Values, call: OpCall, i: int) -> Token:
    """The value of the i-th storage that an op wrote to."""
    return values.number(call.token, "write", i)


def aliases_of(found: list[Tensor], given: list[Any], changed: list[Tensor]) -> list[bool]:
    """For each tensor that an op returned, whether it lies in a storage that the op was given and did not change."""
    storages = {*map(id, given)}
    if changed:
        storages -= {id(t.untyped_storage()) for t in changed}
    return [id(t.untyped_storage()) in storages for t in found]


def layout(tensor: Tensor) -> Any:
    """How a tensor lies in its storage."""
    return (
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )


def bytes_of(storage: Any) -> Tensor:
    """A tensor over all of a storage."""
    with internals.DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Kept:
    """A kept value."""

    def __init__(
        self, func: Any, name: str | None, where: str, tensor: Tensor, aliases: list[Tensor], *, offload: bool
    ) -> None:
        """`aliases`: what the caller has of the same memory, with version counters of its own."""
        self.func = func
        self.name = name
        self.where = where
        self.size = tensor.size()
        self.dtype = tensor.dtype
        self._versions = [] if offload else [(t, t._version) for t in (tensor, *aliases)]
        self._offloaded = Offloaded(bytes_of(tensor.untyped_storage())) if offload else None
        self._tensor = None if offload else tensor

    def fetch(self) -> None:
        """It will be asked for soon."""
        if self._offloaded is not None:
            self._offloaded.fetch()

    @property
    def offloaded(self) -> bool:
        """Whether it waits in CPU memory."""
        return self._offloaded is not None

    @property
    def memory(self) -> Tensor:
        """A tensor over the storage that is held."""
        tensor = self._tensor if self._offloaded is None else self._offloaded.host
        assert tensor is not None
        return tensor

    def get(self, name: str) -> Any:
        """The storage. `name`: of the function."""
        if self._offloaded is not None:
            return self._offloaded.get().untyped_storage()
        assert self._tensor is not None
        if any(t._version != version for t, version in self._versions):
            raise CheckpointError(
                f"remat: the result of {self.func} that the policy kept for {name} was changed in place after the "
                "forward run, so the backward would read a wrong value. Change a copy instead: x = x.clone()."
            )
        return self._tensor.untyped_storage()


class _Latest(threading.local):
    offloading: weakref.ref[Tape] | None = None


_latest = _Latest()


class Tape:
    """What a run kept, and which of its ops need not run again."""

    def __init__(
        self,
        values: Values,
        ops: list[Op],
        views: set[Token],
        runs: set[Token],
        kept: dict[Token, Kept],
        matched: bool,
    ) -> None:
        self.values = values
        self.views = views
        self.kept = kept
        self.matched = matched
        self._spared = {op.token: op for op in ops if op.can_be_spared and op.token not in runs}
        self._uses: dict[Token, int] = {}
        for op in ops:
            if op.token in self._spared:
                for v in set(op.values):
                    self._uses[v] = self._uses.get(v, 0) + 1
        self._before: weakref.ref[Tape] | None = None
        if any(k.offloaded for k in kept.values()):
            self._before, _latest.offloading = _latest.offloading, weakref.ref(self)

        self.operands: dict[int, tuple[Token, Any]] = {}
        """The values that operands had before the run changed them, and how they lay in memory."""

    def remember(self, i: int, operand: Tensor) -> None:
        """Note an operand that the run has changed in place, for a rerun will be given a copy of it."""
        raw = internals.innermost(operand)
        self.operands[i] = self.values.outside(raw.untyped_storage()), layout(raw)

    def was_read(self, tensor: Tensor) -> bool:
        """Whether the run has read a tensor from outside, or what shares its memory; or that can't be told."""
        raw = internals.innermost(tensor)
        return not plain(raw) or self.values.knows(raw.untyped_storage())

    def fetch(self) -> None:
        """Start the way back of what is offloaded, here and for the next rerun."""
        # The backward goes from the latest tape to the earliest: the one before this is the next.
        before = None if self._before is None else self._before()
        for tape in (self, before):
            for kept in () if tape is None else tape.kept.values():
                kept.fetch()

    def spared(self, token: Token) -> Op | None:
        """The op with this number, if it need not run."""
        return self._spared.get(token)

    def keeps_all_of(self, op: Op) -> bool:
        """Whether all that an op computed is kept."""
        return all(value in self.kept for value in op.values)

    def take(self, token: Token, name: str, left: dict[Token, int] | None) -> Any:
        """The storage with a kept value, or None."""
        kept = self.kept.get(token)
        if kept is None:
            return None
        storage = kept.get(name)
        if left is not None:
            left[token] = left.get(token, self._uses[token]) - 1
            if left[token] == 0:
                del self.kept[token]
        return storage
