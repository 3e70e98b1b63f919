"""What the forward run found around it - autocast, defaults, random state - and how to bring it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _torch_internals as internals


class Ambient(NamedTuple):
    """Settings of a thread that change what an op computes."""

    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @staticmethod
    def current() -> Ambient:
        """The settings here and now."""
        autocast: tuple[tuple[str, bool, torch.dtype, bool], ...] = ()
        if internals.any_autocast_enabled():
            cache = torch.is_autocast_cache_enabled()
            autocast = tuple(
                (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache)
                for d in internals.autocast_devices()
            )
        return Ambient(torch.get_default_dtype(), internals.default_device(), autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within it, the settings are these again."""
        now = Ambient.current()
        if now == self:
            yield
            return
        with contextlib.ExitStack() as stack:
            if now.dtype != self.dtype:
                stack.callback(torch.set_default_dtype, now.dtype)
                torch.set_default_dtype(self.dtype)
            if now.device != self.device:
                stack.enter_context(self.device or torch.device("cpu"))
            if now.autocast != self.autocast:
                stack.enter_context(internals.autocast(self.autocast or _off(now.autocast)))
            yield


def _off(autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    return tuple((device, False, dtype, cache) for device, _, dtype, cache in autocast)


def _accelerators(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The accelerators in play: those of the tensors, and the current one once it is in use."""
    devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
            devices.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    return {d for d in devices if hasattr(torch.get_device_module(d), "get_rng_state")}


class RandomState:
    """The state of the global generators, and of each explicit generator that a run drew from."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._cpu = torch.default_generator.get_state()
        self._accelerators = {d: torch.get_device_module(d).get_rng_state(d) for d in _accelerators(tensors)}
        self.generators: dict[torch.Generator, Tensor] = {}

    def notice(self, generator: torch.Generator) -> None:
        """The run is about to draw from an explicit generator."""
        if generator not in self.generators:
            self.generators[generator] = generator.get_state()

    def drawn_since(self) -> RandomState | None:
        """This state if the run that followed it drew from any generator, else None: nothing to bring back."""
        if not torch.equal(self._cpu, torch.default_generator.get_state()):
            return self
        for device, state in self._accelerators.items():
            if not torch.equal(state, torch.get_device_module(device).get_rng_state(device)):
                return self
        return self if self.generators else None

    def _set(self) -> None:
        torch.default_generator.set_state(self._cpu)
        for device, state in self._accelerators.items():
            torch.get_device_module(device).set_rng_state(state, device)
        for generator, state in self.generators.items():
            generator.set_state(state)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Within it, the same draws come again; after it, the generators are as they were before."""
        ambient = RandomState.__new__(RandomState)
        ambient._cpu = torch.default_generator.get_state()
        ambient._accelerators = {d: torch.get_device_module(d).get_rng_state(d) for d in self._accelerators}
        ambient.generators = {g: g.get_state() for g in self.generators}
        self._set()
        try:
            yield
        finally:
            ambient._set()


def replayed(state: RandomState | None) -> Any:
    """`state.replayed()`, or nothing where the run drew nothing."""
    return contextlib.nullcontext() if state is None else state.replayed()
