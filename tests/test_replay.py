"""A recorder, its tape and a replay by themselves, and what JAX's own tests of policies promise."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRANSFORMS, CountOps, Fun, assert_same, leaf, numbers, plain
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from remat import RematError, checkpoint, checkpoint_name, remat
from remat._nested_mode import Blind
from remat._recorder import Recorder
from remat._replay import Replay
from remat._tape import Tape
from remat.compat import create_selective_checkpoint_contexts
from remat.debug import LiveBytes
from remat.policies import dots_saveable, everything_saveable, nothing_saveable, save_ops

POLICIES = [nothing_saveable, everything_saveable, dots_saveable, save_ops("sin")]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


class Calls(TorchFunctionMode):
    """Tells of reads of memory, as looks do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Blind().on_call(func, args, kwargs)


def recorded(fun: Fun, x: Tensor, policy: Any) -> Tape:
    with Recorder(policy.start()) as recorder:
        out = fun(x)
    return recorder.tape([out])


def replayed(fun: Fun, x: Tensor, tape: Tape, last: bool = False) -> Tensor:
    """The gradient by a rerun."""
    with Replay(tape, last) as replay:
        out = fun(x)
    node = out.grad_fn
    shape = out.shape
    del out
    replay.settle()
    (g,) = torch.autograd.grad([torch.autograd.graph.GradientEdge(node, 0)], [x], [torch.ones(shape, dtype=x.dtype)])
    return g


def program(x: Tensor) -> Tensor:
    a = (x @ x).sin()
    b = a.exp() * a.cos()
    c = F.dropout(b, 0.5)
    return (c.tanh() @ b).mul_(2).add_(1).sigmoid() * 3


# Each has an op more, fewer or another than `program`, and computes the same.
def one_clone_more(x: Tensor) -> Tensor:
    a = (x @ x).sin().clone()
    b = a.exp() * a.cos()
    c = F.dropout(b, 0.5)
    return (c.tanh() @ b).mul_(2).add_(1).sigmoid() * 3


def another_order(x: Tensor) -> Tensor:
    a = (x @ x).sin()
    cos = a.cos()
    b = a.exp() * cos
    c = F.dropout(b.clone(), 0.5)
    return ((c.tanh() + 0) @ b).mul(2).add(1).sigmoid() * 3


def reads_what_was_dead(x: Tensor) -> Tensor:
    a = (x @ x).sin()
    b = a.exp() * a.cos()
    c = F.dropout(b, 0.5)
    d = (c.tanh() @ b).mul_(2).add_(1)
    return d.sigmoid() * (torch.stack([d, d.detach() * 0]).sum(0) / d * 3)


@each_policy
@pytest.mark.parametrize("rerun", [program, one_clone_more, another_order, reads_what_was_dead])
def test_a_rerun_with_other_ops_computes(rerun: Fun, policy: Any) -> None:
    x = leaf(numbers(3, 3))
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(rerun(x).sum(), x)
    torch.manual_seed(0)
    tape = recorded(program, x, policy)
    for last in (False, True):
        torch.manual_seed(0)
        assert_same(replayed(rerun, x, tape, last), expected)
    assert not tape.kept or rerun is not program


def test_a_rerun_of_another_tensor_is_given_nothing() -> None:
    x, y = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    fun: Fun = lambda x: (x @ x).sin()  # noqa: E731
    tape = recorded(fun, x, everything_saveable)
    assert_same(replayed(fun, y, tape), torch.autograd.grad(fun(y).sum(), y)[0])


def test_what_nobody_reads_is_no_number() -> None:
    """A mistake is loud: memory that was not computed is full of NaN."""
    x = leaf(numbers(3))
    tape = recorded(lambda x: x.sin().sum() * 2, x, nothing_saveable)
    with Replay(tape, False):
        out = x.sin().sum() * 2
    assert out.isnan()


def test_python_reads_what_was_dead() -> None:
    x = leaf(numbers(3))
    tape = recorded(lambda x: x.sin() * 2, x, nothing_saveable)
    with Calls(), Replay(tape, False), torch.no_grad():
        found = (x.sin() * 2).tolist(), (x.sin() * 2)[1].item(), (x.sin() * 2).numpy(), (x.sin() * 2 > 0).any().item()
    y = x.detach().sin() * 2
    assert_same(found[0], y.tolist())
    assert_same(found[1], y[1].item())
    assert (found[2] == y.numpy()).all()
    assert found[3] == (y > 0).any().item()


def test_python_reads_one_of_two_that_are_the_same() -> None:
    x = numbers(3)
    tape = recorded(lambda x: x.sin() + x.sin(), x, nothing_saveable)
    with Calls(), Replay(tape, False):
        a, b = x.sin(), x.sin()
        a.mul_(2)
        assert a.tolist() == (x.sin() * 2).tolist()
        assert b.tolist() == x.sin().tolist()


def write_in_turn(x: Tensor) -> Tensor:
    """Values that others are computed from are overwritten, some of them dead, some kept."""
    a = x.sin()
    b = a.detach().clone()
    c = b * 2  # reads b before
    b.add_(a.detach())
    d = b * 3  # and after
    b.zero_()
    e = b.exp()
    return (a * c).cos() * d + e * a.exp()


@pytest.mark.parametrize("transform", [".backward()", "grad", "grad(grad)", "jvp(grad)", "double backward"])
@each_policy
def test_writes_after_reads(policy: Any, transform: str) -> None:
    run = TRANSFORMS[transform]
    assert_same(run(remat(write_in_turn, policy=policy), numbers(3)), run(write_in_turn, numbers(3)))


def test_a_dead_value_is_computed_before_what_it_reads_is_overwritten() -> None:
    def fun(x: Tensor, peeks: bool) -> Tensor:
        a = x.sin()
        b = a.detach() * 1.0
        c = b + 1  # dead
        b.mul_(0)
        if peeks:
            return a.cos() * c.clone()
        return a.cos() * 2

    x = leaf(numbers(3))
    for policy in POLICIES:
        tape = recorded(lambda x: fun(x, False), x, policy)
        found = replayed(lambda x: fun(x, True), x, tape)
        assert_same(found, torch.autograd.grad(fun(x, True).sum(), x)[0])


# A graph that holds nothing tells what it would save.


@each_policy
def test_a_graph_that_tells_what_it_would_save(policy: Any) -> None:
    x = leaf(numbers(3, 3))

    def fun(x: Tensor) -> Tensor:
        a = (x @ x).sin()
        return checkpoint_name(a.exp(), "b").cos().tanh() * 2

    def tape_of(saves: bool) -> Tape:
        with Recorder(policy.start()) as recorder:

            def pack(t: Tensor) -> None:
                recorder.saves(t)

            with saved_tensors_hooks(pack, lambda _: x) if saves else torch.enable_grad():
                out = fun(x)
        return recorder.tape([out])

    told, seen = tape_of(True), tape_of(False)
    of_told, of_seen = ([(tape.ops[v.op].facts.func, v.layout.size) for v in tape.kept] for tape in (told, seen))
    assert of_told != [] or policy is nothing_saveable
    assert {*of_told} == {*of_seen}
    assert_same(replayed(fun, x, told), torch.autograd.grad(fun(x).sum(), x)[0])


@pytest.mark.parametrize("reads", [lambda y: (y * 2).sin(), lambda y: y.detach()], ids=["runs", "saved"])
def test_what_is_kept_is_changed_through_a_view_that_outlives_its_tensor(reads: Any) -> None:
    views: list[Tensor] = []

    def fun(x: Tensor) -> Tensor:
        y = x @ x
        views.append(y.detach())
        return x.sin() * reads(y)

    x = leaf(numbers(3, 3))
    y = remat(fun, policy=save_ops("mm"))(x)
    views[0].add_(1)
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(fun(x).sum(), x))


# What a policy is told.


def test_a_policy_sees_names_and_calls() -> None:
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append((op.overloadpacket.__name__, ctx.name, ctx.is_recompute, ctx.call and ctx.call[0]))
        return False

    remat(lambda x: checkpoint_name(torch.sin(x), "a") @ x, policy=policy)(leaf(numbers(2, 2))).sum().backward()
    assert seen[0] == ("sin", None, False, torch.sin)
    assert [(op, name) for op, name, *_ in seen] == [("sin", None), ("alias", "a"), ("mm", None)]


# JAX's own counts: `RematTest` in its tests/api_test.py.


def again(run: Callable[[Callable[[Any], Any]], Any], op: str) -> int:
    """How often an op runs more often than without remat."""
    found = []
    for decorator in (lambda f: remat(f, policy=nothing_saveable), plain):
        with CountOps() as ops:
            run(decorator)
        found.append(ops[op])
    return found[0] - found[1]


WAYS: dict[str, Callable[[Fun], Any]] = {
    ".backward()": lambda f: f(leaf(numbers(3))).sum().backward(),
    "grad": lambda f: grad(lambda x: f(x).sum())(numbers(3)),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum()))(numbers(2, 3)),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@each_way
@pytest.mark.parametrize("trailing", [1, 2, 5])
def test_trailing_ops_are_not_computed(trailing: int, way: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        x = x.sin()
        for _ in range(trailing):
            x = x + 1
        return x

    assert again(lambda decorator: way(decorator(fun)), "add") == 0
    assert again(lambda decorator: way(decorator(fun)), "sin") == 0


@each_way
def test_a_check_of_a_result_is_not_repeated(way: Any) -> None:
    """`torch.linalg` looks at an error code that its op returns."""

    def fun(x: Tensor) -> Tensor:
        gram = x.detach()[:, None] * x.detach() + 2 * torch.eye(3, dtype=x.dtype)
        return x.sin() + torch.linalg.cholesky(gram).sum() + torch.linalg.inv(gram.exp()).sum()

    for op in ("linalg_cholesky_ex", "linalg_inv_ex", "_linalg_check_errors", "exp"):
        assert again(lambda decorator: way(decorator(fun)), op) == 0


@each_way
def test_only_the_needed_branch_is_computed(way: Any) -> None:
    """`test_remat_partial_dce`: of two results the loss reads one."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        dead = x.detach().exp().exp().exp()
        return x.sin().sin(), dead

    assert again(lambda decorator: way(lambda x: decorator(fun)(x)[0]), "exp") == 0
    assert again(lambda decorator: way(lambda x: decorator(fun)(x)[0]), "sin") == 1


@each_way
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_binomial_recursion(depth: int, way: Any) -> None:
    """`test_remat_binomial_checkpointing`: calls in calls, each of which halves what is left."""

    def halves(n: int, decorator: Any) -> Fun:
        if n == 1:
            return torch.sin
        first, second = halves(n // 2, decorator), halves(n // 2, decorator)
        return decorator(lambda x: second(first(x)))  # type: ignore[no-any-return]

    # Each call of n sines computes again the first half of them, for the second to begin with.
    assert again(lambda decorator: way(halves(2**depth, decorator)), "sin") == depth * 2 ** (depth - 1)
    assert_same(
        torch.autograd.grad(halves(4, remat(policy=nothing_saveable))(x := leaf(numbers(3))).sum(), x),
        torch.autograd.grad(halves(4, plain)(x).sum(), x),
    )


@each_way
def test_nested_pairs(way: Any) -> None:
    """A pair of calls inside of a call: the outer rerun needs what the inner calls are given, not what they return."""

    def pair(x: Tensor, decorator: Any) -> Tensor:
        inner = decorator(lambda x: x.sin().sin())
        return inner(inner(x))  # type: ignore[no-any-return]

    def outer(decorator: Any) -> Any:
        return way(decorator(lambda x: pair(x, decorator)))

    assert again(outer, "sin") == 2 + 1 + 1


def test_everything_saveable_computes_nothing_again() -> None:
    fun: Fun = lambda x: F.layer_norm(F.batch_norm((x @ x).sin(), None, None, training=True), (4,)).softmax(-1) @ x  # noqa: E731
    counts = []
    for f in (remat(fun, policy=everything_saveable), fun):
        with CountOps() as ops:
            torch.autograd.grad(f(x := leaf(numbers(4, 4))).sum(), x)
        counts.append({op: n for op, n in ops.counts.items() if op not in ("detach", "full", "as_strided", "t")})
    assert counts[0].items() <= counts[1].items()


# A transformer block.


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def test_dots_saveable_costs_no_flops_and_no_peak() -> None:
    blocks = nn.ModuleList(Block(64) for _ in range(4))
    x = torch.randn(4, 64, 64)

    def costs(decorator: Any) -> tuple[int, int]:
        calls = [decorator(b) for b in blocks]

        def run() -> None:
            y = x
            for call in calls:
                y = call(y)
            y.square().mean().backward()
            blocks.zero_grad()

        run()
        with FlopCounterMode(display=False) as flops:
            run()
        with LiveBytes() as meter:
            run()
        return flops.get_total_flops(), meter.peak

    flops, peak = costs(plain)
    flops_of_dots, peak_of_dots = costs(lambda f: remat(f, policy=dots_saveable))
    assert flops_of_dots == flops
    assert peak_of_dots <= 1.05 * peak
    flops_of_nothing, peak_of_nothing = costs(lambda f: remat(f, policy=nothing_saveable))
    last = 2 * 4 * 64 * 64 * 256 * 4  # the last product of each block, which no backward reads
    assert flops_of_nothing < flops * 4 / 3 - last + 1
    assert peak_of_nothing < 0.6 * peak


@pytest.mark.parametrize("width", [8, 64])
def test_beside_modes_and_hooks_of_torch(width: int) -> None:
    block = Block(width)
    gradients = []
    contexts = functools.partial(create_selective_checkpoint_contexts, dots_saveable)
    selective = functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
    for f in (block, remat(block, policy=dots_saveable), selective):
        x = torch.linspace(-1, 1, 2 * 4 * width).view(2, 4, width).requires_grad_()
        seen: list[int] = []
        handle = register_multi_grad_hook([*block.parameters()], lambda grads, seen=seen: seen.append(len(grads)))
        with FlopCounterMode(display=False), ModuleTracker():
            f(x).square().sum().backward()
        handle.remove()
        assert len(seen) == 1
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


@each_policy
def test_higher_derivatives_read_more(policy: Any) -> None:
    """The derivative of a derivative reruns in another context than the forward's graph foresaw."""

    def fun(x: Tensor) -> Tensor:
        h = x.sin() + 1
        return ((h @ h).tanh() * h.exp() + h).cumsum(0) * 2

    x, v = numbers(3, 3), numbers(3, 3, seed=1)
    f = remat(fun, policy=policy)
    for g in (
        lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).cos().sum())(x),
        lambda f: jvp(grad(lambda x: f(x).sum()), (x,), (v,)),
        lambda f: grad(lambda x: jvp(f, (x,), (v,))[1].sin().sum())(x),
        lambda f: vmap(grad(lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (v,))[1].sum()))(torch.stack([x, v])),
    ):
        assert_same(g(f), g(fun))


def test_a_policy_where_saved_tensors_may_be_changed_is_an_error() -> None:
    def fun(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        z = y.exp()
        y.mul_(2)
        return y * z

    x, z = leaf(numbers(3)), leaf(numbers(3))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        with pytest.raises(RematError, match="under allow_mutation_on_saved_tensors"):
            remat(fun, policy=everything_saveable)(x)
        remat(fun)(x).sum().backward()
        fun(z).sum().backward()
    assert_same(x.grad, z.grad)


def test_an_alias_of_a_buffer_that_the_function_writes() -> None:
    """The rerun gets a copy of the buffer, and finds the alias with what the forward has written."""

    def run(decorate: Any) -> Tensor:
        buffer, x = torch.full((3,), 0.7, dtype=torch.float64), leaf(numbers(3))
        aliases = [buffer.detach()]

        def fun(h: Tensor, given: Tensor) -> Tensor:
            given.mul_(1.1)
            return (h * aliases[0].clone()).sin()

        return torch.autograd.grad(decorate(fun)(x, buffer).sum(), x)[0]

    assert_same(run(remat(policy=everything_saveable)), run(lambda f: f))


def coordinates(h: Tensor, d: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        [[0, d[0].argmin()], [1, 0]], [d[1, 1], d[0, 0]], (3, 3), check_invariants=False
    ).to_dense()


def assigned(h: Tensor, d: Tensor) -> Tensor:
    mask = torch.ones(3, 3, dtype=d.dtype)
    mask[[0, 1, 2], [r.argmax() for r in d]] = 2.0
    return mask


NUMBERS_IN_LISTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda h, d: h / torch.tensor([r.max() for r in d])[:, None],
    "a nested list": lambda h, d: h / torch.as_tensor([[d[0, 0]], [d[1, 1] + 1], [2.0]]),
    "a keyword": lambda h, d: h / torch.asarray(obj=(d[0, 0], d.sum(), 2.0))[:, None],
    "new_tensor": lambda h, d: h / h.new_tensor([[d[0, 0]], [d.sum()], [2.0]]),
    "flags": lambda h, d: h * torch.tensor([r.sum() > 1.5 for r in d])[:, None],
    "an index": lambda h, d: h[[0, 1, 2], [r.argmax() for r in d]],
    "one of several indices": lambda h, d: h.exp()[:, [r.argmin() for r in d]],
    "an assignment": lambda h, d: h * assigned(h, d),
    "a sparse tensor": lambda h, d: h @ coordinates(h, d),
    "FloatTensor": lambda h, d: h / torch.FloatTensor([d[0, 0], d[1, 1], d.sum()])[:, None],
    "LongTensor": lambda h, d: h.exp()[:, torch.LongTensor([r.argmax() for r in d])],
    "FloatTensor after a number": lambda h, d: h * float(d[0, 0]) * torch.FloatTensor([2.0, d.sum()]).sum(),
    "a constant after a number": lambda h, d: (
        h * float(d.sum().detach()) * torch.tensor(torch.autograd.grad((h * h).sum(), h)[0].numel())
    ),
}
"""Torch reads the elements without an op."""
UNDER_POLICIES: dict[str, Callable[[Fun], Fun]] = {
    "dots_saveable": remat(policy=dots_saveable),
    "everything_saveable": remat(policy=everything_saveable),
    "around remat": lambda fun: remat(remat(fun), policy=dots_saveable),
    "around checkpoint": lambda fun: remat(lambda x: checkpoint(fun, x, use_reentrant=False), policy=dots_saveable),
    "around vjp": lambda fun: remat(lambda x: torch.func.vjp(remat(fun), x)[0], policy=dots_saveable),
}


@pytest.mark.parametrize("transform", [".backward()", "grad", "jvp(grad)", "grad(grad)"])
@pytest.mark.parametrize("way", UNDER_POLICIES)
@pytest.mark.parametrize("kind", NUMBERS_IN_LISTS)
def test_tensors_in_lists_of_numbers(kind: str, way: str, transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        h = (x @ x).sin()
        return NUMBERS_IN_LISTS[kind](h, h.detach().abs() + 0.1).tanh()

    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](UNDER_POLICIES[way](fun), x), TRANSFORMS[transform](fun, x))


@pytest.mark.parametrize("kind", NUMBERS_IN_LISTS)
def test_tensors_in_lists_of_numbers_under_selective_checkpoint(kind: str) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def gradient(selects: bool) -> Any:
        def fun(x: Tensor) -> Tensor:
            h = (x @ x).sin()
            return NUMBERS_IN_LISTS[kind](h, h.detach().abs() + 0.1).tanh()

        x = leaf(numbers(3, 3))
        out = checkpoint(fun, x, use_reentrant=False, context_fn=contexts) if selects else fun(x)
        return torch.autograd.grad(out.sum(), x)[0]

    assert_same(gradient(True), gradient(False))


def test_a_number_that_python_reads_is_not_computed_again() -> None:
    """It is on the tape. Only a list makes torch read tensors without an op."""

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        return y * float(y.detach().exp().sum())

    x = leaf(numbers(3))
    out = remat(fun, policy=everything_saveable)(x).sum()
    with CountOps() as ops:
        out.backward()
    assert ops["exp"] == ops["sum"] == 0, ops


@pytest.mark.parametrize("part", range(4))
def test_every_op_of_torch(part: int) -> None:
    """In a process of its own: torch's table of samples changes global settings."""
    script = Path(__file__).parent / "every_op.py"
    run = subprocess.run([sys.executable, script, str(part), "4"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[0]) > 1_000


def by_checkpoint(fun: Any, policy: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True)
    return functools.partial(checkpoint, fun, use_reentrant=False, context_fn=contexts)


NORMALIZED: dict[str, Callable[[nn.BatchNorm1d, Tensor], Tensor]] = {
    "alone": lambda norm, x: norm(x).relu(),
    "with its new mean": lambda norm, x: norm(x) * norm.running_mean,
    "with a number": lambda norm, x: norm(x) * norm.running_var.sum().item(),
    "twice": lambda norm, x: norm(norm(x).relu()),
}


@pytest.mark.parametrize("policy", [everything_saveable, dots_saveable, nothing_saveable])
@pytest.mark.parametrize(
    "way", [lambda fun, policy: remat(fun, policy=policy), by_checkpoint], ids=["remat", "checkpoint"]
)
@pytest.mark.parametrize("fun", NORMALIZED.values(), ids=NORMALIZED)
def test_batchnorm_in_training(fun: Any, way: Any, policy: Any) -> None:
    """The graph saves the new statistics, and the backward does not read them."""
    results = []
    for ck in (way, lambda fun, policy: fun):
        norm, x = nn.BatchNorm1d(3).double(), leaf(numbers(5, 3))
        with CountOps() as ops:
            (first,) = torch.autograd.grad(ck(lambda x: fun(norm, x.sin()), policy)(x).square().sum(), x)
        (grads,) = torch.autograd.grad(ck(lambda x: fun(norm, x), policy)(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grads.square().sum(), x)
        results.append((first, second, norm.running_mean, norm.running_var))
        if fun is NORMALIZED["alone"] and policy is everything_saveable:
            assert ops["native_batch_norm"] == 1
    assert_same(*results)
