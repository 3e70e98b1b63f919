"""The effects of torch functions, besides computing: one table, looked up at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import _torch_internals as internals

_STATISTICS: dict[Any, tuple[int, ...]] = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.batch_norm_update_stats: (1, 2),
    torch.fused_moving_avg_obs_fake_quant: (3, 4, 5, 6),
    torch.instance_norm: (3, 4),
    torch.native_batch_norm: (3, 4),
}
"""Functions that write to arguments, by position, without saying so in their names."""
GIVES_MEMORY_AWAY = {
    Tensor.__array__,
    Tensor.__cuda_array_interface__.__get__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.numpy,
}
READS_MEMORY = {
    *GIVES_MEMORY_AWAY,
    Tensor.__format__,
    Tensor.__repr__,
    Tensor.tolist,
    Tensor.untyped_storage,
    Tensor.tensor_split,
    torch.ctc_loss,
    torch.tensor_split,
}
"""Functions that read memory without an op, or are asked for it by what does: a kernel, numpy, pickle."""
_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_LOGIC = ["and", "or", "xor", "lshift", "rshift"]
_ASSIGNMENTS = {"__setitem__", *(f"__i{op}__" for op in _ARITHMETIC + _LOGIC)}
_NO_WRITES = {"requires_grad_", "detach_", "rename_", "share_memory_", "retains_grad_"}
_RANDOM_NAMES = """
    alpha_dropout alpha_dropout_ bernoulli bernoulli_ cauchy_ dropout dropout_ dropout1d dropout2d dropout3d
    exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ geometric_
    gumbel_softmax log_normal_ multinomial native_dropout normal normal_ poisson rand rand_like randint
    randint_like randn randn_like random_ randperm rrelu rrelu_ trunc_normal_ uniform_
"""
_RANDOM = frozenset(_RANDOM_NAMES.split())


def _named(names: str) -> frozenset[Any]:
    spaces = (Tensor, torch, F)
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_PRODUCTS = _named("linear matmul __matmul__ mm bmm addmm baddbmm conv1d conv2d conv3d")
_SUMS = _named("add __add__ __radd__ sub __sub__ rsub __rsub__ view_as")
_LAYOUT = _named("""
    alias view reshape flatten unflatten transpose swapaxes permute movedim squeeze unsqueeze contiguous
    size dim numel nelement stride is_floating_point is_complex is_contiguous
""") | {torch.ops.aten.alias.default}
_METADATA = _named("dim ndimension size numel nelement stride is_floating_point is_complex is_contiguous") | {
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "is_cuda", "is_meta", "is_nested", "is_sparse", "layout", "ndim", "shape")
}
_GETTER = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
_GIVES_VALUES = {"data", "grad", "_grad", "real", "imag", "H", "mH"}
_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]


class Effects(NamedTuple):
    """The effects of a torch function, besides computing."""

    writes: bool = False
    """It may change an argument in place."""
    draws: bool = False
    """It draws random numbers."""
    sets_hook: bool = False
    """It is `Tensor.register_hook`."""
    moves_hooks: bool = False
    """Autograd moves hooks to a new node with it, and holds a lock that reading `grad_fn` would wait for."""
    differentiates: bool = False
    """It is `torch.autograd.grad`, which `torch.func` calls too."""
    shows_graph: bool = False
    """It is `x.grad_fn`."""
    sets_data: bool = False
    """It is `x.data = ...`."""
    is_custom: bool = False
    """It is `autograd.Function.apply`, which modes see only inside of transforms."""
    is_unlisted: bool = False
    """No signature lists it: `apply`; `requires_grad_`, which the forward may have done for the rerun; `view_as`, with
    which hooks look for the node of a leaf."""
    looks_up: bool = False
    """It returns a tensor that another one holds: `x.grad`."""
    reads_memory: bool = False
    """It reads memory without an op."""
    acts: bool = False
    """Whether one of the fields above is true."""
    multiplies: bool = False
    """It is a matrix product or a convolution."""
    operands: int = 0
    """Of a sum 2, of a view 1: neither its derivative nor what the caller learns depends on the values of so many first
    arguments. The others must be numbers."""


ORDINARY = Effects()
METADATA = Effects(operands=1)
"""Of the functions that tell shape, dtype and the like: this very object."""
EFFECTS: dict[Any, Effects] = {}
"""Those of the functions that were asked for so far."""


def effects_of(func: Any) -> Effects:
    """The effects of `func`. `ORDINARY` itself if it has none, `METADATA` if it looks at no value."""
    found = EFFECTS.get(func)
    if found is None:
        found = Effects(
            writes=may_write(func),
            draws=getattr(func, "__name__", "") in _RANDOM,
            sets_hook=func is Tensor.register_hook,
            moves_hooks=func == internals.MOVES_HOOKS,
            differentiates=func is torch.autograd.grad,
            shows_graph=func == _GRAD_FN,
            sets_data=func == Tensor.data.__set__,  # type: ignore[attr-defined]
            is_custom=func is internals.custom_function_call,
            is_unlisted=func is internals.custom_function_call or func in (Tensor.requires_grad_, Tensor.view_as),
            looks_up=func == Tensor.grad.__get__,  # type: ignore[union-attr]
            reads_memory=func in READS_MEMORY,
            multiplies=func in _PRODUCTS,
            operands=2 if func in _SUMS else int(_is_view(func)),
        )
        found = found._replace(acts=any(found[: Effects._fields.index("acts")]))
        if len(EFFECTS) < 10_000:  # custom functions may be made anew for each call
            found = ORDINARY if found == ORDINARY else METADATA if func in _METADATA else found
            EFFECTS[func] = found
    return found


def _is_view(func: Any) -> bool:
    if type(func) is _GETTER:
        return getattr(func.__self__, "__name__", "data") not in _GIVES_VALUES
    return func in _LAYOUT


def reads_no_value(effects: Effects, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether neither the derivative of a call nor what the caller learns depends on values."""
    if effects.shows_graph:  # the user may put a hook on the node that reads values; torch's meters do not
        return internals.called_by("torch.")
    if effects.sets_hook:
        return str(getattr(args[1], "__module__", "")).startswith("torch.")  # a user's hook may keep values
    if not effects.operands:
        return False
    numbers = args[effects.operands :]
    if kwargs:
        numbers = (*numbers, *(v for k, v in kwargs.items() if k not in ("input", "other")))
    for x in numbers:
        if isinstance(x, Tensor) or (isinstance(x, (list, tuple)) and any(isinstance(n, Tensor) for n in x)):
            return False
    return True


def may_write(func: Any) -> bool:
    """Whether a torch function writes to an argument, by its name or, of an op, by its schema."""
    if isinstance(func, internals.OP_KINDS):
        return bool(_written_positions(func))
    name = getattr(func, "__name__", "")
    if name in _NO_WRITES:
        return False
    return func in _STATISTICS or name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


def _written_positions(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an op writes to: positions and names."""
    overloads = [getattr(op, name) for name in op.overloads()] if hasattr(op, "overloads") else [op]
    arguments = [(i, a) for o in overloads for i, a in enumerate(o._schema.arguments)]
    return tuple({(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write})


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a call of `func` writes to."""
    found: list[Any] = []
    positions = _STATISTICS.get(func)
    if isinstance(func, internals.OP_KINDS):
        for i, name in _written_positions(func):
            found.append(args[i] if i < len(args) else kwargs.get(name))
    elif positions is not None:
        found += [args[i] for i in positions if i < len(args)]
        found += [kwargs.get(name) for name in ("running_mean", "running_var", "running_min", "running_max")]
    elif may_write(func) or kwargs.get("inplace"):
        found += args[:1] or list(kwargs.values())[:1]
    found.append(kwargs.get("out"))
    flat = [t for x in found for t in (x if isinstance(x, (list, tuple)) else (x,))]  # `_foreach_add_` takes lists
    return [t for t in flat if isinstance(t, Tensor)]


def as_given(out: Any, written: Sequence[Tensor], func: Any, given: tuple[Any, Any]) -> Any:
    """The result of a call that writes. If it is an operand, the tensor that the user passed is returned instead.

    `self.count += 1` assigns the result, and the function may go on with either name.
    """
    args, kwargs = given
    return next((g for g, w in zip(written_by(func, args, kwargs or {}), written, strict=True) if w is out), out)


def tensors_in(out: Any) -> list[Tensor]:
    """The tensors that a torch call was given or returned, also in nested lists, tuples and dicts."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [t for x in out for t in tensors_in(x)]
    return [t for x in out.values() for t in tensors_in(x)] if isinstance(out, dict) else []
