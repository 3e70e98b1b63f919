"""The signature of a run: its torch calls, which a rerun has to repeat."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import resolve_name

from remat import _torch_internals as internals

ELSEWHERE, NO_LEVEL = -1, -2
"""In the place of the level of a hook: an outer rerun has put the hook on an unused tensor; a transform inside of the
function made the level."""


HOLDER, PLAIN, ARRAY, OTHER = "holder", "plain", "array", "other"
"""Kinds of arguments: one that may hold tensors, or is a generator; a number, say; an array of NumPy, or a memoryview;
another. The second and third belong to the signature."""
_HOLDERS = (Tensor, list, tuple, dict, slice, torch.Generator)
_PLAIN = (numbers.Number, str, range, type(None))  # numbers of NumPy and of enums too
_COMMON = (Tensor, Parameter, list, tuple, dict, slice, bool, int, float, complex, str, type(None), torch.dtype)


class _Kinds(dict[Any, str]):
    """The kinds of common classes. It holds no others: a local class would hold what its methods close over."""

    def __missing__(self, cls: Any) -> str:
        if issubclass(cls, _HOLDERS) and cls is not torch.Size:
            return HOLDER
        return PLAIN if issubclass(cls, _PLAIN) else ARRAY if hasattr(cls, "tobytes") else OTHER


_kinds = _Kinds()
_kinds.update({cls: _kinds[cls] for cls in _COMMON})
kind_of = _kinds.__getitem__
"""The kind of an argument of a class."""


class Signature:
    """The calls of a forward whose results are differentiated.

    **Attributes:**

    - `calls`: for each call, the function, a hash of its plain arguments and of the shapes of its results, and one of
        the labels of its tensors: NOTE [labels]. For `torch.autograd.grad`, also a hash of the inputs that it reaches.
    - `writes`: hashes of all of that for the other calls that change tensors in place; None if a label tells nothing.
    - `tail`: the position of the last matrix product or nested call, if no later call reads values; else None.
    - `tail_call`: the record of that nested call (`Remembered`); None for a product.
    - `hooks`: for each hook that the function sets on a tensor of its own, the length of `calls` at that time (and, in
        a nested call, the lengths there), and the level of the tensor, or `ELSEWHERE` or `NO_LEVEL`.
    - `hooks_of_torch`: these lengths for the hooks of torch's own tools, some of which set none in a backward pass.
    - `nests`: how many nested calls of functions under remat it has made. The one at the tail is the last.
    - `shows_nodes`: whether the user's code got a node of the graph, and may put a hook on that.
    - `has_custom`: whether it was seen to call an autograd.Function.
    - `thread`: the thread of the forward.
    - `under_transform`: whether it ran under a transform, where `autograd.Function.apply` is seen.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int, int | None]] = []
        self.writes: set[int | None] = set()
        self.nests = 0
        self.shows_nodes = self.has_custom = False
        self.thread = threading.get_ident()
        self.under_transform = internals.transforms_active()
        self.tail: int | None = None
        self.tail_call: Any = None
        self.hooks: list[tuple[tuple[int, ...], int]] = []
        self.hooks_of_torch: list[tuple[int, ...]] = []
        self._is_traced = internals.tracing() or internals.compiling()

    @property
    def hooked_by_user(self) -> bool:
        """Whether the user's code has put a hook on a tensor, or may have put one on a node."""
        return self.shows_nodes or len(self.hooks) > len(self.hooks_of_torch)

    def add_hook(self, position: tuple[int, ...], level: int, hook: Any) -> None:
        """Note a hook that the function sets. `position`, `level`: as in `hooks`."""
        self.hooks.append((position, level))
        if is_of_torch(hook):
            self.hooks_of_torch.append(position)

    def hash_of(self, tensor: Tensor, plain: Iterable[str] = ()) -> int:
        """A hash of a tensor's shape and dtype, and of what is plain in the arguments of a call: see `plain_in`.

        Lengths are left out of nested tensors, and under a tracer, where a symbolic one may become a number.
        """
        shape = None if self._is_traced or tensor.is_nested else tensor.shape
        return hash((shape, tensor.dtype, *filter(None, plain)))


def is_of_torch(hook: Any) -> bool:
    """Whether a hook is one of torch's tools, such as meters. They change no gradients."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def plain_in(arg: Any) -> str:
    """The numbers, flags, names and arrays in an argument of a call: a step, the bounds of a slice, a list of sizes."""
    cls = arg.__class__
    kind = kind_of(cls)
    if kind is PLAIN:
        return repr(arg)  # -1 and -2 have the same hash, and NaN != NaN
    if kind is OTHER:
        return arg.__qualname__ if isinstance(arg, type) else ""  # an autograd.Function, torch.DoubleTensor
    if isinstance(arg, Tensor):
        return ""
    if kind is ARRAY:
        return str(hash(arg.tobytes()))
    if cls is slice:
        return ":".join(map(plain_in, (arg.start, arg.stop, arg.step)))
    if cls is list or cls is tuple:
        return f"[{','.join(map(plain_in, arg))}]"
    if isinstance(arg, torch.Generator):  # the function may make and seed it
        return str(arg.initial_seed())
    return ""


def name_of(func: Any) -> str:
    """The name of a function, for an error."""
    if isinstance(func, tuple):  # a nested call: its name, and a hash of its signature
        return str(func[0])
    if func is None:
        return "an op"
    return resolve_name(func) or getattr(func, "__qualname__", None) or str(func)
