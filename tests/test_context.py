"""What the forward found around it is there for the rerun: random state, autocast, defaults, grad mode."""


# ruff: noqa: PT017 - an error is one of two right answers

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from helpers import KEEPS, TRANSFORMS, CountOps, Fun, Seen, assert_same, leaf, numbers, plain
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from remat import checkpoint, policies, remat

Decorator = Callable[[Any], Any]

# Random state.

GENERATOR = torch.Generator()

DRAWS: dict[str, Fun] = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "rand": lambda x: x * torch.rand(3, 3, dtype=x.dtype),
    "randn": lambda x: x * torch.randn(3, 3, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x) + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(9, (3, 3)),
    "randperm": lambda x: x[torch.randperm(3)].sin(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: x[torch.multinomial(torch.ones(3), 2)].sin().sum() * x,
    "normal": lambda x: torch.normal(x.detach(), 1.0) * x,
    "in place": lambda x: torch.empty(3, 3, dtype=x.dtype).uniform_() * x,
    "exponential_": lambda x: torch.empty(3, 3, dtype=x.dtype).exponential_() * x,
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "a module": torch.nn.Dropout(0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "a generator of one's own": lambda x: x * torch.rand(3, 3, generator=GENERATOR, dtype=x.dtype),
    "both generators": lambda x: x * torch.rand(3, 3, generator=GENERATOR, dtype=x.dtype) + F.dropout(x),
    "a seed of its own": lambda x: (torch.manual_seed(7), x * torch.rand(3, 3, dtype=x.dtype))[1],
    "drawn in a remat inside": lambda x: remat(F.dropout)(x.sin()) * torch.rand_like(x),
    "inside vmap": lambda x: vmap(lambda r: F.dropout(r.sin()), randomness="different")(x),
    "inside grad": lambda x: grad(lambda y: (F.dropout(y.sin()) * x).sum())(x.cos()),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(
    "transform",
    [
        "call",
        "grad",
        "vjp",
        "grad(grad)",
        "functionalize(grad)",
        "jvp(grad)",
        ".backward()",
        "batched backward",
        "double backward",
    ],
)
def test_the_same_bits_and_the_same_stream_as_without_remat(draw: Fun, transform: str) -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        GENERATOR.manual_seed(1)
        result = TRANSFORMS[transform](lambda x: ck(draw)(x) * torch.rand_like(x) + F.dropout(x), numbers(3, 3))
        results.append((result, torch.rand(3), torch.rand(3, generator=GENERATOR)))
    assert_same(*results)


@pytest.mark.parametrize("transform", ["grad", "grad(grad)", ".backward()", "double backward", "vjp"])
def test_draws_between_forward_and_rerun(transform: str) -> None:
    """The ambient stream goes on from where it is, not from where the rerun's draws end."""
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)

        def fun(x: Tensor) -> Tensor:
            y = ck(lambda x: F.dropout(x.sin(), 0.5))(x)
            torch.rand(5)
            z = ck(lambda x: F.dropout(x.cos(), 0.5))(y)
            torch.rand(7)
            return z

        results.append((TRANSFORMS[transform](fun, numbers(3, 3)), torch.rand(3)))
    assert_same(*results)


def test_draws_in_a_hook_during_backward() -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        x, drawn = leaf(numbers(3)), []
        y = x * 1
        y.register_hook(lambda g: drawn.append(torch.rand(2)))
        ck(F.dropout)(y).sum().backward()
        results.append((drawn, x.grad, torch.rand(2)))
    assert_same(*results)


def test_another_seed_before_the_rerun() -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        x = leaf(numbers(100))
        y = ck(F.dropout)(x).sum()
        torch.manual_seed(5)
        y.backward()
        results.append((x.grad, torch.rand(2)))
    assert_same(*results)


@pytest.mark.parametrize("option", [True, False])
def test_preserve_rng_state(option: bool) -> None:
    """Without it the rerun draws from the stream as it is."""
    torch.manual_seed(0)
    x = leaf(torch.ones(1000))
    y = remat(F.dropout, preserve_rng_state=option)(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad) == option


def stashes() -> int:
    """Tensors that look like the state of a generator."""
    size = torch.get_rng_state().numel()
    tensors = (t for t in gc.get_objects() if type(t) is Tensor)
    return sum(t.dtype == torch.uint8 and t.numel() == size for t in tensors)


@pytest.mark.parametrize(
    ("fun", "option", "kept"),
    [
        pytest.param(torch.sin, True, False, id="no draw"),
        pytest.param(lambda x: F.dropout(x, 0.5, training=False), True, False, id="dropout in eval"),
        pytest.param(lambda x: x * torch.arange(3.0), True, False, id="a constant"),
        pytest.param(F.dropout, True, True, id="a draw"),
        pytest.param(F.dropout, False, False, id="a draw that need not be kept"),
    ],
)
def test_no_stash_where_nothing_was_drawn(fun: Fun, option: bool, kept: bool) -> None:
    before = stashes()
    y = remat(fun, preserve_rng_state=option)(leaf(torch.ones(3)))
    assert (stashes() > before) == kept
    del y
    assert stashes() == before


# Autocast.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "jvp(grad)", "double backward"])
def test_autocast(forward: bool, backward: bool, dtype: torch.dtype, transform: str) -> None:
    """On or off at the forward, on or off around it all: the rerun sees what the forward saw."""
    results = []
    for ck in (remat, plain):
        seen = Seen()

        def fun(x: Tensor) -> Tensor:
            y = x @ x
            seen.append(y.dtype)
            return y.float().sin()

        def block(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype, enabled=forward):
                return ck(fun)(x)

        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            results.append(TRANSFORMS[transform](block, numbers(3, 3).float() / 2))
        assert set(seen) == {dtype if forward else torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    # To the rounding of half precision: sums of gradients are taken before or after it.
    leaves = [torch.cat([t.flatten() for t in optree.tree_leaves(r)]) for r in results]
    assert (leaves[0] - leaves[1]).norm() <= 0.05 * leaves[1].norm()


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_inside_the_function(inside: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return (x @ x).float()

    x = numbers(3, 3).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        actual, expected = (grad(lambda x: f(x).sum())(x) for f in (remat(fun), fun))
    assert_same(actual, expected)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_casts_a_captured_weight(backward_inside: bool) -> None:
    """The cache of casts carries no graph to the rerun. Powers of two are exact in bfloat16."""
    grads = []
    for ck in (remat, plain):
        w = leaf(torch.tensor([[1.0, 2.0], [0.5, 1.0]]))
        x = leaf(torch.tensor([[1.0, 0.5], [2.0, 4.0]]))
        with torch.autocast("cpu", torch.bfloat16):
            block = ck(lambda x: (x @ w).float())
            y = block(block(x)).sum()
            if backward_inside:
                y.backward()
        if not backward_inside:
            y.backward()
        grads.append((w.grad, x.grad))
    assert_same(*grads)


# Defaults.


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AMBIENTS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("forward", ["nothing", "float64", "bfloat16", "cpu"])
@pytest.mark.parametrize("backward", AMBIENTS)
@pytest.mark.parametrize("transform", ["plain", "grad", "vmap"])
def test_default_dtype_and_device(forward: str, backward: str, transform: str) -> None:
    seen = Seen()

    def fun(x: Tensor) -> Tensor:
        ones = torch.ones(3)
        seen.append((ones.dtype, ones.device.type))
        return x.sin() * ones

    x = numbers(3).float()
    inputs = x.clone().requires_grad_()
    with AMBIENTS[forward]():
        if transform == "plain":
            y = remat(fun)(inputs)
            pull = lambda v: torch.autograd.grad(y, inputs, v)  # noqa: E731
        else:
            y, pull = vjp(remat(fun) if transform == "grad" else lambda x: vmap(remat(fun))(x[None])[0], x)
    v = torch.ones_like(y)
    with AMBIENTS[backward]():
        pull(v)
        device = "meta" if backward == "meta" else "cpu"
        assert torch.ones(1).device.type == device
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][0] == {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(forward, torch.float32)
    assert (torch.get_default_dtype(), torch.ones(1).device.type) == (torch.float32, "cpu")


def test_set_default_device() -> None:
    x, seen = torch.ones(3, requires_grad=True), Seen()

    def fun(x: Tensor) -> Tensor:
        seen.append(torch.ones(3).device.type)
        return x.sin()

    y = remat(fun)(x).sum()
    try:
        torch.set_default_device("meta")
        y.backward()
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert seen == ["cpu", "cpu"]


# What is computed later than it was called: by ops of a recording, or because somebody has what the rerun has spared.

NOTHING = policies.save_ops()
LATER: dict[str, Callable[[Fun], Fun]] = {
    "a policy": lambda f: remat(f, policy=NOTHING),
    "a policy around remat": lambda f: remat(remat(f), policy=NOTHING),
    "a policy in remat": lambda f: remat(remat(f, policy=NOTHING)),
    "a policy that keeps it": lambda f: remat(f, policy=policies.save_ops("full", "div")),
    "remat": remat,
    "checkpoint": lambda f: checkpoint(use_reentrant=False)(f),
}
each_later = pytest.mark.parametrize("later", LATER)


def thirds(x: Tensor) -> Tensor:
    return x.sin() * (torch.arange(3) / 3)


def thirds_of_two_kinds(x: Tensor) -> Tensor:
    with default_dtype(torch.float16):
        a, b = torch.arange(3) / 3, torch.full((3,), 0.3)
    with default_dtype(torch.bfloat16):
        return x.sin() * a + x.sin() * b + x.cos() * (torch.arange(3) / 3) + x.cos() * torch.full((3,), 0.3)


def with_a_constant(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 4 + x.sin(), torch.full((3,), 0.3)


@each_later
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fun", [thirds, thirds_of_two_kinds, with_a_constant])
def test_default_dtype_of_what_is_computed_later(fun: Fun, other: torch.dtype, later: str) -> None:
    """Values of two types of one size fit into each other's memory."""

    def run(fun: Fun) -> Any:
        x = leaf(numbers(3).float())
        with default_dtype(torch.float16):
            out = fun(x)
        y = optree.tree_leaves(out)[0]
        with default_dtype(other):
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return out, g, torch.autograd.grad(g.sum(), x)

    assert_same(run(LATER[later](fun)), run(fun))


@KEEPS
@pytest.mark.parametrize("later", [name for name in LATER if name != "checkpoint"])  # which stops early
@pytest.mark.parametrize("kind", ["default dtype", "autocast around the backward", "autocast inside"])
def test_ambient_of_what_outlives_a_rerun(kind: str, later: str) -> None:
    kept = Seen()
    w = numbers(128, 128).float()

    def fun(x: Tensor) -> tuple[Tensor, ...]:
        y, a = x.sin(), torch.arange(2000) / 7
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast inside"):
            h = x @ w
        kept.append((a, h * 2))
        return (y + h).cos(), a, h

    x = leaf(numbers(128, 128).float())
    with default_dtype(torch.float16):
        y = LATER[later](fun)(x)[0].sum()
    with default_dtype(torch.bfloat16), torch.autocast("cpu", torch.bfloat16, enabled=kind.endswith("backward")):
        y.backward()
    assert len(kept) > 1
    for again in kept:
        assert_same([t.detach() for t in again], [t.detach() for t in kept[0]])


def test_other_function_modes() -> None:
    """A torch-function mode of the user's own around the forward alone, or around the backward alone."""

    class Doubles(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Doubles.calls += func is torch.Tensor.sin
            return func(*args, **(kwargs or {}))

    x = leaf(numbers(3))
    with Doubles():
        y = remat(lambda x: x.sin())(x).sum()
    assert Doubles.calls == 1
    y.backward()
    assert_same(x.grad, x.detach().cos())
    with Doubles():
        assert_same(grad(lambda x: remat(lambda x: x.sin())(x).sum())(x.detach()), x.grad)
    assert not torch._C._len_torch_function_stack()


# Grad mode.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fun", [torch.sin, lambda x: remat(torch.sin)(x).cos(), lambda x: (x, x.sin(), x.t())])
def test_without_grad_the_function_just_runs(mode: Any, fun: Fun) -> None:
    x, results = leaf(numbers(3, 3)), []
    for ck in (remat, plain):
        with mode(), CountOps() as ops:
            results.append((ck(fun)(x), dict(ops.counts)))
    (actual, counts), (expected, same_counts) = results
    assert_same(actual, expected)
    assert counts == same_counts
    last = actual[1] if isinstance(actual, tuple) else actual
    assert not last.requires_grad
    assert last.grad_fn is None
    assert last.is_inference() == (mode is torch.inference_mode)


def test_without_grad_in_place_is_allowed() -> None:
    x = torch.ones(3)
    with torch.no_grad():
        remat(lambda x: x.add_(1))(x)
    assert_same(x, torch.full((3,), 2.0))


def test_inference_tensors_as_constants() -> None:
    with torch.inference_mode():
        c = torch.full((3,), 2.0)
    x = leaf(torch.ones(3))
    remat(lambda x, k: (x.clone() + k).sin())(x, 1.0).sum().backward()
    with torch.inference_mode():
        out = remat(lambda x: x * c)(torch.ones(3))
    assert_same(out.clone(), torch.full((3,), 2.0))


def block(x: Tensor) -> Tensor:
    return torch.tanh(x @ x) * x


def drops(x: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ x), 0.5) * x


IN_INFERENCE_MODE = ["grad", "vjp", "jvp", "grad(grad)", "jvp(grad)", "grad(jvp)"]
if torch.__version__ >= (2, 12):
    IN_INFERENCE_MODE.append("autograd inside grad")


@pytest.mark.parametrize(
    ("transform", "fun"),
    [
        *((name, block) for name in [*IN_INFERENCE_MODE, "vmap", "vmap(grad)"]),
        *((name, drops) for name in IN_INFERENCE_MODE),
    ],
)
@pytest.mark.parametrize("made_in", [False, True])
@pytest.mark.parametrize("run_in", [False, True])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots"])
def test_transforms_in_inference_mode(fun: Fun, policy: Any, run_in: bool, made_in: bool, transform: str) -> None:
    with torch.inference_mode(made_in):
        x = numbers(3, 3)
    found = []
    for ck in (lambda f: remat(f, policy=policy), plain):
        torch.manual_seed(0)
        with torch.inference_mode(run_in):
            found.append((TRANSFORMS[transform](ck(fun), x), torch.rand(1)))
    assert_same(*found)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_grad_mode_inside_the_rerun(outer: Any) -> None:
    """The function sees grad mode on, forward and rerun, whatever the backward is called under."""
    seen = Seen()

    def fun(x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x.sin()

    x = leaf(numbers(3))
    y = remat(fun)(x).sum()
    with outer():
        y.backward()
        assert torch.is_grad_enabled() == (outer is torch.enable_grad)
    assert seen == [True, True]
    assert_same(x.grad, x.detach().cos())


def test_no_grad_inside_a_transform() -> None:
    x = numbers(3)
    for ck in (remat, plain):
        value = grad(lambda x: (x * torch.no_grad()(ck(torch.sin))(x)).sum())(x)
        assert_same(value, x.sin())
        _, tangent = jvp(lambda x: torch.no_grad()(ck(torch.sin))(x), (x,), (x,))
        assert_same(tangent, x.cos() * x)


def test_forward_under_enable_grad_inside_no_grad() -> None:
    x = leaf(numbers(3))
    with torch.no_grad():
        with torch.enable_grad():
            y = remat(torch.sin)(x).sum()
        y.backward()
    assert_same(x.grad, x.detach().cos())


@pytest.mark.parametrize("draw", [F.dropout, torch.sin])
@pytest.mark.parametrize("transform", [jacrev, hessian])
def test_jacobians_of_draws(draw: Fun, transform: Any) -> None:
    """Their basis is a batch in which draws are not allowed: with remat as without."""
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        try:
            results.append(transform(lambda x: ck(draw)(x).sin().sum(-1))(numbers(3)))
        except RuntimeError as error:
            assert "randomness" in str(error)
            results.append(None)
    assert_same(*results)


def test_functionalize_restores_too() -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        results.append((functionalize(grad(lambda x: ck(F.dropout)(x).sum()))(numbers(9)), torch.rand(2)))
    assert_same(*results)


def test_draws_of_duals_lie_in_memory_as_in_the_forward() -> None:
    def fun(x: Tensor) -> Tensor:
        return F.dropout(x.T * x.T, 0.4)

    def derivative(fun: Any) -> Tensor:
        x = numbers(3, 3).requires_grad_()
        torch.manual_seed(1)
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(fun(forward_ad.make_dual(x, torch.ones_like(x))))
            return torch.autograd.grad(result.tangent.sum(), x)[0]

    assert_same(derivative(remat(fun)), derivative(fun))
