"""What is known of torch: its operations, its modules, and how modules are called."""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import _torch_internals as internals
from remat._code import KNOWN_NAMES, OPS, words
from remat._names import checkpoint_name

_MODULES = (torch, F, math, torch.linalg, torch.special, torch.fft, torch.nn)
BUILTINS = tuple(
    getattr(builtins, name)
    for name in words("""
    AssertionError RuntimeError TypeError ValueError abs all any bool dict divmod enumerate float int isinstance len
    list map max min pow range reversed round slice sorted str sum super tuple zip
""")
)
"""What the globals of a function may be, besides modules, numbers and functions of the same kind."""
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KNOWN_KINDS = (
    *NORMS,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.GRUCell,
    nn.LSTMCell,
    nn.MultiheadAttention,
    nn.RNNCell,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoderLayer,
)
"""Modules of torch that are known, although their code names more than is known here."""

PRIVATE = vars(nn.Module()).keys() - {"training"}
"""Attributes by which modules work."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_HARMLESS = words("""
    __abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __constants__ __dict__
    __doc__ __firstlineno__ __hash__ __init__ __jit_unused_properties__ __module__ __orig_bases__ __parameters__
    __reduce_ex__ __repr__ __setstate__ __static_attributes__ __weakref__
    """)


def calls_of(kind: type[nn.Module]) -> tuple[Any, ...]:
    """What happens to a module of this class that is called, or asked for an attribute."""
    return kind.__call__, kind._call_impl, kind.__getattr__


CALLS = calls_of(nn.Module)


def are_called_otherwise(hooks_count: bool = True) -> bool:
    """Whether a call of any module does more than torch's own: it was patched, or there are hooks for all modules."""
    return calls_of(nn.Module) != CALLS or (hooks_count and internals.has_global_module_hooks())


def is_stock(kind: type) -> bool:
    """Whether a class is a module of torch, or `object`."""
    return kind.__module__ == "builtins" or kind.__module__.startswith("torch.nn.modules.")


def _operators(kind: type) -> set[str]:
    """The names in a class by which it says what an operator does."""
    return {n for n in vars(kind) if n.startswith("__") and n.endswith("__")} - _HARMLESS


def has_operators(kind: type) -> bool:
    """Whether a class of the user's says what an operator does."""
    return not is_stock(kind) and bool(_operators(kind))


_OF_DATACLASSES = words("""
    __dataclass_fields__ __dataclass_params__ __delattr__ __eq__ __match_args__ __post_init__ __replace__ __setattr__
    """)


def is_settings(value: Any) -> bool:
    """Whether an object has attributes and methods, and does nothing else, as a dataclass of options does."""
    kind = type(value)
    return (
        type(kind) is type
        and hasattr(value, "__dict__")
        and kind.__mro__[-2].__module__ != "builtins"
        and all(_operators(k) <= _OF_DATACLASSES and _compares_fields(k) for k in kind.__mro__[:-1])
    )


def _compares_fields(kind: type) -> bool:
    """Whether objects of a class are compared as `dataclass` does it, if at all."""
    compare = vars(kind).get("__eq__")
    code = getattr(compare, "__code__", None)  # what is not a function has none
    return compare is None or (code is not None and code.co_filename == "<string>")


@functools.cache
def is_of_torch(name: str) -> bool:
    """Whether it means something elsewhere, so that `self.rrelu` does not make `F.rrelu` known; nor `_modules`.

    What is in a package, `nn.attention`, has a name of its own.
    """
    found = [getattr(space, name, None) for space in (*_MODULES, Tensor)]
    return name in PRIVATE or any(f is not None and not isinstance(f, types.ModuleType) for f in found)


@functools.cache
def operations() -> frozenset[int]:
    """The identities of operations, and of what else the globals of a function may be."""
    found = [getattr(space, name, None) for space in _MODULES for name in OPS]
    return frozenset(id(f) for f in (*found, *_MODULES, *BUILTINS, Tensor, checkpoint_name) if f is not None)


OF_TENSORS = vars(Tensor)  # without what it inherits
SPACES = [*(vars(m) for m in _MODULES if m is not math), OF_TENSORS]
"""Where an operation may be found by its name."""
ORIGINALS = {name: [space.get(name) for space in SPACES] for name in KNOWN_NAMES}
"""By name, what was found there when this was imported."""

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_OF_F = {f for f in vars(F).values() if isinstance(f, types.FunctionType)} - {F.multi_head_attention_forward}


def _named_in(code: types.CodeType) -> set[str]:
    return {*code.co_names}.union(*(_named_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _parts_of(kind: type[nn.Module]) -> list[tuple[Mapping[str, Any], str, Any]]:
    """The methods that a call of a module of torch runs, and the functions of `torch.nn.functional`."""
    found: list[tuple[Mapping[str, Any], str, Any]] = []
    names, todo = set[str](), {"forward"}
    while todo:
        names |= todo
        parts = [(vars(space), n) for n in todo for space in (*kind.__mro__[:-2], F) if n in vars(space)]
        functions = [(space, n, space[n]) for space, n in parts if isinstance(space[n], _FUNCTIONS)]
        found += functions
        codes = [f.__code__ for space, _, f in functions if isinstance(f, types.FunctionType) and f not in _OF_F]
        todo = set[str]().union(*map(_named_in, codes)) - names
    return found


STOCK = {kind: _parts_of(kind) for kind in _KNOWN_KINDS}
"""Modules that are known, and what they are made of: a namespace, a name, and what it meant at import."""
