"""Tensors in a tensor: the layers below a wrapper of a transform, the tangent, and the parts of a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from remat import _torch_internals as internals

is_wrapper, unwrapped = internals.is_wrapper, internals.unwrapped
level_of, is_dead = internals.level_of, internals.is_dead


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor and those below its wrappers."""
    yield tensor
    while is_wrapper(tensor):
        tensor = unwrapped(tensor)
        yield tensor


def layers_up_to(tensor: Tensor, level: int) -> list[Tensor]:
    """The layers of a tensor at a level and below."""
    return [layer for layer in layers(tensor) if level_of(layer) <= level]


def innermost(tensor: Tensor) -> Tensor:
    """The plain tensor below all transforms."""
    while is_wrapper(tensor):
        tensor = unwrapped(tensor)
    return tensor


def unwrap_dead(tensor: Tensor) -> Tensor:
    """The tensor below the wrappers of transforms that are over."""
    while is_dead(tensor):
        tensor = internals.unwrap_if_dead(tensor)
    return tensor


def below_grad_levels(tensor: Tensor) -> Tensor:
    """The tensor below the wrappers of `grad` and `jvp` that are outermost: nothing differentiates it."""
    while internals.is_grad_wrapper(tensor):
        tensor = unwrapped(tensor)
    return tensor


def batched_at(tensor: Tensor) -> list[int]:
    """The positions of the vmaps that map over a tensor, among the active ones, outermost first."""
    levels = [*map(level_of, layers(tensor))]
    return [i for i, (level, *_) in enumerate(internals.vmap_levels()) if level in levels]


def alias_of(tensor: Tensor) -> Tensor:
    """Another tensor for the same values, with the same derivative."""
    # The backward of `view_as` reshapes the gradient, and that of an embedding may be sparse.
    return torch.ops.aten.alias.default(tensor) if tensor.layout is torch.strided else tensor.clone()


def nodes_of(tensor: Tensor) -> list[Any]:
    """The autograd nodes that made a tensor, at all levels."""
    return [layer.grad_fn for layer in layers(tensor) if layer.grad_fn is not None]


def version_of(tensor: Tensor) -> int:
    """How often the memory below all transforms was written to; -1 if torch does not count. Wrappers count apart."""
    plain = innermost(tensor)
    return -1 if plain.is_inference() else plain._version


def requires_grad_at_any_level(tensor: Tensor, lowest: int = -2) -> bool:
    """Whether some transform, or plain autograd, differentiates with respect to `tensor`. `lowest`: the least level."""
    while not tensor.requires_grad and is_wrapper(tensor):
        tensor = unwrapped(tensor)
    return tensor.requires_grad and (lowest == -2 or level_of(tensor) >= lowest)


def in_graph(tensor: Tensor) -> bool:
    """Whether a tensor is in the graph of some transform, or of plain autograd.

    A view that was made in `no_grad` is in none, but says that it requires grad, as its base does.
    """
    for layer in layers(tensor):
        base = layer._base if layer.is_leaf else None
        if layer.requires_grad and (base is None or not base.requires_grad):
            return True
    return False


def requires_grad_below(tensor: Tensor) -> bool:
    """Whether something differentiates with respect to `tensor` below the level that it is wrapped at."""
    return is_wrapper(tensor) and requires_grad_at_any_level(unwrapped(tensor))


def unpack_dual(tensor: Tensor) -> forward_ad.UnpackedDualTensor:
    """Primal and tangent of a tensor. One without strides carries no tangent, and torch can't unpack it."""
    if tensor.layout is not torch.strided or tensor.is_nested or not internals.forward_ad_active():
        return forward_ad.UnpackedDualTensor(tensor, None)
    return forward_ad.unpack_dual(tensor, level=0)


def layers_and_tangents(tensor: Tensor) -> list[Tensor]:
    """The layers of a tensor, and those of their tangents."""
    found = []
    with contextlib.ExitStack() as stack:
        for layer in layers(tensor):
            found.append(layer)
            while (top := internals.top_transform()) is not None and top.level > level_of(layer):
                stack.enter_context(top.lower())  # a tangent can be unpacked at its own level only
            if internals.is_grad_wrapper(layer) or not is_wrapper(layer):
                tangent = unpack_dual(layer).tangent
                found += [] if tangent is None else layers_and_tangents(tangent)
    return found


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors of which a subclass consists (nested tensors, DTensor); else the tensor itself."""
    if type(tensor) is Tensor or not internals.is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    held = (getattr(tensor, name) for name in names)  # also other objects: a DeviceMesh
    return [inner for x in held if isinstance(x, Tensor) for inner in inner_tensors(x)]
