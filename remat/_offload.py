"""Values that are held in CPU memory until the backward pass reads them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def _backend(device: torch.device) -> Any:
    """The module with the streams of a device (`torch.cuda`), or None if the device has no streams."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


@functools.cache
def _side_stream(backend: Any, device: torch.device) -> Any:
    return backend.Stream(device=device)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _in_use_by(tensor: Tensor, stream: Any) -> None:
    """Keep the allocator from reusing the memory of a tensor before the work queued on `stream` is done."""
    tensor.record_stream(stream)


class Offloaded:
    """A copy of the bytes of a storage: in pinned CPU memory, or in ordinary memory if the device is the CPU.

    Copies run on a side stream, while the device keeps computing. `fetch` starts the copy back to the device. `get`
    makes the current stream wait for it.
    """

    def __init__(self, source: Tensor) -> None:
        """Start the copy of `source`, the bytes of a storage."""
        self._device = source.device
        self._fetched: tuple[Tensor, Any] | None = None
        self._backend = backend = _backend(source.device)
        if backend is None:
            self.host = source.clone()
            return
        self.host = _pinned(source.numel())
        side = _side_stream(backend, source.device)
        side.wait_stream(backend.current_stream(source.device))  # until the value is computed
        with backend.stream(side):
            self.host.copy_(source, non_blocking=True)
        _in_use_by(source, side)

    def fetch(self) -> None:
        """Start the copy back to the device."""
        if self._backend is None or self._fetched is not None:
            return
        side = _side_stream(self._backend, self._device)
        with self._backend.stream(side):  # after the copy to the host, which is on the same stream
            back = torch.empty_like(self.host, device=self._device)
            back.copy_(self.host, non_blocking=True)
            self._fetched = back, side.record_event()

    def get(self) -> Tensor:
        """The bytes, flat, on the device they came from."""
        if self._backend is None:
            return self.host
        self.fetch()
        assert self._fetched is not None
        back, there = self._fetched
        self._fetched = None
        current = self._backend.current_stream(self._device)
        current.wait_event(there)
        _in_use_by(back, current)
        return back
