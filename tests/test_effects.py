"""What torch functions do besides computing: they write to arguments, and draw."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, leaf, numbers
from torch import Tensor, nn

from remat import CheckpointError, checkpoint, policies, remat
from remat.compat import create_selective_checkpoint_contexts

aten = torch.ops.aten
Fun = Callable[..., Tensor]


@torch.library.custom_op("remat_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


def selective(fun: Fun) -> Fun:
    contexts = functools.partial(create_selective_checkpoint_contexts, policies.save_ops("remat_tests::noise", "sin"))
    return functools.partial(checkpoint, fun, use_reentrant=False, context_fn=contexts)


WAYS: dict[str, Callable[[Fun], Fun]] = {
    "no policy": remat,
    "nothing": functools.partial(remat, policy=policies.nothing_saveable),
    "everything": functools.partial(remat, policy=policies.everything_saveable),
    "some ops": functools.partial(remat, policy=policies.save_ops("remat_tests::noise", "mul", "sin")),
    "non-reentrant": lambda fun: functools.partial(checkpoint, fun, use_reentrant=False),
    "reentrant": lambda fun: functools.partial(checkpoint, fun, use_reentrant=True),
    "selective": selective,
}
EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def adam(x: Tensor, p: Tensor, m: Tensor, v: Tensor, step: Tensor) -> Tensor:
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adam_([p], [x.detach().clone()], [m], [v], [], [step], amsgrad=False, maximize=False, **options)
    return x * m * 10


def scale(x: Tensor, scale: Tensor, count: Tensor) -> Tensor:
    torch._amp_update_scale_(scale, count, torch.zeros(()), 2.0, 0.5, 10)
    return x * scale * count


def observed(x: Tensor, *state: Tensor) -> Tensor:
    options = {"averaging_const": 0.5, "quant_min": 0, "quant_max": 255, "ch_axis": 0}
    return torch._fused_moving_avg_obs_fq_helper(x[None].float(), *state, **options)[0] * x


def updated(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    torch.batch_norm_update_stats(x.detach()[:, None], mean, var, 0.5)
    return x * x * mean


def statistics() -> list[Tensor]:
    return [torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]


def norm(op: Any) -> Fun:
    def fun(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        out = op(x[:, None], None, None, mean, var, True, 0.5, 1e-5)
        return (out[0] if isinstance(out, tuple) else out) * mean

    return fun


def with_cudnn_flag(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch._batch_norm_impl_index(x[:, None], None, None, mean, var, True, 0.5, 1e-5, False)[0] * mean


WRITES: dict[str, tuple[Fun, Callable[[], list[Tensor]]]] = {
    "a fused optimizer": (adam, lambda: [torch.ones(4).double(), *torch.zeros(2, 4).double(), torch.ones(())]),
    "the scale of a GradScaler": (scale, lambda: [torch.tensor(4.0), torch.zeros((), dtype=torch.int32)]),
    "an observer": (
        observed,
        lambda: [torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1).int()],
    ),
    "statistics alone": (updated, statistics),
    "aten.native_batch_norm": (norm(aten.native_batch_norm), statistics),
    "aten.native_batch_norm.default": (norm(aten.native_batch_norm.default), statistics),
    "torch._native_batch_norm_legit": (norm(torch._native_batch_norm_legit), statistics),
    "torch._batch_norm_impl_index": (with_cudnn_flag, statistics),
}


@EACH_WAY
@pytest.mark.parametrize("name", WRITES)
def test_what_they_write_to_is_written_once(name: str, way: Callable[[Fun], Fun]) -> None:
    fun, make = WRITES[name]

    def run(way: Any) -> Any:
        x, state = leaf(numbers(4)), make()
        way(lambda x: fun(x, *state))(x).sum().backward()
        return x.grad, state

    assert_same(run(way), run(lambda fun: fun), rounding=1e-7)


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 2, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


lstm = nn.LSTM(4, 4, 2, dropout=0.5).double().requires_grad_(False)
DRAWS: dict[str, Fun] = {
    "attention": attention,
    "lstm": lambda x: lstm(x[None])[0],
    "gamma": lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).rsample(),
    "native_dropout": lambda x: aten.native_dropout.default(x, 0.5, True)[0],
    "bernoulli": lambda x: aten.bernoulli.p(x.detach(), 0.5) * x,
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), torch.full_like(x, 0.5)).detach() * x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "init": lambda x: nn.init.kaiming_uniform_(torch.empty(1, 4, dtype=x.dtype)) * x,
    "a custom op": lambda x: noise(x.detach()) * x,
}


@EACH_WAY
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_repeated_where_the_state_is_put_back(name: str, way: Callable[[Fun], Fun]) -> None:
    def fun(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return DRAWS[name](x)

    def run(way: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(4))
        y = way(fun)(x)
        torch.rand(3)
        y.sum().backward()
        return x.grad, torch.get_rng_state()

    assert_same(run(way), run(lambda fun: fun))


@EACH_WAY
def test_a_custom_op_that_draws_before_another_draw(way: Callable[[Fun], Fun]) -> None:
    """Where a policy keeps its result, the generator goes on as if it had run."""

    def run(way: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(4))
        way(lambda x: (noise(x.detach()) * x).sin() * F.dropout(x, 0.5))(x).sum().backward()
        return x.grad

    assert_same(run(way), run(lambda fun: fun))


def test_what_draws_nothing_needs_no_generator() -> None:
    """Attention and dropout are among the functions that may draw."""
    seen = []

    def fun(x: Tensor) -> Tensor:
        seen.append(torch.get_rng_state())
        q = x.view(1, 2, 2)
        return F.dropout(F.scaled_dot_product_attention(q, q, q), 0.5, training=False)

    y = remat(fun)(leaf(numbers(4)))
    torch.rand(3)
    y.sum().backward()
    assert not torch.equal(*seen)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_notices_a_change_that_no_mode_sees(use_reentrant: bool) -> None:
    x, z = leaf(numbers(4)), torch.zeros(4, dtype=torch.complex128)

    def fun(x: Tensor) -> Tensor:
        before = z.abs()
        z.real = x.detach()
        return (x * z.abs() + before).sin()

    with pytest.raises(CheckpointError, match=r"fun reads a tensor of shape \[4\], torch.complex128 from outside, and"):
        checkpoint(fun, x, use_reentrant=use_reentrant)
