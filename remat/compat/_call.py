"""One call of a checkpointed function, recorded so that it can run again. Both variants use it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, enable_grad
from torch.nn import Parameter

from remat import _torch_internals as internals
from remat import _tree
from remat._closure import Closure, Operand, Rebuilder
from remat._context import Ambient, OwnCasts, RandomState, Variables, entered, modes_of_user, rerunning, together
from remat._errors import CheckpointError, function_name, note_rerun
from remat._graph import is_from_before
from remat._layers import version_of
from remat._memory import two_that_share_memory
from remat._nested_mode import current_look, unseen
from remat._operands import Found
from remat._places import Place, filled, item, places_in_modules
from remat.compat._look import CheckpointLook, Saved, kept_by_runs
from remat.random._keyed import running, suspended

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Of the forward, and of the rerun."""
NO_CONTEXTS: Contexts = (internals.NOTHING, internals.NOTHING)
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}], which {} "
    "was given, reads from outside or saves for its rerun, is at version {}; expected version {} instead. Change it "
    "after the backward, or change a copy: x = x.clone()."
)
_UNSEEN = (
    "checkpoint: {} reads a tensor of shape {}, {} from outside, and code that no torch-function mode sees changes it: "
    "an extension, an embedding with max_norm, z.real = ... The rerun would find it changed. Change it outside."
)
_SHARED = (
    "checkpoint: {} changes two tensors in place that lie in the same memory, of shapes {} and {}. The rerun would "
    "start from two copies. Change one of them alone, or clone it before."
)


def modified(tensor: Tensor, before: int, name: str) -> str:
    """The error message for a tensor that was written to after version `before`. `name`: of the function."""
    with internals.DisableTorchFunction():
        return _MODIFIED.format(tensor.type(), list(tensor.shape), name, tensor._version, before)


class Read(Found):
    """A tensor that the forward read from outside, or got in a container or from its closure.

    **Attributes:**

    - `key`: its identity.
    - `saved`: the value that the forward read. If an outer checkpointed function made it, and it is differentiated, it
        is saved through the hooks of that, which recomputes it. If the forward wrote to it, this is a copy of the
        earlier value.
    - `version`: of the value; if the forward wrote to it, of the tensor itself, after the forward.
    - `requires_grad`, `is_leaf`: of the value, in the forward.
    - `first`: if the forward wrote to it before it read it: `Seen.first`, else None. NOTE [state that is set up].
    """

    def __init__(
        self, tensor: Tensor, value: Tensor, packs: bool = False, is_written: bool = False, first: Any = None
    ) -> None:
        """`value`: what the function reads in its place, or the copy. `packs`: whether hooks save it."""
        super().__init__(tensor)
        self.key, self.is_written, self.first = id(tensor), is_written, first
        self.saved: Any = internals.save(value) if packs else value
        self.version = version_of(tensor if is_written else value)
        self.requires_grad, self.is_leaf = value.requires_grad, tensor.is_leaf

    def value(self) -> Tensor:
        """The value for a rerun."""
        if self.is_written:
            copy: Tensor = self.saved.clone()
            return copy.detach().requires_grad_(self.requires_grad) if self.is_leaf else copy  # autocast asks
        return self.saved if isinstance(self.saved, Tensor) else self.saved.unpack()

    @property
    def is_stale(self) -> bool:
        """Whether it was written to since the forward. What an outer function's hooks saved is checked there."""
        return not self.is_written and isinstance(self.saved, Tensor) and version_of(self.saved) != self.version


class Call:
    """One call of a function.

    **Attributes:**

    - `name`: of the function.
    - `operands`: the tensors in the arguments and in the closure of the function, until the forward is over.
    - `arguments`: how many of the operands the caller holds: the positional arguments, which come first, or all.
    - `random`: the draws to repeat; None if there are none.
    - `reads`: the other tensors that the function read, and those that it wrote to.
    - `places`: by identity, the places where modules held tensors.
    - `forward_look`: the look at the forward, while that runs.
    """

    random: RandomState | None = None
    reads: Sequence[Read] = ()
    places: Mapping[int, list[Place]] = types.MappingProxyType({})
    forward_look: CheckpointLook | None = None
    _nests = _sets_hooks = True
    _saved: Saved = types.MappingProxyType({})
    """The plain tensors that nested calls in the forward saved."""
    _others: Sequence[tuple[weakref.ref[Tensor], int]] = ()
    """Tensors that a rerun may find instead of its own, with the identities of the forward's: the arguments, which an
    outer function may recompute, and the originals of stand-ins."""

    def __init__(self, fun: Any, args: Any, kwargs: Any, preserve_rng_state: bool, watches_cells: bool = False) -> None:
        """A call that is about to run.

        **Arguments:**

        - `watches_cells`: whether a context around the rerun may set a flag that the function reads from a cell.
        """
        self.name = function_name(fun)
        self.operands: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._given: list[Found] = []
        """The operands as the forward found them."""
        closure = self._closure = Closure(self._operand)
        leaves, self._spec = _tree.flatten_call(args, kwargs)
        for x in args:
            if isinstance(x, Tensor):
                self._operand(x)
        self.arguments = len(self.operands)
        self._leaves = [*map(closure.take_apart, leaves)]
        self._fun = closure.take_apart(fun)
        self._flags = closure.flags() if watches_cells else {}
        """The cells of the function in which a context around the rerun may set a flag."""
        self._objects = closure.close()
        self._ambient = Ambient.current()
        self._modes = modes_of_user()
        self._variables = Variables()
        if preserve_rng_state:
            self.random = RandomState(self.operands)

    def _operand(self, tensor: Tensor) -> Operand:
        # In a rerun, an original and its stand-in are one operand, as in the forward.
        if (around := current_look()) is not None:
            tensor = around.stand_in(tensor)
        index = self._index.setdefault(id(tensor), len(self.operands))
        if index == len(self.operands):
            self.operands.append(tensor)
            self._given.append(Found(tensor))
        return Operand(index)

    # The forward.

    def look(self) -> CheckpointLook:
        """The look that watches the forward."""
        self.forward_look = CheckpointLook(self.name, self.operands, self.random)
        return self.forward_look

    def finish(self, out: Any, packs: bool) -> None:
        """Called when the forward is over, with its results. Notes the tensors that it read, wrote to or keeps.

        `packs`: whether those that an outer checkpointed function made are saved through its hooks.
        """
        look, self.forward_look = self.forward_look, None
        assert look is not None
        self._closure.note_changes()
        if self.random is not None:
            self.random = self.random.drawn_since(look.drew)
        if len(look.outside) > self.arguments or look.copies:
            self._note_reads(look, look.outer if packs else None)
        self._others = self._found_instead(look)
        look.keep(out)
        self._saved = look.saved
        look.outside.clear()
        self._nests, self._sets_hooks = look.signature.nests > 0, look.sets_hooks
        self._objects, self.operands = [], []

    def _found_instead(self, look: CheckpointLook) -> list[tuple[weakref.ref[Tensor], int]]:
        """The tensors that a rerun may find instead of those of the forward: see `_others`."""
        given = [] if look.outer is None else [(t, id(t)) for t in self.operands[: self.arguments]]
        return [(weakref.ref(t), key) for t, key in (*given, *look.originals()) if key in look.outside]

    def _note_reads(self, look: CheckpointLook, around: Any) -> None:
        shared = two_that_share_memory(look.outside[key].value for key in look.copies)
        if shared is not None:
            raise CheckpointError(_SHARED.format(self.name, *(list(t.shape) for t in shared)))
        if internals.uses_fully_shard():
            look.gathered |= internals.gathered_by_fully_shard()
        reads = self.reads = _written(look)
        found = self._found(look, reads)
        # A tensor that dies here was made by the function, unseen. The identities stay known.
        look.outside = dict.fromkeys(look.outside)  # type: ignore[assignment]
        for ref in found:
            if (t := ref()) is not None:
                is_made = around is not None and around.has_made(t)
                # Hooks must save as many in a rerun of the outer function, which may find a table made on first use.
                if t.requires_grad or not is_made or id(t) in self.places:  # else it is read where it is
                    reads.append(Read(t, t, is_made and t.requires_grad))

    def _found(self, look: CheckpointLook, reads: list[Read]) -> list[weakref.ref[Tensor]]:
        """The tensors that the forward read.

        Parameters are added to `reads` instead. Those that the caller holds and those that it wrote to are left out.
        """
        found, near = [], []
        for key, (t, _, version) in look.outside.items():
            position, is_written = self._index.get(key), key in look.copies
            is_known = is_written or t.requires_grad or key in look.gathered or internals.uses_fully_shard()
            if not is_known and version_of(t) != version:
                raise CheckpointError(_UNSEEN.format(self.name, list(t.shape), t.dtype))
            if key not in look.gathered and (position is None or is_written or type(t) is Parameter):
                near.append(t)
            if is_written or (position is not None and position < self.arguments):
                continue
            if look.is_written_around(t):  # perhaps once more, before this call runs again
                reads.append(Read(t, t.clone()))
            elif type(t) is Parameter:
                reads.append(Read(t, t))
            elif position is not None or is_from_before(t, look.since):
                found.append(weakref.ref(t))
        self.places = places_in_modules(self._objects, near)
        return found

    # The rerun.

    def rerun(
        self,
        arguments: Sequence[Tensor | None],
        contexts: Contexts = NO_CONTEXTS,
        stand_ins: Mapping[int, Tensor] = types.MappingProxyType({}),
        looks: bool = False,
        finds_leaves: bool = False,
        tell: Callable[[Mapping[int, Tensor]], None] | None = None,
    ) -> tuple[Any, CheckpointLook | None]:
        """Run the call again. Returns its result, and the look that watched it, if any.

        **Arguments:**

        - `arguments`: the operands that the caller holds.
        - `contexts`: entered around the rerun.
        - `stand_ins`: by identity of the forward's tensors, the tensors to read in their place.
        - `looks`: whether a look must watch it, and replace an argument that the function also finds elsewhere.
        - `finds_leaves`: whether it finds the captured leaves themselves in cells. Then a look must watch it.
        - `tell`: called with the tensors of the rerun, by identity of those that the forward read.
        """
        with enable_grad():
            values, inputs, fill, look = self._prepared(arguments, stand_ins, looks, finds_leaves)
            if tell is not None:
                tell(values)
            return self._variables.run(self._rerun, inputs, fill, look, *contexts), look

    def _rerun(self, inputs: Any, fill: Any, look: CheckpointLook | None, context: Any, trace: Any) -> Any:
        rerunning.set(True)
        draws = internals.NOTHING if self.random is None else self.random.replayed()
        keys = suspended() if internals.function_modes_active() and running() is not None else internals.NOTHING
        modes, rebuild = entered(self._modes), Rebuilder(self._closure, inputs)
        flags = [(key, cell, cell.cell_contents) for key, cell in self._flags.items()]
        try:
            ambient, cells, places = self._ambient.restored(), rebuild.as_at_call(), filled(fill)
            with OwnCasts(), together(ambient, draws, keys, modes, cells, context, trace, places):
                # The context may have set one, for the function to see.
                rebuild.keep({key: cell for key, cell, before in flags if cell.cell_contents is not before})
                args, kwargs = _tree.unflatten_call(self._spec, [*map(rebuild, self._leaves)])
                fun = rebuild(self._fun)
                with look or unseen():
                    return fun(*args, **kwargs)
        except Exception as error:
            note_rerun(error, self.name)
            raise
        finally:
            rebuild.clear()
            if look is not None:
                look.keep(())

    def _prepared(
        self, arguments: Any, stand_ins: Mapping[int, Tensor], looks: bool, finds_leaves: bool
    ) -> tuple[dict[int, Tensor], list[Any], list[tuple[Place, Tensor]], CheckpointLook | None]:
        """By identity of the forward's tensors, those of the rerun; operands; what to put into modules; the look."""
        given = zip(self._index, self._given, arguments, strict=False)
        values = {key: found.as_found(argument) for key, found, argument in given if argument is not None}
        # None of the others is left, except in a backward inside the forward.
        values |= {id(operand): operand for operand in self.operands[self.arguments :]}
        swaps: dict[int, tuple[Tensor, Tensor]] = {}
        stale, undecided, originals, leaves = {}, {}, {}, {}
        if (forward := self.forward_look) is None:
            reads, others, saved = self.reads, self._others, self._saved
        else:  # a backward inside the forward
            reads, others, saved = _written(forward), self._found_instead(forward), forward.saved
            values = {key: seen.value for key, seen in forward.outside.items()} | values  # perhaps stand-ins
        written = {read.key for read in reads if read.is_written}
        for read in reads:
            value = stand_ins[read.key] if read.key in stand_ins else read.value()
            if read.is_stale:
                stale[id(value)] = modified(value, read.version, self.name)
            if value.requires_grad and not read.requires_grad:
                value = value.detach()
            value = read.as_found(value)
            values[read.key], tensor = value, read.ref()
            if read.first is not None and tensor is not None:
                originals[read.key] = tensor
                is_old = version_of(tensor) != read.version
                undecided[read.key] = read.first, modified(tensor, read.version, self.name) if is_old else None
            if finds_leaves and read.is_leaf and not read.is_written and tensor is not None:
                leaves[read.key] = tensor
            if tensor is not None and tensor is not value:
                swaps[read.key] = tensor, value
        if looks:
            others = [*others, *((found.ref, key) for key, found in zip(self._index, self._given, strict=True))]
        for ref, key in others:
            if (tensor := ref()) is not None and tensor is not (value := values.get(key, tensor)):
                swaps.setdefault(id(tensor), (tensor, value))
        fill = [
            (place, originals.get(key, value))
            for key, value in values.items()
            for place in self.places.get(key, ())
            # A look swaps what was there in the forward, but for reads that no mode sees, as of an index.
            if not (key in swaps and key not in written and id(item(*place)) == key)
        ]
        inputs = [originals.get(key, leaves.get(key, values.get(key))) for key in self._index]
        changed = swaps or stale or kept_by_runs
        if not (looks or changed or self._nests or self._sets_hooks or internals.may_run_compiled_code()):
            return values, inputs, fill, None
        known = [value for key, value in values.items() if key not in originals and id(value) not in stale]
        look = CheckpointLook(self.name, known)
        look.prepare_rerun(swaps, stale, undecided, [values[key] for key in written], saved)
        look.hooks_are_set = self._sets_hooks
        return values, inputs, fill, look


def _written(look: CheckpointLook) -> list[Read]:
    """The tensors that a forward wrote to."""
    copies, tensors = look.copies.items(), look.outside
    return [Read(tensors[key].value, before, is_written=True, first=look.set_up.get(key)) for key, before in copies]
