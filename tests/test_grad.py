"""Functions under a lone `grad`: results, captures, memory and errors are those of the plain function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import KEEPS, assert_same, numbers, plain
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vjp, vmap
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from remat import CheckpointError, RematError, remat
from remat.debug import LiveBytes

Fun = Callable[..., Any]
N = 64
UNIT = N * N * 8


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x


def both(of: Fun, *args: Any) -> tuple[Any, Any]:
    """What remat makes of it, and the plain function."""
    return of(remat)(*args), of(plain)(*args)


def by_grad(fun: Fun, argnums: Any = (0, 1)) -> Fun:
    return lambda ck: grad(lambda *args: ck(fun)(*args).sin().sum(), argnums)


@pytest.fixture
def args() -> tuple[Tensor, Tensor]:
    return numbers(N, N), numbers(N, N, seed=1) / 8


def test_same_as_plain(args: tuple[Tensor, Tensor]) -> None:
    assert_same(*both(by_grad(chain), *args))


def test_where_it_is_not_alone(args: tuple[Tensor, Tensor]) -> None:
    x, w = args
    assert_same(*both(lambda ck: grad(lambda x: grad(lambda x: ck(chain)(x, w).sum())(x).sin().sum()), x))
    assert_same(*both(lambda ck: vmap(by_grad(chain)(ck)), x.expand(2, N, N), w.expand(2, N, N)))
    assert_same(*both(lambda ck: by_grad(lambda x, w: chain(x, w))(ck), x, w.clone().requires_grad_()))
    assert_same(*both(by_grad(chain), x[:2, :2], w[:2, :2]))


@pytest.mark.parametrize("argnum", [0, 1])
def test_memory_and_products(argnum: int, args: tuple[Tensor, Tensor]) -> None:
    def figures(ck: Fun) -> tuple[float, float, float, int]:
        with LiveBytes() as meter, FlopCounterMode(display=False) as flops:
            y, pull = vjp(lambda t: ck(chain)(*args[:argnum], t, *args[argnum + 1 :]), args[argnum])
            held = meter.current
            for _ in range(2):
                pull(y)
            peak, left = meter.peak, meter.current
        return held / UNIT, left / UNIT, peak / UNIT, flops.get_total_flops() // (2 * N**3)

    held, left, peak, products = figures(remat)
    assert held == left == 1  # y
    plain_held, _, plain_peak, plain_products = figures(plain)
    assert plain_held == 6
    assert peak <= plain_peak + 2
    assert products == plain_products + 2 * 6


def test_a_derivative_that_is_differentiated(args: tuple[Tensor, Tensor]) -> None:
    x, w = args

    def later(ck: Fun) -> Fun:
        _, pull = vjp(lambda x: ck(chain)(x, w), x)
        return lambda v: (
            pull(v)[0],
            grad(lambda v: pull(v)[0].sin().sum())(v),
            vmap(pull)(v.expand(2, N, N)),
            torch.autograd.functional.jvp(lambda v: pull(v)[0], v, v.cos()),
        )

    assert_same(*both(later, x))


def test_a_cotangent_that_requires_grad(args: tuple[Tensor, Tensor]) -> None:
    x, w = args

    def outer(ck: Fun) -> Fun:
        def of(v: Tensor) -> Any:
            _, pull = vjp(lambda x: ck(chain)(x, w), x)
            return torch.autograd.grad(pull(v)[0].sin().sum(), v)

        return of

    assert_same(*both(outer, x.clone().requires_grad_()))


def test_autograd_inside(args: tuple[Tensor, Tensor]) -> None:
    def penalty(ck: Fun) -> Fun:
        def of(x: Tensor, w: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(ck(chain)(x, w).sum(), x, create_graph=True)
            return g.square().sum()

        return grad(of, (0, 1))

    assert_same(*both(penalty, *args))


RESULTS: dict[str, Fun] = {
    "an argument": lambda x, w: (x, torch.tanh(x @ w)),
    "an argument twice": lambda x, w: (x, torch.tanh(x @ w), x),
    "a view of a result": lambda x, w: (lambda y: (y, y[0], y.t()))(torch.tanh(x @ w)),
    "a view of an argument": lambda x, w: (x.t(), torch.tanh(x @ w)),
    "a result twice": lambda x, w: (lambda y: (y, y))(torch.tanh(x @ w)),
    "without a path": lambda x, w: (torch.ones_like(x), torch.tanh(x @ w)),
    "none that is differentiated": lambda x, w: (torch.ones_like(x), x.argmax(0)),
    "detached": lambda x, w: (lambda y: (y.detach(), y))(torch.tanh(x @ w)),
    "integers": lambda x, w: {"i": (x @ w).argmax(0), "y": [torch.tanh(x @ w)]},
    "an argument alone": lambda x, w: x,
    "of a part": lambda x, w: torch.tanh(x),
}


def total(tree: Any) -> Tensor:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return sum(
        (t.double().sin().mul(i + 1).sum() for i, t in enumerate(leaves) if isinstance(t, Tensor)), torch.zeros(())
    )


@pytest.mark.parametrize("fun", RESULTS.values(), ids=RESULTS)
def test_results(fun: Fun, args: tuple[Tensor, Tensor]) -> None:
    assert_same(*both(lambda ck: grad(lambda x, w: (total(out := ck(fun)(x, w)), out), (0, 1), has_aux=True), *args))


def puts_into(x: Tensor, w: Tensor, out: Any) -> Tensor:
    y = torch.tanh(x @ w)
    out.append(y)
    return y.sin()


@KEEPS
def test_a_list_that_the_function_changes(args: tuple[Tensor, Tensor]) -> None:
    def of(ck: Fun) -> Fun:
        def scalar(x: Tensor, w: Tensor) -> Any:
            out: list[Tensor] = []
            y = ck(puts_into)(x, w, out)
            captured: list[Tensor] = []
            z = ck(lambda x: puts_into(x, w, captured))(x)
            return total([y, z, out, captured]), torch.tensor(len(out) + len(captured))

        return grad(scalar, (0, 1), has_aux=True)

    assert_same(*both(of, *args))


OUT_OF_SIGHT: dict[str, Fun] = {
    "a generator": lambda y: (t.sin() for t in y.unbind()),
    "map": lambda y: map(torch.sin, y.unbind()),
    "zip": lambda y: zip(y.unbind(), y.unbind(), strict=True),
    "values": lambda y: {"y": y}.values(),
    "a set": lambda y: {y, y.sin()},
    "a key": lambda y: {y: y.sin()},
    "in a key": lambda y: {(1, y): y.sin()},
    "a function": lambda y: lambda z: y * z,
}


def spread(out: Any) -> list[Any]:
    return [*out, *out.values()] if isinstance(out, dict) else list(out)


@KEEPS
@pytest.mark.parametrize("end", OUT_OF_SIGHT.values(), ids=OUT_OF_SIGHT)
def test_results_out_of_sight(end: Fun, args: tuple[Tensor, Tensor]) -> None:
    def fun(x: Tensor, w: Tensor) -> Any:
        return end(torch.tanh(x @ w))

    def scalar(ck: Fun) -> Fun:
        def of(x: Tensor, w: Tensor) -> Tensor:
            out = ck(fun)(x, w)
            return total([out(x)] if callable(out) else sorted(map(total, spread(out)), key=Tensor.item))

        return grad(of, (0, 1))

    assert_same(*both(scalar, *args))


def leaves_early(x: Tensor, w: Tensor) -> Tensor:
    raise ValueError(F.dropout(torch.tanh(x @ w)))


def test_a_tensor_that_an_exception_carries(args: tuple[Tensor, Tensor]) -> None:
    def of(ck: Fun) -> Fun:
        def scalar(x: Tensor, w: Tensor) -> Tensor:
            with pytest.raises(ValueError, match="tensor") as caught:
                ck(leaves_early)(x, w)
            return caught.value.args[0].square().sum()

        def run(x: Tensor, w: Tensor) -> Any:
            torch.manual_seed(0)
            return grad(scalar, (0, 1))(x, w), torch.rand(1)

        return run

    assert_same(*both(of, *args))


def test_an_argument_that_a_flag_changes_is_changed_once(args: tuple[Tensor, Tensor]) -> None:
    flag, (x, w) = 1, args
    before = x.clone()
    w.requires_grad_()
    remat(lambda x, w: F.elu(x, 1.0, flag).clone() @ w)(x, w).sum().backward()  # type: ignore[arg-type]
    assert_same(x, F.elu(before))
    assert_same(w.grad, x.sum(0).unsqueeze(1).expand(N, N))


def test_an_argument_that_a_flag_changes_is_an_error(args: tuple[Tensor, Tensor]) -> None:
    flag = 1
    with pytest.raises(RematError, match="in place"):
        grad(lambda x: remat(lambda x: F.relu(x, flag) @ args[1])(x * 1).sum())(args[0])  # type: ignore[arg-type]


def test_draws_are_those_of_the_plain_function(args: tuple[Tensor, Tensor]) -> None:
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x @ w), 0.5) @ w

    def seeded(ck: Fun) -> Fun:
        def run(*args: Tensor) -> Any:
            torch.manual_seed(0)
            return by_grad(noisy)(ck)(*args), torch.rand(3)

        return run

    assert_same(*both(seeded, *args))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(N, N), nn.LayerNorm(N), nn.Linear(N, N)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.norm(self.first(x))))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, ck: Fun) -> None:
        super().__init__()
        self.inner, self.ck = inner, ck

    def forward(self, x: Tensor) -> Any:
        return self.ck(self.inner)(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_stand_for_others(frozen: bool, args: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    module = Layers()
    if frozen:
        module.first.requires_grad_(False)
    held = {k: v.detach() for k, v in module.named_parameters()}

    def of(ck: Fun) -> Fun:
        outer = Outer(module, ck)
        return grad(lambda p, x: functional_call(outer, {f"inner.{k}": v for k, v in p.items()}, (x,)).sin().sum())

    before = [*module.parameters()]
    assert_same(*both(of, held, args[0]))
    assert all(p is q for p, q in zip(module.parameters(), before, strict=True))


def test_under_no_grad(args: tuple[Tensor, Tensor]) -> None:
    def of(ck: Fun) -> Fun:
        def scalar(x: Tensor, w: Tensor) -> Tensor:
            with torch.no_grad():
                y = ck(chain)(x, w)
            return (y * x).sum()

        return grad(scalar, (0, 1))

    assert_same(*both(of, *args))


def with_a_tangent(ck: Fun, x: Tensor, w: Tensor) -> Any:
    with forward_ad.dual_level():
        out = vjp(lambda w: ck(chain)(forward_ad.make_dual(x, x.cos()), w), w)[0]
        return forward_ad.unpack_dual(out).tangent


def in_inference_mode(ck: Fun, x: Tensor, w: Tensor) -> Any:
    with torch.inference_mode():
        return by_grad(chain)(ck)(x, w)


ELSEWHERE: dict[str, Fun] = {
    "of constants": lambda ck, x, w: grad(lambda v: (ck(chain)(x, w) * v).sum())(w),
    "with a tangent": with_a_tangent,
    "in inference mode": in_inference_mode,
}


@pytest.mark.parametrize("of", ELSEWHERE.values(), ids=ELSEWHERE)
def test_where_it_differentiates_nothing_or_little(of: Fun, args: tuple[Tensor, Tensor]) -> None:
    assert_same(*(of(ck, *args) for ck in (remat, plain)))


def test_under_autocast() -> None:
    x, w = numbers(N, N).float(), numbers(N, N, seed=1).float() / 8
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(*both(by_grad(chain, 0), x, w))


def test_an_error_leaves_all_as_it_was(args: tuple[Tensor, Tensor]) -> None:
    def fails(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ w[:3]

    def of(x: Tensor, w: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            remat(fails)(x, w)
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 1
        assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        return remat(chain)(x, w).sum()

    assert_same(grad(of)(*args), grad(lambda x, w: chain(x, w).sum())(*args))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


def test_an_argument_that_was_changed_in_place_is_an_error(args: tuple[Tensor, Tensor]) -> None:
    x, w = args
    y, pull = vjp(lambda x: remat(chain)(x, w), x)
    w.mul_(2)
    with pytest.raises(CheckpointError, match=r"chain .* modified by an inplace operation"):
        pull(y)


def test_nothing_is_held_afterwards(args: tuple[Tensor, Tensor]) -> None:
    held = []

    def of(x: Tensor, w: Tensor) -> Tensor:
        held.append(weakref.ref(x))
        return remat(chain)(x, w).sum()

    with LiveBytes() as meter:
        grad(of)(*args)
    assert held[0]() is None
    assert meter.current == 0


def test_what_the_function_closes_over(args: tuple[Tensor, Tensor]) -> None:
    def of(ck: Fun) -> Fun:
        return lambda x, w: grad(lambda w: ck(lambda x: chain(x, w))(x).sin().sum())(w)

    assert_same(*both(of, *args))
