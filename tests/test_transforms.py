"""A remat'd function is the plain one, in value and derivative, under every nest of transforms."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SOME_TRANSFORMS, TRANSFORMS, CountOps, Fun, assert_same, leaf, loss, numbers, pair, plain
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from remat import CheckpointError, RematError, checkpoint, is_rerunning, policies, remat
from remat.debug import LiveBytes

Decorator = Callable[[Any], Any]


def several_results(ck: Decorator, x: Tensor) -> Tensor:
    a, b = ck(lambda x: (x.sin(), x.cos() @ x))(x)
    return a * b


def one_of_several_results(ck: Decorator, x: Tensor) -> Tensor:
    return ck(lambda x: (x.sin(), x.cos() @ x))(x)[1]


def trees(ck: Decorator, x: Tensor) -> Tensor:
    @ck
    def fun(d: dict[str, Any], *, k: float) -> dict[str, Any]:
        return {"y": [d["x"][0].sin() * k, None], "n": d["n"]}

    return fun({"x": (x,), "n": 3}, k=2.0)["y"][0]


def in_place_on_intermediates(ck: Decorator, x: Tensor) -> Tensor:
    @ck
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        y[0] = x[1] * x[2]
        y[:, 1].mul_(x[0].cos())
        return y.t()

    return fun(x)


def in_place_on_results(ck: Decorator, x: Tensor) -> Tensor:
    y = ck(torch.sin)(x)
    y *= x
    y.add_(1)
    return y


def recursion(ck: Decorator, x: Tensor) -> Tensor:
    def sines(n: int, x: Tensor) -> Tensor:
        return torch.sin(x) if n == 1 else ck(sines)(n // 2, ck(sines)(n // 2, x))

    return sines(4, x)


def captured_and_argument(ck: Decorator, x: Tensor) -> Tensor:
    return ck(lambda y: torch.tanh(y @ x) + y)(x)


def captured_below_an_inner_level(ck: Decorator, x: Tensor) -> Tensor:
    return grad(lambda y: ck(lambda z: (z * x).sin() * z)(y).sum())(x.cos())


def captured_in_an_inner_batch(ck: Decorator, x: Tensor) -> Tensor:
    return vmap(lambda row: ck(lambda y: torch.tanh(y @ x))(row))(x.cos())


def late_binding(ck: Decorator, x: Tensor) -> Tensor:
    y = x
    for k in range(3):
        w = x.roll(k, 0)
        y = ck(lambda y: torch.tanh(y @ w))(y)
    return y


def two_levels_of_capture(ck: Decorator, x: Tensor) -> Tensor:
    w = x.cos()
    inner = ck(lambda y: torch.tanh(y @ w))
    return ck(lambda y: inner(y).sin() * inner(y * 2))(x)


def indexing(ck: Decorator, x: Tensor) -> Tensor:
    i = torch.tensor([2, 0, 0])
    return ck(lambda x, i: torch.where(x > 0, x[i].sin(), x.gather(1, i.expand(3, 3))))(x, i)


# A function from 3 x 3 tensors to 3 x 3 tensors that calls what `ck` has decorated.
PROGRAMS: dict[str, Callable[[Decorator, Tensor], Tensor]] = {
    "a builtin": lambda ck, x: ck(torch.sin)(x),
    "a chain": lambda ck, x: ck(lambda x: (x.cos() * x).sin().exp())(x),
    "two calls": lambda ck, x: ck(lambda x: x.cos() * x)(ck(lambda x: (x @ x).sin())(x)),
    "softmax": lambda ck, x: ck(lambda x: torch.softmax(x @ x, -1) @ x)(x),
    "layer norm": lambda ck, x: ck(lambda x: F.layer_norm(F.gelu(x @ x), (3,)))(x),
    "reductions": lambda ck, x: ck(lambda x: x / (1 + x.norm()) * x.std() + x.logsumexp(0))(x),
    "memory of stride 0": lambda ck, x: ck(lambda x: x.sin().sum().expand(3, 3))(x),
    "a view": lambda ck, x: ck(lambda x: x.t()[:, [0]].expand(3, 3))(x),
    "indexing": indexing,
    "several results": several_results,
    "one of several results": one_of_several_results,
    "trees": trees,
    "the same argument twice": lambda ck, x: ck(lambda a, b: a.sin() * b)(x, x),
    "in place on intermediates": in_place_on_intermediates,
    "in place on results": in_place_on_results,
    "a result without a path": lambda ck, x: ck(lambda x: torch.ones_like(x))(x) * x,
    "a leaf made inside": lambda ck, x: ck(lambda x: torch.ones(3, requires_grad=True) * x.sin())(x),
    "detached inside": lambda ck, x: ck(lambda x: x.sin() * x.detach().cos())(x),
    "no_grad inside": lambda ck, x: ck(lambda x: x.sin() * torch.no_grad()(torch.cos)(x))(x),
    "linear in x": lambda ck, x: ck(lambda x: x * 2 + 1)(x),
    "remat in remat": lambda ck, x: ck(lambda x: ck(lambda y: y.sin() * x)(x.cos()) * x)(x),
    "recursion": recursion,
    "captured": captured_and_argument,
    "captured alone": lambda ck, x: ck(lambda: x.sin())(),
    "captured below an inner level": captured_below_an_inner_level,
    "captured in an inner batch": captured_in_an_inner_batch,
    "captured, and by a remat inside": two_levels_of_capture,
    "late binding": late_binding,
    "grad inside": lambda ck, x: ck(lambda x: grad(lambda y: (y.sin() * x).sum())(x.cos()))(x),
    "remat inside grad inside": lambda ck, x: ck(lambda x: grad(lambda y: ck(lambda y: y.sin() * x)(y).sum())(x.cos()))(
        x
    ),
    "vmap(grad) inside": lambda ck, x: ck(vmap(grad(lambda row: row.sin().prod())))(x),
    "vjp inside": lambda ck, x: ck(lambda x: vjp(torch.sin, x)[1](x)[0])(x),
    "jvp inside": lambda ck, x: ck(lambda x: jvp(torch.sin, (x,), (x.cos(),))[1])(x),
    "jacrev inside": lambda ck, x: ck(lambda x: jacrev(lambda r: r.sin() * r.sum())(x[0]))(x),
    "jacfwd inside": lambda ck, x: ck(lambda x: jacfwd(lambda r: r.sin() * r.sum())(x[0]))(x),
    "hessian inside": lambda ck, x: ck(lambda x: hessian(lambda r: r.sin().prod())(x[0]))(x),
}


# What torch can't do: forward AD at the base (linearize is that too) around torch.func.jvp, and softmax,
# whose rule has an op in place.
NOT_IN_TORCH = [
    (p, t)
    for p in ("jvp inside", "jacfwd inside", "hessian inside")
    for t in (
        "forward AD",
        "forward AD over backward",
        "backward over forward AD",
        "linearize",
        "linearize(grad)",
    )
] + [("softmax", "backward over forward AD"), ("reductions", "backward over forward AD")]
EACH = pytest.mark.parametrize(
    ("program", "transform"),
    [pytest.param(p, t, id=f"{t} of {p}") for p in PROGRAMS for t in TRANSFORMS if (p, t) not in NOT_IN_TORCH],
)
# torch's own linearize says this of each tensor that it captures.
LINEARIZE_WARNS = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")


@EACH
@LINEARIZE_WARNS
def test_same_as_plain(program: str, transform: str) -> None:
    x, fun = numbers(3, 3), PROGRAMS[program]
    actual = TRANSFORMS[transform](lambda x: fun(remat, x), x)
    assert_same(actual, TRANSFORMS[transform](lambda x: fun(plain, x), x))


@pytest.mark.parametrize(("program", "transform"), NOT_IN_TORCH)
def test_what_torch_itself_can_not_do(program: str, transform: str) -> None:
    with pytest.raises(RuntimeError, match=r"Nested forward mode AD|modified by an inplace operation"):
        TRANSFORMS[transform](lambda x: PROGRAMS[program](plain, x), numbers(3, 3))


# How often the function runs in all: once forward, and whenever reverse mode goes through what is there.
RUNS = {
    "call": 1,
    "grad": 2,
    "grad_and_value": 2,
    "vjp": 3,
    "vjp never called": 1,
    "vjp after other transforms": 5,
    "jvp": 1,
    "vmap": 1,
    "vmap in 2 out 1": 1,
    "jacrev": 2,
    "jacfwd": 1,
    "hessian": 2,
    "functionalize": 1,
    "grad(grad)": 4,
    "grad(grad(grad))": 8,
    "vmap(grad)": 2,
    "grad(vmap)": 2,
    "vmap(vmap(grad))": 2,
    "vmap(grad(vmap))": 2,
    "vmap(grad(grad))": 4,
    "jvp(grad)": 2,
    "grad(jvp)": 2,
    "jvp(jvp)": 1,
    "jvp(jvp(grad))": 2,
    "vmap(jvp(grad))": 2,
    "grad(vmap(jvp))": 2,
    "jacrev(jacrev)": 4,
    "jacrev(jacfwd)": 2,
    "jacfwd(jacfwd)": 1,
    "vmap(hessian)": 2,
    "functionalize(grad)": 2,
    ".backward()": 2,
    "double backward": 4,
    "autograd inside grad": 4,
    "forward AD": 1,
    "forward AD over backward": 2,
    "batched backward": 2,
    ".backward() of vmap": 2,
    ".backward() of jvp": 2,
}


@pytest.mark.parametrize(("transform", "runs"), RUNS.items(), ids=RUNS)
def test_the_function_runs_once_forward_and_once_per_backward(transform: str, runs: int) -> None:
    with CountOps() as ops:
        TRANSFORMS[transform](plain(lambda x: torch.tanh(x) * x), numbers(3, 3))
    assert ops["tanh"] == 1  # no derivative of tanh runs tanh
    with CountOps() as ops:
        TRANSFORMS[transform](remat(lambda x: torch.tanh(x) * x), numbers(3, 3))
    assert ops["tanh"] == runs


def test_each_op_of_a_block_runs_again_once() -> None:
    """20 blocks of 10 ops, as in JAX's tests of remat: no op runs a third time, nor is one left out."""

    @remat
    def block(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.sin()
        return x

    def blocks(x: Tensor) -> Tensor:
        for _ in range(20):
            x = block(x)
        return x.sum()

    with CountOps() as ops:
        grad(blocks)(numbers(3))
    assert (ops["sin"], ops["cos"]) == (400, 200)


def test_only_the_blocks_that_are_needed_run_again() -> None:
    first, second = remat(torch.sin), remat(torch.tanh)
    with CountOps() as ops:
        grad(lambda x: (first(x.detach()) * second(x)).sum())(numbers(3))
    assert (ops["sin"], ops["tanh"]) == (1, 2)


def test_two_results_share_one_rerun() -> None:
    fun = remat(lambda x: (x.tanh(), x.tanh() * 2))
    with CountOps() as ops:
        grad(lambda x: (fun(x)[0] * fun(x)[1]).sum())(numbers(3))
    assert ops["tanh"] == 8  # two calls of two


@pytest.mark.parametrize("n", [2, 8, 16])
def test_recursive_halving_runs_n_log_n_ops(n: int) -> None:
    def sines(n: int, x: Tensor) -> Tensor:
        return torch.sin(x) if n == 1 else remat(sines)(n // 2, remat(sines)(n // 2, x))

    with CountOps() as ops:
        grad(lambda x: sines(n, x).sum())(numbers(3))
    # Each of the log2(n) reruns of an outer call runs a half: the second call in it stands in. The inner ones run once.
    assert ops["sin"] == n + n // 2 * (n.bit_length() - 2) + n


# Randomness under vmap, functional_call and ensembles.


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda x: F.dropout(x, 0.5), id="dropout"),
        pytest.param(lambda x: x * torch.rand(3, dtype=x.dtype), id="rand"),
        pytest.param(lambda x: x * torch.randn_like(x) + torch.randn_like(x), id="two randn_like"),
        pytest.param(lambda x: x * torch.bernoulli(torch.full((3,), 0.5, dtype=x.dtype)), id="bernoulli"),
        pytest.param(lambda x: x * torch.randint(5, (3,)), id="randint"),
        pytest.param(lambda x: x[torch.randperm(3)] * x, id="randperm"),
    ],
)
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f, x, r: vmap(f, randomness=r)(x), id="vmap"),
        pytest.param(lambda f, x, r: vmap(grad(loss(f)), randomness=r)(x), id="vmap(grad)"),
        pytest.param(lambda f, x, r: grad(lambda x: loss(vmap(f, randomness=r))(x))(x), id="grad(vmap)"),
        pytest.param(lambda f, x, r: vmap(grad(loss(f)), randomness=r, chunk_size=2)(x), id="in chunks"),
        pytest.param(
            lambda f, x, r: vmap(vmap(grad(loss(f)), randomness="different"), randomness=r)(pair(x)),
            id="twice",
        ),
        pytest.param(lambda f, x, r: jacrev(vmap(f, randomness=r))(x), id="jacrev(vmap)"),
        pytest.param(lambda f, x, r: jvp(vmap(grad(loss(f)), randomness=r), (x,), (x,)), id="jvp(vmap(grad))"),
        pytest.param(lambda f, x, r: TRANSFORMS[".backward()"](vmap(f, randomness=r), x), id=".backward()"),
    ],
)
def test_vmap_draws_the_same_bits(draw: Fun, transform: Callable[..., Any], randomness: str) -> None:
    x, results, streams = numbers(4, 3), [], []
    for ck in (remat, plain):
        torch.manual_seed(0)
        results.append(transform(ck(draw), x, randomness))
        streams.append(torch.rand(3))
    assert_same(*results)
    assert_same(*streams)


def test_randomness_error_is_an_error_with_remat_too() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(remat(lambda x: F.dropout(x, 0.5)))(numbers(4, 3))
    assert_same(vmap(remat(torch.sin))(numbers(4, 3)), numbers(4, 3).sin())  # the stack is as it was


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_batch_of_cotangents_meets_the_forward_draws(randomness: str) -> None:
    """The rerun of a batched backward draws what the forward drew, whatever that vmap says of draws."""
    x, results = numbers(4, 3), []
    for ck in (remat, plain):
        torch.manual_seed(0)
        _, pull = vjp(ck(lambda x: F.dropout(x.sin(), 0.5)), x)
        results.append(vmap(pull, randomness=randomness)(numbers(2, 4, 3)))
    assert_same(*results)


@pytest.mark.parametrize(("in_dims", "out_dims"), [((0, None), 0), ((None, 1), 1), ((1, 0), 2), ((-1, None), -1)])
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_dimensions_of_vmap(in_dims: Any, out_dims: int, chunk_size: int | None) -> None:
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() * torch.outer(x.flatten()[:3].sin(), y.flatten()[:3].cos())

    x, y = numbers(3, 3), numbers(3, 3, seed=1)
    batched, expected = (vmap(f, in_dims, out_dims, chunk_size=chunk_size) for f in (remat(outer), outer))
    assert_same(batched(x, y), expected(x, y))
    assert_same(grad(lambda x: batched(x, y).sin().sum())(x), grad(lambda x: expected(x, y).sin().sum())(x))
    assert_same(grad(lambda y: batched(x, y).sin().sum())(y), grad(lambda y: expected(x, y).sin().sum())(y))


def test_results_with_and_without_the_batch_dimension() -> None:
    def fun(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), torch.arange(3.0).sin(), x * 2

    for out_dims in [(0, 0, 1), (-1, None, 0)]:
        results = [vmap(ck(fun), out_dims=out_dims)(numbers(2, 3)) for ck in (remat, plain)]
        assert_same(*results)


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1, 0)])
@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian])
def test_argnums(transform: Any, argnums: Any) -> None:
    def fun(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() @ y.cos()).prod()

    x, y = numbers(2, 3), numbers(3, 2, seed=1)
    assert_same(transform(remat(fun), argnums)(x, y), transform(fun, argnums)(x, y))


def test_has_aux() -> None:
    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return (y * x).sum(), y

    x = numbers(3)
    for t in [
        lambda f: grad(f, has_aux=True)(x),
        lambda f: jacrev(f, has_aux=True)(x),
        lambda f: jacfwd(f, has_aux=True)(x),
        lambda f: jvp(f, (x,), (x,), has_aux=True),
        lambda f: (lambda value, pull, aux: (value, pull(value), aux))(*vjp(f, x, has_aux=True)),
    ]:
        assert_same(t(remat(fun)), t(fun))


class Net(nn.Module):
    """Three blocks remat'd inside: a method, a module, a function that reads a parameter."""

    def __init__(self, ck: Decorator) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3).double(), nn.LayerNorm(3).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("shift", numbers(3))
        self.ck = ck

    def _residual(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ck(self._residual)(x)
        x = self.ck(self.norm)(x)
        return self.ck(lambda x: x.sin() * self.scale + self.shift)(x)


MODULE_TRANSFORMS = {
    "grad": lambda f, ps, x: grad(lambda ps: f(ps, x).sin().sum())(ps),
    "vmap(grad)": lambda f, ps, x: vmap(grad(lambda ps, x: f(ps, x).sin().sum()), in_dims=(None, 0))(ps, x),
    "jvp": lambda f, ps, x: jvp(lambda ps: f(ps, x), (ps,), (ps,)),
    "jvp(grad)": lambda f, ps, x: jvp(grad(lambda ps: f(ps, x).sin().sum()), (ps,), (ps,)),
    "grad(grad)": lambda f, ps, x: grad(
        lambda ps: sum(g.square().sum() for g in grad(lambda ps: f(ps, x).sin().sum())(ps).values())
    )(ps),
    "jacrev": lambda f, ps, x: jacrev(lambda ps: f(ps, x))(ps),
    "functionalize(grad)": lambda f, ps, x: functionalize(grad(lambda ps: f(ps, x).sin().sum()))(ps),
}


@pytest.mark.parametrize("transform", MODULE_TRANSFORMS.values(), ids=MODULE_TRANSFORMS)
def test_functional_call(transform: Callable[..., Any]) -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        net = Net(ck)
        params = {n: p.detach() for n, p in net.named_parameters()}
        results.append(transform(lambda ps, x: functional_call(net, ps, (x,)), params, numbers(4, 3)))
        assert all(p.grad is None for p in net.parameters())
    assert_same(*results)


@pytest.mark.parametrize("transform", MODULE_TRANSFORMS.values(), ids=MODULE_TRANSFORMS)
def test_ensembles(transform: Callable[..., Any]) -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        nets = [Net(ck) for _ in range(3)]
        params, buffers = stack_module_state(nets)
        base = nets[0]

        def one(ps: Any, bs: Any, x: Tensor) -> Tensor:
            return functional_call(base, (ps, bs), (x,))

        def f(ps: Any, x: Tensor) -> Tensor:
            return vmap(one, in_dims=(0, 0, None))(ps, buffers, x)

        detached = {n: p.detach() for n, p in params.items()}
        results.append(transform(f, detached, numbers(4, 3)))
    assert_same(*results)


def test_backward_of_functional_call_reaches_the_given_parameters() -> None:
    """The module has its own parameters back by the time of the rerun."""
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        net = Net(ck)
        params = {n: (p.detach() * 2).requires_grad_() for n, p in net.named_parameters()}
        functional_call(net, params, (numbers(4, 3),)).sin().sum().backward()
        assert all(p.grad is None for p in net.parameters())
        results.append({n: p.grad for n, p in params.items()})
    assert_same(*results)


def test_a_remat_of_functional_call() -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        net = Net(plain)
        params = {n: p.detach() for n, p in net.named_parameters()}
        fun = ck(lambda ps, x: functional_call(net, ps, (x,)))
        results.append(vmap(grad(lambda ps, x: fun(ps, x).sin().sum()), in_dims=(None, 0))(params, numbers(4, 3)))
    assert_same(*results)


def log_determinant(a: Tensor) -> Tensor:
    return torch.slogdet(a)[1]


RIGHT_SIDE = numbers(3, seed=1)


def of_a_solution(a: Tensor) -> Tensor:
    return torch.linalg.solve(a, RIGHT_SIDE).sin().sum()


def of_mish(a: Tensor) -> Tensor:
    return F.mish(a).square().sum()


def tangent_of(fun: Fun, a: Tensor, t: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fun(forward_ad.make_dual(a, t))).tangent


FORWARD_AD: dict[str, Callable[[Fun, Tensor, Tensor], Any]] = {
    "grad": lambda f, a, t: tangent_of(grad(f), a, t),
    "vjp": lambda f, a, t: tangent_of(lambda a: vjp(f, a)[1](torch.ones((), dtype=a.dtype))[0], a, t),
    "grad of grad": lambda f, a, t: tangent_of(grad(lambda a: grad(f)(a).sin().sum()), a, t),
    "backward": lambda f, a, t: tangent_of(lambda a: torch.autograd.grad(f(a), a, create_graph=True)[0], leaf(a), t),
    "linearize": lambda f, a, t: linearize(grad(f), a)[1](t),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("kind", [remat, lambda f: lambda a: checkpoint(f, a, use_reentrant=False)])
@pytest.mark.parametrize("how", FORWARD_AD)
@pytest.mark.parametrize("fun", [log_determinant, of_a_solution, of_mish])
def test_gradients_whose_formula_has_a_tangent_only_where_it_is_recorded(fun: Fun, how: str, kind: Any) -> None:
    a, t = numbers(3, 3) + 3 * torch.eye(3, dtype=torch.float64), numbers(3, 3, seed=2)
    assert_same(FORWARD_AD[how](kind(fun), a, t), FORWARD_AD[how](fun, a, t))


@pytest.mark.parametrize("op", [lambda x: torch.add(x.sin(), x, alpha=2), lambda x: torch.lerp(x, x.sin(), 0.3)])
@pytest.mark.parametrize("kind", [remat(policy=policies.dots_saveable), LiveBytes])
def test_numbers_times_zeros_that_are_not_in_memory(kind: Any, op: Fun) -> None:
    """A ZeroTensor times a number ends the process in a TorchDispatchMode of torch 2.13."""
    w, x = numbers(3, seed=1), leaf(numbers(3))

    def fun(x: Tensor) -> Tensor:
        return grad(lambda x: jvp(lambda x: (op(x) * w).sum(), (x,), (w,))[1])(x)

    expected = fun(x.detach())
    if kind is LiveBytes:
        with kind():
            assert_same(fun(x.detach()), expected)
        return
    kind(fun)(x).sum().backward()
    other = leaf(x)
    fun(other).sum().backward()
    assert_same(x.grad, other.grad)


# torch's own `linearize` warns of what hooks do.
WITH_HOOKS = [t for t in TRANSFORMS if not t.startswith("linearize")]
CALLED_FOR_BOTH_ORDERS = ["autograd inside grad", "backward over forward AD"]


def sets_a_hook(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)
    return y * y


@pytest.mark.parametrize("transform", [t for t in WITH_HOOKS if t not in CALLED_FOR_BOTH_ORDERS])
def test_hooks_belong_to_the_level_where_they_are_set(transform: str) -> None:
    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](remat(sets_a_hook), x), TRANSFORMS[transform](sets_a_hook, x))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch's linearize
def test_a_hook_is_written_down_by_linearize() -> None:
    def pushed(ck: Any) -> Any:
        return linearize(grad(lambda x: ck(lambda x: sets_a_hook(0.5 * x))(x).sum()), x)[1](x.cos())

    x = numbers(3, 3)
    assert_same(pushed(remat), pushed(plain))


def test_hooks_of_a_nested_call_are_told_apart() -> None:
    """In the rerun for `y`, a tensor requires grad that did not in the forward, where another one got a hook."""

    def gradient(ck: Any) -> Tensor:
        y = numbers(3, seed=1).requires_grad_()

        def inner(x: Tensor) -> Tensor:
            return sets_a_hook(y) * sets_a_hook(x)

        return torch.autograd.grad(grad(lambda x: ck(lambda x: 2 * ck(inner)(x))(x).sum())(numbers(3)).sum(), y)[0]

    assert_same(gradient(remat), gradient(plain))


@pytest.mark.parametrize("transform", CALLED_FOR_BOTH_ORDERS)
def test_hooks_that_would_be_called_for_both_orders(transform: str) -> None:
    with pytest.raises(RematError, match=r"sets_a_hook puts a hook on a tensor that it has made, and .* both orders"):
        TRANSFORMS[transform](remat(sets_a_hook), numbers(3, 3))


def test_a_hook_below_a_transform_that_differentiates_a_recorded_backward() -> None:
    x = leaf(numbers(3))
    y = remat(sets_a_hook)(x)
    with pytest.raises(RematError, match=r"puts a hook .* create_graph=True, around a transform, .* both orders"):
        grad(lambda g: torch.autograd.grad(y, x, g, create_graph=True)[0].sin().sum())(numbers(3))


@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_a_hook_that_only_the_forward_sets(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        if not is_rerunning():
            y.register_hook(lambda g: 3 * g)
        return y * y

    with pytest.raises(RematError, match=r"the rerun of .*fun puts hooks on other tensors than its forward"):
        TRANSFORMS[transform](remat(fun), numbers(3))


# Around and inside.

PARAMETER = nn.Parameter(numbers(3, seed=5))


# Before 2.12, torch has no hessian in inference mode.
IN_NO_GRAD = [torch.no_grad, torch.inference_mode] if torch.__version__ >= (2, 12) else [torch.no_grad]


@pytest.mark.parametrize("around", IN_NO_GRAD)
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "vmap(grad)", "jvp(grad)", "grad(grad)", "hessian"])
def test_transforms_in_no_grad_with_a_captured_parameter(transform: str, around: Any) -> None:
    """As in an evaluation. Nothing is recorded at the level of the parameter."""

    def run(ck: Any) -> Any:
        with around():
            return TRANSFORMS[transform](ck(lambda x: torch.sin(x * PARAMETER)), numbers(3, 3))

    assert_same(run(remat), run(plain))


def test_make_fx_with_a_captured_parameter() -> None:
    def traced(ck: Any) -> Any:
        return make_fx(grad(lambda x: ck(lambda x: torch.sin(x * PARAMETER))(x).sum()))(numbers(3))(numbers(3, seed=1))

    assert_same(traced(remat), traced(plain))


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "solve": lambda x: torch.linalg.solve(x, torch.eye(3, dtype=x.dtype)),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "det": torch.linalg.det,
    "group_norm": lambda x: F.group_norm(x, 1),
}
"""Their formulas for the gradient compute other tangents if grad mode is off."""


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
@pytest.mark.parametrize("around", IN_NO_GRAD)
@pytest.mark.parametrize("name", FORMULAS)
def test_forward_over_reverse_in_no_grad(name: str, around: Any, policy: Any) -> None:
    x = numbers(3, 3) + 2 * torch.eye(3, dtype=torch.float64)

    def run(ck: Decorator, transform: Any) -> Any:
        gradient = grad(loss(lambda w: ck(FORMULAS[name])(w).sin()))
        given = x.clone().requires_grad_()
        with around():
            return transform(gradient)(given)

    with_policy = functools.partial(remat, policy=policy)
    for transform in (
        lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
        lambda f: lambda x: vmap(lambda v: jvp(f, (x,), (v,)))(torch.stack([x, x.cos()])),
        lambda f: lambda x: jvp(torch.no_grad()(f), (x,), (x.cos(),)),
    ):
        assert_same(run(with_policy, transform), run(plain, transform))


def test_a_pullback_is_called_after_no_grad() -> None:
    def pulled(ck: Any) -> Any:
        with torch.no_grad():
            _, pull = vjp(ck(lambda x: torch.sin(x * PARAMETER)), numbers(3))
        return pull(numbers(3, seed=1))

    assert_same(pulled(remat), pulled(plain))


class Half(Tensor):
    """Its sines are half as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 0.5 if func is torch.sin else out


class HalfParameter(Half, nn.Parameter):
    pass


HALF, HALF_PARAMETER = numbers(3, seed=6).as_subclass(Half), HalfParameter(numbers(3, seed=7))
OF_SUBCLASSES: dict[str, Callable[[Decorator, Tensor], Tensor]] = {
    "argument": lambda ck, x: ck(torch.sin)(x.as_subclass(Half)),
    "constant": lambda ck, x: ck(lambda x: torch.sin(HALF) * x.cos())(x),
    "parameter": lambda ck, x: ck(lambda x: torch.sin(HALF_PARAMETER) * x.cos())(x),
}


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "jvp(grad)", "grad(jvp)", "grad(grad)", "hessian"])
@pytest.mark.parametrize("kind", OF_SUBCLASSES)
def test_subclasses_of_tensors_stay_what_they_are(kind: str, transform: str) -> None:
    def run(ck: Any) -> Any:
        return TRANSFORMS[transform](lambda x: OF_SUBCLASSES[kind](ck, x).as_subclass(Tensor), numbers(3, 3))

    assert_same(run(remat), run(plain))


class Unwrapping(Tensor):
    """Whatever reads it gets a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x.as_subclass(Tensor) if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
@pytest.mark.parametrize("transform", ["grad", "vmap(grad)"])
def test_a_subclass_that_unwraps_itself(transform: str, policy: Any) -> None:
    w = numbers(3, 3).as_subclass(Unwrapping)

    def run(ck: Any) -> Any:
        return TRANSFORMS[transform](lambda x: ck(lambda w, x: torch.tanh(x @ w))(w, x), numbers(3, 3, seed=1))

    assert_same(run(remat(policy=policy)), run(plain))


OUTSIDE = leaf(numbers(3, seed=8))
SINES = OUTSIDE.sin()
PULL = vjp(torch.sin, numbers(3, seed=9))[1]
OF_OTHER_GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "pullback": lambda x: PULL(x.sin())[0],
    "pullback of a constant": lambda x: x.sin() * PULL(x.detach())[0],
    "torch.autograd.grad": lambda x: x.sin() * torch.autograd.grad(SINES, OUTSIDE, x.detach(), retain_graph=True)[0],
    "torch.autograd.grad, by keywords": lambda x: (
        x.sin() * torch.autograd.grad(inputs=OUTSIDE, outputs=SINES, grad_outputs=x.detach(), retain_graph=True)[0]
    ),
}


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)"])
def test_the_derivative_of_an_argument_that_is_returned(transform: str) -> None:
    """It has an older graph, but not at the level of the derivative."""

    def fun(x: Tensor) -> Tensor:
        return vjp(lambda z: z, x)[1](x.cos())[0] + x.sin()

    actual, expected = (TRANSFORMS[transform](lambda x, ck=ck: ck(fun)(x.exp()), numbers(3)) for ck in (remat, plain))
    assert_same(actual, expected)


DERIVATIVES_INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vjp, of another tensor": lambda x, w: vjp(lambda z: w, x)[1](x)[0] + x * w,
    "vjp, of this and another": lambda x, w: sum(vjp(lambda z: (z.sin(), w), x)[1]((x, w))) * w,
    "grad, of another tensor": lambda x, w: grad(lambda z: w.sum())(x) + x * w,
    "vmap gives back a constant": lambda x, w: (
        vjp(lambda z: vmap(lambda q: z)(torch.stack([x, w])).sum(0), x.cos())[1](x)[0] * w
    ),
    "vmap gives back a constant, to grad": lambda x, w: (
        grad(lambda z: vmap(lambda q: z)(torch.stack([x, w])).square().sum())(w) * x
    ),
}


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", DERIVATIVES_INSIDE)
def test_derivatives_inside_of_what_is_not_computed_there(kind: str, captured: bool, transform: str) -> None:
    inside = DERIVATIVES_INSIDE[kind]

    def run(ck: Decorator) -> Any:
        def fun(x: Tensor) -> Tensor:
            x, w = x.exp(), x * 2  # with graphs of their own
            return ck(lambda x: inside(x, w))(x) if captured else ck(inside)(x, w)

        return TRANSFORMS[transform](fun, numbers(3))

    assert_same(run(remat), run(plain))


ASKS_FOR_REQUIRES_GRAD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autograd.grad": lambda x, w: torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)[0] * (x * w).cos(),
    "attention with a mask": lambda x, w: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], attn_mask=x * w
    )[0, 0],
    "column_stack": lambda x, w: torch.column_stack([x.sin(), w * x]),
    "a flag": lambda x, w: (x * w).sin() if x.requires_grad else (x * w).cos(),
}
"""They run other ops where nothing requires grad, or raise an error."""


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
@pytest.mark.parametrize("inner", ["grad", "jvp(grad)"])
@pytest.mark.parametrize("name", ASKS_FOR_REQUIRES_GRAD)
def test_a_derivative_of_per_sample_gradients(name: str, inner: str, policy: Any) -> None:
    """Its rerun has a level of `grad` above the `vmap`, as the forward."""
    w, xs = numbers(3, 3, seed=1), numbers(2, 3, 3)

    def penalties(ck: Decorator, xs: Tensor) -> Tensor:
        gradient = grad(lambda x: ck(ASKS_FOR_REQUIRES_GRAD[name])(x, w).square().sum())
        if inner == "grad":
            return vmap(gradient)(xs)
        return vmap(lambda x: jvp(gradient, (x,), (x.cos(),))[1])(xs)

    def run(ck: Decorator) -> Any:
        given = leaf(xs)
        backward = torch.autograd.grad(penalties(ck, given).square().sum(), given)
        return backward, grad(lambda xs: penalties(ck, xs).square().sum())(xs)

    assert_same(run(functools.partial(remat, policy=policy)), run(plain))


@pytest.mark.parametrize("of", [lambda x: SINES * x.detach(), lambda x: SINES * OUTSIDE * x])
def test_a_graph_from_outside_that_ops_of_the_function_lead_to(of: Callable[[Tensor], Tensor]) -> None:
    """A rerun would not have it: a part of the derivative would be lost."""

    def fun(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(of(x).sum(), OUTSIDE, create_graph=True, materialize_grads=True)
        return x * SINES * OUTSIDE + g

    with pytest.raises(RematError, match="differentiates a tensor that was computed outside of it"):
        remat(fun)(leaf(numbers(3)))


def through_a_captured_input(x: Tensor, h: Tensor) -> Tensor:
    _, g = torch.autograd.grad((h * h * x).sum(), [h, x])
    return g * x


def through_an_intermediate_input(x: Tensor, h: Tensor) -> Tensor:
    u = h * x
    _, g = torch.autograd.grad((u * u).sum(), [u, x])
    return g * x


@pytest.mark.parametrize("fun", [through_a_captured_input, through_an_intermediate_input])
def test_a_graph_from_outside_beyond_an_input(fun: Callable[..., Tensor]) -> None:
    x = leaf(numbers(3))
    with pytest.raises(RematError, match="differentiates a tensor that was computed outside of it"):
        remat(fun)(x, x.sin())


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "jacrev", "grad(grad)"])
def test_a_derivative_inside_by_what_no_transform_differentiates(transform: str) -> None:
    """Under a transform, `torch.autograd.grad` gives no gradient of a plain leaf. At the base of a rerun it would."""
    w = leaf(numbers(3, seed=1))

    def fun(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((w * w * x).sum(), w, allow_unused=True, materialize_grads=True)
        return x.sin() + g * x

    with pytest.raises(
        CheckpointError, match=r"calls grad.* gradients of other inputs.* Call torch\.func\.grad inside"
    ):
        TRANSFORMS[transform](remat(fun), numbers(3, 3))


UNDER_HOOKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "torch's checkpoint": lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
    "save_on_cpu": lambda f, x: f(x),
}


@pytest.mark.parametrize("around", UNDER_HOOKS)
@pytest.mark.parametrize("wrt", ["an argument", "a captured leaf"])
def test_a_derivative_inside_by_a_leaf_under_saved_tensors_hooks(around: str, wrt: str) -> None:
    """A rerun gets another tensor for the leaf, with the same node."""

    def run(ck: Any, call: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))

        def fun(x: Tensor) -> Tensor:
            u = (x * w).sin()
            (g,) = torch.autograd.grad(u.sum(), x if wrt == "an argument" else w, create_graph=True)
            return u * g

        with torch.autograd.graph.save_on_cpu() if around == "save_on_cpu" else contextlib.nullcontext():
            y = call(ck(fun), x)
        y.sum().backward()
        return x.grad, w.grad

    assert_same(run(remat, UNDER_HOOKS[around]), run(plain, lambda f, x: f(x)))


@pytest.mark.parametrize("how", ["doubles", "collects"])
def test_a_derivative_inside_that_calls_a_hook_in_second_order(how: str) -> None:
    def fun(x: Tensor) -> Tensor:
        u, found = x.sin(), []  # type: tuple[Tensor, list[Tensor]]
        u.register_hook((lambda g: g * 2) if how == "doubles" else found.append)
        (g,) = torch.autograd.grad(u.pow(2).sum(), x)
        return (g if how == "doubles" else found[0]) * x

    def second(f: Fun) -> Any:
        x = leaf(numbers(3))
        return torch.autograd.grad(grad(lambda x: f(x).pow(2).sum())(x).sum(), x)

    assert second(fun)
    assert_same(grad(lambda x: remat(fun)(x).sum())(numbers(3)), grad(lambda x: fun(x).sum())(numbers(3)))
    with pytest.raises(RematError, match=r"puts a hook on a tensor .* torch\.autograd\.grad inside would call it"):
        second(remat(fun))


class Penalty(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.penalty = lambda x: torch.autograd.grad((w * x).sin().sum(), w, create_graph=True)[0] * x

    def forward(self, x: Tensor) -> Tensor:
        return self.penalty(x)


def test_a_derivative_inside_by_a_leaf_that_a_function_in_a_module_holds() -> None:
    def run(ck: Decorator) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        (g,) = torch.autograd.grad(ck(Penalty(w))(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), (x, w))

    assert_same(run(remat), run(plain))


def test_a_graph_from_outside_that_does_not_lead_to_the_input() -> None:
    def run(ck: Decorator) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        h, u = w.exp(), x.sin()
        fun = ck(lambda x: torch.autograd.grad((x * h).sin().sum(), x, create_graph=True)[0] * h)
        return torch.autograd.grad(fun(u).sum() + fun(x).sum(), (x, w))

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("kind", OF_OTHER_GRAPHS)
def test_a_graph_from_outside_is_not_differentiated(kind: str) -> None:
    fun = remat(OF_OTHER_GRAPHS[kind])
    for run in (lambda: fun(leaf(numbers(3))), lambda: grad(lambda x: fun(x).sum())(numbers(3))):
        with pytest.raises(RematError, match="differentiates a tensor that was computed outside of it"):
            run()
