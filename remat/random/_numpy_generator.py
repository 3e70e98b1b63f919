"""NumPy's global generator.

To ask NumPy for its state takes longer than a small function takes to run. So it is looked at where it lies in memory.
NumPy says where the words are. The normal number in reserve (NumPy draws two at once) has its place in the object;
where that is, is tried out with another object.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any

_KEY = 624 * 4  # bytes
_RESERVE = struct.Struct("ixxxxd")  # whether there is a normal number, and the number
_PROBE = 0.1234567890123


@functools.cache
def _place_of_reserve() -> int | None:
    """Where it lies in a `RandomState`, None if that can't be told."""
    probe = sys.modules["numpy.random"].RandomState(0)
    state = probe.get_state()[:3]

    def memory(has_reserve: int) -> Any:
        probe.set_state((*state, has_reserve, _PROBE))
        return ctypes.string_at(id(probe), type(probe).__basicsize__)

    at = int(memory(1).find(_RESERVE.pack(1, _PROBE)))
    found = at >= 0 and _RESERVE.unpack_from(memory(0), at)[0] == 0
    return at if found and sys.implementation.name == "cpython" else None


@functools.lru_cache(1)
def _places(generator: Any) -> tuple[int, int] | None:
    """The addresses of the words of NumPy's global generator, and of its reserve; None if they can't be told."""
    at = _place_of_reserve() if type(generator).__name__ == "MT19937" else None
    if at is None:
        return None
    return generator.ctypes.state_address, id(sys.modules["numpy.random"].rand.__self__) + at


def numpy_state() -> Any:
    """Something to tell the state by, and to put it back. None where NumPy has not been imported."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    generator = numpy_random.get_bit_generator()
    places = _places(generator)
    if places is not None:
        return ctypes.string_at(places[0], _KEY + 4), ctypes.string_at(places[1], _RESERVE.size)
    if type(generator).__name__ != "MT19937":
        return repr(generator.state)
    _, key, position, *reserve = numpy_random.get_state()
    return key.tobytes() + position.to_bytes(4, sys.byteorder), _RESERVE.pack(*reserve)


def set_numpy_state(state: Any) -> None:
    """Put a state back; only of a generator of NumPy's own kind."""
    if isinstance(state, tuple):
        words, reserve = state
        numpy = sys.modules["numpy"]
        key, position = numpy.frombuffer(words[:_KEY], numpy.uint32), int.from_bytes(words[_KEY:], sys.byteorder)
        numpy.random.set_state(("MT19937", key, position, *_RESERVE.unpack(reserve)))
