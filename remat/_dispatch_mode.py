"""A torch-dispatch mode that sees every aten op below all transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from remat import _torch_internals as internals

_MUL_SCALAR = torch.ops.aten.mul.Scalar


def _times_zeros(zeros: Tensor, number: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What to call in the place of `aten.mul.Scalar` of a ZeroTensor, which ends the process under any mode (2.13)."""
    dtype = torch.result_type(zeros, number)
    return torch.ops.aten._efficientzerotensor.default, (zeros.shape,), {"dtype": dtype, "device": zeros.device}


class DispatchMode(internals.TorchDispatchMode):
    """A mode that sees every aten op below all transforms, in `_op`. Complex ops do in it what they do without it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the handler is marked: torch would put a function around it, for 4 µs a call

    supports_higher_order_operators = True
    is_about_functions = False
    """Whether it counts, keeps or compares the ops of a function. What remat does about them is not among these."""
    looks_inside = False
    """Whether it sees, in place of the ops of DTensors and nested tensors, those of the tensors inside."""
    has_looked_inside = False
    """Whether a DTensor or nested tensor has done an op."""
    paused = False
    """Whether it looks away, for the ops are remat's own."""

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an op."""
        return func(*args, **kwargs)

    _op_of_remat = _op  # within `ops_of_remat`

    def accessed(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called before a torch call reads the memory of tensors without an op."""

    @internals.left_alone_by_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and self.looks_inside and any(map(internals.computes_by_ops, types)):
            if not self.has_looked_inside:
                self.has_looked_inside, self._fake_mode = True, internals.active_fake_mode()
            return NotImplemented
        if self.has_looked_inside and isinstance(func, internals.OP_KINDS) and func.namespace != "prim":
            out = self._in_subclass(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        if func is _MUL_SCALAR and args[0]._is_zerotensor():
            func, args, kwargs = _times_zeros(*args)
        op = self._op_of_remat if self.paused else self._op
        with internals.DisableTorchFunction():  # the user has not called what is called here
            for x in args:
                if isinstance(x, Tensor) and x.is_complex():
                    with internals.views_resolved():
                        return op(func, args, kwargs or {})
            return op(func, args, kwargs or {})

    def _in_subclass(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an op that a subclass does with the tensors inside. NotImplemented if it is like any other op."""
        if internals.active_fake_mode() is not self._fake_mode:
            with without_modes():  # DTensor finds out a shape, the first time
                return func(*args, **kwargs)
        if any(isinstance(t, Tensor) and t.is_nested for t in args):  # nested tensors have kernels for these
            return NotImplemented
        internals.push_dispatch_mode(self)  # no dispatch key has decomposed an op such as `matmul`
        try:
            return func.decompose(*args, **kwargs)
        finally:
            internals.pop_dispatch_mode()


def tell_of_access(func: Any, args: Any, kwargs: Any) -> None:
    """Tell the active modes of a torch call that reads memory without an op."""
    with internals.DisableTorchFunction():  # the modes around need not see how they look
        for mode in internals.dispatch_mode_stack():
            if isinstance(mode, DispatchMode):
                mode.accessed(func, args, kwargs or {})


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Within it, no dispatch mode of the user and of remat is active. Those of torch are, such as fake tensors."""
    modes = [mode for mode in internals.dispatch_mode_stack() if not internals.is_mode_of_torch(mode)]
    for _ in modes:
        internals.pop_dispatch_mode()
    try:
        yield
    finally:
        for mode in modes:
            internals.push_dispatch_mode(mode)


@contextlib.contextmanager
def ops_of_remat() -> Iterator[None]:
    """Within it, modes look away that are about functions: a selective context around, say. Meters do not."""
    active = (mode for mode in internals.dispatch_mode_stack() if isinstance(mode, DispatchMode))
    modes = [mode for mode in active if mode.is_about_functions and not mode.paused]
    for mode in modes:
        mode.paused = True
    try:
        yield
    finally:
        for mode in modes:
            mode.paused = False
