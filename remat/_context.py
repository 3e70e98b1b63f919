"""The settings of the forward run (autocast, defaults, random state, modes), and how a rerun restores them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from remat import _torch_internals as internals
from remat._nested_mode import is_mode_of_user
from remat._ops import tensors
from remat.random._generators import global_state, same_state, set_global_state

T = TypeVar("T")
_MUTABLE = (list, dict, set)
rerunning: contextvars.ContextVar[bool] = contextvars.ContextVar("remat_rerunning", default=False)


def is_rerunning() -> bool:
    """Whether the calling code runs in a rerun, of `remat` or of `remat.checkpoint`.

    A function under remat runs again on backward, with its prints, counters and hooks. Code that must run only once
    can ask here, and do nothing in a rerun. It must not change the torch calls: a rerun that makes other calls than
    the forward is an error.

    **Returns:** True in a rerun, else False. In code that `torch.compile` traces it is False: both runs are one graph.

    Examples:
        >>> import torch
        >>> from remat import is_rerunning, remat
        >>> calls = []
        >>> def f(x):
        ...     if not is_rerunning():
        ...         calls.append("f")
        ...     return x.sin()
        >>> remat(f)(torch.ones(3, requires_grad=True)).sum().backward()
        >>> calls
        ['f']
    """
    return not is_dynamo_compiling() and rerunning.get()


class Variables:
    """The context variables at a call.

    A variable that holds a list, dict or set may collect what the function makes: Transformers collects outputs in
    one. To hold that would hold the outputs. So a rerun finds what the variable holds in the backward pass, or an empty
    one if it holds nothing then.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        found = [(variable, value) for variable, value in self._context.items() if isinstance(value, _MUTABLE)]
        self._left_out = [variable for variable, _ in found]
        for variable, value in found:
            self._context.run(variable.set, next(kind() for kind in _MUTABLE if isinstance(value, kind)))

    def run(self, fun: Callable[..., T], *args: Any) -> T:
        """Call a function with them."""
        context, now = self._context.copy(), contextvars.copy_context()
        for variable in self._left_out:
            if variable in now:
                context.run(variable.set, now[variable])
        return context.run(fun, *args)


def _default_device() -> torch.device | None:
    """The device of the innermost `with torch.device(...)` (or `set_default_device`), None without one."""
    if not internals.function_modes_active():
        return None
    modes = reversed(internals.function_modes())
    return next((mode.device for mode in modes if isinstance(mode, internals.DeviceContext)), None)


class Ambient(NamedTuple):
    """Settings of a thread that change what an op computes."""

    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """For each type of device with autocast enabled: its name, the dtype, and whether casts are cached."""

    @staticmethod
    def current() -> Ambient:
        """The current settings."""
        dtype, device = torch.get_default_dtype(), _default_device()
        if not internals.any_autocast_enabled():
            return _USUAL if dtype is torch.float32 and device is None else Ambient(dtype, device, ())
        cache = torch.is_autocast_cache_enabled()
        enabled = (d for d in internals.autocast_devices() if torch.is_autocast_enabled(d))
        return Ambient(dtype, device, tuple((d, torch.get_autocast_dtype(d), cache) for d in enabled))

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the settings are these again."""
        now = Ambient.current()
        return internals.NOTHING if now == self else self._restored(now)

    @contextlib.contextmanager
    def _restored(self, now: Ambient) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if now.dtype != self.dtype:
                stack.callback(torch.set_default_dtype, now.dtype)
                torch.set_default_dtype(self.dtype)
            if now.device != self.device:
                stack.enter_context(self.device or torch.device("cpu"))
            if now.autocast != self.autocast:
                for name, *_ in now.autocast:
                    stack.enter_context(torch.autocast(name, enabled=False))
                for name, dtype, cache in self.autocast:
                    stack.enter_context(torch.autocast(name, dtype, cache_enabled=cache))
            yield


class OwnCasts:
    """A context with an autocast cache of its own: no cast is reused across its beginning or its end.

    Cached casts belong to other graphs: a weight's cast from before the call is not one of the function's ops.
    """

    def __enter__(self) -> None:
        torch.clear_autocast_cache()

    def __exit__(self, *error: object) -> None:
        torch.clear_autocast_cache()


class _Uncompiled:
    """While a policy's mode is active, compiled functions run as they were written: a policy has to see their ops.

    Dynamo does not compile under such modes, but then it would never compile that code again. All threads share its
    stance. The last mode that ends restores it, also one that was lost by Ctrl-C.
    """

    def __init__(self) -> None:
        self._modes: dict[int, weakref.ref[Any]] = {}
        self._stance: Any = None
        self._lock = threading.RLock()

    def enter(self, mode: Any) -> None:
        key = id(mode)
        with self._lock:
            self._modes[key] = weakref.ref(mode, lambda _: self.leave(key))
            if self._stance is None and internals.dynamo_is_loaded():
                self._stance = torch.compiler.set_stance("force_eager")

    def leave(self, key: int) -> None:
        """`key`: the identity of the mode."""
        with self._lock:
            self._modes.pop(key, None)
            if not self._modes and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


uncompiled = _Uncompiled()
_USUAL = Ambient(torch.float32, None, ())  # one for most calls and reruns: to make one takes time
has_accelerator = functools.cache(torch.accelerator.is_available)
_CPU = torch.device("cpu")
_replaying = threading.RLock()
"""Held during a replay of draws: the global generators belong to all threads."""


def _accelerators(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The accelerators whose generators count: those of the tensors, and the current one if it is initialised."""
    devices = {t.device for t in tensors if not (t.is_cpu or t.is_meta)}
    if has_accelerator():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
            devices.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    return {d for d in devices if hasattr(torch.get_device_module(d), "get_rng_state")}


class RandomState:
    """The state of torch's global generators, and of each explicit one that a run drew from."""

    def __init__(self, tensors: Iterable[Tensor], *, keyed: bool = False) -> None:
        """Read the current states.

        **Arguments:**

        - `tensors`: the generators of their devices count.
        - `keyed`: whether the draws come from a key, so that torch's global generators do not count.
        """
        devices = () if keyed else (_CPU, *_accelerators(tensors))
        self._globals = {device: global_state(device) for device in devices}
        self._generators: dict[torch.Generator, Tensor] = {}

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def drawn_since(self, drew: bool = False) -> RandomState | None:
        """This state if the run that followed drew from any generator; else None.

        **Arguments:**

        - `drew`: whether it is known to have drawn. It may have put the state back afterwards (`fork_rng`).
        """
        if self._generators or (drew and self._globals):
            return self
        return None if self.is_current() else self

    def is_current(self) -> bool:
        """Whether the global generators are in these states."""
        return all(same_state(state, global_state(device)) for device, state in self._globals.items())

    def put_back(self) -> None:
        """Set the generators to these states."""
        for device, state in self._globals.items():
            set_global_state(device, state)
        for generator, state in self._generators.items():
            generator.set_state(state)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """A context that repeats the draws. After it, the generators are as they were before it."""
        with _replaying:
            ambient = self.now()
            self.put_back()
            try:
                yield
            finally:
                ambient.put_back()

    def now(self) -> RandomState:
        """The current state of the same generators."""
        state = RandomState.__new__(RandomState)
        state._globals = {device: global_state(device) for device in self._globals}
        state._generators = {g: g.get_state() for g in self._generators}
        return state


def drawn_from(args: Any, kwargs: Any) -> RandomState:
    """The state of the generators that an op with these arguments may have drawn from."""
    state = RandomState(tensors(args, kwargs))
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Generator):
            state.notice(x)
    return state


def modes_of_user() -> tuple[Any, ...]:
    """The user's active modes, without remat's own and torch's meters, which measure only what runs inside them."""
    if not (internals.function_modes_active() or internals.dispatch_modes_active()):
        return ()
    active = (*internals.dispatch_mode_stack(), *internals.function_modes())
    return tuple(filter(is_mode_of_user, active))


def entered(modes: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """A context in which these modes are active, even if the user has left them since."""
    active = [*internals.function_modes(), *internals.dispatch_mode_stack()] if modes else []
    return together(*(mode for mode in modes if not any(mode is m for m in active)))


def together(*contexts: contextlib.AbstractContextManager[Any]) -> contextlib.AbstractContextManager[Any]:
    """One context for several, which are entered in this order."""
    active = [context for context in contexts if context is not internals.NOTHING]
    return _together(active) if len(active) > 1 else active[0] if active else internals.NOTHING


@contextlib.contextmanager
def _together(contexts: Iterable[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
