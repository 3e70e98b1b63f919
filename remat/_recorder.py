"""Decide which results of ops a forward keeps under a policy.

The forward runs under a `Recorder`, which identifies the value of each op and asks the policy about it. After the run,
the values that a backward reads are those whose storages are still alive, because the graph holds them. From these
values, the recorder goes through the ops backwards. A needed value is kept if the policy allows it. Otherwise its op
has to run again, and the values that the op reads are needed too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from remat import _torch_internals as internals
from remat._context import drawn_from
from remat._dispatch_mode import ops_of_remat
from remat._effects import tensors_in
from remat._errors import RematError
from remat._layers import inner_tensors, innermost, nodes_of, version_of
from remat._names import Kept as KeptName
from remat._names import current_name
from remat._nested_mode import current_call
from remat._ops import CHECKS, DETACH, FACTS, OpFacts, facts_of, flat, plain, storages, tensors
from remat._saved import held_by, nodes_behind, packs, saves_output
from remat._tape import KEEP, Kept, Tape
from remat._values import CONSTANT, Changed, Content, Key, Op, OpMode, Value
from remat.policies._policy import Decide, as_policy

_MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD)
_BARE = (
    "remat: {} runs under a policy and returns a tensor. torch can't differentiate that under a mode, which a policy "
    "needs: let its functions return a tuple, (y,)."
)
_NO_OP = facts_of(CONSTANT)  # stands for an access by Python or a kernel, and for an op without a key
_NUMBERS = (bool, int, float, complex, type(None))


@dataclass(slots=True)
class SelectiveCheckpointContext:
    """Information for a policy, besides the op and its arguments.

    **Attributes:**

    - `is_recompute`: always False: remat asks a policy only in the forward.
    - `op_output`: the result of the op.
    - `name`: the name that `checkpoint_name` is giving to the result, or None.
    - `call`: `(function, args, kwargs)` of the torch call in the user's code that runs the op, as seen inside all
        transforms; or None.

    **Source:** `torch.utils.checkpoint.SelectiveCheckpointContext`.

    Examples:
        >>> import torch
        >>> from remat.compat import CheckpointPolicy, SelectiveCheckpointContext
        >>> def small(ctx, op, *args, **kwargs):
        ...     if ctx.op_output.numel() < 100:
        ...         return CheckpointPolicy.MUST_SAVE
        ...     return CheckpointPolicy.PREFER_RECOMPUTE
        >>> out = torch.ones(3)
        >>> ctx = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        >>> small(ctx, torch.ops.aten.sin.default)
        <CheckpointPolicy.MUST_SAVE: 0>
    """

    is_recompute: bool
    op_output: Any = None
    name: str | None = None
    call: Any = None


def _decide(value: Value, decision: CheckpointPolicy, tensor: Tensor) -> None:
    """Apply a decision to a value. `tensor`: the value, or a view of it."""
    value.decision, value.is_saveable = decision, decision in KEEP
    if not value.counters:
        value.watch(tensor)


def _may_be_kept(content: Content) -> bool:
    return content.made and content.value.is_saveable and not content.value.is_lost


class Recorder(OpMode):
    """Records the ops of a forward, and asks the policy about each."""

    is_about_functions = True

    def __init__(self, policy: Decide, where: Callable[[], str] | None = None) -> None:
        """A recorder of one run.

        **Arguments:**

        - `policy`: the deciding function, `policy.start()`.
        - `where`: returns the current place in the user's code.
        """
        super().__init__()
        self._policy = as_policy(policy)
        self._where = where
        self._by_ops: dict[int, CheckpointPolicy | None] = {}
        self._complaint: str | None = None
        """The text of a TypeError that the policy has raised."""
        self._since = internals.next_sequence_number()
        self._ops: list[Op] = []
        self._by_key: dict[Key, list[Op]] = {}
        self._needed_by_ops: list[Any] = []
        """What the recorded ops need to run again: `_need` of what they read. It is held until the end of the run."""
        self._needs = weakref.WeakKeyDictionary[Any, list[Any]]()
        """What ops need to run again, while nothing is differentiated yet: nothing may ever be. By the storage of the
        op's result, so that it is freed with the result."""
        self._is_differentiated = internals.is_under(internals.TransformType.Grad)
        self._saved: dict[Value, Any] | None = None
        """The values that the graph would save if it held tensors, with `_need` of each; None if it does hold them."""

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        # Torch takes a TypeError inside `x @ y` for "not implemented", and raises another one.
        if isinstance(error, TypeError) and self._complaint not in (None, str(error)):
            raise TypeError(self._complaint) from None

    def _outside(self, storage: Any) -> Value:
        return Value()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts.is_view:
            return self._view(facts, args, kwargs)
        call = self._call(facts, args, kwargs)
        before = drawn_from(args, kwargs) if facts.draws or facts.is_custom else None
        out = self._run_op(facts, args, kwargs)
        if facts.is_opaque and isinstance(out, Tensor) and any(t.requires_grad for t in tensors(args, kwargs)):
            raise RematError(_BARE.format(func))
        changed = []
        if facts.writes:
            changed = facts.written(args, kwargs)
        outputs = (out,) if type(out) is Tensor else flat(out)
        if call is None or not all(plain(t) for t in outputs if isinstance(t, Tensor)):
            self._run_again(changed, args, kwargs)
            return out
        decision = self._by_ops.get(id(func)) or self._decision(out, func, args, kwargs)
        key, reads = call
        op = self._add(Op(facts, key, [content.value for content in reads], type(out)))
        self._note(op, outputs, changed, decision)
        if op.is_view:
            self._decide_of_views(outputs, decision)
            for t in outputs:
                self._content(t.untyped_storage()).value.watch(t)
            return out
        if before is not None and (before := before.drawn_since()) is not None:  # attention may draw nothing
            op.after = before.now()
        if op.runs or decision not in KEEP:
            needs = [need for content in reads if (need := self._need(content))]
            self._is_differentiated = self._is_differentiated or any(t.requires_grad for t in tensors(args, kwargs))
            if op.runs or self._is_differentiated:
                self._needed_by_ops += needs
                return out
            for t in (*outputs, *changed) if needs else ():
                if isinstance(t, Tensor) and not _may_be_kept(content := self._content(t.untyped_storage())):
                    self._needs[content.storage()] = needs
        return out

    def _add(self, op: Op) -> Op:
        op.dtype = torch.get_default_dtype()
        self._ops.append(op)
        self._by_key.setdefault(op.key, []).append(op)
        return op

    def _note(self, op: Op, outputs: Sequence[Any], changed: list[Tensor], decision: CheckpointPolicy) -> None:
        """Record the results and writes of an op."""
        aliases = 0
        found: list[Any] = []
        values: list[Value] = []
        written = [t.untyped_storage() for t in changed]
        for t in outputs:
            if not isinstance(t, Tensor):
                is_number = isinstance(t, _NUMBERS)
                found.append(t if is_number else None)  # a list of tensors, say, would hold them
                op.runs |= not is_number
                self._asked.clear()
                continue
            storage = t.untyped_storage()
            if written and storage in written:
                found.append(Changed(written.index(storage)))
            elif self._knows(storage):
                aliases += 1
            else:
                value = self._value(t, storage, decision)
                self._set(storage, value, True)
                found.append(value)
                values.append(value)
        op.outputs = found
        for t, storage in zip(changed, written, strict=True) if changed else ():
            content = self._content(storage)
            content.value.is_replaced = True
            # A kept storage also keeps a later value in it, unless the policy decides about that value.
            earlier = content.value.decision
            if earlier is None or decision in KEEP or decision in _MUST:
                earlier = decision
            content.value = self._value(t, storage, earlier)
            content.value.is_replaced = content.is_shared  # or will be, unseen
            if op.facts.counts_writes:
                content.value.expect_write()
            op.writes = (*op.writes, content.value)
        op.values = [*values, *op.writes] if changed else values
        op.is_view = 0 < aliases == len(outputs)
        returns_nothing = not op.values and all(x is None for x in found)
        if not op.is_view and (aliases or (returns_nothing and op.facts.func not in CHECKS)):
            op.runs = True

    def _value(self, tensor: Tensor, storage: Any, decision: CheckpointPolicy) -> Value:
        value = Value(len(self._ops) - 1)
        _decide(value, decision, tensor)
        value.layout, value.version = self._layout(tensor), version_of(tensor)
        value.nbytes, value.device = storage.nbytes(), tensor.device
        if self._where is not None:
            value.where = self._where()
        return value

    def _run_again(self, changed: list[Tensor], args: Any, kwargs: Any) -> None:
        """Record an op that has no key, and so always runs again."""
        for content in map(self._content, storages(tensors(args, kwargs))):
            self._read(content)
        for content in map(self._content, storages(changed)):
            content.value.is_replaced = True
            content.value = Value()

    def _read(self, content: Content) -> None:
        self._ops.append(Op(_NO_OP, (), [content.value], runs=True))
        self._needed_by_ops.append(self._need(content))

    def _given_away(self, content: Content, key: Key) -> Value:
        content.value.is_replaced = True
        op = self._add(Op(_NO_OP, key, [content.value]))
        op.outputs = (Value(),)
        return op.outputs[0]

    def _view(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        func = facts.func
        if func is CONSTANT:
            for content in self._elements():
                self._read(content)
            if (key := self._constant(args[0])) is not None:
                op = self._add(Op(_NO_OP, key, []))
                op.outputs = (self._content(args[0].untyped_storage()).value,)
        value = self._content(args[0].untyped_storage()).value if facts.is_inplace_view and plain(args[0]) else None
        out = func(*args, **kwargs)
        if func is DETACH:  # autograd decides how often it runs
            return out
        decision = self._by_op(func)
        if decision is None or decision in KEEP or current_name() is not None:
            self._decide_of_views(flat(out), self._decision(out, func, args, kwargs), args[0])
        if value is not None:
            value.expect_write()
        return out

    def _elements(self) -> Iterable[Content]:
        """The tensors that torch may have read, without an op, to make a new one of their numbers, as of a list."""
        asked, self._asked = [c for c in self._asked if c.storage() is not None], []
        _, args, kwargs = current_call() or (None, (), {})
        lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
        return [*asked, *map(self._content, storages(innermost(t) for t in tensors_in(lists) if t.numel() == 1))]

    def _decide_of_views(self, views: Iterable[Any], decision: CheckpointPolicy, viewed: Any = None) -> None:
        """Apply a decision on a view to the value that it views: a view has no value of its own.

        `viewed`: the tensor that is viewed, if the mode has not done the op yet. The view will share its versions.

        A decision to keep the view applies unless the value already has a `MUST` decision. A decision on a name is
        about the value itself, so with `MUST` it also replaces the decision on the op that made the value.
        """
        name = current_name()
        for t in views:
            content = self._content(t.untyped_storage()) if isinstance(t, Tensor) and plain(t) else None
            if content is None or not content.made:
                continue
            value = content.value
            value.name = name or value.name
            renamed = name is not None and decision in _MUST
            if renamed or (decision in KEEP and value.decision not in _MUST):
                counted = viewed if isinstance(viewed, Tensor) else t
                value.is_replaced |= version_of(counted) > value.version
                _decide(value, decision, counted)
                if _may_be_kept(content):
                    self._needs.pop(content.storage(), None)  # its op need not run again
                if self._saved is not None and value in self._saved:
                    self._saved[value] = self._need(content)

    def _by_op(self, func: Any) -> CheckpointPolicy | None:
        """The policy's decision on an op, if it depends on the op alone; else None."""
        key = id(func)
        if key not in self._by_ops:
            self._by_ops[key] = self._policy.by_op(func)
        return self._by_ops[key]

    def _decision(self, out: Any, func: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        name = current_name()
        if isinstance(name, KeptName):
            return CheckpointPolicy.MUST_SAVE
        if (decision := self._by_op(func)) is not None:
            return decision
        try:
            context = SelectiveCheckpointContext(False, out, name, current_call())
            return self._policy(context, func, *args, **kwargs)
        except TypeError as error:
            self._complaint = str(error)
            raise

    def _need(self, content: Content) -> Any:
        """What a rerun needs to have a value: a pair with its storage if it may be kept, else a list for its op."""
        storage = content.storage()
        return (content.value, storage) if _may_be_kept(content) else self._needs.get(storage, [])

    def _saved_for_ops(self) -> dict[Value, Any]:
        """The values that may be kept and that ops need to run again, with their storages."""
        found: dict[Value, Any] = {}
        seen: set[int] = set()
        todo = [self._needed_by_ops, *self._needs.values(), *(self._saved or {}).values()]
        while todo:
            need = todo.pop()
            if isinstance(need, tuple):
                found[need[0]] = need[1]
            elif id(need) not in seen:
                seen.add(id(need))
                todo += need
        return found

    def saves(self, tensor: Tensor) -> None:
        """Record that the graph would save a tensor. Called instead of saving it if the graph holds no tensors."""
        self._saved = {} if self._saved is None else self._saved
        with internals.DisableTorchFunction():
            for content in map(self._content, storages([tensor])):
                self._saved[content.value] = self._need(content)

    def tape(self, results: list[Tensor]) -> Tape:
        """Decide what to keep, after the run and while its graph exists. `results`: the results of the run."""
        kept: dict[Value, Kept] = {}
        with internals.DisableTorchFunction():
            contents = {key: c for key, c in self._contents.items() if c.storage() is not None}
            memory = {c.value: s for c in contents.values() if c.made and (s := c.storage()) is not None}
            needed: Iterable[Value] | None = self._saved
            if needed is None:
                alone = self._only_returned(results)
                needed = [v for v, s in memory.items() if internals.storage_uses(s._cdata) > 1 and v not in alone]
            memory |= self._saved_for_ops()
            raw = [t for r in results for t in inner_tensors(innermost(r)) if plain(t)]
            with internals.no_transforms(), torch.no_grad(), ops_of_remat():
                for value in self._walk(needed, memory):
                    aliases = [t.detach() for t in raw if t.untyped_storage() is memory[value]]
                    kept[value] = Kept(value, memory[value], aliases)
        self._needs.clear()
        self._needed_by_ops, self._saved = [], None
        return Tape(self._ops, self._by_key, contents, kept, skips=not self.has_looked_inside)

    def _walk(self, needed: Iterable[Value], memory: dict[Value, Any]) -> Iterable[Value]:
        """Return the needed values that are kept. Mark the ops of the other needed values to run again."""
        kept: dict[Value, None] = {}
        todo = [*needed, *(value for op in self._ops if op.runs for value in op.reads)]
        while todo:
            value = todo.pop()
            if value.op < 0 or value in kept or (op := self._ops[value.op]).runs:
                continue
            if value in memory and value.is_saveable and not value.is_lost:
                kept[value] = None
            else:
                op.runs = True
                for v in op.values:
                    kept.pop(v, None)
                todo += op.reads
        return kept

    def _only_returned(self, results: list[Tensor]) -> set[Value]:
        """The values of results that no backward reads: they are alive only because they are returned."""
        memory = [(self._content(s).value, s, r) for r in results for s in storages([innermost(r)])]
        read = {value for op in self._ops for value in op.reads}.intersection(value for value, *_ in memory)
        nodes = [n for r in results for n in nodes_of(r)]
        if read:
            nodes = nodes_behind(nodes, self._since)
        if any(map(packs, nodes)):  # hooks may hold any tensor
            return set()
        tapes = [tape for n in nodes if isinstance(tape := getattr(n, "tape", None), Tape)]  # of nested calls
        held = [h for n in nodes for h in held_by(n)] + [k.memory for t in tapes for k in t.kept.values()]
        saved = {*map(id, storages(innermost(t) for t in held if isinstance(t, Tensor)))}
        alone = [(value, r) for value, storage, r in memory if id(storage) not in saved]
        return {value for value, r in alone if value in read or not saves_output(r)}
