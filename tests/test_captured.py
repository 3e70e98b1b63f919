"""Captured tensors are differentiated wherever they are held, as they were when the function was called."""


# ruff: noqa: PT017 - an error is one of two right answers

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import tracemalloc
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import optree
import pytest
import torch
from helpers import (
    CHECKPOINTS,
    DECORATORS,
    SOME_TRANSFORMS,
    TRANSFORMS,
    Adjoint,
    CountOps,
    Fun,
    Reversible,
    Seen,
    Window,
    assert_same,
    leaf,
    numbers,
    pair,
    plain,
    with_constants,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from remat import CheckpointError, RematError, checkpoint, policies, remat
from remat._look import Look
from remat._places import filled, places_in_modules

Decorator = Callable[[Any], Any]
SOME = pytest.mark.parametrize("transform", SOME_TRANSFORMS)
WAYS: dict[str, Decorator] = {
    "remat": remat,
    "policy": remat(policy=policies.dots_saveable),
    "nested": lambda f: remat(lambda *xs: remat(f)(*xs)),
    "checkpoint": CHECKPOINTS["non-reentrant"],
}


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


# Ways to hold a tensor: each takes it and returns a function of the other operand.


class Holder:
    """Holds anything, and can be called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.__dict__.update(kwargs)

    def method(self, x: Tensor) -> Tensor:
        return block(x, self.w)

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x)

    @property
    def computed(self) -> Tensor:
        return self.w


class Slots:
    __slots__ = ("w",)

    def __init__(self, w: Tensor) -> None:
        self.w = w

    def method(self, x: Tensor) -> Tensor:
        return block(x, self.w)


class Layer(nn.Module):
    """Holds it as a plain attribute, which a module allows for a tensor that is no Parameter."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = w

    def forward(self, x: Tensor) -> Tensor:
        return block(x, self.w)


@dataclasses.dataclass
class Data:
    w: Tensor


Pair = collections.namedtuple("Pair", ["a", "b"])
LINEAR = nn.Linear(3, 3, bias=False, dtype=torch.float64)


def in_a_cell(w: Tensor) -> Fun:
    return lambda x: block(x, w)


def in_a_cell_of_an_inner_function(w: Tensor) -> Fun:
    def inner(x: Tensor) -> Tensor:
        return block(x, w)

    return lambda x: inner(x)


def in_a_function_made_inside(w: Tensor) -> Fun:
    def outer(x: Tensor) -> Tensor:
        def inner() -> Tensor:
            return block(x, w)

        return inner()

    return outer


def in_a_default(w: Tensor) -> Fun:
    return lambda x, w=w: block(x, w)


def in_a_keyword_default(w: Tensor) -> Fun:
    def fun(x: Tensor, *, w: Tensor = w) -> Tensor:
        return block(x, w)

    return fun


def in_a_global(w: Tensor) -> Fun:
    namespace = {"block": block, "w": w}
    exec("def fun(x): return block(x, w)", namespace)
    return namespace["fun"]


def in_a_global_container(w: Tensor) -> Fun:
    namespace = {"block": block, "table": {"ws": [w]}}
    exec("def fun(x): return block(x, table['ws'][0])", namespace)
    return namespace["fun"]


def in_a_generator(w: Tensor) -> Fun:
    def rows(x: Tensor) -> Iterator[Tensor]:
        for row in x:
            yield block(row, w)

    return lambda x: torch.stack(list(rows(x)))


def in_a_cache(w: Tensor) -> Fun:
    @functools.cache
    def get() -> Tensor:
        return w

    return lambda x: block(x, get())


def in_a_class_attribute(w: Tensor) -> Fun:
    return type("Made", (Holder,), {"w": w})()


def in_a_static_method(w: Tensor) -> Fun:
    return type("Made", (), {"fun": staticmethod(lambda x: block(x, w))}).fun


def in_a_class_method(w: Tensor) -> Fun:
    return type("Made", (), {"w": w, "fun": classmethod(lambda cls, x: block(x, cls.w))}).fun


def in_a_parameter(w: Tensor) -> Fun:
    """Bound for one call, as functional_call does."""
    return lambda x: functional_call(LINEAR, {"weight": w.t()}, (x,)).tanh()


def in_nested_cells(w: Tensor) -> Fun:
    fun: Fun = lambda x: block(x, w)  # noqa: E731
    for _ in range(5):
        fun = (lambda inner: lambda x: inner(x))(fun)
    return fun


def deep(w: Tensor) -> Fun:
    holder = Holder(w=w)
    for _ in range(8):
        holder = Holder(inner=holder)

    def fun(x: Tensor) -> Tensor:
        h = holder
        while hasattr(h, "inner"):
            h = h.inner
        return block(x, h.w)

    return fun


class Negated(functools.partial):  # type: ignore[type-arg]
    def __call__(self, *args: Any) -> Any:
        return -super().__call__(*args)


class Doubled(Pair):
    """Its constructor changes what it gets."""

    def __new__(cls, a: int, b: Tensor) -> Any:
        return super().__new__(cls, a, b * 2)


def in_an_attribute_of(holder: Any, w: Tensor) -> Fun:
    holder.scale = w * 3
    return lambda x: block(x, getattr(holder, "scale", w))


HOLD: dict[str, Callable[[Tensor], Fun]] = {
    "a cell": in_a_cell,
    "a cell of an inner function": in_a_cell_of_an_inner_function,
    "a function made inside": in_a_function_made_inside,
    "nested cells": in_nested_cells,
    "a default": in_a_default,
    "a keyword default": in_a_keyword_default,
    "a partial": lambda w: functools.partial(lambda w, x: block(x, w), w),
    "a keyword of a partial": lambda w: functools.partial(block, w=w),
    "a partial of a partial": lambda w: functools.partial(functools.partial(lambda k, w, x: block(x, w), 1), w),
    "a partial in a cell": lambda w: (lambda p: lambda x: p(x))(functools.partial(block, w=w)),
    "a partial of a bound method": lambda w: functools.partial(Holder(w=w).method),
    "an attribute of a partial": lambda w: in_an_attribute_of(functools.partial(block, w=w), w),
    "a partial of another class": lambda w: (lambda p: lambda x: p(x))(Negated(block, w=w)),
    "a bound method": lambda w: Holder(w=w).method,
    "a bound method in a cell": lambda w: (lambda m: lambda x: m(x))(Holder(w=w).method),
    "a bound method of slots": lambda w: Slots(w).method,
    "a callable object": lambda w: Holder(w=w),
    "an attribute": lambda w: (lambda h: lambda x: block(x, h.w))(Holder(w=w)),
    "a property": lambda w: (lambda h: lambda x: block(x, h.computed))(Holder(w=w)),
    "an attribute at depth": deep,
    "an attribute of a dataclass": lambda w: (lambda d: lambda x: block(x, d.w))(Data(w)),
    "a namespace": lambda w: (lambda n: lambda x: block(x, n.w))(types.SimpleNamespace(w=w)),
    "a class attribute": in_a_class_attribute,
    "a static method": in_a_static_method,
    "a class method": in_a_class_method,
    "a list": lambda w: (lambda ws: lambda x: block(x, ws[0]))([w]),
    "a tuple": lambda w: (lambda ws: lambda x: block(x, ws[0]))((w,)),
    "a named tuple": lambda w: (lambda p: lambda x: block(x, p.b))(Pair(1, w)),
    "a named tuple with a constructor": lambda w: (lambda p: lambda x: block(x, p.b))(Doubled(1, w)),
    "an attribute of a named tuple": lambda w: in_an_attribute_of(Doubled(1, w), w),
    "a dict": lambda w: (lambda ws: lambda x: block(x, ws["w"]))({"w": w}),
    "nested containers": lambda w: (lambda t: lambda x: block(x, t["a"][0][1].w))({"a": [(1, Holder(w=w))]}),
    "a container of containers passed to torch": lambda w: (lambda ws: lambda x: torch.cat([x, *ws]).sin()[:3] @ ws[0])(
        [w]
    ),
    "a set": lambda w: (lambda s: lambda x: block(x, next(iter(s))))({w}),
    "a module's attribute": lambda w: Layer(w),
    "a module in a cell": lambda w: (lambda m: lambda x: m(x))(Layer(w)),
    "a module in a module": lambda w: nn.Sequential(Layer(w), nn.Tanh()),
    "a bound method of a module": lambda w: Layer(w).forward,
    "a parameter for one call": in_a_parameter,
    "a global": in_a_global,
    "a container in a global": in_a_global_container,
    "a generator": in_a_generator,
    "a cache": in_a_cache,
    "an inner remat'd function": lambda w: (lambda f: lambda x: f(x))(remat(in_a_cell(w))),
    "an inner remat'd partial": lambda w: (lambda f: lambda x: f(x))(remat(functools.partial(block, w=w))),
    "a remat'd bound method": lambda w: (lambda f: lambda x: f(x).sin())(remat(Holder(w=w).method)),
    "remat twice": lambda w: remat(in_a_cell(w)),
}
EACH = pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)


@EACH
@SOME
def test_same_as_plain(hold: Callable[[Tensor], Fun], transform: str) -> None:
    """The captured tensor is what is differentiated."""
    w, x = numbers(3, 3), numbers(3, 3, seed=1)

    actual = TRANSFORMS[transform](lambda w: remat(hold(w))(x), w)
    assert_same(actual, TRANSFORMS[transform](lambda w: hold(w)(x), w))


TABLE = numbers(3, seed=2)

# What gives back its argument as it is, where there is nothing to do.
GIVEN_BACK: dict[str, Fun] = {
    "to": lambda x: x.sin() * TABLE.to(x.dtype),
    "to, and only then read": lambda x: x.sin() * TABLE.to(x.dtype).exp(),
    "of the type of another": lambda x: TABLE.type_as(x) * x.double().sin(),
    "atleast_1d": lambda x: x.sin() * torch.atleast_1d(TABLE).exp(),
    "contiguous": lambda x: x.contiguous().sin() * TABLE.contiguous(),
}


@SOME
@pytest.mark.parametrize("fun", GIVEN_BACK.values(), ids=GIVEN_BACK)
def test_what_comes_back_as_it_is(fun: Fun, transform: str) -> None:
    """`grad` and `jvp` wrap it, and a rerun below them does not."""
    expected = TRANSFORMS[transform](fun, numbers(3))
    for ck in (remat, lambda fun: remat(lambda x: remat(fun)(x))):
        assert_same(TRANSFORMS[transform](ck(fun), numbers(3)), expected)


@EACH
def test_argument_and_captured_at_different_levels(hold: Callable[[Tensor], Fun]) -> None:
    w, x = numbers(3, 3), numbers(3, 3, seed=1)
    for outer, inner in [(grad, grad), (jacrev, grad), (jacfwd, grad), (grad, jacfwd)]:

        def nest(ck: Decorator, outer: Any = outer, inner: Any = inner) -> Tensor:
            def of_w(w: Tensor) -> Tensor:
                fun = ck(hold(w))
                return inner(lambda x: fun(x).sin().sum())(x).square().sum()

            return outer(of_w)(w)

        assert_same(nest(remat), nest(plain))


AROUND = {
    "nothing": lambda f, x: f(x),
    "vmap": lambda f, x: vmap(f)(pair(x)),
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
    "grad": lambda f, x: grad(lambda x: f(x).sin().sum())(x),
    "vmap(grad)": lambda f, x: vmap(grad(lambda x: f(x).sin().sum()))(pair(x)),
}


@EACH
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_leaf_of_plain_autograd_below_a_transform(
    hold: Callable[[Tensor], Fun], around: Callable[..., Tensor]
) -> None:
    grads = []
    for ck in (remat, plain):
        w = leaf(numbers(3, 3, seed=1))
        around(ck(hold(w)), numbers(3, 3)).square().sum().backward()
        grads.append(w.grad)
    assert_same(*grads)


@EACH
def test_captured_and_nothing_else(hold: Callable[[Tensor], Fun]) -> None:
    """No argument that is differentiated."""
    w, x = numbers(3, 3), numbers(3, 3, seed=1)
    with CountOps() as ops:
        actual = grad(lambda w: remat(hold(w))(x).sum())(w)
    assert_same(actual, grad(lambda w: hold(w)(x).sum())(w))
    assert ops["tanh"] + ops["sin"] >= 2  # it did run again


# Returned as they are.


RETURNED = {
    "alone": lambda w: lambda x: w,
    "with what was computed": lambda w: lambda x: (w, block(x, w)),
    "twice": lambda w: lambda x: [w, x.sin(), w],
    "with an argument": lambda w: lambda x: {"x": x, "w": w, "y": x * w},
    "a view": lambda w: lambda x: (w.t(), w[0], x.sin()),
    "from an inner remat": lambda w: lambda x: (remat(lambda x: (w, x.sin()))(x), w),
    "detached": lambda w: lambda x: (w.detach(), w, x.sin()),
    "unread": lambda w: (lambda h: lambda x: (h.w, x.sin()))(Holder(w=w)),
}


@pytest.mark.parametrize("hold", RETURNED.values(), ids=RETURNED)
@SOME
def test_returned_as_they_are(hold: Callable[[Tensor], Any], transform: str) -> None:
    x = numbers(3, 3, seed=1)

    def fun(ck: Decorator) -> Fun:
        def of_w(w: Tensor) -> Tensor:
            leaves = optree.tree_leaves(ck(hold(w))(x * w.sum()))
            return sum(((y * (i + 1)).sin() for i, y in enumerate(leaves)), torch.zeros(3, 3).double())

        return of_w

    w = numbers(3, 3)
    assert_same(TRANSFORMS[transform](fun(remat), w), TRANSFORMS[transform](fun(plain), w))


def test_what_is_returned_as_it_is_stays_the_same_object() -> None:
    w, x = leaf(numbers(3)), leaf(numbers(3))
    for out in (remat(lambda x: (w, x, w, x.sin()))(x), remat(lambda x: (w, x, w))(x)):
        assert out[0] is w
        assert out[1] is x
        assert out[2] is w


@pytest.mark.parametrize("extra", [plain, torch.dropout, "function"], ids=["plain", "dropout", "function"])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["no policy", "dots"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("outer", ["vmap", "grad"])
def test_a_dict_holds_the_parameters_of_a_module_for_an_inner_gradient(
    extra: Any, policy: Any, nested: bool, outer: str
) -> None:
    """The step of MAML. `grad` finds the parameters in the dict, `functional_call` puts them into the module."""
    model = nn.Linear(3, 3).double()
    parameters = dict(model.named_parameters())
    ways: dict[Any, Fun] = {plain: plain, torch.dropout: lambda y: torch.dropout(y, 0.5, True)}
    last = ways.get(extra, lambda y: New.apply(y, y))

    def loss(p: Any, x: Tensor) -> Tensor:
        return last(functional_call(model, p, (x,))).square().mean()

    def task(x: Tensor) -> Tensor:
        gradients = grad(loss)(parameters, x)
        return loss({name: p - 0.1 * gradients[name] for name, p in parameters.items()}, x)

    def run(decorator: Any) -> Any:
        torch.manual_seed(0)
        fun, xs = decorator(decorator(task) if nested else task), numbers(2, 3, 3)
        total = vmap(fun, randomness="different")(xs) if outer == "vmap" else grad(fun)(xs[0])
        return torch.autograd.grad(total.sum(), list(parameters.values()))

    assert_same(run(remat(policy=policy)), run(plain))


# Straight into an autograd.Function: at the base no torch function is seen that reads them.


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = g * (1 - torch.tanh(x @ w) ** 2)
        return g @ w.t(), x.t() @ g


class OldOnce(Old):
    backward = once_differentiable(Old.backward)


class New(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    backward = Old.backward

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dw: Tensor) -> Tensor:
        x, w = ctx.saved_tensors
        return (1 - torch.tanh(x @ w) ** 2) * (dx @ w + x @ dw)


STRAIGHT = {
    "captured": lambda f, w: lambda x: f(x, w),
    "captured first": lambda f, w: lambda x: f(w, x),
    "both captured": lambda f, w: lambda x: f(w, w) * x,
    "at depth": lambda f, w: (lambda h: lambda x: f(x, h.inner.w))(Holder(inner=Holder(w=w))),
    "in a list": lambda f, w: (lambda ws: lambda x: f(x, ws[0]))([w]),
    "in a tuple": lambda f, w: (lambda ws: lambda x: f(x, ws[0]))((w,)),
    "in a named tuple": lambda f, w: (lambda p: lambda x: f(x, p.b))(Pair(1, w)),
    "a keyword of a partial": lambda f, w: (lambda p: lambda x: p(x))(functools.partial(lambda x, w: f(x, w), w=w)),
    "and also read": lambda f, w: lambda x: f(x, w) * w.sin(),
    "twice": lambda f, w: lambda x: f(f(x, w), w),
    "a module's": lambda f, w: (lambda m: lambda x: f(x, m.w))(Layer(w)),
    "remat inside": lambda f, w: lambda x: remat(lambda x: f(x, w))(x).sin(),
}
EACH_STRAIGHT = pytest.mark.parametrize("hold", STRAIGHT.values(), ids=STRAIGHT)


@EACH_STRAIGHT
@pytest.mark.parametrize("function", [Old, OldOnce, New])
@pytest.mark.parametrize("from_leaf", [True, False])
def test_straight_into_an_autograd_function_at_the_base(hold: Any, function: Any, from_leaf: bool) -> None:
    grads = []
    for ck in (remat, plain):
        source = leaf(numbers(3, 3))
        w = source if from_leaf else source.sin()
        x = leaf(numbers(3, 3, seed=1))
        ck(hold(function.apply, w))(x).sin().sum().backward()
        grads.append((x.grad, source.grad))
    assert_same(*grads)


@pytest.mark.parametrize("transform", [t for t in TRANSFORMS if "forward AD" in t])
def test_an_autograd_function_with_a_jvp(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        return New.apply(x, 2 * x).cos()

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](remat(fun), x), TRANSFORMS[transform](fun, x))


AROUND_ADJOINT = {
    "remat": remat,
    "a policy": remat(policy=policies.dots_saveable),
    "nested": lambda fun: remat(lambda x: remat(fun)(x)),
}


WAYS_TO_GIVE: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "read inside": lambda net: lambda x: Adjoint.apply(net, x, *net.parameters()).sin(),
    "in a cell": lambda net: (lambda ps: lambda x: Adjoint.apply(net, x, *ps).sin())(tuple(net.parameters())),
    "in a partial": lambda net: functools.partial(
        lambda x, ps: Adjoint.apply(net, x, *ps).sin(), ps=tuple(net.parameters())
    ),
}


@pytest.mark.parametrize("give", WAYS_TO_GIVE)
@pytest.mark.parametrize("around", AROUND_ADJOINT.values(), ids=AROUND_ADJOINT)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_a_backward_that_differentiates_a_module(around: Decorator, hooked: bool, order: int, give: str) -> None:
    """In the backward pass of the rerun, the module has the parameters that the rerun gave to the function."""
    results = []
    for ck in (around, plain):
        net, x = with_constants(nn.Sequential(nn.Linear(3, 3).double(), nn.Tanh())), leaf(numbers(2, 3))
        for p in net.parameters() if hooked else ():
            p.register_hook(Tensor.clone)
        inputs = x, *net.parameters()
        y = ck(WAYS_TO_GIVE[give](net))(x).square().sum()
        grads = torch.autograd.grad(y, inputs, create_graph=order == 2)
        second = torch.autograd.grad(sum(g.cos().sum() for g in grads), inputs) if order == 2 else ()
        results.append((grads, second, dict(net.named_parameters())))
    assert_same(*results)


class CountsBackwards(torch.autograd.Function):
    """The identity. Its backward writes to a buffer."""

    @staticmethod
    def forward(ctx: Any, norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        ctx.norm = norm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.norm.num_batches_tracked.add_(10)
        return None, g


def test_a_backward_that_writes_to_a_buffer() -> None:
    """The forward writes to it too, so reruns work on a copy. That is in place only while the function runs."""
    counts = []
    for ck in (remat, plain):
        norm = nn.BatchNorm1d(3).double()
        ck(lambda x, norm=norm: CountsBackwards.apply(norm, norm(x)).sin())(leaf(numbers(4, 3))).sum().backward()
        counts.append(norm.num_batches_tracked.item())
    assert counts == [11, 11]


@pytest.mark.parametrize("around", AROUND_ADJOINT.values(), ids=AROUND_ADJOINT)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_that_accumulates_into_parameters(around: Decorator, hooked: bool) -> None:
    results = []
    for ck in (around, plain):
        net, x = with_constants(nn.Linear(3, 3).double()), leaf(numbers(2, 3))
        for p in net.parameters() if hooked else ():
            p.register_hook(lambda g: g if g is None else g.clone())
        ck(lambda x, net=net: Reversible.apply(net, x.sin()).sin())(x).sum().backward()
        results.append([p.grad for p in (x, *net.parameters())])
    assert_same(*results)


@EACH_STRAIGHT
@pytest.mark.parametrize("function", [Old, New])
def test_straight_into_an_autograd_function_second_order(hold: Any, function: Any) -> None:
    grads = []
    for ck in (remat, plain):
        w, x = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        first = torch.autograd.grad(ck(hold(function.apply, w))(x).sin().sum(), (x, w), create_graph=True)
        grads.append((first, torch.autograd.grad(sum(g.cos().sum() for g in first), (x, w))))
    assert_same(*grads)


@EACH_STRAIGHT
@pytest.mark.parametrize("transform", [t for t in SOME_TRANSFORMS if "func" not in t])
def test_straight_into_an_autograd_function_under_transforms(hold: Any, transform: str) -> None:
    x, w = numbers(3, 3, seed=1), numbers(3, 3)
    results = [TRANSFORMS[transform](lambda w: ck(hold(New.apply, w))(x), w) for ck in (remat, plain)]
    assert_same(*results)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch's linearize
def test_a_constant_in_a_cell_of_a_function_in_a_dict(transform: str) -> None:
    """No place holds it, and a transform gets it directly."""

    def run(ck: Decorator) -> Any:
        c = numbers(3, 3, seed=1)
        functions = {0: lambda: grad(lambda z: z.square().sin().sum())(c)}
        return TRANSFORMS[transform](ck(lambda x: functions[0]() * x.sin()), numbers(3, 3))

    assert_same(run(remat), run(plain))


@EACH_STRAIGHT
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_straight_into_an_autograd_function_from_below_a_transform(hold: Any, around: Callable[..., Tensor]) -> None:
    grads = []
    for ck in (remat, plain):
        w = leaf(numbers(3, 3))
        around(ck(hold(New.apply, w)), numbers(3, 3, seed=1)).square().sum().backward()
        grads.append(w.grad)
    assert_same(*grads)


@pytest.mark.parametrize("transform", ["grad", "grad(grad)", "vmap(grad)", "jvp(grad)"])
def test_straight_into_an_autograd_function_out_of_reach(transform: str) -> None:
    def fun(w: Tensor, ck: Any) -> Tensor:
        held = itertools.repeat(w)
        return ck(lambda x: New.apply(x, next(held)))(x)

    x, w = numbers(3, 3, seed=1), numbers(3, 3)
    results = [TRANSFORMS[transform](functools.partial(fun, ck=ck), w) for ck in (remat, plain)]
    assert_same(*results)


class ReadInBackward(torch.autograd.Function):
    """A gradient reversal layer with a factor that only its backward reads."""

    held: Any = types.SimpleNamespace()
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ReadInBackward.held.factor


def read_in_a_hook(x: Tensor) -> Tensor:
    y = x.clone()
    y.register_hook(lambda g: g * ReadInBackward.held.factor)
    return y


FIRST: dict[str, Any] = {
    "autograd": lambda f: lambda x: torch.autograd.grad(f(x).sum(), x, create_graph=True)[0],
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum())),
    "jvp(grad)": lambda f: lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (x,))[1],
}
SECOND: dict[str, Any] = {
    "backward": lambda f: lambda factor: torch.autograd.grad(f(leaf(factor)), ReadInBackward.held.factor)[0],
    "grad": grad,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "fun"),
    [
        *itertools.product(["grad", "vmap(grad)"], SECOND, [ReadInBackward.apply, read_in_a_hook]),
        *itertools.product(["jvp(grad)"], SECOND, [read_in_a_hook]),
        *itertools.product(["autograd"], ["backward"], [ReadInBackward.apply, read_in_a_hook]),
    ],
)
def test_what_only_a_backward_reads(first: str, second: str, fun: Any, requires_grad: bool) -> None:
    """It has a derivative in second order only, where no forward has depended on it."""

    def run(ck: Any) -> Any:
        x = numbers(3, 2).requires_grad_(requires_grad or first == "autograd")

        def loss(factor: Tensor) -> Tensor:
            ReadInBackward.held.factor = factor
            return FIRST[first](ck(lambda x: fun(x).sin()))(x).square().sum()

        return SECOND[second](loss)(numbers(1).sum())

    expected = run(plain)
    if first == "autograd":
        assert_same(run(lambda f: lambda x: checkpoint(f, x, use_reentrant=False)), expected)
    if not requires_grad and first != "autograd":  # nothing else is differentiated there
        assert_same(run(remat), expected)
        return
    with pytest.raises(RematError, match=r"a hook or the backward of an autograd.Function reads it. Pass it as an arg"):
        run(remat)


VIEWS_OF_A_WEIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": lambda x, w: x @ w.t(),
    "a slice": lambda x, w: x[:, :2] @ w[:2],
    "chunks": lambda x, w: sum(x[:, :1] * c for c in w.chunk(3)),  # type: ignore[misc,return-value]
    "in no_grad": lambda x, w: x * torch.no_grad()(lambda: w.t() * 2)() @ w,
    "of the input": lambda x, w: x * torch.no_grad()(lambda: x.t() * 2)() @ w,
}


@pytest.mark.parametrize("outside", [torch.no_grad, contextlib.nullcontext])
@pytest.mark.parametrize("transform", [t for t in SOME_TRANSFORMS if "func" not in t and "backward" not in t])
@pytest.mark.parametrize("view", VIEWS_OF_A_WEIGHT)
def test_views_that_nothing_records(view: str, transform: str, outside: Any) -> None:
    """They say that they require grad, if what they view is a leaf that does."""
    held = types.SimpleNamespace(w=leaf(numbers(3, 3, seed=1)))

    def run(ck: Any) -> Any:
        with outside():
            return TRANSFORMS[transform](ck(lambda x: VIEWS_OF_A_WEIGHT[view](x, held.w)), numbers(3, 3))

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("view", VIEWS_OF_A_WEIGHT)
def test_views_of_leaves_that_are_views(view: str) -> None:
    def run(ck: Any) -> Any:
        flat = numbers(18)
        x, w = flat[:9].view(3, 3).requires_grad_(), flat[9:].view(3, 3).t().requires_grad_()
        ck(lambda x: VIEWS_OF_A_WEIGHT[view](x, w))(x).square().sum().backward()
        return x.grad, w.grad

    assert_same(run(remat), run(plain))


# As they were when the function was called.


def _moves_cell(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    def move() -> None:
        nonlocal w
        w = later

    return lambda x: block(x, w), move


def _deletes_cell(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    def move() -> None:
        nonlocal w
        del w

    del later
    return lambda x: block(x, w), move


def _moves_cell_of_inner(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    fun, move = _moves_cell(w, later)
    return lambda x: fun(x), move


def _moves_cell_of_partial(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    fun, move = _moves_cell(w, later)
    return functools.partial(lambda f, x: f(x), fun), move


def _moves_cell_of_method(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    fun, move = _moves_cell(w, later)
    return type("Made", (), {"fun": lambda self, x: fun(x)})().fun, move


def _moves_cell_of_inner_remat(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    fun, move = _moves_cell(w, later)
    inner = remat(fun)
    return lambda x: inner(x).sin(), move


def _moves_function(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    inner = in_a_cell(w)

    def move() -> None:
        nonlocal inner
        inner = in_a_cell(later)

    return lambda x: inner(x), move


def _moves_number(w: Tensor, later: Tensor) -> tuple[Fun, Callable[[], None]]:
    k = 2.0

    def move() -> None:
        nonlocal k
        k = 3.0

    del later
    return lambda x: block(x, w) * k, move


CELLS = {
    f.__name__.removeprefix("_").replace("_", " "): f
    for f in (
        _moves_cell,
        _deletes_cell,
        _moves_cell_of_inner,
        _moves_cell_of_partial,
        _moves_cell_of_method,
        _moves_cell_of_inner_remat,
        _moves_function,
        _moves_number,
    )
}


@pytest.mark.parametrize("make", CELLS.values(), ids=CELLS)
@SOME
def test_cells_count_as_they_were_at_the_call(make: Any, transform: str) -> None:
    x, w = numbers(3, 3, seed=1), numbers(3, 3)

    def fun(ck: Decorator) -> Fun:
        def of_w(w: Tensor) -> Tensor:
            f, move = make(w, w.detach() * 3)
            y = ck(f)(x)
            move()
            return y

        return of_w

    assert_same(TRANSFORMS[transform](fun(remat), w), TRANSFORMS[transform](fun(plain), w))


def test_a_loop_variable_counts_as_it_was_at_the_call() -> None:
    def loop(ck: Decorator) -> Any:
        def fun(ws: list[Tensor], x: Tensor) -> Tensor:
            for w in ws:
                x = ck(lambda x: torch.tanh(x @ w))(x)
            return x.sum()

        return fun

    ws, x = [numbers(3, 3, seed=i) for i in range(4)], numbers(3, 3)
    assert_same(grad(loop(remat), (0, 1))(ws, x), grad(loop(plain), (0, 1))(ws, x))
    batch = torch.stack([x, x.sin()])
    assert_same(*(vmap(grad(loop(ck), (0, 1)), in_dims=(None, 0))(ws, batch) for ck in (remat, plain)))
    grads = []
    for ck in (remat, plain):
        leaves = [leaf(w) for w in ws]
        loop(ck)(leaves, x).backward()
        grads.append([w.grad for w in leaves])
    assert_same(*grads)


# What is changed in other places before the rerun is right or an error, never silently wrong.


def _list(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    ws = [w]
    return lambda x: block(x, ws[0]), lambda t: ws.__setitem__(0, t)


def _dict(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    ws = {"w": w}
    return lambda x: block(x, ws["w"]), lambda t: ws.update(w=t)


def _attribute(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    holder = Holder(w=w)
    return lambda x: block(x, holder.w), lambda t: setattr(holder, "w", t)


def _self(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    holder = Holder(w=w)
    return holder.method, lambda t: setattr(holder, "w", t)


def _global(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    namespace = {"block": block, "w": w}
    exec("def fun(x): return block(x, w)", namespace)
    return namespace["fun"], lambda t: namespace.update(w=t)


def _module(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    layer = Layer(w)
    return layer, lambda t: setattr(layer, "w", t)


def _straight_attribute(w: Tensor) -> tuple[Fun, Callable[[Tensor], None]]:
    holder = Holder(w=w)
    return lambda x: New.apply(x, holder.w), lambda t: setattr(holder, "w", t)


PLACES = {f.__name__[1:]: f for f in (_list, _dict, _attribute, _self, _global, _module, _straight_attribute)}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "jvp(grad)", "grad(grad)"])
def test_a_place_that_was_filled_anew_is_right_or_an_error(place: Any, transform: str, requires_grad: bool) -> None:
    other = numbers(3, 3, seed=2).requires_grad_(requires_grad)

    def fun(ck: Decorator) -> Fun:
        def of_x(x: Tensor) -> Tensor:
            f, fill = place(x.cos())
            y = ck(f)(x)
            fill(other)
            return y

        return of_x

    x = numbers(3, 3)
    expected = TRANSFORMS[transform](fun(plain), x)
    try:
        actual = TRANSFORMS[transform](fun(remat), x)
    except (CheckpointError, RematError) as error:
        assert "fun" in str(error) or "lambda" in str(error) or "Holder" in str(error) or "Layer" in str(error)
    else:
        assert_same(actual, expected)
    assert other.grad is None


def test_functions_that_call_each_other() -> None:
    def even(n: int, x: Tensor) -> Tensor:
        return x if n == 0 else odd(n - 1, x.sin() * w)

    def odd(n: int, x: Tensor) -> Tensor:
        return x.cos() if n == 0 else even(n - 1, x)

    w = leaf(numbers(3))
    x = numbers(3)
    expected = torch.autograd.grad(even(4, x).sum(), w)
    y = remat(even)(4, x).sum()
    assert_same(torch.autograd.grad(y, w), expected)
    y = remat(even)(4, x).sum()
    kept, w = w, numbers(3, seed=3)  # a new w, before the rerun
    assert_same(torch.autograd.grad(y, kept), expected)


# Changed in place between call and rerun: as with the plain function, an error.


@pytest.mark.parametrize("hold", [in_a_cell, HOLD["a list"], HOLD["an attribute"], HOLD["a module's attribute"]])
def test_a_captured_tensor_that_is_changed_in_place_before_the_rerun(hold: Callable[[Tensor], Fun]) -> None:
    for ck in (remat, plain):
        w, x = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        y = ck(hold(w))(x).sum()
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


# Hooks.


@EACH
def test_hooks_on_captured_tensors(hold: Callable[[Tensor], Fun]) -> None:
    """Called as often, and with the same, as without remat."""
    results = []
    for ck in (remat, plain):
        seen: dict[str, list[Tensor]] = {"leaf": [], "inner": [], "accumulated": []}
        source = leaf(numbers(3, 3))
        source.register_hook(lambda g: seen["leaf"].append(g.clone()))
        source.register_post_accumulate_grad_hook(lambda t: seen["accumulated"].append(t.grad.clone()))
        w = source.sin()
        w.register_hook(lambda g: seen["inner"].append(g.clone()))
        fun = ck(hold(w))
        (fun(numbers(3, 3, seed=1)) * fun(numbers(3, 3, seed=2))).sum().backward()
        results.append(seen)
    assert [len(s) for s in results[0].values()] == [1, 1, 1]
    assert_same(*results)


@pytest.mark.parametrize("function", [Old, New])
def test_hooks_on_tensors_that_go_straight_into_an_autograd_function(function: Any) -> None:
    results = []
    for ck in (remat, plain):
        seen: list[Tensor] = []
        w, x = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        w.register_hook(seen.append)
        inner = w * 1
        inner.register_hook(seen.append)
        ck(lambda x: function.apply(x, w) * function.apply(x, inner))(x).sum().backward()
        results.append(seen)
    assert len(results[0]) == 2
    assert_same(*results)


def test_a_hook_that_changes_the_gradient() -> None:
    grads = []
    for ck in (remat, plain):
        w = leaf(numbers(3, 3))
        w.register_hook(lambda g: g * 2)
        ck(lambda x: block(x, w))(numbers(3, 3)).sum().backward()
        grads.append(w.grad)
    assert_same(*grads)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_on_what_the_function_differentiates(inside: bool, captured: bool) -> None:
    """A derivative inside calls it too. `inside`: whether the function sets it on a tensor of its own."""

    def run(ck: Any, x: Tensor, scale: Any) -> Any:
        if not inside:
            x.register_hook(scale)

        def fun(*given: Tensor) -> Tensor:
            t = x if captured else given[0]
            if inside:
                t = t * 1
                t.register_hook(scale)
            return torch.autograd.grad((t**3).sum(), t, create_graph=True)[0].sum()

        ck(fun)(*(() if captured else (x,))).backward()
        return x.grad

    def scale(g: Tensor) -> Tensor:
        return g * 0.5

    expected = run(plain, leaf(numbers(3)), scale)
    assert_same(run(lambda f: functools.partial(checkpoint, f, use_reentrant=False), leaf(numbers(3)), scale), expected)
    if inside:
        assert_same(run(remat, leaf(numbers(3)), scale), expected)
        return
    with pytest.raises(RematError, match=r"of shape \[3\], torch.float64 from outside, which has a hook.* Pass a copy"):
        run(remat, leaf(numbers(3)), scale)
    of_torch = types.FunctionType(scale.__code__, {**globals(), "__name__": "torch.tools"})
    run(remat, leaf(numbers(3)), of_torch)  # a meter's: it changes no gradients


def test_a_hook_beside_a_leaf_that_the_function_makes() -> None:
    """A result that depends on that leaf alone keeps its own graph, with what that has saved."""

    def fun(x: Tensor) -> Tensor:
        (x * 1.0).register_hook(lambda g: g)
        return torch.ones(3).requires_grad_().sin()

    x = leaf(numbers(3))
    remat(fun)(x).sum().backward()
    assert x.grad is None


def test_a_hook_set_inside_runs_once_per_backward() -> None:
    seen: list[Tensor] = []

    @remat
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(seen.append)
        return y.cos()

    x = leaf(numbers(3))
    fun(x).sum().backward()
    assert len(seen) == 1
    assert_same(seen[0], -x.detach().sin().sin())


def test_hooks_of_modules() -> None:
    for ck, runs in ((remat, 2), (plain, 1)):
        layer, seen = nn.Linear(3, 3), {"forward": 0, "backward": 0}
        layer.register_forward_hook(lambda *_: seen.update(forward=seen["forward"] + 1))
        layer.register_full_backward_hook(lambda *_: seen.update(backward=seen["backward"] + 1))
        ck(lambda x: layer(x))(torch.randn(2, 3, requires_grad=True)).sum().backward()
        assert seen == {"forward": runs, "backward": 1}


def test_a_view_taken_before_its_base_was_changed() -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        base = x.detach().sin()
        base.add_(x)
        row = base[1]
        base[0] = 2 * x[0]

        def outer() -> Tensor:
            total = ck(lambda: base.sum())()
            return total * ck(lambda: row.amax(0) * total)()

        return ck(outer)()

    for transform in (grad, lambda f: lambda x: torch.autograd.grad(f(x), x)[0]):
        x = leaf(numbers(3, 3))
        assert_same(transform(lambda x: loss(remat, x))(x), transform(lambda x: loss(plain, x))(x))


def test_the_tangent_of_a_jvp_inside_is_a_result() -> None:
    def loss(ck: Any, x: Tensor, z: Tensor) -> Tensor:
        def fun(s: Tensor) -> Any:
            tangent = jvp(lambda t: torch.sin(t) * x, (s,), (torch.cos(s),))[1]
            return tangent[..., 1:].sum() * 1, tangent

        total, tangent = ck(fun)(x.sum())
        return total + (tangent * z).sum() * z

    def transformed(ck: Any) -> Fun:
        inner = grad(lambda z, x: loss(ck, x, z))
        return grad(lambda x: inner(torch.ones((), dtype=x.dtype), x).sum())

    x = numbers(3)
    assert_same(transformed(remat)(x), transformed(plain)(x))


def test_the_tangent_of_a_jvp_inside_is_a_result_where_nothing_in_it_is_differentiated() -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        def fun(s: Tensor) -> Tensor:
            tangent = jvp(lambda t: torch.sin(t) * s, (s,), (torch.cos(s),))[1]
            held = Holder(w=tangent, b=x)
            return ck(lambda h: torch.tanh(h * held.w + held.b))(s * 2)

        return ck(fun)(numbers(3, seed=1)).sum()

    x = numbers(3)
    assert_same(grad(lambda x: loss(remat, x))(x), grad(lambda x: loss(plain, x))(x))


@pytest.mark.parametrize("hold", [lambda w: {"w": (w,)}, lambda w: {"w": w}], ids=["in a tuple", "in a dict"])
def test_an_argument_that_is_captured_too_and_goes_straight_into_an_autograd_function(hold: Any) -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        w = torch.zeros_like(x)
        w.add_(x)
        held = hold(w)

        def first() -> Tensor:
            found = held["w"]
            return found[0] if isinstance(found, tuple) else found

        return (ck(lambda w, v: ck(New.apply)(first(), v))(w, w).sum() + w.sum()).sin()

    grads = []
    for ck in (remat, plain):
        x = leaf(numbers(3, 3))
        grad(lambda x, ck=ck: loss(ck, x))(x).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_a_captured_tensor_that_is_returned_as_it_is_gets_no_derivative_of_the_arguments() -> None:
    """Torch has no derivative for the `copy` that `functionalize` makes of an assignment."""

    def fun(ck: Any, x: Tensor, y: Tensor) -> Tensor:
        y = y + 0.5
        y[0] = torch.sin(x)
        return ck(lambda y: (x, y.argsort(-1)))(y)[0] * 2

    args = numbers(3), numbers(3, 3)
    result = jacrev(functionalize(lambda x, y: fun(remat, x, y)))(*args)
    assert_same(result, jacrev(functionalize(lambda x, y: fun(plain, x, y)))(*args))


def test_a_view_of_a_captured_view_that_functionalize_makes_anew() -> None:
    def fun(view: Fun, x: Tensor) -> Tensor:
        changed = x * 1
        changed += x
        diagonal = view(changed.diagonal())
        return remat(lambda: diagonal[None].sin())().sum() + diagonal.sin().sum()

    def gradient(fun: Fun) -> Tensor:
        return torch.autograd.grad(fun(x), x)[0]

    x = leaf(numbers(3, 3))
    with pytest.raises(RematError, match=r"let the function read view\.clone\(\)"):
        gradient(functionalize(functools.partial(fun, lambda view: [view.sin(), view][1])))
    assert_same(gradient(functionalize(functools.partial(fun, torch.clone))), gradient(functools.partial(fun, plain)))


def test_an_argument_of_an_inner_function_that_it_finds_in_a_container_too() -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        held = {"x": (x,)}

        def inner(xs: Any) -> Any:
            return held["x"][0].cumsum(0) * torch.sin(xs[0])

        return ck(lambda: ck(inner)([held["x"][0]]))().sum()

    x = numbers(3)
    assert_same(grad(lambda x: loss(remat, x))(x), grad(lambda x: loss(plain, x))(x))


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "grad(grad)"])
def test_an_inner_gradient_of_a_tensor_that_is_in_a_second_container_farther_away(transform: str) -> None:
    def fun(ck: Any, x: Tensor) -> Tensor:
        w = x.cos()
        held = Holder(w=[w], far={"a": {"b": {"c": [w]}}})
        return ck(lambda x: x * grad(lambda w: (w.sin() * x).sum())(held.far["a"]["b"]["c"][0]))(x)

    actual, expected = (TRANSFORMS[transform](lambda x, ck=ck: fun(ck, x), numbers(3)) for ck in (remat, plain))
    assert_same(actual, expected)


@pytest.mark.parametrize("nest", [remat, lambda fun: remat(lambda x: remat(fun)(x))])
def test_a_replica_runs_forward_in_a_thread_of_its_own(nest: Any) -> None:
    """As in `nn.DataParallel`. The sequence numbers of the weights are of another thread, and may be any."""
    w, x = leaf(numbers(3, 3)), leaf(numbers(3))
    for _ in range(1000):
        w * 2
    replica = Holder(w=w.exp())
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(nest(replica.method), x).result()
    expected = torch.autograd.grad(replica.method(x).sum(), [x, w], retain_graph=True)
    assert_same(torch.autograd.grad(out.sum(), [x, w]), expected)


def test_the_search_for_captured_tensors_ends_in_a_long_list() -> None:
    held = Holder(samples=list(range(200_000)), vocabulary={str(i): i for i in range(200_000)}, w=leaf(numbers(3)))
    fun = remat(lambda x: (x * held.w).sin())
    fun(leaf(numbers(3))).sum().backward()
    tracemalloc.start()
    try:
        fun(leaf(numbers(3))).sum().backward()
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # to list the samples once takes ten times as much
    finally:
        tracemalloc.stop()


def test_what_an_inner_function_finds_in_a_tuple_and_returns_as_it_is() -> None:
    def fun(ck: Any, x: Tensor) -> Any:
        held = ck(lambda x: (x.movedim(0, -1).contiguous(), torch.chunk(x, 2)[0]))(x)

        def outer() -> Tensor:
            found = ck(lambda: (ck(lambda y: y)(held[0]), held[1]))()
            return found[0].movedim(0, -1).contiguous()

        y = ck(outer)()
        return held[1], y, held[1].index_add(0, torch.tensor([1]), y[:1])

    results = []
    for ck in (remat, plain):
        out, pull = vjp(lambda x, ck=ck: fun(ck, x), numbers(3))
        results.append(pull(tuple(t.cos() for t in out)))
    assert_same(*results)


def test_what_is_passed_to_inner_functions_alone_is_not_read() -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        held = {"x": (x,)}
        y, z, h = x.clone(), x + 0.5, torch.sin(x)

        def outer(a: Tensor, b: Tensor) -> Tensor:
            found = ck(lambda _: (z, x, h))(h)

            def inner(d: Any, e: Tensor = found[1]) -> Tensor:
                return ck(lambda v, w: (held["x"][0], y, 2))([d["z"], b], z)[0]

            ck(inner)({"z": found[0]})
            return ck(functools.partial(torch.addcmul, found[2], found[2]))(found[0])

        return (h + ck(outer)(h, x)).sum()

    x = numbers(1).sum()
    assert_same(grad(lambda x: loss(remat, x))(x), grad(lambda x: loss(plain, x))(x))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch's linearize
def test_what_linearize_writes_down_depends_on_captured_parameters() -> None:
    layer, x = nn.Linear(3, 3).double(), numbers(3, 3)
    pushes = [linearize(grad(lambda x, ck=ck: ck(layer)(x).sin().sum()), x)[1] for ck in (remat, plain)]
    results = [push(x.cos()) for push in pushes]
    assert results[0].requires_grad
    assert results[1].requires_grad
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch's linearize
def test_the_tangents_that_an_autograd_function_is_given_are_results() -> None:
    def loss(ck: Any, x: Tensor) -> Tensor:
        y = ck(lambda a, b: torch.tanh(ck(lambda a: New.apply(a, b))(a)))(torch.sin(x), torch.sin(x))
        return (y * y).sum()

    x = numbers(3, 3)
    pushes = [linearize(grad(lambda x, ck=ck: loss(ck, x)), x)[1] for ck in (remat, plain)]
    assert_same(pushes[0](x.cos()), pushes[1](x.cos()))


INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grad": lambda w, x: grad(lambda w: (w.sin() * x).sum())(w),
    "vmap": lambda w, x: vmap(lambda w: w.sin() * x.sum())(w),
    "jvp": lambda w, x: jvp(lambda w: w.sin() * x, (w,), (x,))[1],
    "vjp": lambda w, x: vjp(lambda w: w.sin() * x, w)[1](x)[0],
    "hessian": lambda w, x: hessian(lambda w: (w.sin() * x).sum())(w).sum(0),
}


@pytest.mark.parametrize("where", ["argument", "cell", "attribute"])
@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_transform_inside_differentiates(inside: str, where: str) -> None:
    """It wraps a tensor, for which another one stands in the rerun, out of sight."""

    def gradients(ck: Any) -> Any:
        calls = Seen()
        w, x = leaf(numbers(3)), leaf(numbers(3, seed=1))
        box = types.SimpleNamespace(w=w)

        def fun(x: Tensor, *given: Tensor) -> Tensor:
            calls.append(1)
            return INSIDE[inside](*(given or (w if where == "cell" else box.w,)), x)

        y = ck(fun)(x, *[w][: where == "argument"])
        return torch.autograd.grad(y.sum(), [x, w])

    assert_same(gradients(remat), gradients(plain))


def test_hooks_of_a_view_are_moved_while_a_run_looks_on() -> None:
    """Autograd does that with a lock held, on the way into an autograd.Function."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    def loss(ck: Any, x: Tensor) -> Tensor:
        base = x.sin()
        view = base[0]
        view.register_hook(lambda g: g * 3)
        base.mul_(2)
        return ck(lambda: ck(lambda: Twice.apply(view))() + x)().sum()

    x, y = leaf(numbers(3, 3)), leaf(numbers(3, 3))
    loss(remat, x).backward()
    loss(plain, y).backward()
    assert_same(x.grad, y.grad)


@SOME
def test_a_class_among_the_arguments_of_a_torch_call(transform: str) -> None:
    """The forward meets the captured tensor for the first time there, and the rerun knows it."""
    w = leaf(numbers(3, 3))

    def of(ck: Decorator) -> Any:
        return TRANSFORMS[transform](ck(lambda x: w.type(torch.FloatTensor).double() * x.sin()), numbers(3, 3))

    assert_same(of(remat), of(plain))


@SOME
@pytest.mark.parametrize("name", ["__rsub__", "__rpow__", "__rtruediv__"])
def test_methods_of_torch_in_a_cell(name: str, transform: str) -> None:
    """They are functions of Python's that refer to themselves, and stay the same."""
    method = getattr(Tensor, name)

    def fun(x: Tensor) -> Tensor:
        y = x + 3.0
        y += 1.0
        return method(y, 2.0)

    def of(ck: Decorator) -> Any:
        return TRANSFORMS[transform](ck(fun), numbers(3, 3))

    assert_same(of(remat), of(plain))


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad of jvp", "jvp(grad)"])
@pytest.mark.parametrize("inside", [grad(lambda t: t.sin().sum()), jacrev(torch.sin), lambda t: t.detach().cos()])
def test_a_constant_that_is_an_argument_and_in_a_cell(inside: Any, transform: str) -> None:
    """A transform inside gets it from the cell."""
    constant = numbers(3, seed=1)

    def loss(x: Tensor, ck: Any) -> Tensor:
        fun = ck(lambda c, x: (inside(constant) @ x.diag(), c))
        c, y = fun(constant, x)
        c, z = fun(c, x.cos())
        return (y.sum() + z.sum() + c.sum()).sin()

    def derivative(ck: Any) -> Any:
        if transform == "grad of jvp":
            return grad(lambda x: jvp(lambda x: loss(x, ck), (x,), (x.cos(),))[1])(numbers(3))
        return TRANSFORMS[transform](functools.partial(loss, ck=ck), numbers(3))

    assert_same(derivative(remat), derivative(plain))


COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", [".backward()", "double backward", "grad", "jvp(grad)"])
def test_a_comparison_with_a_parameter(compare: Any, transform: str) -> None:
    """Python asks the right operand first if that is a parameter. What a rerun finds in its place is none."""
    threshold = nn.Parameter(numbers(3))

    def fun(x: Tensor) -> Tensor:
        return torch.where(compare(x, threshold), x.sin(), x.cos()) * torch.where(compare(threshold, x), x, 1.0)

    assert_same(TRANSFORMS[transform](remat(fun), numbers(3)), TRANSFORMS[transform](fun, numbers(3)))


# What the fuzzer has found.


def an_argument_that_is_mapped_and_captured(ck: Any, x: Tensor) -> Tensor:
    return vmap(ck(lambda t: torch.tanh(t * x)))(x).sum(0)


def an_argument_that_is_mapped_and_captured_in_remat(ck: Any, x: Tensor) -> Tensor:
    return ck(lambda: torch.sin(vmap(ck(lambda t: torch.tanh(t * x)))(x)))().sum(0)


def inner_gradients_at_what_is_captured(ck: Any, x: Tensor) -> Tensor:
    def fun(v: Tensor) -> Tensor:
        w = ck(lambda: v)()
        u = grad(lambda t: ck(lambda h: torch.sin(h) * w)(t).sum())(w)
        return grad(lambda t: ck(lambda h: torch.sin(h) * u)(t).sum())(u)

    return ck(fun)(x)


def a_captured_one_that_comes_back_as_it_is(ck: Any, x: Tensor) -> Tensor:
    def fun() -> Tensor:
        def inner() -> Tensor:
            torch.zeros_like(x)
            return x

        return x + ck(inner)()

    return torch.sin(ck(lambda: x)()) + ck(fun)()


def made_inside_and_captured_inside(ck: Any, x: Tensor) -> Tensor:
    def fun(x: Tensor) -> Tensor:
        scale = x.detach().abs()
        w = ck(lambda h: torch.addcmul(x, x, h))(x)
        return ck(lambda h: torch.tanh(h * x.sin() + w) * scale)(ck(lambda: w)())

    return ck(fun)(x)


OTHER = numbers(3, 3)


def mapped_below_another_call(ck: Any, x: Tensor) -> Tensor:
    def fun(row: Tensor) -> Tensor:
        held = Holder(w=row)
        y = ck(lambda _: ck(held.method)(OTHER))(row)
        return y + y

    return vmap(fun)(x)


def given_by_a_partial_and_captured(ck: Any, x: Tensor) -> Tensor:
    return ck(functools.partial(lambda v: grad(lambda t: (torch.sin(t) * x).sum())(v["a"]), {"a": x, "b": x}))()


def rebound_inside(ck: Any, x: Tensor) -> Tensor:
    def fun(v: Any, u: Tensor) -> Tensor:
        v = vmap(ck(lambda t: torch.tanh(t * v[1])))(u)
        return v.sum(0)

    return ck(fun)([x, x], x)


def results_of_calls_in_containers(ck: Any, x: Tensor) -> Tensor:
    y = ck(lambda: (ck(lambda: x)(), torch.sin(x)))()
    held = {"a": y[1], "b": (y[0],)}
    z = ck(lambda: ck(lambda: held["a"])())()
    return ck(lambda: z)() + z.clone()


def given_and_captured_and_read_before_a_transform_gets_it(ck: Any, x: Tensor) -> Tensor:
    held = [torch.sin(x)]

    def fun(v: Tensor) -> Tensor:
        v = ck(lambda t: t)(torch.tanh(v))
        return grad(lambda t: (torch.sin(t) * v).sum())(held[0])

    return ck(fun)(held[0])


def given_and_captured_and_read_before_a_nested_call_hands_it_on(ck: Any, x: Tensor) -> Tensor:
    held = [torch.sin(x)]

    def fun(v: Tensor) -> Tensor:
        return ck(lambda u: u * u + grad(lambda t: torch.sin(t).sum())(held[0]))(v)

    return ck(fun)(held[0])


def given_and_captured_and_a_nested_call_reads_both(ck: Any, x: Tensor) -> Tensor:
    held = [torch.sin(x)]
    return ck(lambda v: ck(lambda u, w: (torch.sin(torch.sin(w)), held[0].detach()))(v, v)[0])(held[0])


def returned_by_a_call_inside_as_it_was(ck: Any, x: Tensor) -> Tensor:
    held = [x, x]

    def fun(xs: list[Tensor]) -> Tensor:
        y = torch.tanh(xs[1])
        z = ck(lambda: ck(lambda y: held[1])(y))()
        return y.sin() + z * z

    return ck(fun)(held)


def lists_that_calls_inside_of_calls_read(ck: Any, x: Tensor) -> Tensor:
    def outer(v: list[Tensor], w: list[Tensor]) -> Tensor:
        def middle(_: Tensor) -> Tensor:
            y = torch.cos(x)
            return ck(lambda u: torch.cos(v[0]) * u)(w[0]) + y

        return ck(middle)(v[0])

    return ck(outer)([x, x], [torch.sin(x)])


def in_a_list_that_is_made_inside_and_a_transform_gets_it(ck: Any, x: Tensor) -> Tensor:
    def outer() -> Tensor:
        held = [x]
        return ck(lambda: grad(lambda t: t.sin().sum())(held[0]))()

    return ck(outer)()


FOUND = [
    in_a_list_that_is_made_inside_and_a_transform_gets_it,
    lists_that_calls_inside_of_calls_read,
    returned_by_a_call_inside_as_it_was,
    given_and_captured_and_read_before_a_transform_gets_it,
    given_and_captured_and_read_before_a_nested_call_hands_it_on,
    given_and_captured_and_a_nested_call_reads_both,
    given_by_a_partial_and_captured,
    rebound_inside,
    results_of_calls_in_containers,
    an_argument_that_is_mapped_and_captured,
    an_argument_that_is_mapped_and_captured_in_remat,
    inner_gradients_at_what_is_captured,
    a_captured_one_that_comes_back_as_it_is,
    made_inside_and_captured_inside,
    mapped_below_another_call,
]


@SOME
@pytest.mark.parametrize("program", FOUND, ids=lambda p: p.__name__)
def test_found_by_the_fuzzer(program: Any, transform: str) -> None:
    x = numbers(3, 3) / 2
    expected = TRANSFORMS[transform](lambda x: program(plain, x), x)
    assert_same(TRANSFORMS[transform](lambda x: program(remat, x), x), expected)


def test_what_a_call_inside_gives_back_is_not_its_own() -> None:
    def gradient(ck: Any) -> Tensor:
        def program(x: Tensor, other: Tensor) -> Tensor:
            held = {"a": other}

            def fun(y: Tensor) -> Tensor:
                ck(lambda _, a=held["a"]: (a,))(held["a"])
                return y.sin() * torch.chunk(held["a"], 2)[0].sum()

            return ck(fun)(x)

        return grad(jacfwd(program))(numbers(1).sum(), numbers(3))

    assert_same(gradient(remat), gradient(plain))


def test_a_result_that_a_call_inside_has_captured_is_still_alive() -> None:
    """The rerun makes another tensor in its place."""

    def gradient(ck: Any) -> Any:
        alive = []

        def loss(x: Tensor) -> Tensor:
            def fun() -> tuple[Tensor, Tensor]:
                row = x[0]
                return ck(Holder(w=row))(OTHER), row

            y, row = ck(fun)()
            alive.append(row)
            return (y * row).sum()

        return grad(loss)(numbers(3, 3))

    assert_same(gradient(remat), gradient(plain))


def test_a_captured_view_whose_base_was_changed_in_place() -> None:
    """Autograd makes its node anew when the function reads it, as if the function had made the view."""

    def gradient(ck: Any) -> Any:
        def program(x: Tensor, y: Tensor) -> Tensor:
            base = y + 0.5
            held = [base[1]]
            base[0] = x
            return ck(lambda z: (held[0].sin(), z.cos())[1])(x)

        return grad(program, argnums=(0, 1))(numbers(1).sum(), numbers(3))

    assert_same(gradient(remat), gradient(plain))


def test_a_view_of_an_argument_that_carries_a_tangent_is_returned_under_a_policy() -> None:
    """Under a mode, a view of the tangent has no node of its own."""

    def gradient(ck: Any) -> Tensor:
        x = leaf(numbers(3, 3, 2))
        rows = vmap(lambda y: ck(lambda z: ck(lambda t: t[None])(z)[0])(y), in_dims=2, chunk_size=1)
        values, tangents = jvp(rows, (x,), (x.cos() + 0.5,))
        (values.sin() + tangents.sin()).sum().backward()
        assert x.grad is not None
        return x.grad

    assert_same(gradient(remat(policy=policies.save_ops("sin"))), gradient(plain))


def test_the_identity_of_a_dead_tensor_says_nothing() -> None:
    with Look("f", [], None) as look:
        y = torch.ones(3).sin()
        look.read(y, wrapped_inside=True)
    assert look.has_made(y)
    assert not look.wrapped_inside


def test_what_is_not_differentiated_is_found_in_a_list_by_calls_inside() -> None:
    """An outer rerun puts an operand into the list. The rerun of the inner call finds the original there again."""

    def program(ck: Any, x: Tensor, index: Tensor) -> Tensor:
        held = [index]
        inner = ck(lambda h: h.sin()[held[0]].sum() * h)
        middle = ck(lambda h: inner(h))
        return ck(lambda h: middle(middle(h)).sum())(x)

    def per_sample(ck: Any) -> Tensor:
        gradient = grad(lambda x, i: program(ck, x, i))
        return vmap(gradient, in_dims=(0, None))(numbers(4, 3), torch.tensor([0, 2]))

    assert_same(per_sample(remat), per_sample(plain))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("transform", ["grad", ".backward()", "grad(grad)", ".backward() of grad", "double backward"])
def test_a_hook_in_a_call_inside(depth: int, transform: str) -> None:
    """It is called for one order of derivatives, or remat says that it can't."""

    def program(ck: Any) -> Fun:
        def hooked(x: Tensor) -> Tensor:
            y = x.sin()
            if y.requires_grad:
                y.register_hook(lambda g: g * 0.5)
            return y.sin()

        fun: Any = hooked
        for _ in range(depth):
            fun = ck(lambda x, inner=fun: inner(x.sin()))
        return fun

    x = numbers(3)
    expected = TRANSFORMS[transform](program(plain), x)
    try:
        actual = TRANSFORMS[transform](program(remat), x)
    except RematError as error:
        with pytest.raises(RematError, match="puts a hook on a tensor"):
            raise error from None
    else:
        assert_same(actual, expected)


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "jacrev"])
def test_a_hook_in_a_call_beside_an_autograd_function(transform: str) -> None:
    """The level of the outer rerun ends with its backward, which nobody differentiates there."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        def hooked(x: Tensor) -> Tensor:
            y = x.sin()
            if y.requires_grad:
                y.register_hook(lambda g: g * 0.5)
            return y.cos()

        return ck(lambda x: ck(hooked)(TimesTable.apply(x)))(x)

    run, x = TRANSFORMS[transform], numbers(3, 3)
    assert_same(run(lambda x: program(remat, x), x), run(lambda x: program(plain, x), x))


@pytest.mark.parametrize("transform", ["grad", ".backward()", "grad(grad)", "vmap(grad)"])
def test_a_hook_after_one_in_a_derivative_inside(transform: str) -> None:
    """Each is called for the derivative of its own level alone."""

    def hooked(y: Tensor, factor: float) -> Tensor:
        y.register_hook(lambda g: g * factor)
        return y.sin()

    def fun(x: Tensor) -> Tensor:
        return grad(lambda v: hooked(v.sin(), 0.5).sum())(x) * hooked(x.cos(), 3.0)

    x = numbers(3)
    try:
        actual = TRANSFORMS[transform](remat(fun), x)
    except RematError as error:
        assert transform == "grad(grad)"
        with pytest.raises(RematError, match="puts a hook on a tensor"):
            raise error from None
    else:
        assert_same(actual, TRANSFORMS[transform](fun, x))


@pytest.mark.parametrize("transform", ["grad", ".backward()", "vmap(grad)"])
def test_a_hook_on_an_argument_before_one_on_a_result(transform: str) -> None:
    """The forward has put the first on the argument itself."""

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        x.register_hook(lambda g: g * 3)
        y.register_hook(lambda g: g * 0.5)
        return y.sin()

    x = numbers(3)
    actual, expected = (TRANSFORMS[transform](lambda x, ck=ck: ck(fun)(x.exp()), x) for ck in (remat, plain))
    assert_same(actual, expected)


def test_a_hook_behind_requires_grad() -> None:
    """In the forward, under a level that does not differentiate it, the result does not require a gradient."""

    def program(ck: Any, x: Tensor, z: Tensor) -> Tensor:
        def fun() -> Tensor:
            y = torch.sin(z)
            if y.requires_grad:
                y.register_hook(lambda g: g * 0.5)
            return y

        return (ck(fun)() * x).sin().sum()

    grads = []
    for ck in (plain, remat):
        x, z = leaf(numbers(3)), leaf(numbers(3, seed=1))
        g, value = grad_and_value(lambda x, z=z, ck=ck: program(ck, x, z))(x)
        (g.sum() + value).backward()
        grads.append(z.grad)
    assert_same(*grads)


def test_tangents_that_depend_on_what_is_differentiated_and_a_draw() -> None:
    def program(ck: Any, x: Tensor) -> Tensor:
        return ck(lambda v: ck(lambda u: u * u)(v) * torch.rand_like(v))(x)

    grads = []
    for ck in (plain, remat):
        torch.manual_seed(0)
        x = leaf(numbers(3))
        jvp(lambda x, ck=ck: program(ck, x), (x,), (x.cos(),))[1].sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_a_hook_inside_and_a_recorded_backward_around_vmap() -> None:
    def fun(x: Tensor) -> Tensor:
        y = torch.sin(x)
        y.register_hook(lambda g: g * 0.5)
        return torch.sin(y)

    def derivatives(fun: Fun) -> list[Tensor]:
        x = leaf(numbers(3))
        found = [vmap(lambda t: fun(x) * t)(numbers(2, seed=1))]
        for _ in range(3):
            found += torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)
        return found

    assert_same(derivatives(remat(fun)), derivatives(fun))
    assert_same(derivatives(remat(lambda x: remat(fun)(x.cos()))), derivatives(lambda x: fun(x.cos())))


def test_a_rebuilt_function_has_its_names() -> None:
    w, seen = leaf(numbers(3)), []

    def inner(x: float) -> Tensor:
        """Double."""
        return w * x

    def fun(x: Tensor) -> Tensor:
        seen.append((inner.__name__, inner.__qualname__, inner.__doc__, inner.__annotations__, inner.__module__))
        return inner(2) * x

    remat(fun)(leaf(numbers(3))).sum().backward()
    assert seen[0] == seen[1]


CONSTANT = numbers(3, 3, seed=5)


class TimesTable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * CONSTANT

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * CONSTANT


@pytest.mark.parametrize("transform", [".backward()", "double backward", "grad", "vmap(grad)", "grad(grad)"])
def test_an_autograd_function_that_reads_a_constant(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        return TimesTable.apply(x.sin()).cos()

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](remat(fun), x), TRANSFORMS[transform](fun, x))


@pytest.mark.parametrize("hooked_input", [True, False])
def test_a_hook_that_a_rerun_does_not_count_alike(hooked_input: bool) -> None:
    """In the forward of `grad`, what it does not differentiate requires no grad; in a rerun it may."""

    def run(ck: Any) -> Any:
        def fun(x: Tensor) -> Tensor:
            guarded = y if hooked_input else y.sin()
            if guarded.requires_grad:
                guarded.register_hook(lambda g: g * 7)
            z = x.sin()
            if z.requires_grad:
                z.register_hook(lambda g: g * 0.5)
            return z * x

        x, y = leaf(numbers(3)), leaf(numbers(3))
        gradient = grad(lambda x, y: ck(fun)(x).square().sum())(x, y)
        (second,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
        return gradient, second, torch.autograd.grad(second.square().sum(), x)

    assert_same(run(remat), run(plain))


def test_a_result_without_a_tangent_of_calls_inside_that_carry_one() -> None:
    """The node of a nested call depends on tangents, and so does each result that comes out of it."""

    def run(ck: Any) -> Any:
        def fun(x: Tensor, w: Tensor) -> Tensor:
            def inner() -> tuple[Tensor, Tensor]:
                return x * w, w[None]

            return ck(lambda: ck(inner)()[1])()

        x, w, v = leaf(numbers(3)), leaf(numbers(3)), leaf(numbers(3))
        out, tangent = jvp(lambda x: fun(x, w), (x,), (v.cos(),))
        return torch.autograd.grad(out.sum() + tangent.sum(), (x, w, v), allow_unused=True)

    assert_same(run(remat), run(plain))


def test_gradients_that_pass_through_under_forward_ad() -> None:
    """There, views may have no node of their own."""

    def run(ck: Any) -> Any:
        def draws(x: Tensor) -> Tensor:
            y = ck(lambda: x)()
            return y + torch.rand_like(y)

        def fun(x: Tensor) -> Tensor:
            y = ck(functools.partial(draws, x))()
            return torch.stack([torch.dropout(y, 0.5, True), y])

        def loss(x: Tensor) -> Tensor:
            out, pull = vjp(ck(fun), x)
            return (torch.stack([*out, *pull(out.cos())]).asinh() * numbers(3)).sum()

        torch.manual_seed(0)
        x = leaf(numbers(1).sum())
        return torch.autograd.grad(jacfwd(jacrev(loss), randomness="same")(x), x)

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("kind", [dict, list, "beside many words"])
def test_weights_that_are_updated_in_their_container(kind: Any) -> None:
    """As in a differentiated inner loop: a rerun finds the weights of its own step."""

    def outer_gradient(ck: Any) -> Tensor:
        x, start = numbers(2, 3), numbers(3, seed=1).requires_grad_()
        settings: Any = {f"words {i}": [*map(str, range(900))] for i in range(4)} | {"weights": {0: start}}
        weights: Any = {dict: {0: start}, list: [start]}.get(kind)

        def loss() -> Tensor:
            return torch.tanh(x @ (weights or settings["weights"])[0]).square().sum()

        held = weights or settings["weights"]
        for _ in range(3):
            (gradient,) = torch.autograd.grad(ck(loss)(), held[0], create_graph=True)
            held[0] = held[0] - 0.1 * gradient
        return torch.autograd.grad(ck(loss)(), start)[0]

    assert_same(outer_gradient(remat), outer_gradient(plain))


def test_a_function_among_its_own_defaults() -> None:
    def chain(n: int, x: Tensor, again: Any = None) -> Tensor:
        return x if n == 0 else again(n - 1, x.sin(), again)

    chain.__defaults__ = (chain,)
    x = numbers(3)
    assert_same(grad(lambda x: remat(chain)(3, x).sum())(x), grad(lambda x: chain(3, x).sum())(x))


def test_an_attribute_that_is_deleted_before_the_backward() -> None:
    x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
    space = types.SimpleNamespace(w=w)
    out = remat(lambda x: x * space.w.sin())(x).sum()
    del space.w
    out.backward()
    assert_same((x.grad, w.grad), (w.detach().sin(), (x * w.cos()).detach()))
    assert not vars(space)


def test_a_list_that_is_emptied_before_the_backward() -> None:
    x, tensors = leaf(numbers(3)), [leaf(numbers(3, seed=1))]
    out = remat(lambda x: x * tensors[0].sin())(x).sum()
    tensors.clear()
    with pytest.raises(IndexError):
        out.backward()
    assert tensors == []


@pytest.mark.parametrize("order", [1, 2])
def test_what_an_inner_transform_has_left_behind(order: int) -> None:
    """The tensor that it has wrapped is the function's own argument."""

    def program(x: Tensor) -> Tensor:
        left: list[Tensor] = []

        def loss(y: Tensor) -> Tensor:
            left.append(y)
            return y.square().sum()

        return (grad(loss)(x) * left[0]).sin()

    def run(ck: Any) -> Tensor:
        def fun(x: Tensor) -> Tensor:
            return ck(program)(x.cos()).sum()

        for _ in range(order):
            fun = functools.partial(lambda inner, x: grad(inner)(x).sum(), fun)
        return grad(fun)(numbers(3))

    assert_same(run(remat), run(plain))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_parameter_is_one_in_reruns(transform: str, nested: bool) -> None:
    w, run = nn.Parameter(numbers(3, 3, seed=1)), TRANSFORMS[transform]

    def fun(x: Tensor) -> Tensor:
        return (x @ w).sin() if isinstance(w, nn.Parameter) and not isinstance(x, nn.Parameter) else x

    again = remat(lambda x: remat(fun)(x.cos()).sin()) if nested else remat(fun)
    assert_same(run(again, numbers(3, 3)), run(lambda x: fun(x.cos()).sin() if nested else fun(x), numbers(3, 3)))


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["remat", "non-reentrant", "reentrant"])
def test_what_is_changed_in_place_is_in_reruns_what_it_was(use_reentrant: bool | None) -> None:
    class Tagged(Tensor):
        pass

    counts = nn.Parameter(torch.zeros(3), requires_grad=False), torch.zeros(3).as_subclass(Tagged)
    counts[0].step = 7
    seen = Seen()

    def fun(x: Tensor) -> Tensor:
        seen.append((isinstance(counts[0], nn.Parameter), counts[0].step, type(counts[1])))
        for count in counts:
            count.add_(1)
        return (x * counts[0]).sin() * counts[1]

    x = leaf(numbers(3))
    y = remat(fun)(x) if use_reentrant is None else checkpoint(fun, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert [*seen] == [(True, 7, Tagged)] * 2


def test_an_attribute_that_is_set_after_the_forward() -> None:
    w = nn.Parameter(numbers(3))
    w.steps = 0
    y = remat(lambda x: x * w)(numbers(3, seed=1))
    w.steps = 1
    y.sum().backward()
    assert w.steps == 1


# What no torch-function mode sees: a rerun has operands in the places of modules.


@SOME
@pytest.mark.parametrize("read_before", [False, True])
def test_a_parameter_of_a_module_goes_straight_to_a_transform(transform: str, read_before: bool) -> None:
    module = nn.Linear(3, 3).double()

    def fun(x: Tensor) -> Tensor:
        y = x @ module.weight if read_before else x
        return y + grad(lambda w: (x @ w).sin().sum())(module.weight) + vmap(torch.mul)(x, module.weight)

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](remat(fun), x), TRANSFORMS[transform](fun, x))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("transform", ["grad", "grad(grad)", "jvp(grad)", "jacrev", ".backward()", "double backward"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_module_that_asks_if_its_parameters_have_changed(kind: Any, transform: str, nested: bool) -> None:
    """Its rerun finds operands in their places, renews its list of them, and asks these for dtype and device."""
    module = kind(3, 3).double()

    def program(ck: Decorator, x: Tensor) -> Tensor:
        def fun(x: Tensor) -> Tensor:
            return module(x)[0].sin()

        return ck(lambda x: ck(fun)(x) * 2)(x) if nested else ck(fun)(x)

    run, x = TRANSFORMS[transform], numbers(2, 3)
    for _ in range(2):
        assert_same(run(lambda x: program(remat, x), x), run(lambda x: program(plain, x), x))


@SOME
def test_buffers_that_are_the_bounds_of_a_slice(transform: str) -> None:
    def twice(make: Any, x: Tensor) -> Tensor:
        window = make(Window())
        return window(x) * window(x)

    run, x = TRANSFORMS[transform], numbers(4, 4)
    assert_same(run(lambda x: twice(remat, x), x), run(lambda x: twice(plain, x), x))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_an_argument_is_captured_too(way: str, transform: str) -> None:
    """Below the transform, the two are the same tensor."""
    x = numbers(2, 3)

    def fun(y: Tensor) -> Tensor:
        return (y * 2).sin() * x + x.cos()

    run = TRANSFORMS[transform]
    assert_same(run(WAYS[way](fun), x), run(fun, x))


@pytest.mark.parametrize("argnums", [0, (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "transform",
    [
        grad,
        jacrev,
        lambda f, argnums: lambda *xs: vmap(grad(f, argnums=argnums), in_dims=(0, None, None))(pair(xs[0]), *xs[1:]),
        lambda f, argnums: lambda *xs: jvp(grad(f, argnums=argnums), xs, xs),
        lambda f, argnums: lambda *xs: functionalize(grad(f, argnums=argnums))(*xs),
    ],
    ids=["grad", "jacrev", "vmap(grad)", "jvp(grad)", "functionalize(grad)"],
)
def test_one_tensor_is_several_arguments(transform: Any, way: str, argnums: Any) -> None:
    """A transform wraps each of them, also those that it does not differentiate."""

    def fun(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return ((x * 2).sin() + y * 3 + z * y.cos()).sum()

    x = numbers(3)
    assert_same(transform(WAYS[way](fun), argnums=argnums)(x, x, x), transform(fun, argnums=argnums)(x, x, x))


@pytest.mark.parametrize(
    "decorator", [vmap, torch.enable_grad(), functionalize], ids=["vmap", "enable_grad", "functionalize"]
)
@SOME
def test_a_decorated_function_that_nobody_keeps(transform: str, decorator: Any) -> None:
    """The rerun of the function around makes it again, with the name that `functools.wraps` has given to it."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        def around(f: Any) -> Any:
            return ck(lambda x: ck(f)(x))

        return around(decorator(lambda x: x.exp()))(x)

    run, x = TRANSFORMS[transform], numbers(3, 3)
    assert_same(run(lambda x: program(remat, x), x), run(lambda x: program(plain, x), x))


def test_a_parameter_with_a_hook_goes_straight_to_an_autograd_function() -> None:
    module = nn.Linear(3, 3).double()
    module.weight.register_hook(lambda g: 2 * g)

    def gradient(ck: Decorator) -> Tensor:
        module.weight.grad = None
        ck(lambda y: module.weight.sin() * Old.apply(y, module.weight))(leaf(numbers(3, 3))).sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad

    assert_same(gradient(remat), gradient(plain))


def test_a_tensor_is_found_again_after_an_operand_was_in_its_place() -> None:
    net = nn.Linear(3, 3)
    w, place = net.weight, (net._parameters, "weight")
    with filled([(place, w.detach())]):
        assert not places_in_modules([net], [w])
    assert places_in_modules([net], [w]) == {id(w): [place]}


class Strange(tuple):
    """Like the irreps of e3nn: a tuple by inheritance alone."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


STRANGE = Strange((1, 2))


@pytest.mark.parametrize("where", ["cell", "argument", "default", "attribute", "global", "list"])
@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_containers_with_methods_of_their_own_are_not_asked(ck: Decorator, where: str) -> None:
    strange, held = Strange((1, 2)), Holder(s=[STRANGE]) if where == "attribute" else [STRANGE]
    net = nn.Linear(3, 3).double()
    functions: dict[str, Callable[..., Tensor]] = {
        "cell": lambda x, _: net(x) * strange[1],
        "argument": lambda x, s: net(x) * s[1],
        "default": lambda x, _, s=strange: net(x) * s[1],
        "attribute": lambda x, _: net(x) * held.s[0][1],
        "global": lambda x, _: net(x) * STRANGE[1],
        "list": lambda x, _: net(x) * held[0][1],
    }
    x = leaf(numbers(2, 3))
    ck(functions[where])(x, strange if where == "argument" else None).sum().backward()
    assert_same(x.grad, 2 * net.weight.detach().sum(0).expand(2, 3))


def _keyword_defaults(a: Any) -> Any:
    def fun(x: Tensor, *, a: Any = a) -> Tensor:
        return (x * torch.from_numpy(a)).sin()

    return fun, lambda a: setattr(fun, "__kwdefaults__", {"a": a})


def _defaults(a: Any) -> Any:
    def fun(x: Tensor, a: Any = a) -> Tensor:
        return (x * torch.from_numpy(a)).sin()

    return fun, lambda a: setattr(fun, "__defaults__", (a,))


def _keywords_of_a_partial(a: Any) -> Any:
    fun = functools.partial(lambda x, a: (x * torch.from_numpy(a)).sin(), a=a)
    return fun, lambda a: fun.keywords.update(a=a)


def _later_keywords_of_a_partial(a: Any) -> Any:
    fun = functools.partial(lambda x, b=a, a=None: (x * torch.from_numpy(b if a is None else a)).sin())
    return fun, lambda a: fun.keywords.update(a=a)


def _a_closure_of_an_attribute(a: Any) -> Any:
    def fun(x: Tensor) -> Tensor:
        return x.sin()

    def replace(new: Any) -> None:
        nonlocal a
        a = new

    fun.helper = lambda x: x * torch.from_numpy(a)  # type: ignore[attr-defined]
    return lambda x: fun(fun.helper(x)), replace  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [_keyword_defaults, _defaults, _keywords_of_a_partial, _later_keywords_of_a_partial, _a_closure_of_an_attribute],
)
@pytest.mark.parametrize("ck", DECORATORS)
def test_constants_are_replaced_between_calls(ck: str, make: Any) -> None:
    """A function closes over no tensor, and its constants are as at the call. No torch call shows the arrays."""

    def gradient(ck: Any) -> Any:
        x = leaf(numbers(3))
        fun, replace = make(numbers(3, seed=1).numpy())
        results = []
        for seed in (2, 3):
            results.append(ck(fun)(x))
            replace(numbers(3, seed=seed).numpy())
        sum(results).sum().backward()
        return x.grad

    assert_same(gradient(DECORATORS[ck]), gradient(plain))


@pytest.mark.parametrize("ck", DECORATORS)
def test_a_rerun_looks_functions_up_that_nobody_has_changed(ck: str) -> None:
    k = 2.0

    def with_keyword(x: Tensor, *, s: float = 2.0) -> Tensor:
        return x.sin() * s * k

    def with_function(x: Tensor, inner: Any = with_keyword) -> Tensor:
        return inner(x)

    in_a_tuple = with_keyword, with_function
    names = {with_keyword: 3.0, with_function: 4.0}

    def fun(x: Tensor) -> Tensor:
        return sum(f(x) * names[f] for f in (with_keyword, with_function, *in_a_tuple))  # type: ignore[return-value]

    gradients = []
    for decorate in (DECORATORS[ck], plain):
        x = leaf(numbers(3))
        decorate(fun)(x).sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)
