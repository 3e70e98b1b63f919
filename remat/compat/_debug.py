"""`debug=True`: list the ops of both runs, and name the first one that differs."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from remat._dispatch_mode import DispatchMode
from remat._errors import CheckpointError, call_site
from remat._ops import DETACH, flat
from remat.compat._region import Region

_EXPLAINED = """{}

Operations executed during the original forward:
{}

Operations executed during recomputation:
{}

You are seeing this error because you passed `debug=True` to checkpoint, or have set it by a context.
{}"""


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)


class _Trace(DispatchMode):
    """Lists the ops of one run, with their arguments, their results and the line of the user's code."""

    is_about_functions = True
    ops: list[str]
    sites: list[str]

    def __enter__(self) -> Any:
        self.ops, self.sites = [], []
        return super().__enter__()

    def lines(self) -> list[str]:
        """The ops, with their places."""
        return [f"{op}, at {site}" for op, site in zip(self.ops, self.sites, strict=True)]

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is DETACH:  # the hooks make some, and other ones in the rerun
            return func(*args, **kwargs)
        shown = [*map(_describe, args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())]
        self.ops.append(f"{func}({', '.join(shown)})")
        self.sites.append(call_site())
        out = func(*args, **kwargs)
        self.ops[-1] += f" -> {', '.join(map(_describe, flat(out)))}"
        return out


def trace(region: Region) -> None:
    """Make a region list its ops, and show them in its errors."""
    forward, rerun = region.traces = _Trace(), _Trace()

    def explain(error: CheckpointError) -> CheckpointError:
        message = str(error).partition("\nTo find the cause")[0]
        streams = [
            "\n".join(f"{number}. {line}" for number, line in enumerate(run.lines(), 1)) for run in (forward, rerun)
        ]
        return CheckpointError(_EXPLAINED.format(message, *streams, _first_difference(forward, rerun)))

    region.explain = explain


def _first_difference(forward: _Trace, rerun: _Trace) -> str:
    pairs = itertools.zip_longest(forward.ops, rerun.ops)
    number = next((i for i, (op, other) in enumerate(pairs) if op != other), None)
    if number is None:
        return f"Both runs made the same {len(forward.ops)} ops."
    first, second = (run.lines()[number] if number < len(run.ops) else "had ended" for run in (forward, rerun))
    return f"The first op that differs is number {number + 1}:\n  forward: {first}\n  rerun:   {second}"
