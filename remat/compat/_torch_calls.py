"""What a torch call may do besides computing, for runs that are watched."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import _torch_internals as internals
from remat._effects import GIVES_MEMORY_AWAY, SET_DATA, may_write, written_by

_GETTER = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
# Only look-ups of these attributes are noted. None: a property of Python's, __cuda_array_interface__.
_TENSOR_ATTRIBUTES = {None, "T", "mT", "H", "mH", "data", "real", "imag", "grad", "_base"}
CONTAINERS = {list, tuple, dict}
BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_TELLING = {"generator", "inplace", "out"}
"""Arguments that tell that a call writes, or draws from a generator of the user's."""
RENORMALIZING = (F.embedding, F.embedding_bag)  # with `max_norm`, their fourth parameter
_OPS = internals.OP_KINDS
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, *_OPS)


def looks_up(func: Any) -> bool:
    """Whether a torch function looks up, or sets, an attribute that is no tensor."""
    return type(func) is _GETTER and getattr(func.__self__, "__name__", None) not in _TENSOR_ATTRIBUTES


@functools.cache
def mutable(func: Any) -> bool:
    """Whether a torch function may write to its arguments, or to `.grad`."""
    if isinstance(func, _OPS[0]):
        arguments = [a for name in func.overloads() for a in getattr(func, name)._schema.arguments if a.name != "out"]
        return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    if isinstance(func, _OPS[1]):
        return bool(func._schema.is_mutable)
    return may_write(func) or func in BACKWARDS or func in RENORMALIZING or func == SET_DATA


def writes(func: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a call may write to its arguments."""
    return mutable(func) or bool(kwargs and kwargs.get("out") is not None)


def may_change(func: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a call may write to something, or draw from a generator of the user's, or lets others write."""
    return mutable(func) or func in GIVES_MEMORY_AWAY or bool(kwargs and not _TELLING.isdisjoint(kwargs))


_ARITHMETIC = ("add", "sub", "mul", "div", "truediv")
ARITHMETIC = {f for n in _ARITHMETIC for f in (getattr(Tensor, f"{n}_", None), getattr(Tensor, f"__i{n}__", None)) if f}
"""Calls that compute on their first argument in place, and return it."""


def name_of(func: Any) -> str:
    """What a torch function is called."""
    return str(getattr(func, "__name__", func))


@functools.cache
def cuttable(func: Any) -> bool:
    """Whether all that a call saves before its last kernel is there by then: so that the kernel need not run.

    `rrelu` saves the noise that its kernel is about to draw (pytorch/pytorch#193671).
    """
    return isinstance(func, _BUILT_IN) and not mutable(func) and "rrelu" not in name_of(func)


def targets_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to, with those that they are views of."""
    found = written_by(func, args, kwargs)
    if func == SET_DATA:
        found = [args[0]]
    if func in RENORMALIZING and (kwargs.get("max_norm") or any(args[3:4])):
        found = [args[1] if len(args) > 1 else kwargs["weight"]]
    if isinstance(func, _OPS) and mutable(func):
        found = [*tensors_in((*args, *kwargs.values()))]
    if found and internals.fully_shard_at_work():  # what it writes is not the function's
        return []
    return [x for t in found for x in ((t, t._base) if t._is_view() else (t,)) if x is not None]


def tensors_in(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments, also in lists, tuples and dicts."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif type(arg) in (list, tuple):
            yield from tensors_in(arg)
        elif type(arg) is dict:
            yield from tensors_in(arg.values())


def all_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call."""
    return (*args, *kwargs.values()) if kwargs else args


def replaced(arg: Any, tensors: Iterator[Any]) -> Any:
    """An argument, with others in the place of the tensors in it, in the order of `tensors_in`; None: itself."""
    if isinstance(arg, Tensor):
        other = next(tensors)
        return arg if other is None else other
    if type(arg) in (list, tuple):
        return type(arg)([replaced(a, tensors) for a in arg])
    if type(arg) is dict:
        return {k: replaced(v, tensors) for k, v in arg.items()}
    return arg
