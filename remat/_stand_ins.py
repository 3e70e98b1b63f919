"""What stands for a tensor while a function runs again: in the places that hold it, or in the calls that name it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from remat._pure import Value
from remat._watch import Watch

_MISSING: Any = object()
_filling = threading.RLock()


@contextlib.contextmanager
def filled(slots: Sequence[Value]) -> Iterator[None]:
    """Within it, places hold what is wanted. They belong to all threads: one at a time."""
    with _filling:
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


class Swapped(Watch):
    """Within it, tensors stand for others: not where these are held, for other threads read them there."""

    is_rerun = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._replaced(a) for a in args]
        return func(*args, **{k: self._replaced(v) for k, v in kwargs.items()}) if kwargs else func(*args)

    def _replaced(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.swapped(arg)
        return type(arg)(map(self._replaced, arg)) if type(arg) in (list, tuple) else arg

    def is_made(self, tensor: Tensor) -> bool:
        """It does not look for that."""
        return False
