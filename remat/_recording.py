"""What a run has computed, op by op: its values can be computed again without the function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from remat._context import replayed
from remat._errors import CheckpointError
from remat._tape import Kept, Op, Output
from remat._values import Ref, Token, flat

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


_TAKEN = (
    "remat: what the policy has kept for {} was given to an earlier backward pass, and is gone. Pass retain_graph=True "
    "to each backward pass but the last."
)


class Recording:
    """The ops of a run, and what they read that none of them has computed."""

    def __init__(self, name: str, ops: Iterable[Op], outside: Mapping[Token, Any]) -> None:
        """A recording.

        **Arguments:**

        - `name`: of the function.
        - `outside`: the storages with values that no op has computed.
        """
        self._name = name
        self._ops = {op.token: op for op in ops}  # of two that compute the same, one
        self._producer = {value: op for op in self._ops.values() for value in op.values}
        self._outside = outside

    def compute(self, wanted: set[Token], kept: dict[Token, Kept], lost: dict[Token, Any]) -> dict[Token, Any]:
        """Values: of each a storage, or a tensor that lies in one.

        **Arguments:**

        - `wanted`: which values.
        - `kept`: those that need not be computed. What is used is taken out.
        - `lost`: those that are not there any more. What depends on them is added.
        """
        ops, uses = self._plan(wanted, kept)
        values: dict[Token, Any] = {}

        def find(tokens: Iterable[Token]) -> None:
            for token in tokens:
                if token in values:
                    continue
                if token not in kept and token not in self._outside:
                    raise CheckpointError(_TAKEN.format(self._name))
                values[token] = kept.pop(token).get(self._name) if token in kept else self._outside[token]

        for op in ops:
            reason = next((lost[token] for token in op.reads if token in lost), None)
            if reason is not None:
                lost.update(dict.fromkeys(op.values, reason))
                continue
            find(op.reads)
            _run(op, values, uses)
            for token in set(op.reads):
                uses[token] -= 1
            for token in (*op.reads, *op.values):
                if not uses.get(token):
                    values.pop(token, None)
        there = wanted - lost.keys()
        find(there)
        return {token: values[token] for token in there}

    def _plan(self, wanted: set[Token], kept: Mapping[Token, Kept]) -> tuple[list[Op], dict[Token, int]]:
        """The ops that have to run, in order, and how often each value is used."""
        needed: set[Token] = set()
        todo = list(wanted)
        while todo:
            token = todo.pop()
            op = self._producer.get(token)
            if op is not None and op.token not in needed and token not in kept:
                needed.add(op.token)
                todo += op.reads
        ops = [op for token, op in self._ops.items() if token in needed]
        uses = dict.fromkeys(wanted, 1)
        for op in ops:
            for token in set(op.reads):
                uses[token] = uses.get(token, 0) + 1
        return ops, uses


def _run(op: Op, values: dict[Token, Any], uses: Mapping[Token, int]) -> None:
    """Run an op on values, and add what it computes."""
    schema, args, kwargs = op.call.schema, op.call.args, op.call.kwargs
    memory: dict[int, Any] = {}
    for ref in schema.written(args, kwargs):
        value = values[ref.token]
        computed = isinstance(value, Tensor)  # else it is kept, or from outside
        storage = value.untyped_storage() if computed else value
        is_last = computed and uses[ref.token] == 1 and op.reads.count(ref.token) == 1
        memory[ref.slot] = storage if is_last else storage.clone()
    args = [_filled(x, values, memory) for x in args]
    kwargs = {k: _filled(x, values, memory) for k, x in kwargs.items()}
    with _NOTHING if op.before is None else replayed(op.before):
        out = op.call.again(args, kwargs)
    for token, t in zip(op.writes, schema.written(args, kwargs), strict=True):
        values[token] = t
    for output, t in zip(op.outputs, flat(out), strict=True):
        if isinstance(output, Output):
            values[output.token] = t


def _filled(x: Any, values: Mapping[Token, Any], memory: Mapping[int, Any]) -> Any:
    if isinstance(x, Ref):
        return tensor_of(x, memory[x.slot] if x.slot in memory else values[x.token])
    return [_filled(i, values, memory) for i in x] if isinstance(x, tuple) else x


def tensor_of(ref: Ref, value: Any) -> Tensor:
    """The tensor, over a storage or a tensor with its value."""
    if not isinstance(value, Tensor):
        return ref.over(value)
    if value.dtype is not ref.dtype or ref.conjugated or ref.negated or value.is_conj() or value.is_neg():
        return ref.over(value.untyped_storage())
    size, stride, offset = ref.size, ref.stride, ref.offset
    if value.size() == size and value.stride() == stride and value.storage_offset() == offset:
        return value
    return value.as_strided(size, stride, offset)
