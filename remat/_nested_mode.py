"""A torch-function mode for runs that nest.

NOTE [one mode at a time]: calls nest, and each run has a look. If each look had an active mode, every torch call in a
nest of n calls would cost n times as much. So there is one active mode. It hands each torch call to the innermost look,
which asks its `outer` look about tensors that it does not know.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat._dispatch_mode import tell_of_access
from remat._effects import READS_MEMORY, tensors_in
from remat._saved import hooks_set_inside


class _Current(threading.local):
    look: Any = None
    mode: _ActiveMode | None = None


_current = _Current()


def current_look() -> Any:
    """The look at the innermost run of this thread, or None."""
    return _current.look


def current_call() -> tuple[Any, Any, Any] | None:
    """The torch call that is running in the innermost run of this thread: function, args, kwargs."""
    return None if _current.look is None else _current.look.call


class _ActiveMode(TorchFunctionMode):
    """Hands torch calls to a look. All looks have modes of one class: under another, dynamo would compile code anew.

    The user's modes and tensor subclasses handle a call first. The mode is active meanwhile: what they call is what
    the look has to see.
    """

    def __init__(self, look: Any) -> None:
        self.look = look
        self._seen: set[Any] | None = None
        """The functions that were called while a handler runs."""

    @internals.left_alone_by_dynamo
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():  # dynamo traces what is compiled inside, with the active modes
            return func(*args, **(kwargs or {}))
        if internals.function_modes_active() and _mode_handles():
            return self._by_mode(func, types, args, kwargs)
        for kind in types if types and _classes_handle(types) else ():
            out = self._by(kind, func, types, args, kwargs)
            if out is not NotImplemented:
                return out
        if self._seen is not None:
            self._seen.add(func)
        return self.look.on_call(func, args, kwargs)

    def _by_mode(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Let the mode on top handle a call."""
        mode = internals.pop_function_mode()
        try:
            if isinstance(mode, _ActiveMode):  # of a run around, which does not look now
                return self.__torch_function__(func, types, args, kwargs)
            return self._by(mode, func, types, args, kwargs)
        finally:
            internals.push_function_mode(mode)

    def _by(self, handler: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Let a mode or a class handle a call, and see what it calls."""
        around, self._seen = self._seen, set()
        try:
            with self:
                out = handler.__torch_function__(func, types, args, *(() if kwargs is None else (kwargs,)))
        finally:
            seen, self._seen = self._seen, around
        if around is not None:
            around |= seen
        return out if out is NotImplemented else self.look.handled(func, args, kwargs, out, func in seen)


_DEFAULT_HANDLER = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def is_mode_of_user(mode: Any) -> bool:
    """Whether a mode is the user's own, and not remat's, or one of torch's meters and tools."""
    return not type(mode).__module__.startswith(("remat.", "torch.utils.", "torch.distributed."))


def _mode_handles() -> bool:
    """Whether a mode of the user's is active, and none of `keyed` on top of it: a draw from a key is one call."""
    keyed = type(internals.top_function_mode()).__module__.startswith("remat.random.")
    return not keyed and any(map(is_mode_of_user, internals.function_modes()))


def _classes_handle(types: Any) -> bool:
    """Whether classes of tensors handle a call, and one of them is the user's."""
    all_tensors = internals.subclasses_active() and all(issubclass(kind, Tensor) for kind in types)
    return all_tensors and any(map(_has_handler, types))


def _has_handler(kind: type) -> bool:
    """Whether a class of tensors has a `__torch_function__` of the user's, a class method."""
    handler = getattr(kind.__torch_function__, "__func__", None)  # type: ignore[attr-defined]
    return handler not in (None, _DEFAULT_HANDLER) and not kind.__module__.startswith("torch.")


class Blind:
    """Notes nothing but reads of memory, which may be hollow."""

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in READS_MEMORY:
            tell_of_access(func, args, kwargs)
        return func(*args, **(kwargs or {}))

    def handled(self, func: Any, args: Any, kwargs: Any, out: Any, is_seen: bool) -> Any:
        return out


_BLIND: Any = Blind()


class NestedLook:
    """The base of looks.

    **Attributes:**

    - `is_rerun`: whether the run is a rerun.
    - `outer`: the look at the surrounding run. A rerun has none.
    - `call`: the torch call that is running: function, args, kwargs.
    """

    call: tuple[Any, Any, Any] | None = None
    is_rerun = False
    outer: Any = None
    _mode: _ActiveMode | None = None
    """The mode that hands torch calls to this look, if it is its own."""

    def __enter__(self) -> Any:
        self._before = look, mode = _current.look, _current.mode
        with internals.DisableTorchFunction():
            self.begin(None if self.is_rerun else look)
        while isinstance(top := internals.top_function_mode(), _ActiveMode) and top is not mode:
            internals.pop_function_mode()  # Ctrl-C has left it there
        is_on_top = mode is not None and top is mode
        if mode is not None:
            self._look_before = mode.look
            mode.look = self if is_on_top else _BLIND
        if not is_on_top:
            _current.mode = self._mode = _ActiveMode(self)
            internals.push_function_mode(self._mode)
        _current.look = self
        return self

    def __exit__(self, *error: Any) -> None:
        own, self._mode = self._mode, None
        if own is not None:
            own.look = _BLIND  # torch puts it back too late, where Ctrl-C comes while it is put aside for a call
        look, mode = self._before
        _current.look, _current.mode = look, mode
        if mode is not None:
            mode.look = self._look_before
        if own is not None and internals.top_function_mode() is own:
            internals.pop_function_mode()
        self.call = None  # after an error: its arguments lead to the graph, and the graph of a checkpoint leads here
        if self.outer is not None:
            self.outer.adopt(self)

    @property
    def in_rerun(self) -> bool:
        """Whether the run is a rerun, or in one."""
        return self.is_rerun or (self.outer is not None and self.outer.in_rerun)

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Called for each torch call of the run. Makes it."""
        raise NotImplementedError

    def handled(self, func: Any, args: Any, kwargs: Any, out: Any, is_seen: bool) -> Any:
        """Called with what a mode or class of the user's has made of a call. Returns it.

        `is_seen`: whether that made the call, seen by the look.
        """
        raise NotImplementedError

    def begin(self, outer: Any) -> None:
        """Called when the run begins. `outer`: the look at the surrounding run, or None."""
        raise NotImplementedError

    def adopt(self, inner: Any) -> None:
        """Called when a nested run has ended."""
        raise NotImplementedError

    def call_to_skip(self) -> Any:
        """The record of a nested call, if it can be skipped here. None: the call must run."""
        return None


def watched(function: Any, look_at: Any) -> Any:
    """An autograd.Function whose `forward` has a look of its own: under a transform, the mode sees only `apply`.

    `look_at`: called with the name of the function under remat, the tensors that `forward` is given, and None.
    """
    if made := vars(function).get("_remat_watched"):
        return made

    def forward(*args: Any) -> Any:
        outer = current_look()
        if outer is None:
            return function.forward(*args)
        with look_at(outer.name, tensors_in(args), None):
            return function.forward(*args)

    namespace = {"forward": staticmethod(forward), "__module__": function.__module__}
    function._remat_watched = made = type(function.__name__, (function,), namespace)
    return made


class unseen:  # noqa: N801
    """A context for torch calls of autograd or remat, which no look notes. A class is faster than a generator."""

    __slots__ = ("_before", "_look", "_mode")

    def __enter__(self) -> None:
        self._mode = mode = _current.mode
        if mode is not None:
            self._look, self._before = _current.look, mode.look
            _current.look, mode.look = None, _BLIND

    def __exit__(self, *error: object) -> None:
        if self._mode is not None:
            _current.look, self._mode.look = self._look, self._before


def hooks_unseen() -> contextlib.AbstractContextManager[Any]:
    """A context in which no look notes the torch calls of the user's `saved_tensors_hooks`."""
    hooks = internals.saved_tensors_hooks_of_user()
    if hooks is None or not hooks_set_inside() or hooks != internals.saved_tensors_hooks():
        return internals.NOTHING
    pack, unpack = hooks

    def pack_unseen(tensor: Tensor) -> Any:
        with unseen():
            return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack_unseen, unpack)
