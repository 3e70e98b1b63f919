"""A run of a user's function, seen call by call."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._context import KeptDraws, RandomState
from remat._effects import kind_of, written_by
from remat._errors import PURITY, CheckpointError, RematError, call_site
from remat._log import Comparison, Log, Read, Signature, results_of
from remat._tail import Spared, last_product
from remat._watch import Watch, active_watches

_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device})
_EXACT = _PLAIN - {float}
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

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
CHANGES = (
    "remat: {} changes an argument or a captured tensor of shape {}, {} in place, at {}. Its rerun would start from "
    "the changed value. Change a copy instead: x = x.clone()."
)
MADE_HERE = " If it is a parameter of a module that is made here, make the module outside."
ARRAY_CHANGED = (
    "{} reads a tensor of shape {}, {} in the memory of an array, and the array has changed since, so its rerun would "
    "read something else. Make a tensor of its own: torch.tensor(array)."
)
CHANGES_SHARED = (
    "{} changes tensors of shape {} and {} in place that it was given or captured and that share their memory. "
    "Its rerun changes a copy of each. Give it one of them, and take views of that inside."
)


class Run(Watch):
    """Sees each torch call of one run of a function, on the stack of transforms where it stands.

    NOTE [inside and outside]: a tensor is told apart by identity. Made inside are the results of calls that were
    seen. A tensor that no seen call made was there before, or was made out of sight (by C++ code, by a transform's
    wrapping): the first outlives the run, the second does not, so the question is put when the run is over.

    Calls that touch nothing but constants made inside are not compared with the rerun: a table that is computed on
    first use and kept (rotary embeddings) is there already when the rerun comes.
    """

    def __init__(self, name: str, given: Iterable[Tensor], forward: Log | None = None) -> None:
        """A run that is given tensors. `forward`: what the forward did, for a rerun."""
        super().__init__()
        self.name = name
        self.given = {id(t): weakref.ref(t) for t in given}
        """Tensors from outside that count: arguments, and what it was seen to read that is differentiated."""
        self.reads = {key: Read(i) for i, key in enumerate(self.given)} if forward is None else {}
        """What is compared of the tensors from outside: which one it is."""
        self.made = dict(self.given)
        """What depends on them, by identity."""
        self.constants: dict[int, weakref.ref[Tensor]] = {}
        """What was made inside and depends on nothing from outside."""
        self.outside: dict[int, weakref.ref[Tensor]] = {}
        """What was read, and no call was seen to make."""
        self.handed_on: set[int] = set()
        """Those of them that no torch call has read: nested functions have them."""
        self.in_cells: set[int] = set()
        self.versions: dict[int, int] = {}
        self.arrays: dict[int, bytes] = {}
        """Of tensors from outside in the memory of arrays: what was there."""
        self.snapshots: dict[int, Tensor] = {}
        """Tensors from outside that it wrote to, as they were before."""
        self.random: RandomState | KeptDraws | None = None
        self.level: int | None = None
        """In a rerun, the level whose derivative it is for."""
        self.log = Log()
        self.is_rerun = forward is not None
        self._comparison = None if forward is None else Comparison(name, forward)
        self._unread: set[int] = set()
        self._dispatch_modes = internals.dispatch_modes()
        self._around = active_watches()
        self._outer_reruns = [run for run in self._around if run.is_rerun]
        self._depth = internals.stack_depth()
        self._since = internals.next_sequence_number()
        self._live_reads = 0
        self._wrapped_memory: set[int] = set()  # that what it made under a transform of its own is a wrapper of
        self._owners: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}  # what `.data` gave, and of what
        self._numbers = len(self.given)
        self.spared: Spared | None = None
        """In a rerun, what follows a product that was not computed."""
        self.spares_tail = False
        """Whether this rerun need not compute its last product."""

    @property
    def in_rerun(self) -> bool:
        """Whether it is part of the rerun of an outer function."""
        return bool(self._outer_reruns)

    def take(
        self,
        original: Tensor,
        operand: Tensor,
        key: int,
        *,
        live: bool,
        read: Read | None,
        unread: bool,
        written: bool,
    ) -> None:
        """In this rerun, `operand` stands for `original`.

        **Arguments:**

        - `key`: the identity of the original in the forward; it may be gone.
        - `live`: whether it is differentiated, or an argument.
        - `read`: what the forward called it.
        - `unread`: whether the forward was not seen to read it.
        - `written`: whether the forward has written to it.
        """
        if read is None or self.reads.get(id(operand), read) != read:
            self.reads.pop(id(operand), None)
        else:
            self.reads[id(operand)] = read
            assert self._comparison is not None
            self._comparison.operands[read] = operand
            if written:
                self._comparison.written.add(read)
        self.swap(original, operand, key)
        if not live:
            self.constants[id(operand)] = weakref.ref(operand)
        if unread:
            self.made.pop(id(operand), None)
            self._unread |= {id(original), id(operand)}

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on what was given."""
        return has(self.made, tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `torch.cond` is compiled under the modes that are active. With fewer, one at work has been popped.
        if torch.compiler.is_compiling() or self.paused or internals.dispatch_modes() < self._dispatch_modes:
            return func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind.sets_hooks:
            return func(*args)
        made = self.made
        live, known = False, not kwargs
        for arg in args:
            if isinstance(arg, Tensor):
                ref = made.get(id(arg))
                if ref is not None and ref() is arg:
                    live = True
                else:
                    known = False
            elif type(arg) not in _PLAIN and isinstance(arg, (list, tuple, dict, torch.Generator)):
                known = False
        if not known:
            live, args, kwargs = self._look_closer(args, kwargs or {})
        if self._comparison is not None and self.outside:
            args, kwargs = self._comparison.as_in_forward(func, args, kwargs or {}, self.outside)
        if kwargs or kind.writes:
            self._before_write(written_by(func, args, kwargs or {}))
        elif kind.sets_data:
            self._before_data(args[0])
        if func is Tensor.register_hook:
            if internals.is_hook_of_fully_shard(args[1]):
                raise RematError(SHARDED.format(self.name))
            if id(args[0]) in self._originals or not self._takes_hook(args[0]):
                args = (torch.empty(0, requires_grad=True), *args[1:])  # the forward has put the hook on the tensor
        with self.random.watched() if kind.draws and self.random is not None else _NOTHING:
            if live and self.spares_tail and self._comparison is not None and self._comparison.at_tail(func):
                self.spared = Spared(self.name)
                out = self.spared.product(func, args, kwargs or {})
            else:
                out = func(*args, **kwargs) if kwargs else func(*args)
                if self.spared is not None:
                    self.spared.add(func, args, kwargs or {}, out)
        if self._comparison is None:
            result = out if live else None
            self.log.tail = last_product(self.log.tail, len(self.log.calls), func, args, kwargs or {}, result)
        if kind.gives_data:
            with internals.DisableTorchFunction():
                owner = self._owner(args[0])
            if owner is not None:
                self._owners[id(out)] = weakref.ref(out), weakref.ref(owner)
        with internals.DisableTorchFunction():  # the runs around this one look on
            results = results_of(out)
            if results and func is not Tensor.requires_grad_:  # where the rerun may find that it is so already
                self._note(func, args, kwargs, results, out, live)
        if not results and type(out) not in _EXACT:
            self.log.reads_values = True
        return out

    def _takes_hook(self, tensor: Tensor) -> bool:
        """Whether to put a hook on a tensor: of reruns, for the derivative of its own level alone."""
        if self._comparison is not None:
            level = self._comparison.next_hook()
            return level is None or level == self.level
        level = max(internals.level_of(tensor), 0)
        self.log.hooks.append(None if level > self._depth else level)
        return True

    # Reading.

    def _look_closer(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        before = self._live_reads
        args = tuple(self._visit(a) for a in args)
        kwargs = {k: self._visit(v) for k, v in kwargs.items()}
        return self._live_reads > before, args, kwargs

    def _visit(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            arg = self.resolve(arg)
            self._live_reads += self.is_made(arg)
            return arg
        if type(arg) in _PLAIN:
            return arg
        if isinstance(arg, (list, tuple)) and any(isinstance(a, (Tensor, list, tuple, dict)) for a in arg):
            items = [self._visit(a) for a in arg]
            return type(arg)(*items) if hasattr(arg, "_fields") else type(arg)(items)
        if isinstance(arg, dict):
            return {k: self._visit(v) for k, v in arg.items()}
        if isinstance(arg, torch.Generator) and self.random is not None:
            self.random.notice(arg)
        return arg

    def resolve(self, tensor: Tensor, *, read: bool = True) -> Tensor:
        """The tensor to use in the place of `tensor`: itself, or the operand that stands for it.

        `read`: whether a torch call reads it, or it is but handed on to a nested function.
        """
        key = id(tensor)
        if self.is_made(tensor):
            return tensor
        if key in self._unread:
            if not read:
                return self.swapped(tensor)
            raise stranger(self.name, tensor, f" at {call_site()}")
        if key in self._swaps:
            return self._swaps[key]
        if has(self.constants, tensor):
            return tensor
        held = self._held(tensor)
        if held is not tensor:
            return held
        self.log.tail = None  # somebody unseen may have read values
        if key in self.outside and not has(self.outside, tensor):
            self._forget(key)
            self.reads.pop(key, None)
        if internals.is_wrapper(tensor) and not self._known_outside(key):
            # Wrapped by a transform inside of the function, which may be over by now.
            inside = internals.level_of(tensor) > self._depth
            if inside or (internals.is_dead(tensor) and self._knows(internals.unwrapped(tensor))):
                return self._resolve_wrapper(tensor)
        if self._made_out_of_sight(tensor) or self._is_undifferentiated_inside(tensor):
            self._note_made(tensor)
            return tensor
        with internals.DisableTorchFunction():
            if not tensor.requires_grad and internals.dtensor_at_work():
                raise RematError(TAKEN_APART.format(self.name))
            if not read and self._comparison is not None:
                return tensor.detach()  # nothing in the forward was differentiated by it
        if key not in self.outside:
            self.outside[key] = weakref.ref(tensor)
            self.versions[key] = self.version(tensor)
            if self._comparison is None and (digest := internals.array_digest(tensor)) is not None:
                self.arrays[key] = digest
            self._numbers += 1
            if self._comparison is None:
                self.reads[key] = Read(self._numbers)
            if not read:
                self.handed_on.add(key)
        if read:
            self.handed_on.discard(key)
        with _NOTHING if read else internals.DisableTorchFunction():  # the runs around this one see who reads
            differentiated = tensor.requires_grad
        if differentiated or internals.is_wrapper(tensor):
            self.given[key] = weakref.ref(tensor)
            if read:
                self.made[key] = weakref.ref(tensor)
        return tensor

    def _knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was given, or seen to be made."""
        return self.is_made(tensor) or has(self.constants, tensor)

    def _known_outside(self, key: int) -> bool:
        # Below its forward's stack, a level of that stack may have the number of one that began since.
        return any(run.knows(key) for run in self._outer_reruns)

    def _made_out_of_sight(self, tensor: Tensor) -> bool:
        """Whether autograd knows that this tensor was made since the run began."""
        with internals.DisableTorchFunction():
            node = tensor.grad_fn
            if node is None and internals.is_wrapper(tensor):  # not differentiated at its own level
                return self._made_out_of_sight(internals.unwrapped(tensor))
            if node is None or internals.sequence_number(node) < self._since:
                return False
            # The node of a view is made anew where its base has been changed in place.
            base = tensor._base if tensor._is_view() else None
            if base is None or (self.is_made(base) and id(base) not in self.given):
                return True
            return self._made_out_of_sight(base)

    def _is_undifferentiated_inside(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd knows nothing of must come from inside of the function.

        A transform in it has unwrapped what a seen call returned; or it is a tangent, for the `jvp` of a Function.
        """
        if not self._wrapped_memory and not internals.forward_ad_active():
            return False
        with internals.DisableTorchFunction():
            if internals.requires_grad_at_any_level(tensor):
                return False
            if internals.forward_ad_active() and internals.inside_jvp_of_function():
                return True
            known = [t for ref in (*self.outside.values(), *self.given.values()) if (t := ref()) is not None]
            return internals.memory_of(tensor) in self._wrapped_memory.difference(map(internals.memory_of, known))

    def _resolve_wrapper(self, wrapper: Tensor) -> Tensor:
        """A transform inside of the function has wrapped a tensor, out of sight."""
        inner = internals.unwrapped(wrapper)
        with internals.DisableTorchFunction():
            resolved = self.resolve(inner)
            if resolved is not inner:
                self._swapped.append(wrapper)
                self._swaps[id(wrapper)] = result = internals.rewrap_like(wrapper, resolved)
                self._note_made(result)
                return result
        if self.is_made(inner):
            self._note_made(wrapper)
        else:
            self.constants[id(wrapper)] = weakref.ref(wrapper)
        return wrapper

    def _note_made(self, tensor: Tensor) -> None:
        self.made[id(tensor)] = weakref.ref(tensor)
        self.reads.pop(id(tensor), None)  # it was of a tensor that has died since

    # Writing.

    def _before_write(self, tensors: list[Tensor]) -> None:
        """Keep the value that a tensor from outside had before this run changed it: the rerun starts from it."""
        for written in tensors:
            with internals.DisableTorchFunction():
                owner = self._owner(written)
            for t in (written,) if owner is None else (written, self._held(owner)):
                if id(t) in self.snapshots or not (has(self.given, t) or has(self.outside, t)):
                    continue
                with internals.DisableTorchFunction():
                    differentiated = internals.requires_grad_at_any_level(t)
                if differentiated:
                    made_here = MADE_HERE if isinstance(t, torch.nn.Parameter) else ""
                    raise RematError(CHANGES.format(self.name, list(t.shape), t.dtype, call_site()) + made_here)
                self.snapshots[id(t)] = self._copy(t)

    def _owner(self, tensor: Tensor) -> Tensor | None:
        """What has the memory of a tensor: what it is a view of, or the `.data` of. None: that is gone."""
        base = tensor if tensor._base is None else tensor._base
        known = self._owners.get(id(base))
        return known[1]() if known is not None and known[0]() is base else base

    def _before_data(self, tensor: Tensor) -> None:
        """The same where it gets other memory: a parameter may, that hooks gather for a while."""
        with internals.DisableTorchFunction():
            differentiated = internals.requires_grad_at_any_level(tensor)
        if not differentiated:
            self._before_write([tensor])

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy of what the runs around this one read in the place of a tensor. It is no call of the function."""
        live = []
        for run in reversed(self._around):
            tensor = run.resolve(tensor)
            live.append(run.is_made(tensor))
        with internals.DisableTorchFunction():
            copy = tensor.clone()
        for run, depends in zip(reversed(self._around), live, strict=True):
            run.adopt(copy, depends)
        return copy

    def _held(self, tensor: Tensor) -> Tensor:
        """The tensor from outside that `tensor` stands for in the rerun of an outer run, or itself."""
        for run in self._outer_reruns:
            held = self.outside.get(run.key_of(tensor) or 0, lambda: None)()
            if held is not None and self._for_outer_runs(held) is tensor:
                return held
        return tensor

    def _note(self, func: Any, args: Any, kwargs: Any, results: Any, out: Any, live: bool) -> None:
        given = (*args, *kwargs.values()) if kwargs else args
        if func is Tensor.__deepcopy__:
            given = args[:1]  # the memo has what the call has put there
        reads = self._reads(given) if live else ()
        for tensor in (out,) if isinstance(out, Tensor) else out:
            if isinstance(tensor, Tensor):
                self.adopt(tensor, live, same_as=self._given_back(tensor, given))
        if not live:
            self._note_constant(func, args)
        # Inside of an autograd.Function grad mode is off. Under a transform, unlike at the base, all of it is one call.
        if not live or not torch.is_grad_enabled() or internals.is_custom_function_call(func):
            return
        if internals.forward_ad_active() and internals.inside_jvp_of_function():
            return  # its `jvp`
        signature = Signature(func, results, reads)
        if self._comparison is None:
            self.log.note(signature, out)
        else:
            self._comparison.next(signature, out)

    def _given_back(self, tensor: Tensor, args: Sequence[Any]) -> Any:
        """The argument that a call has returned as it is: `x.to(x.dtype)`, `x.add_(1)`.

        Where something stands for it in the rerun of an outer run, that comes back; `grad` and `jvp` wrap it.
        """
        for arg in args:
            if arg is tensor:
                return arg
        if not (self._outer_reruns or internals.is_wrapper(tensor)):
            return None
        stands = args
        if self._outer_reruns:
            stands = [self._for_outer_runs(a) if isinstance(a, Tensor) else a for a in args]
        layer = tensor
        while True:
            for arg, stand in zip(args, stands, strict=True):
                if stand is layer:
                    return arg
            if not internals.is_wrapper(layer):
                return None
            layer = internals.unwrapped(layer)

    def _for_outer_runs(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor in the reruns around this run."""
        for run in reversed(self._outer_reruns):
            tensor = run.swapped(tensor)
        return tensor

    def version(self, tensor: Tensor) -> int:
        """How often the tensor was written to, or what stands for it in a rerun around this run."""
        return version(self._for_outer_runs(tensor))

    def _note_constant(self, func: Any, args: Iterable[Any]) -> None:
        """What a rerun finds computed may be read in the place where the forward read it, not where it came from."""
        for arg in args:
            if not isinstance(arg, Tensor):
                continue
            read = self.reads.get(id(arg))
            if self._comparison is None:
                self.log.constant_reads[func, id(arg)] = weakref.ref(arg)
                if read is not None:
                    self.log.known_reads.add((func, read))
            elif id(arg) in self._originals and not self._comparison.has_read(func, self._originals[id(arg)], read):
                raise stranger(self.name, arg, f" at {call_site()}")

    def _reads(self, args: Iterable[Any]) -> tuple[Any, ...]:
        found: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                found.append(self.reads.get(id(arg)))
            elif type(arg) in _PLAIN or isinstance(arg, float):
                found.append(arg)
            elif isinstance(arg, (tuple, list)):
                found.append(self._reads(arg))
            elif isinstance(arg, dict):
                found.append(self._reads(arg.values()))
            elif isinstance(arg, slice):
                found.append(self._reads((arg.start, arg.stop, arg.step)))
            else:
                found.append(type(arg))
        return tuple(found)

    def adopt(self, tensor: Tensor, live: bool = True, same_as: Tensor | None = None) -> None:
        """Note a tensor that was made inside, maybe as another one that has the same value."""
        tensor = self._held(tensor)
        key = id(tensor)
        if internals.level_of(tensor) > self._depth:
            with internals.DisableTorchFunction():
                self._wrapped_memory |= internals.wrapped_memory(tensor)
        known = self.outside.get(key)
        if known is not None and known() is tensor:
            if live:  # written to
                self.made[key] = weakref.ref(tensor)
            return
        given = self.given.get(key)
        if given is None or given() is not tensor:
            self._forget(key)
            if key not in self._originals:
                read = self.reads.get(id(same_as))
                if read is not None:
                    self.reads[key] = read
                elif key in self.reads:
                    del self.reads[key]
        if live:
            self.made[key] = weakref.ref(tensor)
            self.constants.pop(key, None)
        else:
            self.made.pop(key, None)
            self.constants[key] = weakref.ref(tensor)

    def _forget(self, key: int) -> None:
        """Another tensor has got the identity of one that has died since."""
        for table in (self.outside, self.given, self.versions, self.snapshots):
            if key in table:
                del table[key]
        self.handed_on.discard(key)

    def computed(self, result: Tensor) -> bool:
        """Whether a result has a derivative of this run: not where it is, or views, a tensor from outside."""
        with internals.DisableTorchFunction():
            return self._computed(result)

    def _computed(self, result: Tensor) -> bool:
        if has(self.given, result) or has(self.constants, result) or self._views_outside(result):
            return False
        if not (result.requires_grad or internals.is_wrapper(result)):
            return False
        if not self.is_made(result) and (id(result) in self.in_cells or self._was_there(result)):
            return False  # never read, and returned as it is
        self.resolve(result)  # made out of sight, or never read: then it is an operand as well
        return result.is_floating_point() or result.is_complex()

    def _was_there(self, tensor: Tensor) -> bool:
        """Whether autograd knows that this tensor was made before the run began."""
        node = tensor.grad_fn
        if node is None:  # a leaf, perhaps of a level
            return tensor.requires_grad or (
                internals.is_wrapper(tensor) and self._was_there(internals.unwrapped(tensor))
            )
        return internals.sequence_number(node) < self._since

    def _views_outside(self, result: Tensor) -> bool:
        """A view keeps nothing alive but what it views: it stays as it is, and so do changes of it in place."""
        if not result._is_view():
            return False
        outside = [t for ref in (*self.outside.values(), *self.given.values()) if (t := ref()) is not None]
        return any(result._base is t or result._base is t._base for t in outside)

    def finish(self) -> None:
        """Check that a rerun ran to the end of what the forward ran."""
        if self._comparison is not None:
            self._comparison.finish()


def has(table: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    """Whether a table by identity has a tensor, not one that has died and had the same identity."""
    ref = table.get(id(tensor))
    return ref is not None and ref() is tensor


def stranger(name: str, tensor: Tensor, where: str = "") -> CheckpointError:
    """The rerun of a function depends on what its forward did not."""
    with internals.DisableTorchFunction():
        return CheckpointError(
            f"remat: the rerun of {name} read a tensor of shape {list(tensor.shape)}, {tensor.dtype} from outside"
            f"{where} that its forward run was not seen to read. {PURITY} What a ScriptModule or an extension holds is "
            "not seen to be read: pass its tensors as arguments, or use remat.checkpoint. Nor is what compiled code "
            "reads that the function calls: compile around remat, torch.compile(remat(f)), or use remat.checkpoint."
        )


def version(tensor: Tensor) -> int:
    """How often the memory of a tensor was written to, where torch counts that."""
    with internals.DisableTorchFunction():
        return -1 if tensor.is_inference() else tensor._version


def active_runs() -> list[Run]:
    """The runs by `remat` that the current code is part of, innermost last."""
    return [mode for mode in active_watches() if isinstance(mode, Run)]


def paused_runs() -> contextlib.AbstractContextManager[None]:
    """Within it, the active runs look away: what happens in a node's backward was not called by the user."""
    runs = active_runs() if internals.function_modes_active() else []
    return _paused(runs) if runs else _NOTHING


@contextlib.contextmanager
def _paused(runs: list[Run]) -> Iterator[None]:
    for run in runs:
        run.paused = True
    try:
        yield
    finally:
        for run in runs:
            run.paused = False
