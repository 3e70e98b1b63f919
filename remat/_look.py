"""What a run of a function is seen to do: the tensors that it reads from outside, what it writes to, its signature.

A torch-function mode looks on. It tracks no values: it knows the identities of what the run was given or has made, and
all others are from outside. The signature is a function and a shape for each call whose result is differentiated, so a
table that is computed on first use and kept makes no difference.

NOTE [one mode at a time]: calls nest, and each has a look of its own. A mode for each would make a nest of n calls cost
n times as much for each torch call. So a look inside of another takes its place in the mode that is active, and asks it
for what it does not know itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, resolve_name

from remat import _torch_internals as internals
from remat._effects import ORDINARY, Effects, effects_of, reads_numbers_alone, written_by
from remat._errors import PURITY, CheckpointError, RematError, call_site
from remat._graph import is_made_since
from remat._tail import is_large, without_products

SCALARS = frozenset({bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device})
CONTAINERS = (list, tuple, dict)

CHANGES = (
    "remat: {} changes an argument or a captured tensor of shape {}, {} in place, at {}. Its rerun would start from "
    "the changed value. Change a copy instead: x = x.clone()."
)
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
_TOO_EARLY = (
    "remat: the rerun of {} reads a tensor of shape {}, {} from outside at {}, earlier than its forward did: the "
    "function has replaced a tensor, or tensors have changed places since. Write in place (self.mean.copy_(...)), "
    "which happens once, or pass them as arguments. {}"
)
_STRANGER = (
    "remat: the rerun of {} reads a tensor of shape {}, {} from outside at {}, which its forward did not read. {} If "
    "it is a cache that the forward has filled (use_cache=True), switch the cache off."
)


class _Current(threading.local):
    look: Look | None = None
    mode: Look | None = None
    """The look that is the active mode."""


_current = _Current()


def current_look() -> Look | None:
    """The look at the innermost run of this thread, None outside of all."""
    return _current.look


class _Blind:
    """In the place of a look: sees nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_BLIND: Any = _Blind()


_made_and_kept: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""By identity, what forwards have made without a derivative and somebody keeps. Other runs did not depend on it."""


ELSEWHERE = -1


class Signature:
    """The calls of a forward whose results are differentiated.

    **Attributes:**

    - `calls`: a function and a hash of the result's shapes for each call.
    - `tail`: the position of the last matrix product or call of a function under remat, if no later call reads values.
    - `tail_call`: what is remembered of that call, if it is one.
    - `hooks`: for each hook that the function sets, the level of its tensor. None for one inside of a transform of its
        own, `ELSEWHERE` for one that the rerun of an outer function has put on another tensor.
    """

    __slots__ = ("calls", "hooks", "tail", "tail_call")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int]] = []
        self.tail: int | None = None
        self.tail_call: Any = None
        self.hooks: list[int | None] = []


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


class Look(TorchFunctionMode):
    """Looks at the forward run of a function.

    **Attributes:**

    - `outside`: the tensors that it has read from outside, or was given, by identity.
    - `handed_on`: those that a transform inside of the function has wrapped, or that an autograd.Function was given.
    - `read_quietly`: those that are differentiated and were read first in `no_grad`: in an autograd.Function, perhaps.
    - `copies`: those that the function has written to, as they were before.
    - `drew`: whether a torch call may have drawn random numbers.
    - `nests`: whether there were other calls in it.
    - `sets_hooks`: whether it has put a hook on a tensor.
    - `tail_number`: the autograd sequence number after the tail.
    """

    delegate: Any = None
    """The look that has taken the place of this one. See NOTE [one mode at a time]."""
    is_rerun = False
    outer: Look | None = None
    drew = False
    nests = False
    sets_hooks = False
    tail_number = 0
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
        self._given = given
        self._known: set[int] = set()
        self._swaps: dict[int, Tensor] = {}
        self._pairs: Sequence[tuple[Tensor, Tensor]] = ()
        self._fresh: dict[int, weakref.ref[Tensor]] = {}
        """By identity, what the run has made without a derivative."""
        self._reads: dict[int, set[tuple[int, Any]]] = {}
        """How these were read: how many calls the signature had then, and the function that read."""

    # As a mode.

    def __enter__(self) -> Look:
        self._before = look, mode = _current.look, _current.mode
        with internals.DisableTorchFunction():
            self.begin(None if self.is_rerun else look)
        if mode is None:
            internals.push_function_mode(self)
            _current.mode = self
        else:
            self._delegate_before = mode.delegate
            if internals.top_function_mode() is mode:
                mode.delegate = self
            else:
                mode.delegate = _BLIND
                internals.push_function_mode(self)
                _current.mode = self
        _current.look = self
        return self

    def begin(self, outer: Look | None) -> None:
        """Take what the run is given. `outer`: the look at the run around it."""
        for t in self._given:
            self._add(t, t)
        if outer is not None:
            self.outer = outer
            self._swaps, self._pairs = outer._swaps, outer._pairs

    def __exit__(self, *error: Any) -> None:
        _current.look, mode = self._before
        if self.outer is not None:
            self.outer._adopt(self)
        if mode is not None:
            mode.delegate = self._delegate_before
        if _current.mode is self:
            internals.pop_function_mode()
            _current.mode = mode

    def _adopt(self, inner: Look) -> None:
        """A run inside of this one is over. What it has made may be found by the rest of this one."""
        self._known |= inner._known
        self._fresh.update(inner._fresh)
        self.handed_on |= inner.handed_on & self.outside.keys()
        for key, reads in inner._reads.items():
            self._reads.setdefault(key, set()).update((self._count(), reader) for _, reader in reads)

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
            out = func(*args)
        else:
            out = self._maybe_tail(effects, func, args, {})
        if type(out) is Tensor and not internals.is_wrapper(out):
            if out.requires_grad:
                known.add(id(out))
                self._note(func, _hash_of(out))
            else:
                self._add_fresh(out)
        elif type(out) not in SCALARS:
            with internals.DisableTorchFunction():
                self.add_results(func, out)
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
                self.handed_on.update(id(a) for a in args if id(a) in self.outside)
            if effects.sets_hook:
                args = self._with_hook(args)
            if effects.draws:
                self._mark_draw(func)
            for x in kwargs.values() if effects.draws or kwargs.get("generator") is not None else ():
                if isinstance(x, torch.Generator):
                    self.notice(x)
        out = self._maybe_tail(effects, func, args, kwargs)
        if type(out) not in SCALARS:
            with internals.DisableTorchFunction():
                self.add_results(func, out, not effects.is_unlisted)
        return as_given(out, written, func, given) if written else out

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and see whether it begins the tail or ends it."""
        signature = self.signature
        position = len(signature.calls)
        if not (effects.reads_no_value and reads_numbers_alone(func, args, kwargs) and torch.is_grad_enabled()):
            signature.tail = None
        out = func(*args, **kwargs)
        if effects.multiplies and is_large(out, args) and "out" not in kwargs and torch.is_grad_enabled():
            signature.tail, signature.tail_call = position, None
            self.tail_number = internals.next_sequence_number()
        return out

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
            raise RematError(CHANGES.format(self.name, list(value.shape), value.dtype, call_site()))
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
            self.tail_number = internals.next_sequence_number()

    def spared_call(self, name: str) -> Any:
        """What is remembered of the call whose results are enough here, without their values. None: it has to run."""
        return None

    def add_results(self, func: Any, out: Any, listed: bool = True) -> None:
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
        if differentiated and listed:
            self._note(func, _hash_of(out) if out is found[0] else hash(tuple(map(_hash_of, found))))

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
        self._reads.setdefault(id(tensor), set()).add((self._count(), self._reader))
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
        if read.value is read.tensor:
            return []
        return [read.value, *(t for t, operand in self._pairs if operand is read.value and t is not read.tensor)]

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether another tensor stands for this one."""
        return id(tensor) in self._swaps

    def has_made(self, tensor: Tensor) -> bool:
        """Whether the run has made a tensor."""
        key = id(tensor)
        fresh = self._fresh.get(key)
        return key not in self.outside and (key in self._known or (fresh is not None and fresh() is tensor))

    def survivors(self) -> list[tuple[weakref.ref[Tensor], set[tuple[int, Any]]]]:
        """What the run has made without a derivative, and read, and somebody keeps: a table made on first use, say.

        What may have been put in the place of a tensor that was read in the same way is not among these.
        """
        found = []
        others = {(r.position, r.reader, _hash_of(r.tensor)) for r in self.outside.values()}
        for key, ref in self._fresh.items():
            tensor = ref()
            if tensor is not None:
                _made_and_kept[key] = tensor
                reads = self._reads.get(key, ())
                if reads and not any((*read, _hash_of(tensor)) in others for read in reads):
                    found.append((ref, set(reads)))
        self._fresh, self._reads = {}, {}
        return found


class RerunLook(Look):
    """Looks at a rerun: operands stand for the tensors that the function finds, and its signature is compared.

    **Attributes:**

    - `spares_tail`: whether the tail need not be computed.
    """

    is_rerun = True
    spares_tail = False

    def __init__(
        self,
        name: str,
        forward: Signature,
        pairs: Sequence[tuple[Tensor, Tensor]],
        operands: Sequence[Tensor],
        level: int | None,
    ) -> None:
        """A look at a rerun of the function `name`.

        **Arguments:**

        - `forward`: the signature of the forward.
        - `pairs`: tensors, each with the operand that stands for it.
        - `operands`: what the rerun is given.
        - `level`: that whose derivative the rerun is for.
        """
        super().__init__(name, operands, None)
        self._pairs = pairs
        self._swaps = {id(tensor): operand for tensor, operand in pairs}
        self._forward = forward
        self._since = internals.next_sequence_number()
        self._position = 0
        self._hook = 0
        self._level = level
        self._read: set[int] = set()
        """Tensors that it reads and may have made out of sight."""
        self._suspects: list[tuple[weakref.ref[Tensor], torch.Size, torch.dtype, str]] = []

    def begin(self, outer: Look | None) -> None:
        identities = [id(t) for t in self._given]
        self.outside = dict.fromkeys(identities, None)
        self._known.update(identities)
        self._known.difference_update(self._expected)

    def expect(self, reads: dict[int, int], survivors: dict[int, set[tuple[int, Any]]]) -> None:
        """Say what it may read besides what it is given, and when.

        **Arguments:**

        - `reads`: by identity, how many calls the signature of the forward had when it read a tensor first.
        - `survivors`: by identity, how the forward read what it has made and somebody keeps.
        """
        self._expected = reads
        self._survivors = survivors

    def _count(self) -> int:
        return self._position

    def read(self, tensor: Tensor, handed_on: bool = False) -> Tensor:
        key = id(tensor)
        if key in self._known or self._is_fresh(tensor):
            return tensor
        if key in self._survivors:
            if (self._position, self._reader) not in self._survivors[key]:
                raise self._too_early(tensor)
            return internals.below_grad_levels(tensor)
        position = self._expected.get(key)
        if position is None and key not in self._swaps:
            return self._read_other(tensor)
        if position is not None and self._position < position:
            raise self._too_early(tensor)
        operand = self._swaps.get(key, tensor)
        self._known.add(id(operand))
        return operand

    def _too_early(self, tensor: Tensor) -> CheckpointError:
        return CheckpointError(_TOO_EARLY.format(self.name, list(tensor.shape), tensor.dtype, call_site(), PURITY))

    def _read_other(self, tensor: Tensor) -> Tensor:
        """A tensor is read that the forward was not seen to read."""
        key = id(tensor)
        if _made_and_kept.get(key) is tensor:
            raise CheckpointError(_STRANGER.format(self.name, [*tensor.shape], tensor.dtype, call_site(), PURITY))
        if internals.level_of(tensor) > self.depth:
            inner = internals.unwrapped(tensor)
            if self.read(inner, handed_on=True) is not inner:
                raise CheckpointError(
                    f"remat: the rerun of {self.name} hands a captured tensor of shape {list(inner.shape)} straight to "
                    "a transform, where its forward did not. Pass it as an argument."
                )
        elif not (is_made_since(tensor, self._since) or internals.is_fake(tensor)):
            self._suspects.append((weakref.ref(tensor), tensor.shape, tensor.dtype, call_site()))
            self._read.add(key)
        self._known.add(key)
        return tensor

    def has_made(self, tensor: Tensor) -> bool:
        return super().has_made(tensor) and id(tensor) not in self._read

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        forward = self._forward
        at_tail = self.spares_tail and self._position == forward.tail
        if at_tail and effects.multiplies and func is forward.calls[self._position][0]:
            return without_products(func, args, kwargs)
        return func(*args, **kwargs)

    def spared_call(self, name: str) -> Any:
        forward, position = self._forward, self._position
        at_tail = self.spares_tail and position == forward.tail
        if not at_tail or forward.calls[position][0][0] != name:
            return None
        return forward.tail_call

    def before_write(self, written: Tensor) -> None:
        """What the forward wrote to is a copy here."""

    def _with_hook(self, args: Any) -> Any:
        hooks, number = self._forward.hooks, self._hook
        self._hook += 1
        level = hooks[number] if number < len(hooks) else ELSEWHERE  # the forward has put none, for `requires_grad`
        if id(args[0]) in self.outside or (level is not None and level != self._level):
            return (torch.empty(0, requires_grad=True), *args[1:])  # or the forward has put it on the tensor itself
        return args

    def _note(self, func: Any, shape: int) -> None:
        if internals.forward_ad_active() and internals.inside_jvp_of_function():
            return
        position = self._position
        calls = self._forward.calls
        if position < len(calls) and calls[position] == (func, shape):
            self._position = position + 1
            return
        if position == len(calls):
            then = "had ended"
        elif calls[position][0] is func:
            then = "got another shape or dtype"
        else:
            then = f"called {name_of(calls[position][0])}"
        raise CheckpointError(
            f"remat: the rerun of {self.name} differs from its forward run: at call {position + 1} it calls "
            f"{name_of(func)}, at {call_site()}, where the forward {then}. {PURITY}"
        )

    def check_suspects(self) -> None:
        """Called when the rerun's graph is gone. What it has made itself, out of sight, is gone as well."""
        for ref, shape, dtype, where in () if internals.tracing() else self._suspects:  # what is written down is kept
            if ref() is not None:
                raise CheckpointError(_STRANGER.format(self.name, list(shape), dtype, where, PURITY))

    def finish(self) -> None:
        """Check that the rerun went as far as the forward."""
        calls = self._forward.calls
        if self._position < len(calls):
            raise CheckpointError(
                f"remat: the rerun of {self.name} ended after {self._position} of {len(calls)} torch calls; the "
                f"forward went on with {name_of(calls[self._position][0])}. {PURITY}"
            )


def as_given(out: Any, written: Sequence[Tensor], func: Any, given: tuple[Any, Any]) -> Any:
    """What a call that writes returns to the user: of an argument the tensor that was given, not what stood for it.

    `self.count += 1` assigns it, and the function may go on with either name.
    """
    args, kwargs = given
    return next((g for g, w in zip(written_by(func, args, kwargs or {}), written, strict=True) if w is out), out)


def _hash_of(tensor: Tensor) -> int:
    """A hash of shape and dtype, or of dtype alone where a length is a symbol: nested, or compiled for any shape."""
    if tensor.is_nested:
        return hash(tensor.dtype)
    try:
        return hash((tensor.shape, tensor.dtype))
    except TypeError:  # torch.SymInt
        return hash(tensor.dtype)


def name_of(func: Any) -> str:
    """What to call a function in an error."""
    if isinstance(func, tuple):  # a call of a function under remat, with a hash of its signature
        return str(func[0])
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)


def _tensors_in(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [t for x in out for t in _tensors_in(x)]
    return [t for x in out.values() for t in _tensors_in(x)] if isinstance(out, dict) else []


class unseen:  # noqa: N801
    """Within it, no look sees what happens: it is autograd's, or remat's own. Written out: generators take longer."""

    __slots__ = ("_delegate", "_look", "_mode")

    def __enter__(self) -> None:
        self._mode = mode = _current.mode
        if mode is not None:
            self._look, self._delegate = _current.look, mode.delegate
            _current.look, mode.delegate = None, _BLIND

    def __exit__(self, *error: object) -> None:
        if self._mode is not None:
            _current.look, self._mode.delegate = self._look, self._delegate
