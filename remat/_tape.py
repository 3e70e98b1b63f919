"""Which results of ops a run keeps under a policy, and the rerun that is given them back.

A value is the content of a storage, known by what computed it: the op, the values that it read, its other arguments.
So a value that was kept is found again wherever the rerun asks for it, in whatever order the ops come, and where the
rerun computes something else, nothing is found and the op just runs.

Forward, `Recorder` notes each aten op below all transforms. When the run is over, the graph that it built shows what a
backward reads: the storages that are still alive. From there `Recorder.tape` walks back: a needed value is kept if the
policy lets it, else its op must run again and needs what it read. All other ops are dead: in the rerun they return
memory that nobody has written. Should the rerun's graph hold on to such memory after all, it is computed then, so a
wrong guess costs time and never a wrong number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import CheckpointError
from remat._names import current_name
from remat.policies._enum import CheckpointPolicy

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)

Policy = Callable[..., CheckpointPolicy]
Token = int


class PolicyContext:
    """What a policy is told besides the op: the public attributes of torch's `SelectiveCheckpointContext`, and `call`.

    **Attributes:**

    - `is_recompute`: always False, a policy is asked in the forward alone.
    - `op_output`: what the op returned.
    - `call`: `(function, args, kwargs)` of the torch call in the user's code that the op is part of, as seen inside
        of all transforms.
    """

    is_recompute = False

    def __init__(self, op_output: Any, call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None) -> None:
        self.op_output = op_output
        self.call = call


@dataclass
class _Output:
    """A tensor that an op returned: its value, and how it lies in the storage."""

    token: Token
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class _Op:
    func: Any
    token: Token
    reads: list[Token]
    kind: Any
    """`Tensor`, or the sequence that was returned."""
    outputs: list[Any] = field(default_factory=list)
    """What was returned, flat: an `_Output` for each new tensor, else the value itself."""
    writes: list[Token] = field(default_factory=list)
    """The new values of storages that it wrote to."""

    @property
    def values(self) -> list[Token]:
        return [o.token for o in self.outputs if isinstance(o, _Output)] + self.writes


class _Values:
    """Gives the same number to the same value, in the forward and in every rerun."""

    def __init__(self) -> None:
        self._numbers: dict[Any, Token] = {}
        self._outside: dict[int, tuple[weakref.ref[Any], Token]] = {}

    def number(self, *what: Any) -> Token:
        try:
            return self._numbers.setdefault(what, len(self._numbers))
        except TypeError:  # an argument that can't be hashed: like nothing else
            return self._numbers.setdefault(object(), len(self._numbers))

    def outside(self, storage: Any) -> Token:
        """The number of a storage that no op of the run made."""
        known = self._outside.get(id(storage))
        if known is None or known[0]() is not storage:
            self._outside[id(storage)] = known = weakref.ref(storage), self.number(object())
        return known[1]


class _Reader:
    """The values of the storages of one run."""

    def __init__(self, values: _Values) -> None:
        self.values = values
        self.contents: dict[int, tuple[weakref.ref[Any], Token]] = {}
        self.draws = 0

    def content(self, tensor: Tensor) -> Token:
        storage = tensor.untyped_storage()
        known = self.contents.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else self.values.outside(storage)

    def made(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self.contents.get(id(storage))
        return known is not None and known[0]() is storage

    def set_content(self, tensor: Tensor, token: Token) -> None:
        storage = tensor.untyped_storage()
        self.contents[id(storage)] = weakref.ref(storage), token

    def number(self, func: Any, args: Any, kwargs: Any) -> tuple[Token, list[Token]]:
        """The number of a call of an op, and the values that it reads."""
        reads: list[Token] = []
        what = [func, self._key(args, reads), tuple((k, self._key(v, reads)) for k, v in kwargs.items())]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            what.append(self.draws)
        return self.values.number(*what), reads

    def _key(self, x: Any, reads: list[Token]) -> Any:
        if isinstance(x, Tensor):
            reads.append(self.content(x))
            return reads[-1], x.size(), x.stride(), x.storage_offset(), x.dtype
        if isinstance(x, (list, tuple)):
            return tuple(self._key(i, reads) for i in x)
        return type(x), x


def _flat(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (list, tuple)) else (out,)


def _plain(x: Any) -> bool:
    """Whether all tensors in `x` have memory that says what they are (not sparse, lazily zero or conjugated ones)."""
    if isinstance(x, (list, tuple)):
        return all(_plain(i) for i in x)
    return not isinstance(x, Tensor) or (
        x.layout == torch.strided and not x._is_zerotensor() and not x.is_conj() and not x.is_neg()
    )


def _is_view(func: Any) -> bool:
    """Whether an op reads nothing: its result is another look at the same memory."""
    return (
        func in _UNSAFE_VIEWS
        or torch.Tag.inplace_view in func.tags  # `squeeze_` and the like write nothing
        or any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    )


_UNSAFE_VIEWS = {torch.ops.aten._unsafe_view.default}  # views by what they do, though not by their schema


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an op writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += _flat(value)
    return [t for t in found if isinstance(t, Tensor)]


class Recorder(internals.TorchDispatchMode):
    """Notes the ops of a forward run, and asks the policy about each."""

    def __init__(self, policy: Policy, call: Callable[[], Any]) -> None:
        super().__init__()
        self._policy = policy
        self._call = call
        self._reader = _Reader(_Values())
        self._ops: list[_Op] = []
        self._producer: dict[Token, _Op] = {}
        self._draws: list[_Op] = []
        self._decisions: dict[Token, CheckpointPolicy] = {}
        self._pins: dict[Token, Any] = {}
        self._tensors: dict[Token, weakref.ref[Tensor]] = {}
        self._overwritten: set[Token] = set()
        self._read: set[Token] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader = self._reader
        known = func is not torch.ops.aten.detach.default and _plain((args, [*kwargs.values()]))
        token, reads = reader.number(func, args, kwargs) if known else (-1, [])
        out = func(*args, **kwargs)
        if not known or not _plain(out):
            return out
        decision = self._policy(PolicyContext(out, self._call()), func, *args, **kwargs)
        written = _written(func, args, kwargs)
        if _is_view(func):
            self._decide_of_views(out, decision)
            return out
        op = _Op(func, token, reads, type(out))
        for i, t in enumerate(() if written else _flat(out)):
            if isinstance(t, Tensor):
                number = reader.values.number(token, i)
                op.outputs.append(_Output(number, t.size(), t.stride(), int(t.storage_offset()), t.dtype, t.device))
                self._set_content(t, number)
            else:
                op.outputs.append(t)
        for i, t in enumerate(written):
            self._overwritten.add(reader.content(t))
            if reader.made(t):
                op.writes.append(reader.values.number(token, "write", i))
                self._set_content(t, op.writes[-1])
        self._ops.append(op)
        self._read.update(reads)
        self._producer.update((v, op) for v in op.values)
        self._decisions.update((v, decision) for v in op.values)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws.append(op)
        if not _keeps(decision):
            self._pin(args, kwargs)
        return out

    def _set_content(self, tensor: Tensor, number: Token) -> None:
        self._reader.set_content(tensor, number)
        self._tensors[number] = weakref.ref(tensor)

    def _decide_of_views(self, out: Any, decision: CheckpointPolicy) -> None:
        """A view has no value of its own: to keep it is to keep what it views.

        What a policy says of a view counts where it is the stronger word. A name is a word about the value itself: it
        can also take back what the policy has said of the op that made it.
        """
        named = current_name() is not None
        for t in _flat(out):
            if not isinstance(t, Tensor) or not self._reader.made(t):
                continue
            token = self._reader.content(t)
            before = self._decisions.get(token, CheckpointPolicy.PREFER_RECOMPUTE)
            if before in _MUST and not (named and decision in _MUST):
                continue
            if _keeps(decision) or (named and decision in _MUST):
                self._decisions[token] = decision

    def _pin(self, args: Any, kwargs: Any) -> None:
        """An op that will run again needs what it reads, though no backward may."""
        for x in (*args, *kwargs.values()):
            for t in _flat(x):
                if isinstance(t, Tensor) and self._reader.made(t):
                    token = self._reader.content(t)
                    if _keeps(self._decisions.get(token)):
                        self._pins[token] = t.untyped_storage()

    def tape(self, results: Iterable[Tensor]) -> Tape:
        """What to keep, now that the run is over and its graph still there.

        **Arguments:**

        - `results`: what the run returned. They are alive whether a backward reads them or not.
        """
        contents = {token: ref for ref, token in self._reader.contents.values()}
        returned = set()
        for r in results:
            raw = internals.innermost(r)
            token = self._reader.content(raw) if raw.layout == torch.strided else None
            if token is not None and token not in self._read and not internals.saves_output(r):
                returned.add(token)
        pins, self._pins = self._pins, {}
        alive = [t for t, ref in contents.items() if t not in pins and t not in returned and ref() is not None]
        alive += [r for op in self._ops if not op.values for r in op.reads]  # `item()` and the like run again
        plan = _Plan(self._producer, lambda t: _keeps(self._decisions.get(t)) and t not in self._overwritten)
        storages = {t: s for t, ref in contents.items() if (s := ref()) is not None and t not in returned}
        plan.need(alive, storages)
        for token in list(pins):
            if token not in plan.kept:
                storages.pop(token, None)
                del pins[token]
                if contents[token]() is not None and token not in returned:  # held by the graph, after all
                    storages[token] = contents[token]()
                    plan.need([token], storages)
        plan.draw_in_order(self._draws, storages)
        kept = {}
        with internals.below_all_transforms():
            for token, storage in plan.kept.items():
                kept[token] = _Kept(self._producer[token].func, self._decisions[token], self._tensor(token, storage))
        return Tape(self._reader.values, self._ops, plan.runs, kept)

    def _tensor(self, token: Token, storage: Any) -> Tensor:
        """A tensor over a storage, sharing the version counter of the one that the op returned, if it lives."""
        tensor = self._tensors[token]()
        if tensor is not None and tensor.untyped_storage() is storage:
            return tensor.detach()
        for output in self._producer[token].outputs:
            if isinstance(output, _Output) and output.token == token:
                empty = torch.empty(0, dtype=output.dtype, device=output.device)
                return empty.set_(storage, output.offset, output.size, output.stride)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Plan:
    def __init__(self, producer: dict[Token, _Op], may_keep: Callable[[Token], bool]) -> None:
        self.producer = producer
        self.may_keep = may_keep
        self.kept: dict[Token, Any] = {}
        self.runs: set[Token] = set()

    def need(self, tokens: Iterable[Token], storages: dict[Token, Any]) -> None:
        todo = list(tokens)
        while todo:
            token = todo.pop()
            op = self.producer.get(token)
            if op is None or token in self.kept or op.token in self.runs:
                continue
            if token in storages and self.may_keep(token):
                self.kept[token] = storages[token]
            else:
                self.run(op, todo)

    def run(self, op: _Op, todo: list[Token]) -> None:
        self.runs.add(op.token)
        for v in op.values:
            self.kept.pop(v, None)
        todo += op.reads

    def draw_in_order(self, draws: list[_Op], storages: dict[Token, Any]) -> None:
        """Draws come from one stream: if one runs again, so must all before it."""
        last = max((i for i, op in enumerate(draws) if op.token in self.runs), default=-1)
        todo: list[Token] = []
        for op in draws[: max(last, 0)]:
            if op.token not in self.runs:
                self.run(op, todo)
        self.need(todo, storages)


def _keeps(decision: CheckpointPolicy | None) -> bool:
    return decision in _SAVE or decision in _OFFLOAD


class _Kept:
    """A kept value."""

    def __init__(self, func: Any, decision: CheckpointPolicy, tensor: Tensor) -> None:
        self.func = func
        self._version = tensor._version
        self._tensor = tensor.cpu().clone() if decision in _OFFLOAD and tensor.device.type == "cpu" else tensor
        self.nbytes = tensor.untyped_storage().nbytes()

    def get(self, name: str) -> Tensor:
        if self._tensor._version != self._version:
            raise CheckpointError(
                f"remat: the result of {self.func} that the policy kept for {name} was changed in place after the "
                "forward run, so the backward would read a wrong value. Change a copy instead: x = x.clone()."
            )
        return self._tensor


class Tape:
    """What a run kept, and which of its ops need not run again."""

    def __init__(self, values: _Values, ops: list[_Op], runs: set[Token], kept: dict[Token, _Kept]) -> None:
        self.values = values
        self.kept = kept
        self._spared = {op.token: op for op in ops if op.values and op.token not in runs}
        self._uses: dict[Token, int] = {}
        for op in ops:
            if op.token in self._spared:
                for v in op.values:
                    self._uses[v] = self._uses.get(v, 0) + 1

    def replay(self, name: str, consume: bool) -> Replay:
        """The mode for one rerun. With `consume`, what is given back is kept no longer: the last rerun."""
        return Replay(self, name, consume)

    def spared(self, token: Token) -> _Op | None:
        return self._spared.get(token)

    def take(self, token: Token, name: str, left: dict[Token, int] | None) -> Tensor | None:
        kept = self.kept.get(token)
        if kept is None:
            return None
        tensor = kept.get(name)
        if left is not None:
            left[token] = left.get(token, self._uses[token]) - 1
            if left[token] == 0:
                del self.kept[token]
        return tensor


class _Thunk:
    """An op that did not run, and the memory that its results should be in."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.outputs: list[weakref.ref[Any] | None] = []


class Replay(internals.TorchDispatchMode):
    """Gives the ops of a rerun their kept results, and spares those that nobody reads."""

    def __init__(self, tape: Tape, name: str, consume: bool) -> None:
        super().__init__()
        self._tape = tape
        self._name = name
        self._left: dict[Token, int] | None = {} if consume else None
        self._reader = _Reader(tape.values)
        self._pending: dict[int, _Thunk] = {}
        self._unwritten: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        if not _plain((args, [*kwargs.values()])):
            return self._run(func, args, kwargs)
        token, _ = self._reader.number(func, args, kwargs)
        written = _written(func, args, kwargs)
        op = self._tape.spared(token)
        if op is None:
            if _is_view(func):
                return func(*args, **kwargs)
            out = self._run(func, args, kwargs)
            self._note(token, out, written)
            return out
        return self._spare(op, token, args, kwargs, written)

    def _note(self, token: Token, out: Any, written: list[Tensor]) -> None:
        number = self._reader.values.number
        for i, t in enumerate(() if written else _flat(out)):
            if isinstance(t, Tensor) and _plain(t):
                self._reader.set_content(t, number(token, i))
        for i, t in enumerate(written):
            if self._reader.made(t):
                self._reader.set_content(t, number(token, "write", i))

    def _spare(self, op: _Op, token: Token, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        thunk = _Thunk(op.func, args, kwargs)
        results: list[Any] = []
        for output in op.outputs:
            thunk.outputs.append(None)
            if not isinstance(output, _Output):
                results.append(output)
                continue
            kept = self._tape.take(output.token, self._name, self._left)
            if kept is not None:
                t = kept.as_strided(output.size, output.stride, output.offset)
            else:
                t = output.allocate()
                thunk.outputs[-1] = self._wait(t.untyped_storage(), thunk)
            self._reader.set_content(t, output.token)
            results.append(t)
        for i, t in enumerate(written):
            if self._reader.made(t):
                self._write(t, self._reader.values.number(token, "write", i))
        if written:
            results = written
        return results[0] if issubclass(op.kind, Tensor) else op.kind(results)

    def _wait(self, storage: Any, thunk: _Thunk) -> weakref.ref[Any]:
        key = id(storage)
        self._pending[key] = thunk
        return weakref.ref(storage, lambda _: self._pending.pop(key, None))

    def _write(self, tensor: Tensor, token: Token) -> None:
        """An op that writes in place is spared: its value comes from the tape, or is overwritten before it is read."""
        storage = tensor.untyped_storage()
        self._pending.pop(id(storage), None)
        kept = self._tape.take(token, self._name, self._left)
        if kept is None:
            self._unwritten.add(id(storage))
        else:
            self._unwritten.discard(id(storage))
            storage.copy_(kept.untyped_storage())
        self._reader.set_content(tensor, token)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            for t in _flat(x):
                if isinstance(t, Tensor) and t.layout == torch.strided:
                    self._compute(t.untyped_storage())
        return func(*args, **kwargs)

    def _compute(self, storage: Any) -> None:
        """Fill memory that a spared op returned: somebody reads it after all."""
        if id(storage) in self._unwritten:
            raise CheckpointError(
                f"remat: the rerun of {self._name} reads a value in the middle of a series of in-place changes that "
                "its forward run did not read. A function under remat must do the same each time."
            )
        thunk = self._pending.pop(id(storage), None)
        if thunk is None:
            return
        out = self._run(thunk.func, thunk.args, thunk.kwargs)
        for t, ref in zip(_flat(out), thunk.outputs, strict=True):
            waiting = ref() if ref is not None else None
            if waiting is not None:
                self._pending.pop(id(waiting), None)
                waiting.copy_(t.untyped_storage())

    def settle(self) -> None:
        """Compute what the rerun's graph holds on to. Called when its results are gone and only the graph is left."""
        if self._pending:
            with internals.below_all_transforms():
                for thunk in list(self._pending.values()):
                    for ref in thunk.outputs:
                        storage = ref() if ref is not None else None
                        if storage is not None:
                            self._compute(storage)
        self._pending.clear()
