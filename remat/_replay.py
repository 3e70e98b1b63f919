"""A call of a user's function, and its repetition.

The forward is the user's own call; a `Run` notes which tensors from outside it reads. A rerun is the same call again,
in which an operand stands for each of those tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._closure import Closure
from remat._context import Ambient, KeptDraws, RandomState, replayed
from remat._errors import PURITY, CheckpointError, RematError, call_site, note_rerun
from remat._frozen import Thawer
from remat._log import Log
from remat._recorder import Recorder
from remat._run import ARRAY_CHANGED, CHANGES, CHANGES_SHARED, Run, stranger
from remat._tail import Spared
from remat._tape import Origin, Replay, Tape
from remat.random._keyed import Position, resumed, running, suspended

_OUT_OF_REACH = (
    "remat: the rerun of {} found a tensor of the forward's transforms, which mean nothing to it. It is captured in "
    "a place where remat does not look (a deque, an object with __slots__, a class attribute) and hands it "
    "straight to a transform. Pass it as an argument."
)


class Call:
    """One call of a user's function, ready to be repeated: `call(*operands)` gives its results.

    It holds no operand: they belong to the node that saves them. What it knows of them is their identity in the
    forward, by weak reference, to recognise them wherever the function finds them again.
    """

    def __init__(
        self, fun: Callable[..., Any], name: str, leaves: list[Any], spec: _tree.PyTreeSpec, policy: Any = None
    ) -> None:
        self.name = name
        self.ambient = Ambient.current()
        self.spec = spec
        self.closure = Closure(fun, [None if isinstance(x, Tensor) else x for x in leaves])
        self.positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.originals: list[weakref.ref[Tensor]] = []
        self.returned: list[int] = []
        self.random: RandomState | KeptDraws | None = None
        self._drew_from: Position | None = None
        self._key = 0  # its identity in the forward, then its position among the operands
        self._log = Log()
        self._argument_of: list[int] = []
        self._live: list[bool] = []
        self._keys: list[int] = []
        self._reads: list[Any] = []
        self._unread: set[int] = set()
        self.handed_on: set[int] = set()
        """Operands that no torch call may have read: arguments, and tensors in cells."""
        self.cut: set[int] = set()
        """Operands that the function has replaced and no torch call has read. No gradient goes to them."""
        self._written: set[int] = set()
        self._origins: dict[int, Origin | None] = {}
        self._interior: set[int] = set()
        """Operands that were results of other ops: `is_leaf` tells, and hooks go by it."""
        self.strangers: list[weakref.ref[Tensor]] = []
        """What reruns read from outside that the forward was not seen to read."""
        self._thawed: list[Thawer] = []
        self.policy = policy
        self.since = internals.next_sequence_number()
        """All autograd nodes with higher numbers were made in the call, or later."""
        self.watched = False
        """Whether somebody asks where in the user's code the kept values come from."""
        self._recorder: Recorder | None = None
        self.tape: Tape | None = None
        self._replays: list[Replay] = []
        self._spared: list[Spared] = []
        self.last_rerun = False
        self.level: int | None = None
        self.hooked: set[int] = set()
        self._under_transforms = internals.transforms_active()

    @internals.left_alone_by_dynamo
    def record(self, args: Any, kwargs: Any, leaves: list[Any], preserve_rng_state: bool) -> tuple[Any, Run]:
        """Run the function as the user wrote it: its result, and what was seen."""
        with internals.DisableTorchFunction():
            tensors = [leaves[i] for i in self.positions]
            run = Run(self.name, tensors)
            run.versions = {id(t): run.version(t) for t in tensors}
            run.in_cells = {id(t) for t in self.closure.tensors()}
            keys = running()
            position = None if keys is None else keys.position()
            draws = KeptDraws() if preserve_rng_state and internals.tracing() else None
            run.random = draws or (RandomState(tensors, keyed=keys is not None) if preserve_rng_state else None)
        if self.policy is not None and not internals.tracing():
            self._recorder = Recorder(self.policy.start(), call_site if self.watched else None)
        with internals.without_saved_tensors_hooks(), run, self._recorder or draws or contextlib.nullcontext():
            out = self.closure.call(*args, **kwargs)
        self._log = run.log
        self._log.finish()
        self.hooked = {level for level in run.log.hooks if level is not None}
        with internals.DisableTorchFunction():
            if run.random is not None:
                self.random = run.random.drawn_since()
            if keys is not None and keys.position() != position:
                self._drew_from = position
                self._key = id(run.resolve(keys.key))
        return out, run

    def operands(self, leaves: list[Any], run: Run, values: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        """The tensors that the run depended on: arguments, tensors in cells, and what it read from outside.

        **Arguments:**

        - `leaves`: of the arguments.
        - `values`: the results that are differentiated.
        - `results`: all of them.
        """
        if self._recorder is not None:
            with internals.DisableTorchFunction():
                self.tape = self._recorder.tape(results)
            self._recorder = None
        found = {id(t): t for i in self.positions if (t := leaves[i]) is not None}
        captured = len(found)
        in_cells = self.closure.tensors()
        found.update((id(t), t) for t in in_cells)
        replaced = {id(t) for t in self.closure.assigned()} - found.keys()
        inside = {id(t) for t in values}
        for ref in (*run.outside.values(), *run.constants.values()):
            tensor = ref()
            if tensor is not None and (id(tensor) in run.given or id(tensor) not in inside):
                found.setdefault(id(tensor), tensor)
        read = run.outside.keys() - run.handed_on
        unread = {id(t) for t in in_cells if id(t) not in read and not run.is_made(t)}
        self._unread = {i for i, key in enumerate(found) if key in unread}
        self.cut = {i for i, key in enumerate(found) if key in replaced - read}
        self.handed_on = self._unread | {i for i, key in enumerate(found) if i < captured or key in run.handed_on}
        originals = list(found.values())
        self._key = list(found).index(self._key) if self._drew_from is not None else 0
        self._argument_of = [list(found).index(id(leaves[i])) for i in self.positions]
        self.closure.freeze(originals, captured, run.in_rerun)
        self.originals = [weakref.ref(t) for t in originals]
        self._interior = {i for i, t in enumerate(originals) if t.grad_fn is not None}
        self._live = [id(t) in run.given for t in originals]
        self._keys = list(found)
        self._reads = [run.reads.get(id(t)) for t in originals]
        operands = []
        for i, t in enumerate(originals):
            if id(t) in run.arrays and id(t) not in run.snapshots and run.arrays[id(t)] != internals.array_digest(t):
                raise RematError(ARRAY_CHANGED.format(f"remat: {self.name}", list(t.shape), t.dtype))
            then = run.versions.get(id(t))
            if (then is not None and run.version(t) != then) or id(t) in run.snapshots:
                if id(t) not in run.snapshots:
                    raise RematError(CHANGES.format(self.name, list(t.shape), t.dtype, "a place out of sight"))
                self._written.add(i)
                self._origins[i] = None if self.tape is None else self.tape.origin(t)
                t = run.snapshots[id(t)]
            if i in self.cut:
                t = t.detach()  # the graph that it comes with may be gone
            operands.append(t.clone() if t.is_inference() else t)  # an inference tensor can't be saved
        if pair := internals.two_that_share_memory(originals[i] for i in self._written):
            raise RematError(CHANGES_SHARED.format(f"remat: {self.name}", *(list(t.shape) for t in pair)))
        return operands

    @property
    def needs_level(self) -> bool:
        """Whether the forward ran under a transform, and a rerun has to.

        There the ops are those of the forward one by one, and a hook is called for one order of derivatives.
        """
        return self._under_transforms and (self.random is not None or self.tape is not None or bool(self.hooked))

    def replace(self, positions: set[int]) -> None:
        """In reruns from now on, put the operands at `positions` where the function holds the tensors itself."""
        self.closure.replace(positions)

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        inputs = [t.clone() if i in self._written else t for i, t in enumerate(operands)]
        for i in self._interior:
            if inputs[i].requires_grad and inputs[i].is_leaf:
                inputs[i] = inputs[i].view_as(inputs[i])
        draws = suspended() if self._drew_from is None else resumed(inputs[self._key], self._drew_from)
        again = self.tape is not None and _is_recorded(operands)
        with self.ambient.restored(), replayed(self.random), draws:
            return self._rerun(inputs, again)

    def _rerun(self, operands: list[Tensor], again: bool) -> list[Tensor]:
        run = Run(self.name, [t for t, live in zip(operands, self._live, strict=True) if live], self._log)
        for i, (ref, operand) in enumerate(zip(self.originals, operands, strict=True)):
            original = ref()
            original = operand if original is None else original
            run.take(
                original,
                operand,
                self._keys[i],
                live=self._live[i],
                read=self._reads[i],
                unread=i in self._unread,
                written=i in self._written,
            )
        run.level = self.level
        run.spares_tail = self.tape is None and not internals.tracing()
        replay: Any = contextlib.nullcontext()
        if self.tape is not None and not internals.tracing():
            replay = Replay(self.tape, self.name, self.last_rerun and not again)
            for i in self._written:
                replay.stands_for(operands[i], self._origins[i])
            self._replays.append(replay)
        thaw = self.closure.thawer(operands)
        self._thawed.append(thaw)
        with run, replay, self.closure.restored(operands, thaw) as (fun, *leaves):
            for i, at in zip(self.positions, self._argument_of, strict=True):
                leaves[i] = operands[at]
            args, kwargs = _tree.unboxed(*_tree.unflatten(self.spec, leaves))
            try:
                out, _ = _tree.flatten(fun(*args, **kwargs))
            except Exception as error:
                if isinstance(error, RuntimeError) and "INTERNAL ASSERT" in str(error):
                    raise RematError(_OUT_OF_REACH.format(self.name)) from error
                note_rerun(error, self.name)
                raise
        if run.spared is not None:
            self._spared.append(run.spared)
        run.finish()
        self.strangers += run.outside.values()
        if len(out) <= max(self.returned, default=-1) or not all(isinstance(out[i], Tensor) for i in self.returned):
            raise CheckpointError(f"remat: the rerun of {self.name} returned another structure. {PURITY}")
        return [run.swapped(out[i]) for i in self.returned]

    def suspect(self, tensor: Tensor) -> None:
        """A rerun depends on a tensor that no torch call was seen to make or read. `finish` tells where it was made."""
        self.strangers.append(weakref.ref(tensor))

    def settle(self) -> None:
        """Called when the results of a rerun are gone and only its graph is left."""
        replays, self._replays = self._replays, []
        for replay in replays:
            replay.settle()
        spared, self._spared = self._spared, []
        for calls in spared:
            calls.settle()

    def clean(self) -> None:
        """Called when the rerun's graph is gone: nothing of the rerun may be left."""
        self._replays, self._spared = [], []
        thawed, self._thawed = self._thawed, []
        for thaw in thawed:
            thaw.empty()

    def finish(self) -> None:
        """Called when the derivative is there: what the rerun was not expected to read must have been made by it."""
        strangers, self.strangers = self.strangers, []
        for ref in strangers:
            tensor = ref()
            if tensor is not None:
                raise stranger(self.name, tensor)


def _is_recorded(operands: Iterable[Tensor]) -> bool:
    """Whether a rerun that reads these is recorded: another follows then, in the derivative of this derivative."""
    return any(t.grad_fn is not None or internals.requires_grad_below(t) for t in operands)
