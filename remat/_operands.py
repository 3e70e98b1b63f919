"""The operands of a call: the tensors that its results may depend on, and how its reruns find them again.

An operand is an argument, or a tensor that the function closes over or reads from outside and that is differentiated.
Nodes save the operands. What is kept here holds none of them: it knows their originals by weak reference, to recognise
them wherever the function finds them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._closure import Operand
from remat._errors import CheckpointError, RematError
from remat._graph import Stranger, edges_of, is_made_since, layers_and_tangents
from remat._look import CHANGES, Look
from remat._places import Place, item, places_in_modules, script_module_near, search
from remat._signature import name_of
from remat._tape import Origin, Tape

_TENSORS = (Tensor, torch.nn.Parameter)
NEVER = 1 << 62

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
_CHANGED_SINCE = (
    "remat: a tensor of shape {}, {} that {} reads from outside has been modified by an inplace operation between its "
    "forward run and the backward, where it runs again. Do the backward first, or change a copy: x = x.clone()."
)


def matters(tensor: Tensor) -> bool:
    """Whether a tensor has to be an operand, wherever it is found: derivatives or transforms know of it."""
    return (
        tensor.requires_grad
        or internals.is_wrapper(tensor)
        or (internals.forward_ad_active() and (tensor.is_floating_point() or tensor.is_complex()))
    )


def _out_of_sight(reader: Any) -> str:
    return "a place out of sight" if reader is None else f"a place out of sight ({name_of(reader)} read it first)"


class Original:
    """The tensor of the forward that an operand stands for."""

    also: Sequence[weakref.ref[Tensor]] = ()
    """What else the function may find: in the rerun of an outer one, another tensor stood for it."""
    places: Sequence[Place] = ()
    """Where modules and others hold it."""
    in_modules = False
    """Whether the places are modules'."""
    handed_on = False
    """Whether reruns have to find the operand there: no torch call of the function's reads the tensor itself."""
    position: int | None = None
    """How many calls the signature had when the forward read it first; None where it was given, or not known."""
    origin: Origin | None = None
    """What the tape of a policy knows it by, where it is written to."""
    written = False
    """Whether the function writes to it. Each rerun is given a copy of what the forward found."""
    attributes: dict[str, Any] | None = None
    """What somebody has given to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        if type(tensor) in _TENSORS and tensor.__dict__:
            self.attributes = tensor.__dict__.copy()

    def set_in_modules(self, places: Sequence[Place]) -> None:
        """Modules hold it, in these places."""
        self.places, self.in_modules = places, True


class Plan(NamedTuple):
    """What a rerun finds."""

    pairs: list[tuple[Tensor, Tensor]]
    """Tensors that the function may find and another one stands for, each with that one."""
    fill: list[tuple[Place, Tensor]]
    """The places that are to hold operands."""
    to_write: dict[int, Tensor]
    """By their memory, the operands that the function has to write to."""
    reads: dict[int, int]
    """By identity, what the rerun may read besides what it is given: how many calls the signature had then."""
    survivors: dict[int, dict[tuple[int, Any], int]]
    """By identity, what the forward has made itself and somebody keeps: how it was read."""


class Operands:
    """The operands of a call.

    **Attributes:**

    - `tensors`: the operands, until the derivative is attached.
    - `originals`: what they stand for.
    - `positions`: for each original, the operand that stands for it: in the rerun of an outer function, one may stand
      for several.
    - `given`, `held`: how many the function was given as arguments; and these with those in its cells.
    - `objects`: what the function can reach.
    - `known_places`: by identity, the places that are known from the forward of an outer function.
    - `survivors`: what the forward has made itself, without a derivative, and somebody keeps; and how it read it.
    """

    known_places: Mapping[int, Sequence[Place]] = MappingProxyType({})
    given = held = 0
    stands_in = False
    objects: Sequence[Any] = ()

    def __init__(self, name: str) -> None:
        """`name`: of the function."""
        self.name = name
        self.tensors: list[Tensor] = []
        self.originals: list[Original] = []
        self.positions: list[int] = []
        self._index: dict[int, int] = {}
        self._in_cells: list[tuple[Tensor, int]] = []
        """Tensors in cells that are no operands, and how often each had been written to."""
        self.constants: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._cell_constants: list[tuple[weakref.ref[Tensor], int, int]] = []
        """What the function reads from outside and is no operand: its version, and when the forward read it first."""
        self.survivors: list[tuple[weakref.ref[Tensor], Any]] = []

    def add(self, tensor: Tensor) -> Operand:
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.originals.append(Original(tensor))
        return Operand(index)

    def operand_of(self, tensor: Tensor) -> Any:
        if matters(tensor):
            return self.add(tensor)
        self._in_cells.append((tensor, internals.version(tensor)))
        return tensor

    def find(self, look: Look, tape: Tape | None, since: int) -> None:
        """Add what the run was seen to read, and note what else it depends on.

        **Arguments:**

        - `tape`: what a policy keeps of the run, None without one.
        - `since`: all autograd nodes with higher sequence numbers were made in the run.
        """
        if len(look.copies) > 1:
            shared = internals.two_that_share_memory([look.outside[key].tensor for key in look.copies])
            if shared is not None:
                raise RematError(_SHARED.format(self.name, *(list(t.shape) for t in shared)))
        self._note_cells(look)
        constants = self._add_read(look, tape, since)
        self._find_places(look, constants)
        for key, i in self._index.items() if look.outer is not None else ():
            if (read := look.outside.get(key)) is not None:
                self.originals[i].also = [*map(weakref.ref, look.others_for(read))]
        for key, t in constants.items():
            self.constants.append((weakref.ref(t), look.outside[key].version, look.outside[key].position))

    def _note_cells(self, look: Look) -> None:
        for tensor, version in self._in_cells:
            written = id(tensor) in look.copies
            read: Any = None if written else look.outside.pop(id(tensor), None)
            if read is not None or self.stands_in:
                self._cell_constants.append((weakref.ref(tensor), version, 0 if read is None else read.position))
            if read is not None and internals.version(tensor) != version:
                raise RematError(
                    CHANGES.format(self.name, list(tensor.shape), tensor.dtype, _out_of_sight(read.reader))
                )

    def _add_read(self, look: Look, tape: Tape | None, since: int) -> dict[int, Tensor]:
        """Add what was read and matters. Returns the rest, by identity."""
        constants = {}
        for key, (tensor, value, version, _, reader) in look.outside.items():
            if key in look.copies:
                original = self.originals[self.add(tensor).index]
                original.written = True
                original.origin = None if tape is None else tape.origin(tensor)
            elif internals.version(value) != version:
                raise RematError(CHANGES.format(self.name, list(value.shape), value.dtype, _out_of_sight(reader)))
            elif key in self._index:
                continue
            elif value is not tensor or (matters(value) and not is_made_since(value, since)):
                self.add(tensor)
            else:
                constants[key] = tensor
        return constants

    def _find_places(self, look: Look, constants: dict[int, Tensor]) -> None:
        """See where captured operands are held. What modules hold becomes one: it is taken from `constants`."""
        index = self._index
        captured = {id(t): t for t in self.tensors[self.held :]}
        for key in captured:
            self.originals[index[key]].position = look.outside[key].position
        for key, places in self.known_places.items():  # now they may hold what an outer rerun has put there
            if key in captured:
                self.originals[index[key]].set_in_modules(places)
                del captured[key]
        if captured or constants:
            for key, places in places_in_modules(self.objects, [*captured.values(), *constants.values()]).items():
                if key in captured:
                    del captured[key]
                else:
                    self.originals[self.add(constants.pop(key)).index].position = look.outside[key].position
                self.originals[index[key]].set_in_modules(places)
            for tensor, place in search(self.objects, captured, far=False) if captured else ():
                self._add_place(tensor, place)
            for key in look.handed_on & captured.keys():
                self._must_have_place(key, look)
        held = {id(t) for t in self.tensors[: self.held]}
        for tensor, place in search(self.objects, also) if (also := look.handed_on & held) else ():
            self._add_place(tensor, place)  # it may have been found there, too

    def _add_place(self, tensor: Tensor, place: Place) -> None:
        original = self.originals[self._index[id(tensor)]]
        original.places = (*original.places, place)

    def values(self, look: Look) -> list[Tensor]:
        """The operands as the forward found them."""
        found = []
        for key, tensor in zip(self._index, self.tensors, strict=True):
            value = look.copies.get(key)
            if value is None:
                read = look.outside.get(key)
                value = internals.unwrap_dead(tensor if read is None else read.value)
            found.append(value.clone() if value.is_inference() else value)  # an inference tensor can't be saved
        # In the rerun of an outer function, one tensor may stand for several.
        unique = {id(t): t for t in found}
        position = {key: i for i, key in enumerate(unique)}
        self.positions = [position[id(t)] for t in found]
        return [*unique.values()]

    def add_stranger(self, stranger: Stranger, look: Look, since: int) -> None:
        """Make an operand of a tensor that no torch call was seen to read."""
        tensor = stranger.leaf
        if tensor is None:
            for found, _ in search(self.objects, _All()):
                if any(stranger.edge in edges_of(t, since) for t in layers_and_tangents(found)):
                    tensor = found
                    break
        scripted = script_module_near(self.objects)
        if scripted is not None:
            raise RematError(_SCRIPTED.format(self.name, scripted.original_name))
        if tensor is None or id(tensor) in self._index:
            raise RematError(_NOT_FOUND.format(self.name, stranger)) from None
        self.add(tensor)
        self._must_have_place(id(tensor), look)

    def _must_have_place(self, key: int, look: Look) -> None:
        """Reruns have to find an operand where the forward found it: no torch call reads the tensor itself."""
        original, tensor = self.originals[self._index[key]], self.tensors[self._index[key]]
        original.handed_on = True
        if not original.places:
            original.places = places_in_modules(self.objects, [tensor]).get(key) or [
                place for _, place in search(self.objects, {key})
            ]
        if not original.places and (internals.is_wrapper(tensor) or not tensor.is_leaf):
            read = look.outside.get(key)
            reader = "an op" if read is None or read.reader is None else name_of(read.reader)
            raise RematError(_HANDED_ON.format(self.name, reader, list(tensor.shape), tensor.dtype))

    def plan(self, inputs: list[Tensor]) -> Plan:
        """What a rerun with these inputs finds. What the function writes to is replaced by a copy, in `inputs` too."""
        pairs: list[tuple[Tensor, Tensor]] = []
        fill: list[tuple[Place, Tensor]] = []
        to_write: dict[int, Tensor] = {}
        reads: dict[int, int] = {}
        given: set[int] = set()
        for i, original in enumerate(self.originals):
            operand, tensor = inputs[i], original.ref()
            if original.written:
                operand = inputs[i] = operand.clone()
                if tensor is not None:  # else the function may have made it, out of sight
                    to_write[internals.memory_of(operand)] = operand
            if original.position is None:
                given.add(id(operand))
            else:
                for t in (operand, tensor):  # it may stand for two
                    reads[id(t)] = min(original.position, reads.get(id(t), NEVER))
            for place in original.places:
                if item(*place) is not operand:
                    fill.append((place, operand))
            for ref in (original.ref, *original.also):
                if (found := ref()) is not None and found is not operand:
                    pairs.append((found, operand))
            if tensor is operand:
                continue
            if original.attributes:
                vars(operand).update(original.attributes)
            if original.handed_on and not original.places:
                raise RematError(_HANDED_ON.format(self.name, "an op", list(operand.shape), operand.dtype))
        for key in given & reads.keys():  # it was captured, too
            del reads[key]
        for ref, version, position in (*self.constants, *self._cell_constants):
            constant = ref()
            if constant is not None:
                if internals.version(constant) != version:
                    raise CheckpointError(_CHANGED_SINCE.format(list(constant.shape), constant.dtype, self.name))
                reads[id(constant)] = position
        survivors = {id(kept): how for ref, how in self.survivors if (kept := ref()) is not None}
        return Plan(pairs, fill, to_write, reads, survivors)

    def still_there(self) -> list[Tensor]:
        """The tensors that reruns read from outside or stand for, those that are still there."""
        refs = [original.ref for original in self.originals] + [ref for ref, *_ in self.constants]
        refs += [ref for ref, *_ in self._cell_constants]
        return [t for ref in refs if (t := ref()) is not None]

    def let_go(self, look: Look, reached: AbstractSet[int]) -> None:
        """Called when the derivative is attached and the forward's graph is gone: see what is still there.

        **Arguments:**

        - `reached`: the operands that the results depend on.
        """
        for key in look.read_quietly & self._index.keys():
            if self._index[key] >= self.held and self.positions[self._index[key]] in reached:
                self._must_have_place(key, look)
        self.survivors += look.survivors()
        for i in range(self.given, self.held):
            read = look.outside.get(id(self.tensors[i]))
            if read is not None:
                self.originals[i].position = read.position
            elif self.positions[i] not in reached:
                self.originals[i].position = NEVER
        self.constants = [constant for constant in self.constants if constant[0]() is not None]
        self.objects, self.tensors, self._in_cells = [], [], []
        self._index = {}


class _All:
    """All identities: what is looked for is known by its node."""

    def __contains__(self, key: object) -> bool:
        return True
