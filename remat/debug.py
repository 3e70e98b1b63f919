"""Measure memory: a meter of the bytes that live tensors hold."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import optree
import torch
from typing_extensions import Self

from remat._torch_internals import DispatchMode

__all__ = ["LiveBytes"]


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    leaves: list[Any] = optree.tree_leaves(tree)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            try:
                yield leaf.untyped_storage()
            except NotImplementedError:  # sparse tensors and the like have no storage of their own
                pass


class LiveBytes(DispatchMode):
    """Measure the live bytes of all tensors made while the context is active.

    Each torch op that runs in the context is seen below every `torch.func` transform and below autograd. A
    storage that an op makes counts from then on, once, however many tensors view it, until nothing keeps it
    alive any more: no tensor, no autograd graph, no transform. A storage that was there before never counts.

    Unlike the figures of an allocator, these are exact and repeat on every run, and so are fit for a test.
    Every device counts, and meta tensors count as what they would take. Not seen are what a kernel uses in
    itself, sparse tensors, ops of other threads (autograd's own are seen) and what runs inside compiled code.

    Meters nest, and one may be entered again, when it goes on counting.

    **Attributes:**

    - `current`: bytes now held by the storages made so far. It goes on falling as they die, also after the
      context has ended.
    - `peak`: the highest `current` so far, or since `reset_peak`, in bytes.
    - `history`: one `(seconds, bytes)` for each op, in order: the time since the meter was made and `current`
      right after the op. The first is `(0.0, 0)`.

    Examples:
        >>> import torch
        >>> from remat.debug import LiveBytes
        >>> x = torch.ones(1000)  # 4000 bytes, made before: not counted
        >>> with LiveBytes() as meter:
        ...     y = x.sin().cos()  # both results live at once, then only the last
        >>> meter.peak, meter.current
        (8000, 4000)
        >>> del y
        >>> meter.current
        0
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.history: list[tuple[float, int]] = [(0.0, 0)]
        self._start = time.perf_counter()
        self._sizes: dict[int, int] = {}  # by id: a storage has one Python object for as long as it lives
        self._older: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are live now.

        Examples:
            >>> import torch
            >>> from remat.debug import LiveBytes
            >>> with LiveBytes() as meter:
            ...     x = torch.ones(1000).sin()
            ...     meter.reset_peak()
            ...     y = x[:500].cos()
            >>> meter.peak
            6000
        """
        self.peak = self.current

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        # What an op reads and no op has made was there before. The one exception is `torch.tensor(...)`: its
        # new storage shows first as the argument of `lift_fresh`.
        if func is not torch.ops.aten.lift_fresh.default:
            self._older.update(s for s in _storages((args, kwargs)) if id(s) not in self._sizes)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            if storage not in self._older:
                self._count(storage)
        self.peak = max(self.peak, self.current)
        self.history.append((time.perf_counter() - self._start, self.current))
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key).atexit = False
        self.current += size - self._sizes.get(key, 0)  # a storage seen again may have been resized
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)
