"""Calls inside of calls that are not watched.

Their graphs are parts of the graph around them, which saves nothing: what they are given is saved through its hooks,
before they run, so that a rerun of the outer call ends where the last of them would begin. Both runs of the outer call
must save the same, so a call inside of it that is not watched in the forward is not watched in the rerun either,
whatever looks on from around that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from remat import _torch_internals as internals


class _Running(threading.local):
    """The innermost call that is running, its forward or a rerun."""

    graph: Any = None
    """Its graph, if its function may call others under remat."""
    hook: Any = None
    """Through which that saves."""
    modes = 0
    """How many torch-function modes are active in it."""


_running = _Running()


@contextlib.contextmanager
def nesting(graph: Any, hook: Any) -> Iterator[None]:
    """Within it, a call runs whose function may call others under remat. `hook`: through which its graph saves."""
    before = _running.graph, _running.hook, _running.modes
    _running.graph, _running.hook, _running.modes = graph, hook, internals.function_modes_active()
    try:
        yield
    finally:
        _running.graph, _running.hook, _running.modes = before


def is_inside() -> bool:
    """Whether such a call is running, with nothing in between that looks on."""
    return (
        _running.graph is not None
        and _running.modes == internals.function_modes_active()
        and internals.saves_through(_running.hook)
    )


def graph_around() -> Any:
    """The graph of the call that is running."""
    return _running.graph


@contextlib.contextmanager
def under(mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Within it, a mode is active for the call that is running, and for those inside."""
    inside = is_inside()
    with mode, nesting(_running.graph, _running.hook) if inside else contextlib.nullcontext():
        yield
