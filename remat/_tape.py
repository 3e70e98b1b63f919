"""What a policy keeps of a run, and reruns that are given it.

A rerun runs under a `Replay`. An op whose value is kept returns it. An op that need not run again returns memory full
of NaN, with a recipe. What reads such memory after all - an op that the forward did not have, the graph of a higher
derivative - has it computed first. So a rerun with other ops takes longer, and its numbers are right.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._offload import Offloaded
from remat._ops import Layout, OpFacts, bytes_of, facts_of, flat, layout_of, plain, storages, tensors
from remat._recipes import Cell, Operand, Recipe, compute
from remat._values import CONSTANT, Changed, Content, Op, OpMode, Value
from remat.policies._enum import CheckpointPolicy

_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, *_OFFLOAD)


class Kept:
    """A kept value.

    **Attributes:**

    - `func`, `name`, `where`, `size`, `dtype`: the op that computed it, its name, the place in the user's code, and how
      the tensor looked.
    - `offloaded`: whether it waits in CPU memory.
    - `memory`: a tensor over the storage that is held.
    """

    def __init__(self, func: Any, value: Value, storage: Any, aliases: list[Tensor]) -> None:
        """`aliases`: what the caller has of the same memory, with version counters of its own."""
        self.func, self.name, self.where = func, value.name, value.where
        self.size, self.dtype = value.layout.size, value.layout.dtype
        self.offloaded = value.decision in _OFFLOAD
        self._layout = value.layout
        if self.offloaded:
            self._copy = Offloaded(bytes_of(storage))
            self.memory = self._copy.host
            return
        self.memory = value.layout.over(storage)
        self._watched = [self.memory, *aliases] + ([] if value.counter is None else [value.counter])
        self._versions = internals.memory_versions(self._watched)

    def fetch(self) -> None:
        """It will be asked for soon."""
        if self.offloaded:
            self._copy.fetch()

    def get(self) -> Tensor | None:
        """The tensor as it was computed. None if it was changed in place since."""
        if self.offloaded:
            return self._layout.over(self._copy.get().untyped_storage())
        return self.memory.detach() if internals.memory_versions(self._watched) == self._versions else None


class Origin(NamedTuple):
    """What a tensor from outside contained, and how it lay in its storage."""

    value: Value
    layout: Layout
    nbytes: int


def _origin(raw: Tensor, value: Value) -> Origin:
    return Origin(value, layout_of(raw), raw.untyped_storage().nbytes())


class _Latest(threading.local):
    offloading: weakref.ref[Tape] | None = None


_latest = _Latest()


class Tape:
    """What a run kept, and which of its ops need not run again.

    **Attributes:**

    - `kept`: the kept values.
    - `matched`: whether the policy lets anything be kept.
    - `ops`: the ops of the run, by what they read.
    """

    def __init__(
        self,
        ops: dict[Any, Op],
        outsides: dict[int, tuple[weakref.ref[Any], Value]],
        kept: dict[Value, Kept],
        matched: bool,
    ) -> None:
        self.ops = ops
        self.kept = kept
        self.matched = matched
        self._outsides = outsides
        self._before: weakref.ref[Tape] | None = None
        if any(k.offloaded for k in kept.values()):
            self._before, _latest.offloading = _latest.offloading, weakref.ref(self)

    def outside(self, storage: Any) -> Value | None:
        """What a storage contained, if the run read it and no op made it."""
        known = self._outsides.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else None

    def origin(self, tensor: Tensor) -> Origin | None:
        """What tells a tensor from outside, for reruns that are given a copy of it; None where the run did not read it.

        Its layout counts: the copy must have the same elements at the same places.
        """
        raw = internals.innermost(tensor)
        value = self.outside(raw.untyped_storage()) if plain(raw) else None
        return None if value is None else _origin(raw, value)

    def was_read(self, tensor: Tensor) -> bool:
        """Whether the run has read a tensor from outside, or what shares its memory; or that can't be told."""
        raw = internals.innermost(tensor)
        return not plain(raw) or self.outside(raw.untyped_storage()) is not None

    def fetch(self) -> None:
        """Start the way back of what is offloaded, here and for the next rerun."""
        # The backward goes from the latest tape to the earliest: the one before this is the next.
        before = None if self._before is None else self._before()
        for tape in (self, before):
            for kept in () if tape is None else tape.kept.values():
                kept.fetch()


# The rerun.


class Replay(OpMode):
    """Gives the ops of a rerun their kept results, and skips those that need not run."""

    def __init__(self, tape: Tape, last: bool, *, sees_calls: bool = True) -> None:
        """A rerun.

        **Arguments:**

        - `last`: whether no other rerun follows: then what is given back is kept no longer.
        - `sees_calls`: see `OpMode`.
        """
        super().__init__(sees_calls)
        tape.fetch()
        self._tape = tape
        self._last = last

    def __enter__(self) -> Any:
        self._hooks = internals.saved_tensors_hooks()
        return super().__enter__()

    def stands_for(self, copy: Tensor, origin: Origin | None) -> None:
        """The rerun is given a copy of a tensor, because the forward has written to it."""
        raw = internals.innermost(copy)
        with internals.DisableTorchFunction():
            if origin is not None and origin == _origin(raw, origin.value):
                self._set(raw.untyped_storage(), origin.value)

    def settle(self) -> None:
        """Compute what the rerun's graph holds and was skipped. Called when the results are gone, and it is left."""
        hollow = [c for c in self._contents.values() if c.hollow is not None]
        self._contents.clear()
        if hollow:
            self._compute(hollow)

    def _compute(self, contents: Iterable[Content]) -> None:
        with internals.below_all_transforms(), internals.DisableTorchFunction(), internals.ops_of_remat():
            self._fill(contents)

    def _read(self, content: Content) -> None:
        if content.hollow is not None:
            self._compute([content])

    def _given_away(self, content: Content, key: Any) -> Value:
        self._protect(content)
        op = self._tape.ops.get(key)
        return Value() if op is None else op.outputs[0]

    def _outside(self, storage: Any) -> Value:
        return self._tape.outside(storage) or Value()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = facts_of(func)
        if facts.is_view:
            if func is CONSTANT and (op := self._tape.ops.get(self._constant(args[0]))) is not None:
                self._set(args[0].untyped_storage(), op.outputs[0])
            return func(*args, **kwargs)
        call = self._call(facts, args, kwargs)
        if call is None:
            return self._run(None, map(self._content, storages(tensors(args, kwargs))), facts, args, kwargs)
        key, reads = call
        op = self._tape.ops.get(key)
        contents = [content for content, _ in reads]
        # The user's code may read what goes in and comes out: in hooks for what is saved, in the rules of a custom op,
        # in memory that it has too.
        is_exposed = facts.is_custom or internals.saved_tensors_hooks() != self._hooks
        is_exposed |= self._shares and any(c.is_shared for c in contents)
        if is_exposed:
            self._fill(contents)
        if op is None or op.runs:
            return self._run(op, contents, facts, args, kwargs)
        if op.is_view:
            return func(*args, **kwargs)
        kept = self._kept(op)
        if is_exposed and len(kept) < len(op.values):
            return self._run(op, contents, facts, args, kwargs)
        return self._skip(op, kept, reads, facts, args, kwargs)

    def _run(self, op: Op | None, reads: Iterable[Content], facts: OpFacts, args: Any, kwargs: Any) -> Any:
        self._fill(reads)
        changed = [*map(self._content, storages(facts.written(args, kwargs)))] if facts.writes else []
        for content in changed:
            self._protect(content)
        out = facts.func(*args, **kwargs)
        for i, content in enumerate(changed):
            content.value = Value() if op is None else op.writes[i]
        for t, value in () if op is None else zip(flat(out), op.outputs, strict=True):
            if isinstance(value, Value):
                self._set(t.untyped_storage(), value)
        return out

    def _kept(self, op: Op) -> dict[Value, Tensor]:
        """The values of an op that were kept, and were not changed in place since."""
        found: dict[Value, Tensor] = {}
        for value in op.values:
            kept = self._tape.kept.get(value)
            if kept is not None and (tensor := kept.get()) is not None:
                found[value] = tensor
                if self._last and not facts_of(op.func).is_custom:  # it may talk to other processes: it runs once
                    del self._tape.kept[value]
        return found

    def _skip(
        self,
        op: Op,
        kept: dict[Value, Tensor],
        reads: list[tuple[Content, Layout]],
        facts: OpFacts,
        args: Any,
        kwargs: Any,
    ) -> Any:
        changed = facts.written(args, kwargs)
        before = None
        if op.after is not None:
            before = op.after.now()
            op.after.put_back()
        recipe: Any = None
        if len(kept) < len(op.values):
            operands = (Operand(self._cell(content), layout) for content, layout in reads)
            given = _replaced(args, operands)
            recipe = Recipe(facts, given, dict(zip(kwargs, _replaced(kwargs.values(), operands), strict=True)), before)
            recipe.changes = [self._cell(self._content(t.untyped_storage())) for t in changed]
        results = []
        for i, x in enumerate(op.outputs):
            if isinstance(x, Value):
                t = kept[x] if x in kept else _hollow(x)
                content = self._set(t.untyped_storage(), x)
                if x not in kept:
                    content.hollow = recipe.output(i)
                results.append(t)
            else:
                results.append(changed[x.position] if isinstance(x, Changed) else x)
        for i, t in enumerate(changed):
            content = self._content(t.untyped_storage())
            value = op.writes[i]
            if value in kept:
                self._protect(content)
                bytes_of(t.untyped_storage()).copy_(bytes_of(kept[value].untyped_storage()))
            content.hollow = None if value in kept else recipe.write(i)
            content.value = value
        return op.returns(results) if op.returns in (list, tuple) else results[0]

    # What was skipped.

    def _cell(self, content: Content) -> Cell:
        """What a storage contains, for a recipe that reads it."""
        if content.hollow is not None:
            return content.hollow
        cell = None if content.cell is None else content.cell()
        if cell is None:
            cell = Cell(content.storage())
            content.cell = weakref.ref(cell)
        return cell

    def _protect(self, content: Content) -> None:
        """The memory is about to be written to: recipes that read it go on with a copy."""
        cell = None if content.cell is None else content.cell()
        if cell is not None:
            cell.storage = bytes_of(cell.storage).clone().untyped_storage()
        content.cell = None

    def _fill(self, contents: Iterable[Content]) -> None:
        """Compute what storages should contain."""
        for content in contents:
            if (cell := content.hollow) is None or (storage := content.storage()) is None:
                continue
            compute([cell])
            self._protect(content)
            bytes_of(storage).copy_(bytes_of(cell.storage))
            cell.storage, content.hollow = storage, None
            content.cell = weakref.ref(cell)


@functools.cache
def _conspicuous(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _hollow(value: Value) -> Tensor:
    """A tensor for a value that is not there."""
    layout = value.layout
    size, stride, offset, dtype, is_conj, is_neg = layout
    full = torch.full(size, _conspicuous(dtype), dtype=dtype, device=value.device)
    if full.stride() == stride and full.nbytes == value.nbytes and not is_conj and not is_neg:
        return full
    full = torch.full((-(-value.nbytes // dtype.itemsize),), _conspicuous(dtype), dtype=dtype, device=value.device)
    return layout.flagged(full.as_strided(size, stride, offset))


def _replaced(args: Iterable[Any], operands: Iterator[Operand]) -> list[Any]:
    """Arguments with operands in the place of tensors."""
    found: list[Any] = []
    for x in args:
        if isinstance(x, Tensor):
            found.append(next(operands))
        else:
            found.append(_replaced(x, operands) if isinstance(x, (list, tuple)) else x)
    return found
