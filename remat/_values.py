"""Value numbering: identify the content of storages by the op that computed it.

A `Value` is the content of a storage at one time. Its key is the op that computed it, with the values and numbers that
the op read. An op that writes in place gives the storage a new value.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from remat import _torch_internals as internals
from remat._context import RandomState, uncompiled
from remat._dispatch_mode import DispatchMode
from remat._effects import GIVES_MEMORY_AWAY, GIVES_NUMBER
from remat._layers import innermost, version_of
from remat._memory import digest
from remat._ops import Layout, OpFacts, is_plain, layout_of, plain, storages, tensors

_STRIDED = torch.strided
CONSTANT = torch.ops.aten.lift_fresh.default  # its argument is a new tensor of Python numbers


@dataclass(slots=True, eq=False)
class Value:
    """The content of a storage at one time.

    **Attributes:**

    - `op`: the number of the op that computed it; -1 if no op did.
    - `decision`, `is_saveable`: the decision of the policy, and whether that is to keep it.
    - `name`, `where`: its `checkpoint_name`, and the place in the user's code that computed it.
    - `is_replaced`: whether its storage was written to since, so that the value is lost.
    - `layout`, `nbytes`, `device`: of the tensor that the op returned or wrote to, and of its storage.
    - `version`: how often that tensor had been written to then.
    - `counters`: if the value is saveable: empty tensors that share the version counters of its aliases. Each is listed
        with the version that it has until an unknown write.
    """

    op: int = -1
    decision: CheckpointPolicy | None = None
    is_saveable: bool = False
    name: str | None = None
    where: str = "unknown"
    is_replaced: bool = False
    layout: Layout = field(init=False)
    nbytes: int = field(init=False)
    device: torch.device = field(init=False)
    version: int = 0
    counters: Sequence[tuple[Tensor, int]] = ()

    def watch(self, tensor: Tensor) -> None:
        """Note the version of a tensor that is the value, or an alias of it."""
        if self.is_saveable and not tensor.is_inference():
            counter = internals.version_counter(tensor)
            self.counters = (*self.counters, (counter, version_of(counter)))

    def expect_write(self) -> None:
        """Torch is about to count a write that is known: it counts when the mode has done the op."""
        self.version += 1
        self.counters = [(counter, before + 1) for counter, before in self.counters]

    @property
    def is_lost(self) -> bool:
        """Whether its memory was written to since: by a later op, or unseen, in a Function that says `mark_dirty`."""
        return self.is_replaced or any(version_of(counter) > before for counter, before in self.counters)


@dataclass(slots=True, eq=False)
class Content:
    """The current content of a storage.

    **Attributes:**

    - `storage`: a weak reference.
    - `value`: the value in it.
    - `first`: the value that it had when the run met it.
    - `made`: whether an op of the run has made the storage.
    - `hollow`: whether the value was not computed, so that the memory is full of NaN.
    - `held`: the value in the memory that a skipped op would have read, or None.
    - `is_shared`: whether numpy or a kernel shares the memory, and may change it between any two ops.
    """

    storage: weakref.ref[Any]
    value: Value
    first: Value
    made: bool = False
    hollow: bool = False
    held: Value | None = None
    is_shared: bool = False


Key = tuple[Any, ...]
"""Identifies a call of an op: its facts, args, (name, value) of each of its kwargs, and types of args.

A tensor is a tuple of its value and its layout; a list is a tuple too.
"""


@dataclass(slots=True, eq=False)
class Op:
    """An op of a run.

    **Attributes:**

    - `facts`: the properties of the function.
    - `key`: its key, with its arguments.
    - `reads`: the values that it read.
    - `dtype`: torch's default dtype at the time.
    - `returns`: the type of its result.
    - `outputs`: its results, flat: a `Value`, a `Changed` for a tensor that it wrote to, or a number.
    - `writes`: the new values of the storages that it wrote to.
    - `values`: all values that it computed.
    - `is_view`: whether it returned its argument's memory, although its schema does not say so.
    - `runs`: whether it has to run again.
    - `after`: the states of its generators after the draw. A rerun that skips the op continues from them.
    """

    facts: OpFacts
    key: Key
    reads: list[Value]
    returns: type = Tensor
    dtype: torch.dtype = torch.float32
    outputs: Sequence[Any] = ()
    writes: Sequence[Value] = ()
    values: Sequence[Value] = ()
    is_view: bool = False
    runs: bool = False
    after: RandomState | None = None


class Changed(NamedTuple):
    """A result of an op that is an argument to which it wrote."""

    position: int


class OpMode(DispatchMode):
    """A mode that knows the value in each storage."""

    looks_inside = True

    def __init__(self) -> None:
        super().__init__()
        self._contents: dict[int, Content] = {}
        self._layouts: dict[Layout, Layout] = {}
        """Each layout once: most ops have several equal ones, and the garbage collector would visit all of them."""
        self._draws = 0
        self._shares = False
        self._asked: list[Content] = []
        """The contents of tensors that were asked for their number, if no op has told it."""

    def __enter__(self) -> Any:
        uncompiled.enter(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        uncompiled.leave(id(self))

    def accessed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record that a torch call reads memory without an op. Some calls share it: then user code may write to it.

        User code makes the same writes in each run, so the earlier value is the key of the new one.
        """
        contents = [*map(self._content, storages(map(innermost, tensors(args, kwargs))))]
        if func in GIVES_NUMBER:
            self._asked += contents
            return
        for content in contents:
            self._read(content)
            if func in GIVES_MEMORY_AWAY:
                self._shares = content.is_shared = True
                content.value = self._given_away(content, (None, content.value))

    def _run_op(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Do an op, and count its writes. Where modes nest, the last one counts."""
        out = facts.func(*args, **kwargs)
        if facts.counts_writes:
            return out
        if not any(isinstance(mode, OpMode) and not mode.paused for mode in internals.dispatch_mode_stack()):
            facts.count_writes(args, kwargs)
        return out

    # Methods for the subclasses to define.

    def _read(self, content: Content) -> None:
        """Called if the content of a storage is read without an op."""

    def _given_away(self, content: Content, key: Key) -> Value:
        """Return the new value of a storage that is now shared. `key` identifies it, like the key of an op."""
        raise NotImplementedError

    def _outside(self, storage: Any) -> Value:
        """Return the value of a storage that no op of the run has made."""
        raise NotImplementedError

    def _content(self, storage: Any) -> Content:
        return self._contents[id(storage)] if self._knows(storage) else self._set(storage, self._outside(storage))

    def _set(self, storage: Any, value: Value, made: bool = False) -> Content:
        content = self._contents[id(storage)] = Content(weakref.ref(storage), value, value, made)
        return content

    def _knows(self, storage: Any) -> bool:
        content = self._contents.get(id(storage))
        return content is not None and content.storage() is storage

    def _layout(self, tensor: Tensor) -> Layout:
        layout = layout_of(tensor)
        return self._layouts.setdefault(layout, layout)

    def _call(self, facts: OpFacts, args: Any, kwargs: Any) -> tuple[Key, list[Content]] | None:
        """The key of a call, and the contents that it reads. None if it has no key: a tensor is not `plain`, say."""
        kinds: list[Any] = []
        reads: list[Content] = []
        items = None if facts.is_opaque else self._described(args, kinds, reads)
        named = self._described(kwargs.values(), kinds, reads) if kwargs else ()
        if items is None or named is None:
            return None
        if facts.draws:
            self._draws += 1
            kinds.append(self._draws)
        return (facts, items, tuple(zip(kwargs, named, strict=True)) if named else (), tuple(kinds)), reads

    def _described(self, args: Iterable[Any], kinds: list[Any], reads: list[Content]) -> tuple[Any, ...] | None:
        """The arguments as a part of the key."""
        items: list[Any] = []
        for x in args:
            kind: Any = type(x)
            if kind is Tensor or isinstance(x, Tensor):
                if x.layout is not _STRIDED or x.is_nested or not (kind is Tensor or is_plain(kind)):
                    return None
                storage = x.untyped_storage()
                content = self._contents.get(id(storage))
                if content is None or content.storage() is not storage:
                    if not plain(x):
                        return None
                    content = self._content(storage)
                reads.append(content)
                items.append((content.value, self._layout(x)))
            elif kind is list or kind is tuple:
                inner = self._described(x, kinds, reads)
                if inner is None:
                    return None
                items.append(inner)
            elif kind is float or kind is complex:
                items.append(x if x == x else torch.nan)  # one nan object: it compares equal by identity
                kinds.append(repr(x))  # -0.0 == 0.0
            else:
                items.append(x)
                kinds.append(kind)  # 1 == True
        return tuple(items)

    def _constant(self, tensor: Tensor) -> Key | None:
        """The key of a new tensor of Python numbers: a digest of its bytes. None for any other tensor."""
        storage = tensor.untyped_storage() if plain(tensor) and tensor.device.type == "cpu" else None
        if storage is None or not storage.resizable() or self._knows(storage):
            return None
        return CONSTANT, digest(storage)
