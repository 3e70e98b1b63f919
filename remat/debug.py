"""Measure the memory of live tensors."""

from __future__ import annotations

import time
import weakref
from typing import Any, Self

import optree
import torch

from remat._dispatch_mode import DispatchMode
from remat._ops import storages

__all__ = ["LiveBytes"]


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves: list[Any] = optree.tree_leaves(tree)
    return storages(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


class LiveBytes(DispatchMode):
    """Measure the live bytes of all tensors made while the context is active.

    The meter sees each torch op in the context, below every `torch.func` transform and below autograd. It counts each
    storage that an op makes, once, however many tensors view it. The storage counts until it is freed: until no
    tensor, no autograd graph and no transform keeps it alive. Storages from before the context never count.

    The figures are exact and the same on every run, unlike those of an allocator. So tests can check them. All
    devices count. Meta tensors count the bytes that they would take. The meter does not see temporary memory inside a
    kernel, sparse tensors, ops of other threads (except autograd's), memory inside compiled code, and tensors of
    symbolic length.

    Meters may be nested. A meter that is entered again continues its count.

    **Attributes:**

    - `current`: bytes that the counted storages hold now. It falls as they are freed, also after the context.
    - `peak`: the highest `current` so far, or since `reset_peak`, in bytes.
    - `history`: one `(seconds, bytes)` for each op, in order: the time since the meter was made, and `current` right
      after the op. The first entry is `(0.0, 0)`.

    Examples:
        >>> import torch
        >>> from remat.debug import LiveBytes
        >>> x = torch.ones(1000)  # from before: not counted
        >>> with LiveBytes() as meter:
        ...     y = x.sin().cos()  # first both results are live, then only y
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
        """Set `peak` to the bytes that are live now.

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
        # If an op reads a storage that no op has made, the storage is from before. The one exception is
        # `torch.tensor(...)`, whose new storage appears first as the argument of `lift_fresh`.
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
        if not isinstance(size, int):
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key).atexit = False
        self.current += size - self._sizes.get(key, 0)  # a storage seen again may have been resized
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)
