"""Loops that keep k states for their derivative: `scan`, `fori_loop`, `while_loop`.

NOTE [the schedule]: a segment of n steps has k checkpoints, one of which is its first state. It is split into a first
part of m steps and a rest of n - m steps with k - 1 checkpoints. The first part is a remat'd function, so it keeps only
its first state. Its rerun is a segment with k checkpoints again, because the rest has freed its own by then. With the
right m this is the optimal schedule, the revolve of Griewank and Walther: if n <= C(k + r, k), each step runs at most
r + 1 times. This module needs no rules for derivatives: the derivatives of a loop, of every order and in both modes,
are those of nested remat'd functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import comb
from typing import Any, TypeVar

import torch
from torch import Tensor

from remat import _compile, _tree
from remat import _torch_internals as internals
from remat._context import NOTHING, RandomState
from remat._errors import shown
from remat._look import Look
from remat._loop_checks import CarryCheck, as_int, check_options, differ, kinds_of, paths, said, steps_of, structure
from remat._remat import remat
from remat.policies._policy import PolicyLike
from remat.random._keyed import resumed, running

Carry = TypeVar("Carry")
Body = Callable[[int, Any, Any], tuple[Any, Any]]
"""(step number, carry, x) -> (carry, y). x, the step's slice of xs, and y have a leading dimension of 1."""

_MOST_REPEATS = 40
"""The most reruns of a step. Reruns nest to this depth, and torch's autograd changes threads at a depth of 60."""


# The schedule.


def _repeats(n: int, k: int) -> int:
    """The smallest r with n <= C(k + r, k)."""
    r = 0
    while comb(k + r, k) < n:
        r += 1
    return r


def _schedule(n: int, k: int) -> list[tuple[int, int]]:
    """The parts of a segment, NOTE [the schedule]: (steps, checkpoints) of each. The last part is a single step."""
    parts = []
    while n > 1:
        r = _repeats(n, k)
        m = max(1, comb(k + r - 2, k), n - comb(k + r - 1, k - 1))
        parts.append((m, k))
        n, k = n - m, k - 1
    return [*parts, (1, 0)]


def _checkpoints(who: str, n: int, k: int | None) -> int:
    """The number of checkpoints for n steps. None: the fewest with which no step runs more than three times."""
    if _compile.tracing():
        return n  # unrolled: the compiler sees a chain of remat'd steps
    if k is None:
        k = 1
        while comb(k + 2, 2) < n:
            k += 1
    if n > comb(k + _MOST_REPEATS, k):
        least = k
        while n > comb(least + _MOST_REPEATS, least):
            least += 1
        raise ValueError(
            f"{who}: checkpoints={k} is too few for {n:,} steps: steps would run up to {_repeats(n, k) + 1:,} times, "
            f"and {_MOST_REPEATS + 1} is the most. Give at least checkpoints={least}."
        )
    return k


def _loop(
    who: str, user: Any, body: Body, n: int, init: Any, xs: Any, k: int, policy: PolicyLike, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `body` n times (n >= 1) with k checkpoints. Returns the last carry, and all y joined.

    **Arguments:**

    - `user`: the user's function, whose name appears in errors.
    - `xs`: a tree of tensors with the steps as leading dimension, and None.
    - `reverse`: whether the first step takes the last slice of `xs`.
    """

    def segment(again: Any, start: int, n: int, k: int, carry: Any, xs: Any, outermost: bool = False) -> Any:
        parts, ys = _schedule(n, k), []
        for (m, slots), x in zip(parts, _split(xs, [m for m, _ in parts], reverse), strict=True):
            if m > 1:
                carry, y = again(again, start, m, slots, carry, x)
            elif slots or outermost:
                carry, y = once(start, carry, x)
            else:  # the rerun takes its derivative right away
                carry, y = body(start, carry, x)
            ys.append(y)
            start += m
        return carry, _joined(who, ys, reverse)

    segment.__qualname__ = body.__qualname__ = f"{who}({getattr(user, '__qualname__', type(user).__qualname__)})"
    once = remat(body, policy=policy)
    return segment(remat(segment), 0, n, k, init, xs, True)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the leaves of a tree, except None."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten(spec, [None if x is None else function(x) for x in leaves])


def _split(xs: Any, sizes: list[int], reverse: bool) -> list[Any]:
    """Split `xs` along the leading dimension."""
    if xs is None:
        return [None] * len(sizes)
    leaves, spec = _tree.flatten(xs)
    sizes = sizes[::-1] if reverse else sizes
    pieces = [[None] * len(sizes) if x is None else x.split(sizes) for x in leaves]
    trees = [_tree.unflatten(spec, [piece[i] for piece in pieces]) for i in range(len(sizes))]
    return trees[::-1] if reverse else trees


def _joined(who: str, parts: list[Any], reverse: bool) -> Any:
    """Join the results y of several parts along their leading dimension."""
    if all(part is None for part in parts):
        return None
    flat = [_tree.flatten(part) for part in parts]
    spec = flat[0][1]
    kinds = kinds_of(flat[0][0], 1)
    for others, other in flat[1:]:
        if differ(other, spec):
            raise TypeError(f"{who}: y is {structure(spec)} in one step, and {structure(other)} in another.")
        for i, (one, another) in enumerate(zip(kinds, kinds_of(others, 1), strict=True)):
            if one != another:
                path = paths(spec, "y")[i]
                raise TypeError(f"{who}: {path} is {said(one)} in one step, and {said(another)} in another.")
    rows = zip(*(others for others, _ in (flat[::-1] if reverse else flat)), strict=True)
    return _tree.unflatten(spec, [row[0] if row[0] is None or len(row) == 1 else torch.cat(row) for row in rows])


def _row(y: Any) -> Tensor:
    if not isinstance(y, (Tensor, bool, int, float, complex)):
        raise TypeError(f"remat.scan: the leaves of y must be tensors, numbers and None; got {shown(y)}.")
    return torch.as_tensor(y)[None]


@contextlib.contextmanager
def _trial(who: str, args: Any) -> Iterator[None]:
    """Run the block without derivatives. Afterwards, undo its random draws and its changes in place."""
    tensors = [t for t in _tree.flatten(args)[0] if isinstance(t, Tensor)]
    keys = running()
    random = RandomState(tensors, keyed=keys is not None)
    look = Look(who, tensors, random)
    draws = NOTHING if keys is None else resumed(keys.key, keys.position())
    try:
        with torch.no_grad(), draws, look:
            yield
    finally:
        random.put_back()
        with torch.no_grad(), internals.DisableTorchFunction():
            for key, before in look.copies.items():
                look.outside[key].value.copy_(before)


# The public functions.


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
        carry, y = out
        check(carry)
        return carry, _map(_row, y)

    if n == 0:  # y has the structure of a step's y, with no rows
        with _trial(who, (init, xs)):
            _, y = step(0, init, _map(lambda t: t.new_zeros(1, *t.shape[1:]), xs))
        return init, _map(lambda t: t.new_empty(0, *t.shape[1:]), y)
    return _loop(who, f, step, n, init, xs, _checkpoints(who, n, checkpoints), policy, bool(reverse))


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
        carry = body_fun(first + i, carry)
        check(carry)
        return carry, None

    if n == 0:
        return init_val
    value: Carry = _loop(who, body_fun, step, n, init_val, None, _checkpoints(who, n, checkpoints), policy)[0]
    return value


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

    If grad mode is on, a first run without autograd counts the steps. It holds one value, and costs one run of each
    step. Its random draws and its changes in place are undone; its prints are not. Under `vmap` the loop runs until it
    is over for all elements. An element that is done keeps its value: `body_fun` then runs on its first value, and the
    result is not used.

    **Arguments:**

    - `cond_fun`: value -> a bool, or a tensor with no dimensions.
    - `body_fun`: value -> value.
    - `init_val`: the first value: a tree of tensors, numbers and None.
    - `checkpoints`, `policy`: as for `scan`, with the counted steps.

    **Returns:** the first value for which the condition does not hold.

    **Raises:** as `scan`; `TypeError` if the condition is not a scalar.

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

    def condition(carry: Any) -> tuple[Any, bool, bool]:
        """The condition, whether a vmap maps over it, and whether it holds for any element."""
        holds = cond_fun(carry)
        if not isinstance(holds, Tensor):
            return holds, False, bool(holds)
        if holds.shape:
            raise TypeError(f"{who}: cond_fun must return a bool or a tensor without dimensions; got {shown(holds)}.")
        with internals.DisableTorchFunction():  # the loop asks, not the user's function
            every = internals.innermost(holds)
            is_batched, goes_on = every.dim() > 0, bool(every.any())
        return (holds != 0 if is_batched else holds), is_batched, goes_on

    def select(holds: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """Take `new` for the elements of a batch that go on, and `old` for the elements that are done."""
        for i, leaf in enumerate(old):
            if not isinstance(leaf, (Tensor, type(None))):
                raise TypeError(
                    f"{who}: the elements of a batch end after different numbers of steps, so all leaves must be "
                    f"tensors; {paths(spec, 'init_val')[i]} is {shown(leaf)}. Write torch.tensor(...)."
                )
        return [a if a is None else torch.where(holds, a, b) for a, b in zip(new, old, strict=True)]

    def advance(holds: Any, is_batched: bool, carry: Any) -> Any:
        """The carry after a step."""
        if is_batched:
            old, _ = _tree.flatten(carry)
            carry = _tree.unflatten(spec, select(holds, old, start))  # the body may not be defined where it is done
        new = body(carry)
        check(new)
        return _tree.unflatten(spec, select(holds, _tree.flatten(new)[0], old)) if is_batched else new

    def run() -> tuple[Any, int, bool]:
        """The result, the number of steps, and whether a vmap maps over the condition."""
        carry, n, ever_batched = init_val, 0, False
        while True:
            holds, is_batched, goes_on = condition(carry)
            if not goes_on:
                return carry, n, ever_batched
            carry, n, ever_batched = advance(holds, is_batched, carry), n + 1, ever_batched or is_batched

    if _compile.tracing() or not torch.is_grad_enabled():
        return run()[0]
    with _trial(who, init_val):
        _, n, ever_batched = run()

    def step(_: int, carry: Any, __: None) -> tuple[Any, Any]:
        holds, is_batched, _ = condition(carry) if ever_batched else (True, False, True)
        return advance(holds, is_batched, carry), None

    if n == 0:
        return init_val
    value: Carry = _loop(who, body_fun, step, n, init_val, None, _checkpoints(who, n, checkpoints), policy)[0]
    return value
