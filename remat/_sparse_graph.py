"""The native graph of a call whose function need not be watched: it saves nothing but what the function was given."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _torch_internals as internals
from remat import _tree
from remat._errors import PURITY
from remat._native import (
    WRONG_COUNT,
    Call,
    CallGraph,
    Meta,
    Saved,
    at_the_base,
    meta_of,
    same,
    wrong_metadata,
)
from remat._nesting import graph_around, nesting
from remat._run import paused_runs

_WORTH_A_STOP = 1000  # elements: to end a rerun early takes as long as a small op on them
_version = operator.attrgetter("_version")
_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_requires_grad = operator.attrgetter("requires_grad")


class SparseGraph(CallGraph):
    """The native graph of a call. Of what it would save it holds the operands alone, and runs the function again."""

    compares = True
    """Whether the metadata of what both runs save have to be the same."""
    _outer: Any = None

    def __init__(self, call: Call, early_stop: bool, under_node: bool = False) -> None:
        super().__init__(call, under_node)
        self._required = [*map(_requires_grad, call.operands)]
        self._early_stop = early_stop
        if self._saved_outside:
            self._outer = graph_around()

    def record(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own call."""
        with nesting(self, self._pack) if self._call.nests else _NOTHING:
            return self._record(fun, args, kwargs, None)

    def _is_skipped(self, key: Any) -> bool:
        # What it was given is not computed again then.
        return super()._is_skipped(key) or (self._outer is not None and self._outer._is_skipped(key))

    def rerun(self) -> Saved:
        """Run the function again: what its graph would save."""
        if not (internals.transforms_active() or internals.function_modes_active() or internals.in_inference_mode()):
            return self._rerun(same)
        with at_the_base(), paused_runs(), torch.inference_mode(False):  # a graph is made in the rerun
            return self._rerun(_unseen)

    def _rerun(self, decorate: Callable[[Any], Any]) -> Saved:
        """`decorate`: the hook that collects what is saved."""
        operands, versions = self._given()
        expected, last = len(self.metas), max(self._holders)
        were_changed = [*map(_version, operands)] != versions
        stops = self._early_stop and (self._call.nests or self.metas[last][0].numel() > _WORTH_A_STOP)
        if [*map(_requires_grad, operands)] != self._required:
            operands = [
                t if t.requires_grad is before else t.detach().requires_grad_(before)
                for t, before in zip(operands, self._required, strict=True)
            ]
        held = {id(t) for i, t in enumerate(operands) if i not in self._saved_outside}
        saved: Saved = []
        changed: Saved = []
        metas: list[Meta] = []

        def collect(tensor: Tensor) -> Tensor:
            metas.append(meta_of(tensor))
            if id(tensor) in held:
                saved.append(None)
                return tensor
            tensor = tensor.detach()
            saved.append((tensor, tensor._version))
            if stops and len(metas) > last:
                raise _Stop
            return tensor

        with internals.grad_enabled():
            hook = _unseen(collect) if were_changed else decorate(collect)
            internals.push_saved_tensors_hooks(hook, same)
            try:
                with (
                    _Refusing(operands, versions, changed) if were_changed else _NOTHING,
                    nesting(self, hook) if self._call.nests else _NOTHING,
                ):
                    self._call.again(operands)
            except _Stop:
                expected = min(expected, len(saved))
            finally:
                internals.pop_saved_tensors_hooks()
        if len(saved) != expected:
            raise self.error(f"{WRONG_COUNT.format(expected, len(saved))}\n{PURITY}")
        if metas != self.metas[:expected] and self.compares:
            pairs = zip(self.metas, metas, strict=False)
            raise self.error(f"{wrong_metadata([(i, a, b) for i, (a, b) in enumerate(pairs) if a != b])}\n{PURITY}")
        saved += changed * (last + 1 - len(saved))
        for number, holder in self._holders.items():
            if holder() is None:
                saved[number] = None
        return saved


class _Refusing(TorchFunctionMode):
    """Within it, a rerun stops where a torch function is given a tensor that was changed in place.

    They are found by their names: the function may name a tensor of another module, and not read this one. What comes
    before is right, and may be all that is needed: an optimizer steps in the backward as gradients arrive.
    """

    def __init__(self, operands: list[Tensor], versions: list[int], met: Saved) -> None:
        """`versions`: those that the operands had. `met`: where to put the one that was given."""
        super().__init__()
        pairs = zip(operands, versions, strict=True)
        self._changed = {id(t): (t, before) for t, before in pairs if t._version != before}
        self._met = met

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with internals.DisableTorchFunction():
            for x in _tree.flatten((args, kwargs))[0]:
                if id(x) in self._changed:
                    self._met.append(self._changed[id(x)])
                    raise _Stop
        return func(*args, **kwargs)


def _unseen(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The hook, unseen by torch-function modes."""

    def unseen(tensor: Tensor) -> Tensor:
        with internals.DisableTorchFunction():
            return hook(tensor)

    return unseen


class _Stop(BaseException):
    """All that the graph needs is there, or nothing more can be computed."""
