"""Known functions under a policy, in plain autograd: a backward runs single ops of theirs again, not the function."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from helpers import CountOps, Fun, assert_same, leaf, numbers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad

from remat import CheckpointError, checkpoint_name, remat
from remat._recorded_graph import RecordedGraph
from remat._unwatched import UnwatchedCall
from remat._values import are_apart, ref_of
from remat.debug import LiveBytes
from remat.policies import (
    Policy,
    dots_saveable,
    everything_saveable,
    recompute_ops,
    save_only_these_names,
    save_ops,
)

NOTHING = save_ops()  # keeps nothing, and has a recording all the same
POLICIES = {
    "nothing": NOTHING,
    "everything": everything_saveable,
    "dots": dots_saveable,
    "sin": save_ops("sin"),
    "names": save_only_these_names("h"),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of each call: "recorded", and "run again" for a function that ran again."""
    found: list[str] = []
    again, record = UnwatchedCall.again, RecordedGraph.record

    def runs(call: Any, *args: Any, **options: Any) -> Any:
        if options.get("is_rerun", True):
            found.append("run again")
        return again(call, *args, **options)

    def records(graph: Any, *args: Any) -> Any:
        found.append("recorded")
        return record(graph, *args)

    monkeypatch.setattr(UnwatchedCall, "again", runs)
    monkeypatch.setattr(RecordedGraph, "record", records)
    return found


def gradients(fun: Fun, *inputs: Tensor) -> list[Tensor]:
    leaves = [leaf(t) for t in inputs]
    out = fun(*leaves)
    out.sin().sum().backward()
    return [t.grad for t in leaves if t.grad is not None]


LSTM = nn.LSTMCell(4, 4).double().requires_grad_(False)
GRU = nn.GRUCell(4, 4).double().requires_grad_(False)


def cells(x: Tensor) -> Tensor:
    """Their gates are written to in place, each in a part of one storage."""
    h, c = LSTM(x.sin())
    h, c = LSTM(h, (h, c))
    return GRU(c, h) * x + h


def blocks(x: Tensor) -> Tensor:
    """Zeros that are written to in place, a part after the other."""
    a = torch.block_diag(x, x.sin(), x @ x)
    return a[:4, :4] * a[4:8, 4:8].exp() * a[8:, 8:].cos() + a.sum()


def constants(x: Tensor) -> Tensor:
    c = torch.tensor([-1.0, 2.0, -3.0, 4.0], dtype=x.dtype)
    hot = torch.nn.functional.one_hot(x.argmax(-1), 4).to(x.dtype)  # zeros that are scattered to
    return (x * torch.abs(c)).sin() * hot.cumsum(0) * torch.full((4,), 2.0, dtype=x.dtype) * torch.arange(4.0)


def the_same_twice(x: Tensor) -> Tensor:
    a, b = x.sin(), x.sin()
    return a.exp() * b.cos() * x.index_add(0, torch.tensor([0, 2]), a[:2]) * x.index_add(0, torch.tensor([0, 2]), b[:2])


def late_names(x: Tensor) -> Tensor:
    h = torch.tanh(x @ x)
    y = h * x.sin()
    return checkpoint_name(h, "h").exp() * y


def complex_numbers(x: Tensor) -> Tensor:
    z = torch.complex(x.sin(), x.cos())
    w = (z.conj() @ z) * torch.view_as_complex(torch.stack([x, x.exp()], -1))
    return w.imag + w.conj().imag + torch.view_as_real(w).sum(-1)


def branches(x: Tensor) -> Tensor:
    y = x.sin()
    if (y.sum() > 0).item():
        y = y.exp()
    values, at = y.topk(2)
    return y.cumsum(-1) * values.sum() + y.gather(-1, at).prod()


PROGRAMS: dict[str, Fun] = {
    f.__name__: f
    for f in (
        cells,
        blocks,
        constants,
        the_same_twice,
        late_names,
        complex_numbers,
        branches,
    )
}


@each_policy
@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_same_as_plain(fun: Fun, policy: Policy, seen: list[str]) -> None:
    x = numbers(4, 4)
    actual = gradients(remat(fun, policy=policy), x)
    by_grad = grad(lambda x: remat(fun, policy=policy)(x).sin().sum())(x)
    assert seen == ["recorded"] * 2
    expected = grad(lambda x: fun(x).sin().sum())(x)
    assert_same(actual, [expected])
    assert_same(by_grad, expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.drop(self.up(self.norm(x))))))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().double()


@each_policy
def test_draws(policy: Policy, block: Block, seen: list[str]) -> None:
    x = numbers(4, 8)

    def derivative(fun: Fun) -> tuple[list[Tensor], Tensor, Tensor]:
        torch.manual_seed(1)
        found = gradients(fun, x)
        after = torch.rand(3)
        weight = block.up.weight.grad
        assert weight is not None
        block.zero_grad()
        return found, weight, after

    assert_same(derivative(remat(block, policy=policy)), derivative(block))
    assert seen == ["recorded"]


@each_policy
def test_what_has_changed_since(policy: Policy, block: Block) -> None:
    """The ops that run again are those of the forward, on what they were given then."""
    block.drop = nn.Dropout(0.0)
    x = leaf(numbers(4, 8))
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    out = remat(block, policy=policy)(x).sum()
    block.up, block.norm.eps = nn.Linear(8, 32).double(), 3.0
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu"):
            assert_same(torch.autograd.grad(out, x)[0], expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast(block: Block) -> None:
    block.drop = nn.Dropout(0.0)
    block.float()
    x = leaf(numbers(4, 8).float())

    def derivative(fun: Fun) -> Any:
        with torch.autocast("cpu"):
            out = fun(x)
        return torch.autograd.grad(out.sum(), (x, *block.parameters()))

    assert_same(derivative(remat(block, policy=dots_saveable)), derivative(block))


def test_only_what_is_read_must_not_change() -> None:
    """Of an operand that was written to, a gradient is wrong only where a saved value comes from it."""
    x, w = leaf(numbers(4, 4)), leaf(numbers(4, 4, seed=1))

    def fun(x: Tensor, w: Tensor) -> Tensor:
        return x.sin().exp() + w * 2

    out = remat(fun, policy=NOTHING)(x, w)
    with torch.no_grad():
        w.add_(1)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(fun(x, w).sum(), x))
    for policy in (NOTHING, everything_saveable):
        out = remat(lambda x, w: (x @ w).sin(), policy=policy)(x, w)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_kept_result_must_not_change() -> None:
    x = leaf(numbers(4, 4))
    out = remat(lambda x: x.sin().exp(), policy=everything_saveable)(x)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(CheckpointError, match="changed in place"):
        out.sum().backward()


@each_policy
def test_again_and_again(policy: Policy) -> None:
    x = leaf(numbers(4, 4))
    expected = torch.autograd.grad(late_names(x).sum(), x)[0]
    out = remat(late_names, policy=policy)(x).sum()
    for retain in (True, True, False):
        assert_same(torch.autograd.grad(out, x, retain_graph=retain)[0], expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


@each_policy
def test_results_of_which_each_has_its_turn(policy: Policy) -> None:
    x, y = leaf(numbers(4, 4)), leaf(numbers(4, 4, seed=1))

    def fun(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp().sin(), y.cos().exp().sin()

    def derivatives(fun: Fun) -> list[Tensor]:
        a, b = fun(x, y)
        return [*torch.autograd.grad(a.sum(), x), *torch.autograd.grad(b.sum(), y)]

    assert_same(derivatives(remat(fun, policy=policy)), derivatives(fun))


@each_policy
def test_a_backward_that_failed(policy: Policy) -> None:
    x = leaf(numbers(4, 4))
    y = x * 1
    y.register_hook(lambda gradient: gradient.unknown)
    out = remat(late_names, policy=policy)(y).sum()
    for error, message in ((AttributeError, "unknown"), (RuntimeError, "second time")):
        with pytest.raises(error, match=message):
            out.backward()


@each_policy
def test_both_orders_of_one_graph(policy: Policy) -> None:
    x = leaf(numbers(4, 4))

    def derivatives(fun: Fun) -> tuple[Tensor, Tensor, Tensor]:
        out = fun(x).sin().sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        (recorded,) = torch.autograd.grad(out, x, create_graph=True)
        (second,) = torch.autograd.grad(recorded.sin().sum(), x, retain_graph=True)
        (last,) = torch.autograd.grad(out, x)
        return first, second, last

    assert_same(derivatives(remat(late_names, policy=policy)), derivatives(late_names))


@each_policy
def test_results_that_are_not_under_the_node(policy: Policy) -> None:
    def fun(x: Tensor, found: list[Tensor]) -> Tensor:
        h = (x @ x).sin()
        found.append(h.exp())
        return h.detach()

    def derivative(fun: Fun) -> Tensor:
        x, found = leaf(numbers(4, 4)), []
        fun(x, found)
        return torch.autograd.grad(found[0].sin().sum(), x)[0]

    assert_same(derivative(remat(fun, policy=policy)), derivative(fun))


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4), st.integers(0, 4)), max_size=3),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_are_apart(lengths: list[tuple[int, int, int]], first: int, second: int) -> None:
    strides, *sizes = zip(*lengths, strict=True) if lengths else ((), (), ())
    memory = torch.arange(200)
    views = [memory.as_strided(size, strides, at) for size, at in zip(sizes, (first, second), strict=True)]
    in_common = {*views[0].flatten().tolist()} & {*views[1].flatten().tolist()}
    apart = are_apart(*(ref_of(view, 0, 0) for view in views))
    assert not (apart and in_common)
    assert apart or in_common or 0 in strides or 0 in views[0].shape or 0 in views[1].shape or len(lengths) > 1


def test_parts_of_a_matrix_are_apart() -> None:
    parts = torch.empty(3, 8).chunk(4, 1)
    for i, j in itertools.product(range(4), repeat=2):
        assert are_apart(ref_of(parts[i], 0, 0), ref_of(parts[j], 0, 0)) is (i != j)


def test_memory_of_what_is_written_to_in_parts() -> None:
    """The gates of a cell are one tensor, each part of which is written to: it is there once."""
    cell = nn.LSTMCell(N, N).double().requires_grad_(False)
    x, h = numbers(N, N), numbers(N, N, seed=1)
    peaks = []
    for way in (lambda f: f, remat(policy=NOTHING)):
        with LiveBytes() as meter:
            way(lambda x: cell(x, (h, h))[0])(leaf(x)).sum().backward()
        peaks.append(meter.peak)
    assert peaks[1] <= peaks[0]


N = 64
UNIT = N * N * 8


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ w).sin()
    return x


HELD: dict[str, tuple[Policy, int]] = {
    "nothing": (NOTHING, 0),
    "everything": (everything_saveable, 4),  # a sine reads what a tanh gives, which its own derivative reads
    "dots": (dots_saveable, 4),
    "sin": (save_ops("sin"), 3),
    "all but tanh": (recompute_ops("tanh"), 4),
}


@pytest.mark.parametrize(("policy", "units"), HELD.values(), ids=HELD)
def test_memory(policy: Policy, units: int, seen: list[str]) -> None:
    x, w = leaf(numbers(N, N)), numbers(N, N, seed=1)
    with LiveBytes() as meter:
        out = remat(chain, policy=policy)(x, w)
        held = meter.current - out.nbytes
        assert held == units * UNIT
        out.sum().backward()
        assert x.grad is not None
        del out
        assert meter.current == x.grad.nbytes
    with LiveBytes() as plain:
        chain(x, w).sum().backward()
    assert meter.peak <= plain.peak + UNIT
    assert seen == ["recorded"]


def test_what_was_kept_goes_as_it_is_used() -> None:
    """The greatest part of what two calls keep is there once: what the second has kept goes before the first reruns."""
    x, w = leaf(numbers(N, N)), numbers(N, N, seed=1)
    kept: list[int] = []
    block = remat(chain, policy=dots_saveable)
    with LiveBytes() as meter:
        middle = block(x, w)
        out = block(middle, w).sum()
        middle.register_hook(lambda _: kept.append(meter.current))
        before = meter.current
        out.backward()
    assert kept[0] <= before - 4 * UNIT + 2 * UNIT  # and two gradients


@each_policy
def test_an_error_leaves_nothing(policy: Policy) -> None:
    x = leaf(numbers(N, N))

    def fails(x: Tensor) -> Tensor:
        return (x @ x).sin().exp() @ x[:3]

    gc.disable()
    try:
        with LiveBytes() as meter:
            with pytest.raises(RuntimeError):
                remat(fails, policy=policy)(x)
            assert meter.current == 0
    finally:
        gc.enable()


@each_policy
def test_no_cycles(policy: Policy) -> None:
    x = leaf(numbers(4, 4))
    gc.collect()
    gc.disable()
    try:
        out = remat(late_names, policy=policy)(x)
        ref = weakref.ref(out)
        del out
        assert ref() is None
        out = remat(late_names, policy=policy)(x)
        out.sum().backward()
        ref = weakref.ref(out)
        del out
        assert ref() is None
    finally:
        gc.enable()


def test_no_dead_op_runs_again() -> None:
    """As many products as with torch's early stop: what nothing reads is not computed again."""

    def fun(x: Tensor) -> Tensor:
        return (x @ x).sin() @ x

    with CountOps() as ops:
        gradients(remat(fun, policy=NOTHING), numbers(4, 4))
    with CountOps() as plain:
        gradients(fun, numbers(4, 4))
    assert ops["mm"] == plain["mm"] + 1
    assert ops["sin"] == plain["sin"] + 1
