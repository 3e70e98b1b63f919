"""Loops: the same values and derivatives as the loop written out, exact counts of runs, memory, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SOME_TRANSFORMS, TRANSFORMS, assert_same, numbers
from torch import Tensor, nn

import remat
from remat import loops

# The loops, written out.


def plain_scan(f: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **_: Any) -> Any:
    leaves, spec = loops._tree.flatten(xs)
    n = next((len(x) for x in leaves if x is not None), length)
    carry, ys = init, []
    for i in reversed(range(n)) if reverse else range(n):
        carry, y = f(carry, loops._tree.unflatten(spec, [None if x is None else x[i] for x in leaves]))
        ys.append(y)
    rows = zip(*(loops._tree.flatten(y)[0] for y in (reversed(ys) if reverse else ys)), strict=True)
    stacked = [None if row[0] is None else torch.stack(row) for row in rows]
    return carry, loops._tree.unflatten(loops._tree.flatten(ys[0])[1], stacked)


def plain_fori(lower: int, upper: int, body: Any, value: Any, **_: Any) -> Any:
    for i in range(lower, upper):
        value = body(i, value)
    return value


def plain_while(cond: Any, body: Any, value: Any, **_: Any) -> Any:
    while cond(value):
        value = body(value)
    return value


class Plain:
    scan = staticmethod(plain_scan)
    fori_loop = staticmethod(plain_fori)
    while_loop = staticmethod(plain_while)


# Programs: each takes the loops to use and the number of checkpoints, and gives a function of a tensor of shape (3, 3).

torch.manual_seed(0)
NET = nn.Linear(3, 3, dtype=torch.float64)
WEIGHT = numbers(3, 3, seed=1) / 3
OTHERS = numbers(7, 3, 3, seed=2)
LINEARIZE_WARNS = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
Program = Callable[[Any, int], Callable[[Tensor], Tensor]]


def recurrent(of: Any, k: int) -> Callable[[Tensor], Tensor]:
    """A captured weight and a module; xs and y are used."""

    def fun(x: Tensor) -> Tensor:
        def step(carry: Any, u: Tensor) -> Any:
            h, total = carry
            h = torch.tanh(h @ WEIGHT + NET(u) * x)
            return (h, total + h.square()), h * u

        xs = torch.stack([x * i / 8 for i in range(1, 8)])
        (h, total), ys = of.scan(step, (x, torch.zeros_like(x)), xs, checkpoints=k)
        return h + total + (ys * OTHERS).sum(0)

    return fun


def backwards(of: Any, k: int) -> Callable[[Tensor], Tensor]:
    """In reverse, over a tree; an integer and a bool in the carry; y is a dict."""

    def fun(x: Tensor) -> Tensor:
        def step(carry: Any, u: Any) -> Any:
            h, n, odd = carry
            h = torch.where(odd, h.sin() * u["a"], h * u["b"][1].cos()) + x
            return (h, n + 1, ~odd), {"h": h, "n": n, "nothing": None}

        xs = {"a": x * OTHERS[:5], "b": (None, OTHERS[2:7]), "c": torch.arange(5)}
        init = x, torch.tensor(0), torch.tensor(True)
        (h, n, _), ys = of.scan(step, init, xs, reverse=True, checkpoints=k)
        return h * n + (ys["h"] * ys["n"][:, None, None]).sum(0)

    return fun


def numbered(of: Any, k: int) -> Callable[[Tensor], Tensor]:
    """The number of the step picks a weight; a number in the carry."""
    weights = list(OTHERS)

    def fun(x: Tensor) -> Tensor:
        def body(i: int, value: Any) -> Any:
            h, calls = value
            return torch.tanh(weights[i] @ h + i * x), calls + 1

        h, calls = of.fori_loop(1, 6, body, (x, 0), checkpoints=k)
        return h * calls

    return fun


def until(of: Any, k: int) -> Callable[[Tensor], Tensor]:
    """The condition does not depend on the elements of a batch."""

    def fun(x: Tensor) -> Tensor:
        def body(v: Any) -> Any:
            return (v[0] * x).sin() + NET(v[0]), v[1] + 1

        return of.while_loop(lambda v: v[1] < 6, body, (x, 0), checkpoints=k)[0]

    return fun


def nested(of: Any, k: int) -> Callable[[Tensor], Tensor]:
    """A scan in a scan, in a function under remat, with remat in the body."""

    def fun(x: Tensor) -> Tensor:
        again = remat.remat if of is remat else lambda f: f

        def inner(c: Tensor, u: Tensor) -> Any:
            return again(torch.sin)(c * u + x), None

        def outer(c: Tensor, u: Tensor) -> Any:
            return of.scan(inner, c, torch.stack([u, x, u * c]), checkpoints=k)[0], c

        @again
        def whole(x: Tensor) -> Tensor:
            c, cs = of.scan(outer, x, torch.stack([x, x.cos(), x.sin(), x]), checkpoints=k)
            return c + cs.sum(0)

        return whole(x).exp()

    return fun


def unread(of: Any, k: int) -> Callable[[Tensor], Tensor]:
    """One leaf is handed on as it is, one is replaced by what is captured, one has no derivative."""

    def fun(x: Tensor) -> Tensor:
        def step(carry: Any, _: None) -> Any:
            a, b, c, d = carry
            return (a, x, c + 1, a * d + b), b

        (a, b, c, d), ys = of.scan(step, (x.sin(), x.cos(), torch.ones_like(x), x), length=4, checkpoints=k)
        return a + b * c + d + ys.sum(0)

    return fun


PROGRAMS = [recurrent, backwards, numbered, until, nested, unread]


@pytest.mark.parametrize("transform", TRANSFORMS)
@LINEARIZE_WARNS
def test_every_transform(transform: str) -> None:
    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](recurrent(remat, 2), x), TRANSFORMS[transform](recurrent(Plain, 2), x))


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_every_program(program: Program, transform: str) -> None:
    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](program(remat, 2), x), TRANSFORMS[transform](program(Plain, 2), x))
