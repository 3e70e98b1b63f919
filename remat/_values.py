"""Values: what storages contain, known by what computed it.

A value is what a storage contains at one time. It is known by the op that computed it: by the values and numbers that
the op read. An op that writes in place gives the storage a new value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat._context import RandomState
from remat._effects import GIVES_MEMORY_AWAY
from remat._ops import Layout, OpFacts, is_plain, make_layout, plain, storages, tensors
from remat._recipes import Cell
from remat.policies._enum import CheckpointPolicy

_GIVEN_AWAY = "given away"
CONSTANT = torch.ops.aten.lift_fresh.default  # is given what `torch.tensor` has made of Python numbers


@dataclass(slots=True, eq=False)
class Value:
    """What a storage contains at one time.

    **Attributes:**

    - `decision`: what the policy says of it; None of what no op has made.
    - `name`, `where`: by `checkpoint_name`, and the place in the user's code that computed it.
    - `is_replaced`: whether its storage was written to, so that it is gone.
    - `layout`, `nbytes`, `device`: of the tensor that an op returned or wrote to, and of its storage.
    - `counter`: shares the version counter of that tensor and of all views of it, where the policy lets it be kept.
    """

    decision: CheckpointPolicy | None = None
    name: str | None = None
    where: str = "unknown"
    is_replaced: bool = False
    layout: Layout = field(init=False)
    nbytes: int = field(init=False)
    device: torch.device = field(init=False)
    counter: Tensor | None = None


@dataclass(slots=True, eq=False)
class Content:
    """What a storage contains now.

    **Attributes:**

    - `storage`: weakly.
    - `made`: whether an op of the run has made the storage.
    - `hollow`: how to compute the value, where the memory does not have it.
    - `cell`: of a recipe that reads what the memory has.
    - `is_shared`: whether others have the memory too, numpy or a kernel, and may change it between any two ops.
    """

    storage: weakref.ref[Any]
    value: Value
    made: bool = False
    hollow: Cell | None = None
    cell: weakref.ref[Cell] | None = None
    is_shared: bool = False


OpCall = tuple[tuple[Any, ...], list[tuple[Content, Layout]]]
"""A call of an op: what tells it from others, and what it reads."""


@dataclass(slots=True, eq=False)
class Op:
    """An op of a run.

    **Attributes:**

    - `reads`: the values that it read.
    - `returns`: the type of what it returned.
    - `outputs`: what it returned, flat: a `Value`, a `Changed` for a tensor that it wrote to, or a number.
    - `writes`: the new values of the storages that it wrote to.
    - `values`: all that it has computed.
    - `is_view`: whether it returned the memory that it was given, though its schema does not say so.
    - `runs`: whether it has to run again.
    - `after`: the state of the generators that it has drawn from, for a rerun that skips it to go on from.
    """

    func: Any
    reads: list[Value]
    returns: type
    outputs: list[Any] = field(default_factory=list)
    writes: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    is_view: bool = False
    runs: bool = False
    after: RandomState | None = None


class Changed(NamedTuple):
    """A tensor that an op was given to write to, returned."""

    position: int


READS = {
    *GIVES_MEMORY_AWAY,
    Tensor.__format__,
    Tensor.__repr__,
    Tensor.tolist,
    Tensor.untyped_storage,
    Tensor.tensor_split,
    torch.ctc_loss,
    torch.tensor_split,
}
"""Functions that read memory without an op, or are asked for it by what does: a kernel, numpy, pickle."""


class _Calls(TorchFunctionMode):
    def __init__(self, mode: OpMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = self._mode
        if func in READS:
            with internals.DisableTorchFunction():  # the modes around us need not see how we look
                mode.accessed(func, tensors(args, kwargs))
        mode.call = func, args, kwargs
        try:
            return func(*args, **kwargs)
        finally:
            mode.call = None


class OpMode(internals.DispatchMode):
    """A mode that knows what the storages contain which ops read. It looks at the torch calls of the user's code, too.

    **Attributes:**

    - `call`: the torch call that is running: function, args, kwargs.
    """

    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __init__(self, sees_calls: bool) -> None:
        """`sees_calls`: whether it looks at torch calls itself; else call `accessed` for those in `READS`."""
        super().__init__()
        self._sees_calls = sees_calls
        self._contents: dict[int, Content] = {}
        self._times: dict[Any, int] = {}
        """How often each op was called with the same values."""
        self._draws = 0
        self._shares = False
        self._calls: _Calls | None = None

    def __enter__(self) -> Any:
        if self._sees_calls:
            self._calls = _Calls(self)
            self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.__exit__(*error)

    def accessed(self, func: Any, given: list[Tensor]) -> None:
        """A torch call reads the memory of tensors without an op. Some give it away: then others may write to it.

        What they write they write in each run, so the memory has values that are known by what was there before.
        """
        for content in map(self._content, storages(map(internals.innermost, given))):
            self._read(content)
            if func in GIVES_MEMORY_AWAY:
                self._shares = content.is_shared = True
                content.value = self._given_away(content, self._counted((_GIVEN_AWAY, content.value)))

    # What modes do in ways of their own.

    def _read(self, content: Content) -> None:
        """What a storage contains is read without an op."""

    def _given_away(self, content: Content, key: Any) -> Value:
        """What a storage contains from now on. `key`: what tells it from others, as of an op."""
        raise NotImplementedError

    def _outside(self, storage: Any) -> Value:
        """What a storage contains that no op of the run has made."""
        raise NotImplementedError

    def _content(self, storage: Any) -> Content:
        content = self._contents.get(id(storage))
        if content is None or content.storage() is not storage:
            content = self._set(storage, self._outside(storage))
        return content

    def _set(self, storage: Any, value: Value, *, made: bool = False) -> Content:
        content = self._contents[id(storage)] = Content(weakref.ref(storage), value, made)
        return content

    def _knows(self, storage: Any) -> bool:
        content = self._contents.get(id(storage))
        return content is not None and content.storage() is storage

    def _call(self, facts: OpFacts, args: Any, kwargs: Any) -> OpCall | None:
        """A call by what it reads. None where that can't be told: a tensor is not `plain`, say."""
        key: list[Any] = [facts]
        reads: list[tuple[Content, Layout]] = []
        if not self._describe(args, key, reads):
            return None
        if kwargs:
            key += kwargs
            if not self._describe(kwargs.values(), key, reads):
                return None
        if facts.draws:
            self._draws += 1
            key.append(self._draws)
        try:
            return self._counted(tuple(key)), reads
        except TypeError:  # an argument that can't be hashed
            return None

    def _describe(self, args: Iterable[Any], key: list[Any], reads: list[tuple[Content, Layout]]) -> bool:
        """Add arguments to the key of a call. This runs for each op, so it calls little."""
        for x in args:
            kind: Any = type(x)
            if kind is Tensor or isinstance(x, Tensor):
                if x.layout is not torch.strided or not (kind is Tensor or is_plain(kind)):
                    return False
                storage = x.untyped_storage()
                content = self._contents.get(id(storage))
                if content is None or content.storage() is not storage:
                    if not plain(x):
                        return False
                    content = self._content(storage)
                layout = make_layout((x.size(), x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()))
                reads.append((content, layout))
                key += content.value, layout
            elif kind is int or kind is bool or x is None:
                key += kind, x  # 1 == True
            elif kind is float or kind is complex:
                key.append(repr(x))  # -0.0 == 0.0, nan != nan
            elif kind is list or kind is tuple:
                key.append(len(x))
                if not self._describe(x, key, reads):
                    return False
            else:
                key.append(x)
        return True

    def _constant(self, tensor: Tensor) -> Any:
        """The key of a new tensor of Python numbers: what they are. None where it is something else."""
        storage = tensor.untyped_storage() if plain(tensor) and tensor.device.type == "cpu" else None
        if storage is None or not storage.resizable() or self._knows(storage):
            return None
        return self._counted((CONSTANT, internals.digest(storage)))

    def _counted(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """A key that tells a call from earlier ones with the same values: each has memory of its own."""
        n = self._times.get(key, 0)
        self._times[key] = n + 1
        return (*key, n) if n else key
