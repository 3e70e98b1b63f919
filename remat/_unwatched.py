"""Calls of functions that need not be watched, because their code shows what they do. See `remat._pure`.

What such a function depends on is known before it runs: its arguments, the tensors in its cells and those of the
modules that it uses. Watching costs as much as several small ops for each torch call, so this is for small tensors; for
large ones that cost is nothing, and a watched run can spare the last product of the rerun.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _pure, _tree
from remat import _torch_internals as internals
from remat._context import Ambient
from remat._errors import CheckpointError, RematError
from remat._frozen import Freezer, Table, Thawer, cell_contents
from remat._primitive import Derived, attach
from remat._run import CHANGES

_SMALL = 2**12  # elements
_TENSORS = {Tensor, torch.nn.Parameter}
_LEAVES = _TENSORS | {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size}
_MISSING: Any = object()
_REPLACED = (
    "remat: a module or a function that {} uses was replaced between its forward run and the backward, where it runs "
    "again. Pass what varies as an argument."
)


def _is_plain(tree: Any) -> bool:
    """Whether there is nothing in it that has code of its own."""
    kind = type(tree)
    if kind in _LEAVES:
        return True
    if kind is dict:
        return all(map(_is_plain, tree.values()))
    return (kind is tuple or kind is list) and all(map(_is_plain, tree))


class UnwatchedCall:
    """One call of a function, ready to be repeated: `call(*operands)` gives its results. It holds no operand."""

    random = None
    tape = None
    needs_level = False
    last_rerun = False

    def __init__(self, fun: Any, name: str, reads: _pure.Reads, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.returned: list[int] = []
        self._fun = fun
        self._reads = reads
        self._spec: _tree.PyTreeSpec | None = None
        if kwargs or not _LEAVES.issuperset(map(type, args)):
            self._leaves, self._spec = _tree.flatten((args, kwargs))
        else:
            self._leaves = list(args)
        self._contents = cell_contents([fun]) if getattr(fun, "__closure__", None) else {}
        self._values, self._places = _pure.held(fun, reads)
        found = [x for x in self._leaves if isinstance(x, Tensor)]
        found += [content for _, content in self._contents.values() if isinstance(content, Tensor)]
        found += [tensor for *_, tensor in self._places]
        self.operands = list({id(t): t for t in found}.values())

    @property
    def is_small(self) -> bool:
        """Whether a watched run would spare nothing."""
        return all(type(t) in _TENSORS and t.numel() <= _SMALL and not t.is_inference() for t in self.operands)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The user's own call, and its result with the remat'd derivative."""
        operands, self.operands = self.operands, []
        fun = self._fun
        may_be_differentiated = internals.transforms_active() or internals.forward_ad_active()
        if not may_be_differentiated and not any(t.requires_grad for t in operands):
            return fun(*args, **kwargs)
        self._ambient = Ambient.current()
        self._position = {id(t): i for i, t in enumerate(operands)}
        self._freeze(operands)
        versions = [t._version for t in operands]
        with internals.without_saved_tensors_hooks():
            out = fun(*args, **kwargs)
        if [t._version for t in operands] != versions:
            t = next(t for t, before in zip(operands, versions, strict=True) if t._version != before)
            raise RematError(CHANGES.format(self.name, list(t.shape), t.dtype, "a place out of sight"))
        results = _tree.Picked(out, lambda r: self._computed(r, operands))
        values = results.tensors
        if not values:
            return out
        self.returned = results.positions
        attached = attach(Derived(self, self), values, [internals.unwrap_dead(t) for t in operands])
        return out if attached is values else results.replaced(attached)

    def _computed(self, result: Tensor, operands: list[Tensor]) -> bool:
        """Whether a result is differentiated, and neither an operand nor a view of one."""
        if id(result) in self._position or not (result.is_floating_point() or result.is_complex()):
            return False
        if not (internals.requires_grad_at_any_level(result) or internals.forward_ad_active()):
            return False
        return not (result._is_view() and any(result._base is t or result._base is t._base for t in operands))

    def _freeze(self, operands: list[Tensor]) -> None:
        """Hold tensors and functions as they are now, by position."""
        position = self._position
        self._originals = [weakref.ref(t) for t in operands]
        self._arguments = [(i, position[id(x)]) for i, x in enumerate(self._leaves) if isinstance(x, Tensor)]
        self._held = [(names, name, position[id(tensor)]) for names, name, tensor in self._places]
        for i, _ in self._arguments:
            self._leaves[i] = None
        self._table = Table()
        if self._contents:
            freezer = Freezer(self._contents, position)
            self._fun = freezer(self._fun)
            self._table = freezer.table
        self._contents, self._places = {}, []

    def __call__(self, *operands: Tensor) -> list[Tensor]:
        leaves = list(self._leaves)
        for i, at in self._arguments:
            leaves[i] = operands[at]
        args, kwargs = (leaves, {}) if self._spec is None else _tree.unflatten(self._spec, leaves)
        thaw = Thawer(self._table, operands)
        fun = thaw(self._fun)
        swaps: dict[int, Tensor] = {}
        slots = [value for value in self._values if value[0].get(value[1]) is not value[2]]
        for names, name, at in self._held:
            original = self._originals[at]()
            if original is not None and names.get(name) is original:
                swaps[id(original)] = operands[at]
            else:
                slots.append((names, name, operands[at]))
        try:
            with self._ambient.restored(), _filled(slots) if slots else contextlib.nullcontext():
                if not _pure.still(fun, self._reads):
                    raise CheckpointError(_REPLACED.format(self.name))
                with _Swap(swaps) if swaps else contextlib.nullcontext():
                    out, _ = _tree.flatten(fun(*args, **kwargs))
        finally:
            thaw.empty()
        return [out[i] for i in self.returned]

    def settle(self) -> None:
        """Called when the results of a rerun are gone."""

    def clean(self) -> None:
        """Called when the rerun's graph is gone."""

    def finish(self) -> None:
        """Called when the derivative is there."""


@contextlib.contextmanager
def _filled(slots: Sequence[_pure.Value]) -> Iterator[None]:
    """Within it, places hold what is wanted."""
    before = [(names, name, names.get(name, _MISSING)) for names, name, _ in slots]
    try:
        for names, name, value in slots:
            names[name] = value
        yield
    finally:
        for names, name, value in before:
            if value is _MISSING:
                names.pop(name, None)
            else:  # in its place, for the order of a module's parameters counts
                names[name] = value


class _Swap(TorchFunctionMode):
    """Within it, tensors stand for others: not where these are held, for other threads read them there."""

    def __init__(self, swaps: dict[int, Tensor]) -> None:
        super().__init__()
        self._swaps = swaps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._swapped(a) for a in args]
        return func(*args, **{k: self._swapped(v) for k, v in kwargs.items()}) if kwargs else func(*args)

    def _swapped(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._swaps.get(id(arg), arg)
        return type(arg)(map(self._swapped, arg)) if type(arg) in (list, tuple) else arg


def unwatched(fun: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnwatchedCall | None:
    """A call of a function that need not be watched, else None."""
    if internals.function_modes_active() or not (_is_plain(args) and _is_plain(kwargs)):
        return None
    reads = _pure.reads(fun)
    if reads is None or reads.draws or internals.tracing():
        return None
    call = UnwatchedCall(fun, name, reads, args, kwargs)
    return call if call.is_small else None
