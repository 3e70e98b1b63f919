"""Reruns under a tracer: the results of draws are used again; under a compiler, also those that a policy keeps.

A traced op that draws would draw other numbers in a rerun. And a tracer runs on tensors without memory, so liveness
means nothing: all that the policy keeps is kept, and the compiler drops what nobody reads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._dispatch_mode import DispatchMode
from remat._errors import CheckpointError
from remat._names import current_name
from remat._nested_mode import current_call
from remat._ops import facts_of, flat, tensors
from remat._recorder import SelectiveCheckpointContext
from remat._tape import KEEP
from remat._values import Changed
from remat.policies._policy import Decide

_CLONE = torch.ops.aten.clone.default  # autograd calls it before a change in place, for each level that needs it
_OTHER_CALLS = (
    "remat: under a tracer, a rerun calls {} more or less often than the forward run did, or with other shapes, and "
    "results of it are kept. If the function computes a table on first use, call it once before, under "
    "torch.no_grad(). If it multiplies by a weight from outside that requires grad, detach that: torch multiplies in "
    "other steps for it."
)


class _Call(NamedTuple):
    """What a call of an op was given, returned and wrote."""

    given: list[torch.Size]
    outputs: list[Any]
    """Copies of the results, but `Changed` for those that are arguments."""
    written: list[Tensor]
    """Copies of the arguments that it wrote to."""


Results = defaultdict[Any, list[_Call | None]]
"""For each op its calls in order; None for those that are not kept."""


class Traced(DispatchMode):
    """Keeps results of a forward. `replayed` returns them again, to the same calls of each op."""

    is_about_functions = True

    def __init__(self, policy: Decide | None, draws: bool) -> None:
        """Keep the results that the policy says, and with `draws` those of draws."""
        super().__init__()
        self._policy = policy
        self._draws = draws
        self._results: Results = defaultdict(list)

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        out, kept = func(*args, **kwargs), None
        if self._keeps(out, func, args, kwargs):
            written = facts_of(func).written(args, kwargs)
            position = {id(t): Changed(i) for i, t in enumerate(written)}
            outputs = [position.get(id(x)) or _copied(x) for x in flat(out)]
            kept = _Call(_shapes(args, kwargs), outputs, [*map(_copied, written)])
        self._results[func].append(kept)
        return out

    def _keeps(self, out: Any, func: Any, args: Any, kwargs: Any) -> bool:
        facts = facts_of(func)
        if facts.draws:
            return self._draws
        name = current_name()
        computes_nothing = func is _CLONE or (facts.is_view and name is None)
        if self._policy is None or computes_nothing or facts.is_opaque or facts.writes:
            return False
        context = SelectiveCheckpointContext(False, out, name, current_call())
        return self._policy(context, func, *args, **kwargs) in KEEP

    def drawn_since(self, drew: bool = False) -> Traced | None:
        """These results; None if none is kept. `RandomState` has the same method."""
        return self if any(map(any, self._results.values())) else None

    def notice(self, generator: Any) -> None:
        """Nothing to do, unlike in `RandomState`: this mode sees all draws."""

    def replayed(self) -> _Replayed:
        """A context that returns the results again."""
        return _Replayed(self._results)


class _Replayed(DispatchMode):
    is_about_functions = True

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._left = {func: deque(calls) for func, calls in results.items() if any(calls)}

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if kind is None and (func := next((func for func, left in self._left.items() if left), None)) is not None:
            raise CheckpointError(_OTHER_CALLS.format(func))

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        left = self._left.get(func)
        if left is None:
            return func(*args, **kwargs)
        if not left:
            raise CheckpointError(_OTHER_CALLS.format(func))
        kept = left.popleft()
        if kept is None:
            return func(*args, **kwargs)
        if kept.given != _shapes(args, kwargs):
            raise CheckpointError(_OTHER_CALLS.format(func))
        changed = facts_of(func).written(args, kwargs)
        for tensor, value in zip(changed, kept.written, strict=True):
            tensor.copy_(value)
        results = [changed[x.position] if isinstance(x, Changed) else _copied(x) for x in kept.outputs]
        return results[0] if len(results) == 1 else tuple(results)


def _shapes(args: Any, kwargs: Any) -> list[torch.Size]:
    return [t.shape for t in tensors(args, kwargs)]


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
