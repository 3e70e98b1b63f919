"""Cotangents that nested backward passes hand on.

NOTE [handed on]: a node that runs another backward pass holds its cotangents meanwhile, in Python frames and in the
engine. In a nest of r remat'd functions that makes r tensors. So an inner node gets its cotangents *sealed*: as an
attribute of a tensor that takes no memory, and that is filled with NaN so that a mistake is loud. The pass that needs
the values takes them out, and then nobody else holds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals


def seal(cotangent: Any) -> Any:
    """Seal a cotangent, unless it is None, sealed already, or not a plain strided tensor."""
    if type(cotangent) is not Tensor or cotangent.layout is not torch.strided or hasattr(cotangent, "_remat_sealed"):
        return cotangent
    if torch.is_anomaly_enabled():  # it looks for NaN
        return cotangent
    with internals.DisableTorchFunction(), internals.DisableTorchDispatch():
        cover: Any = cotangent.new_full((), float("nan")).expand(cotangent.shape)
    cover._remat_sealed = cotangent
    return cover


def unseal(cotangent: Any) -> Any:
    """The cotangent, taken out of its cover if it is sealed."""
    return cotangent if cotangent is None else vars(cotangent).pop("_remat_sealed", cotangent)


def hand_on(nodes: Iterable[Any], ends: Iterable[Any]) -> None:
    """Seal the cotangents that flow through a graph on their way to inner passes, and unseal those that it is given.

    **Arguments:**

    - `nodes`: all nodes of the graph.
    - `ends`: the nodes that are given sealed cotangents.
    """
    for node in nodes:
        if getattr(node, "hands_on", False):
            node.register_prehook(lambda cotangents: tuple(map(seal, cotangents)))
    for node in ends:
        node.register_prehook(lambda cotangents: tuple(map(unseal, cotangents)))
