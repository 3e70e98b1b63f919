"""One call of a user's function: run it, look, and run it again with operands.

An operand is a tensor that the results may depend on: an argument, or one that the function closes over or reads from
outside and that is differentiated. A node saves the operands. The call itself holds none of them: it knows their
originals by weak reference, to recognise them wherever the function finds them again.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._closure import ATOMS, Closure, Operand, Rebuilder
from remat._context import NOTHING, Ambient, KeptDraws, Modes, OwnCasts, RandomState, all_of, replayed
from remat._errors import PURITY, CheckpointError, RematError, note_rerun, warn
from remat._graph import Stranger, edges_of, is_made_since, layers_and_tangents, prove
from remat._look import CHANGES, ELSEWHERE, Look, RerunLook, Signature, name_of
from remat._places import Place, filled, item, places_in_modules, script_module_near, search
from remat._recorder import Recorder
from remat._tail import keep_no_tensors
from remat._tape import Origin, Replay, Tape
from remat.random._keyed import Position, resumed, running, suspended

_TENSORS = (Tensor, torch.nn.Parameter)
_NEVER = 1 << 62
rerunning: contextvars.ContextVar[bool] = contextvars.ContextVar("remat_rerunning", default=False)

_NOT_FOUND = (
    "remat: in {}, {}, that the function takes from outside, and remat can't find it: no torch function was seen to "
    "read it, and no cell, module, attribute, container or global in reach holds it. Pass it as an argument."
)
_SCRIPTED = (
    "remat: {} calls a ScriptModule, {}: the tensors that it reads are out of remat's sight. Call the function through "
    "remat.checkpoint(..., use_reentrant=False)."
)
_SHARED = (
    "remat: {} changes tensors of shape {} and {} in place that it was given or captured and that share their memory. "
    "Its rerun would change a copy of each. Give it one of them, and take views of that inside."
)
_HANDED_ON = (
    "remat: in {}, {} reads a tensor of shape {}, {} that the function takes from outside and hands straight to a "
    "transform, an autograd.Function or an extension. No cell, module, attribute, container or global in reach holds "
    "it, so a rerun can't find it. Pass it as an argument."
)
_OTHER_OPERANDS = (
    "remat: the rerun of {} {} on tensor {} of the {} that it was given or that it captured, unlike its forward run. {}"
)
_CHANGED_SINCE = (
    "remat: a tensor of shape {}, {} that {} reads from outside has been modified by an inplace operation between its "
    "forward run and the backward, where it runs again. Do the backward first, or change a copy: x = x.clone()."
)
_DEAD = (
    "remat: the rerun of {} found a tensor of a transform that is over. It is in a place where remat does not look (a "
    "deque, an object with __slots__, a class attribute), or in a cache that the forward has filled "
    "(use_cache=True). Pass it as an argument, or switch the cache off."
)
_NO_TREE = (
    "remat: {} returns results in an object of class {}, which is no tree: their graph is kept as it is, and no memory "
    "is saved. Return a tuple, a dict or a NamedTuple, or make the class known: torch.export.register_dataclass, "
    "or optree.register_pytree_node with namespace='torch'."
)


def is_rerunning() -> bool:
    """Whether the code that asks runs in a rerun, of `remat` or of `remat.checkpoint`.

    A function under remat runs again on backward, with all that it does besides computing: prints, counters, hooks.
    What should happen once asks here.

    **Returns:** True in a rerun, else False.

    Examples:
        >>> import torch
        >>> from remat import is_rerunning, remat
        >>> def f(x):
        ...     print("again" if is_rerunning() else "forward")
        ...     return x.sin()
        >>> remat(f)(torch.ones(3, requires_grad=True)).sum().backward()
        forward
        again
    """
    return rerunning.get()


def _matters(tensor: Tensor) -> bool:
    """Whether a tensor has to be an operand, wherever it is found: derivatives or transforms know of it."""
    return (
        tensor.requires_grad
        or internals.is_wrapper(tensor)
        or (internals.forward_ad_active() and (tensor.is_floating_point() or tensor.is_complex()))
    )


class _Original:
    """The tensor of the forward that an operand stands for."""

    __slots__ = ("also", "attributes", "handed_on", "in_modules", "origin", "places", "position", "ref", "written")

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self.also: list[weakref.ref[Tensor]] = []
        """What else the function may find: in the rerun of an outer one, another tensor stood for it."""
        self.places: list[Place] = []
        """Where modules and others hold it."""
        self.in_modules = False
        """Whether the places are modules'."""
        self.handed_on = False
        """Whether reruns have to find the operand there: no torch call of the function's reads the tensor itself."""
        self.position: int | None = None
        """How many calls the signature had when the forward read it first; None where it was given, or not known."""
        self.origin: Origin | None = None
        """What the tape of a policy knows it by, where it is written to."""
        self.written = False
        """Whether the function writes to it. Each rerun is given a copy of what the forward found."""
        attributes = tensor.__dict__ if type(tensor) in _TENSORS else None
        self.attributes = attributes.copy() if attributes else None
        """What somebody has given to it."""


class Remembered(NamedTuple):
    """What the forward of an outer function knows of a call in it. It holds no tensor and no part of the function."""

    given: list[weakref.ref[Tensor]]
    """What the call was given, and found in cells."""
    found: list[tuple[weakref.ref[Tensor], list[Place]]]
    """What else it read from outside, and where that was."""
    survivors: list[tuple[weakref.ref[Tensor], Any]]
    signature: Signature
    nests: bool
    reached: list[int]
    """Positions, in `given` and then `found`, of those that the results may depend on."""
    result: tuple[list[Any], _tree.PyTreeSpec]
    """What it returned, without tensors."""
    returned: list[tuple[int, torch.Size, torch.dtype]]
    """Position, shape and dtype of the tensors."""


class Call:
    """One call of a user's function, ready to be repeated: `call(*operands)` gives its results.

    **Attributes:**

    - `name`: of the function.
    - `operands`: until the derivative is attached.
    - `random`: the draws to repeat, None where there were none.
    - `tape`: what a policy keeps, None without one.
    - `nests`: whether there are other calls in it.
    - `leaves`: the operands that are differentiated, at any level.
    - `hooked`: the levels of the tensors that the function has put hooks on.
    - `since`: all autograd nodes with higher sequence numbers were made in the call, or later.
    """

    level: int | None = None
    policy: Any = None
    nests = False
    leaves: frozenset[int] = frozenset()
    last_rerun = False
    tape: Tape | None = None
    random: RandomState | KeptDraws | None = None
    _drew_from: Position | None = None
    _key = 0
    _recorder: Recorder | None = None
    _result: tuple[list[Any], _tree.PyTreeSpec] | None = None
    _look: Look | None = None
    _stands_in = False
    _places: Mapping[int, list[Place]] = MappingProxyType({})
    """By identity, the places that are known from the forward of an outer function."""

    def __init__(self, fun: Callable[..., Any], name: str, leaves: list[Any], spec: _tree.PyTreeSpec | None) -> None:
        """A call with arguments.

        **Arguments:**

        - `leaves`, `spec`: the arguments, flat, and their structure.
        """
        self.name = name
        self.operands: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._originals: list[_Original] = []
        self._positions: list[int] = []
        """For each original, the operand that stands for it."""
        self._in_cells: list[tuple[Tensor, int]] = []
        """Tensors in cells that are no operands, and how often each had been written to."""
        closure = self._closure = Closure(self._operand_of)
        self._leaves = [self._add(x) if isinstance(x, Tensor) else closure.take_apart(x) for x in leaves]
        self._given = len(self.operands)
        self._spec = spec
        self._fun = closure.take_apart(fun)
        self._held = len(self.operands)
        self._objects = closure.close()
        self._ambient = Ambient.current()
        self._modes = Modes.current()
        self._variables = contextvars.copy_context()
        self._under_transforms = internals.transforms_active()
        self._has_tangents = internals.forward_ad_active()
        self.signature = Signature()
        self._constants: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._cell_constants: list[tuple[weakref.ref[Tensor], int, int]] = []
        """What the function reads from outside and is no operand: its version, and when the forward read it first."""
        self._survivors: list[tuple[weakref.ref[Tensor], Any]] = []
        self._returned: list[tuple[int, torch.Size, torch.dtype]] = []
        self._rebuilders: list[Rebuilder] = []
        self._replays: list[Replay] = []
        self._rerun_looks: list[RerunLook] = []
        self._reached: set[int] = set()
        """The operands that the results depend on."""
        self._ambiguous: set[int] = set()
        """Those that the graph does not tell from others."""
        self.hooked: frozenset[int] = frozenset()

    def _add(self, tensor: Tensor) -> Operand:
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.operands)
            self.operands.append(tensor)
            self._originals.append(_Original(tensor))
        return Operand(index)

    def _operand_of(self, tensor: Tensor) -> Any:
        if _matters(tensor):
            return self._add(tensor)
        self._in_cells.append((tensor, internals.version(tensor)))
        return tensor

    # The forward.

    def run(
        self, fun: Callable[..., Any], args: Any, kwargs: Any, policy: Any, preserve_rng_state: bool, where: Any
    ) -> Any:
        """Run the function as the user wrote it, once.

        **Arguments:**

        - `policy`: what to keep, or None.
        - `preserve_rng_state`: whether reruns draw what the forward draws.
        - `where`: tells the place in the user's code, for those who ask what is kept; or None.
        """
        tracing = internals.tracing()
        with internals.DisableTorchFunction():
            given = self.operands[: self._given]
            keys = running()
            position = None if keys is None else keys.position()
            random: Any = None
            if preserve_rng_state:
                random = KeptDraws() if tracing else RandomState(given, keyed=keys is not None)
            recorder: Any = random if tracing and random is not None else NOTHING
            if policy is not None and not tracing:
                self.policy = policy
                recorder = self._recorder = Recorder(policy.start(), where)
            look = self._look = Look(self.name, given, random)
        self.since = internals.next_sequence_number()
        with internals.without_saved_tensors_hooks(), recorder, look, OwnCasts():
            out = fun(*args, **kwargs)
        with internals.DisableTorchFunction():
            if random is not None:
                self.random = random.drawn_since(look.drew)
            if keys is not None and keys.position() != position:
                self._drew_from = position
                self._key = self._add(look.read(keys.key)).index
        self.signature = look.signature
        self.nests = look.nests
        self.hooked = frozenset([level for level in look.signature.hooks if level not in (None, ELSEWHERE)])
        return out

    def results_of(self, out: Any) -> _tree.Picked:
        """What the function has computed and is differentiated, in the tree that it returned."""
        results = _tree.Picked(out, self._is_computed)
        for leaf in results.leaves:
            if not isinstance(leaf, Tensor) and type(leaf) not in ATOMS:
                held = (t for t in _attributes_of(leaf) if isinstance(t, Tensor))
                if any(is_made_since(t, self.since) for t in held) and not is_rerunning():
                    warn(_NO_TREE.format(self.name, type(leaf).__name__))
        return results

    def _is_computed(self, result: Tensor) -> bool:
        """Whether a result has a derivative of this call. A tensor from outside has its own, and so has a view of it.

        A view keeps nothing alive but what it views.
        """
        assert self._look is not None
        if id(result) in self._look.outside:
            return False
        if not is_made_since(result, self.since) and not (
            internals.forward_ad_active() and self._look.has_made(result)
        ):
            return False
        if not (result.is_floating_point() or result.is_complex()):
            return False
        if result._is_view():
            base = result._base
            outside = (*self.operands, *(read.value for read in self._look.outside.values()))
            return not any(base is t or base is t._base for t in outside)
        return True

    def attach(self, results: _tree.Picked, attach: Callable[[list[Tensor], list[Tensor]], Any]) -> Any:
        """The results with the derivative that `attach(values, operands)` gives them."""
        look = self._look
        assert look is not None
        self._returned = [(i, t.shape, t.dtype) for i, t in zip(results.positions, results.tensors, strict=True)]
        others = [x for i, x in enumerate(results.leaves) if i not in results.positions]
        if not any(isinstance(x, Tensor) or type(x) not in ATOMS for x in others):
            self._result = [None if isinstance(x, Tensor) else x for x in results.leaves], results.spec
        if self._recorder is not None:
            self.tape = self._recorder.tape([t for t in results.leaves if isinstance(t, Tensor)])
            self._recorder = None
        self._find_operands(look)
        while True:
            operands = self._values(look)
            self.leaves = frozenset([i for i, t in enumerate(operands) if internals.requires_grad_at_any_level(t)])
            try:
                return attach(results.tensors, operands)
            except Stranger as stranger:
                self._add_stranger(stranger)

    def remembered(self) -> Remembered | None:
        """What a rerun of an outer function needs to know to be spared this call. None where it must run."""
        if self._result is None or self.random is not None or self.tape is not None or self._drew_from is not None:
            return None
        if self.signature.hooks or any(original.written for original in self._originals):
            return None
        given, captured = self._originals[: self._held], self._originals[self._held :]
        if any(original.places for original in given):  # it was given a tensor that it has found elsewhere, too
            return None
        found = [(o.ref, o.places if o.in_modules else []) for o in captured]
        found += [(ref, []) for ref, *_ in self._constants]
        unused = self.leaves - self._reached - self._ambiguous
        reached = [i for i, position in enumerate(self._positions) if position not in unused]
        return Remembered(
            [o.ref for o in given],
            found,
            self._survivors,
            self.signature,
            self.nests,
            reached,
            self._result,
            self._returned,
        )

    def stand_in(self, forward: Remembered, outer: Look) -> Any:
        """The results that the call had in the forward of an outer one, where nobody reads their values. None: run it.

        They are filled with NaN, so that a mistake would be loud, and have the derivative that the call would have.
        """
        found = [ref() for ref, _ in forward.found]
        if len(self.operands) != len(forward.given) or any(t is None for t in found):
            return None
        look = self._look = Look(self.name, self.operands[: self._given], None)
        look.begin(outer)
        swapped = [t for ref in forward.given if (t := ref()) is not None and outer.stands_for(t)]
        for t in (*self.operands, *found, *swapped):
            if t is not None:
                look.read(t)
        self._stands_in = True
        self._places = {id(ref()): places for ref, places in forward.found}
        self._survivors = [*forward.survivors]
        self.since = internals.next_sequence_number()
        self.signature = forward.signature
        self.nests = forward.nests
        originals = [*self.operands, *found]
        values = [look.read(t) for i in forward.reached if (t := originals[i]) is not None]
        zeros = [t.flatten()[:0].sum() for t in values if _matters(t) and (t.is_floating_point() or t.is_complex())]
        leaves, spec = forward.result
        leaves = list(leaves)
        for i, shape, dtype in forward.returned:
            value = torch.full(shape, float("nan"), dtype=dtype, device=zeros[0].device)
            for zero in zeros:  # derivatives of every order depend on all operands, as those of the results do
                value = value * torch.exp(zero if dtype.is_complex or not zero.is_complex() else zero.real).to(dtype)
            leaves[i] = value
        return _tree.unflatten(spec, leaves)

    def _find_operands(self, look: Look) -> None:
        """Add to the operands what the run was seen to read, and note what else it depends on."""
        if len(look.copies) > 1:
            shared = internals.two_that_share_memory([look.outside[key].tensor for key in look.copies])
            if shared is not None:
                raise RematError(_SHARED.format(self.name, *(list(t.shape) for t in shared)))
        constants = {}
        index = self._index
        for tensor, version in self._in_cells:
            written = id(tensor) in look.copies
            read: Any = None if written else look.outside.pop(id(tensor), None)
            if read is not None or self._stands_in:
                self._cell_constants.append((weakref.ref(tensor), version, 0 if read is None else read.position))
            if read is not None and internals.version(tensor) != version:
                raise RematError(CHANGES.format(self.name, list(tensor.shape), tensor.dtype, "a place out of sight"))
        for key, (tensor, value, version, *_) in look.outside.items():
            if key in look.copies:
                original = self._originals[self._add(tensor).index]
                original.written = True
                original.origin = None if self.tape is None else self.tape.origin(tensor)
            elif internals.version(value) != version:
                raise RematError(CHANGES.format(self.name, list(value.shape), value.dtype, "a place out of sight"))
            elif key in index:
                continue
            elif value is not tensor or (_matters(value) and not is_made_since(value, self.since)):
                self._add(tensor)
            else:
                constants[key] = tensor
        captured = {id(t): t for t in self.operands[self._held :]}
        for key in captured:
            self._originals[index[key]].position = look.outside[key].position
        for key, places in self._places.items():  # now they may hold what an outer rerun has put there
            if key in captured:
                original = self._originals[index[key]]
                original.places, original.in_modules = places, True
                del captured[key]
        if captured or constants:
            for key, places in places_in_modules(self._objects, [*captured.values(), *constants.values()]).items():
                if key in captured:
                    del captured[key]
                else:
                    self._originals[self._add(constants.pop(key)).index].position = look.outside[key].position
                original = self._originals[index[key]]
                original.places, original.in_modules = places, True
            for tensor, place in search(self._objects, captured, far=False) if captured else ():
                self._originals[self._index[id(tensor)]].places.append(place)
            for key in look.handed_on & captured.keys():
                self._must_have_place(key)
        held = {id(t) for t in self.operands[: self._held]}
        for tensor, place in search(self._objects, also) if (also := look.handed_on & held) else ():
            self._originals[index[id(tensor)]].places.append(place)  # it may have been found there, too
        for key, i in index.items():
            if (read := look.outside.get(key)) is not None:
                self._originals[i].also = [*map(weakref.ref, look.others_for(read))]
        for key, t in constants.items():
            self._constants.append((weakref.ref(t), look.outside[key].version, look.outside[key].position))

    def _values(self, look: Look) -> list[Tensor]:
        """The operands as the forward found them."""
        found = []
        for key, tensor in zip(self._index, self.operands, strict=True):
            value = look.copies.get(key)
            if value is None:
                read = look.outside.get(key)
                value = internals.unwrap_dead(tensor if read is None else read.value)
            found.append(value.clone() if value.is_inference() else value)  # an inference tensor can't be saved
        # In the rerun of an outer function, one tensor may stand for several.
        unique = {id(t): t for t in found}
        position = {key: i for i, key in enumerate(unique)}
        self._positions = [position[id(t)] for t in found]
        return [*unique.values()]

    def _add_stranger(self, stranger: Stranger) -> None:
        """Make an operand of a tensor that no torch call was seen to read."""
        tensor = stranger.leaf
        if tensor is None:
            for found, _ in search(self._objects, _All()):
                if any(stranger.edge in edges_of(t, self.since) for t in layers_and_tangents(found)):
                    tensor = found
                    break
        scripted = script_module_near(self._objects)
        if scripted is not None:
            raise RematError(_SCRIPTED.format(self.name, scripted.original_name))
        if tensor is None or id(tensor) in self._index:
            raise RematError(_NOT_FOUND.format(self.name, stranger)) from None
        self._add(tensor)
        self._must_have_place(id(tensor))

    def _must_have_place(self, key: int) -> None:
        """Reruns have to find an operand where the forward found it: no torch call reads the tensor itself."""
        original, tensor = self._originals[self._index[key]], self.operands[self._index[key]]
        original.handed_on = True
        if not original.places:
            original.places = places_in_modules(self._objects, [tensor]).get(key) or [
                place for _, place in search(self._objects, {key})
            ]
        if not original.places and (internals.is_wrapper(tensor) or not tensor.is_leaf):
            read = None if self._look is None else self._look.outside.get(key)
            reader = "an op" if read is None or read.reader is None else name_of(read.reader)
            raise RematError(_HANDED_ON.format(self.name, reader, list(tensor.shape), tensor.dtype))

    def prove(self, values: Sequence[Tensor], operands: Sequence[Tensor], since: int) -> set[int]:
        """See that the forward depends on nothing but operands. Raises `Stranger`.

        **Returns:** the positions of the operands that it may depend on.
        """
        look = self._look
        assert look is not None
        nodes, reached, ambiguous = prove(values, operands, since, look.has_made)
        self._reached |= reached
        self._ambiguous |= ambiguous
        if look.signature.tail is not None:
            later = [n for n in nodes if internals.sequence_number(n) >= look.tail_number]
            if not keep_no_tensors(later):
                look.signature.tail = None
        if look.sets_hooks:  # they may hold the graph
            internals.forget_saved(nodes)
        return reached | ambiguous

    def compare_reached(self, operands: AbstractSet[int], complete: bool) -> None:
        """See that a rerun depends on the operands that the forward depended on. `complete`: of all its results."""
        if self._has_tangents:  # the graph of a tangent is another one
            return
        operands, before = operands - self._ambiguous, self._reached - self._ambiguous
        if not operands <= before or (complete and operands != before):
            i = min(operands ^ before)
            how = "does not depend" if i in self._reached else "depends"
            raise CheckpointError(_OTHER_OPERANDS.format(self.name, how, i + 1, len(self._positions), PURITY))

    def made_by_rerun(self, leaf: Tensor) -> bool:
        """Whether a rerun has made a leaf itself."""
        return any(look.has_made(leaf) for look in self._rerun_looks)

    def originals(self) -> list[Tensor]:
        """The tensors that reruns read from outside or stand for, those that are still there."""
        refs = [original.ref for original in self._originals] + [ref for ref, *_ in self._constants]
        refs += [ref for ref, *_ in self._cell_constants]
        return [t for ref in refs if (t := ref()) is not None]

    # Reruns.

    @property
    def needs_level(self) -> bool:
        """Whether reruns have to be under a transform, as the forward was.

        There the ops are those of the forward one by one, and a hook is called for one order of derivatives.
        """
        return self._under_transforms and (self.random is not None or self.tape is not None or bool(self.hooked))

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        return self._variables.copy().run(self._rerun, operands)

    def _rerun(self, operands: Sequence[Tensor]) -> list[Tensor]:
        rerunning.set(True)
        inputs = [operands[i] for i in self._positions]
        pairs, fill = self._place(inputs)  # the originals are held, for they are known by their identities
        look = RerunLook(self.name, self.signature, pairs, inputs, self.level)
        look.expect(*self._expected(inputs))
        look.spares_tail = self.tape is None and not internals.tracing()
        self._rerun_looks.append(look)
        rebuild = self._closure.rebuilder(inputs)
        self._rebuilders.append(rebuild)
        draws = NOTHING if self._drew_from is None else resumed(inputs[self._key], self._drew_from)
        keys = suspended() if self._drew_from is None and running() is not None else NOTHING
        with all_of(
            self._ambient.restored(),
            replayed(self.random),
            draws,
            keys,
            self._modes.entered(),
            filled(fill),
            self._replay(operands, inputs),
        ):
            args, kwargs = _tree.unflatten_call(self._spec, [rebuild(x) for x in self._leaves])
            fun = rebuild(self._fun)
            with OwnCasts(), look:
                try:
                    out = fun(*args, **kwargs)
                except Exception as error:
                    if isinstance(error, RuntimeError) and "INTERNAL ASSERT" in str(error):
                        raise RematError(_DEAD.format(self.name)) from error
                    note_rerun(error, self.name)
                    raise
        pairs.clear()
        look.finish()
        leaves, _ = _tree.flatten(out)
        found = []
        for i, shape, dtype in self._returned:
            t = leaves[i] if i < len(leaves) else None
            if not isinstance(t, Tensor) or t.shape != shape or t.dtype is not dtype:
                raise CheckpointError(f"remat: the rerun of {self.name} returned another structure. {PURITY}")
            found.append(t)
        return found

    def _place(self, inputs: list[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Place, Tensor]]]:
        """What is to be put in the place of what.

        **Returns:** each tensor that the function may find and another one stands for in this rerun, with that one;
        and the places that are to hold operands.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        fill: list[tuple[Place, Tensor]] = []
        for i, original in enumerate(self._originals):
            if original.written:
                inputs[i] = inputs[i].clone()
            operand, tensor = inputs[i], original.ref()
            if original.places:
                fill += [(place, operand) for place in original.places if item(*place) is not operand]
            for found in (tensor, *(ref() for ref in original.also)):
                if found is not None and found is not operand:
                    pairs.append((found, operand))
            if tensor is operand:
                continue
            if original.attributes:
                vars(operand).update(original.attributes)
            if original.handed_on and not original.places:
                raise RematError(_HANDED_ON.format(self.name, "an op", list(operand.shape), operand.dtype))
        return pairs, fill

    def _expected(self, inputs: list[Tensor]) -> tuple[dict[int, int], dict[int, Any]]:
        """What a rerun may read besides what it is given, and when; and how it read what it has made itself."""
        reads: dict[int, int] = {}
        given: set[int] = set()
        for original, operand in zip(self._originals, inputs, strict=True):
            if original.position is None:
                given.add(id(operand))
            else:
                tensor = original.ref()
                reads[id(operand)] = original.position
                if tensor is not None:
                    reads[id(tensor)] = original.position
        for key in given & reads.keys():  # it was captured, too
            del reads[key]
        for ref, version, position in (*self._constants, *self._cell_constants):
            tensor = ref()
            if tensor is not None:
                if internals.version(tensor) != version:
                    raise CheckpointError(_CHANGED_SINCE.format(list(tensor.shape), tensor.dtype, self.name))
                reads[id(tensor)] = position
        survivors = {id(t): how for ref, how in self._survivors if (t := ref()) is not None}
        return reads, survivors

    def _replay(self, operands: Iterable[Tensor], inputs: Iterable[Tensor]) -> Any:
        if self.tape is None or internals.tracing():
            return NOTHING
        again = any(
            t.grad_fn is not None or internals.requires_grad_below(t) for t in operands
        )  # in a derivative of it
        replay = Replay(self.tape, self.last_rerun and not again)
        for original, operand in zip(self._originals, inputs, strict=True):
            if original.written:
                replay.stands_for(operand, original.origin)
        self._replays.append(replay)
        return replay

    def settle(self) -> None:
        """Called when the results of a rerun are gone and only its graph is left."""
        for replay in self._replays:
            replay.settle()
        self._replays.clear()

    def clean(self) -> None:
        """Called when the rerun's graph is gone: nothing of the rerun may be left."""
        looks, self._rerun_looks = self._rerun_looks, []
        self._replays.clear()
        for rebuild in self._rebuilders:
            rebuild.clear()
        self._rebuilders.clear()
        for look in looks:
            look.check_suspects()

    def let_go(self) -> None:
        """Called when the derivative is attached and the forward's graph is gone: see what is still there."""
        look = self._look
        assert look is not None
        for key in look.read_quietly & self._index.keys():
            if self._index[key] >= self._held and self._positions[self._index[key]] in self._reached:
                self._must_have_place(key)
        self._survivors += look.survivors()
        for i in range(self._given, self._held):
            read = look.outside.get(id(self.operands[i]))
            if read is not None:
                self._originals[i].position = read.position
            elif not self._stands_in and self._positions[i] not in self._reached:
                self._originals[i].position = _NEVER
        look.outside.clear()
        self._constants = [constant for constant in self._constants if constant[0]() is not None]
        self._look = None
        self._objects, self.operands, self._in_cells = [], [], []
        self._index = {}


def _attributes_of(obj: Any) -> list[Any]:
    """What the attributes of an object hold, in a dict or in slots."""
    slots = [name for kind in type(obj).__mro__ for name in vars(kind).get("__slots__", ())]
    return [*getattr(obj, "__dict__", {}).values(), *(getattr(obj, name, None) for name in slots)]


class _All:
    """All identities: what is looked for is known by its node."""

    def __contains__(self, key: object) -> bool:
        return True
