"""The operands of a call: the tensors that its results may depend on, and how its reruns find them again.

An operand is a tensor among the arguments, or a differentiated tensor that the function closes over or reads from
outside. Autograd nodes save the operands. This module keeps only weak references to their originals, the tensors that
the forward found, so that a rerun recognises an original and reads the operand in its place. Of a constant, a tensor
without a derivative, a module may later hold another one in its place. So those that modules hold are kept as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from remat import _torch_internals as internals
from remat._closure import Operand
from remat._errors import CheckpointError, RematError, changes, not_replaced
from remat._graph import UnknownInput, edges_of, is_from_before, is_made_since
from remat._labels import Read, Survivor
from remat._layers import (
    alias_of,
    layers_and_tangents,
    requires_grad_at_any_level,
    unpack_dual,
    unwrap_dead,
    version_of,
)
from remat._look import Look
from remat._memory import memory_of, two_that_share_memory
from remat._ops import is_plain
from remat._places import Place, is_in_reach, places_in_modules, script_module_near, search
from remat._signature import name_of
from remat._tape import Origin, Tape

_NOT_FOUND = (
    "remat: in {}, {}. The function takes it from outside, and remat can't find it: no torch function was seen to read "
    "it, and no cell, module, attribute, container or global in reach holds it. Pass it as an argument."
)
_MADE_ANEW = (
    " Under functionalize, torch makes a view of a tensor that was changed in place anew, from that tensor: let the "
    "function read view.clone(), made outside."
)
_NOT_SEEN = (
    "remat: in {}, {}. The rerun of a checkpoint around reads another tensor in its place, but no torch function was "
    "seen to read it: an autograd.Function, say, gets it directly. Pass it as an argument. Or it is a leaf that was "
    "made in inference mode: pass x.clone()."
)
_SCRIPTED = (
    "remat: {} calls a ScriptModule, {}, and remat can't see which tensors that reads. Call the function through "
    "remat.checkpoint(..., use_reentrant=False)."
)
_SHARED = (
    "remat: {} was given or captured two tensors of shape {} and {} that share memory, and changes that in place. Its "
    "rerun would find a separate copy of each. Pass one of them, and take views of it inside."
)
_CHANGED_SINCE = (
    "remat: a tensor of shape {}, {} that {} reads from outside has been modified by an inplace operation between its "
    "forward run and the backward, where it runs again. Do the backward first, or change a copy: x = x.clone()."
)


def matters(tensor: Tensor) -> bool:
    """Whether an outside tensor must be an operand: it is differentiated, wrapped, or carries a tangent."""
    if tensor.requires_grad or internals.is_wrapper(tensor):
        return True
    if not internals.forward_ad_active():
        return False
    with internals.no_transforms():
        return unpack_dual(tensor).tangent is not None


def of_kind(kind: type[Tensor], tensor: Tensor) -> Tensor:
    """The tensor as an instance of the class that the user saw: autograd nodes and transforms return plain tensors."""
    if type(tensor) is kind or not is_plain(kind):
        return tensor
    if kind is Parameter:
        return internals.as_parameter(tensor) if type(tensor) is Tensor else tensor
    if kind is Tensor and (isinstance(tensor, Parameter) or not is_plain(type(tensor))):
        return tensor
    return tensor.as_subclass(kind)


class Found:
    """A tensor as user code found or returned it: a weak reference, its class, and the attributes set on it."""

    def __init__(self, tensor: Tensor) -> None:
        self.ref, self.kind = weakref.ref(tensor), type(tensor)
        # The attributes of other classes are what their tensors consist of.
        self.attributes = tensor.__dict__.copy() if is_plain(self.kind) else {}

    def as_found(self, value: Tensor) -> Tensor:
        """A value that is read in its place, with its class and attributes."""
        if value is self.ref():
            return value
        value = of_kind(self.kind, value)
        vars(value).update(self.attributes)
        return value


class Original(Found):
    """A tensor that the forward found. An operand replaces it in reruns."""

    also: Sequence[weakref.ref[Tensor]] = ()
    """In an outer rerun, where the tensor is a stand-in: the tensors that the function may find instead."""
    places: Sequence[Place] = ()
    """Where modules, containers, attributes or globals hold it."""
    needs_place = False
    """Whether reruns must put the operand into its places: no torch call of the function reads it directly."""
    is_read = True
    """Whether the forward read it, perhaps unseen."""
    label: int | None = None
    """What the signature calls it: NOTE [labels]."""
    origins: Sequence[Origin | None] = ()
    """Its origins on the tape of a policy."""
    copied = False
    """Whether the function writes in its storage. Then each rerun gets a copy of its earlier value."""
    written = False
    """Whether the function writes to it."""

    def add_places(self, places: Iterable[Place]) -> None:
        self.places = (*self.places, *places)


class Constant(NamedTuple):
    """A tensor from outside that is not an operand: no result has a derivative with respect to it."""

    ref: weakref.ref[Tensor]
    version: int
    label: int | None
    in_cell: bool = False
    """Whether a cell of the function holds it."""


class Plan(NamedTuple):
    """The tensors that a rerun may read, and those that operands replace."""

    swaps: dict[int, tuple[Tensor, Tensor]]
    """By identity, each tensor that the function may find, with the operand that replaces it."""
    fill: list[tuple[Place, Tensor]]
    """The places that must hold operands during the rerun."""
    to_write: dict[int, Tensor]
    """By memory, the operands that the rerun must write to, as the forward did."""
    labels: dict[int, int | None]
    """By identity, the tensors that the rerun may read, and what the signature calls them."""
    survivors: dict[int, tuple[int | None, int]]
    """By identity, tensors that the forward made and that are still alive: label, and version when they were made."""
    alive: list[Tensor]
    """All tensors that are known by identity, kept alive so that no other tensor can get the identity of one."""


class Operands:
    """The operands of a call.

    **Attributes:**

    - `tensors`: the operands, until the derivative is attached. In an outer rerun, the stand-ins.
    - `originals`: one for each of these: the tensor that the forward found.
    - `given`, `held`: how many of the originals are arguments; how many are arguments or in cells.
    - `objects`: where to search for captured tensors: the objects in reach of the function.
    - `is_skipped`: whether the call is skipped: see `Call.skipped`.
    - `constants`: the other tensors from outside.
    - `held_in_modules`: the places in modules of constants, with these: modules may hold others later.
    - `survivors`: tensors that the forward made without a derivative and read, and that are still alive.
    """

    given = held = 0
    is_skipped = False
    objects: Sequence[Any] = ()

    def __init__(self, name: str, outer: Look | None) -> None:
        """`name`: of the function. `outer`: the look at the surrounding run."""
        self.name = name
        self.tensors: list[Tensor] = []
        self.originals: list[Original] = []
        self._index: dict[int, int] = {}
        self._outer = outer
        self._stand_ins: dict[int, int] = {}
        """In an outer rerun, the identity of each tensor that has a stand-in, and of that."""
        self.in_cells: dict[int, tuple[Tensor, int]] = {}
        """By identity, tensors in cells that are not differentiated, and their versions."""
        self.constants: list[Constant] = []
        self.held_in_modules: list[tuple[Place, Tensor]] = []
        self.survivors: list[Survivor] = []

    def add(self, tensor: Tensor) -> Operand:
        """Make an operand of a tensor, unless it is one."""
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.originals.append(Original(tensor))
        return Operand(index)

    def operand_of(self, tensor: Tensor) -> Any:
        outer = self._outer
        value = tensor if outer is None else outer.stand_in(tensor)
        # As in the forward: in the rerun of a checkpoint, as many operands are saved.
        if id(value) in self._index or matters(tensor):
            return self.add(value)
        self.in_cells[id(value)] = value, version_of(value)
        return tensor

    def find(self, look: Look, tape: Tape | None) -> None:
        """Add the outside tensors that must be operands, and note the others that the run read.

        `tape`: the values that a policy keeps; None without a policy.
        """
        self._check_memory([look.outside[key].value for key in look.copies])
        self._stand_ins = {id(t): stand_in for t, stand_in in self._outer_originals()}
        constants = self._add_read(look)
        self._find_places(look, constants)
        for key, i in self._index.items():
            if (read := look.outside.get(key)) is not None:
                original = self.originals[i]
                original.label = read.label
                original.origins = () if tape is None else tape.origins(read.value, original.copied)
        for t, stand_in in self._outer_originals():
            if (index := self._index.get(stand_in)) is not None:
                self.originals[index].also = [*self.originals[index].also, weakref.ref(t)]
        self.constants += [Constant(weakref.ref(r.value), r.version, r.label) for r in constants.values()]

    def _check_memory(self, changed: Iterable[Tensor]) -> None:
        """Raise an error if tensors to which the run writes share memory."""
        shared = two_that_share_memory(changed)
        if shared is not None:
            raise RematError(_SHARED.format(self.name, *(list(t.shape) for t in shared)))

    def _changed(self, read: Read, look: Look) -> RematError:
        self._check_memory([*(look.outside[key].value for key in look.copies.written), read.value])
        first = "" if read.reader is None else f" ({name_of(read.reader)} was the first to read it)"
        where = f"an unknown line{first}, by an op whose name does not say so (an embedding with max_norm?)"
        return changes(self.name, read.value, where=where)

    def _add_read(self, look: Look) -> dict[int, Read]:
        """Add each tensor that was read and must be an operand. Returns the other reads, by identity of the tensor."""
        constants, since = {}, look.since
        stand_ins = {*self._stand_ins.values()}
        for key, read in [*look.outside.items()]:
            value, before = read.value, read.version
            if (in_cell := self.in_cells.get(key)) is not None:
                before = in_cell[1]
            if key in look.copies:
                original = self._capture(read)
                original.copied, original.written = True, key in look.copies.written
            elif version_of(value) != before:
                if self._is_outside(value, since):
                    raise self._changed(read, look)
            elif key in self._index:
                continue
            elif key in stand_ins or (look.in_checkpoint and look.outer.is_saved(value)):
                self._capture(read)  # a checkpoint's hooks must save as many in its rerun, which may read a copy
            elif in_cell is not None or (look.in_checkpoint and not value.requires_grad):
                self.constants.append(Constant(weakref.ref(value), before, read.label, in_cell is not None))
            elif matters(value) and self._is_outside(value, since):
                if key in look.wrapped_inside and self._is_made_unseen(value, since):
                    del look.outside[key]
                    look.labels.note_plain(value, None)
                else:
                    self._capture(read)
            else:
                constants[key] = read
        for key, (tensor, before) in self.in_cells.items() if self.is_skipped else ():  # its reruns may read them
            if key not in look.outside and key not in self._index:
                self.constants.append(Constant(weakref.ref(tensor), before, look.number_of(tensor), True))
        return constants

    def _is_outside(self, tensor: Tensor, since: int) -> bool:
        """Whether the run did not make this tensor, out of sight. One of another thread may have any number."""
        return is_from_before(tensor, since) or is_in_reach(tensor, self.objects)

    def _is_made_unseen(self, tensor: Tensor, since: int) -> bool:
        """Whether the run must have made a tensor: where `vmap` gives back what it does not map, say.

        If it comes from outside, from a place that no search finds, reading it in a rerun is an error.
        """
        differentiated = requires_grad_at_any_level(tensor)
        may_be_new = is_made_since(tensor, since) if differentiated else internals.is_wrapper(tensor)
        return may_be_new and not is_in_reach(tensor, self.objects)

    def _capture(self, read: Read) -> Original:
        """Make an operand of a tensor that the run has read from outside."""
        return self.originals[self.add(read.value).index]

    def _find_places(self, look: Look, constants: dict[int, Read]) -> None:
        """Find the places of captured operands, and of constants in modules, which leave `constants`."""
        index = self._index
        captured = {id(t): t for t in self.tensors[self.held :]}
        parameters = [t for t in self.tensors[: self.held] if isinstance(t, Parameter)]
        if captured or constants or parameters:
            wanted = [*captured.values(), *parameters, *(read.value for read in constants.values())]
            for found, places in self._places_in_modules(wanted):
                key = self._stand_ins.get(found, found)
                captured.pop(key, None)
                if (read := constants.pop(key, None)) is not None:
                    self.constants.append(Constant(weakref.ref(read.value), read.version, read.label))
                    self.held_in_modules += [(place, read.value) for place in places]
                elif key in index:
                    self.originals[index[key]].add_places(places)
            if captured:
                self._search(captured.keys() - look.wrapped_inside, far=False)
        wrapped = look.wrapped_inside & index.keys()
        if wrapped:  # a transform may have found it in any place
            for original in self._search(wrapped):
                original.needs_place = True
        for key in look.wrapped_inside & captured.keys():
            self._must_have_place(key, look)

    def _outer_originals(self) -> list[tuple[Tensor, int]]:
        """In an outer rerun, the tensors that have a stand-in, and the identity of that."""
        return [] if self._outer is None else self._outer.originals()

    def _places_in_modules(self, tensors: Sequence[Tensor]) -> Iterable[tuple[int, Sequence[Place]]]:
        """The places of these tensors in modules, and of the originals for which they stand in, by identity."""
        keys = {*map(id, tensors)}
        originals = [t for t, stand_in in self._outer_originals() if stand_in in keys]
        return places_in_modules(self.objects, [*tensors, *originals]).items()

    def _search(self, keys: AbstractSet[int], far: bool = True) -> list[Original]:
        """Search for the operands with these identities, and for their originals. Adds their places to these."""
        originals = [t for t, stand_in in self._stand_ins.items() if stand_in in keys]
        found = []
        for tensor, place in search(self.objects, {*keys, *originals}, far):
            key = id(tensor)  # perhaps of an original that is an operand itself: a transform has wrapped it
            original = self.originals[self._index[key if key in self._index else self._stand_ins[key]]]
            original.add_places([place])
            found.append(original)
        return found

    def values(self, look: Look) -> list[Tensor]:
        """The operands as the forward found them."""
        found = []
        for key, tensor in zip(self._index, self.tensors, strict=True):
            value = look.copies.get(key, tensor)
            if value is tensor and look.outer is not None and key not in look.outside and not look.in_rerun:
                value = look.outer.read(tensor)  # an outer rerun finds one that is not read, too
            value = unwrap_dead(value)
            found.append(value.clone() if value.is_inference() else value)  # an inference tensor can't be saved
        return found

    def add_unknown(self, unknown: UnknownInput, look: Look) -> None:
        """Make an operand of a tensor that no torch call was seen to read."""
        tensor, edge = unknown.leaf, unknown.edge
        if tensor is None:
            found = (t for t, _ in search(self.objects))
            reaching = (t for t in found if any(edge in edges_of(x, look.since) for x in layers_and_tangents(t)))
            tensor = next(reaching, None)
        scripted = script_module_near(self.objects)
        if scripted is not None:
            raise RematError(_SCRIPTED.format(self.name, scripted.original_name))
        if tensor is None:
            hint = _MADE_ANEW if internals.is_under(internals.TransformType.Functionalize) else ""
            raise RematError(_NOT_FOUND.format(self.name, unknown) + hint) from None
        if self._stand_ins.get(id(tensor), id(tensor)) in self._index:
            raise RematError(_NOT_SEEN.format(self.name, unknown)) from None
        self.add(tensor)
        self._must_have_place(id(tensor), look)

    def _must_have_place(self, key: int, look: Look) -> None:
        """Find the places of an operand that no torch call reads directly: reruns must put it there."""
        original, tensor = self.originals[self._index[key]], self.tensors[self._index[key]]
        original.needs_place = True
        if not original.places:
            original.places = [place for _, places in self._places_in_modules([tensor]) for place in places]
        if not original.places:
            self._search({key})
        if not original.places and (internals.is_wrapper(tensor) or not tensor.is_leaf):
            read = look.outside.get(key)
            reader = name_of(None if read is None else read.reader)
            raise not_replaced(self.name, reader, tensor)

    def plan(self, inputs: list[Tensor]) -> Plan:
        """Plan a rerun with these inputs. An input that the function writes to is replaced by a copy."""
        swaps: dict[int, tuple[Tensor, Tensor]] = {}
        fill = self.held_in_modules.copy()
        to_write: dict[int, Tensor] = {}
        alive = [*self.still_there(), *(t for survivor in self.survivors if (t := survivor.ref()) is not None)]
        found = [[t for ref in (o.ref, *o.also) if (t := ref()) is not None] for o in self.originals]
        labels = {id(t): o.label for o, ts in zip(self.originals, found, strict=True) if o.is_read for t in ts}
        labels |= {id(t): c.label for c in self.constants if self._is_alive(t := c.ref(), c.version)}
        for i, (original, tensors) in enumerate(zip(self.originals, found, strict=True)):
            operand = inputs[i].clone() if original.copied else inputs[i]
            if labels.get(id(operand), original.label) != original.label:
                operand = alias_of(operand)  # below a transform, two tensors may be the same
            operand = inputs[i] = original.as_found(operand)
            if original.is_read:
                labels[id(operand)] = original.label
            if original.written and original.ref() is not None:  # else the function may have made it itself, unseen
                to_write[memory_of(operand)] = operand
            fill += [(place, operand) for place in original.places]
            swaps |= {id(t): (t, operand) for t in tensors if t is not operand}
        for _, held in self.held_in_modules:
            if held.requires_grad and id(held) not in swaps:  # it is no longer frozen
                frozen = of_kind(type(held), held.detach())
                swaps[id(held)], labels[id(frozen)] = (held, frozen), labels[id(held)]
        survivors = {id(s.ref()): (s.label, s.begun) for s in self.survivors if self._is_alive(s.ref(), s.version)}
        return Plan(swaps, fill, to_write, labels, survivors, alive)

    def _is_alive(self, tensor: Tensor | None, version: int) -> bool:
        """Whether a tensor is still alive. If it has been changed in place, that is an error."""
        if tensor is not None and version_of(tensor) != version:
            raise CheckpointError(_CHANGED_SINCE.format(list(tensor.shape), tensor.dtype, self.name))
        return tensor is not None

    def still_there(self) -> list[Tensor]:
        """The originals, and the other outside tensors that reruns read, if they are still alive."""
        refs = [*(original.ref for original in self.originals), *(constant.ref for constant in self.constants)]
        return [t for ref in refs if (t := ref()) is not None]

    @property
    def reads_inference(self) -> bool:
        """Whether reruns read a tensor that was made in inference mode, besides operands."""
        return any(t.is_inference() for constant in self.constants if (t := constant.ref()) is not None)

    def let_go(self, look: Look, reached: set[int]) -> None:
        """Called after the derivative is attached, when the forward's graph is freed. Notes which tensors are alive.

        **Arguments:**

        - `reached`: positions of the operands that the results depend on.
        """
        for key in look.read_quietly & self._index.keys():
            if self._index[key] >= self.held and self._index[key] in reached:
                self._must_have_place(key, look)
        self.survivors += look.labels.survivors()
        for i in range(self.given, self.held):
            if id(self.tensors[i]) not in look.outside and i not in reached:
                self.originals[i].is_read = False
        self.objects, self.tensors, self.in_cells = [], [], {}
        self._index, self._stand_ins, self._outer = {}, {}, None
