"""Memory by live storage bytes, in units of one activation: 20 blocks of 10 `sin`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_programs import SinTimes
from helpers import UNIT, CountOps, Fun, activation, assert_same, leaf, plain
from torch import Tensor, nn
from torch.func import functional_call, functionalize, grad, grad_and_value, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from remat import checkpoint as remat_checkpoint
from remat import policies, remat
from remat.debug import LiveBytes

SMALL = UNIT // 100  # scalars and the like


def ten_sines(x: Tensor) -> Tensor:
    for _ in range(10):
        x = torch.sin(x)
    return x


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ten_sines(x)

    @remat
    def method(self, x: Tensor) -> Tensor:
        return ten_sines(x)


@remat
def decorated(x: Tensor) -> Tensor:
    return ten_sines(x)


# Spellings of the same block.
BLOCKS: dict[str, Callable[[], Fun]] = {
    "a function": lambda: remat(ten_sines),
    "decorated": lambda: decorated,
    "with options": lambda: remat(preserve_rng_state=False)(ten_sines),
    "a lambda": lambda: remat(lambda x: ten_sines(x)),
    "a partial": lambda: remat(functools.partial(ten_sines)),
    "a module": lambda: remat(Block()),
    "a method": lambda: Block().method,
    "a bound method": lambda: remat(Block().forward),
    "new at each call": lambda: lambda x: remat(lambda: ten_sines(x))(),
    "remat in remat": lambda: remat(lambda x: remat(ten_sines)(x)),
}


def blocks(block: Fun, n: int = 20) -> Fun:
    def loss(x: Tensor) -> Tensor:
        for _ in range(n):
            x = block(x)
        return x.sum()

    return loss


def backward(loss: Fun) -> None:
    loss(activation().requires_grad_()).backward()


def double_backward(loss: Fun) -> None:
    x = activation().requires_grad_()
    (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
    g.sin().sum().backward()


def one() -> Tensor:
    return activation()


# (run, units without remat, most units with remat)
RUNS: dict[str, tuple[Callable[[Fun], Any], float, float]] = {
    "grad": (lambda f: grad(f)(one()), 599, 36),
    "grad_and_value": (lambda f: grad_and_value(f)(one()), 599, 36),
    "vmap(grad) of 3": (lambda f: vmap(grad(f))(activation(3)), 1797, 108),
    "grad(grad)": (lambda f: grad(lambda x: grad(f)(x).sin().sum())(one()), 1599, 80),
    "jvp(grad)": (lambda f: jvp(grad(f), (one(),), (one(),)), 1200, 80),
    ".backward()": (backward, 202, 34),
    "functionalize(grad)": (lambda f: functionalize(grad(f))(one()), 599, 36),
    "grad(vmap) of 3": (lambda f: grad(lambda x: vmap(f)(x).sum())(activation(3)), 1797, 108),
    "grad(jvp)": (lambda f: grad(lambda x: jvp(f, (x,), (x,))[1])(one()), 1598, 80),
    "vjp": (lambda f: vjp(f, one())[1](torch.ones(())), 203, 34),
    "jacrev": (lambda f: jacrev(f)(one()), 203, 34),
    "double backward": (double_backward, 602, 80),
}


def peak(run: Callable[[], Any]) -> float:
    with LiveBytes() as meter:
        result = run()
    del result
    assert meter.current == 0
    return meter.peak / UNIT


@pytest.mark.parametrize(("run", "without", "most"), RUNS.values(), ids=RUNS)
def test_peak(run: Callable[[Fun], Any], without: float, most: float) -> None:
    assert peak(lambda: run(blocks(remat(ten_sines)))) <= most
    assert peak(lambda: run(blocks(ten_sines))) >= without - 5


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("transform", ["grad", "vmap(grad) of 3", ".backward()"])
def test_peak_of_each_spelling(make: Callable[[], Fun], transform: str) -> None:
    run, _, most = RUNS[transform]
    if make is BLOCKS["remat in remat"]:
        most *= 1.5
    assert peak(lambda: run(blocks(make()))) <= most


@pytest.mark.parametrize("transform", ["grad", "vmap(grad) of 3", ".backward()"])
@pytest.mark.parametrize("holds", ["argument", "cell", "attribute", "container", "default"])
def test_peak_with_a_weight(holds: str, transform: str) -> None:
    """A weight of one unit per block, captured or handed in, counts once."""
    ws = [torch.full_like(activation(), 0.9).requires_grad_(transform == ".backward()") for _ in range(20)]

    class Holder:
        def __init__(self, w: Tensor) -> None:
            self.w = w

        def method(self, x: Tensor) -> Tensor:
            return ten_sines(x * self.w)

    def loss(x: Tensor) -> Tensor:
        for w in ws:
            x = {
                "argument": lambda x, w=w: remat(lambda x, w: ten_sines(x * w))(x, w),
                "cell": lambda x, w=w: remat(lambda x: ten_sines(x * w))(x),
                "attribute": lambda x, w=w: remat(Holder(w).method)(x),
                "container": lambda x, w=w: remat(lambda x: (lambda ws: ten_sines(x * ws[0]))([w]))(x),
                "default": lambda x, w=w: remat(lambda x, w=w: ten_sines(x * w))(x),
            }[holds](x)
        return x.sum()

    most = {"grad": 40, "vmap(grad) of 3": 120, ".backward()": 40 + 20}[transform]  # the last with 20 gradients

    def run() -> None:
        RUNS[transform][0](loss)
        for w in ws:
            w.grad = None

    assert peak(run) <= most


def test_an_open_vjp_holds_the_inputs_of_the_blocks_and_no_more() -> None:
    x = activation()
    with LiveBytes() as meter:
        out, pull = vjp(blocks(remat(ten_sines)), x)
        assert meter.current <= 20 * UNIT + SMALL
        meter.reset_peak()
        del out
        gradient = pull(torch.ones(()))
        assert meter.peak <= 36 * UNIT
        del pull, gradient
    assert meter.current == 0


@pytest.mark.parametrize(
    ("fun", "units"),
    [
        pytest.param(ten_sines, 0, id="an argument alone"),
        pytest.param(lambda x: (ten_sines(x), ten_sines(x)), 0, id="two results"),
        pytest.param(lambda x: remat(ten_sines)(ten_sines(x)), 0, id="remat inside"),
        pytest.param(lambda x: nn.functional.dropout(ten_sines(x)), 0.1, id="that draws"),
        pytest.param(lambda x: ten_sines(x * torch.ones_like(x)), 0, id="that makes a constant"),
    ],
)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_call_holds_its_results_and_inputs_alone(fun: Fun, units: float, requires_grad: bool) -> None:
    x = activation().requires_grad_(requires_grad)
    with LiveBytes() as meter:
        out = remat(fun)(x)
        results = len(out) if isinstance(out, tuple) else 1
        assert meter.current <= (results + units) * UNIT + SMALL
    del out
    assert meter.current == 0


@pytest.mark.parametrize("retain", [True, False])
def test_a_backward_leaves_nothing_but_the_gradient(retain: bool) -> None:
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        out = blocks(remat(ten_sines))(x)
        held = meter.current
        out.backward(retain_graph=retain)
        assert meter.current == pytest.approx(UNIT + (held if retain else 0), abs=SMALL)
        del out
        assert meter.current == UNIT  # x.grad
        x.grad = None
    assert meter.current == 0


def test_a_result_that_is_not_used_is_not_held() -> None:
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        a, b = remat(lambda x: (x.sin(), x.cos()))(x)
        del b
        assert meter.current <= UNIT + SMALL
        del a
        assert meter.current == 0


@pytest.mark.parametrize("run", [lambda f: grad(f)(one()), backward], ids=["grad", ".backward()"])
def test_recursive_halving_peaks_at_log_n(run: Callable[[Fun], Any]) -> None:
    def sines(n: int, x: Tensor) -> Tensor:
        return torch.sin(x) if n == 1 else remat(sines)(n // 2, remat(sines)(n // 2, x))

    def units(n: int) -> float:
        return peak(lambda: run(lambda x: sines(n, x).sum()))

    for n in (4, 16, 64):
        assert units(n) <= math.log2(n) + 4


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda f: f(one()), id="alone"),
        pytest.param(lambda f: vmap(f)(activation(3)), id="vmap"),
        pytest.param(lambda f: functionalize(f)(one()), id="functionalize"),
        pytest.param(lambda f: torch.no_grad()(f)(one().requires_grad_()), id="no_grad"),
        pytest.param(lambda f: torch.inference_mode()(f)(one()), id="inference_mode"),
        pytest.param(lambda f: grad(lambda x: f(one()) + x)(torch.ones(())), id="beside grad"),
        pytest.param(lambda f: vmap(grad(lambda x: f(one()) + x))(torch.ones(3)), id="beside vmap(grad)"),
        pytest.param(lambda f: jvp(lambda x: f(one()) + x, (torch.ones(()),), (torch.ones(()),)), id="beside jvp"),
    ],
)
def test_a_call_that_is_not_differentiated_runs_every_op_once(run: Callable[[Fun], Any]) -> None:
    counts, peaks = [], []
    for ck in (remat, plain):
        with CountOps() as ops, LiveBytes() as meter:
            run(blocks(ck(ten_sines)))
        counts.append({op: n for op, n in ops.counts.items() if op not in ("alias", "detach", "equal", "permute")})
        peaks.append(meter.peak)
    assert counts[0]["sin"] == 200
    assert counts[0] == counts[1]
    assert peaks[0] == pytest.approx(peaks[1], abs=SMALL)


def test_as_little_as_torch_utils_checkpoint() -> None:
    ours = peak(lambda: backward(blocks(remat(ten_sines))))
    theirs = peak(lambda: backward(blocks(lambda x: checkpoint(ten_sines, x, use_reentrant=False))))
    assert ours <= theirs + 2


@pytest.mark.parametrize("outer", [checkpoint, remat_checkpoint])
def test_a_checkpoint_computes_again_what_a_remat_function_inside_captures(outer: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        k = x.sin()
        return remat(lambda x: x * k)(x).sum()

    x = leaf(activation())
    with LiveBytes() as meter:
        before = meter.current
        y = outer(fun, x, use_reentrant=False)
        assert round((meter.current - before) / UNIT) == 0
        y.backward()
    assert_same(x.grad, x.detach().sin() + x.detach() * x.detach().cos())


def test_a_transformer_under_vmap_grad() -> None:
    """Per-sample gradients of 8 transformer blocks: at most a third of the memory, the same gradients."""
    torch.manual_seed(0)
    d, n = 32, 64

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(d), nn.Linear(d, 3 * d)
            self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            x = x + torch.softmax(q @ k.mT / d**0.5, -1) @ v
            return x + self.mlp(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(8))
            self.ck = plain

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.ck(layer)(x)
            return x.square().mean()

    net = Net()
    params = {k: p.detach() for k, p in net.named_parameters()}
    xs = torch.randn(4, n, d)
    per_sample = vmap(grad(lambda ps, x: functional_call(net, ps, (x,))), in_dims=(None, 0))
    results, peaks = [], []
    for ck in (plain, remat):
        net.ck = ck
        with LiveBytes() as meter:
            results.append(per_sample(params, xs))
        peaks.append(meter.peak)
    gradients = sum(4 * g.numel() for g in results[0].values())
    torch.testing.assert_close(results[1], results[0])
    assert peaks[1] - gradients <= (peaks[0] - gradients) / 3


@pytest.mark.parametrize("innermost", [torch.sin, lambda x: SinTimes.apply(x, x)], ids=["sin", "an autograd.Function"])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
@pytest.mark.parametrize("transform", ["backward", "grad", "vmap(grad)"])
def test_the_backward_of_a_nest_holds_no_cotangent_for_each_function_around(
    transform: str, policy: Any, innermost: Fun
) -> None:
    """NOTE [handed on]: a node that runs another backward pass would hold its own cotangents meanwhile."""

    def nest(n: int) -> Fun:
        if n == 0:
            return innermost
        inner = nest(n - 1)
        return remat(lambda x: inner(x).cos(), policy=policy)

    def peak(n: int) -> float:
        fun, x = nest(n), activation()
        with LiveBytes() as meter:
            if transform == "grad":
                grad(lambda x: fun(x).sum())(x)
            elif transform == "vmap(grad)":
                vmap(grad(lambda x: fun(x).sum()))(x)
            else:
                fun(x.requires_grad_()).sum().backward()
        return meter.peak / UNIT

    assert peak(16) <= peak(4) + 0.1
