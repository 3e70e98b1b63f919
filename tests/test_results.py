"""Arguments and results: trees of anything, inputs themselves, views, integers, duplicates, detached."""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import KEEPS, SOME_TRANSFORMS, TRANSFORMS, CountOps, Fun, Seen, assert_same, leaf, numbers, pair, plain
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, vjp, vmap

from remat import RematError, _results, checkpoint, policies, remat
from remat.policies import everything_saveable, nothing_saveable

Decorator = Callable[[Any], Any]


class Two(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Output:
    """A node type that is registered with torch, as the outputs of transformers' models are."""

    loss: Any
    hidden: Any = None


torch.export.register_dataclass(Output)


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """Registered as transformers registers its own."""


torch.utils._pytree.register_pytree_node(
    ModelOutput,
    lambda o: (list(o.values()), list(o.keys())),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
)


@dataclasses.dataclass
class Opaque:
    """Not registered: a leaf."""

    tensor: Any


RESULTS: dict[str, Fun] = {
    "one tensor": lambda x: x.sin(),
    "a tuple": lambda x: (x.sin(), x.cos()),
    "a list of lists": lambda x: [[x.sin()], [x.cos(), [x * 2]]],
    "a dict": lambda x: {"b": x.sin(), "a": x.cos()},
    "an ordered dict": lambda x: collections.OrderedDict(b=x.sin(), a=x.cos()),
    "a default dict": lambda x: collections.defaultdict(list, b=x.sin(), a=[x.cos()]),
    "a deque": lambda x: collections.deque([x.sin(), x.cos()]),
    "a named tuple": lambda x: Two(x.sin(), [x.cos()]),
    "a torch return type": lambda x: torch.max(x.sin(), 0),
    "a registered dataclass": lambda x: Output(loss=x.sin().sum(), hidden=(x.cos(), None)),
    "a model's output": lambda x: ModelOutput(loss=x.sin().sum(), hidden=(x.cos(), None)),
    "nothing": lambda x: None,
    "nothing among tensors": lambda x: (None, x.sin(), None),
    "an empty tuple": lambda x: (),
    "empty containers": lambda x: ({}, x.sin(), []),
    "numbers and strings": lambda x: (x.sin(), 3, "abc", 2.5, True),
    "a torch size": lambda x: (x.shape, x.sin()),
    "a dtype": lambda x: (x.dtype, x.sin()),
    "the input": lambda x: x,
    "the input among others": lambda x: (x, x.sin(), x),
    "views of the input": lambda x: (x.t(), x[0], x.view(-1), x[1:, :2]),
    "a detached input": lambda x: (x.detach(), x.sin()),
    "views of a result": lambda x: (lambda y: (y, y.t(), y[0]))(x.sin()),
    "duplicates": lambda x: (lambda y: (y, y, [y]))(x.sin()),
    "integers": lambda x: (x.argmax(), x.sin(), (x > 0).long()),
    "booleans": lambda x: (x > 0, x.sin()),
    "integers alone": lambda x: x.argsort(),
    "independent": lambda x: (torch.ones(2), x.sin(), torch.arange(3)),
    "independent alone": lambda x: torch.ones(3, 3),
    "detached": lambda x: (x.sin().detach(), x.cos()),
    "detached alone": lambda x: x.sin().detach(),
    "complex": lambda x: torch.complex(x.sin(), x.cos()),
    "another dtype": lambda x: (x.sin().float(), x.cos()),
    "a scalar": lambda x: x.sin().sum(),
    "an empty tensor": lambda x: (x[:0].sin(), x.sin()),
    "an expanded tensor": lambda x: (x.sin()[:1].expand(3, 3), x.sum().expand(2)),
    "not contiguous": lambda x: x.sin().t(),
    "an unused result": lambda x: (x.sin(), x.exp()),
}
EACH = pytest.mark.parametrize("fun", RESULTS.values(), ids=RESULTS)


def total(tree: Any) -> Tensor:
    """A scalar that every float in `tree` counts for."""
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace="torch")
    floats = [y for y in leaves if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())]
    parts = [(torch.view_as_real(y) if y.is_complex() else y).double() for y in floats]
    return sum(((i + 1) * y.sin().sum() for i, y in enumerate(parts)), torch.zeros((), dtype=torch.float64))


@EACH
@pytest.mark.parametrize("requires_grad", [True, False])
def test_same_tree(fun: Fun, requires_grad: bool) -> None:
    x = numbers(3, 3).requires_grad_(requires_grad)
    actual, expected = remat(fun)(x), fun(x)
    assert type(actual) is type(expected)
    assert_same(actual, expected)
    same = [
        (a is x, e is x)
        for a, e in zip(
            *(optree.tree_leaves(t, none_is_leaf=True, namespace="torch") for t in (actual, expected)),
            strict=True,
        )
    ]
    assert all(a == e for a, e in same)


@EACH
def test_the_same_leaves_are_the_same(fun: Fun) -> None:
    x = leaf(numbers(3, 3))
    identities = []
    for f in (remat(fun), fun):
        leaves = [t for t in optree.tree_leaves(f(x), namespace="torch") if isinstance(t, Tensor)]
        identities.append([[a is b for b in leaves] for a in leaves])
    assert identities[0] == identities[1]


@EACH
@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
def test_same_derivatives(fun: Fun, transform: str) -> None:
    x = numbers(3, 3)
    actual = TRANSFORMS[transform](lambda x: total(remat(fun)(x)) * x, x)
    assert_same(actual, TRANSFORMS[transform](lambda x: total(fun(x)) * x, x))


@EACH
@pytest.mark.parametrize("nest", ["grad", "vmap", "jvp", "vmap(grad)", "vjp"])
def test_same_tree_inside_a_transform(fun: Fun, nest: str) -> None:
    """Seen from inside: structure, types, shapes, and what requires grad."""

    def look(f: Fun) -> list[Any]:
        seen = Seen()

        def inner(x: Tensor) -> Tensor:
            out = f(x)
            leaves, spec = optree.tree_flatten(out, none_is_leaf=True, namespace="torch")
            seen.append(spec)
            seen.extend((t.shape, t.dtype, t.requires_grad, t is x) if isinstance(t, Tensor) else t for t in leaves)
            return total(out) + x.sum()

        x = numbers(3, 3)
        {
            "grad": lambda: grad(inner)(x),
            "vmap": lambda: vmap(inner)(pair(x)),
            "jvp": lambda: jvp(inner, (x,), (x,)),
            "vmap(grad)": lambda: vmap(grad(inner))(pair(x)),
            "vjp": lambda: vjp(inner, x),
        }[nest]()
        return seen

    assert look(remat(fun)) == look(fun)


# Arguments.


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
@pytest.mark.parametrize(
    ("fun", "arguments"),
    [
        pytest.param(lambda x, y: x.sin() * y.cos(), lambda x: ((x, x.exp()), {}), id="two"),
        pytest.param(lambda x, y: x.sin() * y.cos(), lambda x: ((x, x), {}), id="the same twice"),
        pytest.param(lambda x, y: x.sin() * y.cos(), lambda x: ((x, x.t()), {}), id="with a view of it"),
        pytest.param(lambda x, *, y: x.sin() * y, lambda x: ((x,), {"y": x.exp()}), id="keyword"),
        pytest.param(lambda **k: k["x"].sin() * k["y"], lambda x: ((), {"x": x, "y": x.exp()}), id="keywords alone"),
        pytest.param(lambda *xs: xs[0].sin() * xs[1], lambda x: ((x, x.exp()), {}), id="star"),
        pytest.param(
            lambda d: d["x"][0].sin() * d["y"]["z"],
            lambda x: (({"x": [x], "y": {"z": x.exp()}},), {}),
            id="tree",
        ),
        pytest.param(lambda p: p.a.sin() * p.b, lambda x: ((Two(x, 2.0),), {}), id="named tuple"),
        pytest.param(
            lambda o: o.loss.sin() * o.hidden[0],
            lambda x: ((Output(x, (x.exp(), None)),), {}),
            id="dataclass",
        ),
        pytest.param(
            lambda o: o["loss"].sin() * o["hidden"][0],
            lambda x: ((ModelOutput(loss=x, hidden=(x.exp(), None)),), {}),
            id="a model's output",
        ),
        pytest.param(lambda o: o.tensor.sin(), lambda x: ((Opaque(x),), {}), id="an object that is not a tree"),
        pytest.param(
            lambda x, n, s, f, z: x.sin() * n if s == "a" and z is None else f(x),
            lambda x: ((x, 3, "a", torch.cos, None), {}),
            id="static leaves",
        ),
        pytest.param(lambda f, x: f(x), lambda x: ((lambda y: y.sin() * x, x), {}), id="a function that captures"),
        pytest.param(lambda x, i: x[i].sin(), lambda x: ((x, torch.tensor([2, 0, 1])), {}), id="integers"),
        pytest.param(lambda x, m: torch.where(m, x.sin(), x), lambda x: ((x, x > 0), {}), id="booleans"),
        pytest.param(lambda x, e: x.sin() + e.sum(), lambda x: ((x, torch.zeros(0)), {}), id="an empty tensor"),
        pytest.param(lambda x, y: x.sin(), lambda x: ((x, x.exp()), {}), id="unused"),
        pytest.param(lambda x, c: (x.sin() * c).real, lambda x: ((x, torch.complex(x, x.exp())), {}), id="complex"),
    ],
)
def test_arguments(fun: Callable[..., Tensor], arguments: Callable[[Tensor], Any], transform: str) -> None:
    def call(f: Callable[..., Tensor]) -> Fun:
        def of_x(x: Tensor) -> Tensor:
            args, kwargs = arguments(x)
            return f(*args, **kwargs)

        return of_x

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](call(remat(fun)), x), TRANSFORMS[transform](call(fun), x))


def test_static_leaves_reach_the_rerun_as_they_are() -> None:
    seen = Seen()
    marker = object()

    @remat
    def fun(x: Tensor, options: dict[str, Any], *, key: Any) -> Tensor:
        seen.append((options["n"], options["f"], key))
        return x.sin()

    fun(leaf(numbers(3)), {"n": 3, "f": torch.sin}, key=marker).sum().backward()
    assert len(seen) == 2
    for n, f, key in seen:
        assert (n, f) == (3, torch.sin)
        assert key is marker


def test_a_container_that_the_caller_changes_after_the_call() -> None:
    for ck in (remat, plain):
        x, y = leaf(numbers(3)), leaf(numbers(3, seed=1))
        values = [x, 2.0]
        out = ck(lambda v: v[0].sin() * v[1])(values)
        values[:] = [y, 5.0]
        out.sum().backward()
        assert_same(x.grad, 2 * x.detach().cos())
        assert y.grad is None


def test_a_container_that_the_function_fills() -> None:
    """A list that is handed in and appended to: the rerun has a list of its own."""
    caches = []
    for ck in (remat, plain):
        cache: list[Tensor] = []

        def fun(x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(x.detach())
            return x.sin()

        ck(fun)(leaf(numbers(3)), cache).sum().backward()
        caches.append(cache)
    assert len(caches[0]) == len(caches[1]) == 1


# What callers do with results.


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda y: y.add_(1).sin(), id="add_"),
        pytest.param(lambda y: y.mul_(torch.arange(3.0)), id="mul_"),
        pytest.param(lambda y: y.relu_(), id="relu_"),
        pytest.param(lambda y: torch.nn.functional.relu(y, inplace=True), id="relu(inplace)"),
        pytest.param(lambda y: (y.__setitem__(0, 1.0), y)[1].sin(), id="setitem"),
        pytest.param(lambda y: (y[0].mul_(2), y)[1].sin(), id="in place on a view"),
        pytest.param(lambda y: y.t().sin_()[1:] @ y, id="in place on a view that is used"),
    ],
)
@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(torch.sin, id="one"),
        pytest.param(lambda x: x.sin().t(), id="a view of an intermediate"),
        pytest.param(lambda x: (x.sin(), x.cos()), id="one of two"),
        pytest.param(lambda x: (x.sin(), x), id="beside an input"),
        pytest.param(nn.Conv2d(3, 3, 1, dtype=torch.float64), id="a convolution"),
    ],
)
@pytest.mark.parametrize(
    "transform", ["call", "grad", "vmap(grad)", "jvp", "jvp(grad)", ".backward()", "double backward"]
)
def test_in_place_on_results(fun: Fun, use: Fun, transform: str) -> None:
    def program(f: Fun) -> Fun:
        def of_x(x: Tensor) -> Tensor:
            y = f(x.view(3, 3, 1) * 1.5) if isinstance(fun, nn.Module) else f(x * 1.5)
            y = y[0] if isinstance(y, tuple) else y
            return use(y.view(3, 3) if isinstance(fun, nn.Module) else y).sum() * x

        return of_x

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](program(remat(fun)), x), TRANSFORMS[transform](program(fun), x))


def test_retain_grad_of_a_result() -> None:
    grads = []
    for ck in (remat, plain):
        y = ck(torch.sin)(leaf(numbers(3)))
        y.retain_grad()
        y.exp().sum().backward()
        grads.append(y.grad)
    assert_same(*grads)


def test_detach_a_result_in_place() -> None:
    y = remat(torch.sin)(leaf(numbers(3)))
    y.detach_()
    assert not y.requires_grad


def test_a_result_that_is_a_leaf_stays_one() -> None:
    for ck in (remat, plain):
        made: list[Tensor] = []

        def fun(x: Tensor) -> tuple[Tensor, Tensor]:
            p = torch.ones(3).requires_grad_()
            made.append(p)
            return x.sin(), p

        x = leaf(numbers(3))
        y, p = ck(fun)(x)
        assert p.requires_grad
        y.sum().backward()
        assert_same(x.grad, x.detach().cos())


def test_results_that_share_memory_with_an_input_still_do() -> None:
    x = leaf(numbers(3, 3))
    for fun in (lambda x: x.t(), lambda x: (x[0], x.view(-1)), lambda x: x.detach()):
        for out in optree.tree_leaves(remat(fun)(x)):
            assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_parameter_made_inside_and_returned() -> None:
    out = remat(lambda x: (nn.Parameter(torch.ones(3)), x.sin()))(leaf(numbers(3)))
    assert out[0].requires_grad


# What needs no node gets none.


@pytest.mark.parametrize(
    "fun", [lambda x: x.argmax(), lambda x: x.detach().sin(), lambda x: torch.ones(3), lambda x: None]
)
def test_nothing_to_differentiate_is_not_recorded(fun: Fun) -> None:
    x = leaf(numbers(3, 3))
    out = remat(fun)(x)
    assert out is None or (out.grad_fn is None and not out.requires_grad)


def test_cotangents_that_are_none() -> None:
    """Only one of two results is used: the other has no cotangent, and its path does not run."""
    x = leaf(numbers(3))
    with CountOps() as ops:
        a, b = remat(lambda x: (x.sin(), x.exp()))(x)
        b.detach()
        a.sum().backward()
    assert_same(x.grad, x.detach().cos())
    assert ops["cos"] == 1


def test_undefined_gradients_are_none() -> None:
    x, y = leaf(numbers(3)), leaf(numbers(3))
    out = remat(lambda x, y: (x.sin(), y.sin()))(x, y)
    assert torch.autograd.grad(out[0].sum(), (x, y), allow_unused=True)[1] is None


def test_what_a_nested_function_hands_back_as_it_is() -> None:
    """Under a level that differentiates something else, the operands of the rerun are leaves of a level of its own."""

    def program(decorate: Decorator, x: Tensor) -> Tensor:
        kept = [torch.sin(x), x.argsort(-1)]

        def outer(given: list[Tensor], again: Tensor) -> Tensor:
            def inner() -> tuple[Tensor, Tensor]:
                return given[0], kept[1]

            return torch.sin(decorate(inner)()[0])

        return torch.sin(decorate(outer)([kept[0]], again=kept[0]))

    def derivative(decorate: Decorator) -> Any:
        def first(x: Tensor, y: Tensor) -> Tensor:
            of = grad(lambda x, y: vmap(lambda row: program(decorate, row))(y).sum(), argnums=(0, 1))
            return torch.stack(of(x, y)).cos().sum()

        x, y = numbers(2, 3), numbers(2, 3, seed=1)
        return grad(first, argnums=(0, 1))(x, y), grad(first)(x, y)

    assert_same(derivative(remat), derivative(plain))


class Units(Tensor):
    """The user's own class."""


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots"])
def test_results_of_the_users_own_class(policy: Any) -> None:
    def program(decorate: Decorator) -> Any:
        x = leaf(numbers(3))
        y, (z,) = decorate(lambda x: ((x * 2).sin(), [x.cos()]))(x.as_subclass(Units))
        assert type(y) is type(z) is Units
        (g,) = torch.autograd.grad((y * z).sum(), x, create_graph=True)
        return y, z, g, torch.autograd.grad(g.sum(), x)

    assert_same(program(remat(policy=policy)), program(plain))


class Spaced(Tensor):
    """A class whose attribute is a part of the value, as that of an image with its spacing."""

    spacing = 1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Spaced) and isinstance(args[0], Spaced):
            vars(out).update(vars(args[0]))
        return out


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots"])
@pytest.mark.parametrize("nested", [False, True])
def test_attributes_of_results(policy: Any, nested: bool) -> None:
    def program(decorate: Decorator) -> Any:
        x, p = numbers(3).as_subclass(Spaced), leaf(numbers(3, seed=1))
        x.spacing = 3.0

        def inner(x: Any, p: Tensor) -> Any:
            y = decorate(lambda x, p: x * p)(x, p)
            return (y * y.spacing).sin()

        y = decorate(inner)(x, p) if nested else inner(x, p)
        return torch.autograd.grad((y * y.spacing).sum(), p), y.spacing

    assert_same(program(remat(policy=policy)), program(plain))


def test_an_attribute_that_the_function_sets_on_its_result() -> None:
    def f(x: Tensor) -> Any:
        y: Any = x.sin()
        y.tag = "sine"
        return y

    assert remat(f)(leaf(numbers(3))).tag == "sine"
    assert vmap(lambda x: x * (remat(f)(x).tag == "sine"))(numbers(3)).ne(0).all()


class Careful(Tensor):
    """A class whose torch calls make others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        torch.zeros(()).add(1)
        return out


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots"])
@pytest.mark.parametrize("argnums", [0, 1])
def test_an_argument_whose_class_a_transform_hides(policy: Any, argnums: int) -> None:
    classes = []

    def f(p: Tensor, x: Tensor) -> Tensor:
        classes.append(type(x))
        return (p * x).sin().sum()

    def program(decorate: Decorator) -> Any:
        p, x = numbers(3), numbers(3, seed=1).as_subclass(Careful)
        first = grad(decorate(f), argnums)(p, x)
        return first, grad(lambda p, x: grad(decorate(f), argnums)(p, x).sum(), argnums)(p, x)

    assert_same(program(remat(policy=policy)), program(plain))
    assert {*classes} == {Tensor}


@KEEPS  # torch.cond does, when it compiles
def test_cond() -> None:
    """Torch compiles it, under the modes that are active."""

    def fun(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    for sign in (1, -1):
        x = leaf(sign * torch.ones(3))
        assert_same(*(torch.autograd.grad(f(x).sum(), x) for f in (remat(fun), fun)))
    assert_same(*(vmap(f)(torch.ones(2, 3)) for f in (remat(fun), fun)))


@pytest.mark.parametrize("policy", [nothing_saveable, everything_saveable], ids=str)
def test_cond_under_a_policy(policy: Any) -> None:
    """Torch does not compile it under a mode, and then takes functions that return a tuple alone."""

    def fun(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x.sin().exp(),), lambda x: (x.cos(),), (x,))[0].tanh()  # type: ignore[no-any-return]

    for sign, branch in ((1, lambda x: x.sin().exp()), (-1, torch.cos)):  # torch can't run the plain one after it
        x = leaf(sign * torch.ones(3))
        (g,) = torch.autograd.grad(remat(fun, policy=policy)(x).sum(), x)
        assert_same(g, torch.autograd.grad(branch(x).tanh().sum(), x)[0])
    with pytest.raises(RematError, match="cond runs under a policy and returns a tensor"):
        remat(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), policy=policy)(leaf(torch.ones(3)))


@dataclasses.dataclass(slots=True)
class OpaqueWithSlots:
    """The same without a dict."""

    tensor: Any


@pytest.mark.parametrize("kind", [Opaque, OpaqueWithSlots])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)"])
def test_results_in_an_object_that_is_no_tree(kind: Any, transform: str) -> None:
    def fun(x: Tensor) -> Any:
        return kind(x.sin())

    x = numbers(3, 3)
    plainly = TRANSFORMS[transform](lambda x: fun(x).tensor, x)
    with pytest.warns(
        UserWarning, match=rf"fun returns results in an object of class {kind.__name__}, which is not a tree"
    ):
        assert_same(TRANSFORMS[transform](lambda x: remat(fun)(x).tensor, x), plainly)


class Doubled(Two):
    def __new__(cls, a: Any, b: Any) -> Any:
        return super().__new__(cls, a * 2, b)


class Counted(Two):
    def __new__(cls, *items: Any) -> Any:
        return super().__new__(cls, *items, len(items))


class WithDefault(Two):
    def __new__(cls, a: Any, b: Any = None) -> Any:
        return super().__new__(cls, a, b)


@dataclasses.dataclass
class Scaled:
    a: Any

    def __post_init__(self) -> None:
        self.a = self.a * 2


torch.export.register_dataclass(Scaled)


def named(x: Tensor) -> Any:
    pair = WithDefault(x)
    pair.name = "a"
    return pair


@pytest.mark.parametrize(
    "make",
    [lambda x: Doubled(x, 1), Counted, Scaled, named],
    ids=["tuple", "arguments", "dataclass", "attribute"],
)
@pytest.mark.parametrize("way", [remat, functools.partial(functools.partial, checkpoint, use_reentrant=False)])
def test_a_tree_whose_constructor_changes_what_it_gets(make: Any, way: Any) -> None:
    """A rerun would change it a second time. A class that only has a default is no error."""
    x = leaf(numbers(3))
    with pytest.raises(RematError, match="remat makes a new one of what it holds, and its constructor changes that"):
        way(lambda given: given.a.sin())(make(x))
    assert_same(remat(lambda x: WithDefault(x.sin()))(x), WithDefault(x.sin()))


def test_objects_in_results_that_hold_nothing_that_is_computed() -> None:
    shared = Opaque(leaf(numbers(3)))  # pytest turns warnings into errors

    def fun(x: Tensor) -> Any:
        return x.sin(), shared, Opaque(None), Opaque(torch.ones(3)), Opaque(x.detach().cos()), fun

    out = remat(fun)(leaf(numbers(3)))
    assert out[1] is shared
    assert out[-1] is fun


class Doubling(Tensor):
    """Its sines are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is Tensor.sin else out


@pytest.mark.parametrize(
    "way",
    [
        remat,
        remat(policy=policies.dots_saveable),
        lambda f: functools.partial(checkpoint, f, use_reentrant=False),
        lambda f: functools.partial(checkpoint, f, use_reentrant=True),
    ],
    ids=["remat", "dots_saveable", "checkpoint", "reentrant"],
)
def test_a_class_of_tensors_whose_backward_is_called(way: Decorator) -> None:
    def run(way: Decorator) -> list[Tensor]:
        x = leaf(numbers(3).as_subclass(Doubling))
        captured = leaf(numbers(3, seed=1).as_subclass(Doubling))
        y = way(lambda x: (x.sin() * captured).sin().exp())(x)
        y.sum().backward()  # by the class, which turns itself off for that
        return [t.grad.as_subclass(Tensor) for t in (x, captured) if t.grad is not None]

    assert_same(run(way), run(plain))


@KEEPS
@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y.t()])
@pytest.mark.parametrize("transform", [".backward()", "grad", "jvp(grad)", "grad(jvp)", "jvp(jvp)"])
def test_a_view_that_is_made_in_no_grad(view: Fun, transform: str) -> None:
    def fun(x: Tensor) -> Any:
        y = x @ x
        with torch.no_grad():
            v = view(y)
        return y.tanh(), v

    def total(ck: Any) -> Fun:
        return lambda x: sum(r.sin().sum() for r in ck(fun)(x)) + x

    assert_same(TRANSFORMS[transform](total(remat), numbers(3, 3)), TRANSFORMS[transform](total(plain), numbers(3, 3)))


@pytest.mark.parametrize("keep", [lambda kept, y: kept.append(y), lambda kept, y: kept.append(y.norm())])
def test_a_tensor_that_the_function_keeps_with_its_graph_is_warned_about(
    keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph holds what remat would save."""
    monkeypatch.setattr(_results, "_keepers", set())  # it warns once for each function
    kept: list[Tensor] = []

    def fun(x: Tensor, of: Any) -> Tensor:
        y = x.sin()
        keep(kept, of(y))
        return y.cos()

    x = leaf(numbers(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat(lambda x: fun(x, torch.detach))(x).sum().backward()
        remat(lambda x: remat(fun)(x, torch.detach) + 1)(x).sum().backward()
        remat(lambda x: (x.sin(), x[:2], x.cos()))(x)[0].sum().backward()
    for function in (remat(fun), remat(lambda x, of: remat(fun)(x, of) + 1)):
        with pytest.warns(UserWarning, match=r"keeps a tensor that it computed, .*Keep y.detach\(\), or") as warned:
            y = function(x, torch.clone)
        assert [w.filename for w in warned] == [__file__]
        y.sum().backward()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    "around", [plain, remat, checkpoint(use_reentrant=False)], ids=["plain", "remat", "checkpoint"]
)
def test_a_nested_call_that_returns_a_dataclass(around: Decorator, order: int, several: bool) -> None:
    def gradients(ck: Decorator, around: Decorator) -> list[Tensor | None]:
        x, w, v, unused = numbers(3), *(leaf(numbers(3)) for _ in range(3))
        inner = ck(lambda: Output(x * v))

        def middle(a: Tensor) -> tuple[Tensor, ...]:
            y = inner().loss.sin()
            return (y, a * unused) if several else (y,)

        y = around(lambda w: (w.mean() + ck(middle)(x)[0]) ** 3)(w).sum()
        if order == 2:
            (gradient,) = torch.autograd.grad(y, w, create_graph=True)
            y = gradient.square().sum()
        y.backward()
        return [t.grad for t in (w, v, unused)]

    assert_same(gradients(remat, around), gradients(plain, plain))


@pytest.mark.parametrize("derivative", [lambda f: lambda x: grad_and_value(f)(x)[1], lambda f: lambda x: vjp(f, x)[0]])
def test_a_view_of_a_captured_tensor_beside_what_is_computed(derivative: Any) -> None:
    """It keeps its own graph, in the forward under a transform and in a rerun below. The other result is not used."""

    def run(ck: Any) -> Any:
        x, c = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))

        def outer(z: Tensor) -> Tensor:
            _, view = ck(lambda z, c: (z.sin(), c[0, 0]))(z, c)
            return (view * torch.ones(3, 3)).square().sum()

        return torch.autograd.grad(derivative(ck(outer))(x).sum() + ck(outer)(x), (x, c), allow_unused=True)

    assert_same(run(remat), run(plain))
