"""What a run of a function is seen to do: the tensors that it reads from outside, what it writes to, its signature.

A torch-function mode looks on. It tracks no values: it knows the identities of what the run was given or has made, and
all others are from outside. The signature is a function, its plain arguments and a shape for each call whose result is
differentiated, so a table that is computed on first use and kept makes no difference.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from remat import _torch_internals as internals
from remat._effects import ORDINARY, Effects, effects_of, reads_numbers_alone, written_by
from remat._errors import RematError, call_site
from remat._nested_mode import NestedMode
from remat._signature import ELSEWHERE, Signature, hash_of
from remat._tail import is_large

SCALARS = frozenset({bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device})
CONTAINERS = (list, tuple, dict)

CHANGES = (
    "remat: {} changes an argument or a captured tensor of shape {}, {} in place, at {}. Its rerun would start from "
    "the changed value. Change a copy instead: x = x.clone()."
)
_MADE_INSIDE = " Where the function has made this parameter, with a module: make the module outside, and pass it."
SHARDED = (
    "remat: {} calls a module that fully_shard has sharded. FSDP2 takes gradients from the backward graph of that "
    "module itself, which a rerun by remat does not have. Wrap the module with remat.nn.remat_module, or call it "
    "through remat.checkpoint(..., use_reentrant=False)."
)
TAKEN_APART = (
    "remat: {} takes a DTensor apart (to_local or redistribute, which the hooks of parallelize_module call), and the "
    "tensors inside of it are out of remat's sight. Wrap the module with remat.nn.remat_module, or call the function "
    "through remat.checkpoint(..., use_reentrant=False)."
)
_LAZY = (
    "remat: {} calls a lazy module that has yet to make its parameters, and a rerun would begin after that. Call it "
    "once before, in torch.no_grad()."
)


made_and_kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, what forwards have made without a derivative and somebody keeps. Other runs did not depend on it."""


class Read(NamedTuple):
    """A tensor that a run was given, or has read from outside."""

    tensor: Tensor
    value: Tensor
    """What stood for it: in the rerun of an outer function that may be another tensor."""
    version: int
    """How often it had been written to, at the first read."""
    position: int
    """How many calls the signature had then."""
    reader: Any
    """The function that read it."""


class Look(NestedMode):
    """Looks at the forward run of a function.

    **Attributes:**

    - `outside`: the tensors that it has read from outside, or was given, by identity.
    - `handed_on`: those that a transform inside of the function has wrapped, or that an autograd.Function was given.
    - `read_quietly`: those that are differentiated and were read first in `no_grad`: in an autograd.Function, perhaps.
    - `copies`: those that the function has written to, as they were before.
    - `made`: what it has computed that is differentiated, where there is a run around it.
    - `drew`: whether a torch call may have drawn random numbers.
    - `nests`: whether there were other calls in it.
    - `sets_hooks`: whether it has put a hook on a tensor.
    - `has_custom`: whether it was seen to call an autograd.Function.
    - `tail_number`, `tail_results`: the autograd sequence number after the tail, and what the tail returned.
    """

    drew = False
    nests = False
    sets_hooks = False
    has_custom = False
    tail_number = 0
    tail_results: Sequence[weakref.ref[Tensor]] = ()
    _reader: Any = None
    _memory: dict[int, list[int]] | None = None

    def __init__(self, name: str, given: Iterable[Tensor], random: Any) -> None:
        """A look at a run of the function `name`, which is given tensors. `random`: is told of explicit generators."""
        self.name = name
        self.random = random
        self.depth = internals.stack_depth()
        self.outside: dict[int, Any] = {}
        self.handed_on: set[int] = set()
        self.read_quietly: set[int] = set()
        self.copies: dict[int, Tensor] = {}
        self.signature = Signature()
        self.made: list[weakref.ref[Tensor]] = []
        self._given = given
        self._known: set[int] = set()
        self._swaps: dict[int, Tensor] = {}
        self._pairs: Sequence[tuple[Tensor, Tensor]] = ()
        self._fresh: dict[int, weakref.ref[Tensor]] = {}
        """By identity, what the run has made without a derivative."""
        self._reads: dict[int, set[tuple[int, Any]]] = {}
        """How these were read: how many calls the signature had then, and the function that read."""
        self._times: defaultdict[tuple[int, Any], int] = defaultdict(int)
        """How often, in each way."""

    def begin(self, outer: Look | None) -> None:
        """Take what the run is given. `outer`: the look at the run around it."""
        for t in self._given:
            self._add(t, t)
        if outer is not None:
            self.outer = outer
            self._swaps, self._pairs = outer._swaps, outer._pairs

    def adopt(self, inner: Look) -> None:
        """A run inside of this one is over. What it has made may be found by the rest of this one."""
        self._known |= inner._known
        self._fresh.update(inner._fresh)
        self.has_custom |= inner.has_custom
        self.handed_on |= inner.handed_on & self.outside.keys()
        for key, reads in inner._reads.items():
            self._reads.setdefault(key, set()).update((self._count(), reader) for _, reader in reads)
        for (_, reader), times in inner._times.items():
            self._times[self._count(), reader] += times

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiling():  # `torch.cond` is compiled under the active modes
            return func(*args, **(kwargs or {}))
        delegate = self.delegate
        if delegate is not None:
            return delegate.__torch_function__(func, types, args, kwargs)
        known = self._known
        given = args, kwargs
        for a in args:
            if isinstance(a, Tensor):
                if id(a) not in known:
                    self._reader = func
                    args = self._seen(args)
                    break
            elif type(a) not in SCALARS and isinstance(a, CONTAINERS):
                self._reader = func
                args = self._seen(args)
                break
        effects = effects_of(func)
        if kwargs or effects.acts:
            self._reader = func
            named = dict(zip(kwargs, self._seen(kwargs.values()), strict=True)) if kwargs else {}
            return self._call(effects, func, args, named, given)
        if effects is ORDINARY:
            self.signature.tail = None
            self.call = func, args, {}
            out = func(*args)
            self.call = None
        else:
            out = self._maybe_tail(effects, func, args, {})
        if type(out) is Tensor and not internals.is_wrapper(out):
            if out.requires_grad:
                known.add(id(out))
                if self.outer is not None:
                    self.made.append(weakref.ref(out))
                self._note(func, hash_of(out, args))
            else:
                self._add_fresh(out)
        elif type(out) not in SCALARS:
            with internals.DisableTorchFunction():
                self.add_results(func, out, args)
        return out

    def _call(self, effects: Effects, func: Any, args: Any, kwargs: Any, given: tuple[Any, Any]) -> Any:
        """A call with keyword arguments, or of a function that does more than compute. `given`: both, by the user."""
        if effects.moves_hooks:
            return func(*args, **kwargs)
        writes = effects.writes or "out" in kwargs or bool(kwargs.get("inplace"))
        written = written_by(func, args, kwargs) if writes else []
        with internals.DisableTorchFunction():
            if writes:
                for t in written:
                    self.before_write(t)
            elif effects.sets_data:
                self._set_data(*args)
            if effects.is_custom or effects.draws:
                for x in args:
                    if isinstance(x, torch.Generator):
                        self.notice(x)
            if effects.is_custom:
                self.has_custom = True
                self.handed_on.update(id(a) for a in args if id(a) in self.outside)
            if effects.reads_memory:
                internals.tell_of_access(func, args, kwargs)
            if effects.sets_hook:
                args = self._with_hook(args)
            if effects.draws:
                self._mark_draw(func)
            for x in kwargs.values() if effects.draws or kwargs.get("generator") is not None else ():
                if isinstance(x, torch.Generator):
                    self.notice(x)
        out = self._maybe_tail(effects, func, args, kwargs)
        if effects.looks_up and isinstance(out, Tensor):
            with internals.DisableTorchFunction():
                return self.read(out)
        if type(out) not in SCALARS:
            with internals.DisableTorchFunction():
                self.add_results(func, out, (*args, *kwargs.values()), not effects.is_unlisted)
        return as_given(out, written, func, given) if written else out

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and see whether it begins the tail or ends it."""
        signature = self.signature
        position = len(signature.calls)
        if not (effects.reads_no_value and reads_numbers_alone(func, args, kwargs) and torch.is_grad_enabled()):
            signature.tail = None
        self.call = func, args, kwargs
        out = func(*args, **kwargs)
        self.call = None
        if effects.multiplies and is_large(out, args) and "out" not in kwargs and torch.is_grad_enabled():
            signature.tail, signature.tail_call = position, None
            self._begin_tail(out)
        return out

    def _begin_tail(self, out: Any) -> None:
        self.tail_number = internals.next_sequence_number()
        self.tail_results = [*map(weakref.ref, _tensors_in(out))]

    # What it reads.

    def _seen(self, args: Any) -> Any:
        """The arguments of a call, with what stands for them; those from outside are noted."""
        with internals.DisableTorchFunction():
            return tuple([self._seen_in(a) for a in args])

    def _seen_in(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return arg if id(arg) in self._known else self.read(arg)
        if isinstance(arg, (list, tuple)) and any(isinstance(a, (Tensor, *CONTAINERS)) for a in arg):
            items = [self._seen_in(a) for a in arg]
            return type(arg)(*items) if hasattr(arg, "_fields") else type(arg)(items)
        if type(arg) is dict:
            return {k: self._seen_in(v) for k, v in arg.items()}
        return arg

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        """A tensor is read that this run has not made: what to read in its place.

        **Arguments:**

        - `handed_on`: whether a transform inside of the function has wrapped it, and no torch call reads it.
        """
        key = id(tensor)
        if handed_on and key in self.outside:
            self.handed_on.add(key)
        if key in self._known or self._is_fresh(tensor):
            return tensor
        known = self.outside.get(key)
        if known is not None:
            return known.value
        value = self._swaps.get(key, tensor)  # in a rerun, which may run below the level of the original
        if value is tensor and internals.level_of(tensor) > self.depth:
            self.read(internals.unwrapped(tensor), handed_on=True)
            self._known.add(key)
            return tensor
        if self.outer is not None:
            self.outer._reader = self._reader
            value = self.outer.read(tensor, handed_on)
        if not value.requires_grad and internals.dtensor_at_work():
            raise RematError(TAKEN_APART.format(self.name))
        if handed_on:
            self.handed_on.add(key)
        elif value.requires_grad and not torch.is_grad_enabled():
            self.read_quietly.add(key)
        self._add(tensor, value)
        return value

    def _add(self, tensor: Tensor, value: Tensor) -> None:
        self.outside[id(tensor)] = Read(tensor, value, internals.version(value), self._count(), self._reader)
        self._known.add(id(value))
        if self._memory is not None:
            self._memory.setdefault(internals.memory_of(value), []).append(id(tensor))

    def _mark_draw(self, func: Any) -> None:
        look: Look | None = self
        while look is not None:
            look.drew = True
            look = look.outer

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        look: Look | None = self
        while look is not None:
            if look.random is not None:
                look.random.notice(generator)
            look = look.outer

    # What it writes to.

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        """The run is about to do `tensor.data = data`."""
        if is_lazy(tensor):
            raise RematError(_LAZY.format(self.name))
        if not internals.requires_grad_at_any_level(tensor):
            self.before_write(tensor)

    def before_write(self, written: Tensor) -> None:
        """Keep the value that a tensor from outside had before this run changed it: the rerun starts from it."""
        if self._memory is None:
            self._memory = {}
            for key, read in self.outside.items():
                self._memory.setdefault(internals.memory_of(read.value), []).append(key)
        for key in self._memory.get(internals.memory_of(written), ()):
            if key not in self.copies:
                self.copies[key] = self._copied(self.outside[key].value)
        if self.outer is not None:
            self.outer.before_write(written)

    def _copied(self, value: Tensor) -> Tensor:
        if internals.requires_grad_at_any_level(value):
            hint = _MADE_INSIDE if isinstance(value, torch.nn.Parameter) else ""
            raise RematError(CHANGES.format(self.name, list(value.shape), value.dtype, call_site()) + hint)
        return value.clone()

    # What it makes.

    def _note(self, func: Any, shape: int) -> None:
        if not (internals.forward_ad_active() and internals.inside_jvp_of_function()):  # its ops are no calls of ours
            self.signature.calls.append((func, shape))

    def add_call(self, name: str, out: Any, calls: Iterable[Any] = (), remembered: Any = None) -> None:
        """A call inside of this one, which had a look of its own, has returned `out`.

        **Arguments:**

        - `calls`: its signature.
        - `remembered`: what a rerun needs to be spared the call; None where it must run.
        """
        self.nests = True
        signature = self.signature
        position = len(signature.calls)
        signature.tail = None
        self.add_results((name, hash(tuple(calls))), out)
        if remembered is not None and len(signature.calls) > position:
            signature.tail, signature.tail_call = position, remembered
            self._begin_tail(out)

    def spared_call(self, name: str) -> Any:
        """What is remembered of the call whose results are enough here, without their values. None: it has to run."""
        return None

    def add_results(self, func: Any, out: Any, args: Iterable[Any] = (), listed: bool = True) -> None:
        """A call has returned `out`. `listed`: whether the signature has it."""
        found = _tensors_in(out)
        if not found:
            return
        differentiated = False
        for t in found:
            if internals.requires_grad_at_any_level(t):
                differentiated = True
            elif internals.level_of(t) <= self.depth:
                self._add_fresh(t)
                continue
            if id(t) not in self._swaps:  # else a call inside has returned it as it was
                self._know_layers(t)
                if self.outer is not None:
                    self.made.append(weakref.ref(t))
        if differentiated and listed:
            shapes = hash_of(found[0], args)
            self._note(func, shapes if out is found[0] else hash((shapes, *map(hash_of, found[1:]))))

    def _add_fresh(self, tensor: Tensor) -> None:
        key = id(tensor)
        if key not in self.outside:  # else it was given back
            known = self._fresh.get(key)
            if known is None or known() is not tensor:  # it may be of a tensor that has died since
                self._known.discard(key)
                self._reads.pop(key, None)
                self._fresh[key] = weakref.ref(tensor)

    def _is_fresh(self, tensor: Tensor) -> bool:
        """Whether the run has made a tensor without a derivative, which is read now."""
        ref = self._fresh.get(id(tensor))
        if ref is None or ref() is not tensor:
            return False
        how = self._count(), self._reader
        self._reads.setdefault(id(tensor), set()).add(how)
        self._times[how] += 1
        return True

    def _count(self) -> int:
        """How many calls the signature has so far."""
        return len(self.signature.calls)

    def _know_layers(self, tensor: Tensor) -> None:
        """A tensor was made, and so were those that it wraps: a transform inside of the function may unwrap it."""
        self._known.add(id(tensor))
        while internals.level_of(tensor) > self.depth:
            tensor = internals.unwrapped(tensor)
            self._known.add(id(tensor))

    def _with_hook(self, args: Any) -> Any:
        """The arguments of `register_hook`: in a rerun, a hook that is not for its derivative gets another tensor."""
        if internals.is_hook_of_fully_shard(args[1]):
            raise RematError(SHARDED.format(self.name))
        self.sets_hooks = True
        level = max(internals.level_of(args[0]), 0)
        given = args if self.outer is None else self.outer._with_hook(args)  # it has to know of all hooks inside
        self.signature.hooks.append(ELSEWHERE if given is not args else None if level > self.depth else level)
        return given

    def others_for(self, read: Read) -> list[Tensor]:
        """What else the function may find in the place of a tensor that it has read."""
        others = [t for t, operand in self._pairs if operand is read.value and t is not read.tensor]
        return others if read.value is read.tensor else [read.value, *others]

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether another tensor stands for this one."""
        return id(tensor) in self._swaps

    def has_made(self, tensor: Tensor) -> bool:
        """Whether the run has made a tensor."""
        key = id(tensor)
        fresh = self._fresh.get(key)
        return key not in self.outside and (key in self._known or (fresh is not None and fresh() is tensor))

    def survivors(self) -> list[tuple[weakref.ref[Tensor], dict[tuple[int, Any], int]]]:
        """What the run has made without a derivative, and read, and somebody keeps: a table made on first use, say.

        With how it was read, and how often what the run has made was read in that way.

        What may have been put in the place of a tensor that was read in the same way is not among these.
        """
        found = []
        for key, ref in self._fresh.items():
            tensor = ref()
            if tensor is not None:
                made_and_kept[key] = tensor
                if (reads := self._reads.get(key)) is None:
                    continue
                shape = hash_of(tensor)
                alike = {(r.position, r.reader) for r in self.outside.values() if hash_of(r.tensor) == shape}
                if alike.isdisjoint(reads):
                    found.append((ref, {how: self._times[how] for how in reads}))
        self._fresh, self._reads, self._times = {}, {}, defaultdict(int)
        return found


def as_given(out: Any, written: Sequence[Tensor], func: Any, given: tuple[Any, Any]) -> Any:
    """What a call that writes returns to the user: of an argument the tensor that was given, not what stood for it.

    `self.count += 1` assigns it, and the function may go on with either name.
    """
    args, kwargs = given
    return next((g for g, w in zip(written_by(func, args, kwargs or {}), written, strict=True) if w is out), out)


def _tensors_in(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [t for x in out for t in _tensors_in(x)]
    return [t for x in out.values() for t in _tensors_in(x)] if isinstance(out, dict) else []
