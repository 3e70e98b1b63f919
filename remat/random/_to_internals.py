"""For remat/_torch_internals.py: move this function there and import it from there in `_keyed.py`."""

from __future__ import annotations

import torch
from torch._C import _functorch as _C


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch.compile mirrors the stack while it traces
def vmap_levels() -> tuple[tuple[int, int, str], ...]:
    """(level, batch size, randomness: error, different or same) of each active vmap, outermost first."""
    if _C.peek_interpreter_stack() is None:
        return ()
    vmaps = [i for i in _C.get_interpreter_stack() if i.key() == _C.TransformType.Vmap]
    pointers = [(i.level(), _C.CVmapInterpreterPtr(i)) for i in vmaps]
    return tuple((level, v.batchSize(), v.randomness().name.lower()) for level, v in pointers)
