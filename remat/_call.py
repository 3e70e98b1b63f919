"""One call of a user's function: run it, watch the run, and run it again with operands.

Autograd nodes save the operands. The call itself holds no tensor of the forward but those that modules hold too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._closure import ATOMS, Closure, Operand, Rebuilder
from remat._context import Ambient, OwnCasts, RandomState, Variables, entered, modes_of_user, rerunning, together
from remat._errors import PURITY, CheckpointError, RematError, note_rerun
from remat._graph import UnknownInput, prove
from remat._layers import innermost, layers, requires_grad_at_any_level, requires_grad_below, unwrap_dead
from remat._look import Look
from remat._nested_mode import current_look, hooks_unseen
from remat._operands import Operands, matters
from remat._places import Place, filled
from remat._recorder import Recorder
from remat._replay import Replay
from remat._rerun_look import RerunLook
from remat._results import results_of, warn_of_kept
from remat._saved import forget_saved, graph_is_dropped, hooks_set_inside, is_custom, without_saved_tensors_hooks
from remat._tail import Remembered, expanded, keep_no_tensors, returned
from remat._tape import Tape
from remat._traced import Traced
from remat.policies import nothing_saveable
from remat.policies._policy import policy_around
from remat.random._keyed import Position, resumed, running, suspended

_OTHER_OPERANDS = "remat: the rerun of {} {} on {}, unlike its forward run. {}"
_OWN_LEAF = (
    "remat: {} makes a tensor of shape {}, {} that requires grad, and keeps or returns it, or a hook holds it. No "
    "result would have a derivative with respect to it, for each rerun makes its own. Make it outside, or use "
    "remat.checkpoint. If it is made on first use, as by pyro.param, call the function once before, in torch.no_grad()."
)
_SWAPS_SAVED = (
    "remat: {} runs with a policy under allow_mutation_on_saved_tensors, which replaces what the graph has saved: a "
    "rerun with a policy can't see that. Use no policy there, or change a copy: x = x.clone()."
)


class Call:
    """One call of a user's function, ready to be repeated: `call(*operands)` gives its results.

    **Attributes:**

    - `name`: of the function.
    - `operands`: the record of the tensors that its results may depend on.
    - `random`: the draws to repeat; None if there are none.
    - `tape`: the values that a policy keeps; None without a policy.
    - `signature`: what the forward did, for reruns to compare.
    - `leaves`: the operands that are differentiated, at any level.
    - `hooked`: the levels of the tensors that the function has put hooks on.
    - `level`: during a rerun, the level whose derivative it is for; 0 below all transforms.
    - `last_rerun`: with a tape, whether the rerun that is about to come is known to be the last.
    - `since`: all autograd nodes with higher sequence numbers were made in the call, or later.
    - `made_for_reruns`: the leaves that reruns were given in place of operands.
    - `fill`: pairs of a place and the operand that it held in the last rerun. The backward pass puts it there again.
    """

    level: int | None = None
    policy: Any = None
    _followed: Any = None
    leaves: frozenset[int] = frozenset()
    hooked: frozenset[int] = frozenset()
    last_rerun = False
    fill: Sequence[tuple[Place, Tensor]] = ()
    tape: Tape | None = None
    random: RandomState | Traced | None = None
    _drew_from: Position | None = None
    _recorder: Recorder | None = None
    _result: tuple[list[Any], _tree.PyTreeSpec] | None = None
    _look: Look

    def __init__(self, fun: Callable[..., Any], name: str, leaves: list[Any], spec: _tree.PyTreeSpec | None) -> None:
        """A call with arguments. `leaves`, `spec`: these, flattened, and their structure."""
        self.name = name
        operands = self.operands = Operands(name, current_look())
        closure = self._closure = Closure(operands.operand_of)
        given = [operands.add(x) if isinstance(x, Tensor) else x for x in leaves]
        operands.given = len(operands.tensors)  # not what functions among the arguments close over
        self._leaves = [x if type(x) is Operand else closure.take_apart(x) for x in given]
        self._spec = spec
        self._fun = closure.take_apart(fun)
        operands.held = len(operands.tensors)
        operands.objects = closure.close()
        self._ambient = Ambient.current()
        self._modes = modes_of_user()
        self._variables = Variables()
        self._was_differentiating = internals.differentiating()
        self._has_tangents = internals.forward_ad_active()
        self._returned: list[tuple[int, torch.Size, torch.dtype, int | None]] = []
        self._replays: list[Replay] = []
        self._reruns: list[tuple[RerunLook, Rebuilder]] = []
        self.made_for_reruns: list[weakref.ref[Tensor]] = []
        self._reached: set[int] = set()
        """Positions of the operands that the results depend on."""
        self._ambiguous: set[int] = set()
        """Positions of operands that the graph can't tell apart."""
        self._own_leaves: list[weakref.ref[Tensor]] = []
        """The leaves that the function made, and on which the results depend."""

    # The forward.

    def run(
        self, fun: Callable[..., Any], args: Any, kwargs: Any, policy: Any, preserve_rng_state: bool, where: Any
    ) -> Any:
        """Run the function as the user wrote it, once.

        **Arguments:**

        - `policy`: which results to keep, or None.
        - `preserve_rng_state`: whether reruns draw what the forward draws.
        - `where`: returns the current line of the user's code, to list kept values; or None.
        """
        tracing = internals.tracing()
        with internals.DisableTorchFunction():
            given = self.operands.tensors[: self.operands.given]
            keys = running()
            position = None if keys is None else keys.position()
            random: Any = None
            recorder: Any = internals.NOTHING
            if tracing:
                # In forward mode a compiled rerun has other ops than the forward, so it can't use kept results.
                follows = policy is not None and internals.compiling() and not self._has_tangents
                random = recorder = Traced(policy.start() if follows else None, preserve_rng_state)
            elif preserve_rng_state:
                random = RandomState(given, keyed=keys is not None)
            if policy is not None and not tracing and not graph_is_dropped():
                if internals.mutation_of_saved_allowed():
                    raise RematError(_SWAPS_SAVED.format(self.name))
                self.policy = policy
                recorder = self._recorder = Recorder(policy.start(), where)
            look = self._look = Look(self.name, given, random)
        self.since = look.since
        functionalizes = internals.is_under(internals.TransformType.Functionalize)
        if not (tracing or self._has_tangents or functionalizes):  # these decompose an autograd.Function
            self._followed = nothing_saveable if policy is None else policy
        around = policy_around.set(self._followed)
        try:
            with without_saved_tensors_hooks(), recorder, look, OwnCasts():
                out = fun(*args, **kwargs)
        finally:
            policy_around.reset(around)
            self._closure.note_changes()
        with internals.DisableTorchFunction():
            if random is not None:
                self.random = random.drawn_since(look.drew)
            if keys is not None and keys.position() != position:
                self._drew_from = position
                self._key = self.operands.add(look.read(keys.key)).index
        self.signature = look.signature
        if look.signature.hooks:
            self.hooked = frozenset([level for _, level in look.signature.hooks if level >= 0])
        return out

    def results_of(self, out: Any) -> _tree.Picked:
        """The differentiated tensors that the function has computed, picked from the tree that it returned."""
        look = self._look
        results = results_of(out, look, self.operands.tensors)
        if look.outer is not None:
            for i, x in enumerate(results.leaves):
                if isinstance(x, Tensor) and i not in results.positions and not look.has_made(x):
                    look.outer.read(x)  # it may come from outside the outer function
        return results

    def attach(self, results: _tree.Picked, attach: Callable[[list[Tensor], list[Tensor]], Any]) -> Any:
        """The results, with the derivative that `attach(values, operands)` gives them.

        A captured tensor that only the proof finds becomes an operand. Then `attach` is called again.
        """
        look = self._look
        pairs = zip(results.positions, results.tensors, strict=True)
        self._returned = [(i, t.shape, t.dtype, look.label_of(t)) for i, t in pairs]
        if look.outer is not None:
            self._like = [*map(returned, results.tensors)]
            self._layers = {id(layer) for t in results.tensors for layer in layers(t)}
            others = [x for i, x in enumerate(results.leaves) if i not in results.positions]
            if not any(isinstance(x, Tensor) or type(x) not in ATOMS for x in others):
                self._result = [None if isinstance(x, Tensor) else x for x in results.leaves], results.spec
        if self._recorder is not None:
            self.tape = self._recorder.tape([t for t in results.leaves if isinstance(t, Tensor)])
            self._recorder = None
        self.operands.find(look, self.tape)
        lowest = internals.lowest_recorded_level()
        while True:
            operands = self.operands.values(look)
            self.leaves = frozenset([i for i, t in enumerate(operands) if requires_grad_at_any_level(t, lowest)])
            try:
                return attach(results.tensors, operands)
            except UnknownInput as unknown:
                self.operands.add_unknown(unknown, look)

    def remembered(self, outer: Look) -> Remembered | None:
        """The record with which a rerun of the outer function can skip this call. None if the call must run there."""
        if self._result is None or self.random is not None or self.tape is not None or self._drew_from is not None:
            return None
        # The hooks of torch.utils.checkpoint count what they see.
        if hooks_set_inside() or self._closure.changed or any(o.copied for o in self.operands.originals):
            return None
        like = [r for r in self._like if r is not None]
        if len(like) < len(self._like):
            return None
        operands = self.operands
        given, captured = operands.originals[: operands.held], operands.originals[operands.held :]
        if any(original.places for original in given):  # a given tensor was also found in another place
            return None
        if any(original.needs_place for original in captured):  # a rerun may make the place
            return None
        found = [o.ref for o in captured] + [c.ref for c in operands.constants if not c.in_cell]
        if any((t := ref()) is not None and outer.has_made(t) for ref in found):  # a rerun makes another
            return None
        cells = [c.ref for c in operands.constants if c.in_cell]
        cells = [ref for ref in cells if (t := ref()) is None or not outer.has_made(t)]
        unused = self.leaves - self._reached - self._ambiguous
        unread = [i for i, original in enumerate(given) if not original.is_read]
        reached = [i for i in range(len(operands.originals)) if i not in unused and i not in unread]
        return Remembered(
            [o.ref for o in given],
            found,
            cells,
            operands.survivors,
            self.signature,
            unread,
            reached,
            self._result,
            self._returned,
            like,
            self._followed,
        )

    def skipped(self, forward: Remembered, outer: RerunLook) -> Any:
        """Stand-ins for the results, for an outer rerun that does not read their values. None: the call must run.

        They are filled with NaN, so that a mistake would be loud. They have the derivative of the call.
        """
        operands = self.operands
        found = (t for ref in forward.found if (t := ref()) is not None)
        originals = [*operands.tensors, *filter(outer.expects, found)]
        given = len(forward.given)
        if len(operands.tensors) != given or len(originals) != given + len(forward.found):
            return None
        if not {id(ref()) for ref in forward.cells} <= operands.in_cells.keys():
            return None
        look = Look(self.name, operands.tensors[: operands.given], None)
        look.begin(outer)
        for i, t in enumerate(originals):
            if i not in forward.unread:
                look.read(t)
        self.since = look.since
        values = [unwrap_dead(look.read(originals[i])) for i in forward.reached]
        values = [t for t in values if matters(t) and (t.is_floating_point() or t.is_complex())]
        if not values or any(t.layout is not torch.strided or not innermost(t).numel() for t in values):
            return None  # torch can't flatten these, or multiply scalars under a vmap over nothing
        zeros = [t.flatten()[:0].sum().real for t in values]
        leaves, spec = forward.result
        leaves = list(leaves)
        for (i, shape, dtype, _), like in zip(forward.returned, forward.like, strict=True):
            value = torch.full((), float("nan"), dtype=dtype, device=zeros[0].device)
            for zero in zeros:  # derivatives of every order must depend on all operands
                value = value * torch.exp(zero).to(dtype)
            leaves[i] = expanded(value, shape, like)
            if leaves[i] is None:
                return None
        self._look = look
        self._closure.note_changes()
        operands.is_skipped = True
        operands.survivors = [*forward.survivors]
        self.signature, self._followed = forward.signature, forward.followed
        return _tree.unflatten(spec, leaves)

    def prove(self, values: Sequence[Tensor], operands: Sequence[Tensor], since: int) -> set[int]:
        """Check that the results of the forward depend on operands only. Raises `UnknownInput`.

        **Returns:** the positions of the operands that they may depend on.
        """
        look = self._look
        nodes, reached, ambiguous, *_ = prove(values, operands, since, self._is_own)
        self._reached |= reached
        self._ambiguous |= ambiguous
        if (self.tape is not None or look.outer is not None) and any(map(is_custom, nodes)):
            look.reads_unseen = True
            if look.outer is not None:
                look.outer.reads_unseen = True
        if self.tape is not None:
            self.tape.skips = self.tape.skips and not look.reads_unseen
        if look.signature.tail is not None:
            later = {n for n in nodes if internals.sequence_number(n) >= look.tail_number}
            if not keep_no_tensors(later - look.tail_nodes):
                look.signature.tail = None
        depends_on = reached | ambiguous
        if look.sets_hooks and depends_on and not internals.tracing():  # hooks may hold the graph, which is dropped
            forget_saved(nodes)
        return depends_on

    def _is_own(self, leaf: Tensor) -> bool:
        """Whether the function made this leaf in the forward."""
        is_own = self._look.has_made(leaf)
        if is_own:
            self._own_leaves.append(weakref.ref(leaf))
        return is_own

    def compare_reached(self, operands: AbstractSet[int], complete: bool) -> None:
        """Check that a rerun depends on the operands of the forward. `complete`: whether all results were walked."""
        if self._has_tangents or internals.tracing():  # tangents have another graph, and `make_fx` keeps the forward's
            return
        # A stand-in depends on all operands that the call may depend on.
        lost = self._reached - operands if complete and not self.operands.is_skipped else set()
        # In a rerun, the results of a nested call share one node.
        new = set() if self.signature.nests else operands - self._reached
        if unlike := (lost | new) - self._ambiguous:
            operand = min(unlike)
            how = "does not depend" if operand in self._reached else "depends"
            given = self.operands.given
            is_given = operand < given
            which = f"tensor {operand + 1} of the {given} in its arguments" if is_given else "a tensor that it captured"
            raise CheckpointError(_OTHER_OPERANDS.format(self.name, how, which, PURITY))

    def made_by_rerun(self, leaf: Tensor) -> bool:
        """Whether this leaf was made by a rerun, or for one."""
        return any(ref() is leaf for ref in self.made_for_reruns) or any(
            look.has_made(leaf) for look, _ in self._reruns
        )

    # Reruns.

    @property
    def hands_on(self) -> bool:
        """Whether its derivative runs inner backward passes, out of the user's sight: NOTE [handed on]."""
        signature = self.signature
        return signature.nests > 0 and not signature.shows_nodes and not internals.tracing()

    @property
    def needs_level(self) -> bool:
        """Whether reruns must run under a transform that differentiates, because the forward did.

        Only there do they run exactly the ops of the forward, call a hook for one order of derivatives, and not see
        inside an autograd.Function.
        """
        if not self._was_differentiating:
            return False
        if self.operands.reads_inference:  # below all transforms, autograd can't save it
            return True
        if internals.compiling():  # the compiler's tensors call `to` where others call `float`
            return True
        return self.random is not None or self.tape is not None or bool(self.hooked) or self.signature.has_custom

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        return self._variables.run(self._rerun, operands)

    def _rerun(self, operands: Sequence[Tensor]) -> list[Tensor]:
        rerunning.set(True)
        policy_around.set(self._followed)
        inputs = [*operands]
        plan = self.operands.plan(inputs)
        look = RerunLook(self.name, self.signature, plan, inputs, self.level)
        look.skips_tail = self.tape is None and not internals.tracing()
        rebuild = Rebuilder(self._closure, inputs)
        self._reruns.append((look, rebuild))
        random = internals.NOTHING if self.random is None else self.random.replayed()
        draws = internals.NOTHING if self._drew_from is None else resumed(inputs[self._key], self._drew_from)
        keys = suspended() if self._drew_from is None and running() is not None else internals.NOTHING
        modes, replay = entered(self._modes), self._replay(operands, inputs)
        places, hooks = filled(plan.fill), hooks_unseen()
        cells = rebuild.as_at_call()
        with together(self._ambient.restored(), random, draws, keys, modes, places, hooks, cells, replay):
            args, kwargs = _tree.unflatten_call(self._spec, [rebuild(x) for x in self._leaves])
            fun = rebuild(self._fun)
            look.objects = fun, args, kwargs
            with OwnCasts(), look:
                try:
                    out = fun(*args, **kwargs)
                except Exception as error:
                    note_rerun(error, self.name)
                    raise
        plan.swaps.clear()
        plan.alive.clear()
        reached = self._reached | self._ambiguous
        of_each = enumerate(zip(self.operands.originals, inputs, strict=True))
        stays = [(o, t) for i, (o, t) in of_each if i in reached or not (t.requires_grad or o.copied)]
        self.fill = [(place, t) for o, t in stays for place in o.places] + self.operands.held_in_modules
        look.finish()
        leaves, _ = _tree.flatten(out)
        found = []
        for i, shape, dtype, label in self._returned:
            t = leaves[i] if i < len(leaves) else None
            if not isinstance(t, Tensor) or t.shape != shape or t.dtype is not dtype:
                raise CheckpointError(f"remat: the rerun of {self.name} returned another structure. {PURITY}")
            if label is not None and look.label_of(t) not in (label, None):
                raise CheckpointError(f"remat: the rerun of {self.name} returned another tensor. {PURITY}")
            found.append(t)
        return found

    def _replay(self, operands: Iterable[Tensor], inputs: Iterable[Tensor]) -> Any:
        if self.tape is None or internals.tracing():
            return internals.NOTHING
        # Whether this rerun is differentiated, so that another one will follow.
        again = any(t.grad_fn is not None or requires_grad_below(t) for t in operands)
        replay = Replay(self.tape, self.last_rerun and not again)
        for original, operand in zip(self.operands.originals, inputs, strict=True):
            replay.stands_for(operand, original.origins)
        self._replays.append(replay)
        return replay

    def settle(self) -> None:
        """Called when the results of a rerun are freed and only its graph is left."""
        for replay in self._replays:
            replay.settle()
        self._replays.clear()

    def clean(self, operands: Sequence[Tensor]) -> None:
        """Called when the graph of a rerun with these operands is freed. Drops all else that belongs to the rerun."""
        reruns, self._reruns = self._reruns, []
        self.fill, self.made_for_reruns = (), []
        self._replays.clear()
        for _, rebuild in reruns:
            rebuild.clear()
        for look, _ in reruns:
            look.check_what_is_left(operands, self.operands)

    def let_go(self, out: Any) -> None:
        """Called after the derivative is attached, when the forward's graph is freed. `out`: what the call returns."""
        look = self._look
        look.tail_nodes.clear()  # they hold the graph
        if not self._returned:
            return
        kept = [leaf for ref in self._own_leaves if (leaf := ref()) is not None]
        if kept and self._reached:  # else the results still have the graph that leads to these
            raise RematError(_OWN_LEAF.format(self.name, list(kept[0].shape), kept[0].dtype))
        self.operands.let_go(look, self._reached)
        # A hook of the user's, or what is still alive, may lead to results of the tail: they may be read.
        if look.signature.hooked_by_user or any(ref() is not None for ref in look.tail_results):
            look.signature.tail = None
        # A rerun of the outer function may read what this call keeps, and has to set the hooks again.
        has_hooks = look.sets_hooks or look.signature.shows_nodes
        if look.outer is not None and (has_hooks or look.labels.any_alive(self._layers)):
            self._result = None
        look.outside = dict.fromkeys(look.outside)  # their identities stay known
        if look.outer is None and self._reached and not (rerunning.get() or internals.tracing() or self._has_tangents):
            warn_of_kept(out, look)
        del self._look
