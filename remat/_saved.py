"""What the nodes of an autograd graph have saved."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat._layers import innermost, layers


@internals.hook_of_checkpoint
class Packed:
    """A saved tensor, packed. A node that packs its own output unchanged would hold itself."""

    def __init__(self, tensor: Tensor) -> None:
        with internals.DisableTorchFunction():
            self.tensor: Tensor | None = tensor.detach()

    def unpack(self) -> Any:
        """The tensor; None if it is forgotten."""
        return self.tensor


def without_saved_tensors_hooks() -> contextlib.AbstractContextManager[Any]:
    """A context in which the user's `saved_tensors_hooks` are not called: only the innermost hooks are."""
    if internals.saved_tensors_hooks() is None:
        return internals.NOTHING
    return torch.autograd.graph.saved_tensors_hooks(Packed, Packed.unpack)


def hooks_set_inside() -> bool:
    """Whether there are saved-tensor hooks besides those of `without_saved_tensors_hooks`."""
    hooks = internals.saved_tensors_hooks()
    return hooks is not None and hooks[0] is not Packed


def graph_is_dropped() -> bool:
    """Whether a rerun of a checkpoint runs: of its graph, only what that saves is used. A policy need keep nothing."""
    hooks = internals.saved_tensors_hooks()
    return hooks is not None and getattr(getattr(hooks[0], "__self__", None), "drops_graph", False)


@functools.cache
def _saved_names(kind: type, prefix: str) -> list[str]:
    return [name for name in dir(kind) if name.startswith(prefix)]


def _is_opaque(kind: type) -> bool:
    """Whether nodes of this class show nothing of what they save: of foreach ops, and of functions in C++ (2.13)."""
    return kind.__name__ == "CppFunction"


def saves_tensors(kind: type) -> bool:
    """Whether nodes of this class save tensors for their backward, or may."""
    return _is_opaque(kind) or hasattr(kind, "saved_tensors") or bool(_saved_names(kind, "_raw_saved_"))


def is_of_user(function: type) -> bool:
    """Whether an autograd.Function is one of the user's: not one of ours, nor one that torch makes for a custom op."""
    return not function.__module__.startswith(("remat._", "remat.random.", "torch._library."))


def is_custom(node: Any) -> bool:
    """Whether a node belongs to an autograd function of the user's, in Python or in C++."""
    function = getattr(node, "_forward_cls", None)
    if function is None:  # in C++, it is a `torch::autograd::CppNode<...>` (2.13)
        return _is_opaque(type(node)) and "CppNode<" in node.name()
    return is_of_user(function)


def _saved_by(node: Any, raw: str = "") -> Iterator[Any]:
    """What a node has saved: unpacked, or (`_raw`) as it is held."""
    kind: Any = type(node)
    if hasattr(kind, "saved_tensors"):
        names = [f"{raw}_saved_tensors" if raw else "saved_tensors", *vars(node)]
    else:
        names = _saved_names(kind, f"{raw}_saved_")
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # used up, or changed in place since: then the backward will raise
            continue
        yield from saved if isinstance(saved, (list, tuple)) else (saved,)


def _saved_tensors_of(node: Any) -> list[Any]:
    """The tensors that a node has saved, as torch holds them."""
    return [saved for saved in _saved_by(node, "_raw") if isinstance(saved, internals.SavedTensor)]


def _data_of(saved: Any) -> Any:
    """What is held for a saved tensor: the tensor, or what the user's hooks have put in its place."""
    data = saved.data
    return data.tensor if isinstance(data, Packed) else data


def forget_saved(nodes: Iterable[Any]) -> None:
    """Make nodes forget the tensors that they have saved: somebody may hold the graph, which will not be used."""
    for node in nodes:
        for saved in _saved_tensors_of(node):
            if isinstance(saved.data, Packed):
                saved.data.tensor = None
                continue
            # None can't have hooks; a mode would be given the number 2 as an int, where torch expects a tensor
            with contextlib.suppress(RuntimeError), internals.DisableTorchDispatch():
                saved.register_hooks(_forget, _forget)


def _forget(tensor: Tensor) -> None:
    """In the place of a saved tensor."""


def nodes_behind(roots: Iterable[Any], since: int = -1) -> list[Any]:
    """All nodes of the graphs behind some nodes, with those. `since`: only those made since then."""
    found: dict[Any, None] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node is not None and node not in found and internals.sequence_number(node) >= since:
            found[node] = None
            todo += (following for following, _ in node.next_functions)
    return list(found)


def held_by(node: Any) -> Iterator[Any]:
    """What a node holds of what it has saved: tensors, or what hooks have put in their place.

    It is not unpacked: that would run the function of a checkpoint.
    """
    for held in _saved_by(node, "_raw"):
        yield _data_of(held) if isinstance(held, internals.SavedTensor) else held


def packs(node: Any) -> bool:
    """Whether hooks have put something in the place of a tensor that a node saves."""
    return any(not isinstance(_data_of(s), (Tensor, type(None))) for s in _saved_tensors_of(node))


def unpacked_by_hooks(nodes: Iterable[Any], checkpoints: type) -> Iterator[Tensor]:
    """The plain tensors that the user's hooks make of what they have put in the place of saved ones.

    `checkpoints`: what calls under a checkpoint have put there. That is left alone, and so is that of torch's own.
    """
    left = Tensor, type(None), checkpoints, internals.HolderOfTorch
    for node in nodes:
        packed = any(not isinstance(_data_of(s), left) for s in _saved_tensors_of(node))
        if packed:  # the hooks of a node are the same for all that it saves
            yield from (innermost(s) for s in _saved_by(node) if isinstance(s, Tensor))


def saves_output(tensor: Tensor) -> bool:
    """Whether the autograd node that made `tensor`, at any level, holds on to the tensor's storage."""
    storage = innermost(tensor).untyped_storage()
    for layer in layers(tensor):
        for t in (layer, layer._base) if layer._is_view() else (layer,):
            node = None if t is None else t.grad_fn
            if node is None:
                continue
            if is_custom(node):
                return True  # it may
            for held in held_by(node):
                raw = innermost(held) if isinstance(held, Tensor) else None
                if raw is not None and raw.layout is torch.strided and raw.untyped_storage() is storage:
                    return True
    return False
