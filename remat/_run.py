"""A run of a user's function, seen call by call."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat._context import RandomState
from remat._errors import CheckpointError, RematError

Signature = tuple[Any, ...]


def _signature(func: Any, out: Any) -> Signature | None:
    """What is compared of a call: the function, and shape and dtype of each tensor that it returned."""
    if isinstance(out, Tensor):
        return func, (out.shape, out.dtype)
    if isinstance(out, (tuple, list)) and any(isinstance(o, Tensor) for o in out):
        return func, *((o.shape, o.dtype) for o in out if isinstance(o, Tensor))
    return None


def describe(signature: Signature) -> str:
    """A call in words: its name, and what it returned."""
    func, *results = signature
    name = torch.overrides.resolve_name(func) or getattr(func, "__qualname__", repr(func))
    return f"{name} -> " + ", ".join(f"{dtype}{list(shape)}" for shape, dtype in results)


def _call_site() -> str:
    """file:line of the user's code that is running: the innermost frame outside of torch and remat."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torch", "remat", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


_STATISTICS = ("batch_norm", "instance_norm")
_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_LOGIC = ["and", "or", "xor", "lshift", "rshift"]
_ASSIGNMENTS = {"__setitem__", *(f"__i{op}__" for op in _ARITHMETIC + _LOGIC)}


@functools.cache
def _may_write(func: Any) -> bool:
    """Whether a torch function writes to an argument, by its name."""
    name = getattr(func, "__name__", "")
    return name in _STATISTICS or name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a call of `func` writes to."""
    found: list[Any] = []
    if getattr(func, "__name__", "") in _STATISTICS:
        found += [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
    elif _may_write(func) or kwargs.get("inplace"):
        found += args[:1] or list(kwargs.values())[:1]
    out = kwargs.get("out")
    found += out if isinstance(out, (tuple, list)) else [out]
    return [t for t in found if isinstance(t, Tensor)]


PURITY = (
    "A function under remat must do the same each time: it may depend on its arguments, on what it closes over and on "
    "torch's random state, not on what other code changes in the meantime. Pass what varies as an argument."
)
CHANGES = (
    "remat: {} changes an argument or a captured tensor of shape {}, {} in place, at {}. Its rerun would start from "
    "the changed value. Change a copy instead: x = x.clone()."
)


class Run(TorchFunctionMode):
    """Sees each torch call of one run of a function, on the stack of transforms where it stands.

    NOTE [inside and outside]: a tensor is told apart by identity. Made inside are the results of calls that were
    seen. A tensor that no seen call made was there before, or was made out of sight (by C++ code, by a transform's
    wrapping): the first outlives the run, the second does not, so the question is put when the run is over.

    Calls that touch nothing but constants made inside are not compared with the rerun: a table that is computed on
    first use and kept (rotary embeddings) is there already when the rerun comes.
    """

    def __init__(self, name: str, given: Iterable[Tensor], expected: list[Signature] | None = None) -> None:
        """A run that is given tensors. `expected`: what the forward did, for a rerun."""
        super().__init__()
        self.name = name
        self.given = {id(t): weakref.ref(t) for t in given}
        """Tensors from outside that count: arguments, and what it was seen to read that is differentiated."""
        self.made = set(self.given)
        """Identities of what depends on them. That of a dead tensor may stay: nothing from outside can have it now."""
        self.constants: dict[int, weakref.ref[Tensor]] = {}
        """What was made inside and depends on nothing from outside."""
        self.outside: dict[int, weakref.ref[Tensor]] = {}
        """What was read, and no call was seen to make."""
        self.in_cells: set[int] = set()
        self.versions: dict[int, int] = {}
        self.snapshots: dict[int, Tensor] = {}
        """Tensors from outside that it wrote to, as they were before."""
        self.random: RandomState | None = None
        self.log: list[Signature] = []
        self.current: Any = None
        """The call that is running: function, args, kwargs."""
        self.paused = False
        self._expected = expected
        self._swaps: dict[int, Tensor] = {}
        self._swapped: list[Tensor] = []  # keeps the identities in `_swaps`
        self._unread: set[int] = set()
        self._outer = active_runs()
        self._depth = internals.stack_depth()
        self._since = internals.next_sequence_number()
        self._live_reads = 0

    @property
    def in_rerun(self) -> bool:
        """Whether it is part of the rerun of an outer function."""
        return any(run._expected is not None for run in self._outer)

    def swap(self, original: Tensor, operand: Tensor, *, live: bool, read: bool) -> None:
        """In this rerun, `operand` stands for `original`.

        **Arguments:**

        - `live`: whether it is differentiated, or an argument.
        - `read`: whether the forward was seen to read it.
        """
        self._swaps[id(original)] = operand
        self._swapped.append(original)
        if not live:
            self.constants[id(operand)] = weakref.ref(operand)
        if not read:
            self.made.discard(id(operand))
            self._unread |= {id(original), id(operand)}

    def swapped(self, tensor: Tensor) -> Tensor:
        """The operand that stands for `tensor`, or itself."""
        return self._swaps.get(id(tensor), tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        made = self.made
        live, known = False, not kwargs
        for arg in args:
            if isinstance(arg, Tensor):
                if id(arg) in made:
                    live = True
                else:
                    known = False
            elif isinstance(arg, (list, tuple, dict)):
                known = False
        if not known:
            live, args, kwargs = self._look_closer(args, kwargs or {})
        if kwargs or _may_write(func):
            self._before_write(_written(func, args, kwargs or {}))
        self.current = func, args, kwargs or {}
        out = func(*args, **kwargs) if kwargs else func(*args)
        self.current = None
        signature = _signature(func, out)
        if signature is not None:
            self._note(func, signature, out, live)
        return out

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
            self._live_reads += id(arg) in self.made
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
        if key in self.made:
            return tensor
        if key in self._unread:
            if not read:
                return self.swapped(tensor)
            raise stranger(self.name, tensor)
        if key in self._swaps:
            return self._swaps[key]
        constant = self.constants.get(key)
        if constant is not None and constant() is tensor:
            return tensor
        if internals.is_wrapper(tensor) and not self._known_outside(key):
            # Wrapped by a transform inside of the function, which may be over by now.
            inside = internals.level_of(tensor) > self._depth
            if inside or (internals.is_dead(tensor) and self._knows(internals.unwrapped(tensor))):
                return self._resolve_wrapper(tensor)
        if self._made_out_of_sight(tensor):
            self.made.add(key)
            return tensor
        if not read and self._expected is not None:
            return tensor
        if key not in self.outside or self.outside[key]() is not tensor:
            self.outside[key] = weakref.ref(tensor)
            self.versions[key] = version(tensor)
        if tensor.requires_grad or internals.is_wrapper(tensor):
            self.made.add(key)
            self.given[key] = weakref.ref(tensor)
        return tensor

    def _knows(self, tensor: Tensor) -> bool:
        """Whether a tensor was given, or seen to be made."""
        constant = self.constants.get(id(tensor))
        return id(tensor) in self.made or (constant is not None and constant() is tensor)

    def _known_outside(self, key: int) -> bool:
        # Below its forward's stack, a level of that stack may have the number of one that began since.
        return any(key in run._swaps for run in self._outer)

    def _made_out_of_sight(self, tensor: Tensor) -> bool:
        """Whether autograd knows that this tensor was made since the run began."""
        with internals.DisableTorchFunction():
            node = tensor.grad_fn
            if node is None or internals.sequence_number(node) < self._since:
                return False
            # The node of a view is made anew where its base has been changed in place.
            base = tensor._base if tensor._is_view() else None
            return base is None or id(base) in self.made or self._made_out_of_sight(base)

    def _resolve_wrapper(self, wrapper: Tensor) -> Tensor:
        """A transform inside of the function has wrapped a tensor, out of sight."""
        inner = internals.unwrapped(wrapper)
        with internals.DisableTorchFunction():
            resolved = self.resolve(inner)
            if resolved is not inner:
                self._swapped.append(wrapper)
                self._swaps[id(wrapper)] = result = internals.rewrap_like(wrapper, resolved)
                self.made.add(id(result))
                return result
        if id(inner) in self.made:
            self.made.add(id(wrapper))
        else:
            self.constants[id(wrapper)] = weakref.ref(wrapper)
        return wrapper

    # Writing.

    def _before_write(self, tensors: list[Tensor]) -> None:
        """Keep the value that a tensor from outside had before this run changed it: the rerun starts from it."""
        with internals.DisableTorchFunction():
            for written in tensors:
                for t in (written, written._base) if written._is_view() else (written,):
                    if t is None or id(t) in self.snapshots or not (id(t) in self.given or id(t) in self.outside):
                        continue
                    if internals.requires_grad_at_any_level(t):
                        raise RematError(CHANGES.format(self.name, list(t.shape), t.dtype, _call_site()))
                    self.snapshots[id(t)] = t.clone()

    def _note(self, func: Any, signature: Signature, out: Any, live: bool) -> None:
        for tensor in (out,) if isinstance(out, Tensor) else out:
            if isinstance(tensor, Tensor):
                self.adopt(tensor, live)
        # Inside of an autograd.Function grad mode is off. Under a transform, unlike at the base, all of it is one call.
        if not live or not torch.is_grad_enabled() or internals.is_custom_function_call(func):
            return
        if internals.forward_ad_active() and internals.inside_autograd_function():
            return  # its `jvp`
        self.log.append(signature)
        if self._expected is not None:
            position = len(self.log) - 1
            expected = self._expected[position] if position < len(self._expected) else None
            if expected != signature:
                raise CheckpointError(
                    f"remat: the rerun of {self.name} differs from its forward run at call {position + 1}: "
                    f"{describe(signature)} at {_call_site()}, where the forward "
                    + (f"ran {describe(expected)}" if expected else "had ended")
                    + f". {PURITY}"
                )

    def adopt(self, tensor: Tensor, live: bool = True) -> None:
        """Note a tensor that was made inside."""
        key = id(tensor)
        known = self.outside.get(key)
        if known is not None:
            if known() is tensor:
                if live:  # written to
                    self.made.add(key)
                return
            del self.outside[key]
        if live:
            self.made.add(key)
            self.constants.pop(key, None)
        else:
            self.made.discard(key)  # it was of a tensor that has died since
            self.constants[key] = weakref.ref(tensor)

    def computed(self, result: Tensor) -> bool:
        """Whether a result has a derivative of this run: not where it is, or views, a tensor from outside."""
        with internals.DisableTorchFunction():
            return self._computed(result)

    def _computed(self, result: Tensor) -> bool:
        key = id(result)
        constant = self.constants.get(key)
        if key in self.given or (constant is not None and constant() is result) or self._views_outside(result):
            return False
        if not (result.requires_grad or internals.is_wrapper(result)):
            return False
        if key not in self.made and (key in self.in_cells or result.is_leaf) and not internals.is_wrapper(result):
            return False  # never read, and returned as it is
        self.resolve(result)  # made out of sight, or never read: then it is an operand as well
        return result.is_floating_point() or result.is_complex()

    def _views_outside(self, result: Tensor) -> bool:
        """A view keeps nothing alive but what it views: it stays as it is, and so do changes of it in place."""
        if not result._is_view():
            return False
        outside = [t for ref in (*self.outside.values(), *self.given.values()) if (t := ref()) is not None]
        return any(result._base is t or result._base is t._base for t in outside)

    def finish(self) -> None:
        """Check that a rerun ran to the end of what the forward ran."""
        if self._expected is not None and len(self.log) < len(self._expected):
            raise CheckpointError(
                f"remat: the rerun of {self.name} ended after {len(self.log)} of {len(self._expected)} torch calls; "
                f"the forward went on with {describe(self._expected[len(self.log)])}. {PURITY}"
            )


def stranger(name: str, tensor: Tensor) -> CheckpointError:
    """The rerun of a function depends on what its forward did not."""
    with internals.DisableTorchFunction():
        return CheckpointError(
            f"remat: the rerun of {name} read a tensor of shape {list(tensor.shape)}, {tensor.dtype} from outside that "
            f"its forward run was not seen to read. {PURITY}"
        )


def version(tensor: Tensor) -> int:
    """How often the memory of a tensor was written to, where torch counts that."""
    with internals.DisableTorchFunction():
        return -1 if tensor.is_inference() else tensor._version


def active_runs() -> list[Run]:
    """The runs that the current code is part of, innermost last."""
    return [mode for mode in internals.function_modes() if isinstance(mode, Run) and not mode.paused]


@contextlib.contextmanager
def paused_runs() -> Iterator[None]:
    """Within it, the active runs look away: what happens in a node's backward was not called by the user."""
    runs = active_runs()
    for run in runs:
        run.paused = True
    try:
        yield
    finally:
        for run in runs:
            run.paused = False
