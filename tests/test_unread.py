"""Arguments whose values no derivative reads: they are not saved, and every read is noticed."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import SIZE, SOME_TRANSFORMS, TRANSFORMS, UNIT, Fun, assert_same, at_an_address_of, leaf, numbers, plain
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

import remat
from remat import CheckpointError
from remat.debug import LiveBytes


def total_and_state(total: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h.sin()
    return total + h, h


# What is held.


def three_blocks(body: Any, ck: Any) -> Fun:
    def fun(x: Tensor) -> Tensor:
        total, h = x.cos(), x
        for _ in range(3):
            total, h = ck(body)(total, h)
        return total.sum() + h.sum()

    return fun


BODIES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "total + h": total_and_state,
    "h + total": lambda total, h: (h.sin() + total, h.sin()),
    "total - h": lambda total, h: (total - h.sin(), h.sin()),
    "torch.add": lambda total, h: (torch.add(total, h.sin(), alpha=2), h.sin()),
    "a moving average": lambda total, h: (0.9 * total + h.sin() / 10, h.sin()),
    "minus": lambda total, h: (h.sin() - -total / 2, h.sin()),
    "+ a number": lambda total, h: (total + 1 + h.sin(), h.sin()),
    "two sums": lambda total, h: (total + h.sin() + h.cos(), h.sin()),
    "by shape": lambda total, h: (total + h.sin().expand(total.shape), h.sin()),
    "a view": lambda total, h: (total.view(2, -1).view(-1) + h.sin(), h.sin()),
    "inside remat": lambda total, h: remat.remat(total_and_state)(total, h.cos()),
    "inside a scan": lambda total, h: remat.scan(lambda c, _: (total_and_state(*c), None), (total, h), length=5)[0],
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_total_is_not_held(body: Any, no_gc: None) -> None:
    x = leaf(torch.randn(SIZE))
    with LiveBytes() as meter:
        result = three_blocks(body, remat.remat)(x)
        assert meter.current <= 3 * UNIT + 4096  # for `cos`, and the states that the last two blocks begin with
    del result


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "grad(grad)"])
def test_a_total_is_not_held_under_transforms(transform: str) -> None:
    """A loop of 100 steps with a total has the peak of one without, but for the total itself."""

    def loop(step: Any, x: Tensor) -> Tensor:
        carry, _ = remat.scan(step, (x.cos(), x), length=100, checkpoints=30)
        return carry[0].sum() + carry[1].sum()

    peaks = []
    for step in (lambda c, _: (total_and_state(*c), None), lambda c, _: ((c[0], c[1].sin()), None)):
        x = torch.randn(1, SIZE)
        fun = {
            "grad": lambda x, step=step: grad(functools.partial(loop, step))(x),
            "vmap(grad)": lambda x, step=step: vmap(grad(functools.partial(loop, step)))(x),
            "grad(grad)": lambda x, step=step: grad(lambda x: grad(functools.partial(loop, step))(x).sin().sum())(x),
        }[transform]
        with LiveBytes() as meter:
            fun(x)
        peaks.append(meter.peak)
    assert peaks[0] <= peaks[1] + 8 * UNIT + 100_000


def test_the_residuals_of_a_loop_with_a_total() -> None:
    x = torch.randn(SIZE)
    held = remat.saved_residuals(
        lambda x: remat.scan(lambda c, _: (total_and_state(*c), None), (x, x.sin()), length=9), x
    )
    assert {r.why for r in held} == {"from the argument x", "output of aten.sin.default"}
    assert all(r.nbytes == UNIT for r in held)


# Every read is noticed.

WEIGHT = nn.Parameter(torch.linspace(0.5, 1.5, 3).double())


class KeepsItsInput(torch.autograd.Function):
    """x + y + y x², and its backward reads x, which it was given."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * x.cos(), g * y.sin()


def unseen(fun: Any) -> Any:
    def called(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():  # as an extension does it
            return fun(*args)

    return called


def through_a_list(total: Tensor, h: Tensor) -> Tensor:
    sums: list[Tensor] = []
    remat.remat(lambda t, h: sums.append(t + h) or h.sin())(total, h)
    return sums[0] * h


READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda total, h: total + total * h,
    "product with a number tensor": lambda total, h: total + total * h.sum(),
    "a number over it": lambda total, h: h + 1 / (2 + total),
    "product of the sum": lambda total, h: (total + h.sin()) * h,
    "sum of two, one read": lambda total, h: (total + h) * h.sin(),
    "detached": lambda total, h: total + h * total.detach(),
    "detached sum": lambda total, h: total + h * (total + h).detach(),
    "compared": lambda total, h: total + torch.where(total > 0.3, h.sin(), h.cos()),
    "a number": lambda total, h: total + h * float(total.detach().sum()),
    "as an index": lambda total, h: total + h.sin()[total.argsort(-1).argsort(-1).clamp(0, h.shape[0] - 1)],
    "a view of it": lambda total, h: total + h * total.view(-1).view(total.shape),
    "in place, of a sum": lambda total, h: (total + h).mul_(h.sin()),
    "written elsewhere": lambda total, h: total + torch.zeros_like(h).copy_(total + h) * h,
    "in a list": lambda total, h: total + torch.stack([total, h]).prod(0),
    "by keyword": lambda total, h: torch.mul(input=h, other=total) + total,
    "alpha": lambda total, h: torch.add(total, total * h, alpha=2),
    "inner remat": lambda total, h: total + remat.remat(lambda t, h: t.sin() * h)(total, h),
    "inner remat of the sum": lambda total, h: remat.remat(lambda t, h: t * h)(total + h.sin(), h),
    "inner remat, in a cell": lambda total, h: total + remat.remat(lambda h: total * h)(h),
    "inner remat returns the sum": lambda total, h: remat.remat(lambda t, h: t + h)(total, h) * h,
    "inner remat returns a view": lambda total, h: remat.remat(lambda t: t.view(-1))(total).view(h.shape) * h,
    "inner checkpoint": lambda total, h: total + remat.checkpoint(torch.mul, total, h, use_reentrant=False),
    "inner grad": lambda total, h: total + grad(lambda t: (t.sin() * h).sum())(total),
    "inner grad of the sum": lambda total, h: total + grad(lambda t: (t.sin() * h).sum())(total + h),
    "inner vmap": lambda total, h: total + vmap(torch.mul)(total, h),
    "inner jvp": lambda total, h: total + torch.func.jvp(torch.sin, (total,), (h,))[1],
    "a scan": lambda total, h: remat.scan(lambda c, _: (c + h * c, c), total, length=3)[0],
    "an autograd.Function": lambda total, h: KeepsItsInput.apply(total, h),
    "a module": lambda total, h: total + nn.functional.linear(total, WEIGHT.expand(h.shape[-1], -1)) * h,
    "contiguous": lambda total, h: total.contiguous() + h * total.contiguous(),
    "strides": lambda total, h: total + h * total.stride(0),
    "a sum that an inner function hands out": through_a_list,
    "unseen": lambda total, h: unseen(lambda t: t.sin() * h)(total),
    "unseen, then seen": lambda total, h: total + h * unseen(torch.sin)(total),
    "unseen, without a derivative": lambda total, h: total + h * unseen(lambda t: t.detach().sin())(total),
}


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
@pytest.mark.parametrize("read", READS)
def test_a_total_that_is_read(read: str, transform: str) -> None:
    body = READS[read]

    def fun(x: Tensor, ck: Any) -> Tensor:
        total, h = x.cos(), x.sin()
        for _ in range(2):
            total = ck(body)(total, h)
        return total

    try:
        expected = TRANSFORMS[transform](functools.partial(fun, ck=plain), numbers(3, 3))
    except Exception:  # torch can't: `float` under vmap
        with pytest.raises(RuntimeError):
            TRANSFORMS[transform](functools.partial(fun, ck=remat.remat), numbers(3, 3))
        return
    assert_same(TRANSFORMS[transform](functools.partial(fun, ck=remat.remat), numbers(3, 3)), expected)


def test_a_sum_that_the_function_keeps(no_gc: None) -> None:
    """What a rerun puts there has the values of the forward."""

    class Logs(nn.Module):
        def forward(self, total: Tensor, h: Tensor) -> Tensor:
            self.last = total + h
            return self.last.view_as(h) + h.sin()

    net, total, h = Logs(), leaf(numbers(3)), leaf(numbers(3, seed=1))
    remat.remat(net)(total, h).sum().backward()
    assert_same(net.last.detach(), (total + h).detach())


@pytest.mark.parametrize("transform", ["grad", "double backward", "hessian", "jvp(grad)"])
def test_the_same_tensor_twice(transform: str) -> None:
    def fun(x: Tensor, ck: Any) -> Tensor:
        return ck(lambda total, h: total + h.sin())(x, x)

    results = [TRANSFORMS[transform](functools.partial(fun, ck=ck), numbers(3)) for ck in (remat.remat, plain)]
    assert_same(*results)


class Doubled(Tensor):
    """A sum with it is a product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a.as_subclass(Tensor) if isinstance(a, cls) else a for a in args]
        return args[0] * args[1] if func is Tensor.add else func(*args, **(kwargs or {}))


class Squares(TorchFunctionMode):
    """Each sum is squared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * out if func is Tensor.add else out


def test_sums_that_are_none() -> None:
    results = []
    for ck in (remat.remat, plain):
        total, h = leaf(numbers(3)), leaf(numbers(3, seed=1))
        with Squares():
            squared = ck(lambda total, h: total.add(h.sin()))(total, h)
        product = ck(lambda total, h: total.add(h))(total, h.as_subclass(Doubled))
        (squared.sum() + product.sum()).backward()
        results.append((total.grad, h.grad))
    assert_same(*results)


def test_a_sparse_total() -> None:
    results = []
    for ck in (remat.remat, plain):
        total, h = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        new = ck(lambda total, h: total + h)(total.to_sparse(), h.to_sparse())
        new.to_dense().sin().sum().backward()
        results.append((total.grad, h.grad))
    assert_same(*results)


def test_a_tensor_at_the_address_of_a_sum_that_has_died(no_gc: None) -> None:
    def body(total: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        died = {id(total + h) for _ in range(3)}
        return total + h.sin() * at_an_address_of(died, lambda: h.cos()).sum(), h.sin()

    with LiveBytes() as meter:
        result = three_blocks(body, remat.remat)(leaf(torch.randn(SIZE)))
        assert meter.current <= 3 * UNIT + 4096
    del result


def test_a_total_may_change_in_place_before_the_backward() -> None:
    """Its value is not needed."""
    total, h = leaf(numbers(3)).clone(), leaf(numbers(3, seed=1))
    new, _ = remat.remat(total_and_state)(total, h)
    total.data.add_(1)
    new.sum().backward()
    assert_same(h.grad, h.detach().cos())


def test_a_function_of_which_labels_tell_nothing() -> None:
    """A rerun that calls an autograd.Function with another argument."""
    runs = itertools.count()

    def fun(a: Tensor, b: Tensor) -> Tensor:
        return KeepsItsInput.apply(b if next(runs) else a, torch.zeros(3))

    a, b = leaf(torch.ones(3)), leaf(torch.ones(3))
    with pytest.raises(CheckpointError, match="does not depend on tensor 1 of the 2 in its arguments"):
        remat.remat(fun)(a, b).sum().backward()
