"""torch's global generators, and Python's.

The state of Python's takes longer to put into a Python object than a small function takes to run. So it is looked at
where it lies in memory, which is tried out when this module is imported.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals


def global_state(device: torch.device) -> Tensor:
    """The state of the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_global_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def same_state(a: Tensor, b: Tensor) -> bool:
    """Whether two states are the same: bytes of the CPU, compared in a fifth of the time of `torch.equal`."""
    with internals.DisableTorchFunction():  # a run around this one reads no states
        return ctypes.string_at(a.data_ptr(), a.numel()) == ctypes.string_at(b.data_ptr(), b.numel())


def is_global(generator: torch.Generator) -> bool:
    return generator is torch.default_generator or generator in torch.cuda.default_generators


_PYTHON = random.seed.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_WORDS = struct.Struct("=i624I")
_ADDRESS = id(_PYTHON) + object.__basicsize__


def _python_bytes() -> Any:
    return ctypes.string_at(_ADDRESS, _WORDS.size)


def _python_state(raw: Any) -> tuple[int, ...]:
    index, *key = _WORDS.unpack(raw)
    return (*key, index)


if (
    sys.implementation.name != "cpython"
    or type(_PYTHON).__basicsize__ < object.__basicsize__ + _WORDS.size
    or _python_state(_python_bytes()) != random.getstate()[1]
):

    def _python_bytes() -> Any:
        return random.getstate()[1]

    def _python_state(raw: Any) -> tuple[int, ...]:
        return raw


PythonState = tuple[Any, Any]


def python_state() -> PythonState:
    """Something to tell the state of Python's generator by, and to put it back."""
    return _python_bytes(), _PYTHON.gauss_next


def set_python_state(state: PythonState) -> None:
    raw, gauss = state
    random.setstate((random.getstate()[0], _python_state(raw), gauss))
