"""A call of a user's function, and what it found: enough to repeat it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._context import Ambient
from remat._errors import CheckpointError, note_rerun
from remat._native import version
from remat._run import CHANGES_SHARED
from remat._spaces import content_of, same_items
from remat.compat._captured import Captured
from remat.compat._draws import Draws
from remat.compat._forward import Forward
from remat.compat._found import Found
from remat.compat._record import Record
from remat.compat._rerun import STATE_WAS_SET_UP, Rerun, copy_of

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

NO_CONTEXTS: Contexts = (contextlib.nullcontext(), contextlib.nullcontext())

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_PLAIN = {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Tensor, torch.nn.Parameter}


_CHANGES_TWICE = (
    "remat.checkpoint: the function changes a list or a dict that it is given twice. The rerun would be given two of "
    "them. Pass it once."
)


class UsesTransforms(Exception):  # noqa: N818
    """The function uses `torch.func`: the functional engine has to run it. What it did so far is taken back."""


class Call:
    """One call of a function. The tensors that it was given are not held, but handed to the rerun.

    **Attributes:**

    - `tensors`: until the forward is over, the tensors among the arguments and in the function's cells.
    - `record`: what the forward noted.
    """

    _twice: Sequence[tuple[Any, dict[Any, Any]]] = ()
    """Until the forward is over, the lists and dicts that the function is given more than once, and what they held."""
    _changes_twice = False
    """Whether it has changed one of these."""

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: bool,
    ) -> None:
        self.record = Record()
        self._spec: _tree.PyTreeSpec | None = None
        if not kwargs and _PLAIN.issuperset(map(type, args)):
            self._leaves = list(args)
        else:
            self._leaves, self._spec = _tree.flatten((args, kwargs))
            self._twice = [(held, content_of(held)) for held in _tree.twice_in((args, kwargs))]
        leaves = self._leaves
        self._found = Found((fun, *leaves))
        self._captured = Captured(fun, leaves)
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[i] for i in self._positions] + self._captured.tensors
        for i in self._positions:
            leaves[i] = None
        self._captured.freeze(leaves, self.tensors)
        self._identities = [*map(id, self.tensors)]
        self._versions = versions_of(self.tensors)
        self._writes: list[int] = []  # to each of them, when the forward is over
        self._ambient = Ambient.current()
        self._draws = Draws(self.tensors) if preserve_rng_state else None

    def watch(self, owner: Any = None, under_context: bool = False) -> Forward:
        """The mode for the forward."""
        return Forward(self.record, self.tensors, self._draws, owner, under_context)

    def finish(self, forward: Forward) -> None:
        """The user's own call is over, and its hooks are gone."""
        forward.finish()
        self._changes_twice = not all(same_items(content_of(held), before) for held, before in self._twice)
        self._twice = ()
        self._found.finish(self._identities)
        self.record.is_simple = self.record.is_simple and not self._found.has_other_buffers
        self._writes = [now - before for now, before in zip(versions_of(self.tensors), self._versions, strict=True)]
        self.tensors = []
        if self._draws is not None:
            self._draws.finish(device for _, _, device in self.record.metas)

    def undo(self, forward: Forward) -> None:
        """Take back what the forward changed and drew, so that it can be run by another engine."""
        forward.undo()
        self._found.undo()
        if self._draws is not None:
            self._draws.undo()

    def given(self, operands: Sequence[Any]) -> list[Any]:
        """What to give the rerun: operands, and copies of what the forward changed in place."""
        copies: dict[int, Tensor] = {}  # a tensor that was given twice is one tensor
        written = self.record.written
        found = []
        for position, key in enumerate(self._identities):
            if key not in written:
                found.append(operands[position])
                continue
            if key not in copies:
                copies[key] = copy_of(written[key][1])
            found.append(copies[key])
        return found

    def unwritten(self, operands: list[Any]) -> list[Any]:
        """The operands, without those that the forward changed in place: they may lead to what holds this call."""
        written = self.record.written
        if not written:
            return operands
        return [None if key in written else o for key, o in zip(self._identities, operands, strict=True)]

    def _check_writes(self, tensors: Sequence[Tensor], before: list[int]) -> None:
        """Raise where the rerun, which made other calls, has not written as often to what was given."""
        writes = [now - then for now, then in zip(versions_of(tensors), before, strict=True)]
        for key, t, now, then in zip(self._identities, tensors, writes, self._writes, strict=True):
            if key in self.record.written and now != then:
                raise CheckpointError(STATE_WAS_SET_UP.format(list(t.shape), t.dtype, "is given"))

    def rerun(
        self,
        rerun: Rerun | None,
        tensors: Sequence[Tensor],
        context: contextlib.AbstractContextManager[Any] = NOTHING,
    ) -> Any:
        """The call again, with `tensors` in the place of those that it was given, and its result.

        **Arguments:**

        - `rerun`: what sees the calls, if they have to be seen.
        """
        if self.record.shapes_of_shared is not None:
            raise CheckpointError(CHANGES_SHARED.format("checkpoint: the function", *self.record.shapes_of_shared))
        if self._changes_twice:
            raise CheckpointError(_CHANGES_TWICE)
        found, draws = self._found, self._draws
        trusting = rerun is None or rerun.trusting
        if rerun is not None:
            rerun.is_state = found.is_state
            for key, (ref, before) in self.record.written.items():
                original = ref()
                if original is not None and key not in self._identities and not rerun.knows(key):
                    rerun.swap(original, copy_of(before if trusting else original))
            rerun.may_be_misled = trusting and (bool(self.record.written) or found.has_other_buffers)
        fun, leaves, thaw = self._captured.thawed(self._leaves, tensors)
        for i, tensor in zip(self._positions, tensors, strict=False):
            leaves[i] = tensor
        args, kwargs = (leaves, {}) if self._spec is None else _tree.unflatten(self._spec, leaves)
        del leaves
        ambient = NOTHING if Ambient.current() == self._ambient else self._ambient.restored(keeps_casts=True)
        restored = NOTHING if found.is_empty else found.restored(trusting, tensors)
        random_before = None if draws is None else draws.begin()
        try:
            with internals.grad_enabled(), ambient, context:
                versions = [] if trusting else versions_of(tensors)
                with rerun or NOTHING, restored:
                    out = fun(*args, **kwargs)
                if versions and self._writes:
                    self._check_writes(tensors, versions)
                if rerun is not None:
                    if draws is not None and rerun.makes_other_calls and not rerun.was_misled:
                        with internals.DisableTorchFunction():
                            draws.check_other_calls()
                    if rerun.drops_result:
                        out = None
                    rerun.spared.finish()
        except Exception as error:
            note_rerun(error, "a checkpointed function")
            raise
        finally:
            if draws is not None and random_before is not None:
                repeats_numpy = draws.end(random_before)
            if rerun is not None:
                rerun.close()
            if thaw is not None:
                thaw.empty()
        if draws is not None and random_before is not None:
            draws.check(random_before, repeats_numpy)
        return out


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to, unseen by modes."""
    with internals.DisableTorchFunction():
        return [*map(version, tensors)]
