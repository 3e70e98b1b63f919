"""The loops: `scan`, `fori_loop` and `while_loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from remat import _compile, _tree
from remat import _torch_internals as internals
from remat._errors import RematError, function_name, shown
from remat._layers import innermost
from remat._look import Look
from remat._remat import remat
from remat.loops._checks import CarryCheck, as_int, check_options, steps_of
from remat.loops._run import run, trial
from remat.policies._policy import PolicyLike

Carry = TypeVar("Carry")

_CHANGES = "{}: {} changes a tensor in place, also for elements of the vmap that are done. Put it into the value."


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the leaves of a tree, except None."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten(spec, [None if x is None else function(x) for x in leaves])


def _row(y: Any) -> Tensor:
    if not isinstance(y, (Tensor, bool, int, float, complex)):
        raise TypeError(f"remat.scan: the leaves of y must be tensors, numbers and None; got {shown(y)}.")
    return torch.as_tensor(y)[None]


def scan(
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    checkpoints: int | None = None,
    policy: PolicyLike = None,
) -> tuple[Carry, Any]:
    """Run a function over the leading dimension of tensors, with a carry from step to step, in little memory.

    Its values are those of the loop below. So are its derivatives, of every order, in forward and reverse mode, under
    every transform of `torch.func` and under plain autograd:

        def scan(f, init, xs):
            carry, ys = init, []
            for x in xs:
                carry, y = f(carry, x)
                ys.append(y)
            return carry, torch.stack(ys)

    Between forward and backward the loop keeps `checkpoints` carries and the input of the last step, besides `xs` and
    the tensors that `f` captures. It recomputes the other carries by the optimal schedule. With k checkpoints and
    N <= C(k + r, k) steps, each step runs at most r + 1 times. All steps together run N + rN - C(k + r, k + 1) times,
    and the last step runs once more.

    **Arguments:**

    - `f`: (carry, x) -> (carry, y). The carry keeps its structure, shapes and dtypes. `f` must not change it in place.
    - `init`: the first carry: a tree of tensors, numbers and None.
    - `xs`: a tree of tensors with the steps as leading dimension, or None; `f` gets a slice of each.
    - `length`: the number of steps; needed if `xs` has no tensors.
    - `reverse`: begin with the last slice. The results y keep the order of `xs`.
    - `checkpoints`: the number of carries that are kept, including `init`. None: the fewest with which no step runs
        more than three times, about the square root of twice the number of steps.
    - `policy`: which results of ops in `f` are also kept, as for `remat`, for each step whose carry is kept.

    **Returns:** the last carry, and the results y, each leaf stacked along a new leading dimension.

    **Raises:** `TypeError` if `f` does not return a pair, or a carry unlike `init`; `TypeError` and `ValueError` for
    lengths that differ or are missing, and for too few checkpoints. The message names the leaf. In the backward pass,
    as `remat`.

    **Source:** `jax.lax.scan`; Griewank and Walther, *Algorithm 799: revolve*, ACM TOMS 26(1), 2000.

    Examples:
        >>> import torch
        >>> from torch.func import grad
        >>> import remat
        >>> def loss(w):
        ...     def step(h, x):
        ...         h = torch.tanh(w * h + x)
        ...         return h, h.square()
        ...     xs = torch.linspace(0, 1, 1000)
        ...     h, squares = remat.scan(step, torch.zeros(()), xs, checkpoints=20)
        ...     return squares.sum()
        >>> grad(loss)(torch.tensor(0.5))
        tensor(476.7442)
    """
    who = "remat.scan"
    check_options(who, checkpoints, policy, f=f)
    n = steps_of(xs, length)
    check = CarryCheck(who, "f", init)

    def step(_: int, carry: Any, x: Any) -> tuple[Any, Any]:
        out = f(carry, _map(lambda t: t[0], x))
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(f"{who}: f must return a pair, (carry, y); got {shown(out)}.")
        return check(out[0]), _map(_row, out[1])

    if n == 0:  # y has the structure of a step's y, with no rows
        with trial(who, (init, xs)):
            _, y = step(0, init, _map(lambda t: t.new_zeros(1, *t.shape[1:]), xs))
        return init, _map(lambda t: t.new_empty(0, *t.shape[1:]), y)
    return run(who, f, step, n, init, checkpoints, policy, xs, bool(reverse))


def fori_loop(
    lower: int,
    upper: int,
    body_fun: Callable[[int, Carry], Carry],
    init_val: Carry,
    *,
    checkpoints: int | None = None,
    policy: PolicyLike = None,
) -> Carry:
    """Run a function for each number from `lower` up to `upper`, in little memory: `scan` without `xs` and y.

    Its values and derivatives are those of this loop:

        for i in range(lower, upper):
            val = body_fun(i, val)

    **Arguments:**

    - `lower`, `upper`: ints. If `upper` is not above `lower`, there are no steps.
    - `body_fun`: (step number, value) -> value. The number is a Python int, so `layers[i]` works.
    - `init_val`: the first value: a tree of tensors, numbers and None.
    - `checkpoints`, `policy`: as for `scan`.

    **Returns:** the last value.

    **Raises:** as `scan`.

    **Source:** `jax.lax.fori_loop`.

    Examples:
        >>> import torch
        >>> import remat
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> one = torch.tensor(1.0)
        >>> y = remat.fori_loop(0, 5, lambda i, value: value * x + i, one)
        >>> y.backward()
        >>> y.item(), x.grad.item()
        (58.0, 103.0)
    """
    who = "remat.fori_loop"
    check_options(who, checkpoints, policy, body_fun=body_fun)
    first = as_int(who, "lower", lower)
    n = max(as_int(who, "upper", upper) - first, 0)
    check = CarryCheck(who, "body_fun", init_val)

    def step(i: int, carry: Any, _: None) -> tuple[Any, Any]:
        return check(body_fun(first + i, carry)), None

    return run(who, body_fun, step, n, init_val, checkpoints, policy)[0]


def while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    checkpoints: int | None = None,
    policy: PolicyLike = None,
) -> Carry:
    """Run a function while a condition holds, in little memory, with derivatives in reverse mode.

    Its values and derivatives are those of this loop:

        while cond_fun(val):
            val = body_fun(val)

    If grad mode is on, a first run under `torch.no_grad()` counts the steps. It holds one value, and costs one run of
    each step. Its random draws and its changes in place are undone; its prints are not. A body that differentiates
    needs `torch.func.grad`: `torch.autograd.grad` does not work in `no_grad`. Under `vmap` the loop runs until it
    is over for all elements. An element that is done keeps its value: `body_fun` then runs on its first value, and the
    result is not used.

    **Arguments:**

    - `cond_fun`: value -> a bool, or a tensor with no dimensions.
    - `body_fun`: value -> value.
    - `init_val`: the first value: a tree of tensors, numbers and None.
    - `checkpoints`, `policy`: as for `scan`, with the counted steps.

    **Returns:** the first value for which the condition does not hold.

    **Raises:** as `scan`; `TypeError` if the condition is not a scalar; `RematError` if it draws random numbers or
    changes a tensor in place, or if the body changes one under a `vmap` that maps over the condition.

    **Source:** `jax.lax.while_loop`, which has no derivative in reverse mode.

    Examples:
        >>> import torch
        >>> from torch.func import grad, vmap
        >>> import remat
        >>> def root(a):  # of a, by Newton's method
        ...     return remat.while_loop(
        ...         lambda x: (x * x - a).abs() > 1e-4, lambda x: (x + a / x) / 2, a
        ...     )
        >>> vmap(grad(root))(torch.tensor([1.0, 4.0, 100.0]))
        tensor([1.0000, 0.2500, 0.0500])
    """
    who = "remat.while_loop"
    check_options(who, checkpoints, policy, cond_fun=cond_fun, body_fun=body_fun)
    check = CarryCheck(who, "body_fun", init_val)
    leaves, spec = _tree.flatten(init_val)
    body = remat(body_fun, policy=policy) if _compile.tracing() else body_fun
    start = tuple(t.detach() if isinstance(t, Tensor) else t for t in leaves)  # in a cell: frozen

    def condition(carry: Any) -> tuple[Tensor | None, bool]:
        """Whether the condition holds for any element, with the elements it holds for. None: no vmap maps over it."""
        holds = cond_fun(carry)
        if holds is None or (isinstance(holds, Tensor) and holds.shape):
            raise TypeError(f"{who}: cond_fun must return a bool or a tensor without dimensions; got {shown(holds)}.")
        if not isinstance(holds, Tensor):
            return None, bool(holds)
        with internals.DisableTorchFunction():  # the loop asks, not the user's function
            every = innermost(holds)
            is_batched, goes_on = every.dim() > 0, bool(every.any())
        return (holds != 0 if is_batched else None), goes_on

    def select(holds: Tensor, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """Take `new` for the elements of a batch that go on, and `old` for the elements that are done."""
        return [a if a is None else torch.where(holds, a, b) for a, b in zip(new, old, strict=True)]

    def advance(holds: Tensor | None, carry: Any) -> Any:
        """The carry after a step."""
        if holds is None:
            return check(body(carry))
        old, _ = _tree.flatten(carry)  # where it is done, the body may not be defined
        new, _ = _tree.flatten(check(body(_tree.unflatten(spec, select(holds, old, start)))))
        return check(_tree.unflatten(spec, select(holds, new, old)))

    def counting(carry: Any) -> tuple[Tensor | None, bool]:
        with trial(who, carry, cond_fun):
            return condition(carry)

    def plain(condition: Callable[[Any], tuple[Tensor | None, bool]]) -> tuple[Any, int, bool]:
        """The result, the number of steps, and whether a vmap maps over the condition."""
        carry, n, is_batched = init_val, 0, False
        while (asked := condition(carry))[1]:
            carry, n, is_batched = advance(asked[0], carry), n + 1, is_batched or asked[0] is not None
        return carry, n, is_batched

    if _compile.tracing():
        return plain(condition)[0]
    counts = torch.is_grad_enabled()
    with trial(who, init_val) if counts else Look(who, (), None) as look:
        carry, n, is_batched = plain(counting if counts else condition)
    if is_batched and look.copies:
        raise RematError(_CHANGES.format(who, function_name(body_fun)))
    if not counts:
        return carry

    def step(_: int, carry: Any, __: None) -> tuple[Any, None]:
        return advance(condition(carry)[0] if is_batched else None, carry), None

    return run(who, body_fun, step, n, init_val, checkpoints, policy)[0]
