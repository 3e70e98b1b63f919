"""For `debug=True`: the ops of both runs, and the first one that differs."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat import _tree
from remat._dispatch_mode import DispatchMode
from remat._errors import CheckpointError
from remat.compat._region import Region


class TracedCheckpointError(CheckpointError):
    """A `CheckpointError` that knows the ops of both runs.

    **Attributes:**

    - `trace`: all of them, with their call stacks.
    """

    trace: str = ""


class _Op(NamedTuple):
    text: str
    stack: tuple[str, ...]
    """file:line and function, innermost first."""

    @property
    def site(self) -> str:
        return self.stack[0] if self.stack else "unknown"


_FORWARD = "Operations executed during the original forward:"
_RERUN = "Operations executed during recomputation:"
_BECAUSE = "You are seeing this error because you passed `debug=True` to checkpoint, or have set it by a context."
_INTERNAL = ("torch", "remat", "contextlib")


def _stack() -> tuple[str, ...]:
    """The frames of the user's code."""
    found = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _INTERNAL:
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)


class _Trace(DispatchMode):
    """Notes the ops of one run."""

    is_about_functions = True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []

    def __enter__(self) -> Any:
        self.ops = []
        return super().__enter__()

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.detach.default:  # the hooks make some, and not the same in both runs
            return func(*args, **kwargs)
        shown = [*map(_describe, args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())]
        text, stack = f"{func}({', '.join(shown)})", _stack()
        self.ops.append(_Op(text, stack))
        out = func(*args, **kwargs)
        leaves, _ = _tree.flatten(out)
        self.ops[-1] = _Op(f"{text} -> {', '.join(map(_describe, leaves))}", stack)
        return out


def trace(region: Region) -> None:
    """Have a region note its ops, and its errors tell them."""
    forward, rerun = region.traces = _Trace(), _Trace()

    def explain(error: CheckpointError) -> CheckpointError:
        return _explained(error, forward.ops, rerun.ops)

    region.explain = explain


def _explained(error: CheckpointError, forward: list[_Op], rerun: list[_Op]) -> CheckpointError:
    message = str(error).partition("\nTo find the cause")[0]
    streams = f"{_FORWARD}\n{_listed(forward, False)}\n\n{_RERUN}\n{_listed(rerun, False)}"
    traced = TracedCheckpointError(f"{message}\n\n{streams}\n\n{_BECAUSE}\n{_first_difference(forward, rerun)}")
    traced.trace = f"{_FORWARD}\n{_listed(forward, True)}\n\n{_RERUN}\n{_listed(rerun, True)}"
    return traced


def _first_difference(forward: list[_Op], rerun: list[_Op]) -> str:
    number = next((i for i, (f, r) in enumerate(zip(forward, rerun, strict=False)) if f.text != r.text), None)
    if number is None and len(forward) == len(rerun):
        return f"Both runs made the same {len(forward)} ops. The error's `trace` lists them."
    number = min(len(forward), len(rerun)) if number is None else number
    return (
        f"The first op that differs is number {number + 1}:\n"
        f"  forward: {_at(forward, number)}\n  rerun:   {_at(rerun, number)}\n"
        "The error's `trace` has all ops of both runs, with their call stacks."
    )


def _at(ops: list[_Op], number: int) -> str:
    return f"{ops[number].text}, at {ops[number].site}" if number < len(ops) else f"had ended, after {len(ops)} ops"


def _listed(ops: list[_Op], with_stacks: bool) -> str:
    lines = []
    for number, op in enumerate(ops, 1):
        lines.append(f"{number}. {op.text}")
        lines += [f"     {site}" for site in op.stack] if with_stacks else ()
    return "\n".join(lines)
