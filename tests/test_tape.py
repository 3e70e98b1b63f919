"""What runs again and what is held under a policy: exact counts for each transform, and never a wrong number."""

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    SIZE,
    SOME_TRANSFORMS,
    TRANSFORMS,
    UNIT,
    CountOps,
    Fun,
    Seen,
    activation,
    as_memory,
    assert_same,
    leaf,
    numbers,
    plain,
)
from helpers import loss as weighted
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy

from remat import CheckpointError, checkpoint, checkpoint_name, policies, remat
from remat import _offload as offload
from remat import _torch_internals as internals
from remat.compat import create_selective_checkpoint_contexts
from remat.debug import LiveBytes
from remat.policies import (
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    offload_ops,
    recompute_ops,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_at_most,
    save_every,
    save_if,
    save_only_these_names,
    save_ops,
)

aten = torch.ops.aten
SMALL = UNIT // 100
NOTHING = save_ops()  # keeps nothing, and has a tape all the same


def counts(run: Callable[[], Any]) -> dict[str, int]:
    with CountOps() as ops:
        run()
    return dict(ops.counts)


def again(fun: Fun, policy: Any, transform: Callable[[Fun], Any], *ops: str) -> dict[str, int]:
    """How often each op runs more often than without remat."""
    without, with_remat = counts(lambda: transform(fun)), counts(lambda: transform(remat(fun, policy=policy)))
    for found in (without, with_remat):  # a batched product is one or the other, as its backward has it
        found["mm"] = found.get("mm", 0) + found.pop("bmm", 0)
    return {op: n for op in ops if (n := with_remat.get(op, 0) - without.get(op, 0))}


def backward(fun: Fun) -> Tensor:
    x = leaf(numbers(3, 3))
    fun(x).sum().backward()
    assert x.grad is not None
    return x.grad


# First derivatives: the forward runs once more.
FIRST: dict[str, Callable[[Fun], Any]] = {
    ".backward()": backward,
    "grad": lambda f: grad(lambda x: f(x).sum())(numbers(3, 3)),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum()))(numbers(2, 3, 3)),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum())(numbers(2, 3, 3)),
    "jacrev": lambda f: jacrev(lambda x: f(x).sum(0))(numbers(3, 3)),
}
each_first = pytest.mark.parametrize("transform", FIRST.values(), ids=FIRST)

# What runs again. JAX's own tests of policies are the guide.


def sines(x: Tensor) -> Tensor:
    a = checkpoint_name(x.sin(), "a")
    b = checkpoint_name(a.sin(), "b")
    c = checkpoint_name(b.sin(), "c")
    return c.sin()


@each_first
@pytest.mark.parametrize(
    ("policy", "sines_again"),
    [
        (None, 4),
        (nothing_saveable, 3),  # the last sine is read by nobody
        (NOTHING, 3),
        (everything_saveable, 0),
        (save_only_these_names("a"), 2),
        (save_only_these_names("b"), 2),
        (save_only_these_names("c"), 2),
        (save_only_these_names("a", "b"), 1),
        (save_only_these_names("a", "c"), 1),
        (save_only_these_names("a", "b", "c"), 0),
        (save_only_these_names("other"), 3),
        (save_any_names_but_these("a"), 1),
        (save_any_names_but_these("a", "b", "c"), 3),
        (save_anything_except_these_names("b"), 1),
        (save_anything_except_these_names("a", "b", "c"), 3),
        (everything_saveable - save_only_these_names("a", "b"), 2),
        (save_and_offload_only_these_names(names_which_can_be_saved="a", names_which_can_be_offloaded="c"), 1),
        (save_ops("sin"), 0),
        (offload_ops("sin"), 0),
        (save_every(2, "sin"), 1),
        (save_ops("mm"), 3),
        (save_at_most(0), 3),
        (save_if(lambda ctx, op, *args, **kwargs: op is aten.sin.default), 0),
        (["sin"], 0),
        (lambda ctx, op, *args, **kwargs: op is aten.sin.default, 0),
    ],
    ids=lambda policy: getattr(policy, "__name__", str(policy)),
)
def test_how_many_sines_run_again(policy: Any, sines_again: int, transform: Any) -> None:
    assert_same(transform(remat(sines, policy=policy)), transform(sines))
    assert again(sines, policy, transform, "sin").get("sin", 0) == sines_again
    assert again(sines, policy, transform, "cos") == {}


def matmuls(x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ x.mT).sin() + 1
    return x


MATMULS = ("mm", "bmm", "addmm", "baddbmm", "convolution")


def the_same_twice(x: Tensor) -> Tensor:
    a, b = x.sin(), x.sin()
    return (a @ b).cos()


def draws(x: Tensor) -> Tensor:
    return F.dropout(the_same_twice(x), 0.5, training=True).cos()


def not_a_number(x: Tensor) -> Tensor:
    return torch.where(x < 100, x @ x, torch.nan).sin().exp().cos()


@each_first
@pytest.mark.parametrize("fun", [the_same_twice, not_a_number])
def test_what_is_kept_is_found_again(fun: Fun, transform: Any) -> None:
    assert again(fun, everything_saveable, transform, "sin", "cos", "exp", "where", *MATMULS) == {}


@pytest.mark.parametrize("way", [".backward()", "grad"])
def test_what_is_kept_is_found_again_beside_a_draw(way: str) -> None:
    def derivative(fun: Fun) -> Any:
        torch.manual_seed(0)
        return FIRST[way](fun)

    assert_same(derivative(remat(draws, policy=everything_saveable)), derivative(draws))
    assert again(draws, everything_saveable, derivative, "sin", "cos", *MATMULS) == {}


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None, None], x.sin()[None, None], x.cos()[None, None])[0, 0].sin()


@pytest.mark.parametrize("policy", [NOTHING, everything_saveable, recompute_ops("sin")])
def test_an_op_that_may_draw_and_does_not(policy: Any) -> None:
    """A rerun that spares it leaves the generators as they are."""
    x = leaf(numbers(2, 2))
    out = remat(attention, policy=policy)(x).sum()
    torch.rand(1)
    before = torch.get_rng_state()
    (actual,) = torch.autograd.grad(out, x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)
    (expected,) = torch.autograd.grad(attention(x).sum(), x)
    assert_same(actual.detach(), expected)


def other_results(x: Tensor) -> tuple[Tensor, ...]:
    detached = (x @ x).detach()
    return x.sin(), detached.exp(), x.argsort(-1)


def strided(parts: Tensor) -> Fun:
    """Writes to what is no dense tensor: the copy for the rerun has its elements elsewhere."""

    def fun(x: Tensor) -> Tensor:
        y = x * parts[1].sin() + x * parts[2].sin()
        parts.add_(1)
        return y * parts[1].exp()

    return fun


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("policy", [NOTHING, everything_saveable])
def test_what_is_kept_of_state_that_is_changed(policy: Any, dense: bool) -> None:
    parts = [numbers(8)[:4] if dense else numbers(8)[::2] for _ in range(2)]
    x, y = leaf(numbers(3)), leaf(numbers(3))
    remat(strided(parts[0]), policy=policy)(x).sum().backward()
    strided(parts[1])(y).sum().backward()
    assert_same([x.grad, parts[0]], [y.grad, parts[1]])


def test_what_is_kept_of_a_dense_state_that_is_changed_does_not_run_again() -> None:
    x = leaf(numbers(3))
    y = remat(strided(numbers(4)), policy=everything_saveable)(x).sum()
    with CountOps() as ops:
        y.backward()
    assert not ops["sin"] + ops["exp"]


@pytest.mark.parametrize("way", [".backward()", "grad"])
def test_results_that_no_backward_reads_are_not_computed_again(way: str) -> None:
    def derivative(fun: Fun) -> Any:
        return FIRST[way](lambda x: fun(x)[0])

    assert again(other_results, NOTHING, derivative, "mm", "exp", "sort") == {}


def test_results_that_no_backward_reads_are_not_kept() -> None:
    x = leaf(numbers(3, 3))
    with LiveBytes() as meter:
        first, *others = remat(other_results, policy=everything_saveable)(x)
        del others
        assert meter.current == first.nbytes


def test_parameters_that_are_not_read_do_not_hold_what_is_kept() -> None:
    """A function that is known is given all parameters of its modules, also those that it has no use for this time."""
    linear = nn.Linear(64, 64, bias=False)

    def branches(x: Tensor) -> Tensor:
        y = x.sin()
        z = linear(y) if y.sum().item() > 1e9 else y * 1.5
        return torch.tanh(y @ z) + y

    x = numbers(64, 64)
    peaks = []
    for requires_grad in (False, True):
        linear.requires_grad_(requires_grad)
        with LiveBytes() as meter:
            grad(lambda x: remat(branches, policy=everything_saveable)(x).sin().sum())(x)
        peaks.append(meter.peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("policy", [NOTHING, everything_saveable])
def test_indices_that_no_op_reads(policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        at = (x > 0).sum().reshape(1) + torch.tensor([1])
        first, second = torch.tensor_split(x, at)
        a, b = x.tensor_split(tensor_indices_or_sections=at)
        return first.sin().sum() + (second**3).sum() + a.cos().sum() + b.exp().sum()

    def second_derivative(fun: Fun) -> Tensor:
        x = leaf(numbers(6))
        (first,) = torch.autograd.grad(fun(x), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert_same(second_derivative(remat(fun, policy=policy)), second_derivative(fun))


@each_first
def test_dots_saveable_runs_no_matmul_twice(transform: Any) -> None:
    assert again(matmuls, dots_saveable, transform, *MATMULS) == {}
    assert sum(again(matmuls, None, transform, "mm", "bmm").values()) > 0


@each_first
def test_everything_saveable_runs_nothing_twice(transform: Any) -> None:
    with CountOps() as without:
        transform(matmuls)
    assert again(matmuls, everything_saveable, transform, "tanh", "sin", "add", "cos", "mul", *MATMULS) == {}
    assert without["tanh"] == 3


@pytest.mark.parametrize(
    "transform", ["jvp(grad)", "vmap(jvp(grad))", "jacrev(jacfwd)", "grad(grad)", "double backward"]
)
def test_dots_are_kept_for_higher_derivatives_too(transform: str) -> None:
    """The forward's own matmuls are given back; those of the first derivative run again for the second."""
    x = numbers(3, 3)

    def run(policy: Any) -> int:
        found = counts(lambda: TRANSFORMS[transform](remat(matmuls, policy=policy), x))
        return sum(found.get(op, 0) for op in MATMULS)

    assert run(dots_saveable) < run(None)


class Block(nn.Module):
    """What a transformer block is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            h = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return x + self.out(h).relu_()


block = Block().double().requires_grad_(False)
conv = nn.Conv1d(3, 3, 1).double().requires_grad_(False)
batch_norm = nn.BatchNorm1d(3).double().requires_grad_(False)
cell = nn.LSTMCell(3, 3).double().requires_grad_(False)
W = numbers(3, 3, seed=5)
BUFFER = torch.zeros(3, dtype=torch.float64)


def in_place(x: Tensor) -> Tensor:
    h = x @ W
    h += 1
    h.mul_(0.5).sin_()
    h[0] = h[1].detach() * 2
    return (h @ W).relu_()


def buffers(x: Tensor) -> Tensor:
    """It reads the same storage twice, with different values."""
    buffer = torch.zeros(3, dtype=x.dtype)
    total = x
    for _ in range(3):
        buffer += 1
        total = total + (x + buffer).sin()
    return total


def buffers_from_outside(x: Tensor) -> Tensor:
    BUFFER.zero_()
    total = x
    for _ in range(3):
        BUFFER.add_(1)
        total = total + (x + BUFFER).sin()
    return total


def constants(x: Tensor) -> Tensor:
    return x[torch.tensor([0, 2, 1])].sin() * torch.tensor([1.0, -0.0, 2.0], dtype=x.dtype)


def twins(x: Tensor) -> Tensor:
    """Two storages with the same value, one of which changes."""
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    a.add_(x)
    return (a.sin() * (b + 1)).cos() + b


def chunks(x: Tensor) -> Tensor:
    a, b, c = torch.unsafe_chunk((x @ W).repeat(1, 3), 3, -1)
    return a.sigmoid() * b.tanh() + c


PROGRAMS: dict[str, Fun] = {
    "sines": sines,
    "matmuls": matmuls,
    "in place": in_place,
    "a buffer": buffers,
    "constants": constants,
    "twins": twins,
    "chunks": chunks,
    "a gap": lambda x: torch.as_strided(x @ W, (2, 2), (3, 1), 1).sin().tanh().repeat(2, 2)[:3, :3],
    "expanded": lambda x: (x @ W)[0].expand(3, 3).sin().tanh(),
    "sorted": lambda x: (x @ W).sort(-1).values.sin(),
    "indexed": lambda x: torch.zeros_like(x).index_put((torch.tensor([0, 1]),), (x @ W)[:2]).sin().tanh(),
    "solved": lambda x: torch.linalg.solve(x @ x.mT + torch.eye(3, dtype=x.dtype), x @ W).sin(),
    "softmax": lambda x: F.gelu(F.layer_norm(x @ W, (3,))).softmax(-1),
}
# Not under every transform.
MODULES: dict[str, Fun] = {
    "an out= that is resized": lambda x: (x @ W).exp() * torch.sin(x.detach(), out=torch.empty(0).to(x)) * 2,
    "an out=": lambda x: (x @ W * torch.mul(x.detach(), 2, out=torch.empty_like(x.detach()))).sin(),
    "foreach": lambda x: torch._foreach_mul([x @ W, x.sin()], [x.cos(), x])[0].sin(),
    "complex": lambda x: torch.view_as_real(torch.complex(x @ W, x.sin()) * torch.complex(x, x).conj()).sum(-1).tanh(),
    "a number": lambda x: (x @ W) * float((x.detach() @ W).sum()),
    "block": lambda x: block(torch.cat([x, x[:, :1]], -1))[:, :3],
    "conv": lambda x: conv(x.T[None]).relu_()[0].T.sin(),
    "lstm": lambda x: cell(x)[0],
    "dropout": lambda x: F.dropout(torch.tanh(F.dropout(x @ W, 0.3)), 0.5).sin(),
    "random": lambda x: (x @ W) + torch.randn_like(x).sin() * x,
}
# They write to tensors from outside, which `torch.func` does not allow.
WRITING: dict[str, Fun] = {
    "batch norm": lambda x: torch.tanh(batch_norm(x @ W)) @ W,
    "a buffer from outside": buffers_from_outside,
}
KEEPING: dict[str, Any] = {
    "everything": everything_saveable,
    "dots": dots_saveable,
    "offloaded": offload_ops("mm", "bmm", "addmm", "sin", "tanh", "sigmoid", "clone", "add_", "mul_", "zeros"),
    "all but": recompute_ops("mul", "sin", "mul_", "add_"),
    "every second": save_every(2, "mm", "sin", "tanh", "mul", "add", "copy_"),
    "in place": save_ops("add_", "mul_", "sin_", "copy_", "relu_", "bernoulli_", "zeros_like"),
}


@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("transform", [*FIRST, "jvp(grad)", "grad(grad)"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_numbers(program: str, transform: str, policy: Any) -> None:
    fun, run = PROGRAMS[program], FIRST.get(transform) or (lambda f: TRANSFORMS[transform](f, numbers(3, 3)))
    assert_same(run(remat(fun, policy=policy)), run(fun))


def seeded(transform: str) -> Callable[[Fun], Any]:
    """The result of a transform, with what it leaves behind: the random stream and the buffers."""

    def run(fun: Fun) -> Any:
        torch.manual_seed(0)
        batch_norm.reset_running_stats()
        result = TRANSFORMS[transform](fun, numbers(3, 3))
        return result, torch.rand(2), BUFFER.clone(), {k: v.clone() for k, v in batch_norm.state_dict().items()}

    return run


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("transform", [".backward()", "double backward", "grad"])
@pytest.mark.parametrize("program", MODULES)
def test_modules(program: str, transform: str, policy: Any) -> None:
    run = seeded(transform)
    assert_same(run(remat(MODULES[program], policy=policy)), run(MODULES[program]))


@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("transform", [".backward()", "double backward"])
@pytest.mark.parametrize("program", WRITING)
def test_functions_that_write_to_buffers(program: str, transform: str, policy: Any) -> None:
    run = seeded(transform)
    assert_same(run(remat(WRITING[program], policy=policy)), run(WRITING[program]))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("policy", KEEPING)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform(transform: str, policy: str) -> None:
    def fun(x: Tensor) -> Tensor:
        for _ in range(2):
            h = (x @ x.mT).add_(0.1)
            h.mul_(0.5)
            x = torch.tanh(checkpoint_name(h, "h")).sin() + x
            x = x + torch.tensor([1.0, 2.0], dtype=x.dtype)[0]
        return x

    x = numbers(2, 2)
    actual = TRANSFORMS[transform](remat(fun, policy=KEEPING[policy]), x)
    assert_same(actual, TRANSFORMS[transform](fun, x))


@each_first
@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
def test_a_cast(policy: Any, transform: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        return (x @ W).float().tanh().to(x.dtype).sin()

    assert_same(transform(remat(fun, policy=policy)), transform(fun))


@pytest.mark.parametrize(
    ("program", "ops"),
    [
        ("in place", ["mm"]),
        ("chunks", ["mm", "sigmoid", "tanh"]),
        ("constants", ["sin", "index"]),
        ("a number", ["mm", "sum"]),
        ("complex", ["mm", "mul", "tanh"]),
        ("solved", ["mm", "_linalg_solve_ex"]),
        ("foreach", ["mm", "sin", "cos"]),
        ("block", ["addmm", "native_layer_norm"]),
        ("conv", ["convolution", "relu_"]),
        ("lstm", ["addmm", "tanh"]),
        ("dropout", ["mm", "bernoulli_", "tanh"]),
    ],
)
def test_nothing_runs_twice_in_larger_programs(program: str, ops: list[str]) -> None:
    fun = (PROGRAMS | MODULES)[program]
    with CountOps() as without:
        backward(fun)
    assert all(without[op] for op in ops)
    assert again(fun, everything_saveable, backward, *ops) == {}


@pytest.mark.parametrize("policy", [NOTHING, *KEEPING.values()], ids=["nothing", *KEEPING])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)"])
def test_a_nested_call_that_draws(transform: str, policy: Any) -> None:
    """Its own rerun starts from the random state that it has seen in the rerun of the outer one."""

    def fun(decorator: Any) -> Fun:
        inner = decorator(lambda x: F.dropout(x.sin(), 0.5))

        def outer(x: Tensor) -> Tensor:
            h = inner(x)
            return inner(h) * h.argsort(-1)

        return decorator(outer)

    def run(decorator: Any) -> Any:
        torch.manual_seed(0)
        x = numbers(3, 3)
        if transform == "vmap(grad)":
            return vmap(grad(weighted(fun(decorator))), randomness="different")(torch.stack([x, x]))
        return TRANSFORMS[transform](fun(decorator), x)

    assert_same(run(lambda f: remat(f, policy=policy)), run(plain))


def test_a_matmul_that_is_changed_in_place_is_kept_as_changed() -> None:
    def bias(x: Tensor) -> Tensor:
        return ((x @ W).add_(1)).sin()

    assert again(bias, dots_saveable, backward, "mm", "add_") == {}
    assert again(bias, dots_saveable, backward, "mm", "add_") != again(bias, None, backward, "mm", "add_")


def test_a_value_is_kept_only_if_it_is_read() -> None:
    """`cos` reads what the sine returned; the sum of its result reads nothing."""
    x = activation().requires_grad_()
    for policy, units in [(everything_saveable, 1), (save_ops("sin"), 1), (save_ops("add"), 0), (save_ops("cos"), 0)]:
        with LiveBytes() as meter:
            out = remat(lambda x: x.sin().cos().add(1), policy=policy)(x).sum()
            assert meter.current == pytest.approx(units * UNIT, abs=SMALL)
        del out
        assert meter.current == 0


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda f: f(activation().requires_grad_()).backward(), id=".backward()"),
        pytest.param(lambda f: grad(f)(activation()), id="grad"),
        pytest.param(lambda f: vmap(grad(f))(activation(3)), id="vmap(grad)"),
    ],
)
def test_everything_saveable_peaks_as_without_remat(run: Callable[[Fun], Any]) -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x * 2).sin() + x
        return x

    def peak(decorator: Any) -> int:
        with LiveBytes() as meter:
            run(lambda x: decorator(layers)(decorator(layers)(x)).sum())
        return meter.peak

    assert peak(lambda f: remat(f, policy=everything_saveable)) <= 1.05 * peak(plain)


def test_a_kept_view_keeps_no_more_than_its_base() -> None:
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        out = remat(lambda x: x.sin().view(2, -1)[0].cos(), policy=everything_saveable)(x).sum()
        assert meter.current == pytest.approx(UNIT, abs=SMALL)
    out.backward()


# Memory that is read and written without ops.


def by_numpy(x: Tensor) -> Tensor:
    h = (x @ W).sin()
    table = torch.tensor(np.cos(h.detach().numpy()).tolist(), dtype=x.dtype)
    weights = torch.tensor(h.detach()[0].tolist(), dtype=x.dtype)
    return (x * table * weights).sin()


class ByKernel(torch.autograd.Function):
    """A kernel that is called with addresses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ctypes.memmove(out.data_ptr(), x.contiguous().data_ptr(), x.nbytes)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos()


class Unseen(torch.autograd.Function):
    """A kernel that no mode sees, and that saves nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return as_memory(x).sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Unseen.apply(x), in_dims[0]


class UnseenInPlace(Unseen):
    """The same, in place."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        as_memory(x).sin_()
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return UnseenInPlace.apply(x), in_dims[0]


READS_UNSEEN: dict[str, Callable[[Any], Fun]] = {
    "saves nothing": lambda ck: lambda x: Unseen.apply(x @ W).sin(),
    "in a nested call": lambda ck: lambda x: ck(lambda x: Unseen.apply(x + 1) * 2)(x @ W).sin(),
    "in place": lambda ck: lambda x: UnseenInPlace.apply(x @ W).sin(),
    "in place, before a view": lambda ck: lambda x: UnseenInPlace.apply(x @ W).t().sin(),
    "in place, before a name": lambda ck: lambda x: checkpoint_name(UnseenInPlace.apply(x @ W), "h").sin(),
    "in place, after an op in place": lambda ck: lambda x: UnseenInPlace.apply((x @ W).unsqueeze_(0).add_(1)).sin(),
}
SAVE_LATE = {"views": save_ops("t", "alias"), "names": policies.save_only_these_names("h")}


@pytest.mark.parametrize("policy", [*(KEEPING | SAVE_LATE).values(), policies.nothing_saveable])
@pytest.mark.parametrize("transform", [".backward()", "double backward", "grad", "vmap(grad)", "grad(vmap)"])
@pytest.mark.parametrize("fun", READS_UNSEEN)
def test_memory_that_an_autograd_function_reads_unseen(fun: str, transform: str, policy: Any) -> None:
    make = READS_UNSEEN[fun]
    actual = TRANSFORMS[transform](remat(make(remat), policy=policy), numbers(3, 3))
    assert_same(actual, TRANSFORMS[transform](make(plain), numbers(3, 3)))


@pytest.mark.parametrize(
    "fun", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: torch._foreach_add([x], 1.0)[0]]
)
def test_views_in_place_and_foreach_ops_leave_what_is_kept(fun: Fun) -> None:
    saves = lambda ctx, op, *args, **kwargs: policies.CheckpointPolicy.PREFER_SAVE  # noqa: E731
    x = leaf(numbers(3, 3))
    out = remat(lambda x: (fun(x @ W) @ W).sin(), policy=saves)(x).sum()
    with CountOps() as count:
        out.backward()
    assert count["mm"] == 2  # of the derivatives


@pytest.mark.parametrize("fun", READS_UNSEEN)
def test_memory_that_an_autograd_function_reads_unseen_under_a_selective_checkpoint(fun: str) -> None:
    mm = torch.ops.aten.mm.default
    contexts = functools.partial(create_selective_checkpoint_contexts, [mm], allow_cache_entry_mutation=True)

    def checkpointed(f: Fun) -> Fun:
        return lambda x: checkpoint(f, x, use_reentrant=False, context_fn=contexts)

    actual = TRANSFORMS[".backward()"](checkpointed(READS_UNSEEN[fun](remat)), numbers(3, 3))
    assert_same(actual, TRANSFORMS[".backward()"](READS_UNSEEN[fun](plain), numbers(3, 3)))


@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("fun", [by_numpy, lambda x: ByKernel.apply((x @ W).tanh()).sin()], ids=["numpy", "kernel"])
def test_memory_that_is_read_without_ops(fun: Fun, policy: Any) -> None:
    for transform in (".backward()", "double backward"):
        actual = TRANSFORMS[transform](remat(fun, policy=policy), numbers(3, 3))
        assert_same(actual, TRANSFORMS[transform](fun, numbers(3, 3)))


# Kept values that change.


@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_a_kept_value_that_was_changed_later_is_computed_again(transform: str) -> None:
    def fun(x: Tensor) -> Any:
        h = x.sin()
        return h, h.cos()

    def changed(x: Tensor) -> Tensor:
        h, out = remat(fun, policy=save_ops("sin"))(x)
        h.detach().mul_(2)
        return out

    assert_same(TRANSFORMS[transform](changed, numbers(3)), TRANSFORMS[transform](lambda x: fun(x)[1], numbers(3)))


def test_what_is_offloaded_can_be_changed() -> None:
    def fun(x: Tensor) -> Any:
        h = x.sin()
        return h, h.cos()

    x = leaf(numbers(3))
    h, out = remat(fun, policy=offload_ops("sin"))(x)
    h.detach().mul_(2)
    (g,) = torch.autograd.grad(out.sum(), x)
    assert_same(g, torch.autograd.grad(fun(x)[1].sum(), x)[0])


def test_a_result_that_is_changed_and_not_read_is_no_error() -> None:
    """As without remat: the backward of a matmul does not read its result."""
    x = leaf(numbers(3, 3))
    h = remat(lambda x: x @ W, policy=dots_saveable)(x)
    h.detach().mul_(2)
    (g,) = torch.autograd.grad(h.sum(), x)
    assert_same(g, torch.autograd.grad((x @ W).sum(), x)[0])


# Many backwards.


@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
def test_many_backwards_through_one_forward(policy: Any) -> None:
    x = leaf(numbers(3, 3))
    expected = torch.autograd.grad(in_place(x).sum(), x)
    out = remat(in_place, policy=policy)(x).sum()
    for last in (False, False, True):
        assert_same(torch.autograd.grad(out, x, retain_graph=not last), expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, x)


def test_a_retained_backward_reruns_nothing_more_each_time() -> None:
    x = leaf(numbers(3, 3))
    out = remat(matmuls, policy=dots_saveable)(x).sum()
    seen = [counts(lambda: torch.autograd.grad(out, x, retain_graph=True)) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
def test_a_pullback_under_later_transforms(policy: Any) -> None:
    def run(fun: Fun) -> Any:
        _, pull = vjp(fun, numbers(3, 3))
        g = numbers(2, 3, 3, seed=1)
        return vmap(pull)(g), jvp(lambda g: pull(g)[0], (g[0],), (g[1],)), grad(lambda g: pull(g)[0].sin().sum())(g[0])

    assert_same(run(remat(matmuls, policy=policy)), run(matmuls))


@pytest.mark.parametrize("policy", [policies.dots_saveable, policies.save_only_these_names("h")])
def test_a_call_that_nothing_differentiates_holds_no_kept_values(policy: Any) -> None:
    """What the policy would keep dies with the last result that needs it."""
    w = numbers(20, 20) / 5

    def layers(x: Tensor) -> Tensor:
        for _ in range(20):
            x = checkpoint_name(torch.tanh(x @ w), "h")
        return x

    def peak(fun: Callable[[Tensor], Tensor]) -> float:
        x = numbers(200, 20)
        with LiveBytes() as meter:
            fun(x)
        return meter.peak / x.nbytes

    assert peak(layers) >= 2
    assert peak(remat(layers, policy=policy)) <= peak(layers) + 1.1


def test_what_an_op_reads_is_kept_if_its_name_says_to_run_it_again() -> None:
    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if ctx.name is not None:
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def fun(x: Tensor) -> Tensor:
        h = checkpoint_name((x @ w).exp(), "h")
        return h.cos().tanh()

    w = numbers(3, 3)
    y = remat(fun, policy=policy)(leaf(numbers(3, 3))).sum()
    with CountOps() as counted:
        y.backward()
    assert (counted["exp"], counted["mm"]) == (1, 1)  # the mm is that of the gradient


def test_what_a_write_needs_is_kept_although_nothing_else_reads_it() -> None:
    def fun(x: Tensor) -> Tensor:
        h = x @ w
        z = w @ x
        h += z
        del z
        d = (h * 2).sin()
        h += 1  # the sum is lost: it is computed again from both products, of which the first is lost, too
        return d.sum() + h.sum()

    w = leaf(numbers(3, 3, seed=1))
    y = remat(fun, policy=dots_saveable)(leaf(numbers(3, 3)))
    assert counts(y.backward)["mm"] == 5  # four for the gradients


# Leaks.


@pytest.mark.parametrize("policy", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("program", ["matmuls", "in place", "a buffer", "constants", "chunks"])
@pytest.mark.parametrize("how", ["backward", "dropped", "retained", "grad", "vmap(grad)", "grad(grad)", "inside"])
def test_nothing_is_left(program: str, how: str, policy: Any, no_gc: None) -> None:
    fun = remat(PROGRAMS[program], policy=policy)
    x = leaf(numbers(3, 3))
    with LiveBytes() as meter:
        if how in ("backward", "dropped", "retained"):
            out = fun(x).sum()
            if how != "dropped":
                torch.autograd.grad(out, x, retain_graph=how == "retained")
            if how == "backward":
                assert meter.current <= 200  # the sum, and what RNG and the like take
            del out
        elif how == "inside":
            remat(lambda x: fun(x.sin()).cos(), policy=policy)(x).sum().backward()
            x.grad = None
        else:
            TRANSFORMS[how](fun, x.detach())
    assert meter.current == 0


@pytest.mark.parametrize("inner", [offload_ops("sin"), everything_saveable, NOTHING])
@pytest.mark.parametrize("outer", [offload_ops("sin"), everything_saveable, NOTHING])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)", "double backward"])
def test_what_a_call_inside_keeps_is_there_although_its_op_was_spared(transform: str, outer: Any, inner: Any) -> None:
    def fun(x: Tensor, outer: Any, inner: Any) -> Tensor:
        return x * outer(lambda: inner(lambda: x.sin().sin())().exp())()

    actual, expected = (
        TRANSFORMS[transform](functools.partial(fun, outer=a, inner=b), numbers(3, 3))
        for a, b in ((remat(policy=outer), remat(policy=inner)), (lambda f: f, lambda f: f))
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "double backward"])
def test_an_exception_in_the_rerun_leaves_nothing(transform: str, no_gc: None) -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        x = (x @ x).sin()
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("in the rerun")
        return x.cos()

    with LiveBytes() as meter, pytest.raises(KeyError):
        TRANSFORMS[transform](remat(fun, policy=dots_saveable), numbers(2, 2))
    depth = internals.stack_depth(), internals.dispatch_modes_active(), torch.is_grad_enabled()
    assert depth == (0, False, True)
    gc.collect()
    assert meter.current == 0


def test_kept_values_go_one_by_one_during_the_backward() -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    x = activation().requires_grad_()
    with LiveBytes() as meter:
        out = remat(layers, policy=everything_saveable)(x).sum()
        held = meter.current
        meter.reset_peak()
        torch.autograd.grad(out, x)
        assert meter.peak <= held + 4 * UNIT


# Errors.


def test_a_policy_that_raises_says_so_and_leaves_nothing() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return "save" if op is aten.mm.default else False

    with pytest.raises(TypeError, match=r"must return a bool or a CheckpointPolicy; got str 'save' for aten.mm"):
        remat(matmuls, policy=policy)(leaf(numbers(2, 2)))
    assert not internals.dispatch_modes_active()


def test_a_policy_sees_the_call_and_the_result() -> None:
    seen = Seen()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append((op, ctx.call[0], ctx.is_recompute, ctx.op_output.shape))
        return True

    x = leaf(numbers(2, 2))
    remat(lambda x: torch.sin(x), policy=policy)(x).sum().backward()
    assert seen == [(aten.sin.default, torch.sin, False, x.shape)]


def test_a_rerun_that_differs_is_an_error() -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin().cos() if len(runs) == 1 else x.cos().sin()

    x = leaf(numbers(3))
    out = remat(fun, policy=everything_saveable)(x).sum()
    with pytest.raises(CheckpointError, match="differs from its forward run: at call 1"):
        out.backward()


# Offloading. The machine of the tests has a CPU alone, so the streams are stand-ins that keep a diary.


class FakeStream:
    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary

    def wait_stream(self, other: Any) -> None:
        self.diary.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.diary.append(f"{self.name} records")
        return "event"

    def wait_event(self, event: str) -> None:
        self.diary.append(f"{self.name} waits for {event}")


class FakeBackend:
    """What `torch.cuda` has of streams."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.main = FakeStream("main", self.diary)

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802
        return FakeStream("side", self.diary)

    def current_stream(self, device: Any) -> FakeStream:
        return self.main

    def stream(self, stream: FakeStream) -> Any:
        diary = self.diary

        class On:
            def __enter__(self) -> None:
                diary.append(f"on {stream.name}")

            def __exit__(self, *_: Any) -> None:
                diary.append(f"off {stream.name}")

        return On()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    fake = FakeBackend()
    monkeypatch.setattr(offload, "_backend", lambda device: fake)
    monkeypatch.setattr(offload, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(offload, "_in_use_by", lambda tensor, stream: fake.diary.append(f"in use by {stream.name}"))
    return fake


def test_offloading_goes_over_a_side_stream(backend: FakeBackend) -> None:
    source = torch.arange(5, dtype=torch.uint8)
    value = offload.Offloaded(source)
    assert backend.diary == ["side waits for main", "on side", "off side", "in use by side"]
    backend.diary.clear()
    value.fetch()
    value.fetch()  # it is on its way
    assert backend.diary == ["on side", "side records", "off side"]
    backend.diary.clear()
    assert torch.equal(value.get(), source)
    assert backend.diary == ["main waits for event", "in use by main"]
    assert torch.equal(value.get(), source)  # once more, for another backward


def test_what_the_next_rerun_needs_is_on_its_way_before(backend: FakeBackend) -> None:
    x = leaf(numbers(3, 3))
    fun = remat(lambda x: (x @ W).sin(), policy=offload_ops("mm"))
    out = fun(fun(fun(x))).sum()
    backend.diary.clear()
    (g,) = torch.autograd.grad(out, x)
    plainly = lambda x: (x @ W).sin()  # noqa: E731
    assert_same(g, torch.autograd.grad(plainly(plainly(plainly(x))).sum(), x)[0])
    fetched = [i for i, line in enumerate(backend.diary) if line == "side records"]
    waited = [i for i, line in enumerate(backend.diary) if line == "main waits for event"]
    assert len(fetched) == len(waited) == 3
    assert fetched[1] < waited[0]
    assert fetched[2] < waited[1]


def test_offloading_is_a_copy_on_a_cpu() -> None:
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        out = remat(lambda x: x.sin().cos(), policy=offload_ops("sin"))(x).sum()
        assert meter.current == pytest.approx(UNIT, abs=SMALL)
        out.backward()
        assert meter.current == pytest.approx(UNIT, abs=SMALL)  # x.grad
        del out
        x.grad = None
    assert meter.current == 0


# Kept values that are changed, or given back.


@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y.mT, lambda y: y.detach()])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)"])
def test_a_result_that_shares_memory_with_a_kept_value_is_changed(transform: str, view: Any) -> None:
    """Then it is not read, but computed again."""

    def program(x: Tensor, factor: int) -> Tensor:
        y, z = remat(lambda x: (view(h := x @ x), h.sin()), policy=policies.dots_saveable)(x)
        with torch.no_grad():
            y.mul_(factor)
        return z

    run = TRANSFORMS[transform]
    assert_same(run(lambda x: program(x, 10), numbers(3, 3)), run(lambda x: program(x, 1), numbers(3, 3)))


def test_a_value_that_is_computed_twice_is_changed() -> None:
    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x @ x, x @ x
        return a, a.sin() * b.numel()

    x = numbers(3, 3)
    a, b = remat(fun, policy=policies.dots_saveable)(leaf_x := leaf(x))
    a.detach().mul_(10)
    b.sum().backward()
    assert_same(leaf_x.grad, grad(lambda x: fun(x)[1].sum())(x))


def test_kept_values_are_given_back_where_the_operand_was_a_result() -> None:
    ws = [torch.randn(50, 50) for _ in range(8)]

    @remat(policy=policies.dots_saveable)
    def block(x: Tensor) -> Tensor:
        for w in ws:
            x = torch.sin(x @ w)
        return x

    def peak(operand: Callable[[Tensor], Tensor]) -> int:
        x = operand(torch.randn(50, 50, requires_grad=True))
        with LiveBytes() as meter:
            block(x).sum().backward()
        return meter.peak

    assert peak(lambda x: x * 2) <= peak(lambda x: x)


# Draws. Where a rerun can't match an op, the random stream moves as in the forward all the same.

SPARSE = torch.eye(3, dtype=torch.double).to_sparse()


def drops_around_a_sparse_product(x: Tensor) -> Tensor:
    return F.dropout(torch.sparse.mm(SPARSE, x * torch.randn_like(x))).sin()


def drops_around_own_generator(x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(3)
    return F.dropout(x * torch.randn_like(x) * torch.rand(3, 3, generator=own, dtype=torch.double)).sin()


def drops_around_a_conjugate(x: Tensor) -> Tensor:
    return F.dropout((torch.complex(x, x.sin()) * torch.randn_like(x)).conj().imag * 2).sin()


def adds_noise_after_a_sparse_product(x: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    return (torch.sparse.mm(SPARSE, x.sin()) + noise).sin() * torch.rand_like(x)


DRAWING = [
    drops_around_a_sparse_product,
    drops_around_own_generator,
    drops_around_a_conjugate,
    adds_noise_after_a_sparse_product,
]


@pytest.mark.parametrize("policy", [everything_saveable, save_at_most(10**6), dots_saveable], ids=str)
@pytest.mark.parametrize("fun", DRAWING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks that copy"])
def test_draws_where_the_tape_does_not_know_an_op(fun: Fun, policy: Any, hooks: bool) -> None:
    def run(fun: Fun) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        if not hooks:
            return backward(fun), torch.rand(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return backward(fun), torch.rand(3)

    assert_same(run(remat(fun, policy=policy)), run(fun))


def test_kept_values_are_found_under_hooks_that_copy_the_operands() -> None:
    block = remat(lambda x: x.sin().cos().sin(), policy=everything_saveable)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = block(leaf(numbers(3)))
    with CountOps() as ops:
        y.sum().backward()
    assert ops["sin"] == 1  # the derivative of `cos`


@pytest.mark.parametrize("policy", [everything_saveable, save_at_most(10**6), dots_saveable], ids=str)
def test_a_layer_that_autocast_has_seen_already(policy: Any) -> None:
    block = nn.Sequential(nn.Dropout(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8))
    inputs = numbers(8, 8).float()

    def run(fun: Any, caches: bool) -> list[Any]:
        torch.manual_seed(0)
        block.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches):
            loss = sum(fun(inputs + i).float().sin().sum() for i in range(2))
        assert isinstance(loss, Tensor)
        loss.backward()
        return [p.grad for p in block.parameters()]

    # A cast that is made twice adds up its gradients in float32, not in bfloat16.
    assert_same(run(remat(block, policy=policy), caches=True), run(block, caches=False))


def test_nothing_runs_twice_of_a_layer_that_autocast_has_seen_already() -> None:
    linear = nn.Linear(8, 8)

    def run(fun: Any) -> None:
        x = numbers(8, 8).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                x = x + fun(x)
        x.sum().backward()

    def fun(x: Tensor) -> Tensor:
        return linear(torch.tanh(linear(x)))

    def runs(fun: Any) -> tuple[int, int]:
        found = counts(lambda: run(fun))
        return found["addmm"], found["tanh"]

    assert runs(remat(fun, policy=everything_saveable)) == runs(fun) == (6, 3)
    assert runs(remat(fun, policy=dots_saveable)) == (6, 6)


@pytest.mark.parametrize("policy", [NOTHING, dots_saveable, everything_saveable], ids=str)
def test_a_sparse_product_of_a_result_that_is_saved(policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        return torch.sparse.mm(SPARSE, torch.relu(x @ x))

    assert_same(backward(remat(fun, policy=policy)), backward(fun))


def test_a_checkpoint_at_the_end_is_not_run_again_to_see_what_it_saves() -> None:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = checkpoint(torch.tanh, x, use_reentrant=False)
        return y, y

    fun = remat(twice, policy=policies.dots_saveable)
    x = leaf(numbers(3))
    with CountOps() as ops:
        fun(x)
    assert ops["tanh"] == 1
    y = checkpoint(lambda x: fun(x)[0].sin(), x, use_reentrant=False)  # nor in the rerun of this one
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.tanh().sin().sum(), x))


def test_a_checkpoint_inside_is_not_run_again_to_see_what_it_holds() -> None:
    def with_hidden(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x.sin()
        inner = checkpoint(use_reentrant=False)(lambda z: (z * h).tanh())
        y = checkpoint(lambda h: inner(h.exp()), h, use_reentrant=False)
        return h, y, y

    fun = remat(with_hidden, policy=policies.save_ops("sin"))
    x = leaf(numbers(3))
    with CountOps() as ops:
        h, y, _ = fun(x)
    assert ops["sin"] == ops["tanh"] == 1
    with CountOps() as ops:
        found = torch.autograd.grad((h + y).sum(), x)
    assert ops["sin"] == 0  # it is kept: the checkpoint reads it
    h, y, _ = with_hidden(x)
    assert_same(found, torch.autograd.grad((h + y).sum(), x))


@pytest.mark.parametrize("inner", [None, NOTHING, everything_saveable], ids=str)
@pytest.mark.parametrize("outer", [NOTHING, dots_saveable, everything_saveable], ids=str)
@pytest.mark.parametrize("how", SOME_TRANSFORMS)
def test_a_policy_around_a_checkpoint_around_remat(how: str, outer: Any, inner: Any) -> None:
    linear = nn.Linear(3, 3, dtype=torch.float64)

    def fun(x: Tensor) -> Tensor:
        return torch.tanh(linear(x))

    def middle(x: Tensor) -> Tensor:
        return checkpoint(remat(fun, policy=inner), x, use_reentrant=False)

    run = TRANSFORMS[how]
    assert_same(run(remat(middle, policy=outer), numbers(3, 3)), run(fun, numbers(3, 3)))


# Lazily conjugated and negated tensors.


def dot_of_conjugates(z: Tensor) -> Tensor:
    y = z.conj() @ z.conj()  # under a mode, the op returns a conjugated one
    return (y * y * y).imag + (z * y).real.sum()


def written_through_a_negative(z: Tensor) -> Tensor:
    v = z * z
    v.conj().imag.mul_(2)
    return (v * v).real.sum()


def read_through_a_negative(z: Tensor) -> Tensor:
    v = z * z
    return v.conj().imag.sin().sum() + (v.conj().imag * z.real).cos().sum()


FLAGGED = [dot_of_conjugates, written_through_a_negative, read_through_a_negative]
COMPLEX_WAYS: dict[str, Callable[[Fun, Tensor], Tensor]] = {
    "autograd.grad": lambda fun, z: torch.autograd.grad(fun(z := leaf(z)), z)[0],
    "create_graph": lambda fun, z: torch.autograd.grad(
        torch.view_as_real(torch.autograd.grad(fun(z := leaf(z)), z, create_graph=True)[0].resolve_conj()).tanh().sum(),
        z,
    )[0],
    "grad": lambda fun, z: grad(fun)(z),
    "grad(grad)": lambda fun, z: grad(lambda z: torch.view_as_real(grad(fun)(z).resolve_conj()).tanh().sum())(z),
}


@pytest.mark.parametrize(
    "policy", [NOTHING, dots_saveable, everything_saveable, save_ops("mul"), offload_ops("dot")], ids=str
)
@pytest.mark.parametrize("way", COMPLEX_WAYS)
@pytest.mark.parametrize("fun", FLAGGED)
def test_lazily_conjugated_and_negated_tensors(fun: Fun, way: str, policy: Any) -> None:
    z = torch.complex(numbers(1, 4), numbers(1, 4, seed=1))[0]
    run = COMPLEX_WAYS[way]
    assert_same(run(remat(fun, policy=policy), z).resolve_conj(), run(fun, z).resolve_conj())


@pytest.mark.parametrize("policy", [dots_saveable, everything_saveable], ids=str)
def test_lazily_conjugated_results_under_vmap(policy: Any) -> None:
    z = torch.complex(numbers(2, 4), numbers(2, 4, seed=1))
    actual, expected = (vmap(grad(fun))(z) for fun in (remat(dot_of_conjugates, policy=policy), dot_of_conjugates))
    assert_same(actual.resolve_conj(), expected.resolve_conj())


def test_what_is_read_through_a_negative_view_is_not_kept() -> None:
    z = leaf(torch.complex(numbers(SIZE), numbers(SIZE)))
    with LiveBytes() as meter:
        y = remat(lambda z: (z * z).conj().imag.sin().sum(), policy=NOTHING)(z)
        assert meter.current < SMALL
    y.backward()


# Calls inside of calls.


def product_and_more(x: Tensor) -> tuple[Tensor, Tensor]:
    v = x @ x
    return v.sin(), v


@pytest.mark.parametrize("way", [".backward()", "grad"])
def test_what_a_call_inside_keeps_and_returns(way: str) -> None:
    def products(decorator: Any) -> int:
        inner = decorator(product_and_more)
        outer = decorator(lambda x: inner(x * 1.0))
        return counts(lambda: FIRST[way](lambda x: sum(y.sin().sum() for y in outer(x))))["mm"]

    assert products(remat(policy=everything_saveable)) == products(plain)


def test_batched_cotangents_where_an_argument_is_returned() -> None:
    """Two reruns in one backward pass: the first may not take what is kept."""
    x, cotangents = leaf(numbers(4)), numbers(3, 4)

    def run(fun: Fun) -> Tensor:
        return torch.autograd.grad(fun(x)[0], x, cotangents, is_grads_batched=True)[0]

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp(), x

    assert_same(run(remat(fun, policy=everything_saveable)), run(fun))


def test_a_view_of_what_is_captured_under_vmap_and_a_policy() -> None:
    grads = []
    for ck in (plain, remat(policy=policies.dots_saveable)):
        x = leaf(numbers(3, 2))

        def fun(row: Tensor, ck: Any = ck) -> Tensor:
            return torch.sin(ck(lambda: row[1:])())

        vmap(lambda row, ck=ck, fun=fun: ck(fun)(row), in_dims=1)(x).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_an_intermediate_result_that_a_function_marks_dirty(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x @ x
        return UnseenInPlace.apply(y).sin() + y

    def derivative(fun: Fun) -> Any:
        return TRANSFORMS[transform](lambda x: grad(lambda x: fun(x).sum())(x), numbers(3, 3))

    assert_same(derivative(remat(fun)), derivative(fun))


@torch.library.custom_op("remat_tests::times_sine", mutates_args=())
def times_sine(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y


times_sine.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.saved_tensors[1], g * ctx.saved_tensors[0].sin()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
times_sine.register_vmap(lambda info, in_dims, x, y: (times_sine(x.movedim(in_dims[0], 0), y.expand_as(x)), 0))


logged: list[float] = []


@torch.library.custom_op("remat_tests::log", mutates_args=())
def log(x: Tensor) -> None:
    logged.append(x.sum().item())


@pytest.mark.parametrize("policy", [None, *KEEPING.values()])
def test_an_op_that_returns_nothing_runs_again(policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        log(y.detach())
        return y.exp()

    logged.clear()
    remat(fun, policy=policy)(leaf(numbers(3))).sum().backward()
    assert logged == [numbers(3).sin().sum().item()] * 2


@pytest.mark.filterwarnings("ignore:.*[Qq]uantize")
@pytest.mark.parametrize("policy", [None, *KEEPING.values()])
def test_a_quantized_constant(policy: Any) -> None:
    q = torch.quantize_per_tensor(torch.randn(3, 3), 0.1, 0, torch.qint8)
    x = numbers(3, 3)
    for fun in (lambda x: (x.sin() * q.dequantize()).exp(), lambda x: torch.cat([q, q]).dequantize().sum() * x.sin()):
        assert_same(*(grad(lambda x, f=f: f(x).sum())(x) for f in (remat(fun, policy=policy), fun)))


def test_a_graph_that_a_backward_inside_has_freed() -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin() * x
        torch.autograd.grad(y.sum(), x)
        return y * 2

    for ck in (plain, remat, remat(policy=everything_saveable)):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            ck(fun)(leaf(numbers(3))).sum().backward()


def in_inference_mode(x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        total = (x.detach() * 2).sum()
    return torch.tanh(x @ y) + total


@pytest.mark.parametrize("policy", [None, *KEEPING.values()])
@pytest.mark.parametrize("fun", [lambda x, y: times_sine(x @ y, y), in_inference_mode])
def test_a_vmap_inside_of_a_backward_pass(fun: Fun, policy: Any) -> None:
    """Its reruns run under the vmap alone."""

    def gradient(fun: Fun) -> Tensor | None:
        y = leaf(numbers(3, 3))
        vmap(lambda x: fun(x, y))(numbers(2, 3, 3, seed=1)).sum().backward()
        return y.grad

    assert_same(gradient(remat(fun, policy=policy)), gradient(fun))


GRU = nn.GRU(3, 3, dtype=torch.float64)


def with_packed_sequences(x: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x[:, None].expand(3, 2, 3), torch.tensor([3, 2]))
    return nn.utils.rnn.pad_packed_sequence(GRU(packed)[0])[0].sum(1)


def with_a_jagged_tensor(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x @ x, torch.tensor([0, 1, 3])).sin().values()


def with_a_strided_nested_tensor(x: Tensor) -> Tensor:
    y = (x @ x).sin()
    lengths = torch.nested.nested_tensor([y.detach()[0], y.detach()[1, :2]]).to_padded_tensor(0.5)
    return torch.nested.as_nested_tensor([y[0], y[1, :2]]).to_padded_tensor(1.0).exp() * lengths


@pytest.mark.parametrize("policy", [*KEEPING.values(), save_ops("sin")])
@pytest.mark.parametrize("inner_policy", [None, save_ops("sin")])
@pytest.mark.parametrize("fun", [with_packed_sequences, with_a_jagged_tensor, with_a_strided_nested_tensor])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memory_that_an_inner_call_reads_without_an_op(fun: Fun, inner_policy: Any, policy: Any) -> None:
    def gradient(ck: Fun, inner_ck: Fun) -> Tensor | None:
        x = leaf(numbers(3, 3))
        ck(lambda x: inner_ck(fun)(x.cos() * 2).sin())(x).sum().backward()
        return x.grad

    expected = gradient(plain, plain)
    actual = gradient(functools.partial(remat, policy=policy), functools.partial(remat, policy=inner_policy))
    assert_same(actual, expected)


@pytest.mark.parametrize("transform", [".backward()", "grad"])
@pytest.mark.parametrize("outer", [None, *KEEPING.values()])
@pytest.mark.parametrize("inner", [None, *KEEPING.values()])
def test_writes_to_lists_are_counted_once_where_policies_nest(inner: Any, outer: Any, transform: str) -> None:
    """Under a mode, torch does not count what a `_foreach_` op writes."""

    def fun(x: Tensor) -> Tensor:
        scaled = [x.detach() * 2]
        torch._foreach_add_(scaled, 1.0)
        return x.sin() * scaled[0].sin()

    def gradient(inner_ck: Fun, outer_ck: Fun) -> Any:
        twice = inner_ck(lambda x: inner_ck(fun)(x) * 2)
        return TRANSFORMS[transform](outer_ck(twice), numbers(3))

    actual = gradient(functools.partial(remat, policy=inner), functools.partial(remat, policy=outer))
    assert_same(actual, gradient(plain, plain))


class Boxed(Tensor):
    """Holds another tensor. Some of its ops have kernels that are no ops."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: Any, size: Any, stride: Any) -> Tensor:
        return Boxed(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, *others = (a.inner if isinstance(a, Boxed) else a for a in args)
        if func is aten.sin.default:  # reads a result of an op
            return Boxed(torch.from_numpy(np.sin((x * 1).numpy())))
        if func is aten.exp.default:  # adds to a result of an op
            out = torch.zeros_like(x)
            np.add(out.numpy(), np.exp(x.numpy()), out=out.numpy())
            return Boxed(out)
        if func is aten.mul_.Tensor:  # changes its argument
            np.multiply(x.numpy(), others[0].numpy(), out=x.numpy())
            return args[0]
        return Boxed(func(x, *others, **(kwargs or {})))


@pytest.mark.parametrize("policy", [*KEEPING.values(), NOTHING, save_ops("mm")])
@pytest.mark.parametrize("way", ["remat", "checkpoint"])
def test_a_kernel_of_a_tensor_subclass_reads_what_it_read(way: str, policy: Any) -> None:
    def fun(x: Tensor, w: Tensor) -> Tensor:
        y = ((x @ w).cos().sin() @ w).cos()
        y = y * 2
        y.mul_(w)
        return (y.exp() @ w).cos().sin()

    def gradients(fun: Fun) -> list[Tensor]:
        x, w = (Boxed(numbers(3, 3) + i).requires_grad_() for i in range(2))
        return [g.inner for g in torch.autograd.grad(fun(x, w).sum(), (x, w))]

    context_fn = functools.partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True)
    checkpointed = functools.partial(checkpoint, fun, use_reentrant=False, context_fn=context_fn)
    assert_same(gradients(remat(fun, policy=policy) if way == "remat" else checkpointed), gradients(fun))


def test_a_backward_inside_of_a_checkpoint_on_a_tensor_subclass() -> None:
    def fun(x: Tensor) -> Tensor:
        return torch.autograd.grad((x.cos() * x).sum(), x, create_graph=True)[0] * x

    def gradient(fun: Fun) -> Tensor:
        x = Boxed(numbers(3, 3)).requires_grad_()
        return torch.autograd.grad(fun(x).sum(), x)[0].inner

    assert_same(gradient(functools.partial(checkpoint, fun, use_reentrant=False)), gradient(fun))


def jagged_attention(x: Tensor) -> Tensor:
    heads = x.unsqueeze(2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).values()  # strided nested tensors


@pytest.mark.parametrize("policy", [*KEEPING.values(), NOTHING])
@pytest.mark.parametrize("part", [lambda x: x[1], lambda x: x.unbind()[0], lambda x: x.select(0, 1), jagged_attention])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_lengths_of_a_nested_tensor_that_it_reads_in_python(part: Any, policy: Any) -> None:
    w = leaf(numbers(2, 2))

    def gradient(fun: Fun) -> Any:
        x = leaf(numbers(6, 2))
        return torch.autograd.grad(fun(x, torch.tensor([2, 4])).sum(), (x, w))

    def fun(x: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        return part((torch.nested.nested_tensor_from_jagged(x, offsets) @ w).sin()).cos()

    assert_same(gradient(remat(fun, policy=policy)), gradient(fun))


@pytest.mark.parametrize(
    ("policy", "values"),
    [
        (None, 0),
        (NOTHING, 0),
        (save_only_these_names("h"), 1),
        (save_any_names_but_these("h"), 0),
        (dots_saveable, 2),
        (save_ops("mm"), 2),
        (everything_saveable, 4),
    ],
)
def test_values_in_nested_tensors_are_kept(policy: Any, values: int) -> None:
    """A policy is asked about the ops of the tensors inside."""
    rows = SIZE // 2
    offsets, w = torch.tensor([0, rows // 3, rows]), leaf(numbers(2, 2).float())

    def fun(x: Tensor) -> Tensor:
        h = checkpoint_name((x @ w).sin(), "h")
        return (h @ w).cos().sin()

    def run(fun: Fun) -> Any:
        x = torch.nested.nested_tensor_from_jagged(numbers(rows, 2).float(), offsets).requires_grad_()
        with LiveBytes() as meter:
            y = fun(x)
            held = meter.current // UNIT - 1  # without the result
        y.values().sum().backward()
        assert x.grad is not None
        return held, x.grad.values()

    held, gradient = run(remat(fun, policy=policy))
    assert held == values
    assert_same(gradient, run(fun)[1])
