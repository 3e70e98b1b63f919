"""Loops: the same values and derivatives as the loop written out, exact counts of runs, memory, errors."""

import contextvars
import functools
import gc
import itertools
import re
import weakref
from collections.abc import Callable
from math import comb
from typing import Any

import pytest
import torch
from helpers import SIZE, SOME_TRANSFORMS, TRANSFORMS, UNIT, CountOps, assert_same, numbers
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat import _tree, policies
from remat._call import Call
from remat.debug import LiveBytes
from remat.loops import _schedule

# The loops, written out.


def plain_scan(f: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **_: Any) -> Any:
    leaves, spec = _tree.flatten(xs)
    n = next((len(x) for x in leaves if x is not None), length)
    carry, ys = init, []
    for i in reversed(range(n)) if reverse else range(n):
        carry, y = f(carry, _tree.unflatten(spec, [None if x is None else x[i] for x in leaves]))
        ys.append(y)
    rows = zip(*(_tree.flatten(y)[0] for y in (reversed(ys) if reverse else ys)), strict=True)
    stacked = [None if row[0] is None else torch.stack(row) for row in rows]
    return carry, _tree.unflatten(_tree.flatten(ys[0])[1], stacked)


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

        xs = torch.stack([x * i / 8 for i in range(1, 6)])
        (h, total), ys = of.scan(step, (x, torch.zeros_like(x)), xs, checkpoints=k)
        return h + total + (ys * OTHERS[:5]).sum(0)

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


@pytest.mark.parametrize("k", [1, 3, 7, 8, None])
def test_every_number_of_checkpoints(k: int | None) -> None:
    x = numbers(3, 3)
    for program in (recurrent, backwards, numbered):
        for transform in ("grad", ".backward()"):
            assert_same(TRANSFORMS[transform](program(remat, k), x), TRANSFORMS[transform](program(Plain, 0), x))
    assert torch.equal(recurrent(remat, k)(x), recurrent(Plain, 0)(x))


def collatz_like(of: Any) -> Callable[[Tensor], Tensor]:
    """As many steps as the element says: none for some. sqrt and log are not defined at the end of the loop."""

    def fun(x: Tensor) -> Tensor:
        def body(v: Any) -> Any:
            return v[0] - v[0].sqrt() - 0.3, v[1] + v[0].log() * x, v[2] + 1

        end = of.while_loop(lambda v: v[0] > 0, body, (x, x * 0, torch.tensor(0)))
        return end[0] * 2 + end[1] + end[2]

    return fun


ELEMENTS = torch.tensor([5.0, 0.5, 30.0, 2.0], dtype=torch.float64)
DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "call": lambda f: f,
    "grad": grad,
    "grad(grad)": lambda f: grad(grad(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jvp(grad)": lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),)),
    "hessian": hessian,
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_batch_of_loops_of_several_lengths(derivative: str) -> None:
    of = DERIVATIVES[derivative]
    one_by_one = [of(collatz_like(Plain))(x) for x in ELEMENTS]
    assert_same(vmap(of(collatz_like(remat)))(ELEMENTS), stacked(one_by_one))


def stacked(results: list[Any]) -> Any:
    rows = zip(*(_tree.flatten(r)[0] for r in results), strict=True)
    return _tree.unflatten(_tree.flatten(results[0])[1], [torch.stack(row) for row in rows])


def test_elements_that_take_no_step() -> None:
    def fun(x: Tensor) -> Tensor:
        return remat.while_loop(lambda v: v > 0, lambda v: v * x - 10, x).square()

    xs = torch.tensor([3.0, -1.0], dtype=torch.float64)  # (9 - 10)^2 and (-1)^2
    assert_same(vmap(fun)(xs), torch.ones(2).double())
    assert_same(vmap(grad(fun))(xs), torch.tensor([-12.0, -2.0]).double())


# State: draws, buffers, keys.


def with_state(loop: Callable[[Any, Tensor], Tensor], net: nn.Module) -> Any:
    torch.manual_seed(0)
    x = numbers(4, 3).requires_grad_()
    out = loop(lambda i, c: torch.dropout(net(c) * x, 0.5, True) * (i + 1), numbers(4, 3, seed=1))
    out.sum().backward()
    return out.detach(), x.grad, [p.grad for p in net.parameters()], list(net.buffers()), torch.rand(1)


def by_while(body: Any, value: Any) -> Any:
    return remat.while_loop(lambda v: v[0] < 7, lambda v: (v[0] + 1, body(*v)), (0, value), checkpoints=2)[1]


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "fori_loop": lambda body, value: remat.fori_loop(0, 7, body, value, checkpoints=2),
    "while_loop": by_while,
    "scan": lambda body, value: remat.scan(
        lambda c, i: ((body(c[1], c[0]), c[1] + 1), None), (value, 0), length=7, checkpoints=2
    )[0][0],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_draws_and_buffers_are_those_of_the_plain_loop(loop: str) -> None:
    results = [
        with_state(run, nn.BatchNorm1d(3, dtype=torch.float64))
        for run in (LOOPS[loop], lambda body, value: plain_fori(0, 7, body, value))
    ]
    assert_same(*results)


@pytest.mark.parametrize("loop", LOOPS)
def test_draws_from_a_key_and_from_a_generator(loop: str) -> None:
    def fun(x: Tensor, run: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)

        def body(i: int, c: Tensor) -> Tensor:
            noise = torch.rand(3, 3, generator=generator, dtype=torch.float64)
            return torch.dropout((c * x).sin() + noise, 0.5, True)

        return run(body, x).sum()

    def keyed(run: Any) -> Tensor:
        return grad(lambda x: remat.random.keyed(fun)(remat.random.key(3), x, run))(numbers(3, 3))

    assert_same(keyed(LOOPS[loop]), keyed(lambda body, value: plain_fori(0, 7, body, value)))


def test_different_draws_along_a_vmap() -> None:
    def gradient(of: Any) -> Tensor:
        torch.manual_seed(0)

        def fun(x: Tensor) -> Tensor:
            return of.fori_loop(0, 5, lambda i, c: torch.dropout(c * x, 0.5, True), x, checkpoints=2).sum()

        return vmap(grad(fun), randomness="different")(numbers(4, 3))

    assert_same(gradient(remat), gradient(Plain))


def test_gradients_of_modules_and_of_parameters_in_functional_call() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3, dtype=torch.float64) for _ in range(6)])

    def gradients(of: Any) -> Any:
        layers.zero_grad()
        of.fori_loop(0, 6, lambda i, h: torch.tanh(layers[i](h)), numbers(2, 3), checkpoints=2).sum().backward()
        own = [p.grad for p in layers.parameters()]

        def loss(params: dict[str, Tensor]) -> Tensor:
            def body(i: int, h: Tensor) -> Tensor:
                return torch.tanh(functional_call(layers[i % 2], params, (h,)))

            return of.fori_loop(0, 5, body, numbers(2, 3), checkpoints=2).sum()

        return own, grad(loss)({k: p.detach() for k, p in layers[0].named_parameters()})

    assert_same(gradients(remat), gradients(Plain))


# What is counted.


def sines(n: int, k: int | None) -> Callable[[Tensor], Tensor]:
    """A chain of sines over one unit of memory."""

    def fun(scale: Tensor) -> Tensor:
        start = torch.linspace(-1, 1, SIZE)
        return remat.scan(lambda c, _: (torch.sin(c * scale), None), start, length=n, checkpoints=k)[0].sum()

    return fun


def revolve(n: int, k: int) -> int:
    """Griewank and Walther's number of runs of a step, forward and backward together."""
    r = next(r for r in itertools.count() if n <= comb(k + r, k))
    return n + r * n - comb(k + r, k + 1)


def backward(fun: Callable[[Tensor], Tensor]) -> None:
    fun(torch.tensor(1.01, requires_grad=True)).backward()


WAYS: dict[str, tuple[Callable[[Any], Any], int]] = {
    ".backward()": (backward, 1),
    "grad": (lambda fun: grad(fun)(torch.tensor(1.01)), 1),
    "vmap(grad)": (lambda fun: vmap(grad(fun))(torch.tensor([1.01, 1.02])), 2),
}


@pytest.mark.parametrize("n", [1, 2, 3, 10, 35, 100])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 20, 99, 200])
def test_the_schedule_is_the_best_there_is(n: int, k: int) -> None:
    best: dict[tuple[int, int], float] = {}
    for slots in range(k + 1):  # runs to reverse so many steps, by trying all first parts
        for steps in range(1, n + 1):
            rest = (m + best[steps - m, slots - 1] + best[m, slots] for m in range(1, steps)) if slots else ()
            best[steps, slots] = 1 if steps == 1 else min(rest, default=float("inf"))
    assert best[n, k] == revolve(n, k)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (7, 1), (12, 2), (50, 4), (60, 30)])
def test_the_body_runs_as_often_as_in_revolve(n: int, k: int, way: str) -> None:
    with CountOps() as ops:
        WAYS[way][0](sines(n, k))
    assert ops["sin"] == revolve(n, k) + 1  # the last step is not kept between forward and backward


def test_without_checkpoints_no_step_runs_more_than_three_times() -> None:
    for n in (1, 2, 7, 100, 10_000):
        k = _schedule.checkpoints_for("", n, None)
        assert comb(k + 2, 2) >= n > comb(k + 1, 2) or k == 1


def test_the_table_of_the_docs() -> None:
    assert [(k, _schedule.repeats(10_000, k)) for k in (140, 38, 14, 8)] == [(140, 2), (38, 3), (14, 5), (8, 8)]
    assert revolve(10_000, 38) / 10_000 == pytest.approx(3.918)


def test_a_while_loop_runs_once_more() -> None:
    def fun(scale: Tensor) -> Tensor:
        start = torch.zeros(3), torch.tensor(0)
        return remat.while_loop(
            lambda v: v[1] < 50, lambda v: (torch.sin(v[0] * scale), v[1] + 1), start, checkpoints=4
        )[0].sum()

    with CountOps() as ops:
        backward(fun)
    assert ops["sin"] == 50 + revolve(50, 4) + 1
    with CountOps() as ops, torch.no_grad():
        fun(torch.tensor(1.0))
    assert ops["sin"] == 50


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "k"), [(60, 10), (200, 18), (200, 3), (100, 2)])
def test_memory_of_a_gradient(n: int, k: int, way: str) -> None:
    run, batch = WAYS[way]
    with LiveBytes() as one_step:
        run(lambda scale: torch.sin(torch.linspace(-1, 1, SIZE) * scale).sum())
    with LiveBytes() as meter:
        run(sines(n, k))
    assert meter.peak <= (k + 3) * UNIT * batch + one_step.peak + 8192


@pytest.mark.parametrize("loop", ["fori_loop", "scan"])
def test_memory_without_gradients(loop: str) -> None:
    """No carry is kept, as in a Python loop."""
    start = torch.linspace(-1, 1, SIZE)
    loops = {
        "fori_loop": lambda: remat.fori_loop(0, 200, lambda i, c: torch.sin(c), start, checkpoints=4),
        "scan": lambda: remat.scan(lambda c, x: (torch.sin(c) * x, None), start, torch.ones(200), checkpoints=4)[0],
    }
    with torch.no_grad(), LiveBytes() as meter:
        loops[loop]()
    assert meter.peak <= 3 * UNIT + 8192


def test_memory_between_forward_and_backward() -> None:
    with LiveBytes() as meter:
        out = sines(100, 7)(torch.tensor(1.01, requires_grad=True))
    assert meter.current <= (7 + 1) * UNIT + 4096  # the carries, and the input of the last step
    out.backward()


def test_an_inner_call_alone_reads_a_tensor_in_a_list() -> None:
    """The rerun of the inner call comes in the backward of the outer's rerun: the operand is still in its place."""

    def fun(x: Tensor, y: Tensor, ck: Any, scan: Any) -> Tensor:
        box = [y]

        def outer(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            start = c + torch.rand_like(c)

            def inner(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                def order(c: Tensor) -> tuple[Tensor, Tensor]:
                    box[0].argsort(-1)
                    return c.sin(), y

                return torch.tanh(c), ck(order)(c)[1]

            return torch.tanh(c), scan(inner, start, torch.stack([x, x / 2, x.sin()]))[0]

        return scan(outer, x, torch.stack([x, x / 2, x.sin()]), checkpoints=2)[1].sum()

    results = []
    for ck, loop in ((remat.remat, remat.scan), (lambda f: f, plain_scan)):
        torch.manual_seed(0)
        results.append(grad(functools.partial(fun, ck=ck, scan=loop))(numbers(3), numbers(3, seed=1)))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_rows_that_only_a_tangent_replaces() -> None:
    """With a tangent, a nested call returns another tensor than it computed; the next call knows it all the same."""

    def loss(scan: Any, x: Tensor, y: Tensor) -> Tensor:
        def step(c: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(c + x), c.masked_fill(x > 0, 0.5)

        return scan(step, y, torch.stack([y, y, y]), checkpoints=1)[1].sum()

    results = []
    for loop in (remat.scan, plain_scan):
        args = numbers(1).sum(), numbers(1, seed=1).sum()
        out, push = linearize(grad(functools.partial(loss, loop)), *args)
        results.append((out, push(*map(torch.cos, args))))
    assert_same(*results)


def test_a_second_derivative_needs_a_few_carries_for_each_kept_one() -> None:
    with LiveBytes() as meter:
        grad(grad(sines(100, 13)))(torch.tensor(1.01))
    assert meter.peak < 5 * 13 * UNIT  # the plain loop needs 1193


def test_python_objects_do_not_grow_with_the_steps(no_gc: None) -> None:
    def objects(n: int) -> int:
        scale = torch.tensor(1.01, requires_grad=True)
        out = remat.scan(lambda c, _: (c * scale, None), torch.ones(3), length=n, checkpoints=4)[0]
        gc.collect()
        return len(gc.get_objects()) if out is not None else 0

    assert objects(20) - 200 < objects(60) < objects(20) + 200


def among_many_variables(fun: Callable[[], None]) -> None:
    """Call a function in a context of its own, with many variables, one with a list. torch's compiler has hundreds."""

    def run() -> None:
        for i in range(2000):
            contextvars.ContextVar[Any](f"v{i}").set([] if i == 0 else i)
        fun()

    contextvars.Context().run(run)


@pytest.mark.parametrize(("n", "k"), [(60, 6), (400, 6), (120, 14), (600, 14)])
def test_python_objects_at_the_peak_grow_with_the_checkpoints_only(n: int, k: int) -> None:
    scale = torch.tensor(1.01, requires_grad=True)
    runs = itertools.count()
    found = []

    def count() -> None:
        gc.collect()
        objects = gc.get_objects()
        nodes = sum("hamt" in type(x).__name__ for x in objects)  # of the contexts, which share most of them
        found.append((sum(type(x) is Call for x in objects), nodes, len(objects) - nodes))

    def body(i: int, c: Tensor) -> Tensor:
        if next(runs) % (n // 12) == 0:
            count()
        return c * scale

    def run() -> None:
        remat.fori_loop(0, 12, lambda i, c: c * scale, torch.ones(3), checkpoints=4).sum().backward()
        gc.collect()
        gc.freeze()  # what is there already, or made for the first loop of a process, is not counted
        count()
        remat.fori_loop(0, n, body, torch.ones(3), checkpoints=k).sum().backward()

    among_many_variables(run)
    (calls, nodes, objects), (most_calls, most_nodes, most_objects) = found[0], map(max, zip(*found, strict=True))
    levels = k + _schedule.repeats(n, k)
    assert most_calls - calls <= levels
    assert most_nodes - nodes <= 25 * levels  # contexts share most of them: one of its own has hundreds
    assert most_objects - objects <= 200 * levels


def test_nothing_is_left(no_gc: None) -> None:
    def run() -> list[weakref.ref[Any]]:
        weight = torch.ones(3, requires_grad=True)

        def step(c: Tensor, x: Tensor) -> Any:
            return torch.sin(c * weight), c

        xs = torch.ones(9, 1)
        (last, ys) = remat.scan(step, torch.ones(3), xs, checkpoints=2)
        (last.sum() + ys.sum()).backward()
        end = remat.while_loop(lambda v: v[1] < 5, lambda v: (v[0] * weight, v[1] + 1), (weight, 0))[0]
        end.sum().backward()
        return [weakref.ref(o) for o in (weight, step, xs, last)]

    assert [ref() for ref in run()] == [None] * 4


def test_a_policy_reaches_into_the_body() -> None:
    weight = numbers(3, 3) / 3

    def products(policy: Any) -> tuple[int, Tensor]:
        with CountOps() as ops:
            g = grad(
                lambda w: remat.fori_loop(0, 6, lambda i, c: (c @ w).sin(), weight, checkpoints=9, policy=policy).sum()
            )
            result = g(weight)
        return ops["mm"], result

    (plain, expected), (kept, actual) = products(None), products(policies.dots_saveable)
    assert plain - kept == 6
    assert_same(actual, expected)


def test_saved_residuals_names_what_is_held() -> None:
    weight = numbers(3, 3).requires_grad_()
    fun = lambda w: remat.fori_loop(0, 10, lambda i, c: (c @ w).sin(), numbers(3, 3), checkpoints=3)  # noqa: E731
    computed = [r for r in remat.saved_residuals(fun, weight) if "argument" not in r.why]
    assert len(computed) == 4  # three checkpoints, the first made by the function itself, and the last step's


# What is checked.

C, XS = torch.zeros(3), torch.ones(4, 3)


def fine(c: Any, x: Any) -> Any:
    return c, x


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "other tree": (
        lambda: remat.scan(lambda c, x: ((c, c), x), C, XS),
        TypeError,
        r"structure of init, \*; got \(\*, \*\) \(\* is a leaf\)",
    ),
    "other shape": (
        lambda: remat.scan(lambda c, x: ({"h": c["h"][None]}, x), {"h": C}, XS),
        TypeError,
        r"carry\['h'\] is \[3\], torch.float32 in init, and \[1, 3\], torch.float32 in the result of f",
    ),
    "other dtype": (
        lambda: remat.fori_loop(0, 2, lambda i, c: c.double(), C),
        TypeError,
        r"body_fun must return.*float64",
    ),
    "tensor for number": (
        lambda: remat.scan(lambda c, x: (c + x.sum(), x), 0.0, XS),
        TypeError,
        r"Begin with a tensor",
    ),
    "other lengths": (
        lambda: remat.scan(fine, C, {"a": XS, "b": (XS[:2],)}),
        ValueError,
        r"xs\['a'\] says 4 .* xs\['b'\]\[0\] has 2",
    ),
    "length contradicts": (lambda: remat.scan(fine, C, XS, 7), ValueError, r"length says 7 steps, but xs has 4"),
    "neither": (lambda: remat.scan(fine, C), ValueError, r"Give xs, or length"),
    "no leading dimension": (lambda: remat.scan(fine, C, [XS, XS[0, 0]]), TypeError, r"xs\[1\] must be a tensor"),
    "negative length": (lambda: remat.scan(fine, C, None, -1), ValueError, r"must not be negative; got -1"),
    "length is a float": (lambda: remat.scan(fine, C, None, 2.0), TypeError, r"length must be an int; got float 2.0"),
    "batched bound": (
        lambda: vmap(lambda n: remat.fori_loop(0, n, lambda i, c: c, C))(torch.tensor([1, 2])),
        TypeError,
        r"upper must be an int; .* write remat.while_loop",
    ),
    "checkpoints=0": (lambda: remat.scan(fine, C, XS, checkpoints=0), ValueError, r"at least 1: .*; got 0"),
    "sparse": (
        lambda: remat.scan(fine, C, XS.to_sparse()),
        TypeError,
        r"xs must be a tensor.* layout torch.sparse_coo",
    ),
    "nested": (
        lambda: remat.scan(fine, C, torch.nested.nested_tensor([C, C], layout=torch.jagged)),
        TypeError,
        r"xs must be a tensor.* of shape nested",
    ),
    "checkpoints=True": (
        lambda: remat.scan(fine, C, XS, checkpoints=True),
        TypeError,
        r"an int or None; got bool True",
    ),
    "too few": (lambda: remat.scan(fine, C, None, 1000, checkpoints=1), ValueError, r"Give at least checkpoints=3\."),
    "no pair": (
        lambda: remat.scan(lambda c, x: c, C, XS),
        TypeError,
        r"must return a pair, \(carry, y\); got a tensor",
    ),
    "no function": (lambda: remat.scan(C, fine, XS), TypeError, r"f must be a function; got a tensor"),
    "name of a policy": (lambda: remat.scan(fine, C, XS, policy="dots"), TypeError, r".dots. is the name of a policy"),
    "unknown policy": (lambda: remat.scan(fine, C, XS, policy="nosuch"), ValueError, r"no op .nosuch."),
    "y is a str": (lambda: remat.scan(lambda c, x: (c, "a"), C, XS), TypeError, r"leaves of y must be .* got str 'a'"),
    "y changes": (
        lambda: remat.scan(lambda c, x: (c + 1, {"y": C if c < 2 else C.int()}), 0, XS),
        TypeError,
        r"y\['y'\] is \[3\], torch.float32 in one step, and \[3\], torch.int32 in another",
    ),
    "the tree of y changes": (
        lambda: remat.scan(lambda c, x: (c + 1, {"a" if c < 2 else "b": C}), 0, XS),
        TypeError,
        r"y is {'a': \*} in one step, and {'b': \*} in another",
    ),
    "vector condition": (
        lambda: remat.while_loop(lambda c: c < 1, torch.sin, C),
        TypeError,
        r"tensor without dimensions",
    ),
    "no condition": (lambda: remat.while_loop(lambda c: None, torch.sin, C), TypeError, r"dimensions; got None"),
    "number in a batch": (
        lambda: vmap(lambda x: remat.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, v[1] + 1), (x, 0)))(C),
        TypeError,
        r"carry\[1\] is of type int in init, and \[\], torch.int64 .* Begin with a tensor",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    call, kind, message = ERRORS[error]
    with pytest.raises(kind, match=r"^remat(\.\w+)?: ") as caught:
        call()
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize("steps", [1, 3])
def test_y_has_memory_of_its_own(steps: int) -> None:
    captured, xs = torch.ones(2), torch.ones(steps, 2)
    carry, ys = remat.scan(lambda h, x: (h + x, (h + x, x, captured)), torch.zeros(2), xs)
    before = carry.clone()
    for y in ys:
        y.fill_(7)
    assert_same((carry, xs, captured), (before, torch.ones(steps, 2), torch.ones(2)))


def test_no_steps() -> None:
    calls = []

    def step(c: Tensor, x: Tensor) -> Any:
        calls.append(torch.rand(1))
        norm(x[None].expand(2, 3))
        return c + x, {"a": c.int(), "b": None, "c": 2.5}

    norm = nn.BatchNorm1d(3)
    torch.manual_seed(0)
    last, ys = remat.scan(step, C, XS[:0])
    assert last is C
    assert ys["a"].shape == (0, 3)
    assert ys["a"].dtype is torch.int32
    assert ys["b"] is None
    assert ys["c"].shape == (0,)
    assert norm.num_batches_tracked == 0
    assert torch.rand(1) == calls[0]  # the draw of the trial is undone
    assert remat.fori_loop(3, 1, lambda i, c: c / 0, C) is C
    assert remat.while_loop(lambda c: False, torch.sin, C) is C


def test_a_rerun_that_differs_names_the_body() -> None:
    flags = [True]

    def body(i: int, c: Tensor) -> Tensor:
        return c.sin() if flags[0] else c.cos()

    out = remat.fori_loop(0, 5, body, torch.ones(3, requires_grad=True), checkpoints=2)
    flags[0] = False
    with pytest.raises(remat.CheckpointError, match=r"rerun of remat.fori_loop\(test_a_rerun.*body\) differs"):
        out.sum().backward()


@pytest.mark.parametrize("transform", ["grad", "jvp", "grad(jvp)", "jvp(grad)", "vmap(grad)"])
def test_a_constant_in_a_closure_of_a_loop_in_a_function_under_remat(transform: str) -> None:
    def fun(of: Any) -> Callable[[Tensor], Tensor]:
        weight = numbers(3, 3) / 3  # the segments are given the body, and the body has it in a cell
        return lambda x: of.fori_loop(0, 3, lambda i, h: torch.tanh(h @ weight), x, checkpoints=1)

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](remat.remat(fun(remat)), x), TRANSFORMS[transform](fun(Plain), x))


# Tracers and compilers.


def squares(w: Tensor) -> Tensor:
    def step(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(w * h + x)
        return h, h.square()

    return remat.scan(step, torch.zeros(3), OTHERS[:4, 0].float(), checkpoints=2)[1].sum()


def powers(w: Tensor) -> Tensor:
    return remat.fori_loop(0, 5, lambda i, c: (c * w).sin(), torch.ones(3), checkpoints=2).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("loss", [squares, powers])
def test_a_compiled_gradient(loss: Any, backend: str) -> None:
    w = torch.tensor([0.5, 0.2, 0.1])
    torch._dynamo.reset()
    assert_same(torch.compile(grad(loss), backend=backend, fullgraph=True)(w), grad(loss)(w))


@pytest.mark.parametrize("loss", [squares, powers])
def test_a_traced_gradient(loss: Any) -> None:
    w = torch.tensor([0.5, 0.2, 0.1])
    assert_same(make_fx(grad(loss))(w)(2 * w), grad(loss)(2 * w))


@LINEARIZE_WARNS
def test_linearize_goes_through_a_map_of_gradients() -> None:
    def of(loops: Any) -> Any:
        def loss(x: Tensor) -> Any:
            c, ys = loops.scan(lambda c, x: (c + x, x), x[0], torch.stack([x[0], x[0].cos()]), checkpoints=1)
            return c.square() + ys.square().sum(), ys

        f = vmap(lambda _, x: grad(loss, has_aux=True)(x), in_dims=(0, None))
        a, x = numbers(2), numbers(3)
        return linearize(f, a, x)[1](a, x)

    assert_same(of(remat), of(Plain))


def test_y_is_a_captured_tensor() -> None:
    """A view of a leaf has no node where forward-mode AD and a policy's mode are at work."""

    def gradient(loops: Any, ck: Any) -> Tensor:
        x, y = numbers(3), numbers(3, seed=1).requires_grad_()

        def fun(x: Tensor) -> Tensor:
            outer = ck(lambda y=y: loops.scan(lambda c, h: (torch.tanh(c + h), y), x, torch.stack([y])))
            return outer()[1].square().sum()

        value, _ = jvp(fun, (x,), (x.cos(),))
        return torch.autograd.grad(value, y)[0]

    keeps = functools.partial(remat.remat, policy=policies.everything_saveable)
    assert_same(gradient(remat, keeps), gradient(Plain, lambda f: f))


def test_y_is_a_captured_constant_that_the_body_reads() -> None:
    """In a rerun below its level, torch gives back, as it was given it, what stands for the constant."""

    def gradient(loops: Any) -> Tensor:
        def fun(x: Tensor) -> Tensor:
            constant = torch.ones_like(x)
            held = [constant]

            def body(c: Tensor, h: Tensor) -> Any:
                assert constant is not None
                return torch.tanh(c + held[0].sum()), held[0]

            return loops.scan(body, x, torch.stack([x] * 3))[0]

        return grad(fun)(numbers(1)[0])

    assert_same(gradient(remat), gradient(Plain))


def test_y_is_a_captured_tensor_and_the_last_carry_is_dropped() -> None:
    def run(remat_of: Any, scan: Any) -> list[Tensor]:
        def loss(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return remat_of(lambda: scan(lambda c, _: (torch.tanh(c + y.sum()), z), x, length=2)[1])()

        def pulled(*args: Tensor) -> tuple[Tensor, ...]:
            out, pullback = vjp(loss, *args)
            return out, *pullback(out.cos())

        inputs = numbers(2, 3).requires_grad_(), numbers(2, 3, seed=1).requires_grad_(), numbers(2, 3, seed=2)
        out = vmap(pulled)(*inputs[:2], inputs[2].requires_grad_())
        first = torch.autograd.grad(sum(t.sin().sum() for t in out), inputs, create_graph=True, allow_unused=True)
        return [*out, first[2], torch.autograd.grad(first[2].sin().sum(), inputs[2])[0]]

    assert_same(run(remat.remat, remat.scan), run(lambda f: f, plain_scan))


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "jvp(grad)"])
def test_what_a_while_loop_writes_to_is_written_once_under_transforms(transform: str) -> None:
    def derivative(loop: Any) -> Any:
        counts = torch.zeros(3)

        def body(value: Any) -> Any:
            n, x = value
            with torch.no_grad():
                torch.add(counts, 1.0, out=counts)
            return n + 1, x.sin() * counts.clone()

        gradient = TRANSFORMS[transform](lambda x: loop(lambda value: value[0] < 3, body, (0, x))[1], numbers(3))
        return gradient, counts

    def plain_loop(cond: Any, body: Any, value: Any) -> Any:
        while cond(value):
            value = body(value)
        return value

    assert_same(derivative(remat.while_loop), derivative(plain_loop))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("around", [lambda f: f, lambda f: grad(f), remat.remat], ids=["value", "grad", "remat"])
def test_a_while_loop_changes_a_tensor_for_elements_that_are_done(around: Any, mode: Any) -> None:
    """It would be changed as often as the last element needs. A tensor that the body makes is its own."""

    def f(x: Tensor, writes_outside: bool) -> Tensor:
        count = torch.zeros_like(x)

        def body(v: Any) -> Any:
            own = torch.zeros_like(x).add_(1)
            (count if writes_outside else own).add_(1)
            return (v[0] + x).sin() * own.detach(), v[1] + 1

        return remat.while_loop(lambda v: v[1] < x.detach() * 6, body, (x, torch.tensor(0)))[0] * (count + 1)

    xs = torch.tensor([0.2, 0.9])
    with mode():
        expected = torch.stack([around(lambda x: f(x, False))(x) for x in xs])
        assert_same(vmap(around(lambda x: f(x, False)))(xs), expected)
        with pytest.raises(remat.RematError, match=r"while_loop: .*body changes a tensor in place, also for elements"):
            vmap(around(lambda x: f(x, True)))(xs)


# The run of `while_loop` that counts its steps.


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "jacrev"])
def test_a_hook_that_the_body_of_a_while_loop_puts_on_its_value(transform: str, captured: bool) -> None:
    """The run that counts the steps finds the same tensor, and must not put the hook there too."""

    def program(of: Any, x: Tensor) -> Tensor:
        def body(value: tuple[Tensor, int]) -> tuple[Tensor, int]:
            h, i = value
            hooked = x if captured else h
            if hooked.requires_grad:
                hooked.register_hook(lambda g: g * 0.5)
            return h + hooked.sin(), i + 1

        return of.while_loop(lambda value: value[1] < 2, body, (x, 0))[0]

    run, x = TRANSFORMS[transform], numbers(3)
    assert_same(run(lambda x: program(remat, x), x), run(lambda x: program(Plain, x), x))


def test_a_while_loop_begins_with_what_a_rerun_of_the_function_around_finds() -> None:
    def run(loop: Any, around: Any) -> Tensor:
        steps, x = torch.zeros(()), numbers(2).requires_grad_()

        def f(x: Tensor) -> Tensor:
            first = (x, steps.clone() if around is remat.remat else steps)
            y, _ = loop(lambda v: v[1] < 3, lambda v: ((v[0] * 1.1).sin(), v[1] + 1), first)
            with torch.no_grad():
                steps.add_(1)
            return y

        return torch.autograd.grad(around(f)(x).sum(), x)[0]

    def checkpointed(f: Any) -> Any:
        return lambda x: remat.checkpoint(f, x, use_reentrant=False)

    for around in (remat.remat, checkpointed):
        assert_same(run(remat.while_loop, around), run(plain_while, lambda f: f))


def test_a_while_loop_begins_with_a_captured_tensor_that_its_body_reads_too() -> None:
    def loss(loop: Any, x: Tensor) -> Tensor:
        held = [x]
        first = (torch.tensor(0), held[0])
        return remat.remat(lambda: loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] * x), first)[1])().sum()

    def run(loop: Any) -> Tensor:
        return grad(lambda b: vmap(functools.partial(loss, loop))(torch.stack([b, b])).sum())(numbers(3))

    assert_same(run(remat.while_loop), run(plain_while))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("what", ["draws", "writes"])
def test_a_condition_with_effects_is_an_error(what: str, keyed: bool) -> None:
    """The loop calls it only to count: it would do nothing in the run that matters."""
    buffer = torch.zeros(())
    conditions = {"draws": lambda v: torch.rand(()) < 2 - v.sum(), "writes": lambda v: buffer.add_(1) < 3}

    def run(x: Tensor) -> Tensor:
        return remat.while_loop(conditions[what], lambda v: v + torch.rand(3), x)

    state = torch.get_rng_state()
    x = numbers(3).requires_grad_()
    with pytest.raises(
        remat.RematError, match=r"remat.while_loop: .*<lambda> draws random numbers or changes a tensor"
    ):
        remat.random.keyed(run)(remat.random.key(0), x) if keyed else run(x)
    assert buffer == 0
    assert torch.equal(torch.get_rng_state(), state)
