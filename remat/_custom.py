"""Functions with their own rules for the values that are kept and recomputed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from remat import _torch_internals as internals
from remat import _tree
from remat._closure import Operand
from remat._effects import tensors_in
from remat._errors import RematError, shown
from remat._graph import UnknownInput, prove
from remat._layers import layers_and_tangents
from remat._names import keep
from remat._remat import name_of_global, remat
from remat.policies._policy import policy_around

_CAPTURED = (
    "remat: {}: f_fwd takes a differentiated tensor from outside: {}. Its gradient would be lost, because f_bwd gives "
    "gradients of arguments alone. Pass it as an argument."
)

P = ParamSpec("P")
R = TypeVar("R")


class _Template:
    """A tree in which each tensor is replaced by its position in a list."""

    def __init__(self, tree: Any, tensors: list[Tensor]) -> None:
        """Append the tensors of the tree to the list `tensors`."""
        self.leaves, self._spec = _tree.flatten(tree)
        for i, x in enumerate(self.leaves):
            if isinstance(x, Tensor):
                self.leaves[i] = Operand(len(tensors))
                tensors.append(x)

    def filled(self, tensors: Sequence[Any]) -> Any:
        leaves = [tensors[x.index] if isinstance(x, Operand) else x for x in self.leaves]
        return _tree.unflatten(self._spec, leaves)


class _Call:
    """A call: its arguments, residuals and results, in which each tensor is the number of an input of its node."""

    def __init__(self, rules: Any, args: Sequence[Any], out: Any, residuals: Any, tensors: list[Tensor]) -> None:
        """Append the inputs of the node to `tensors`.

        First come the tensors of the arguments and residuals, which the node saves, then those of `out`.
        """
        self._rules = rules
        self._args = [_Template(x, tensors) for x in args]
        self._residuals = _Template(residuals, tensors)
        self.saved = len(tensors)
        self.out = _Template(out, tensors)

    def backward(self, saved: Sequence[Tensor], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the tensors: f_bwd gives those of the arguments, and the others are None."""
        rules, args = self._rules, [x.filled(saved) for x in self._args]
        pair = rules.f_rem(self._residuals.filled(saved), *args)
        _, residuals = _checked(rules, "f_rem", pair, 2, "(out, residuals)")
        grads = rules.f_bwd(residuals, self.out.filled([*saved, *cotangents]))
        found: list[Any] = [None] * (len(saved) + len(cotangents))
        for template, grad in zip(self._args, _checked(rules, "f_bwd", grads, len(args), "gradients"), strict=True):
            leaves = [None] * len(template.leaves) if grad is None else _tree.flatten(grad)[0]
            if len(leaves) != len(template.leaves):
                raise TypeError(f"{rules}: f_bwd must return gradients like the arguments; got {shown(grad)}.")
            for x, g in zip(template.leaves, leaves, strict=True):
                if isinstance(x, Operand):
                    found[x.index] = g if g is None else _like(rules, g, saved[x.index])
        return found


def _checked(rules: custom_remat[..., Any], rule: str, found: Any, n: int, what: str) -> Any:
    if not isinstance(found, tuple) or len(found) != n:
        raise TypeError(f"{rules}: {rule} must return a tuple of {n}: {what}; got {shown(found)}.")
    return found


def _like(rules: custom_remat[..., Any], gradient: Any, tensor: Tensor) -> Tensor:
    """The gradient of a tensor, if it can be that."""
    if isinstance(gradient, Tensor) and gradient.shape == tensor.shape:
        return gradient
    raise TypeError(
        f"{rules}: f_bwd must return tensors like the arguments, or None; got {shown(gradient)} for an argument of "
        f"shape {list(tensor.shape)}."
    )


class _Node(torch.autograd.Function):
    """The node of a call in autograd's graph. Its backward follows the rules."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors[call.saved :])  # a view could not be changed in place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1 : 1 + ctx.call.saved])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, *ctx.call.backward(ctx.saved_tensors, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return tuple(t.view_as(t) for t in tangents[ctx.call.saved :])


class custom_remat(Generic[P, R]):  # noqa: N801
    """Give a function its own rules for the values that are kept and recomputed.

    A policy sees the ops and the names in a function. The author of the function may know more: a small value that
    saves much work, or a cheaper way to recompute the others. `remat` follows the rules. Outside a function under
    `remat`, and where the forward runs under forward-mode AD or `functionalize`, `f` itself runs and is differentiated.

    Without a policy nothing is kept, and `f_fwd` runs again. All differentiated tensors must be arguments.

    **Arguments:**

    - `f`: the function. It takes positional arguments: tensors, trees of tensors, and other objects.
    - `f_fwd`: `f_fwd(policy, *args) -> (out, residuals)`, the forward. Every policy keeps the residuals. If they are
      None, nothing is kept. Policies are values, so the rule can compare `policy` with others.
    - `f_rem`: `f_rem(residuals, *args) -> (out, residuals_2)`, the first part of the backward. It computes the input of
      `f_bwd`. `out` exists for compatibility with `jax.custom_remat`, and may be None: remat calls `f_fwd` if it needs
      a result that is not kept.
    - `f_bwd`: `f_bwd(residuals_2, cotangents) -> gradients`, a tuple with one gradient or None for each argument. The
      cotangents are a tree like `out`, also where an argument is given back in it.

    **Returns:** a function with the values of `f`.

    **Raises:** `TypeError` if an argument can't be called, or if a rule does not return what is described here;
    `RematError` if `f_fwd` reads a differentiated tensor that is no argument.

    **Source:** `jax.custom_remat`.

    Examples:
        >>> import torch
        >>> from torch.func import grad
        >>> from remat import custom_remat, policies, remat
        >>> sin = custom_remat(
        ...     torch.sin,
        ...     lambda policy, x: (x.sin(), x.cos()),  # keeps the cosine
        ...     lambda cos, x: (None, cos),
        ...     lambda cos, g: (g * cos,),
        ... )
        >>> f = remat(lambda x: sin(sin(x)), policy=policies.nothing_saveable)
        >>> grad(f)(torch.tensor(0.0))
        tensor(1.)
    """

    def __init__(
        self, f: Callable[P, R], f_fwd: Callable[..., Any], f_rem: Callable[..., Any], f_bwd: Callable[..., Any]
    ) -> None:
        for name, rule in {"f": f, "f_fwd": f_fwd, "f_rem": f_rem, "f_bwd": f_bwd}.items():
            if not callable(rule):
                raise TypeError(f"custom_remat: {name} must be a function; got {shown(rule)}.")
        functools.update_wrapper(self, f, updated=())
        self.f, self.f_fwd, self.f_rem, self.f_bwd = f, f_fwd, f_rem, f_bwd
        # A remat'd function has derivatives of every order, and its graph holds nothing.
        self._forward = remat(lambda *args: _checked(self, "f_fwd", f_fwd(*args), 2, "(out, residuals)"))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        policy = policy_around.get()
        if policy is None:
            return self.f(*args, **kwargs)
        if kwargs:
            raise TypeError(f"{self}: arguments are positional, as the rules take them; got {', '.join(kwargs)}=.")
        since = internals.next_sequence_number()
        out, residuals = self._forward(policy, *args)
        self._check_captures(out, args, since)
        keep(f"residual of {self}", residuals)
        tensors: list[Tensor] = []
        call = _Call(self, args, out, residuals, tensors)
        results = _Node.apply(call, *tensors)
        return call.out.filled([*tensors[: call.saved], *results])

    def _check_captures(self, out: Any, args: Any, since: int) -> None:
        with internals.DisableTorchFunction():
            trees = [tensors_in(_tree.flatten(tree)[0]) for tree in (out, args)]
            values, given = ([x for t in tree for x in layers_and_tangents(t)] for tree in trees)
            try:
                prove(values, given, since, lambda _: False)
            except UnknownInput as unknown:
                raise RematError(_CAPTURED.format(self, unknown)) from None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        return name_of_global(self) or (custom_remat, (self.f, self.f_fwd, self.f_rem, self.f_bwd))

    def __repr__(self) -> str:
        return f"custom_remat({getattr(self.f, '__name__', repr(self.f))})"
