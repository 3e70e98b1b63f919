"""The native graph of a call under a policy: what it would save is kept, or computed again by single ops."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._native import Call, CallGraph, Held, Holder, Saved, at_the_base, meta_of, version
from remat._recorder import Recorder
from remat._recording import Recording, tensor_of
from remat._run import paused_runs
from remat._tape import Tape
from remat._values import Ref, Token


class _Pin(Holder):
    """What holds a tensor until the run is over, because the policy lets it be kept."""

    __slots__ = ("tensor",)
    tensor: Tensor


class RecordedGraph(CallGraph):
    """The native graph of a call under a policy. It does not run the function again, but ops that it has run."""

    _tape: Tape
    _recording: Recording

    def __init__(self, call: Call, recorder: Recorder) -> None:
        super().__init__(call, under_node=True)
        self._recorder: Recorder | None = recorder
        self._saved: dict[int, Ref] = {}

    def record(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own call."""
        return self._record(fun, args, kwargs, self._recorder)

    def tape(self, results: list[Tensor]) -> Tape:
        """What is kept of the run, now that it is over. `results`: all that it returned."""
        assert self._recorder is not None
        storages: dict[Token, Any] = {}
        for number, weak in self._holders.items():
            holder = weak()
            if holder is None:
                continue
            ref = self._saved[number] = self._recorder.latest(self._saved[number])
            storages.setdefault(ref.token, None)
            if isinstance(holder, _Pin):
                if self._recorder.contains(holder.tensor, ref.token):
                    storages[ref.token] = holder.tensor.untyped_storage()
                del holder.tensor
        self._tape = self._recorder.tape(results, storages)
        self._recording = self._recorder.recording(self.name)
        self._recorder = None
        return self._tape

    def _pack(self, tensor: Tensor) -> Holder | Held:
        if id(tensor) in self._held:
            return super()._pack(tensor)
        assert self._recorder is not None
        number = len(self.metas)
        self.metas.append(meta_of(tensor))
        with internals.DisableTorchFunction(), internals.DisableTorchDispatch():
            ref = self._recorder.saves(tensor)
            if ref is None:
                tensor = tensor.detach() if tensor.requires_grad else tensor
                return tensor, tensor._version, self.name, weakref.ref(tensor)
            self._saved[number] = ref
            holder = _Pin(self, number) if self._recorder.keeps(ref) else Holder(self, number)
            if isinstance(holder, _Pin):
                holder.tensor = tensor.detach()
            self._holders[number] = weakref.ref(holder)
            return holder

    def rerun(self) -> Saved:
        """Compute again what the graph would save."""
        with at_the_base(), paused_runs(), internals.DisableTorchFunction(), torch.no_grad():
            return self._rerun()

    def _rerun(self) -> Saved:
        self._tape.fetch()
        saved: Saved = [None] * len(self.metas)
        refs = {number: ref for number, ref in self._saved.items() if self._holders[number]() is not None}
        kept = self._tape.kept if self._is_last() else dict(self._tape.kept)
        lost: dict[Token, tuple[Tensor, int]] = {}
        for tensor, before in zip(self._operands, self._call.versions, strict=True):
            if tensor._version != before:
                lost[self._tape.values.outside(tensor.untyped_storage())] = tensor, before
        values = self._recording.compute({ref.token for ref in refs.values()}, kept, lost)
        for number, ref in refs.items():
            if ref.token in lost:
                saved[number] = lost[ref.token]
            else:
                tensor = tensor_of(ref, values[ref.token])
                saved[number] = tensor, version(tensor)
        return saved

    def _is_last(self) -> bool:
        """Whether nobody will ask for what is kept after this backward pass."""
        # With other results in the graph, the pass may leave out some.
        return self._call.last_rerun or (self.may_skip and internals.in_last_backward())
