"""Functions under remat that call functions under remat."""

import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    KEEPS,
    SOME_TRANSFORMS,
    TRANSFORMS,
    UNIT,
    CountOps,
    Fun,
    activation,
    assert_same,
    leaf,
    numbers,
    plain,
)
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode

from remat import CheckpointError, checkpoint, policies, remat
from remat.debug import LiveBytes
from remat.nn import remat_module

SIZE = 6


class Parts:
    """Modules, and a tensor in cells."""

    def __init__(self) -> None:
        self.first = nn.Linear(SIZE, SIZE).double()
        self.second = nn.Linear(SIZE, SIZE, bias=False).double()
        self.norm = nn.BatchNorm1d(SIZE).double()
        with torch.no_grad():
            for i, t in enumerate(self.parameters()):
                t.copy_(numbers(*t.shape, seed=i) / 2)
        self.w = leaf(numbers(SIZE, SIZE, seed=9))

    def parameters(self) -> list[nn.Parameter]:
        return [p for m in (self.first, self.second, self.norm) for p in m.parameters()]


def in_a_row(parts: Parts, way: Any) -> Fun:
    first, w = parts.first, parts.w
    inner = way(lambda x: torch.tanh(first(x)) @ w)
    return lambda x: inner(inner(x)).cos()


def three_deep(parts: Parts, way: Any) -> Fun:
    first, second, w = parts.first, parts.second, parts.w
    inner = way(lambda x: torch.tanh(first(x)) @ w)
    middle = way(lambda x: inner(second(x).sin()) + inner(x))
    return lambda x: middle(middle(x)) * middle(x)


def made_inside(parts: Parts, way: Any) -> Fun:
    w = parts.w

    def fun(x: Tensor) -> Tensor:
        y = x.sin() @ w
        scale = y.detach().abs()
        return way(lambda z: (z * y).tanh() * scale)(x)

    return fun


def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


def of_what_it_finds(parts: Parts, way: Any) -> Fun:
    second = parts.second
    return lambda x: way(second)(way(tanh)(way(torch.sin)(x))).exp()


def several_results(parts: Parts, way: Any) -> Fun:
    w = parts.w
    inner = way(lambda x: ((x.sin() @ w).tanh(), x, 3, None, x.view(-1)))

    def fun(x: Tensor) -> Tensor:
        y, same, n, _, flat = inner(x.cos())
        z, _, _, _, _ = inner(y)
        return z * n + same + flat.view(same.shape)

    return fun


def structures(parts: Parts, way: Any) -> Fun:
    w = parts.w
    inner = way(lambda d, *, scale: {"y": (d["x"][0] @ w).tanh() * scale, "x": [d["x"][1]]})
    return lambda x: inner({"x": [x.sin(), x]}, scale=2.0)["y"] + inner({"x": (x, x)}, scale=0.5)["y"]


def cut(parts: Parts, way: Any) -> Fun:
    w = parts.w
    inner = way(lambda x: (x @ w).tanh())
    return lambda x: inner(x.detach()) * inner(x) + inner(inner(x).detach())


def masked(parts: Parts, way: Any) -> Fun:
    w = parts.w
    inner = way(lambda x, m: torch.where(m, (x @ w).tanh(), x))
    return lambda x: inner(x.sin(), x > 0) + inner(x, x.sin() < 0.5)


def views(parts: Parts, way: Any) -> Fun:
    w = parts.w
    inner = way(lambda x: x.transpose(0, 1).tanh().sum(0) @ w)
    return lambda x: inner(x.sin().expand(3, *x.shape).transpose(0, 1)) * 2


def unused(parts: Parts, way: Any) -> Fun:
    w = parts.w
    inner = way(lambda x, y: (x @ w).tanh())
    return lambda x: inner(x, x.cos()) if inner(x, x) is not None else x


def wrapped_modules(parts: Parts, way: Any) -> Fun:
    model = nn.Sequential(parts.first, nn.Tanh(), parts.second)
    for module in () if way is plain else (model, parts.second):
        remat_module(module)
    return lambda x: model(model(x).cos())


def decorated_methods(parts: Parts, way: Any) -> Fun:
    class Block(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

        @way
        def forward(self, x: Tensor) -> Tensor:
            return self.double(self.linear(x)).tanh()

        @way
        def double(self, x: Tensor) -> Tensor:
            return x.sin() * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(parts.first), Block(parts.second)

        @way
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + x)

    model = Model()
    return lambda x: model(model(x).cos())


PROGRAMS = [
    in_a_row,
    three_deep,
    made_inside,
    of_what_it_finds,
    several_results,
    structures,
    cut,
    masked,
    views,
    unused,
    wrapped_modules,
    decorated_methods,
]
EACH_PROGRAM = pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)


def checkpointed(fun: Fun) -> Fun:
    return lambda *args, **kwargs: checkpoint(fun, *args, use_reentrant=False, **kwargs)


def reentrant(fun: Fun) -> Fun:
    return lambda x: checkpoint(fun, x, use_reentrant=True)


@EACH_PROGRAM
@pytest.mark.parametrize("name", SOME_TRANSFORMS)
def test_under_transforms(make: Any, name: str) -> None:
    x = numbers(2, SIZE) / 2
    actual = TRANSFORMS[name](remat(make(Parts(), remat)), x)
    assert_same(actual, TRANSFORMS[name](make(Parts(), plain), x), rounding=1e-9)


def backward(fun: Fun, x: Tensor) -> Any:
    fun(x).sin().sum().backward()
    return x.grad


def twice(fun: Fun, x: Tensor) -> Any:
    y = fun(x).sin().sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


def recorded(fun: Fun, x: Tensor) -> Any:
    (g,) = torch.autograd.grad(fun(x).sin().sum(), x, create_graph=True)
    g.sin().sum().backward()
    return g.detach(), x.grad


def in_parts(fun: Fun, x: Tensor) -> Any:
    y = fun(x).sin().sum()
    (g,) = torch.autograd.grad(y, x, retain_graph=True)
    y.backward()
    return g


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(fun: Fun, x: Tensor) -> Any:
    y = fun(x).sin().sum()
    with Mode():
        y.backward()
    return x.grad


def in_no_grad(fun: Fun, x: Tensor) -> Any:
    with torch.no_grad():
        return fun(x)


def under_autocast(fun: Fun, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        y = fun(x)
    y.sin().sum().backward()
    return x.grad


def under_hooks(fun: Fun, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        y = fun(x).sin().sum()
    y.backward()
    return x.grad


BACKWARDS = [
    backward,
    twice,
    recorded,
    in_parts,
    under_a_mode,
    in_no_grad,
    under_autocast,
    under_hooks,
]
WAYS: dict[str, Callable[[Fun], Fun]] = {
    "remat": remat,
    "checkpoint": checkpointed,
    "reentrant": reentrant,
    "dots": remat(policy=policies.dots_saveable),
}


@EACH_PROGRAM
@pytest.mark.parametrize("inner", [remat, checkpointed], ids=["remat", "checkpoint"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", BACKWARDS, ids=lambda run: run.__name__)
def test_of_autograd(make: Any, run: Any, way: str, inner: Any) -> None:
    def gradients(parts: Parts, fun: Fun) -> Any:
        result = run(fun, leaf(numbers(2, SIZE) / 2))
        return result, parts.w.grad, [p.grad for p in parts.parameters()]

    parts, others = Parts(), Parts()
    actual = gradients(parts, WAYS[way](make(parts, inner)))
    assert_same(actual, gradients(others, make(others, plain)), rounding=1e-9)


@EACH_PROGRAM
def test_requires_grad_may_change_before_the_backward(make: Any) -> None:
    def gradients(parts: Parts, way: Any) -> Any:
        x = leaf(numbers(2, SIZE) / 2)
        y = way(make(parts, way))(x).sin().sum()
        parts.first.requires_grad_(False)
        y.backward()
        return x.grad, parts.w.grad, parts.second.weight.grad

    assert_same(gradients(Parts(), remat), gradients(Parts(), plain))


def test_draws_are_repeated() -> None:
    inner = remat(lambda x: F.dropout(x.sin(), 0.5))
    middle = remat(lambda x: F.dropout(inner(x) * inner(x.cos()), 0.3))
    seen: list[Any] = []
    for way, fun in (
        (remat, lambda x: middle(middle(x))),
        (plain, lambda x: middle.__wrapped__(middle.__wrapped__(x))),
    ):
        torch.manual_seed(0)
        x = leaf(numbers(100))
        y = way(fun)(x)
        torch.randn(3)
        y.sum().backward()
        seen.append((y.detach(), x.grad, torch.randn(3)))
    assert_same(*seen)


def test_statistics_are_taken_once() -> None:
    def run(way: Any) -> Any:
        parts = Parts()
        norm, first = parts.norm, parts.first
        inner = way(lambda x: norm(first(x)).tanh())
        x = leaf(numbers(5, SIZE))
        way(lambda x: inner(inner(x)))(x).sum().backward()
        return x.grad, [p.grad for p in parts.parameters()], [*norm.buffers()]

    assert_same(run(remat), run(plain), rounding=1e-9)


def test_changed_in_place() -> None:
    parts = Parts()
    x = leaf(numbers(2, SIZE))
    y = remat(in_a_row(parts, remat))(x)
    with torch.no_grad():
        parts.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_given_and_changed_inside_is_an_error() -> None:
    inner = remat(lambda x: x.sin())

    def fun(x: Tensor) -> Tensor:
        y = x.cos()
        z = inner(y)
        y.mul_(2)
        return z * y

    x = leaf(numbers(3))
    with pytest.raises((RuntimeError, CheckpointError), match="modified by an inplace"):
        remat(fun)(x).sum().backward()


def test_what_another_function_does_now_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(numbers(3))
    y = remat(lambda x: remat(tanh)(x).cos())(x)
    monkeypatch.setattr(tanh, "__code__", (lambda x: torch.sin(x)).__code__)
    with pytest.raises(CheckpointError, match=r"rerun of .* differs"):
        y.sum().backward()


def halved(n: int, way: Any) -> Fun:
    if n == 1:
        return torch.sin
    half = halved(n // 2, way)
    return lambda x: way(half)(way(half)(x))


def in_checkpoints(n: int) -> Fun:
    if n == 1:
        return torch.sin
    half = in_checkpoints(n // 2)
    return lambda x: checkpoint(half, checkpoint(half, x, use_reentrant=False), use_reentrant=False)


@pytest.mark.parametrize("n", [4, 16, 64])
def test_a_rerun_stops_where_the_last_call_inside_would_begin(n: int) -> None:
    """Each of the log2(n) reruns of an outer call runs half of its ops, and the innermost ones run once more."""

    def check(run: Callable[[Tensor], Any]) -> int:
        with CountOps() as ops:
            run(numbers(2000))  # to stop is worth it
        return ops["sin"]

    expected = n + n // 2 * (int(math.log2(n)) - 1) + n
    assert check(lambda x: halved(n, remat)(leaf(x)).sum().backward()) == expected
    assert check(lambda x: in_checkpoints(n)(leaf(x)).sum().backward()) == expected - n  # sin's result is not saved
    for fun in (halved(n, remat), in_checkpoints(n)):
        assert check(grad(lambda x, fun=fun: fun(x).sum())) == expected


@pytest.mark.parametrize("n", [64, 512])
def test_memory(no_gc: None, n: int) -> None:
    """The log2(n) activations of one path down, with operand, result, cotangent and gradient of its last op."""
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        halved(n, remat)(x).sum().backward()
    assert meter.peak / UNIT <= math.log2(n) + 4
    assert meter.current <= UNIT + 8  # the gradient


def test_memory_of_a_call_with_many_parameters(no_gc: None) -> None:
    """The call is skipped in the outer rerun: what stands there for its result depends on each parameter."""
    parameters = [leaf(numbers(1, seed=i).float()) for i in range(20)]
    inner = remat(lambda x: torch.stack([x.sum() * p.sum() for p in parameters]).sum() + x.sin())

    def peak(f: Fun) -> float:
        x = activation().requires_grad_()
        with LiveBytes() as meter:
            f(x).backward(torch.ones(()).expand(x.shape))
        return meter.peak / UNIT

    assert peak(remat(lambda x: inner(x))) <= peak(inner) + 1


def test_nothing_is_left(no_gc: None) -> None:
    parts = Parts()
    x = leaf(numbers(2, SIZE))
    for run in (backward, recorded, twice):
        y = remat(three_deep(parts, remat))(x)
        run(lambda _, y=y: y, x)
        seen = weakref.ref(y)
        del y
        assert seen() is None


def test_the_memory_of_one_that_is_never_differentiated(no_gc: None) -> None:
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        y = halved(64, remat)(x)
        assert meter.current <= UNIT * 2 + 8  # the middle, and the result
        del y
        assert meter.current == 0


def an_unread_default(remat: Any) -> Fun:
    def f(x: Tensor, y: Tensor) -> Tensor:
        def outer(v: Tensor = x) -> Tensor:
            def inner(vs: list[Tensor], unread: Tensor = y, v: Tensor = v) -> Tensor:
                return v.mean(0)

            return remat(inner)([v, x])

        return remat(outer)()

    return f


def given_and_captured(remat: Any) -> Fun:
    """What a nested function is given is in a list that it reads, too."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        shared = [x, y]

        def outer(v: Tensor) -> Tensor:
            def middle(v: Tensor) -> Tensor:
                return remat(lambda h, w=shared[0]: torch.sin(h * w))(v)

            return remat(middle)(shared[0]) * v

        return remat(outer)(y)

    return f


@pytest.mark.parametrize("make", [an_unread_default, given_and_captured])
@pytest.mark.parametrize("transform", [jacfwd, jacrev])
def test_a_default(make: Callable[[Any], Fun], transform: Any) -> None:
    x, y = numbers(3), numbers(3, seed=1)
    for around in (transform, lambda f: transform(transform(f))):
        assert_same(around(make(remat))(x, y), around(make(plain))(x, y))
    x = leaf(x)
    for made in (make(remat), make(plain)):
        loss = grad(lambda x, made=made: made(x, y).sum())(x).sum() + x.sum()
        loss.backward()
    assert x.grad is not None
    assert_same(x.grad / 2, grad(lambda x: grad(lambda x: make(plain)(x, y).sum())(x).sum() + x.sum())(x.detach()))


def test_a_deque_of_tensors_that_a_transform_inside_takes() -> None:
    def f(remat: Any, x: Tensor) -> Tensor:
        history = deque([torch.sin(x)])
        return remat(lambda y=history[0]: grad(lambda t: (t.sin() * y).sum())(history[0]))()

    x = numbers(3)
    for transform in (jacrev, jacfwd):
        assert_same(transform(lambda x: f(remat, x))(x), transform(lambda x: f(plain, x))(x))


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
def test_a_table_made_in_a_nested_call_beside_a_tensor_of_its_shape(policy: Any) -> None:
    """The forward reads both with the same op, at the same position of the outer function."""
    g, tables = leaf(numbers(3, seed=1)), []

    def fun(x: Tensor) -> Tensor:
        if not tables:
            tables.append(torch.arange(3.0).double())
        return x * g * tables[0]

    def both(x: Tensor, ck: Any) -> Tensor:
        return ck(lambda x: ck(fun)(x).sin() * x, policy=policy)(x).sum()

    x = leaf(numbers(3))
    actual = torch.autograd.grad(both(x, remat), (x, g))
    assert_same(actual, torch.autograd.grad(both(x, lambda fun, policy=None: fun), (x, g)))


def test_a_nested_call_under_vmap_returns_a_constant() -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        c = torch.ones(3, dtype=x.dtype) + 0.5
        return ck(lambda x: torch.tanh(x * vmap(ck(lambda t: t * c))(c).sum()))(x).sum()

    x = numbers(3)
    assert_same(grad(functools.partial(loss, remat))(x), grad(functools.partial(loss, plain))(x))


@pytest.mark.parametrize("end", [Tensor.abs, Tensor.exp, lambda z: 2 * z.real])
def test_a_call_at_the_end_of_complex_numbers_is_skipped(end: Any) -> None:
    runs = []

    def orders(ck: Any) -> list[Any]:
        def inner(z: Tensor) -> Tensor:
            runs.append(ck)
            return end(z)

        z = leaf(torch.complex(numbers(3), numbers(3, seed=1)))
        (first,) = torch.autograd.grad(ck(lambda z: ck(inner)(z.sin()))(z).abs().sum(), z, create_graph=True)
        before = len(runs)
        return [before, first, torch.autograd.grad(first.abs().sum(), z)]

    (before, *found), (_, *expected) = orders(remat), orders(plain)
    assert_same(found, expected)
    assert before == 2


def test_hooks_on_the_node_of_a_nest_see_its_cotangents() -> None:
    def seen(ck: Any) -> list[Tensor]:
        found: list[Tensor] = []

        def fun(x: Tensor) -> Tensor:
            y = ck(lambda x: ck(lambda x: ck(torch.sin)(x).cos())(x).sin())(x)
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda cotangents: found.extend(c.clone() for c in cotangents))
            y.grad_fn.register_hook(lambda _, cotangents: found.extend(c.clone() for c in cotangents))
            return 2 * y

        ck(fun)(numbers(3).requires_grad_()).sum().backward()
        return found

    assert_same(seen(remat), seen(plain))


class GivesBack(torch.autograd.Function):
    """Its forward begins with an op that returns its argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.contiguous() ** 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


@pytest.mark.parametrize("name", ["grad", "vmap(grad)", "grad(grad)", "jacrev", ".backward()", "double backward"])
def test_a_call_at_the_end_makes_an_autograd_function(name: str) -> None:
    def make(ck: Any) -> Fun:
        return ck(lambda x: ck(GivesBack.apply)(x.sin()))

    assert_same(TRANSFORMS[name](make(remat), numbers(3, 3)), TRANSFORMS[name](make(plain), numbers(3, 3)))


def test_a_nested_call_gives_back_an_operand_that_is_read_elsewhere_too() -> None:
    """In a rerun at a level, the operand wraps the very tensor that the function finds in the list."""

    def orders(ck: Any) -> list[Tensor]:
        x = leaf(numbers(3))
        held = [x]

        def fun(v: Tensor, unused: Tensor) -> Tensor:
            ck(lambda: [x, v])()
            return torch.tanh(v + held[0].sum())

        found = [ck(fun)(x, x * 1).sum()]
        for _ in range(3):
            found += [torch.autograd.grad(found[-1], x, create_graph=True)[0].sum()]
        return found

    assert_same(orders(remat), orders(plain))


def _tangent_of_constants(ck: Any) -> Fun:
    w = numbers(3, 3, seed=1)
    inner = ck(torch.sin)
    return ck(lambda x: jvp(inner, (w,), (w,))[1] * x)


def _reads_only_the_constant(ck: Any) -> Fun:
    inner = ck(lambda x: (x.detach() * 2, x.sin()))
    return ck(lambda x: x.sin() * grad(lambda z: (inner(z)[0].sin() * z).sum())(x))


def _returns_a_constant_too(ck: Any) -> Fun:
    inner = ck(lambda x: (x.sin(), x.detach() * 2))
    return ck(lambda x: sum(inner(x.cos())))


def _pulls_back_inside_vmap(ck: Any) -> Fun:
    return ck(lambda x: vmap(lambda z: vjp(torch.sin, z)[1](z)[0])(x))


def _vmap_of_a_constant_inside_grad(ck: Any) -> Fun:
    def mean(z: Tensor) -> Tensor:
        both = vmap(lambda y: (y * z, z.detach() * 2))(torch.ones(2, dtype=z.dtype))
        return sum(part.mean(0) for part in both)

    return ck(lambda x: x.sin() + grad(lambda z: (mean(z) * z).sum())(x))


def _gradient_at_a_constant_deep_in_closures(ck: Any) -> Fun:
    w = numbers(3, 3, seed=1)
    fun: Any = {"call": ck(lambda x: grad(lambda z: (z * x).sin().sum())(w))}
    for _ in range(5):
        fun = {"call": ck(lambda x, fun=fun: fun["call"](x.sin()))}
    return lambda x: fun["call"](x)


_WRAPS = [
    _tangent_of_constants,
    _gradient_at_a_constant_deep_in_closures,
    _vmap_of_a_constant_inside_grad,
    _reads_only_the_constant,
    _returns_a_constant_too,
    _pulls_back_inside_vmap,
]
_NESTED_TANGENTS = ("forward AD", _tangent_of_constants)  # torch can't nest the levels of forward-mode AD


@pytest.mark.parametrize(
    ("name", "make"), [p for p in itertools.product(SOME_TRANSFORMS, _WRAPS) if p != _NESTED_TANGENTS]
)
def test_what_an_inner_transform_wraps_without_a_derivative(name: str, make: Any) -> None:
    x = numbers(3, 3)
    assert_same(TRANSFORMS[name](make(remat), x), TRANSFORMS[name](make(plain), x))


GIVES_BACK: dict[str, Callable[[Tensor], Tensor]] = {"to": lambda t: t.to(t.dtype), "mT": lambda t: t.mT}
"""Each returns the tensor itself in the forward. In a rerun, which has other levels, it may return a new wrapper."""


@pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated on 0-D tensors")
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("name", GIVES_BACK)
def test_a_nested_call_gives_back_what_it_reads(name: str, differentiated: bool) -> None:
    def run(make: Any) -> Any:
        x, w = numbers(3), numbers(1, seed=1).sum().requires_grad_(differentiated)

        def product(x: Tensor, w: Tensor) -> Tensor:
            return (x * make(lambda: GIVES_BACK[name](w))()).tanh()

        if not differentiated:
            return jvp(lambda x: jacrev(make(product))(x, w), (x,), (x,))
        out = jvp(jacrev(lambda x: make(lambda: product(x, w))()), (x,), (x,))
        return torch.autograd.grad(sum(t.sin().sum() for t in out), w)

    assert_same(run(remat), run(plain))


def test_a_gradient_that_no_vmap_around_it_maps() -> None:
    def derivative(w: Tensor, ck: Any) -> Tensor:
        inner = ck(torch.tanh)
        outer = ck(lambda w: inner(w) * 2)
        return grad(lambda w: outer(w).sin().sum())(w)

    def loss(w: Tensor, ck: Any) -> Tensor:
        return vmap(lambda x: derivative(w, ck) * x)(xs).sin().sum()

    w, xs = numbers(3), numbers(2)
    for transform in (".backward()", "grad", "hessian"):
        actual, expected = (TRANSFORMS[transform](lambda w, ck=ck: loss(w, ck), w) for ck in (remat, plain))
        assert_same(actual, expected)


@KEEPS
def test_a_call_inside_reads_an_operand_through_an_object_in_a_cycle(no_gc: None) -> None:
    """The object of the forward is still there in the backward. The rerun makes another one."""

    class Scale:
        def __init__(self, w: Tensor) -> None:
            self.w, self.me = w, self

    def loss(w: Tensor, ck: Any) -> Tensor:
        def middle(w: Tensor, x: Tensor) -> Tensor:
            scale = Scale(w)
            return ck(lambda x: x.sin() * scale.w)(x)

        return ck(lambda w: ck(middle)(w.tanh(), w))(w)

    w = numbers(3)
    actual, expected = (TRANSFORMS[".backward()"](lambda w, ck=ck: loss(w, ck), w) for ck in (remat, plain))
    assert_same(actual, expected)


@pytest.mark.parametrize("view", [torch.t, lambda y: y[:], lambda y: y.view(-1)[1:]], ids=["t", "slice", "of a view"])
@pytest.mark.parametrize("differentiates", ["in grad", "below grad", "both"])
def test_a_view_of_zeros_that_are_written_to(view: Any, differentiates: str) -> None:
    """The view gets a derivative from its base, at the level of `grad` or below it."""

    def run(ck: Any) -> Any:
        def fun(x: Tensor, y: Tensor) -> Tensor:
            zeros = torch.zeros_like(y)
            part = view(zeros)
            zeros.add_(y)
            return x.sum() * part * part

        x, y = leaf(numbers(2, 2)), leaf(numbers(2, 2, seed=1))
        argnums: Any = {"in grad": 1, "below grad": 0, "both": (0, 1)}[differentiates]
        found = grad(lambda x, y: ck(fun)(x, y).sum(), argnums=argnums)(x, y)
        end = sum(t.sin().sum() for t in optree.tree_leaves(found))
        return torch.autograd.grad(end, (x, y), materialize_grads=True)

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("transform", [".backward()", "grad", "hessian", "vmap"])
def test_a_call_inside_gives_back_a_view_whose_base_was_written_to(transform: str) -> None:
    """Torch makes the node of the view anew when it is read, here in the call inside."""

    def fun(x: Tensor, ck: Any) -> Tensor:
        def block(view: Tensor) -> Tensor:
            held = deque([view])
            return (ck(lambda: held[0])() + view).tanh()

        y = x.clone()
        view = y[:]
        y.add_(x)
        return ck(block)(view)

    def run(ck: Any) -> Any:
        return TRANSFORMS[transform](ck(lambda x: fun(x, ck)), numbers(3))

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("ck", [checkpoint, torch.utils.checkpoint.checkpoint], ids=["ours", "torch's"])
@pytest.mark.parametrize("where", ["attribute", "buffer", "cache", "outer attribute"])
def test_a_table_that_is_made_on_first_use_in_a_checkpoint(ck: Any, where: str) -> None:
    """Its rerun finds the table, and has to save as many tensors as the forward."""

    class Net(nn.Module):
        table: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, dtype=torch.float64)
            self.cached = functools.cache(lambda: torch.arange(9).reshape(3, 3).double().cos())

        def made(self) -> Any:
            if where == "cache":
                return self.cached()
            if where == "buffer":
                if "kept" not in self._buffers:
                    self.register_buffer("kept", torch.arange(9).reshape(3, 3).double().cos())
                return self.kept
            if self.table is None:
                self.table = torch.arange(9).reshape(3, 3).double().cos()
            return self.table

        def inner(self, x: Tensor) -> Tensor:
            return self.linear(x.sin() @ self.made()) * self.made()

        def outer(self, x: Tensor, inner: Any) -> Tensor:
            if where == "outer attribute":
                self.made()
            return torch.exp(inner(inner(x.cos()).cos())).tanh()

    def run(ck: Any, around: Any) -> Any:
        torch.manual_seed(0)
        net, x = Net(), leaf(numbers(3, 3))
        ck(net.outer, x, around(net.inner)).sum().backward()
        return x.grad, *(p.grad for p in net.parameters())

    assert_same(run(functools.partial(ck, use_reentrant=False), remat), run(lambda f, *args: f(*args), plain))


def in_checkpoint(fun: Fun, x: Tensor) -> Tensor:
    return checkpoint(fun, x, use_reentrant=False)


def differentiates_inside(inner: Any, call: Any, held: Any, x: Tensor) -> Tensor:
    """Its checkpoint runs again while the forward still runs."""

    def outer(x: Tensor) -> Tensor:
        u = inner(lambda x: x * held.buffer)(x.sin())
        (d,) = torch.autograd.grad((u * u).sin().sum(), u)
        return u.tanh() * d

    return call(outer, x)


def asks_and_changes(inner: Any, call: Any, held: Any, x: Tensor) -> Tensor:
    def read(x: Tensor) -> Tensor:
        return (x.cos() + held.buffer.to(held.buffer.dtype) * held.buffer.shape[0]).tanh()

    def outer(x: Tensor) -> Tensor:
        y = inner(read)(x.sin())
        held.buffer.add_(1)
        return y

    return call(outer, x)


def makes_a_mask_each_time(inner: Any, call: Any, held: Any, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        held.mask = (x.detach() > 0) * 2.0
        return inner(lambda x: (x * held.mask).sin())(x.cos()).exp()

    return call(outer, call(outer, x))


def makes_a_table_around(inner: Any, call: Any, held: Any, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        if not hasattr(held, "table"):
            held.table = torch.arange(3, dtype=x.dtype)
        return call(lambda x: inner(lambda x: x.sin() * held.table)(x.cos()).tanh(), x.sin()).exp()

    return call(outer, x)


@pytest.mark.parametrize("how", [SimpleNamespace, nn.Module], ids=["attributes", "module"])
@pytest.mark.parametrize(
    "program", [differentiates_inside, asks_and_changes, makes_a_mask_each_time, makes_a_table_around]
)
def test_constants_that_a_call_in_a_checkpoint_reads(program: Any, how: Any) -> None:
    def run(inner: Any, call: Any) -> Any:
        x, held = leaf(numbers(3)), how()
        held.buffer = numbers(3, seed=1)
        program(inner, call, held, x).sum().backward()
        return x.grad, held.buffer

    assert_same(run(remat, in_checkpoint), run(plain, lambda fun, x: fun(x)))


@pytest.mark.parametrize("ck", [remat, lambda fun: lambda x: in_checkpoint(remat(fun), x)], ids=["alone", "checkpoint"])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_weight_that_is_unfrozen_before_the_backward(ck: Any, is_buffer: bool) -> None:
    def run(ck: Any) -> Any:
        x, module = leaf(numbers(3, 3)), nn.Module()
        weight = numbers(3, 3, seed=1).float()
        if is_buffer:
            module.register_buffer("weight", weight)
        else:
            module.weight = nn.Parameter(weight, requires_grad=False)
        y = ck(lambda x: torch.tanh(x @ module.weight.to(x.dtype)))(x).sum()
        module.weight.requires_grad_()
        y.backward()
        return x.grad, module.weight.grad is None

    assert_same(run(ck), run(plain))


@pytest.mark.parametrize("outer", [remat, lambda fun: functools.partial(in_checkpoint, remat(fun))])
def test_a_nested_call_that_closes_over_what_it_does_not_read(outer: Any) -> None:
    """Its results have a derivative only in forward mode: so in the rerun, but not in the forward."""

    def run(outer: Any, ck: Any) -> Any:
        def fun(x: Tensor) -> Tensor:
            unread = x.sin()

            def block(x: Tensor) -> Tensor:
                return torch.sin(ck(lambda x, _=unread: (x.detach(), x))(x)[1])

            return outer(block)(x)

        out, pullback = vjp(fun, x := leaf(numbers(3)))
        (gradient,), (tangent,) = jvp(pullback, (out.detach(),), (out.detach(),))
        return gradient, torch.autograd.grad((gradient + tangent).sum(), x)

    assert_same(run(outer, remat), run(plain, plain))
