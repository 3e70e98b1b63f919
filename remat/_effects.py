"""The effects of torch functions, besides computing. They are looked up at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import _torch_internals as internals
from remat._ops import STATISTICS, TRAINING, argument, is_written
from remat._signature import HOLDER, is_of_torch, kind_of

_FIRST = ((0, "input"),)
"""What a function writes to whose name ends in `_`, or a collective."""
_COLLECTIVES = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced all_to_all
    all_to_all_single broadcast irecv recv reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter
"""
_OTHERS: dict[Any, tuple[tuple[int, str], ...]] = {
    F.batch_norm: ((1, "running_mean"), (2, "running_var")),
    F.instance_norm: ((1, "running_mean"), (2, "running_var")),
}
"""Functions that write to arguments, by position and name. Of others, the name of the function or of an op tells it."""
GIVES_MEMORY_AWAY = {
    Tensor.__array__,
    Tensor.__cuda_array_interface__.__get__,
    Tensor.__dlpack__,
    Tensor.apply_,
    Tensor.data_ptr,
    Tensor.map_,
    Tensor.map2_,
    Tensor.numpy,
}
"""Functions that give the memory of a tensor to code that may change it out of sight, then or later."""
GIVES_NUMBER = {Tensor.__float__, Tensor.__index__}
"""What `torch.FloatTensor([t])` calls, without an op. Elsewhere they are ops."""
READS_MEMORY = {
    *GIVES_MEMORY_AWAY,
    *GIVES_NUMBER,
    Tensor.__format__,
    Tensor.__repr__,
    Tensor.tolist,
    Tensor.untyped_storage,
    Tensor.tensor_split,
    torch.ctc_loss,
    torch.gru,
    torch.lstm,
    torch.rnn_relu,
    torch.rnn_tanh,
    torch.tensor_split,
}
"""Functions that read memory without an op, or are asked for it by what does: a kernel, numpy, pickle."""
_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_LOGIC = ["and", "or", "xor", "lshift", "rshift"]
_ASSIGNMENTS = {"__setitem__", *(f"__i{op}__" for op in _ARITHMETIC + _LOGIC)}
_NO_WRITES = {"requires_grad_", "detach_", "rename_", "share_memory_", "retains_grad_"}
_RANDOM = {
    *("dropout1d", "dropout2d", "dropout3d", "fractional_max_pool2d", "fractional_max_pool3d", "gumbel_softmax"),
    *("kaiming_normal_", "kaiming_uniform_", "multi_head_attention_forward", "trunc_normal_"),
}
"""Functions that may draw. Of the others, the tags of ops tell it."""


def _named(names: str) -> frozenset[Any]:
    spaces = (Tensor, torch, F)
    return frozenset(getattr(space, name) for space in spaces for name in names.split() if hasattr(space, name))


_CONVOLUTIONS = _named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_PRODUCTS = _named("linear matmul __matmul__ mm bmm addmm baddbmm") | _CONVOLUTIONS
_LINEAR = _named("""
    neg __neg__ mul __mul__ __rmul__ div __truediv__ to float double half bfloat16 clone cat concat concatenate stack
    dropout
""")
"""Functions of one tensor, or of a list, with a derivative that reads none of its values, if the rest are numbers."""
_SUMS = _named("add __add__ __radd__ sub __sub__ rsub __rsub__ view_as")
_METADATA = _named("""
    __len__ dim ndimension size numel nelement stride storage_offset is_floating_point is_complex is_contiguous
""") | {
    getattr(Tensor, name).__get__
    for name in (
        *("device", "dtype", "grad_fn", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse", "layout", "ndim"),
        *("requires_grad", "retains_grad", "shape"),
    )
}
_VIEWS = _named("""
    alias view reshape flatten unflatten transpose swapaxes permute movedim squeeze unsqueeze contiguous
""") | {torch.ops.aten.alias.default}
_GETTER = type(Tensor.shape.__get__)  # type: ignore[attr-defined]
_GIVES_VALUES = {"data", "grad", "_grad", "real", "imag", "H", "mH"}


class Effects:
    """The effects of a torch function, besides computing."""

    def __init__(self, func: Any) -> None:
        ops = _ops_of(func)
        self.writes = _written_arguments(func, ops)
        """The positions and names of the arguments that it may change in place."""
        self.writes_if = _flag_of(ops) if any(name in STATISTICS for _, name in self.writes) else None
        """The name of the flag without which it writes to no statistics: its sixth argument."""
        self.draws = getattr(func, "__name__", "") in _RANDOM or any(map(_may_draw, ops))
        """It may draw random numbers."""
        self.sets_hook = func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
        self.retains_grad = func is Tensor.retain_grad
        self.moves_hooks = func == internals.MOVES_HOOKS
        """Autograd moves hooks to a new node with it, and holds a lock that reading `grad_fn` would wait for."""
        self.differentiates = func is torch.autograd.grad
        """`torch.func` calls it too."""
        self.shows_graph = func == Tensor.grad_fn.__get__  # type: ignore[union-attr]
        self.sets_data = func == Tensor.data.__set__  # type: ignore[attr-defined]
        self.is_custom = func is internals.custom_function_call
        """It is `autograd.Function.apply`, which modes see only inside of transforms."""
        self.is_unlisted = self.is_custom or func in (Tensor.requires_grad_, Tensor.view_as)
        """No signature lists it: `apply`; `requires_grad_`, which the forward may have done for the rerun; `view_as`,
        with which hooks look for the node of a leaf."""
        self.looks_up = func == Tensor.grad.__get__  # type: ignore[union-attr]
        """It returns a tensor that another one holds."""
        self.hides_writes = func == Tensor.data.__get__  # type: ignore[attr-defined]
        """Writes to its result count as writes to its argument under some transforms only."""
        self.reads_memory = func in READS_MEMORY
        """It reads memory without an op."""
        self.only_writes = self.writes is _FIRST and sum(map(bool, vars(self).values())) == 1
        """It writes to its first argument, a tensor, and none of the others above is true of it."""
        self.acts = any(vars(self).values())
        """One of the above is true of it."""
        self.multiplies = func in _PRODUCTS
        """It is a matrix product or a convolution."""
        self.convolves = func in _CONVOLUTIONS
        self.is_metadata = func in _METADATA
        """It tells shape, dtype and the like."""
        self.gives_alias = _is_view(func) or func is Tensor.detach or self.hides_writes
        """It returns a tensor over the same memory."""
        self.operands = 2 if func in _SUMS else int(_is_view(func) or func in _LINEAR)
        """How many of the first arguments may hold any values: neither the derivative nor the caller reads them. It is
        2 for a sum, 1 for a view or one of `_LINEAR`. The others must be numbers."""

    def reads_no_value(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether neither the derivative of a call nor what the caller learns depends on values."""
        if self.shows_graph or self.sets_hook:  # what a hook of the user's reads is unknown until it runs
            return True
        if not self.operands:
            return False
        given = (v for k, v in kwargs.items() if k not in ("input", "other")[: self.operands])
        for x in (*args[self.operands :], *given):
            if isinstance(x, Tensor) or (isinstance(x, (list, tuple)) and any(isinstance(n, Tensor) for n in x)):
                return False
        return True


effects_of = functools.lru_cache(maxsize=10_000)(Effects)  # custom functions may be made anew for each call


def _is_view(func: Any) -> bool:
    if type(func) is _GETTER:
        return getattr(func.__self__, "__name__", "data") not in _GIVES_VALUES
    return func in _VIEWS or func in _METADATA


def unless_none(hook: Any) -> Any:
    """A hook that is called for gradients only. For a derivative of another order, torch may call it with None."""
    return hook if is_of_torch(hook) else lambda g: None if g is None else hook(g)


def _written_arguments(func: Any, ops: list[Any]) -> tuple[tuple[int, str], ...]:
    """The arguments that a function may write to. `ops`: `_ops_of` it."""
    name = getattr(func, "__name__", "")
    if func in _OTHERS or name in _NO_WRITES:
        return _OTHERS.get(func, ())
    arguments = [(op, i, a) for op in ops for i, a in enumerate(op._schema.arguments)]
    is_op = isinstance(func, internals.OP_KINDS)
    written = {(i, a.name) for op, i, a in arguments if is_written(op, a) and (is_op or not a.kwarg_only)}
    if written and (is_op or written != {(0, "self")}):  # else the name tells: a schema of `sort` says that it writes
        return tuple(written)
    if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
        return _FIRST if name in _COLLECTIVES.split() else ((1, "gather_list"),) if name == "gather" else ()
    in_place = name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))
    return _FIRST if in_place else ()


def _flag_of(ops: list[Any]) -> str | None:
    return next((a.name for op in ops for a in op._schema.arguments if a.name in TRAINING), None)


def _may_draw(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in ("aten", "prims")


def _ops_of(func: Any) -> list[Any]:
    """The overloads of an op, or of the aten op with the name of a function."""
    op = func if isinstance(func, internals.OP_KINDS) else getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(op, internals.OP_KINDS):
        return []
    return [getattr(op, name) for name in op.overloads()] if hasattr(op, "overloads") else [op]


def written_by(effects: Effects, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that a call of a function with these effects writes to."""
    writes = effects.writes or (_FIRST if kwargs.get("inplace") else ())
    flag = effects.writes_if
    if flag is not None and not argument(5, flag, args, kwargs, TRAINING[flag]):
        writes = tuple((i, name) for i, name in writes if name not in STATISTICS)
    if writes is _FIRST:  # the argument may have another name
        found = [*args, *kwargs.values()][:1]
    else:
        found = [argument(i, name, args, kwargs) for i, name in writes]
    return tensors_in([*found, kwargs.get("out")])  # `_foreach_add_` takes lists


def acts_on(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that a call writes to or puts a hook on, and the generators that it is given."""
    effects = effects_of(func)
    generators = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
    return [*written_by(effects, args, kwargs), *(args[:1] if effects.sets_hook else ()), *generators]


def as_given(out: Any, written: Sequence[Tensor], effects: Effects, given: tuple[Any, Any]) -> Any:
    """The result of a call that writes. If it is an operand, the tensor that the user passed is returned instead.

    `self.count += 1` assigns the result, and the function may go on with either name.
    """
    args, kwargs = given
    return next((g for g, w in zip(written_by(effects, args, kwargs or {}), written, strict=True) if w is out), out)


def tensors_in(out: Any) -> list[Tensor]:
    """The tensors that a torch call was given or returned, also in nested lists, tuples, dicts and slices."""
    if not isinstance(out, (list, tuple)):
        if isinstance(out, Tensor):
            return [out]
        if isinstance(out, slice):
            out = out.start, out.stop, out.step
        else:
            out = out.values() if isinstance(out, dict) else ()
    found: list[Tensor] = []
    for x in out:
        if isinstance(x, Tensor):
            found.append(x)
        elif kind_of(x.__class__) is HOLDER:
            found += tensors_in(x)
    return found


def map_in(fun: Callable[[Any], Any], arg: Any) -> Any:
    """An argument of a torch call, with `fun(x)` in the place of each tensor or generator `x` in it."""
    kind = arg.__class__
    if kind_of(kind) is not HOLDER:
        return arg
    if issubclass(kind, (Tensor, torch.Generator)):
        return fun(arg)
    if kind is slice:
        return slice(*[map_in(fun, x) for x in (arg.start, arg.stop, arg.step)])
    if kind is dict:
        return {k: map_in(fun, v) for k, v in arg.items()}
    if not issubclass(kind, (list, tuple)) or HOLDER not in map(kind_of, {*map(type, arg)}):
        return arg
    items = [map_in(fun, x) for x in arg]
    return kind(*items) if hasattr(arg, "_fields") else kind(items)
