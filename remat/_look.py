"""Watch a run of a function: the tensors that it reads from outside, those that it writes to, and its signature.

A torch-function mode sees each torch call. It tracks no values. It knows the tensors that the run was given or has
made; all others come from outside. The signature lists each call whose result is differentiated: the function, its
plain arguments, the labels of its tensors (NOTE [labels]) and the shape of the result. A rerun has to make these calls
in the same order. It may leave out others: the forward may compute a table on first use and keep it.

NOTE [inner wrappers]: a transform inside the function wraps tensors unseen. So at the levels of inner transforms, the
look checks what is inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from remat import _torch_internals as internals
from remat import _tree
from remat._context import RandomState
from remat._copies import Copies
from remat._dispatch_mode import tell_of_access
from remat._effects import Effects, acts_on, as_given, effects_of, map_in, tensors_in, unless_none, written_by
from remat._errors import DATA_OF_A_LEVEL, LAZY, OUT_OF_SIGHT, SHARDED, TAKEN_APART, RematError, changes, not_replaced
from remat._graph import inputs_reached, is_from_before
from remat._labels import FIXED, Labels, Read, combined, in_nested, in_order, of_outside, of_result
from remat._layers import in_graph, layers, layers_up_to, nodes_of, requires_grad_at_any_level, unwrap_dead, version_of
from remat._memory import is_over
from remat._nested_mode import NestedLook, watched
from remat._saved import is_of_user
from remat._signature import ELSEWHERE, HOLDER, NO_LEVEL, Signature, kind_of, name_of, plain_in
from remat._tail import is_large

level_of, stack_depth = internals.level_of, internals.stack_depth
MADE_INSIDE = " If the function makes this parameter, or a module that has it, make that outside, and pass it."


class Look(NestedLook):
    """Watches the forward run of a function.

    **Attributes:**

    - `outside`: by identity of their values, the tensors that the run was given or has read from outside.
    - `labels`: of the tensors that it knows.
    - `wrapped_inside`: those that a transform inside the function has wrapped.
    - `read_quietly`: those that are differentiated but were first read in `no_grad`, perhaps in an autograd.Function.
    - `copies`: of those in whose storage the run wrote.
    - `drew`, `sets_hooks`: whether a torch call may have drawn random numbers; whether one put a hook on a tensor.
    - `in_checkpoint`: whether the run is that of a checkpointed function, or in one.
    - `sees_custom`: False if the forward could not see calls of an autograd.Function: it ran below all transforms.
    - `reads_unseen`: whether the run called an autograd.Function of the user's, which may read memory unseen.
    - `since`: all autograd nodes with higher sequence numbers were made in the run, or later.
    - `position`: how many calls of the signature it has made so far.
    - `tail_number`, `tail_results`: of the tail: the sequence number after its first call, and its results.
    - `tail_nodes`: the nodes of these, but of the first.
    """

    position = 0
    drew = sets_hooks = reads_unseen = in_checkpoint = False
    sees_custom = True
    _reader: Any = None

    def __init__(self, name: str, given: Iterable[Tensor], random: Any) -> None:
        """Watch a run of the function `name` that is given these tensors. `random` is told of explicit generators."""
        self.name = name
        self.random = random
        self.depth = internals.stack_depth()
        self.outside: dict[int, Any] = {}
        self.wrapped_inside: set[int] = set()
        self.read_quietly: set[int] = set()
        self.copies = Copies()
        self.signature = Signature()
        self.tail_results: list[weakref.ref[Tensor]] = []
        self.tail_nodes: set[Any] = set()
        self._given = given
        self.labels = Labels(self.depth)
        self._swaps: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity, tensors that an outer rerun may find, each with the operand that replaces it."""
        self.undecided: dict[int, tuple[Any, str | None]] = {}
        """By identity, tensors that a checkpoint around has set up. Their first use in a rerun decides what that is."""
        self.unhooked: set[int] = set()
        """The sequence numbers of nodes whose hooks a rerun must not call."""
        self._has_tangents = internals.forward_ad_active()
        self.since = internals.next_sequence_number()

    def begin(self, outer: Look | None) -> None:
        """Note the tensors that the run is given. `outer`: the look at the surrounding run."""
        if outer is not None:
            self.outer, self._swaps, self.in_checkpoint = outer, outer._swaps, outer.in_checkpoint
            self.undecided, self.sees_custom, self.unhooked = outer.undecided, outer.sees_custom, outer.unhooked
            self.random = self.random or outer.random  # draws inside count for both
        for t in self._given:
            self._add(t)

    def adopt(self, inner: Look) -> None:
        """Called when a nested run has ended: the rest of this run may use the tensors that it made."""
        self.labels.adopt(inner.labels, inner.outside)
        self.signature.has_custom |= inner.signature.has_custom
        self.reads_unseen |= inner.reads_unseen
        self.drew |= inner.drew
        self.wrapped_inside |= inner.wrapped_inside & self.outside.keys()

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        effects = effects_of(func)
        if self.undecided:
            self._decide(func, args, kwargs or {})
        at_depth = stack_depth() <= self.depth
        known = self.labels if at_depth else {}  # NOTE [inner wrappers]
        given, plain, labels = args, [], []  # type: tuple[Any, list[str], list[int | None]]
        for a in args:
            if isinstance(a, Tensor):
                if (entry := known.get(id(a))) is not None and entry[0]() is a and entry[2] == FIXED:
                    labels.append(entry[1])
                    continue
            elif kind_of(a.__class__) is not HOLDER:
                plain.append(plain_in(a))
                continue
            args = self._seen(func, args)
            labels, plain = self.labels.of_all(args), [*map(plain_in, args)]
            break
        if effects.only_writes and args is given and not kwargs:
            with internals.DisableTorchFunction():
                self.before_write(args[0])
        elif kwargs or effects.acts:
            named = dict(zip(kwargs, self._seen(func, kwargs.values()), strict=True)) if kwargs else {}
            return self._call(effects, func, args, named, (given, kwargs))
        if effects.multiplies or self.signature.tail is not None:
            out = self._maybe_tail(effects, func, args, {})
        else:
            self.call = func, args, {}
            out = func(*args)
            self.call = None
        if at_depth and type(out) is Tensor and out.requires_grad and not out.is_leaf:
            self.labels.note_result(out, self.position, effects.writes)
            self._note(func, self.signature.hash_of(out, plain), None if None in labels else hash(tuple(labels)))
        elif out is None or kind_of(out.__class__) is HOLDER:
            with internals.DisableTorchFunction():
                self.add_results(func, args[0] if out is None and effects.writes else out, args, labels, effects)
        return out

    def handled(self, func: Any, args: Any, kwargs: Any, out: Any, is_seen: bool) -> Any:
        with internals.DisableTorchFunction():
            if not is_seen and not all(map(self.has_made, acts_on(func, args, kwargs or {}))):
                raise RematError(OUT_OF_SIGHT.format(self.name, name_of(func)))
            if not all(self.labels.has(self.stand_in(t)) for t in tensors_in(out)):  # an alias, by `as_subclass`
                self.add_results(func, out)
            self.signature.tail = None  # the handler may keep the result
        return out

    def _call(self, effects: Effects, func: Any, args: Any, kwargs: Any, given: tuple[Any, Any]) -> Any:
        """Make a call that has keyword arguments or effects. `given`: `args` and `kwargs` as the user passed them."""
        if effects.moves_hooks:
            return func(*args, **kwargs)
        written = written_by(effects, args, kwargs)
        passed = (*args, *kwargs.values())
        with internals.DisableTorchFunction():
            if effects.hides_writes:
                self.labels.forget(args[0])
            labels = self.labels.of_all(passed)
            if effects.differentiates:
                self._check_graph(*args, **kwargs)
            for t in written:
                self.before_write(t)
            if effects.sets_data:
                self._set_data(*args)
            if effects.is_custom:
                self.signature.has_custom = True
                self.reads_unseen |= is_of_user(args[0])
                args = (watched(args[0], _InnerLook), *args[1:])
            if effects.reads_memory:
                tell_of_access(func, args, kwargs)
            if effects.sets_hook:
                tensor, hook = self._with_hook(args)
                args = tensor, unless_none(hook) if self.in_rerun and not self.in_checkpoint else hook
            if effects.retains_grad and self.in_rerun:  # with create_graph=True, it would hold the rerun's graph
                args = (internals.leaf_of_nothing(),)
            before = self._before_draw(func) if effects.draws else None
            self.signature.shows_nodes |= effects.shows_graph and not internals.called_by("torch.")
        if effects.looks_up:  # an operand does not hold what the user's tensor holds
            held = next((t for t, key in self.originals() if key == id(given[0][0])), given[0][0])
            return self._seen(func, (self._maybe_tail(effects, func, (held,), kwargs),))[0]
        out = self._maybe_tail(effects, func, args, kwargs)
        self._after_draw(before)
        if kind_of(out.__class__) is HOLDER or (out is None and written):
            with internals.DisableTorchFunction():
                self.add_results(func, written if out is None else out, passed, labels, effects)
        return as_given(out, written, effects, given) if written and self._swaps else out

    def _decide(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A call in an outer rerun of a checkpoint is about to use tensors for whose first use that waits."""
        self.outer._decide(func, args, kwargs)

    def _check_graph(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        """The run is about to differentiate outputs with respect to inputs."""
        ends = tensors_in(outputs), tensors_in(inputs)
        reached = inputs_reached(self.name, *ends, self.since, self.unhooked, self.has_made)
        self._note(torch.autograd.grad, hash(reached), None)

    def _maybe_tail(self, effects: Effects, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and note whether it begins or ends the tail: see `_tail.py`."""
        signature, position = self.signature, self.position
        if signature.tail is not None and not (effects.reads_no_value(args, kwargs) and torch.is_grad_enabled()):
            signature.tail = None
        out = self._do(func, args, kwargs)
        begins = effects.multiplies and is_large(out, args, effects.convolves) and not self._is_in_jvp()
        if begins and requires_grad_at_any_level(out):
            self._begin_tail(position, None, out)
        elif signature.tail is not None:
            self.tail_results += map(weakref.ref, tensors_in(out))
            self.tail_nodes.update(n for t in tensors_in(out) for n in nodes_of(t))
        return out

    def _do(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.call = func, args, kwargs
        out = func(*args, **kwargs)
        self.call = None
        return out

    def _begin_tail(self, position: int, call: Any, out: Any) -> None:
        self.signature.tail, self.signature.tail_call = position, call
        self.tail_number = internals.next_sequence_number()
        self.tail_results, self.tail_nodes = [*map(weakref.ref, tensors_in(out))], set()

    def _seen(self, func: Any, args: Iterable[Any]) -> Any:
        """The arguments of a call, with operands in place of originals."""
        if effects_of(func).moves_hooks:
            return args
        with internals.DisableTorchFunction():
            self._reader = func
            return tuple([self.read(a) if isinstance(a, Tensor) else map_in(self._read_leaf, a) for a in args])

    def _read_leaf(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.read(arg)
        self.notice(arg)
        return arg

    def read(self, tensor: Tensor, wrapped_inside: bool = False) -> Tensor:
        """Note that the run reads a tensor. Returns the tensor to read in its place.

        `wrapped_inside`: whether a transform inside the function has wrapped it: then no torch call reads it directly.
        """
        if isinstance(tensor, internals.FakeTensor) and effects_of(self._reader).is_metadata:
            return tensor  # a compiler asks: code that is called inside is compiled now
        value = self.stand_in(tensor)  # in an outer rerun, which may run below the original's level
        if value is tensor and stack_depth() > self.depth and self._is_wrapped_inside(tensor):
            return tensor
        if not (self.labels.has(unwrap_dead(value)) or self.labels.note_alias(value, self.outside)):
            if self.outer is not None:
                self.outer._reader = self._reader
                value = self.outer.read(tensor, wrapped_inside)
                if value is not tensor:
                    self._swaps[id(tensor)] = tensor, value
            if self._is_in_jvp() and not requires_grad_at_any_level(value):  # a tangent of what the run has made
                return value
            if not value.requires_grad and internals.dtensor_at_work():
                raise RematError(TAKEN_APART.format(self.name))
            if value.requires_grad and not torch.is_grad_enabled():
                self.read_quietly.add(id(value))
            self._add(value)
        if wrapped_inside and id(value) in self.outside:  # its own may die, and others get their ids
            self.wrapped_inside.add(id(value))
        return value

    def _is_wrapped_inside(self, tensor: Tensor) -> bool:
        """Whether a transform inside the function has wrapped a tensor. Then what it has wrapped is read."""
        below = unwrap_dead(tensor)
        if not self.depth < level_of(below) <= stack_depth():
            return False
        inner = internals.unwrapped(below)
        if self.read(inner, wrapped_inside=True) is not inner:  # in an outer rerun
            raise not_replaced(self.name, name_of(self._reader), inner)
        return True

    def _add(self, value: Tensor) -> None:
        if (key := id(value)) not in self.outside:
            label = self.number_of(value)
            self.outside[key] = Read(value, version_of(value), label, self._reader)
            self.labels.note(value, label)
            self.copies.note(key, self.outside, self._copied)

    def number_of(self, value: Tensor) -> int | None:
        """The label of a tensor from outside. In a nested run, what the outer run calls it."""
        if self.outer is not None:
            return in_nested(self.outer.label_of(value))
        made_unseen = requires_grad_at_any_level(value) and not is_from_before(value, self.since)
        return None if made_unseen else of_outside(len(self.outside))

    def label_of(self, tensor: Tensor) -> int | None:
        """The label of a tensor that a nested run is about to read: NOTE [labels]."""
        return self.labels.of(tensor)

    def _before_draw(self, func: Any) -> Any:
        """The state of the generators before a call that may draw; None if it need not be known."""
        return self.random.now() if not self.drew and isinstance(self.random, RandomState) else None

    def _after_draw(self, before: RandomState | None) -> None:
        self.drew = self.drew or not (before is None or before.is_current())

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        for other in (self.random, self.outer):
            if other is not None:
                other.notice(generator)

    def _set_data(self, tensor: Tensor, data: Tensor) -> None:
        """The run is about to do `tensor.data = data`."""
        if is_lazy(tensor):
            raise RematError(LAZY.format(self.name))
        if level_of(data) > max(level_of(tensor), 0):
            raise RematError(DATA_OF_A_LEVEL.format(self.name, list(tensor.shape), tensor.dtype))
        if not is_over(tensor, data):
            self.before_write(tensor)

    def before_write(self, written: Tensor) -> None:
        """Copy the outside tensors in this storage before the run changes them: reruns start from the copies."""
        self.copies.before_write(written, self.outside, self._copied)
        if self.outer is not None:
            self.outer.before_write(written)

    def _copied(self, value: Tensor) -> Tensor | None:
        if requires_grad_at_any_level(value):
            if self.outside[id(value)].reader and not is_from_before(value, self.since):
                return None  # the run may have made it, unseen: `Operands` finds out
            hint = MADE_INSIDE if isinstance(value, torch.nn.Parameter) else ""
            raise changes(self.name, value, hint)
        return value.clone()

    def _note(self, func: Any, shape: int, given: int | None) -> None:
        """Note a call whose result is differentiated. `shape`, `given`: hashes, as in `Signature.calls`."""
        if not self._is_in_jvp():
            self.position += 1
            self.signature.calls.append((func, shape, given))

    def _note_write(self, func: Any, call: int | None) -> None:
        self.signature.writes.add(call)

    def _is_in_jvp(self) -> bool:
        """Whether the `jvp` of an autograd.Function is running. Its calls do not belong to the signature."""
        return self._has_tangents and internals.inside_jvp_of_function()

    def add_call(self, name: str, out: Any, inner: Signature | None = None, remembered: Any = None) -> None:
        """Note a nested call of a function under remat, which returned `out`. `inner`: its signature.

        `remembered`: the record with which a rerun can skip the call; None if the call must run.
        """
        signature, position = self.signature, self.position
        signature.nests, signature.tail = signature.nests + 1, None
        calls = () if inner is None else inner.calls
        func = name, hash(tuple([(f, shape) for f, shape, _ in calls]))
        results, _ = _tree.flatten(out)
        self.add_results(func, results, (), [given for *_, given in calls])
        for write in () if inner is None else inner.writes:
            self._note_write(func, combined((hash(name), write)))
        if remembered is not None and self.position > position:
            self._begin_tail(position, remembered, results)

    def add_results(
        self, func: Any, out: Any, args: Iterable[Any] = (), labels: Any = (), effects: Effects | None = None
    ) -> None:
        """Note the tensors that a call returned or wrote to. `labels`: of its arguments. `effects`: of a torch call."""
        listed, new = effects is None or not effects.is_unlisted, effects is None or effects.writes
        found, differentiated = tensors_in(out), False
        if not found:
            return
        shapes = self.signature.hash_of(found[0], map(plain_in, args))
        if len(found) > 1:
            shapes = hash((shapes, *map(self.signature.hash_of, found[1:])))
        func, labels = in_order(func, labels)
        given, position = combined(labels), self.position
        call = combined((hash(func), shapes, given))
        is_custom = effects is not None and effects.is_custom
        for i, t in enumerate(found):
            requires_grad = in_graph(t)
            differentiated |= requires_grad
            if self.is_given_back(t):
                self.labels.returns(t)
                continue
            if not requires_grad:
                inside = layers_up_to(t, self.depth)
                if not self.labels.returns(inside[0]):
                    self.labels.note_plain(inside[0], combined((call, i)))
                continue
            self.labels.results.append(weakref.ref(t))
            if new or is_custom or not self.labels.returns(t):
                label = of_result(position, i) if listed else None
                if is_custom and self.sees_custom and call is not None:
                    label = hash((call, i)) | 1  # odd: NOTE [labels]
                for layer in layers_up_to(t, self.depth):
                    self.labels.note(layer, label)
        if listed and differentiated:
            self._note(func, shapes, given)
        elif listed and effects is not None and effects.writes and not self._is_in_jvp():
            self._note_write(func, call)

    def is_saved(self, tensor: Tensor) -> bool:
        """Whether a nested call that reads a plain tensor from outside saves it, in the run of a checkpoint."""
        return True

    def is_given_back(self, result: Tensor) -> bool:
        """Whether a call returned a tensor from outside unchanged, perhaps wrapped by a transform around the run."""
        return any(id(self.stand_in(t)) in self.outside for t in layers(result))

    def _with_hook(self, args: Any, inner: tuple[int, ...] = ()) -> Any:
        """The arguments of `register_hook`. `inner`: of a hook that a nested run sets, the position there.

        A rerun puts a hook that is not for its level on an unused tensor.
        """
        if internals.is_hook_of_fully_shard(args[1]):
            raise RematError(SHARDED.format(self.name))
        self.sets_hooks = True
        position = (self.position, *inner)
        given = args if self.outer is None else self.outer._with_hook(args, position)
        if id(args[0]) not in self.outside:
            level = max(internals.level_of(args[0]), 0)
            level = ELSEWHERE if given is not args else NO_LEVEL if level > self.depth else level
            self.signature.add_hook(position, level, args[1])
        return given

    def originals(self) -> list[tuple[Tensor, int]]:
        """In an outer rerun: tensors that a list, say, may hold instead of stand-ins, and the identities of these."""
        return [(t, id(stand_in)) for t, stand_in in self._swaps.values()]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The operand that replaces a tensor in a rerun, or the tensor."""
        return self._swaps.get(id(tensor), (tensor, tensor))[1]

    def has_made(self, tensor: Tensor) -> bool:
        """Whether the run made this tensor."""
        return id(self.stand_in(tensor)) not in self.outside and self.labels.has(tensor)


class _InnerLook(Look):
    """Watches the `forward` of an autograd.Function under a transform, which runs below the level of the call."""

    def read(self, tensor: Tensor, wrapped_inside: bool = False) -> Tensor:
        if self.labels.has(tensor) or (self.outer.stand_in(tensor) is tensor and self._is_wrapped_inside(tensor)):
            return tensor
        value = self.outer.read(tensor, wrapped_inside)
        while internals.level_of(value) > self.depth and not value.requires_grad:  # an operand of a rerun
            value = internals.unwrapped(value)
        self._add(value)
        return value

    def before_write(self, written: Tensor) -> None:
        self.outer.before_write(written)
