"""The rerun that is given the values that were kept.

Ops that need not run again are spared: they return what was kept, or memory in which nothing was computed. Should the
rerun's graph hold on to such memory after all, its value is computed then, from the values that it depends on, so a
wrong guess of the tape costs time and never a wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import RandomState
from remat._errors import CheckpointError
from remat._tape import CONSTANT, DETACH, Changed, Op, Output, Tape, aliases_of, layout, outputs_of, write_token
from remat._values import (
    NotPlainError,
    OpCall,
    OpMode,
    Reader,
    Ref,
    Token,
    Values,
    flat,
    plain,
    refs,
    returned,
    schema_of,
    tensors,
)


class Replay(OpMode):
    """Gives the ops of a rerun their kept results, and spares those that nobody reads."""

    is_about_functions = False
    """What it has spared has to be there for whoever reads it."""

    def __init__(self, tape: Tape, name: str, consume: bool, *, gives_memory_away: bool = True) -> None:
        """A rerun of the function `name`.

        **Arguments:**

        - `consume`: whether it is the last: then what is given back is kept no longer.
        - `gives_memory_away`: as of the recorder.
        """
        super().__init__(looks_at_calls=gives_memory_away)
        tape.fetch()
        self._tape = tape
        self._name = name
        self._left: dict[Token, int] | None = {} if consume else None
        self._reader = Reader(Values(tape.values))
        self._reader.outside = []  # until all is computed that may have to be
        self._looks_away = False
        """Whether what it sees are ops of its own."""
        self._recipes: dict[Token, OpCall] = {}
        self._before: dict[Token, RandomState | None] = {}
        """Of spared ops that may draw: the state of the generators that they would have drawn from."""

    def __enter__(self) -> Any:
        self._hooks = internals.saved_tensors_hooks()
        return super().__enter__()

    def given(self, i: int, operand: Tensor) -> None:
        """Say which operand a tensor is a copy of."""
        raw = internals.innermost(operand)
        token, before = self._tape.operands[i]
        if layout(raw) == before:
            self._reader.values.set_outside(raw.untyped_storage(), token)

    def accessed(self, tensor: Tensor, given_away: bool) -> None:
        """The memory of a tensor is read, or given away: its value has to be there."""
        raw = internals.innermost(tensor)
        if not plain(raw):
            return
        storage = raw.untyped_storage()
        self._looks_away = True  # the mode is active, other than in `_op`
        try:
            with internals.below_all_transforms():
                self._fill([storage, *(self._losing(storage) if given_away else ())])
        finally:
            self._looks_away = False
        if given_away:
            self._reader.give_away(raw)

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        reader = self._reader
        if func is DETACH or self._looks_away:
            return func(*args, **kwargs)
        schema = schema_of(func)
        if schema.is_view:
            if func is CONSTANT:
                reader.constant(args[0])
            return func(*args, **kwargs)
        changed = schema.written(args, kwargs)
        try:
            call, storages = reader.call(schema, args, kwargs, changed)
        except NotPlainError:
            out = self._run(func, args, kwargs)
            for t in filter(plain, changed):
                reader.overwrite(t, reader.values.new())
            return out
        if call.token in self._tape.views:
            return func(*args, **kwargs)
        op = self._tape.spared(call.token)
        is_shared = any(map(reader.is_shared, storages))
        # The user's code may read what goes in and comes out: the rules of a custom op, hooks for what is saved.
        is_read = schema.is_custom or internals.saved_tensors_hooks() != self._hooks
        if is_read:
            self._fill(storages)
        if op is not None and (not (is_shared or is_read) or self._tape.keeps_all_of(op)):
            out = self._spare(op, call, changed)
            found = returned(out)
        else:
            out = self._run(func, args, kwargs)
            found = returned(out)
            if all(map(plain, found)) and not any(aliases_of(found, storages, changed)):
                self._note(call, out, changed)
        if is_shared:  # what others may change can't be computed from later: hold what was
            assert reader.outside is not None
            reader.outside += [(call.token, t.untyped_storage()) for t in found if plain(t)]
        return out

    def _note(self, call: OpCall, out: Any, changed: list[Tensor]) -> None:
        values = self._reader.values
        for t, output in zip(flat(out), outputs_of(values, call, out, changed), strict=True):
            if isinstance(output, Output):
                self._reader.make(t.untyped_storage(), output.token)
                self._recipes[output.token] = call
        for i, t in enumerate(changed):
            token = write_token(values, call, i)
            self._reader.write(t, token)
            self._recipes[token] = call

    def _spare(self, op: Op, call: OpCall, changed: list[Tensor]) -> Any:
        results: list[Any] = []
        storages: dict[Token, Any] = {}
        for output in op.outputs:
            if isinstance(output, Changed):
                results.append(changed[output.position])
            elif not isinstance(output, Output):
                results.append(output)
            else:
                if output.token not in storages:
                    storages[output.token] = self._memory_of(output)
                    self._recipes[output.token] = call
                results.append(output.over(storages[output.token]))
        if op.after is not None:
            self._before[call.token] = op.after.now()
            op.after.put_back()
        elif not op.draws:
            self._before[call.token] = None
        for i, t in enumerate(changed):
            token = write_token(self._reader.values, call, i)
            storage = t.untyped_storage()
            kept = self._tape.take(token, self._name, self._left)
            if kept is not None:
                self._fill(self._losing(storage))
                storage.copy_(kept)
            self._reader.write(t, token, there=kept is not None)
            self._recipes[token] = call
        return op.returns(results) if issubclass(op.returns, (list, tuple)) else results[0]

    def _memory_of(self, output: Output) -> Any:
        """The storage of a result of a spared op."""
        storage = self._tape.take(output.token, self._name, self._left)
        kept = storage is not None
        if not kept:
            storage = torch.empty(output.nbytes, dtype=torch.uint8, device=output.device).untyped_storage()
        self._reader.make(storage, output.token, there=kept)
        return storage

    # Computing what was spared.

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._fill([t.untyped_storage() for t in tensors(args, kwargs) if t.layout == torch.strided])
        for t in schema_of(func).written(args, kwargs):
            if plain(t):
                self._fill(self._losing(t.untyped_storage()))
        return func(*args, **kwargs)

    def _fill(self, storages: Iterable[Any]) -> None:
        """Make sure that storages contain what they should."""
        todo = [s for s in storages if self._is_hollow(s)]
        found: dict[int, Any] = {}
        while todo:
            storage = todo.pop()
            if id(storage) not in found:
                found[id(storage)] = storage
                todo += self._losing(storage)
        if not found:
            return
        computed: dict[Token, Any] = {}
        values = [self._value(self._reader.of(s).token, computed) for s in found.values()]
        values = [v.clone() if id(v) in found else v for v in values]
        for storage, value in zip(found.values(), values, strict=True):
            content = self._reader.of(storage)
            storage.copy_(value)
            content.there = content.token

    def _is_hollow(self, storage: Any) -> bool:
        content = self._reader.of(storage)
        return content.there != content.token

    def _losing(self, storage: Any) -> list[Any]:
        """The other storages to be filled before this one is overwritten: what depends on it can't be computed then."""
        lost = self._reader.of(storage).there
        if lost is None or self._can_be_computed(lost):
            return []
        hollow = [(c, s) for c, s in self._reader.all() if s is not storage and c.there != c.token]
        return [s for c, s in hollow if self._depends(c.token, lost)]

    def _can_be_computed(self, token: Token) -> bool:
        recipe = self._recipes.get(token)
        return recipe is not None and (not recipe.schema.draws or recipe.token in self._before)

    def _depends(self, token: Token, on: Token) -> bool:
        todo, seen = [token], set()
        while todo:
            token = todo.pop()
            if token == on:
                return True
            if token in self._recipes and token not in seen:
                seen.add(token)
                todo += self._recipes[token].reads
        return False

    def _value(self, token: Token, computed: dict[Token, Any]) -> Any:
        """A storage with a value: one that is there, or computed from values that are."""
        there = {c.there: s for c, s in self._reader.all() if c.there is not None}
        todo = [token]
        while todo:
            token = todo[-1]
            if token in computed:
                todo.pop()
            elif token in there:
                computed[token] = there[token]
            elif token in self._tape.kept:
                computed[token] = self._tape.kept[token].get(self._name)
            elif not self._can_be_computed(token):
                raise CheckpointError(
                    f"remat: the rerun of {self._name} reads a value that its forward run did not read, and that can't "
                    "be computed any more. A function under remat must do the same each time."
                )
            else:
                call = self._recipes[token]
                missing = [t for t in call.reads if t not in computed]
                todo += missing
                if not missing:
                    self._call(call, computed)
        return computed[token]

    def _call(self, call: OpCall, computed: dict[Token, Any]) -> None:
        """Run an op on values: the storages of the rerun stay as they are."""
        memory = {ref.slot: computed[ref.token] for ref in refs((*call.args, *call.kwargs.values()))}
        for ref in call.schema.written(call.args, call.kwargs):
            memory[ref.slot] = computed[ref.token].clone()
        args = [_over(x, memory) for x in call.args]
        kwargs = {k: _over(v, memory) for k, v in call.kwargs.items()}
        state = self._before.get(call.token)
        with contextlib.nullcontext() if state is None else state.replayed(), internals.views_resolved():
            out = call.again(args, kwargs)
        values, targets = self._reader.values, call.schema.written(args, kwargs)
        for t, output in zip(flat(out), outputs_of(values, call, out, targets), strict=True):
            if isinstance(output, Output):
                computed[output.token] = t.untyped_storage()
        for i, t in enumerate(targets):
            computed[write_token(values, call, i)] = t.untyped_storage()

    def settle(self) -> None:
        """Compute what the rerun's graph holds on to. Called when its results are gone and only the graph is left."""
        waiting = [c.storage for c, _ in self._reader.all() if c.there != c.token]
        if waiting:
            with internals.below_all_transforms():
                for ref in waiting:
                    if (storage := ref()) is not None:
                        self._fill([storage])
        self._reader.outside = None


def is_recorded(operands: Iterable[Tensor]) -> bool:
    """Whether a rerun that reads these is recorded: another follows then, in the derivative of this derivative."""
    return any(t.grad_fn is not None or internals.requires_grad_below(t) for t in operands)


def _over(x: Any, memory: dict[int, Any]) -> Any:
    """An argument of a call, over these storages."""
    if isinstance(x, Ref):
        return x.over(memory[x.slot])
    return [_over(i, memory) for i in x] if isinstance(x, tuple) else x
