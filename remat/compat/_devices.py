"""The helpers of torch.utils.checkpoint that programs import: random states of devices, detached inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat import _tree
from remat._errors import warn


class DefaultDeviceType:
    """The device type whose random state counts where no tensor says which.

    `checkpoint` looks after the generators of the devices of the tensors that it is given, and of this one.

    **Source:** `torch.utils.checkpoint.DefaultDeviceType`.

    Examples:
        >>> from remat.compat import DefaultDeviceType
        >>> DefaultDeviceType.set_device_type("cpu")
        >>> DefaultDeviceType.get_device_type()
        'cpu'
    """

    _device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Set it, for all threads."""
        DefaultDeviceType._device_type = device

    @staticmethod
    def get_device_type() -> str:
        """Get it: the current accelerator, or the CPU, unless it was set."""
        if DefaultDeviceType._device_type is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._device_type = "cpu" if accelerator is None else accelerator.type
        return DefaultDeviceType._device_type


def noop_context_fn() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Two contexts that do nothing: the default of the argument `context_fn` of `checkpoint`.

    **Returns:** the context of the forward and that of the rerun.

    Examples:
        >>> from remat.compat import noop_context_fn
        >>> forward_context, recompute_context = noop_context_fn()
    """
    return contextlib.nullcontext(), contextlib.nullcontext()


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs, with each tensor detached and requiring grad as before.

    **Arguments:**

    - `inputs`: a tuple; what is not a tensor is passed through.

    **Returns:** a tuple of the same length.

    **Raises:** `RuntimeError` where `inputs` is no tuple.

    Examples:
        >>> import torch
        >>> from remat.compat import detach_variable
        >>> (x,) = detach_variable((torch.ones(2, requires_grad=True).sin(),))
        >>> x.is_leaf, x.requires_grad
        (True, True)
    """
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"Only tuple of tensors is supported. Got Unsupported input type: {type(inputs).__name__}")
    return tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs)


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn unless one of the inputs requires grad.

    **Arguments:**

    - `inputs`: tensors and other things.

    Examples:
        >>> import torch
        >>> from remat.compat import check_backward_validity
        >>> check_backward_validity([1, torch.ones(2, requires_grad=True)])
    """
    warn_without_grad(inputs)


def warn_without_grad(inputs: Iterable[Any]) -> bool:
    """Whether one of the inputs requires grad; a warning if not."""
    if any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
        return True
    warn("None of the inputs have requires_grad=True. Gradients will be None")
    return False


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """The random states of the accelerators that the tensors among the arguments are on.

    **Arguments:**

    - `args`: anything; tensors are looked for in containers too.

    **Returns:** the indices of the devices, and their states.

    **Raises:** `ValueError` where the tensors are on accelerators of several types: an index says no type.

    Examples:
        >>> import torch
        >>> from remat.compat import get_device_states, set_device_states
        >>> devices, states = get_device_states(torch.ones(3))  # on the CPU
        >>> set_device_states(devices, states)
        >>> devices, states
        ([], [])
    """
    leaves, _ = _tree.flatten(args)
    devices = [x.device for x in leaves if isinstance(x, Tensor) and x.device.type not in ("cpu", "meta")]
    kinds = sorted({d.type for d in devices})
    if len(kinds) > 1:
        raise ValueError(f"get_device_states: the tensors are on devices of several types: {', '.join(kinds)}.")
    indices = [d.index for d in dict.fromkeys(devices)]
    return indices, [torch.get_device_module(kinds[0]).get_rng_state(i) for i in indices]


def set_device_states(devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None) -> None:
    """Set the random states of accelerators.

    **Arguments:**

    - `devices`: their indices.
    - `states`: the states, as `get_device_states` returns them.
    - `device_type`: their type; None is that of `DefaultDeviceType`.

    Examples:
        >>> from remat.compat import get_device_states, set_device_states
        >>> set_device_states(*get_device_states())
    """
    kind = DefaultDeviceType.get_device_type() if device_type is None else device_type
    if kind == "meta":
        return
    for index, state in zip(devices, states, strict=False):
        torch.get_device_module(kind).set_rng_state(state, index)
