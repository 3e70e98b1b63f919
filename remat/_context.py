"""What the forward run found around it - autocast, defaults, random state - and how to bring it back."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._errors import CheckpointError
from remat._ops import facts_of, flat, tensors
from remat.random._generators import (
    PythonState,
    global_state,
    python_state,
    same_state,
    set_global_state,
    set_python_state,
)
from remat.random._numpy_generator import numpy_state, set_numpy_state

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Ambient(NamedTuple):
    """Settings of a thread that change what an op computes."""

    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @staticmethod
    def current() -> Ambient:
        """The settings here and now."""
        dtype, device = torch.get_default_dtype(), internals.default_device()
        if not internals.any_autocast_enabled():
            return _USUAL if dtype is torch.float32 and device is None else Ambient(dtype, device, ())
        cache = torch.is_autocast_cache_enabled()
        devices = internals.autocast_devices()
        autocast = ((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices)
        return Ambient(dtype, device, tuple(autocast))

    def restored(self, *, keeps_casts: bool = False) -> contextlib.AbstractContextManager[None]:
        """Within it, the settings are these again.

        **Arguments:**

        - `keeps_casts`: whether autocast may keep what it casts, so that the ops are those of the forward.
        """
        now = Ambient.current()
        return _NOTHING if now == self and not self.autocast else self._restored(now, keeps_casts)

    @contextlib.contextmanager
    def _restored(self, now: Ambient, keeps_casts: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            cuts_casts = bool(self.autocast) and not keeps_casts
            if cuts_casts:  # it would keep casts of the rerun's leaves for as long as it lasts
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            if now.dtype != self.dtype:
                stack.callback(torch.set_default_dtype, now.dtype)
                torch.set_default_dtype(self.dtype)
            if now.device != self.device:
                stack.enter_context(self.device or torch.device("cpu"))
            if now.autocast != self.autocast:
                stack.enter_context(internals.autocast(self.autocast or _off(now.autocast)))
            if cuts_casts:
                torch.set_autocast_cache_enabled(False)
            yield


_USUAL = Ambient(torch.float32, None, ())  # not made anew for each call and rerun


def _off(autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    return tuple((device, False, dtype, cache) for device, _, dtype, cache in autocast)


has_accelerator = functools.cache(torch.accelerator.is_available)
_CPU = torch.device("cpu")


def _accelerators(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The accelerators in play: those of the tensors, and the current one once it is in use."""
    devices = {t.device for t in tensors if not (t.is_cpu or t.is_meta)}
    if has_accelerator():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
            devices.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    return {d for d in devices if hasattr(torch.get_device_module(d), "get_rng_state")}


def _differs(states: dict[torch.device, Tensor]) -> bool:
    return any(not same_state(state, global_state(device)) for device, state in states.items())


class RandomState:
    """The state of the global generators, Python's and NumPy's too, and of each explicit one that a run drew from."""

    def __init__(self, tensors: Iterable[Tensor], *, keyed: bool = False, of_torch_alone: bool = False) -> None:
        """A state here and now.

        **Arguments:**

        - `keyed`: whether the draws come from a key, so that torch's global generators do not count.
        - `of_torch_alone`: whether Python's generator and NumPy's do not count.
        """
        devices = () if keyed else (_CPU, *_accelerators(tensors))
        self._globals = {device: global_state(device) for device in devices}
        self._python: PythonState | None = None if of_torch_alone else python_state()
        self._numpy: Any = None if of_torch_alone else numpy_state()
        self.generators: dict[torch.Generator, Tensor] = {}
        self._drawn = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, a draw is noticed even if the function puts the state back afterwards."""
        before = {device: global_state(device) for device in self._globals}
        yield
        self._drawn = self._drawn or _differs(before)

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        if generator not in self.generators:
            self.generators[generator] = generator.get_state()

    def drawn_since(self) -> RandomState | None:
        """This state if the run that followed it drew from any generator, else None: nothing to bring back."""
        if self._python is not None and self._python == python_state():
            self._python = None
        if self._numpy is not None and self._numpy == numpy_state():
            self._numpy = None
        others = self.generators or self._python or self._numpy
        return self if self._drawn or others or _differs(self._globals) else None

    def put_back(self) -> None:
        """Make the generators what they were."""
        for device, state in self._globals.items():
            set_global_state(device, state)
        for generator, state in self.generators.items():
            generator.set_state(state)
        if self._python is not None:
            set_python_state(self._python)
        if self._numpy is not None:
            set_numpy_state(self._numpy)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Within it, the same draws come again; after it, the generators are as they were before."""
        ambient = self.now()
        self.put_back()
        try:
            yield
        finally:
            ambient.put_back()

    def now(self) -> RandomState:
        """The state of the same generators here and now."""
        state = RandomState.__new__(RandomState)
        state._globals = {device: global_state(device) for device in self._globals}
        state.generators = {g: g.get_state() for g in self.generators}
        state._python = None if self._python is None else python_state()
        state._numpy = None if self._numpy is None else numpy_state()
        return state


def drawn_from(args: Any, kwargs: Any) -> RandomState:
    """The state of the generators that an op with these arguments may have drawn from."""
    state = RandomState(tensors(args, kwargs), of_torch_alone=True)
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Generator):
            state.notice(x)
    return state


class KeptDraws(internals.DispatchMode):
    """What a run drew, where its ops are written down (`make_fx`): the written ones would draw anew in a rerun.

    The forward runs in this mode; `replayed` gives each op that draws its result again, in the same order.
    """

    is_about_functions = True

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[tuple[Any, list[Tensor]]] = []

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if facts_of(func).draws:
            self._drawn.append((func, [t.clone() for t in flat(out)]))
        return out

    def drawn_since(self) -> KeptDraws | None:
        """These draws, None where there are none."""
        return self if self._drawn else None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """As of a `RandomState`. All is seen anyway."""
        yield

    def notice(self, generator: torch.Generator) -> None:
        """As of a `RandomState`. All is seen anyway."""

    def replayed(self) -> _Redraw:
        """Within it, the same draws come again."""
        return _Redraw(self._drawn)


class _Redraw(internals.DispatchMode):
    is_about_functions = True

    def __init__(self, drawn: Iterable[tuple[Any, list[Tensor]]]) -> None:
        super().__init__()
        self._left = iter(drawn)

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = facts_of(func)
        if not facts.draws:
            return func(*args, **kwargs)
        expected, results = next(self._left, (None, []))
        if func is not expected:
            raise CheckpointError(f"remat: a rerun draws from {func}, where the forward run drew from {expected}.")
        changed = facts.written(args, kwargs)
        for tensor, result in zip(changed, results, strict=False):
            tensor.copy_(result)
        results = changed or [t.clone() for t in results]  # the function may write to them
        return results[0] if len(results) == 1 else tuple(results)


_replaying = threading.RLock()


@contextlib.contextmanager
def replayed(state: RandomState | KeptDraws | None) -> Iterator[None]:
    """`state.replayed()`. Where the run drew nothing, see that it leaves no trace: it may seed.

    The global generators belong to all threads: one at a time.
    """
    if state is None:
        seed = torch.default_generator.get_state()
        try:
            yield
        finally:
            if not same_state(seed, torch.default_generator.get_state()):
                torch.default_generator.set_state(seed)
        return
    with _replaying, state.replayed():
        yield
