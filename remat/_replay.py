"""Reruns under a policy, with the kept values.

If the value of an op is kept, the op returns it. If nothing needs the value, the op is skipped, and returns hollow
memory, which is full of NaN. If hollow memory is read after all, its content is computed first. This happens for an op
that the forward did not have, and for the graph of a higher derivative. So a rerun with other ops takes longer, but its
numbers are right.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import Ambient, RandomState
from remat._dispatch_mode import ops_of_remat
from remat._layers import inner_tensors, innermost
from remat._ops import FACTS, OpFacts, bytes_of, facts_of, flat, layout_of, storages, tensors
from remat._tape import Origin, Tape, origin_of
from remat._values import CONSTANT, Changed, Content, Key, Op, OpMode, Value


class Replay(OpMode):
    """Returns the kept results of ops, and skips ops that nothing needs."""

    def __init__(self, tape: Tape, last: bool) -> None:
        """A rerun.

        **Arguments:**

        - `last`: whether no other rerun follows. Then a kept value is released when it is returned.
        """
        super().__init__()
        tape.fetch()
        self._tape = tape
        self._last = last
        self._times: defaultdict[int, int] = defaultdict(int)
        """How often each key has been met so far, by the identity of the list of its ops."""
        self._fills = False
        self._read_memory: dict[Value, Any] = {}
        """The storages that skipped ops would have read."""
        self._before: dict[int, RandomState] = {}
        """The states of the generators before each skipped draw, by the number of the op."""

    def __enter__(self) -> Any:
        self._hooks = internals.saved_tensors_hooks_of_user()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks = None  # they may hold this mode
        super().__exit__(*error)

    def stands_for(self, operand: Tensor, origins: Iterable[Origin | None]) -> None:
        """Give an operand the value of the original: it may be a copy, or come from a checkpoint or hooks around."""
        with internals.DisableTorchFunction():
            for raw, origin in zip(inner_tensors(innermost(operand)), origins, strict=False):
                if origin is not None and origin == origin_of(raw, origin.value):
                    self._set(raw.untyped_storage(), origin.value)

    def settle(self) -> None:
        """Compute the hollow memory that the rerun's graph holds. Called when only the graph is left of the results."""
        self._fill(self._contents.values())
        self._contents.clear()
        self._read_memory.clear()

    def _read(self, content: Content) -> None:
        self._fill([content])

    def _given_away(self, content: Content, key: Key) -> Value:
        self._protect(content)
        op = self._known(key)
        return Value() if op is None else op.outputs[0]

    def _outside(self, storage: Any) -> Value:
        # A hook may have filled memory in the forward, which this rerun just reads: FSDP2 gathers parameters.
        content = self._tape.content(storage)
        return Value() if content is None or content.value.is_replaced else content.value

    def _known(self, key: Key) -> Op | None:
        """The op of the forward with this key, or None."""
        ops = self._tape.by_key.get(key, ())
        n = self._times[id(ops)]
        self._times[id(ops)] = n + 1
        return ops[n] if n < len(ops) else None

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._fills:
            return func(*args, **kwargs)
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts.is_view:
            if func is CONSTANT and (key := self._constant(args[0])) and (op := self._known(key)) is not None:
                self._set(args[0].untyped_storage(), op.outputs[0])
            return func(*args, **kwargs)
        call = self._call(facts, args, kwargs)
        if call is None:
            return self._run(None, map(self._content, storages(tensors(args, kwargs))), facts, args, kwargs)
        key, contents = call
        op = self._known(key)
        if op is None or op.runs:
            return self._run(op, contents, facts, args, kwargs)
        # User code may read the arguments and results of this op: in saved-tensor hooks, in the rules of a custom op,
        # or through memory that it shares.
        is_exposed = facts.is_custom or internals.saved_tensors_hooks_of_user() != self._hooks
        is_exposed |= self._shares and any(c.is_shared for c in contents)
        if is_exposed:
            self._fill(contents)
        if op.is_view:
            return func(*args, **kwargs)
        changed = facts.written(args, kwargs)
        if any(layout_of(t) != value.layout for t, value in zip(changed, op.writes, strict=True)):  # `out=` is resized
            return self._run(op, contents, facts, args, kwargs)
        kept = self._kept(op)
        if (is_exposed or not self._tape.skips) and len(kept) < len(op.values):
            return self._run(op, contents, facts, args, kwargs)
        facts.count_writes(args, kwargs)
        return self._skip(op, kept, contents, changed)

    def _run(self, op: Op | None, reads: Iterable[Content], facts: OpFacts, args: Any, kwargs: Any) -> Any:
        self._fill(reads)
        changed = [*map(self._content, storages(facts.written(args, kwargs)))] if facts.writes else []
        for content in changed:
            self._protect(content)
        out = self._run_op(facts, args, kwargs)
        for i, content in enumerate(changed):
            content.value = self._written(content) if op is None else op.writes[i]
        for t, value in () if op is None else zip(flat(out), op.outputs, strict=True):
            if isinstance(value, Value):
                self._set(t.untyped_storage(), value)
        return out

    def _written(self, content: Content) -> Value:
        """The value that an op has written which the forward did not have."""
        # FSDP2 may gather a parameter in another way, but to what the forward has left in its memory.
        return self._outside(content.storage()) if internals.fully_shard_at_work() else Value()

    def _kept(self, op: Op) -> dict[Value, Tensor]:
        """The kept values of an op that have not been changed in place since."""
        found: dict[Value, Tensor] = {}
        for value in op.values:
            kept = self._tape.kept.get(value)
            if kept is not None and (tensor := kept.get()) is not None:
                found[value] = tensor
                if self._last and not op.facts.is_custom:  # a custom op may communicate, so it must not run again
                    del self._tape.kept[value]
        return found

    def _skip(self, op: Op, kept: dict[Value, Tensor], reads: list[Content], changed: list[Tensor]) -> Any:
        if len(kept) < len(op.values):
            for content in reads:
                if not content.hollow:
                    self._hold(content, content.storage())
        if op.after is not None:
            self._before[op.values[0].op] = op.after.now()
            op.after.put_back()
        results = []
        for x in op.outputs:
            if isinstance(x, Value):
                t = kept[x] if x in kept else _hollow(x)
                self._set(t.untyped_storage(), x).hollow = x not in kept
                results.append(t)
            else:
                results.append(changed[x.position] if isinstance(x, Changed) else x)
        for t, value in zip(changed, op.writes, strict=True) if changed else ():
            content = self._content(t.untyped_storage())
            if value in kept:
                self._protect(content)
                bytes_of(t.untyped_storage()).copy_(bytes_of(kept[value].untyped_storage()))
            content.value, content.hollow = value, value not in kept
            if content.hollow and op.facts.writes_statistics and value not in self._tape.read:
                bytes_of(content.storage()).fill_(255)  # NaN: the graph saves new statistics, but does not read them
                content.hollow = False
        return op.returns(results) if op.returns in (list, tuple) else next(iter(results), None)

    # Skipped ops.

    def _hold(self, content: Content, storage: Any) -> None:
        content.held = content.value
        self._read_memory[content.value] = storage

    def _protect(self, content: Content) -> None:
        """Before a write to the memory, copy it for the skipped ops that would have read it."""
        if content.held is not None:
            with ops_of_remat():  # else a mode would take it for an op of the function
                self._read_memory[content.held] = bytes_of(content.storage()).clone().untyped_storage()
            content.held = None

    def _fill(self, contents: Iterable[Content]) -> None:
        """Compute the content of hollow storages."""
        wanted = [c.value for c in contents if c.hollow and c.storage() is not None]
        if not wanted:
            return
        self._fills = True
        try:
            self._fill_all(wanted)
        finally:
            self._fills = False

    def _fill_all(self, wanted: list[Value]) -> None:
        with internals.no_transforms(), torch.no_grad(), internals.DisableTorchFunction(), ops_of_remat():
            computed = self._computed(wanted)
            for content in self._contents.values():
                if content.hollow and content.value in computed and (storage := content.storage()) is not None:
                    self._protect(content)
                    bytes_of(storage).copy_(bytes_of(computed[content.value]))
                    content.hollow = False
                    self._hold(content, storage)

    def _computed(self, wanted: Iterable[Value]) -> dict[Value, Any]:
        """Compute values, and the values that they depend on. Returns their storages."""
        numbers: set[int] = set()
        todo = [*wanted]
        while todo:
            value = todo.pop()
            if value not in self._read_memory and value.op not in numbers:
                numbers.add(value.op)
                todo += self._tape.ops[value.op].reads
        memory = self._read_memory.copy()
        for number in sorted(numbers):
            _compute(self._tape.ops[number], memory, self._before.get(number))
        return memory


def _compute(op: Op, memory: dict[Value, Any], before: RandomState | None) -> None:
    """Run a skipped op. `before`: the states of the generators from which it draws."""
    given = {value: memory[value] for value in op.reads}
    written = storages(op.facts.written(*_filled(op, given)))
    given |= {v: bytes_of(s).clone().untyped_storage() for v, s in given.items() if s in written}
    args, kwargs = _filled(op, given)
    settings = Ambient.current()._replace(dtype=op.dtype, autocast=())
    with settings.restored(), before.replayed() if before else internals.NOTHING, internals.views_resolved():
        out = op.facts.func(*args, **kwargs)
    memory |= {v: t.untyped_storage() for v, t in zip(op.outputs, flat(out), strict=True) if isinstance(v, Value)}
    memory |= dict(zip(op.writes, storages(op.facts.written(args, kwargs)), strict=True))


def _filled(op: Op, memory: dict[Value, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an op, with tensors over the memory of its operands."""
    _, args, kwargs, _ = op.key
    return [_from(x, memory) for x in args], {name: _from(x, memory) for name, x in kwargs}


def _from(x: Any, memory: dict[Value, Any]) -> Any:
    if type(x) is not tuple:
        return x
    if x and isinstance(x[0], Value):
        value, layout = x
        return layout.over(memory[value])
    return [_from(i, memory) for i in x]


@functools.cache
def _loud_value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _hollow(value: Value) -> Tensor:
    """A tensor full of NaN, in place of a value that is not computed."""
    layout = value.layout
    size, stride, offset, dtype, is_conj, is_neg = layout
    full = torch.full(size, _loud_value(dtype), dtype=dtype, device=value.device)
    if full.stride() == stride and full.nbytes == value.nbytes and not is_conj and not is_neg:
        return full
    full = torch.full((-(-value.nbytes // dtype.itemsize),), _loud_value(dtype), dtype=dtype, device=value.device)
    return layout.flagged(full.as_strided(size, stride, offset))
