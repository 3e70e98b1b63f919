"""Plain autograd around remat, and autograd and torch.func inside of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TRANSFORMS, UNIT, CountOps, Fun, ReadsTwice, activation, assert_same, leaf, numbers, pair, plain
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.function import once_differentiable
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from remat import CheckpointError, RematError, remat
from remat import checkpoint as checkpoint_of_remat
from remat.debug import LiveBytes
from remat.policies import everything_saveable

Decorator = Callable[[Any], Any]

# Against finite differences.

FUNS: dict[str, tuple[Callable[..., Any], int]] = {
    "elementwise": (lambda x: (x.sin() * x).exp(), 1),
    "matmul": (lambda x, w: torch.tanh(x @ w), 2),
    "several results": (lambda x, w: (x.sin() @ w, x * w.cos()), 2),
    "softmax": (lambda x: torch.softmax(x @ x, -1), 1),
    "layer norm": (lambda x, w: F.layer_norm(x, (3,), w[0], w[1]), 2),
    "views": (lambda x: x.sin().t()[1:], 1),
    "in place": (lambda x: x.sin().mul_(2).sigmoid_(), 1),
    "indexing": (lambda x: x[[0, 0, 2]].sin(), 1),
    "complex": (lambda x, y: torch.complex(x, y).exp().abs(), 2),
    "remat inside": (lambda x, w: remat(lambda y: remat(torch.tanh)(y @ w) * x)(x.sin()), 2),
    "grad inside": (lambda x, w: grad(lambda y: (y.sin() * w).sum())(x), 2),
    "vmap(grad) inside": (lambda x: vmap(grad(lambda r: r.sin().prod()))(x), 1),
    "a result without a path": (lambda x, w: x.sin(), 2),
}
EACH = pytest.mark.parametrize(("fun", "n"), FUNS.values(), ids=FUNS)


@EACH
def test_gradcheck(fun: Callable[..., Any], n: int) -> None:
    inputs = tuple(leaf(numbers(3, 3, seed=i)) for i in range(n))
    assert gradcheck(
        remat(fun), inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )


@EACH
def test_gradgradcheck(fun: Callable[..., Any], n: int) -> None:
    inputs = tuple(leaf(numbers(3, 3, seed=i)) for i in range(n))
    assert gradgradcheck(remat(fun), inputs, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


def test_gradcheck_of_a_captured_tensor() -> None:
    def fun(w: Tensor) -> Tensor:
        return remat(lambda x: torch.tanh(x @ w))(numbers(3, 3))

    w = leaf(numbers(3, 3, seed=1))
    assert gradcheck(fun, w, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(fun, w, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian])
def test_gradcheck_around_torch_func(transform: Any) -> None:
    fun = remat(lambda r: r.sin().prod())
    assert gradcheck(lambda x: transform(fun)(x), leaf(numbers(3)))
    assert gradgradcheck(lambda x: transform(fun)(x), leaf(numbers(3)))


# torch.autograd's own calls.


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def test_grad_with_inputs_runs_only_what_leads_to_them() -> None:
    x, w, v = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1)), leaf(numbers(3, 3, seed=2))
    y = remat(block)(x, w)
    z = remat(lambda y, v: (y @ v).sigmoid())(y, v)
    with CountOps() as ops:
        (gv,) = torch.autograd.grad(z.sum(), v, retain_graph=True)
    assert (ops["sigmoid"], ops["tanh"]) == (1, 0)
    assert v.grad is None
    assert_same(gv, torch.autograd.grad((block(x, w) @ v).sigmoid().sum(), v)[0])
    z.sum().backward(inputs=[w])
    assert x.grad is None
    assert_same(w.grad, torch.autograd.grad((block(x, w) @ v).sigmoid().sum(), w)[0])


@pytest.mark.parametrize("wrt", [["x"], ["w"], ["x", "w"], ["y"], ["y", "x"], ["w", "w"]])
def test_grad_of_any_inputs(wrt: list[str]) -> None:
    results = []
    for ck in (remat, plain):
        t = {"x": leaf(numbers(3, 3)), "w": leaf(numbers(3, 3, seed=1))}
        t["y"] = ck(block)(t["x"], t["w"])
        z = ck(lambda y: y.sin() * t["w"])(t["y"])
        results.append(torch.autograd.grad(z.sum(), [t[n] for n in wrt], allow_unused=True))
    assert_same(*results)


@pytest.mark.parametrize("create_graph", [True, False])
def test_retain_graph_twice(create_graph: bool) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = remat(lambda x: block(x, w))(x).sum()
    expected = torch.autograd.grad(block(x, w).sum(), (x, w))
    with CountOps() as ops:
        for _ in range(3):
            got = torch.autograd.grad(y, (x, w), retain_graph=True, create_graph=create_graph)
            assert_same(tuple(g.detach() for g in got), expected)
    assert ops["tanh"] == 3
    y.backward(retain_graph=True)
    y.backward()
    assert_same(x.grad, 2 * expected[0])


def test_both_results_of_one_call_backward_one_after_the_other() -> None:
    x = leaf(numbers(3))
    a, b = remat(lambda x: (x.sin(), x.exp()))(x)
    a.sum().backward(retain_graph=True)
    b.sum().backward()
    assert_same(x.grad, x.detach().cos() + x.detach().exp())


def test_create_graph_records_and_without_it_does_not() -> None:
    x = leaf(numbers(3))
    for create_graph in (False, True):
        (g,) = torch.autograd.grad(remat(torch.sin)(x).sum(), x, create_graph=create_graph)
        assert g.requires_grad == create_graph


def test_gradient_penalty() -> None:
    results = []
    for ck in (remat, plain):
        x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        y = ck(lambda x: block(x, w))(ck(lambda x: block(x, w))(x))
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.sum() + g.square().sum()).backward()
        results.append((x.grad, w.grad))
    assert_same(*results)


def test_accumulates_in_grad_as_plain() -> None:
    results = []
    for ck in (remat, plain):
        w = leaf(numbers(3, 3))
        w.grad = torch.ones(3, 3).double()
        before = w.grad
        for seed in range(3):
            ck(lambda x: block(x, w))(numbers(3, 3, seed=seed)).sum().backward()
        assert w.grad is before
        results.append(w.grad)
    assert_same(*results)


@pytest.mark.parametrize(
    ("vectorize", "strategy"), [(False, "reverse-mode"), (True, "reverse-mode"), (True, "forward-mode")]
)
def test_functional_jacobian_and_hessian(vectorize: bool, strategy: str) -> None:
    x = numbers(3)
    for api, out in [
        (torch.autograd.functional.jacobian, lambda y: y),
        (torch.autograd.functional.hessian, torch.sum),
    ]:
        key = "strategy" if out is not torch.sum else "outer_jacobian_strategy"
        actual, expected = (
            api(lambda x: out(ck(lambda x: x.sin() * x.exp())(x)), x, vectorize=vectorize, **{key: strategy})
            for ck in (remat, plain)
        )
        assert_same(actual, expected)


def test_anomaly_mode() -> None:
    x = leaf(numbers(3))
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        remat(lambda x: x.sin().exp())(x).sum().backward()
    assert_same(x.grad, grad(lambda x: x.sin().exp().sum())(x.detach()))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_finds_no_nan_in_a_nest() -> None:
    def second(w: Tensor, ck: Any) -> Tensor:
        inner = ck(lambda w, x: (x * w).tanh() * w)
        outer = ck(lambda w, x: inner(w, inner(w, x)))
        (g,) = torch.autograd.grad(outer(w, outer(w, w.cos())).square().sum(), w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)[0]

    with torch.autograd.detect_anomaly():
        assert_same(*(second(leaf(numbers(3)), ck) for ck in (remat, plain)))


def test_non_leaf_inputs_keep_their_grad_when_asked() -> None:
    results = []
    for ck in (remat, plain):
        y = leaf(numbers(3)) * 2
        y.retain_grad()
        ck(torch.sin)(y).sum().backward()
        results.append(y.grad)
    assert_same(*results)


def test_sparse_gradients() -> None:
    results = []
    for ck in (remat, plain):
        w = leaf(numbers(5, 3))
        ck(lambda i: F.embedding(i, w, sparse=True).sin())(torch.tensor([0, 2, 0])).sum().backward()
        assert w.grad.is_sparse
        results.append(w.grad.to_dense())
    assert_same(*results)


def test_modules_of_any_kind() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    for module in [
        nn.Linear(6, 6),
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU()),
        nn.MultiheadAttention(6, 2, batch_first=True),
        nn.GRU(6, 5),
        nn.LSTM(6, 5),
    ]:
        module.double()
        results = []
        for ck in (remat, plain):
            torch.manual_seed(1)
            module.zero_grad()
            inputs = leaf(x)
            args = (inputs,) * 3 if isinstance(module, nn.MultiheadAttention) else (inputs,)
            out = ck(module)(*args)
            (out[0] if isinstance(out, tuple) else out).sin().sum().backward()
            results.append((inputs.grad, {n: p.grad.clone() for n, p in module.named_parameters()}))
        assert_same(*results)


# saved_tensors_hooks around it.


def test_save_on_cpu() -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    with torch.autograd.graph.save_on_cpu():
        remat(lambda x: block(x, w))(x.sin()).sum().backward()
    expected = torch.autograd.grad(block(x.sin(), w).sum(), (x, w))
    assert_same((x.grad, w.grad), expected)


@pytest.mark.parametrize("policy", [None, everything_saveable])
def test_save_on_cpu_around_a_function_of_the_users(policy: Any) -> None:
    """In the rerun, the calls of the hooks are not the function's."""

    def fun(x: Tensor) -> Tensor:
        return ReadsTwice.apply(x * 2).tanh()

    x = leaf(numbers(3))
    with torch.autograd.graph.save_on_cpu():
        actual = torch.autograd.grad(remat(fun, policy=policy)(x).sum(), x)
    assert_same(actual, torch.autograd.grad(fun(x).sum(), x))


@pytest.mark.parametrize("around", ["forward", "both"])
def test_saved_tensors_hooks_see_the_arguments_alone(around: str) -> None:
    packed: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t * 1

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    with hooks:
        y = remat(lambda x: block(block(x, w), w).sum())(x)
        assert packed == [(3, 3)]  # w is a leaf, and the graph holds it
        if around == "both":
            y.backward()
    if around == "forward":
        y.backward()
    assert_same((x.grad, w.grad), torch.autograd.grad(block(block(x, w), w).sum(), (x, w)))


@pytest.mark.parametrize("pack", [torch.clone, torch.detach, lambda t: t])
@pytest.mark.parametrize("hooked", [0, 1], ids=["argument", "captured"])
def test_the_hook_of_a_leaf_is_called_once_under_saved_tensors_hooks(hooked: int, pack: Any) -> None:
    """What they unpack leads to the leaf, with its hooks."""

    def gradients(ck: Any) -> Any:
        leaves = x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        leaves[hooked].register_hook(lambda g: g * 2)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = ck(lambda x: (x * w).sin())(x)
        y.sum().backward()
        return x.grad, w.grad

    assert_same(gradients(remat), gradients(lambda fun: fun))


def test_a_captured_leaf_that_is_changed_before_the_backward_under_saved_tensors_hooks() -> None:
    x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
    with torch.autograd.graph.saved_tensors_hooks(torch.detach, lambda t: t):
        y = remat(lambda x: (x * w).sin())(x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(CheckpointError, match="modified by an inplace operation"):
        y.sum().backward()


def test_operands_are_kept_where_the_hooks_put_them() -> None:
    """Offloading the inputs of blocks: nothing of them stays."""
    with LiveBytes() as meter:
        x = activation().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().tobytes(), _from_bytes):
            y = remat(lambda x: x.sin().cos())(x.exp())
        assert meter.current <= 2 * UNIT + 100  # x and y: not x.exp(), nor what the function computed
        y.sum().backward()
    z = leaf(x)
    z.exp().sin().cos().sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def test_torch_checkpoint_around_and_inside() -> None:
    for fun in (
        lambda x, w: checkpoint(lambda x: remat(lambda x: block(x, w))(x).sin(), x, use_reentrant=False),
        lambda x, w: remat(lambda x: checkpoint(lambda x: block(x, w), x, use_reentrant=False).sin())(x),
    ):
        x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        fun(x, w).sum().backward()
        assert_same((x.grad, w.grad), torch.autograd.grad(block(x, w).sin().sum(), (x, w)))


# Autograd and torch.func inside of the function.


def pinn_by_autograd(net: Any, xt: Tensor) -> Tensor:
    """The residual of Burgers' equation, with autograd.grad(create_graph=True)."""
    xt = xt if xt.requires_grad else xt.requires_grad_()
    u = net(xt)
    (du,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), xt, create_graph=True)
    return du[:, 1] + u[:, 0] * du[:, 0] - 0.01 * ddu[:, 0]


def pinn_by_func(net: Any, xt: Tensor) -> Tensor:
    def u(p: Tensor) -> Tensor:
        return net(p[None])[0, 0]

    def residual(p: Tensor) -> Tensor:
        du = grad(u)(p)
        return du[1] + u(p) * du[0] - 0.01 * hessian(u)(p)[0, 0]

    return vmap(residual)(xt)


@pytest.mark.parametrize("residual", [pinn_by_autograd, pinn_by_func])
@pytest.mark.parametrize("where", ["around the residual", "around the network", "around the layers", "all"])
def test_pinn(residual: Any, where: str) -> None:
    results = []
    for used in (True, False):
        ck = remat if used else plain
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)]).double()

        def net(x: Tensor) -> Tensor:
            for layer in layers[:-1]:
                fun = lambda x, layer=layer: torch.tanh(layer(x))  # noqa: E731
                x = (ck if where in ("around the layers", "all") else plain)(fun)(x)
            return layers[-1](x)

        inner = ck(net) if where in ("around the network", "all") else net
        loss = lambda xt: residual(inner, xt).square().mean()  # noqa: E731
        if where in ("around the residual", "all"):
            loss = ck(loss)
        value = loss(numbers(6, 2))
        value.backward()
        results.append((value.detach(), [p.grad for p in layers.parameters()]))
    assert_same(*results)


def maml_by_func(net: Any, ck: Decorator, params: Any, x: Tensor, y: Tensor) -> Tensor:
    def loss(ps: Any, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(net, ps, (x,)) - y).square().mean()

    @ck
    def step(ps: Any) -> Any:
        gs = grad(loss)(ps, x, y)
        return {k: ps[k] - 0.1 * gs[k] for k in ps}

    for _ in range(3):
        params = step(params)
    return loss(params, x.cos(), y)


def maml_by_autograd(net: Any, ck: Decorator, params: Any, x: Tensor, y: Tensor) -> Tensor:
    def loss(ps: Any, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(net, ps, (x,)) - y).square().mean()

    @ck
    def step(ps: Any) -> Any:
        gs = torch.autograd.grad(loss(ps, x, y), list(ps.values()), create_graph=True)
        return {k: p - 0.1 * g for (k, p), g in zip(ps.items(), gs, strict=True)}

    for _ in range(3):
        params = step(params)
    return loss(params, x.cos(), y)


@pytest.mark.parametrize("maml", [maml_by_func, maml_by_autograd])
@pytest.mark.parametrize("around", [".backward()", "grad", "vmap(grad)", "jvp"])
def test_maml(maml: Any, around: str) -> None:
    if maml is maml_by_autograd and around == "jvp":
        around = ".backward()"  # torch.autograd.grad needs leaves that require grad
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        params = {k: p.detach() for k, p in net.named_parameters()}
        x, y = numbers(5, 2), numbers(5, 1, seed=1)

        def meta(ps: Any, x: Tensor) -> Tensor:
            return maml(net, ck, ps, x, y)

        if around == ".backward()":
            leaves = {k: leaf(p) for k, p in params.items()}
            meta(leaves, x).backward()
            results.append({k: p.grad for k, p in leaves.items()})
        elif around == "grad":
            results.append(grad(meta)(params, x))
        elif around == "vmap(grad)":
            results.append(vmap(grad(meta), (None, 0))(params, pair(x)))
        else:
            results.append(jvp(lambda ps: meta(ps, x), (params,), (params,)))
    assert_same(*results)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("around", ["plain", "grad", "vmap(grad)", "grad(grad)", "jvp(grad)"])
def test_autograd_grad_around_a_remat_inside_torch_func(around: str, create_graph: bool) -> None:
    """What the user's own backward pass gives can be differentiated again, at every level."""

    def program(ck: Decorator) -> Fun:
        def fun(x: Tensor) -> Tensor:
            y = ck(lambda x: x.sin() * x)(x)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
            return (g.sin() * y).sum()

        return fun

    x = numbers(3)
    run = {
        "plain": lambda f: torch.autograd.grad(f(z := leaf(x)), z)[0],
        "grad": lambda f: grad(f)(x),
        "vmap(grad)": lambda f: vmap(grad(f))(pair(x)),
        "grad(grad)": lambda f: grad(lambda x: grad(f)(x).sin().sum())(x),
        "jvp(grad)": lambda f: jvp(grad(f), (x,), (x,)),
    }[around]
    assert_same(run(program(remat)), run(program(plain)))


def test_backward_inside_of_the_function() -> None:
    """An inner optimisation on a leaf of its own."""

    def fun(x: Tensor) -> Tensor:
        z = torch.zeros_like(x.detach()).requires_grad_()
        ((z + 1) ** 2).sum().backward()
        (g,) = torch.autograd.grad((z.sin() * x.detach()).sum(), z)
        return x.sin() * (z.detach() - 0.1 * z.grad + g)

    x = leaf(numbers(3))
    assert_same(torch.autograd.grad(remat(fun)(x).sum(), x), torch.autograd.grad(fun(x).sum(), x))


def test_enable_grad_and_detach_inside() -> None:
    def fun(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
            with torch.enable_grad():
                z = (x * 2).cos()
        return y * z

    x = leaf(numbers(3))
    assert_same(torch.autograd.grad(remat(fun)(x).sum(), x), torch.autograd.grad(fun(x).sum(), x))
    x = numbers(3)
    assert_same(grad(lambda x: remat(fun)(x).sum())(x), grad(lambda x: fun(x).sum())(x))


# The function of a vjp.


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_vjp_function_called_any_number_of_times(times: int) -> None:
    x = numbers(3)
    with CountOps() as ops:
        value, pull = vjp(remat(torch.tanh), x)
        results = [pull(torch.full_like(x, k)) for k in range(times)]
    assert ops["tanh"] == 1 + times
    assert_same(value, x.tanh())
    for k, result in enumerate(results):
        assert_same(result, (k * (1 - x.tanh() ** 2),))


LATER: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda pull, v: grad(lambda v: pull(v)[0].square().sum())(v),
    "vmap": lambda pull, v: vmap(pull)(pair(v)),
    "jvp": lambda pull, v: jvp(pull, (v,), (v,)),
    "jacrev": lambda pull, v: jacrev(lambda v: pull(v)[0])(v),
    "jacfwd": lambda pull, v: jacfwd(lambda v: pull(v)[0])(v),
    "vmap(grad)": lambda pull, v: vmap(grad(lambda v: pull(v)[0].square().sum()))(pair(v)),
    "grad(grad)": lambda pull, v: grad(lambda v: grad(lambda v: pull(v)[0].pow(3).sum())(v).sum())(v),
    "backward": lambda pull, v: torch.autograd.grad(pull(w := leaf(v))[0].square().sum(), w),
    "forward AD": lambda pull, v: _dual(pull, v),
    "another vjp": lambda pull, v: vjp(pull, v)[1]((v,)),
    "no_grad": lambda pull, v: torch.no_grad()(pull)(v),
}


def _dual(pull: Any, v: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(pull(forward_ad.make_dual(v, v))[0]))


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_vjp_function_called_after_other_transforms_began(later: Any, captured: bool, inner: bool) -> None:
    x, w, v = numbers(3), numbers(3, seed=1), numbers(3, seed=2)
    not_in_vmap = (LATER["backward"], LATER["forward AD"])
    results = []
    for ck in (remat, plain):

        def fun(x: Tensor, w: Tensor) -> Tensor:
            y = ck(lambda x: x.sin() * w)(x) if captured else ck(lambda x, w: x.sin() * w)(x, w)
            return ck(torch.tanh)(y)

        def whole(w: Tensor) -> Any:
            _, pull = vjp(lambda x: fun(x, w), x)
            return later(pull, v)

        results.append(vmap(whole)(pair(w)) if inner and later not in not_in_vmap else whole(w))
    assert_same(*results)


def test_vjps_of_vjps_interleaved() -> None:
    x, results = numbers(3), []
    for ck in (remat, plain):
        f, g = ck(lambda x: x.sin() * x), ck(lambda x: x.exp())
        y, pull_f = vjp(f, x)
        z, pull_g = vjp(g, y)
        first = pull_f(pull_g(z)[0])
        again, pull_of_pull = vjp(lambda v: pull_f(pull_g(v)[0])[0], z)
        results.append((first, again, pull_of_pull(x), pull_f(x), pull_g(x)))
    assert_same(*results)


def test_gradients_that_nobody_asks_for_are_not_computed() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), leaf(numbers(2, 4))
    for recorded in (False, True):
        products = []
        for ck in (plain, remat):
            with CountOps() as count:
                torch.autograd.grad(ck(net)(x).sum(), x, create_graph=recorded)
            products.append(count.counts["mm"])
        assert products[0] == products[1]


def test_the_second_backward_of_sparse_gradients() -> None:
    grads = []
    for ck in (plain, remat):
        embedding, x = nn.Embedding(5, 4, sparse=True).double(), leaf(numbers(4))
        with torch.no_grad():
            embedding.weight.copy_(numbers(5, 4, seed=1))
        y = ck(lambda z, e=embedding: e(torch.tensor([0, 2])).sum(0) * z.sin())(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.sum().backward()
        assert embedding.weight.grad is not None
        grads.append((x.grad, embedding.weight.grad.to_dense()))
    assert_same(*grads)


class ExpOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def gradient_inside(x: Tensor) -> Tensor:
    y = ExpOnce.apply(x) * x
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("policy", [None, everything_saveable])
def test_once_differentiable(policy: Any) -> None:
    """Torch raises an error in `.backward()`, and computes a wrong gradient in `autograd.grad`."""
    x = leaf(numbers(3))
    says = pytest.raises(RuntimeError, match="once_differentiable")
    f = remat(lambda x: ExpOnce.apply(x) * x, policy=policy)
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    assert_same(g.detach(), ((x + 1) * x.exp()).detach())
    for second in (lambda: g.sum().backward(retain_graph=True), lambda: torch.autograd.grad(g.sum(), x)):
        with says:
            second()
    with says:
        remat(gradient_inside, policy=policy)(x).sum().backward()


def test_a_differentiated_argument_that_the_result_does_not_depend_on() -> None:
    """The rerun of a recorded backward is plain autograd all the same."""

    def fun(x: Tensor, _: Tensor) -> Tensor:
        y = ReadsTwice.apply(x)  # it has no `setup_context`, so torch.func does not take it
        y.register_hook(lambda g: g * 2)
        return y * x

    def both_orders(ck: Decorator) -> Any:
        x, other = leaf(numbers(3)), leaf(numbers(3))
        (first,) = torch.autograd.grad(ck(fun)(x, other).sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.sum(), x)

    assert_same(both_orders(remat), both_orders(plain))


@pytest.mark.parametrize("differentiated", [True, False])
def test_a_tangent_that_only_no_grad_reads(differentiated: bool) -> None:
    def fun(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = w.cos()
        return scale * x

    def tangents(fun: Fun) -> list[Tensor | None]:
        with forward_ad.dual_level():
            w, x = numbers(3).requires_grad_(differentiated), leaf(numbers(3, seed=1))
            y = fun(forward_ad.make_dual(w, numbers(3, seed=2)), x)
            (g,) = torch.autograd.grad(y.sin().sum(), x)
            return [*forward_ad.unpack_dual(y), *forward_ad.unpack_dual(g)]

    assert_same(tangents(remat(fun)), tangents(fun))


def test_forward_over_reverse_in_batches_with_an_unused_argument() -> None:
    x, y = numbers(3), numbers(3, seed=1)

    def hessian_of(fun: Fun) -> Any:
        return torch.autograd.functional.hessian(fun, (x, y), vectorize=True, outer_jacobian_strategy="forward-mode")

    def fun(x: Tensor, y: Tensor) -> Tensor:
        return x.sin().sum()

    assert_same(hessian_of(remat(fun)), hessian_of(fun))


def test_a_hook_in_a_function_of_a_dual_under_a_mode() -> None:
    """To make the forward's graph forget a number that it has saved must not go through the mode: that was a crash."""

    def fun(x: Tensor) -> Tensor:
        y = torch.sin(x * 2) * 2
        y.register_hook(lambda g: g)
        return y

    with LiveBytes(), forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf(numbers(3)), torch.ones(3, dtype=torch.float64))
        assert_same(forward_ad.unpack_dual(remat(fun)(dual)).tangent, forward_ad.unpack_dual(fun(dual)).tangent)


def test_hooks_on_what_is_saved_would_lose_tangents() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(leaf(numbers(3)), numbers(3, seed=1))
        with torch.autograd.graph.save_on_cpu(), pytest.raises(RematError, match="outside of the hooks"):
            remat(torch.sin)(x)


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_sparse_tensor_in_forward_mode(make: Any, captured: bool) -> None:
    table, x, t = make(numbers(3, 3).triu()), numbers(3, 2), numbers(3, 2, seed=1)
    results = []
    for ck in (remat, plain):
        fun = ck(lambda a, x: (x * a._nnz()).sin())
        of_x = ck(lambda x, fun=fun: fun(table, x)) if captured else lambda x, fun=fun: fun(table, x)
        with forward_ad.dual_level():
            results.append(tuple(forward_ad.unpack_dual(of_x(forward_ad.make_dual(x, t)))))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("ck", [remat, lambda fun: lambda *args: checkpoint_of_remat(fun, *args, use_reentrant=False)])
def test_traced_by_jit(ck: Any) -> None:
    traced = torch.jit.trace(ck(lambda x: torch.tanh(x).sin()), leaf(numbers(3)), check_trace=False)
    x = numbers(3, seed=1)
    assert_same(traced(x), torch.tanh(x).sin())


class FixedPoint(torch.autograd.Function):
    """Implicit differentiation: the backward calls the pullback of a `vjp`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(60):
            z = torch.tanh(z @ w + x)
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        w, x, z = ctx.saved_tensors
        _, pull = vjp(lambda w, x, z: torch.tanh(z @ w + x), w, x, z)
        u = cotangent
        for _ in range(40):
            u = cotangent + pull(u)[2]
        return pull(u)[:2]


@pytest.mark.parametrize("nested", [False, True])
def test_a_function_whose_backward_calls_a_pullback(nested: bool) -> None:
    w, x = numbers(3, 3) * 0.1, numbers(3, seed=1)
    results = []
    for ck in (remat, plain):
        inner = ck(lambda w, x: FixedPoint.apply(w, x))
        fun = ck(lambda w, x, inner=inner: inner(w, x).sin()) if nested else inner
        gradient = lambda w, x, fun=fun: grad(lambda x: fun(w, x).square().sum())(x)  # noqa: E731
        second = grad(lambda x, gradient=gradient: gradient(w, x).square().sum())(x)
        p = w.clone().requires_grad_()
        gradient(p, x).square().sum().backward()
        per_sample = vmap(gradient, (None, 0))(w, torch.stack([x, x + 1]))
        results.append((second, p.grad, per_sample))
    assert_same(*results)


class ProductWithJvp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, t: Tensor, u: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return t * y + u * x


@pytest.mark.parametrize("ck", [remat, remat(policy=everything_saveable), lambda fun: remat(remat(fun))])
def test_the_jvp_of_a_function_reads_a_tangent_that_is_changed_later(ck: Decorator) -> None:
    def fun(x: Tensor) -> Tensor:
        h = x.sin()
        product = ProductWithJvp.apply(h, h.cos())
        h.mul_(2)
        return product + h

    def tangent(fun: Fun) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(fun(forward_ad.make_dual(numbers(3), numbers(3, seed=1)))).tangent

    assert_same(tangent(ck(fun)), tangent(fun))


class SineAndCosine(torch.autograd.Function):
    """A function with all rules: sin(x) * y, and cos(y)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() * y, y.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * x.cos() * y, g * x.sin() - h * y.sin()

    @staticmethod
    def jvp(ctx: Any, t: Tensor, u: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return t * x.cos() * y + x.sin() * u, -y.sin() * u


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("ck", [remat, remat(policy=everything_saveable), lambda fun: remat(lambda x: remat(fun)(x))])
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if "functionalize" not in name])
def test_a_function_with_all_rules_under_every_transform(transform: str, ck: Decorator) -> None:
    """Torch has no rule for a function under `functionalize`."""

    def fun(x: Tensor) -> Tensor:
        a, b = SineAndCosine.apply(x * 2, x + 1)
        c, d = SineAndCosine.apply(a.tanh(), x.exp())
        return a * c + b.sin() * d

    run = TRANSFORMS[transform]
    assert_same(run(ck(fun), numbers(3, 3)), run(fun, numbers(3, 3)))


SINE_BY: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": grad(lambda x: -x.cos().sum()),
    "vmap": vmap(lambda row: row.sin()),
    "vmap(grad)": vmap(grad(lambda row: -row.cos().sum())),
    "jvp": lambda x: -jvp(torch.cos, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda x: -vjp(torch.cos, x)[1](torch.ones_like(x))[0],
    "jacfwd": lambda x: -jacfwd(torch.cos)(x).sum(tuple(range(x.ndim))),
    "jacrev": lambda x: -jacrev(torch.cos)(x).sum(tuple(range(x.ndim))),
    "functionalize": torch.func.functionalize(lambda x: x.clone().sin_()),
}


@pytest.mark.parametrize("inside", SINE_BY)
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap", "jacrev", "vmap(grad)", "grad(grad)"])
def test_a_function_whose_forward_uses_torch_func(transform: str, inside: str) -> None:
    class Sine(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return SINE_BY[inside](x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0].cos()

    x = numbers(3, 3, 3)
    for ck in (remat, lambda fun: remat(lambda x: remat(fun)(x)), remat(policy=everything_saveable)):
        given = x.clone()
        result = TRANSFORMS[transform](ck(lambda x: Sine.apply(x * 2).square()), given)
        assert_same(result, TRANSFORMS[transform](lambda x: (x * 2).sin().square(), x))
        assert not given.requires_grad


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("around", [lambda fun: fun, functionalize], ids=["plain", "functionalize"])
def test_a_hook_on_a_leaf_under_hooks_on_saved_tensors(around: Any, create_graph: bool) -> None:
    def derivatives(way: Callable[[Fun], Fun]) -> list[Any]:
        x, w, calls = leaf(numbers(3)), leaf(numbers(3, seed=1)), []
        w.register_hook(lambda g: (calls.append(0), g * 2)[1])
        with torch.autograd.graph.save_on_cpu():
            y = around(lambda x, w: way(lambda x: (x * w).sin())(x))(x, w)
        if create_graph:
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            g.square().sum().backward()
        else:
            y.sum().backward()
        return [x.grad, w.grad, torch.tensor(len(calls))]

    assert_same(derivatives(remat), derivatives(lambda fun: fun))


class Accumulates(torch.autograd.Function):
    """A checkpoint by hand, as older libraries write it: its backward adds to the `.grad` of what it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: dict[str, Tensor]) -> Tensor:
        ctx.x, ctx.held = x.detach().requires_grad_(), held
        return (x * held["w"]).sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            torch.autograd.backward((ctx.x * ctx.held["w"]).sin(), g)
        return ctx.x.grad, None


@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_that_adds_to_the_grad_of_a_weight(hooked: bool) -> None:
    def gradients(way: Callable[[Fun], Fun]) -> list[Any]:
        x, held = leaf(numbers(3)), {"w": leaf(numbers(3, seed=1))}
        if hooked:
            held["w"].register_hook(lambda g: g * 1)
        way(lambda x: Accumulates.apply(x, held) * held["w"])(x).sum().backward()
        return [x.grad, held["w"].grad]

    if hooked:
        with pytest.raises(RematError, match=r"adds to the \.grad of a tensor of shape \[3\]"):
            gradients(remat)
        return
    assert_same(gradients(remat), gradients(lambda fun: fun))


@pytest.mark.parametrize("order", ["alone", "with an argument"])
def test_a_backward_that_adds_to_the_grad_of_a_weight_below_a_leaf_made_inside(order: str) -> None:
    def gradients(way: Callable[[Fun], Fun]) -> list[Any]:
        x, held, v = leaf(numbers(3)), {"w": leaf(numbers(3, seed=1))}, leaf(numbers(3, seed=2))

        def fun(x: Tensor) -> Tensor:
            y = Accumulates.apply(x.detach().requires_grad_(), held) * v
            return y if order == "alone" else y + x.cos()

        way(fun)(x).sum().backward()
        return [x.grad, held["w"].grad, v.grad]

    assert_same(gradients(remat), gradients(lambda fun: fun))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, b: ReadsTwice.apply(x),
        lambda x, b: ReadsTwice.apply(x) + b,
        lambda x, b: (ReadsTwice.apply(x) * 2, b * b),
        lambda x, b: ReadsTwice.apply(x * b) + b.sin(),
    ],
)
def test_an_argument_that_higher_derivatives_do_not_depend_on(fun: Fun, order: int) -> None:
    """`ReadsTwice` has no `setup_context`, so reruns can't go inside a transform."""

    def derivative(ck: Any) -> list[Tensor]:
        args = leaf(numbers(3)), leaf(numbers(3, seed=1))
        results = ck(fun)(*args)
        found = [r.square().sum() for r in results] if isinstance(results, tuple) else [results.square().sum()]
        for _ in range(order):
            total = sum(found, torch.zeros(()))
            grads = torch.autograd.grad(total, args, create_graph=True, allow_unused=True)
            found = [g.square().sum() for g in grads if g is not None]
        return found

    assert_same(derivative(remat), derivative(plain))


def test_a_hook_of_the_function_is_not_called_with_none() -> None:
    mean, var = numbers(4, seed=1), numbers(4, seed=2).square()

    def fun(x: Tensor) -> Tensor:
        h = x * 1.0
        h.register_hook(lambda g: g * 0.5)
        return F.batch_norm(h, mean, var)  # its second derivative by h is None

    def second(ck: Decorator) -> Tensor:
        x = leaf(numbers(3, 4))
        (g,) = torch.autograd.grad(torch.asinh(ck(fun)(x)).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sin().sum(), x)[0]

    assert_same(second(remat), second(plain))


@pytest.mark.parametrize("order", ["position first", "token first"])
def test_gradients_over_the_same_memory_are_accumulated_apart(order: str) -> None:
    patches = numbers(3, 3)

    def embed(position: Tensor, token: Tensor) -> Tensor:
        return (position + torch.cat([patches, token])).sin()  # the gradient of `token` is a part of the other

    def accumulated(ck: Decorator) -> list[Tensor | None]:
        position, token = leaf(numbers(4, 3)), leaf(numbers(1, 3))
        fun = ck(embed) if order == "position first" else lambda p, t: ck(lambda t, p: embed(p, t))(t, p)
        for _ in range(2):
            fun(position, token).sum().backward()
        return [position.grad, token.grad]

    assert_same(accumulated(remat), accumulated(plain))
