"""The results of a call, and which of them it gives a derivative."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._closure import ATOMS
from remat._context import rerunning
from remat._effects import tensors_in
from remat._errors import warn
from remat._graph import is_from_before, is_made_since
from remat._layers import layers
from remat._look import Look

_NO_TREE = (
    "remat: {} returns results in an object of class {}, which is not a tree: their graph is kept, and no memory is "
    "saved. Return a tuple, a dict or a NamedTuple, or make the class known: torch.export.register_dataclass, "
    "or optree.register_pytree_node with namespace='torch'."
)
_KEPT = (
    "remat: {} keeps a tensor that it computed, of shape {}, {} (self.loss = y, losses.append(y)). Its graph holds the "
    "memory that remat would save. Keep y.detach(), or return y."
)
_keepers: set[str] = set()
"""The functions that have kept a tensor with its graph."""


def results_of(out: Any, look: Look, operands: Sequence[Tensor]) -> _tree.Picked:
    """The differentiated tensors that a function has computed, picked from the tree that it returned.

    **Arguments:**

    - `look`: the look at the run.
    - `operands`: what the function was given and closes over.
    """
    since = look.since

    def is_computed(result: Tensor) -> bool:
        """Outside tensors, and views of them, keep their own graph: that of a view keeps only the tensor alive."""
        if look.is_given_back(result):
            return False
        if is_from_before(result, since) and not (internals.forward_ad_active() and look.has_made(result)):
            return False
        if not (result.is_floating_point() or result.is_complex()):
            return False
        bases = [base for t in layers(result) if (base := t._base) is not None]
        if bases:
            read = (r.value for r in look.outside.values() if not is_made_since(r.value, since))
            outside = [layer for t in (*operands, *read) for layer in layers(t)]
            return not any(base is t or base is t._base for base in bases for t in outside)
        return True

    results = _tree.Picked(out, is_computed)
    for leaf in results.leaves:
        if not isinstance(leaf, Tensor) and type(leaf) not in ATOMS:
            held = (t for t in _tree.attributes_of(leaf) if isinstance(t, Tensor))
            if any(is_made_since(t, since) for t in held) and not rerunning.get():
                warn(_NO_TREE.format(look.name, type(leaf).__name__))
    return results


def warn_of_kept(out: Any, look: Look) -> None:
    """Warn, once for each function, if a tensor that it has made is still there with its graph.

    **Arguments:**

    - `out`: what the call returns.
    - `look`: the look at the run.
    """
    for ref, *_ in look.labels.values():
        t = ref()
        if t is None or t.grad_fn is None or internals.sequence_number(t.grad_fn) < look.since:
            continue
        if look.is_given_back(t) or look.name in _keepers:
            continue
        if any(t is layer for x in tensors_in(_tree.flatten(out)[0]) for layer in layers(x)):
            continue
        _keepers.add(look.name)
        del t
        gc.collect()  # torch leaves cycles, too
        if (t := ref()) is not None:
            warn(_KEPT.format(look.name, list(t.shape), t.dtype))
