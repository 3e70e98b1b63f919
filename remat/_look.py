"""Watch a run of a function: the tensors that it reads from outside, those that it writes to, and its signature.

A torch-function mode sees each torch call. It tracks no values. It knows the identities of the tensors that the run was
given or has made; all others come from outside. The signature lists each call whose result is differentiated: the
function, its plain arguments and the shape of the result. Other calls are left out: the forward may compute a table on
first use and keep it, and the rerun does not compute it again.

NOTE [inner wrappers]: a transform inside the function wraps tensors unseen. A new wrapper may have the identity of
a tensor that has died. So at the levels of inner transforms, the look trusts no identity: it checks what is inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy

from remat import _torch_internals as internals
from remat._dispatch_mode import tell_of_access
from remat._effects import Effects, as_given, effects_of, is_of_torch, reads_no_value, tensors_in, written_by
from remat._errors import CHANGES, DATA_OF_A_LEVEL, LAZY, OTHER_GRAPH, SHARDED, TAKEN_APART, RematError, call_site
from remat._graph import goes_through_older
from remat._made import Made, Read, Survivor
from remat._memory import memory_of
from remat._nested_mode import NestedMode, current_look
from remat._saved import is_of_user
from remat._signature import ELSEWHERE, HOLDER, NO_LEVEL, PLAIN, Reader, Signature, hash_of, kind_of
from remat._tail import is_large

level_of, stack_depth = internals.level_of, internals.stack_depth
MADE_INSIDE = " If the function makes this parameter, or a module that has it, make that outside, and pass it."


class Look(NestedMode):
    """Watches the forward run of a function.

    **Attributes:**

    - `outside`: by identity, the tensors that the run was given or has read from outside.
    - `handed_on`: those that a transform inside the function has wrapped.
    - `read_quietly`: those that are differentiated but were first read in `no_grad`, perhaps in an autograd.Function.
    - `copies`: by identity, copies of those that the run wrote to, with their earlier values.
    - `made`: the differentiated tensors that the run computed. Only noted if it is nested in another run.
    - `drew`: whether a torch call may have drawn random numbers.
    - `sets_hooks`: whether the run put a hook on a tensor.
    - `reads_unseen`: whether the run called an autograd.Function of the user's, which may read memory unseen.
    - `since`: all autograd nodes with higher sequence numbers were made in the run, or later.
    - `tail_number`, `tail_results`: of the tail: the sequence number after its first call, and its results.
    """

    drew = sets_hooks = reads_unseen = False
    tail_number = 0
    _reader: Any = None
    _memory: dict[int, list[int]] | None = None

    def __init__(self, name: str, given: Iterable[Tensor], random: Any) -> None:
        """Watch a run of the function `name` that is given these tensors. `random` is told of explicit generators."""
        self.name = name
        self.random = random
        self.depth = internals.stack_depth()
        self.outside: dict[int, Any] = {}
        self.handed_on: set[int] = set()
        self.read_quietly: set[int] = set()
        self.copies: dict[int, Tensor] = {}
        self.signature = Signature()
        self.made: list[weakref.ref[Tensor]] = []
        self.tail_results: list[weakref.ref[Tensor]] = []
        self._given = given
        self._known: set[int] = set()
        self._swaps: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity, tensors that an outer rerun may find, each with the operand that replaces it."""
        self._values: set[int] = set()
        """The identities of what the run has read in the place of outside tensors."""
        self._own = Made()
        self._has_tangents = internals.forward_ad_active()
        self.since = internals.next_sequence_number()

    def begin(self, outer: Look | None) -> None:
        """Note the tensors that the run is given. `outer`: the look at the surrounding run."""
        for t in self._given:
            self._add(t, t)
        if outer is not None:
            self.outer, self._swaps = outer, outer._swaps

    def adopt(self, inner: Look) -> None:
        """Called when a nested run has ended: the rest of this run may use the tensors that it made."""
        self._known |= inner._known
        self._own.adopt(inner._own, self._count())
        self.signature.has_custom |= inner.signature.has_custom
        self.reads_unseen |= inner.reads_unseen
        self.drew |= inner.drew
        self.handed_on |= inner.handed_on & self.outside.keys()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():  # dynamo traces what is compiled inside, with the active modes
            return func(*args, **(kwargs or {}))
        delegate = self.delegate
        if delegate is not None:
            return delegate.__torch_function__(func, types, args, kwargs)
        effects = effects_of(func)
        if effects.is_metadata and args and self.has_survived(args[0]):  # the guard of a cache may ask only in reruns
            return func(*args, **(kwargs or {}))
        at_depth = stack_depth() <= self.depth
        known = self._known if at_depth else ()  # NOTE [inner wrappers]
        given, plain = args, False
        for a in args:
            if isinstance(a, Tensor):
                if id(a) in known:
                    continue
            elif (kind := kind_of(a.__class__)) is not HOLDER:
                plain = plain or kind is PLAIN
                continue
            plain = True
            args = self._seen(func, args)
            break
        if effects.only_writes and args is given and not kwargs:
            with internals.DisableTorchFunction():
                self.before_write(args[0])
        elif kwargs or effects.acts:
            named = dict(zip(kwargs, self._seen(func, kwargs.values(), len(args)), strict=True)) if kwargs else {}
            return self._call(effects, func, args, named, (given, kwargs))
        if effects.multiplies or self.signature.tail is not None:
            out = self._maybe_tail(effects, func, args, {})
        else:
            self.call = func, args, {}
            out = func(*args)
            self.call = None
        if at_depth and type(out) is Tensor and out.requires_grad:
            self._known.add(id(out))
            if self.outer is not None:
                self.made.append(weakref.ref(out))
            self._note(func, hash_of(out, args if plain else ()))
        elif type(out) is Tensor and not (out.requires_grad or internals.is_wrapper(out)):
            self._add_own(out)
        elif kind_of(out.__class__) is HOLDER:
            with internals.DisableTorchFunction():
                self.add_results(func, out, args)
        return out

    def _call(self, effects: Effects, func: Any, args: Any, kwargs: Any, given: tuple[Any, Any]) -> Any:
        """Make a call that has keyword arguments or effects. `given`: `args` and `kwargs` as the user passed them."""
        if effects.moves_hooks:
            return func(*args, **kwargs)
        writes = effects.writes or "out" in kwargs or kwargs.get("inplace")
        written = written_by(effects, args, kwargs) if writes else []
        with internals.DisableTorchFunction():
            if effects.differentiates:
                self._check_graph(*given[0], **(given[1] or {}))
            for t in written:
                self.before_write(t)
            if effects.sets_data:
                self._set_data(*args)
            if effects.is_custom:
                self.signature.has_custom = True
                self.reads_unseen |= is_of_user(args[0])
                args = (_watched(args[0]), *args[1:])
            if effects.reads_memory:
                tell_of_access(func, args, kwargs)
            if effects.sets_hook:
                args = self._with_hook(args)
            if effects.draws:
                self._mark_draw(func)
            if effects.shows_graph:
                self.signature.shows_nodes |= not internals.called_by("torch.")
        out = self._maybe_tail(effects, func, args, kwargs)
        if effects.looks_up and isinstance(out, Tensor):
            return self._seen(func, (out,))[0]
        if kind_of(out.__class__) is HOLDER:
            with internals.DisableTorchFunction():
                self.add_results(func, out, (*args, *kwargs.values()), not effects.is_unlisted)
        return as_given(out, written, effects, given) if written and self._swaps else out

    def _check_graph(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        """The run is about to differentiate outputs with respect to inputs."""
        if goes_through_older(tensors_in(outputs), tensors_in(inputs), self.since):
            raise RematError(OTHER_GRAPH.format(self.name))

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and note whether it begins or ends the tail: see `_tail.py`."""
        signature = self.signature
        position = len(signature.calls)
        if signature.tail is not None and not (reads_no_value(effects, args, kwargs) and torch.is_grad_enabled()):
            signature.tail = None
        self.call = func, args, kwargs
        out = func(*args, **kwargs)
        self.call = None
        begins = effects.multiplies and is_large(out, args) and not self._is_in_jvp()
        if begins and internals.requires_grad_at_any_level(out):
            self._begin_tail(position, None, out)
        elif signature.tail is not None:
            self.tail_results += map(weakref.ref, tensors_in(out))
        return out

    def _begin_tail(self, position: int, call: Any, out: Any) -> None:
        self.signature.tail, self.signature.tail_call = position, call
        self.tail_number = internals.next_sequence_number()
        self.tail_results = [*map(weakref.ref, tensors_in(out))]

    # What it reads.

    def _seen(self, func: Any, args: Iterable[Any], first: int = 0) -> Any:
        """The arguments of a call, from the place `first` on, with operands in place of originals."""
        with internals.DisableTorchFunction():
            known = self._known if stack_depth() <= self.depth else ()
            placed = enumerate(args, first)
            return tuple(
                [a if isinstance(a, Tensor) and id(a) in known else self._seen_in(a, func, i) for i, a in placed]
            )

    def _seen_in(self, arg: Any, func: Any, place: Any) -> Any:
        if isinstance(arg, Tensor):
            self._reader = Reader(func, place)
            return self.read(arg)
        if isinstance(arg, (list, tuple)) and HOLDER in map(kind_of, {*map(type, arg)}):
            items = [self._seen_in(a, func, (place, i)) for i, a in enumerate(arg)]
            return type(arg)(*items) if hasattr(arg, "_fields") else type(arg)(items)
        if type(arg) is dict:
            return {k: self._seen_in(v, func, (place, k)) for k, v in arg.items()}
        if isinstance(arg, torch.Generator):
            self.notice(arg)
        return arg

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        """Note that the run reads a tensor. Returns the tensor to read in its place.

        `handed_on`: whether a transform inside the function has wrapped it: then no torch call reads it directly.
        """
        key = id(tensor)
        _, value = self._swaps.get(key, (tensor, tensor))  # in an outer rerun, which may run below the original's level
        below = internals.unwrap_dead(tensor)
        if value is tensor and self.depth < level_of(below) <= stack_depth():
            self.read(internals.unwrapped(below), handed_on=True)
            return tensor
        known = self._known_value(tensor)
        if handed_on and (known is None or key in self.outside):  # its own may die, and others get their ids
            self.handed_on.add(key)
        if known is not None:
            return known
        if self.outer is not None:
            self.outer._reader = (self._count(), self._reader)
            value = self.outer.read(tensor, handed_on)
        if not value.requires_grad and internals.dtensor_at_work():
            raise RematError(TAKEN_APART.format(self.name))
        if value.requires_grad and not torch.is_grad_enabled():
            self.read_quietly.add(key)
        self._add(tensor, value)
        return value

    def _known_value(self, tensor: Tensor) -> Tensor | None:
        """The tensor to read in the place of one that the run has made or has read before. None: it is from outside."""
        below = internals.unwrap_dead(tensor)  # a transform inside the function may have wrapped it
        if id(below) in self._known or self._reads_own(below):
            return tensor
        return read.value if (read := self.outside.get(id(tensor))) else None

    def _add(self, tensor: Tensor, value: Tensor) -> None:
        self.outside[id(tensor)] = Read(tensor, value, internals.version(value), self._count(), self._reader)
        self._known.add(id(value))
        self._values.add(id(value))
        if self._memory is not None:
            self._memory.setdefault(memory_of(value), []).append(id(tensor))

    def _mark_draw(self, func: Any) -> None:
        self.drew = True

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        if self.random is not None:
            self.random.notice(generator)
        if self.outer is not None:
            self.outer.notice(generator)

    # What it writes to.

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        """The run is about to do `tensor.data = data`."""
        if is_lazy(tensor):
            raise RematError(LAZY.format(self.name))
        if level_of(data) > max(level_of(tensor), 0):
            raise RematError(DATA_OF_A_LEVEL.format(self.name, list(tensor.shape), tensor.dtype))
        if not internals.requires_grad_at_any_level(tensor):
            self.before_write(tensor)

    def before_write(self, written: Tensor) -> None:
        """Copy the outside tensors in this memory before the run changes them: reruns start from the copies."""
        if self._memory is None:
            self._memory = {}
            for key, read in self.outside.items():
                self._memory.setdefault(memory_of(read.value), []).append(key)
        for key in self._memory.get(memory_of(written), ()):
            if key not in self.copies:
                self.copies[key] = self._copied(self.outside[key].value)
        if self.outer is not None:
            self.outer.before_write(written)

    def _copied(self, value: Tensor) -> Tensor:
        if internals.requires_grad_at_any_level(value):
            hint = MADE_INSIDE if isinstance(value, torch.nn.Parameter) else ""
            raise RematError(CHANGES.format(self.name, list(value.shape), value.dtype, call_site()) + hint)
        return value.clone()

    # What it makes.

    def _note(self, func: Any, shape: int) -> None:
        if not self._is_in_jvp():
            self.signature.calls.append((func, shape))

    def _is_in_jvp(self) -> bool:
        """Whether the `jvp` of an autograd.Function is running. Its calls do not belong to the signature."""
        return self._has_tangents and internals.inside_jvp_of_function()

    def add_call(self, name: str, out: Any, calls: Iterable[Any] = (), remembered: Any = None) -> None:
        """Note a nested call of a function under remat, which returned `out`. `calls`: its signature.

        `remembered`: the record with which a rerun can skip the call; None if the call must run.
        """
        signature = self.signature
        position = len(signature.calls)
        signature.nests, signature.tail = signature.nests + 1, None
        self.add_results((name, hash(tuple(calls))), out)
        if remembered is not None and len(signature.calls) > position:
            self._begin_tail(position, remembered, out)

    def add_results(self, func: Any, out: Any, args: Iterable[Any] = (), listed: bool = True) -> None:
        """Note the tensors that a call returned. `listed`: whether the call belongs to the signature."""
        found, differentiated = tensors_in(out), False
        for t in found:
            requires_grad = internals.requires_grad_at_any_level(t)
            differentiated |= requires_grad
            if id(t) in self._swaps or self._is_from_outside(t):
                continue  # a call returned it unchanged: its layers are not the run's
            inside = internals.layers_up_to(t, self.depth)
            if not requires_grad:
                self._add_own(inside[0])
                continue
            self._known.update(map(id, inside))
            if self.outer is not None:
                self.made.append(weakref.ref(t))
        if differentiated and listed:
            shapes = hash_of(found[0], args)
            self._note(func, shapes if out is found[0] else hash((shapes, *map(hash_of, found[1:]))))

    def _add_own(self, tensor: Tensor) -> None:
        if not self._is_from_outside(tensor):  # else the call has returned what it was given
            self._own.add(tensor)
            self._known.discard(id(tensor))

    def _is_from_outside(self, tensor: Tensor) -> bool:
        """Whether the run has read this tensor from outside, or in the place of one from outside."""
        return id(tensor) in self.outside or id(tensor) in self._values

    def _reads_own(self, tensor: Tensor) -> bool:
        """Whether the run made this tensor without a derivative. If so, count the read."""
        if found := self._own.has(tensor):
            self._own.count(tensor, (self._count(), self._reader))
        return found

    def _count(self) -> int:
        """How many calls the signature has so far."""
        return len(self.signature.calls)

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        """The arguments of `register_hook`. `inner`: of a hook that a nested run sets, the position there.

        A rerun puts a hook that is not for its level on an unused tensor.
        """
        if internals.is_hook_of_fully_shard(args[1]):
            raise RematError(SHARDED.format(self.name))
        self.sets_hooks = True
        position = (self._count(), *inner)
        given = args if self.outer is None else self.outer._with_hook(args, position)
        if not any(read.value is args[0] for read in self.outside.values()):
            level = max(internals.level_of(args[0]), 0)
            level = ELSEWHERE if given is not args else NO_LEVEL if level > self.depth else level
            self.signature.hooks.append((position, level))
            if is_of_torch(args[1]):
                self.signature.hooks_of_torch.append(position)
        return given

    def others_for(self, read: Read) -> list[Tensor]:
        """Other tensors that the function may find in place of one that it has read."""
        others = [t for t, operand in self._swaps.values() if operand is read.value and t is not read.tensor]
        return others if read.value is read.tensor else [read.value, *others]

    def replacing(self) -> set[int]:
        """The identities of the operands that replace tensors in an outer rerun."""
        return {id(operand) for _, operand in self._swaps.values()}

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether a rerun replaces this tensor by an operand."""
        return id(tensor) in self._swaps

    def has_survived(self, tensor: Tensor) -> bool:
        """Whether a forward has made and read this tensor, and this is its rerun, or in it."""
        return self.outer is not None and self.outer.has_survived(tensor)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether the run made this tensor."""
        return not self._is_from_outside(tensor) and (id(tensor) in self._known or self._own.has(tensor))

    def take_for_own(self, key: int) -> None:
        """The run must have made the tensor with this identity, which it was seen to read."""
        self._own.add(self.outside.pop(key).tensor)

    def has_kept(self, results: Container[int]) -> bool:
        """Whether a tensor that the run made is still alive, besides the layers of results with these identities."""
        own = (ref for key, ref in self._own.refs.items() if key not in results)
        return any(ref() is not None for ref in (*self.made, *own))

    def survivors(self) -> list[Survivor]:
        """The tensors that the run made without a derivative and read, and that are still alive."""
        return self._own.survivors(self.outside.values())


class _InnerLook(Look):
    """Watches the `forward` of an autograd.Function under a transform, which runs below the level of the call."""

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        if (known := self._known_value(tensor)) is not None:
            return known
        value = self.outer.read(tensor, handed_on)
        while internals.level_of(value) > self.depth and not value.requires_grad:  # an operand of a rerun
            value = internals.unwrapped(value)
        self._add(tensor, value)
        return value

    def before_write(self, written: Tensor) -> None:
        self.outer.before_write(written)


def _watched(function: Any) -> Any:
    """An autograd.Function with a look at its `forward`: under a transform, the mode sees only the call of `apply`."""
    if watched := vars(function).get("_remat_watched"):
        return watched

    def forward(*args: Any) -> Any:
        outer = current_look()
        if outer is None:
            return function.forward(*args)
        with _InnerLook(outer.name, tensors_in(args), None):
            return function.forward(*args)

    namespace = {"forward": staticmethod(forward), "__module__": function.__module__}
    function._remat_watched = watched = type(function.__name__, (function,), namespace)
    return watched
