"""LiveBytes against known answers, in units of one activation."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.func import functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat.debug import LiveBytes

UNIT = 65536  # bytes of one activation: so large that scalars do not matter
SIZE = UNIT // 4


def blocks(x: Tensor) -> Tensor:
    """20 blocks of 10 `sin`, and a sum."""
    for _ in range(200):
        x = torch.sin(x)
    return x.sum()


def activation(*batch: int) -> Tensor:
    return torch.linspace(-1, 1, SIZE).expand(*batch, SIZE).clone()


def backward() -> None:
    blocks(activation().requires_grad_()).backward()


def grad_of_grad(x: Tensor) -> Tensor:
    return grad(lambda x: grad(blocks)(x).sin().sum())(x)


@pytest.mark.parametrize(
    ("run", "units"),
    [
        pytest.param(lambda x, _: grad(blocks)(x), 598, id="grad"),
        pytest.param(lambda _, xs: vmap(grad(blocks))(xs), 1794, id="vmap(grad) of 3"),
        pytest.param(lambda x, _: grad_of_grad(x), 1598, id="grad(grad)"),
        pytest.param(lambda x, _: jvp(grad(blocks), (x.clone(),), (x.clone(),)), 1200, id="jvp(grad)"),
        pytest.param(lambda x, _: backward(), 202, id=".backward()"),
        pytest.param(lambda x, _: blocks(x), 2, id="not differentiated"),
    ],
)
def test_peak_of_known_programs(run, units) -> None:
    x, xs = activation(), activation(3)
    with LiveBytes() as meter:
        result = run(x, xs)
    assert meter.peak / UNIT == pytest.approx(units, abs=0.01)
    assert max(held for _, held in meter.history) == meter.peak
    del result
    assert meter.current == 0


def test_counts_a_storage_once_and_as_long_as_anything_views_it() -> None:
    with LiveBytes() as meter:
        x = torch.ones(100)
        view = x[:10].view(2, 5)
        x += 1
        assert meter.current == 400
        del x
        assert meter.current == 400
        del view
        assert meter.current == 0


def test_counts_what_only_an_autograd_graph_keeps_alive() -> None:
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as meter:
        y = x.sin().sin().sum()  # the graph keeps the inner result
        assert meter.current == 400 + 4
        y.backward()
        assert meter.current == 400 + 4  # now x.grad
        x.grad = None
    del y
    assert meter.current == 0


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        pytest.param(grad, (100,), id="grad"),
        pytest.param(lambda f: vmap(grad(f)), (3, 100), id="vmap(grad)"),
        pytest.param(lambda f: grad(lambda x: grad(f)(x).sum()), (100,), id="grad(grad)"),
        pytest.param(lambda f: functionalize(grad(f)), (100,), id="functionalize(grad)"),
    ],
)
@pytest.mark.parametrize("entered_inside", [False, True])
def test_below_the_wrappers_of_transforms(transform, shape, entered_inside) -> None:
    x, outside = torch.ones(shape), LiveBytes()
    seen = []

    def fun(x: Tensor) -> Tensor:
        with LiveBytes() if entered_inside else outside as meter:
            start = meter.current
            y = x * 2
            seen.append(meter.current - start)
            z = y.sin()
            del y  # the graph of z keeps it
            seen.append(meter.current - start)
            del z
            seen.append(meter.current - start)
            return x.sin().sum()

    with outside:
        transform(fun)(x)
    assert seen == [4 * x.numel(), 8 * x.numel(), 0]
    assert outside.current == 0


def test_what_was_there_before_never_counts() -> None:
    x = torch.ones(100)
    with LiveBytes() as meter:
        x.add_(1)
        view = x[1:]
        del x, view
    assert meter.peak == meter.current == 0


def test_torch_tensor_counts() -> None:
    with LiveBytes() as meter:
        x = torch.tensor([1.0, 2.0])
    assert meter.current == 8
    del x
    assert meter.current == 0


def test_a_resized_storage_counts_as_it_is_now() -> None:
    with LiveBytes() as meter:
        x = torch.ones(100)
        x.resize_(1000)
        assert meter.current == 4000
        x.untyped_storage().resize_(0)
        x.detach()
        assert meter.current == 0
    assert meter.peak == 4000


def test_meters_nest_and_go_on_counting() -> None:
    with LiveBytes() as outer:
        x = torch.ones(100)
        with LiveBytes() as inner:
            y = x * 2
        with inner:
            z = x * 3
    assert (outer.current, inner.current) == (1200, 800)
    del y, z
    assert (outer.current, inner.current) == (400, 0)
    inner.reset_peak()
    assert inner.peak == 0


def test_an_exception_passes_through() -> None:
    meter = LiveBytes()
    with pytest.raises(RuntimeError, match="size"), meter:
        torch.ones(2) + torch.ones(3)
    assert (meter.peak, meter.current) == (20, 0)
    ops = len(meter.history)
    torch.ones(100)
    assert len(meter.history) == ops  # no longer active


def test_meta_sparse_and_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode

    with LiveBytes() as meter:
        x = torch.ones(100, device="meta").sin()
        assert meter.current == 400
        y = torch.eye(3).to_sparse()
        assert (y + y).to_dense().sum() == 6
        with FakeTensorMode():
            z = torch.ones(100).sin()
        assert meter.current == 800
    del x, z
    assert meter.current == 0


def test_symbolic_lengths_do_not_count() -> None:
    """They would record the meter's arithmetic."""
    with LiveBytes():
        traced = make_fx(grad(lambda x: torch.tanh(x).sum()), tracing_mode="symbolic")(torch.ones(2, 3))
    torch.testing.assert_close(traced(torch.ones(4, 3)), 1 - torch.ones(4, 3).tanh() ** 2)


def test_a_meter_does_not_outlive_what_it_counts() -> None:
    x = torch.ones(100)
    meter = LiveBytes()
    with meter:
        y = x * 2
    gone = weakref.ref(meter)
    del meter, y
    assert gone() is None
