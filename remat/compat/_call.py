"""One call of a checkpointed function, kept so that it can be repeated. Both variants use it."""

from __future__ import annotations

import contextlib
import contextvars
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from remat import _torch_internals as internals
from remat import _tree
from remat._call import rerunning
from remat._closure import Closure, Operand
from remat._context import Ambient, Modes, RandomState, replayed
from remat._errors import CheckpointError, note_rerun
from remat._graph import is_made_since
from remat._look import Look
from remat._nested_mode import current_look, unseen
from remat._places import Place, filled, item, places_in_modules
from remat._tape import Origin, Tape
from remat.compat._look import ForwardLook, RerunLook
from remat.random._keyed import running, suspended

Context = contextlib.AbstractContextManager[Any]
NOTHING: Context = contextlib.nullcontext()
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{} {}], which {} "
    "was given, reads from outside or saves for its rerun, is at version {}; expected version {} instead. Change it "
    "after the backward, or change a copy: x = x.clone()."
)
_SHARED = (
    "checkpoint: {} changes two tensors in place that lie in the same memory, of shapes {} and {}. The rerun would "
    "start from two copies. Change one of them alone, or clone it before."
)


def modified(tensor: Tensor, before: int, name: str) -> RuntimeError:
    """The error for a tensor that was written to since it was at a version. `name`: of the function."""
    with internals.DisableTorchFunction():
        return RuntimeError(_MODIFIED.format(tensor.type(), list(tensor.shape), name, tensor._version, before))


class Outside:
    """A tensor that the forward read from outside, or was given in a container or by its closure.

    What a checkpointed function around it has made is saved through the hooks of that one, which computes it again.
    """

    __slots__ = ("key", "ref", "requires_grad", "saved", "version")

    def __init__(self, tensor: Tensor, value: Tensor, around: Look | None) -> None:
        """`value`: what stands for the tensor, in a rerun of a function around."""
        self.key, self.ref = id(tensor), weakref.ref(tensor)
        self.saved: Any = internals.save(value) if around is not None and around.has_made(tensor) else value
        self.version = internals.version(value)
        self.requires_grad = value.requires_grad

    def unpack(self) -> Tensor:
        """The value."""
        return self.saved if isinstance(self.saved, Tensor) else self.saved.unpack()

    @property
    def is_stale(self) -> bool:
        """Whether it was written to since the forward. The hooks of a function around look after theirs."""
        return isinstance(self.saved, Tensor) and internals.version(self.saved) != self.version


class _StandIns:
    """The tensors of a rerun, which stand for those that the forward has read.

    **Attributes:**

    - `values`: all of them, by the identity of the other.
    - `inputs`: those that are operands.
    - `swaps`: what the function may find anywhere, with what to read in its place.
    - `fill`: what to put into modules.
    - `stale`: by identity, what to raise where a tensor is read.
    """

    def __init__(self, index: dict[int, int], places: Mapping[int, list[Place]]) -> None:
        self._index, self._places = index, places
        self.values: dict[int, Tensor] = {}
        self.inputs: list[Any] = [None] * len(index)
        self.swaps: list[tuple[Tensor, Tensor]] = []
        self.fill: list[tuple[Place, Tensor]] = []
        self.stale: dict[int, RuntimeError] = {}

    def put(self, key: int, tensor: Tensor | None, value: Tensor, in_places_alone: bool = False) -> None:
        """Let `value` stand for a tensor. `in_places_alone`: nowhere else, if modules have it."""
        self.values[key] = value
        if key in self._index:
            self.inputs[self._index[key]] = value
        places = self._places.get(key, ())
        expected: Tensor | None = value
        if tensor is not None and tensor is not value and not (places and in_places_alone):
            self.swaps.append((tensor, value))
            expected = tensor
        self.fill += [(place, value) for place in places if item(*place) is not expected]


class Call:
    """One call of a function.

    **Attributes:**

    - `name`: of the function.
    - `operands`: until the forward is over, the tensors among the arguments and in the closure of the function.
    - `arguments`: how many of these are positional arguments themselves. The caller holds those.
    - `random`: the draws to repeat, None where there were none.
    - `written`: by identity, the tensors from outside that the function writes to, and what they were before.
    - `parameters`, `outside`: what else the function closes over or reads from outside, parameters and others.
    - `last_look`: what has looked at the rerun, for the caller to take.
    """

    random: RandomState | None = None
    written: Mapping[int, tuple[weakref.ref[Tensor], Tensor]] = types.MappingProxyType({})
    outside: Sequence[Outside] = ()
    parameters: Sequence[Tensor] = ()
    last_look: RerunLook | None = None
    _flags: Mapping[int, types.CellType] = types.MappingProxyType({})
    _states: Sequence[tuple[int, bool]] = ()
    """Of the parameters, how often each had been written to, and whether it required grad."""
    _places: Mapping[int, list[Place]] = types.MappingProxyType({})
    """Where modules had tensors, by identity."""
    _origins: Mapping[int, Origin] = types.MappingProxyType({})
    """What the tape of a policy knows the tensors by that the forward has read, by identity."""
    _forward: ForwardLook | None = None
    _needs_look = False
    _shared: CheckpointError | None = None

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
        watches_cells: bool = False,
    ) -> None:
        """A call that is about to run.

        **Arguments:**

        - `watches_cells`: whether a context around the rerun may set a flag in a cell of the function.
        """
        self.name = getattr(fun, "__qualname__", None) or type(fun).__qualname__
        self.operands: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._around = current_look()
        closure = self._closure = Closure(self._operand)
        leaves, self._spec = _tree.flatten_call(args, kwargs)
        for x in args:
            if isinstance(x, Tensor):
                self._operand(x)
        self.arguments = len(self.operands)
        self._leaves = [*map(closure.take_apart, leaves)]
        self._fun = closure.take_apart(fun)
        if watches_cells:
            self._flags = closure.flags()
        self._objects = closure.close()
        self._ambient = Ambient.current()
        self._modes = Modes.current()
        self._variables = contextvars.copy_context()
        self._preserves = preserve_rng_state

    def _operand(self, tensor: Tensor) -> Operand:
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self.operands)
            self.operands.append(tensor)
        return Operand(index)

    # The forward.

    def look(self) -> ForwardLook:
        """What has to look at the forward."""
        if self._preserves:
            self.random = RandomState(self.operands)
        self._since = internals.next_sequence_number()
        self._forward = ForwardLook(self.name, self.operands, self.random)
        return self._forward

    def finish(self, look: ForwardLook, tape: Tape | None = None) -> None:
        """The forward is over: note what it has read from outside, and what it has written to.

        `tape`: what a policy keeps of it.
        """
        if tape is not None:
            origins = {key: tape.origin(value) for key, (_, value) in look.outside.items()}
            self._origins = {key: origin for key, origin in origins.items() if origin is not None}
        around, self._around, self._forward = self._around, None, None
        if self.random is not None:
            self.random = self.random.drawn_since(look.drew)
        if look.copies:
            self.written = self._written_by(look)
            shared = internals.two_that_share_memory([look.outside[key][0] for key in look.copies])
            if shared is not None:
                self._shared = CheckpointError(_SHARED.format(self.name, *(list(t.shape) for t in shared)))
        if len(look.outside) > self.arguments:
            read = self._read_by(look)
            look.forget()  # what is gone then was made out of sight
            found = ((ref(), value) for ref, value in read)
            self.outside = [Outside(t, t if value is None else value, around) for t, value in found if t is not None]
        look.forget()
        self._needs_look = look.nests or look.sets_hooks
        self._objects, self.operands = [], []

    def _read_by(self, look: ForwardLook) -> list[tuple[weakref.ref[Tensor], Tensor | None]]:
        """What the forward has read besides the positional arguments, and what stood for it; parameters are noted."""
        parameters, others, near = [], [], []
        look.gathered |= internals.gathered_by_fully_shard()
        for key, (t, value) in look.outside.items():
            position, is_written = self._index.get(key), key in look.copies
            if key not in look.gathered and (is_written or position is None):
                near.append(t)
            if is_written or (position is not None and position < self.arguments):
                continue
            if position is None and type(t) is Parameter and value is t and not t.is_inference():
                parameters.append(t)
            elif position is not None or not is_made_since(t, self._since):
                others.append((weakref.ref(t), None if value is t else value))
        self.parameters, self._states = parameters, [(t._version, t.requires_grad) for t in parameters]
        self._places = places_in_modules(self._objects, near)
        return others

    def _written_by(self, look: ForwardLook) -> dict[int, tuple[weakref.ref[Tensor], Tensor]]:
        return {key: (weakref.ref(look.outside[key][0]), before) for key, before in look.copies.items()}

    # The rerun.

    def rerun(
        self,
        arguments: Sequence[Tensor | None],
        contexts: tuple[Context, Context] = (NOTHING, NOTHING),
        stand_ins: dict[int, Tensor] | None = None,
        looks: bool = False,
    ) -> Any:
        """The call again, and its result.

        **Arguments:**

        - `arguments`: the tensors among the positional arguments.
        - `contexts`: entered around all of it. The first is told what stands for what the forward has read.
        - `stand_ins`: by identity, what stands for other tensors.
        - `looks`: whether the caller will ask `last_look` what the rerun has made.
        """
        return self._variables.copy().run(self._rerun, arguments, *contexts, stand_ins or {}, looks)

    def _rerun(
        self,
        arguments: Sequence[Tensor | None],
        context: Any,
        trace: Context,
        stand_ins: dict[int, Tensor],
        looks: bool,
    ) -> Any:
        rerunning.set(True)
        with internals.grad_enabled():
            found = self._prepared(arguments, stand_ins, looks)
            look = self._look_at(found, looks)
            modes = self._modes.entered()
            draws = NOTHING if self.random is None else replayed(self.random)
            keys = suspended() if internals.function_modes_active() and running() is not None else NOTHING
            rebuild = self._closure.rebuilder(found.inputs)
            flags = [(key, cell, cell.cell_contents) for key, cell in self._flags.items()]
            try:
                with self._ambient.restored(), draws, keys, modes, context, trace, filled(found.fill):
                    for key, tensor in found.values.items() if self._origins else ():
                        if key in self._origins:
                            context.stands_for(tensor, self._origins[key])
                    if flags:  # the context may have set one, for the function to see
                        rebuild.keep({key: cell for key, cell, before in flags if cell.cell_contents is not before})
                    args, kwargs = _tree.unflatten_call(self._spec, [*map(rebuild, self._leaves)])
                    fun = rebuild(self._fun)
                    with look:
                        return fun(*args, **kwargs)
            except Exception as error:
                note_rerun(error, self.name)
                raise
            finally:
                rebuild.clear()

    def _prepared(self, arguments: Sequence[Tensor | None], stand_ins: dict[int, Tensor], looks: bool) -> _StandIns:
        if self._shared is not None:
            raise self._shared
        found = _StandIns(self._index, self._places)
        for key, argument in zip(self._index, arguments, strict=False):
            if argument is not None:
                found.put(key, None, argument)
        for operand in self.operands[self.arguments :]:  # in a backward inside of the forward
            found.put(id(operand), None, operand)
        for t, (version, required_grad) in zip(self.parameters, self._states, strict=True):
            key = id(t)
            value = stand_ins.get(key, t)
            if t._version != version:
                found.stale[key] = modified(t, version, self.name)
            if value.requires_grad and not required_grad:
                value = value.detach()
            if value is not t or self._origins:
                found.put(key, t, value, in_places_alone=not looks)
            else:  # the same, but faster
                found.fill += [(place, t) for place in self._places.get(key, ()) if item(*place) is not t]
        for o in self.outside:
            value = stand_ins[o.key] if o.key in stand_ins else o.unpack()
            if o.is_stale:
                found.stale[id(value)] = modified(value, o.version, self.name)
            if value.requires_grad and not o.requires_grad:
                value = value.detach()
            found.put(o.key, o.ref(), value)
        written = self.written if self._forward is None else self._written_by(self._forward)
        for key, (ref, before) in written.items():
            found.put(key, ref(), before.clone())
        return found

    def _look_at(self, found: _StandIns, looks: bool) -> Context:
        """What has to look at a rerun."""
        if found.swaps or found.stale or looks or self._needs_look or internals.may_run_compiled_code():
            look = RerunLook(self.name, found.inputs, found.swaps, found.stale)
            if looks:
                self.last_look = look
            return look
        return unseen() if internals.function_modes_active() else NOTHING
