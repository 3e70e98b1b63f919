"""The end of a function, whose values no backward reads.

A transformer's block ends in a product and a sum: `x + linear(h)`. The backward of a product reads its operands, and
that of a sum reads nothing, so a rerun needs the graph of both and the values of neither. In a rerun such a last
product is not computed: its op returns memory that nobody has written.

NOTE [when nobody reads]: the forward finds out, call by call. After the product there must be nothing but calls whose
derivatives and results do not depend on values (`_keeps_no_value`), on tensors that the run has seen to be made, with
grad mode on (it is off in an `autograd.Function`, which may save what it likes). A rerun that does anything else there
is an error. A result that outlives the rerun all the same, in a list of the user's for one, is computed then.

A function that is watched is looked at by its `Run`. For others there are two modes that do this alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from remat import _torch_internals as internals
from remat._context import Ambient
from remat._errors import PURITY, CheckpointError, call_site

_LEAST = 2**20  # multiplications: less is computed sooner than it is spared


def _named(names: str) -> frozenset[Any]:
    spaces = (Tensor, torch, torch.nn.functional)
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_PRODUCTS = _named("linear matmul __matmul__ mm bmm addmm baddbmm")
_OF_TWO_TENSORS = _named("add __add__ __radd__ sub __sub__ rsub __rsub__ view_as")
_VALUE_FREE = (
    _OF_TWO_TENSORS
    | _named("""
    alias view reshape flatten unflatten transpose swapaxes permute movedim squeeze unsqueeze contiguous
    size dim numel nelement stride is_floating_point is_complex is_contiguous
""")
    | {torch.ops.aten.alias.default}
)
_GETTER = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
_GIVES_VALUES = {"data", "grad", "_grad", "real", "imag", "H", "mH"}


def _is_product(func: Any) -> bool:
    """Whether a torch call is a matrix product."""
    return func in _PRODUCTS


def _keeps_no_value(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether neither the backward of a torch call, nor what the caller learns by it, depends on values."""
    if type(func) is _GETTER:
        return func.__self__.__name__ not in _GIVES_VALUES
    if func not in _VALUE_FREE:
        return False
    operands = 2 if func in _OF_TWO_TENSORS else 1
    numbers = (*args[operands:], *(v for k, v in kwargs.items() if k not in ("input", "other")))
    return not any(isinstance(n, Tensor) for x in numbers for n in (x if isinstance(x, (list, tuple)) else (x,)))


def _can_be_hooked(func: Any) -> bool:
    """Whether it is `register_hook`, of a hook for which a value that it holds can be computed when the rerun is over.

    Where a transform has wrapped that value, it can't be.
    """
    return func is Tensor.register_hook and not internals.transforms_active()


def _is_large(product: Tensor, args: Any) -> bool:
    """Whether the product of the last two tensors in `args`, or of the first two, is worth being spared."""
    widths = [t.shape[-1] for t in args[:3] if isinstance(t, Tensor) and t.dim() > 1]
    return bool(widths) and product.numel() * min(widths) >= _LEAST


def last_product(last: int | None, position: int, func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """The position of the last product of a forward after one more call, if no later call reads values.

    **Arguments:**

    - `last`: the answer before it.
    - `position`: that of the call.
    - `func`, `args`, `kwargs`, `out`: the call.
    """
    recorded = torch.is_grad_enabled() and "out" not in kwargs
    if _is_product(func):
        return position if recorded and isinstance(out, Tensor) and _is_large(out, args) else None
    keeps = last is not None and recorded and (_keeps_no_value(func, args, kwargs) or _can_be_hooked(func))
    return last if keeps else None


def _mm(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1])


_aten = torch.ops.aten
_SHAPES: dict[Any, Callable[..., tuple[int, ...]]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: lambda _, a, b: _mm(a, b),
    _aten.baddbmm.default: lambda _, a, b: _mm(a, b),
}


class _WithoutProducts(internals.DispatchMode):
    """Within it, products return memory that nobody has written."""

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        shape = _SHAPES.get(func)
        if shape is None or any(type(t) not in _PLAIN or t.layout is not torch.strided for t in args):
            return func(*args, **kwargs)
        return args[-1].new_empty(shape(*args))


_PLAIN = {Tensor, torch.nn.Parameter}


class Spared:
    """The calls of a rerun from its last product on."""

    def __init__(self, name: str) -> None:
        """Of the function `name`."""
        self._name = name
        self._calls: list[tuple[Any, Any, Any, Ambient, weakref.ref[Tensor]]] = []
        # By memory, what has no values there: held, for others might get its memory.
        self._hollow: dict[int, Tensor] = {}

    def product(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call, without the product."""
        with _WithoutProducts():
            out = func(*args, **kwargs)
        with internals.DisableTorchFunction():
            self._note(func, args, kwargs, out)
        return out

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a call."""
        if not (_keeps_no_value(func, args, kwargs) or _can_be_hooked(func) or _is_product(func)):
            raise CheckpointError(
                f"remat: the rerun of {self._name} calls {resolve_name(func) or func} at {call_site()}, where its "
                f"forward did not. {PURITY}"
            )
        if isinstance(out, Tensor):
            with internals.DisableTorchFunction():
                given = {internals.memory_of(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
                hollow = given & self._hollow.keys()
                # What is computed of values that are there is there, and so is another look at them.
                if hollow and internals.memory_of(out) not in given - hollow:
                    self._note(func, args, kwargs, out)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        self._hollow[internals.memory_of(out)] = internals.innermost(out)
        self._calls.append((func, args, kwargs, Ambient.current(), weakref.ref(out)))

    def settle(self) -> None:
        """The rerun is over and its results are gone: what is left of them has to be right."""
        calls, self._calls = self._calls, []
        self._hollow.clear()
        while calls and calls[-1][-1]() is None:
            calls.pop()
        with torch.no_grad():
            for func, args, kwargs, ambient, ref in calls:
                out = ref()
                if out is not None and not internals.is_wrapper(out):
                    with ambient.restored():
                        out.detach().copy_(func(*args, **kwargs))


class LastProduct(NamedTuple):
    """Where a function calls its last product."""

    position: int
    func: Any


class Search(TorchFunctionMode):
    """Within it, the forward runs of which the last product is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._last: int | None = None
        self._func: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._last = last_product(self._last, self._count, func, args, kwargs or {}, out)
        if self._last == self._count:
            self._func = func
        self._count += 1
        return out

    def found(self) -> LastProduct | None:
        """The last product, if nobody reads its value."""
        return None if self._last is None else LastProduct(self._last, self._func)


class Sparing(TorchFunctionMode):
    """Within it, a rerun does not compute its last product.

    **Attributes:**

    - `spared`: what has been called from there on.
    """

    def __init__(self, name: str, last: LastProduct) -> None:
        super().__init__()
        self.spared = Spared(name)
        self._last = last
        self._position = -1
        self._at_tail = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._position += 1
        if self._position == self._last.position and func == self._last.func:
            self._at_tail = True
            return self.spared.product(func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        if self._at_tail:
            self.spared.add(func, args, kwargs or {}, out)
        return out
