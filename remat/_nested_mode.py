"""A torch-function mode for runs that nest.

NOTE [one mode at a time]: calls nest, and each has a look of its own. A mode for each would make a nest of n calls cost
n times as much for each torch call. So a look inside of another takes its place in the mode that is active, and asks it
for what it does not know itself.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat._effects import READS_MEMORY


class _Current(threading.local):
    look: Any = None
    mode: NestedMode | None = None
    """The look that is the active mode."""


_current = _Current()


def current_look() -> Any:
    """The look at the innermost run of this thread, None outside of all."""
    return _current.look


def current_call() -> tuple[Any, Any, Any] | None:
    """The torch call that is running in the innermost run of this thread: function, args, kwargs."""
    return None if _current.look is None else _current.look.call


class _Blind:
    """In the place of a look: sees nothing but reads of memory, which may be hollow."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_MEMORY:
            internals.tell_of_access(func, args, kwargs)
        return func(*args, **(kwargs or {}))


_BLIND: Any = _Blind()


class NestedMode(TorchFunctionMode):
    """A look at a run, active or in the place of one that is.

    **Attributes:**

    - `delegate`: the look that has taken the place of this one.
    - `outer`: the look at the run around this one. A rerun has none.
    - `call`: the torch call that is running: function, args, kwargs.
    """

    call: tuple[Any, Any, Any] | None = None
    delegate: Any = None
    is_rerun = False
    outer: Any = None

    def __enter__(self) -> Any:
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

    def __exit__(self, *error: Any) -> None:
        _current.look, mode = self._before
        if self.outer is not None:
            self.outer.adopt(self)
        if mode is not None:
            mode.delegate = self._delegate_before
        if _current.mode is self:
            internals.pop_function_mode()
            _current.mode = mode

    def begin(self, outer: Any) -> None:
        """Called when the run begins. `outer`: the look at the run around it."""
        raise NotImplementedError

    def adopt(self, inner: Any) -> None:
        """Called when a run inside of this one is over."""
        raise NotImplementedError


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
