"""Which results of ops a run keeps under a policy.

Forward, `Recorder` notes each aten op below all transforms, by the values that it reads and computes. When the run is
over, the graph that it built shows what a backward reads: the storages that are still alive. From there `Recorder.tape`
walks back: a needed value is kept if the policy lets it, else its op must run again and needs what it read. All other
ops are spared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from remat import _torch_internals as internals
from remat._context import drawn_from
from remat._names import current_name
from remat._tape import CONSTANT, DETACH, Kept, Op, Output, Tape, aliases_of, bytes_of, outputs_of, write_token
from remat._values import (
    NotPlainError,
    OpCall,
    OpMode,
    Reader,
    Ref,
    Token,
    Values,
    are_apart,
    flat,
    plain,
    ref_of,
    returned,
    schema_of,
    tensors,
)
from remat.policies._enum import CheckpointPolicy
from remat.policies._policy import Decide, Policy

_MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, *_OFFLOAD)


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


class Recorder(OpMode):
    """Notes the ops of a forward run, and asks the policy about each."""

    def __init__(
        self,
        policy: Decide,
        repeats_draws: bool,
        where: Callable[[], str] | None = None,
        *,
        for_graph: bool = False,
        gives_memory_away: bool = True,
    ) -> None:
        """A recorder of one run.

        **Arguments:**

        - `policy`: what decides.
        - `repeats_draws`: whether reruns draw what the run draws.
        - `where`: the place in the user's code.
        - `for_graph`: whether the graph of the run holds nothing, and says by `saves` what it would save.
        - `gives_memory_away`: whether the function may, by `tensor.tolist()`, say.
        """
        super().__init__(looks_at_calls=gives_memory_away or getattr(policy, "looks_at_calls", True))
        self._policy = policy
        self._repeats_draws = repeats_draws
        self._complaint: str | None = None
        """The TypeError that the policy has raised."""
        self._since = internals.next_sequence_number()
        self._where = where
        self._reader = Reader(Values())
        self._for_graph = for_graph
        if for_graph:
            self._reader.outside = []
        self._saved: set[Token] = set()
        """What a graph that holds nothing would save."""
        self._runs: set[Token] = set()
        self._by_ops: dict[int, CheckpointPolicy | None] = {}
        self._ops: list[Op] = []
        self._views: set[Token] = set()
        """Ops that return views, though their schemas do not say so."""
        self._again: list[Token] = []
        """What ops read that always run again."""
        self._producer: dict[Token, Op] = {}
        self._decisions: dict[Token, CheckpointPolicy] = {}
        self._names: dict[Token, str] = {}
        self._places: dict[Token, str] = {}
        self._pins: dict[Token, Any] = {}
        self._tensors: dict[Token, weakref.ref[Tensor]] = {}
        self._overwritten: set[Token] = set()
        self._writes: dict[Token, Ref] = {}
        """By what a storage contained before an op wrote to it: what that wrote to, and what was there then."""
        self._read: set[Token] = set()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        reader = self._reader
        if func is DETACH:
            return func(*args, **kwargs)
        schema = schema_of(func)
        if schema.is_view:
            return self._view(func, args, kwargs)
        changed = schema.written(args, kwargs)
        try:
            call, storages = reader.call(schema, args, kwargs, changed)
        except NotPlainError:
            return self._run_again(func, args, kwargs)
        self._rescue(changed)
        before = drawn_from(args, kwargs) if schema.draws and self._repeats_draws else None
        out = func(*args, **kwargs)
        if changed and not schema.counts_writes:
            increment_version(changed)
        found = returned(out)
        if not all(map(plain, found)):
            return out
        decision = self._decision(out, func, args, kwargs)
        aliases = aliases_of(found, storages, changed)
        if any(aliases):
            if all(aliases):
                self._views.add(call.token)
                self._decide_of_views(found, decision)
            return out
        op = self._note(call, out, changed, decision)
        if before is not None:
            op.before = before.drawn_since()  # fused attention may draw, and does not without dropout
            op.after = None if op.before is None else before.now()
            op.draws = op.before is not None
        if not (_keeps(decision) and op.can_be_spared):
            self._pin(storages)
        return out

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is CONSTANT:
            self._reader.constant(args[0])
        if not self._minds_views(func):
            return func(*args, **kwargs)
        if not all(map(plain, tensors(args, kwargs))):
            return self._run_again(func, args, kwargs)
        out = func(*args, **kwargs)
        found = returned(out)
        if all(map(plain, found)):
            self._decide_of_views(found, self._decision(out, func, args, kwargs))
        return out

    def __enter__(self) -> Any:
        # A cast that autocast has kept from an earlier call would not be seen, and reruns cast themselves.
        self._keeps_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        torch.set_autocast_cache_enabled(self._keeps_casts)
        # Torch takes a TypeError inside of `x @ y` for "not implemented".
        if isinstance(error, TypeError) and self._complaint not in (None, str(error)):
            raise TypeError(self._complaint) from None

    def _by_op(self, func: Any) -> CheckpointPolicy | None:
        """What the policy says of an op, where that depends on nothing else."""
        if id(func) not in self._by_ops:
            self._by_ops[id(func)] = self._policy.by_op(func) if isinstance(self._policy, Policy) else None
        return self._by_ops[id(func)]

    def _minds_views(self, func: Any) -> bool:
        """Whether something may follow from a call of an op that returns a view."""
        decision = self._by_op(func)
        return decision is None or _keeps(decision) or current_name() is not None

    def _decision(self, out: Any, func: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        if (decision := self._by_op(func)) is not None:
            return decision
        try:
            return self._policy(PolicyContext(out, self.call), func, *args, **kwargs)
        except TypeError as error:
            self._complaint = str(error)
            raise

    def accessed(self, tensor: Tensor, given_away: bool) -> None:
        """The memory of a tensor is read, or given away: the rerun has to have it there."""
        raw = internals.innermost(tensor)
        if plain(raw):
            token = self._reader.read(raw).token
            self._again.append(token)
            self._pin([raw.untyped_storage()])
            if given_away:
                self._overwritten.add(token)
                self._reader.give_away(raw)

    def _run_again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that can't be known by what it reads."""
        known = [t for t in tensors(args, kwargs) if plain(t)]
        self._again += [self._reader.read(t).token for t in known]
        self._pin([t.untyped_storage() for t in known])
        changed = [t for t in schema_of(func).written(args, kwargs) if plain(t)]
        self._rescue(changed)
        out = func(*args, **kwargs)
        for t in changed:
            self._overwritten.add(self._reader.read(t).token)
            self._reader.overwrite(t, self._reader.values.new())
        return out

    def _rescue(self, tensors: list[Tensor]) -> None:
        """Hold what is about to be written to, where no op has computed it."""
        for t in tensors if self._for_graph else ():
            token = self._reader.read(t).token
            if token not in self._producer:
                assert self._reader.outside is not None
                self._reader.outside.append((token, t.untyped_storage().clone()))

    def saves(self, tensor: Tensor) -> Ref | None:
        """The graph would save a tensor: what it is, None where no op has computed that."""
        if not plain(tensor):
            return None
        token = self._reader.read(tensor).token
        self._saved.add(token)
        return ref_of(tensor, token, token) if token in self._producer else None

    def latest(self, ref: Ref) -> Ref:
        """The same tensor, of what its storage contained after writes to other parts of it."""
        while (write := self._writes.get(ref.token)) is not None and are_apart(ref, write):
            ref = ref._replace(token=write.token, slot=write.token)
        return ref

    def contains(self, tensor: Tensor, token: Token) -> bool:
        """Whether the storage of a tensor contains a value, here and now."""
        return self._reader.read(tensor).token == token

    def keeps(self, ref: Ref) -> bool:
        """Whether the policy lets a value be kept."""
        return _keeps(self._decisions.get(ref.token))

    def _note(self, call: OpCall, out: Any, changed: list[Tensor], decision: CheckpointPolicy) -> Op:
        reader, values = self._reader, self._reader.values
        writes = [write_token(values, call, i) for i in range(len(changed))]
        op = Op(call, type(out), outputs_of(values, call, out, changed), writes)
        for t, output in zip(flat(out), op.outputs, strict=True):
            if isinstance(output, Output):
                reader.make(t.untyped_storage(), output.token)
                self._decide(output.token, t, decision)
        for t, token in zip(changed, writes, strict=True):
            before = reader.read(t).token
            self._overwritten.add(before)
            self._writes[before] = ref_of(t, token, token)
            reader.write(t, token)
            # To keep a storage is to keep what is put there later, if nothing is said of that.
            earlier = self._decisions.get(before, decision)
            self._decide(token, t, decision if _keeps(decision) or decision in _MUST else earlier)
        self._ops.append(op)
        self._read.update(call.reads)
        for token in op.values:
            self._producer[token] = op
        if not op.can_be_spared:
            self._again += call.reads
        return op

    def _decide(self, token: Token, tensor: Tensor, decision: CheckpointPolicy) -> None:
        if not _keeps(self._decisions.get(token)):  # the same value may have been computed before
            self._decisions[token] = decision
        self._tensors[token] = weakref.ref(tensor)
        if self._where is not None:
            self._places[token] = self._where()

    def _decide_of_views(self, views: list[Tensor], decision: CheckpointPolicy) -> None:
        """A view has no value of its own: to keep it is to keep what it views.

        What a policy says of a view counts where it is the stronger word. A name is a word about the value itself: it
        can also take back what the policy has said of the op that made it.
        """
        name = current_name()
        for t in views:
            content = self._reader.read(t)
            if not content.made:
                continue
            token = content.token
            if name is not None:
                self._names[token] = name
            before = self._decisions.get(token, CheckpointPolicy.PREFER_RECOMPUTE)
            if before in _MUST and not (name is not None and decision in _MUST):
                continue
            if _keeps(decision) or (name is not None and decision in _MUST):
                self._decisions[token] = decision
                if token in self._saved:
                    self._pin([t.untyped_storage()])

    def _pin(self, storages: list[Any]) -> None:
        """An op that will run again needs what it reads, though no backward may."""
        for storage in storages:
            content = self._reader.of(storage)
            if content.made and _keeps(self._decisions.get(content.token)):
                self._pins[content.token] = storage

    @property
    def matched(self) -> bool:
        """Whether the policy lets anything be kept."""
        return any(map(_keeps, self._decisions.values()))

    def tape(self, results: list[Tensor], saved: Mapping[Token, Any] | None = None) -> Tape:
        """What to keep, now that the run is over and its graph still there.

        **Arguments:**

        - `results`: what the run returned. They are alive whether a backward reads them or not, and the caller may
            write to them.
        - `saved`: what a graph that holds nothing would save: values, and their storages where these are there.
        """
        aliases: dict[int, list[Tensor]] = {}
        for raw in map(internals.innermost, results):
            if plain(raw):
                aliases.setdefault(raw.untyped_storage()._cdata, []).append(raw)
        plan = _Plan(self._producer, lambda t: _keeps(self._decisions.get(t)) and t not in self._overwritten)
        if saved is None:
            self._need_what_is_alive(plan, results)
        else:
            storages = self._pins | {token: storage for token, storage in saved.items() if storage is not None}
            plan.need([*saved, *self._again], storages)
        self._runs = plan.runs
        kept = {}
        with internals.below_all_transforms(), internals.ops_of_remat():
            for token, storage in plan.kept.items():
                kept[token] = Kept(
                    self._producer[token].func,
                    self._names.get(token),
                    self._places.get(token, "unknown"),
                    self._tensor(token, storage),
                    [t.detach() for t in aliases.get(storage._cdata, ())],
                    offload=self._decisions[token] in _OFFLOAD,
                )
        return Tape(self._reader.values, self._ops, self._views, plan.runs, kept, self.matched)

    def _need_what_is_alive(self, plan: _Plan, results: list[Tensor]) -> None:
        returned = self._only_returned(results)
        pins, self._pins = self._pins, {}
        pinned = {id(s) for s in pins.values()}
        alive = {c.token: s for c, s in self._reader.all() if c.made and id(s) not in pinned}
        for token in returned:
            alive.pop(token, None)
        plan.need([*alive, *self._again], alive | pins)
        candidates = [weakref.ref(s) for s in pins.values()]
        pins.clear()
        for ref in candidates:
            storage = ref()
            if storage is not None:  # held by the graph, too
                token = self._reader.of(storage).token
                if token not in returned:
                    alive[token] = storage
                    plan.need([token], alive)

    def _only_returned(self, results: list[Tensor]) -> set[Token]:
        """The results that no backward reads."""
        tokens = {self._reader.read(raw).token: r for r in results if plain(raw := internals.innermost(r))}
        saved: set[int] = set()
        if self._read & tokens.keys():
            nodes = internals.nodes_behind((n for r in results for n in internals.nodes_of(r)), self._since)
            tapes = [tape for n in nodes if isinstance(tape := getattr(n, "tape", None), Tape)]  # of calls inside
            kept = [k.memory for tape in tapes for k in tape.kept.values()]
            saved = {id(t.untyped_storage()) for t in (*[internals.innermost(h) for n in nodes for h in internals.held_by(n) if isinstance(h, Tensor)], *kept) if plain(t)}
        return {
            token
            for token, r in tokens.items()
            if id(internals.innermost(r).untyped_storage()) not in saved
            and (token in self._read or not internals.saves_output(r))
        }

    def _tensor(self, token: Token, storage: Any) -> Tensor:
        """A tensor over a storage, sharing the version counter of the one that the op returned, if it lives."""
        tensor = self._tensors[token]()
        if tensor is not None and tensor.untyped_storage() is storage:
            return tensor.detach()
        for output in self._producer[token].outputs:
            if isinstance(output, Output) and output.token == token:
                with internals.DisableTorchDispatch():
                    return output.over(storage)
        return bytes_of(storage)


class _Plan:
    def __init__(self, producer: dict[Token, Op], may_keep: Callable[[Token], bool]) -> None:
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

    def run(self, op: Op, todo: list[Token]) -> None:
        self.runs.add(op.token)
        for v in op.values:
            self.kept.pop(v, None)
        todo += op.reads


def _keeps(decision: CheckpointPolicy | None) -> bool:
    return decision in _KEEP
