"""The last product of a function is not computed again; where somebody reads it, it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers import KEEPS, TRANSFORMS, CountOps, assert_same, leaf, numbers, plain
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from remat import CheckpointError, is_rerunning, remat
from remat._saved import is_custom, saves_tensors
from remat.debug import LiveBytes

N = 128
Fun = Callable[..., Any]


def products(fun: Fun, *args: Any) -> int:
    with CountOps() as count:
        fun(*args)
    return sum(count[op] for op in ("mm", "addmm", "bmm", "baddbmm"))


def mlp(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return x + torch.tanh(x @ v) @ w


def by_backward(fun: Fun) -> Fun:
    def derivative(*args: Tensor) -> list[Tensor | None]:
        leaves = [leaf(a) for a in args]
        fun(*leaves).square().sum().backward()
        return [t.grad for t in leaves]

    return derivative


def by_grad(fun: Fun) -> Fun:
    return grad(lambda *args: fun(*args).square().sum(), argnums=(0, 1, 2))


def per_sample(fun: Fun) -> Fun:
    return lambda x, *ws: vmap(by_grad(fun), (0, None, None))(torch.stack([x, x.cos()]), *ws)


def hessian_vector(fun: Fun) -> Fun:
    return lambda *args: jvp(by_grad(fun), args, tuple(a.cos() for a in args))


SETTINGS = pytest.mark.parametrize("setting", [by_backward, by_grad, per_sample, hessian_vector])


@pytest.fixture
def args() -> list[Tensor]:
    return [numbers(N, N, seed=i) / 10 for i in range(3)]


@SETTINGS
def test_the_last_product_runs_once(setting: Fun, args: list[Tensor]) -> None:
    fun = remat(mlp)
    again = products(setting(fun), *args) - products(setting(mlp), *args)
    assert again == (3 if setting is hessian_vector else 1)  # x @ v, and its tangent, which is two
    assert_same(setting(fun)(*args), setting(mlp)(*args))


@pytest.mark.parametrize(
    "end",
    [
        lambda y, w: F.linear(y, w) + y,
        lambda y, w: y - F.linear(y, w, w[0]).view(2, -1).reshape(N, N),
        lambda y, w: torch.addmm(w, y, w).mT.unflatten(0, (2, -1)).flatten(0, 1),
        lambda y, w: torch.bmm(y.unsqueeze(0), w.unsqueeze(0)).squeeze(0),
        lambda y, w: torch.add(y.matmul(w), y, alpha=2),
        lambda y, w: y - 0.5 * -(y @ w).div(3) * 2,
        lambda y, w: torch.cat([y, F.dropout(y @ w, 0.5, training=False).clone()], 1).float().to(y.dtype),
        lambda y, w: torch.stack((torch.dropout(y @ w, 0.0, True), y)).sum(0) * w,  # it reads the sum
        lambda y, w: (y @ w) * y,  # it reads both
        lambda y, w: torch.mul(input=y @ w, other=y),
        lambda y, w: torch.sub(input=y @ w, other=y).mul(other=2.0),
    ],
)
@SETTINGS
def test_ends(end: Fun, setting: Fun, args: list[Tensor]) -> None:
    def fun(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return end(torch.tanh(x @ v), w)

    assert_same(setting(remat(fun))(*args), setting(fun)(*args))


@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("setting", [by_backward, by_grad, hessian_vector])
def test_dropout_after_the_last_product(setting: Fun, rate: float, args: list[Tensor]) -> None:
    def fun(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(x @ v) @ w, rate)

    def seeded(fun: Fun) -> Any:
        torch.manual_seed(0)
        return setting(fun)(*args)

    again = products(seeded, remat(fun)) - products(seeded, fun)
    assert again == (3 if setting is hessian_vector else 1)
    assert_same(seeded(remat(fun)), seeded(fun))


MLP = nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Linear(N, N))
CONVOLUTIONS = nn.Conv2d(N, N, 3, padding=1), nn.ConvTranspose2d(N, N, 3, padding=1)
ENCODER = nn.TransformerEncoderLayer(N, 4, N, dropout=0.0, batch_first=True, norm_first=True)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (MLP, (N, N)),
        (lambda x: x + 0.5 * MLP(x), (N, N)),
        (lambda x: x - -MLP(x), (N, N)),
        (lambda x: x + F.dropout(MLP(x), 0.0), (N, N)),
        (lambda x: x + nn.Dropout().eval()(MLP(x)), (N, N)),
        (lambda x: torch.cat([x, MLP(x)], -1), (N, N)),
        (lambda x: (x + MLP(x)).to(torch.float64), (N, N)),
        (lambda x: x + CONVOLUTIONS[0](x.sin()), (2, N, 9, 9)),
        (lambda x: x + CONVOLUTIONS[1](x.sin()), (2, N, 9, 9)),
        (ENCODER, (2, N, N)),
    ],
)
def test_as_many_flops_as_with_torchs_checkpoint(block: Any, shape: tuple[int, ...]) -> None:
    def flops(ck: Fun) -> int:
        with FlopCounterMode(display=False) as counter:
            ck(block)(torch.randn(shape, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    checkpoint: Any = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert flops(remat) == flops(lambda fun: functools.partial(checkpoint, fun))


@torch.jit.script
def normalized(y: Tensor) -> Tensor:
    return y / y.detach().abs().max()


@pytest.mark.parametrize("setting", [by_backward, by_grad])
def test_a_number_that_is_computed_out_of_sight(setting: Fun, args: list[Tensor]) -> None:
    def fun(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ v) @ w
        with torch._C.DisableTorchFunction():
            return y * (2.0 if y.max() > 0 else 3.0)

    assert_same(setting(remat(fun))(*args), setting(fun)(*args))
    scripted = lambda x, v, w: normalized(torch.tanh(x @ v) @ w)  # noqa: E731
    assert_same(by_backward(remat(scripted))(*args), by_backward(scripted)(*args))


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 64, 3), nn.Conv2d(1, 256, 8, 8), nn.ConvTranspose2d(16, 64, 3)])
def test_strides_of_the_last_convolution(layer: Any) -> None:
    layer = layer.double().to(memory_format=torch.channels_last)
    x = leaf(numbers(4, layer.in_channels, 64, 64).to(memory_format=torch.channels_last))

    def fun(x: Tensor) -> Tensor:
        return layer(x).permute(0, 2, 3, 1).view(-1, layer.out_channels)  # a view of channels_last only

    results = [torch.autograd.grad(ck(fun)(x).square().sum(), [x, layer.weight]) for ck in (remat, plain)]
    assert_same(*results)


# Somebody reads the values after all.


def keeps(name: str, x: Tensor, v: Tensor, w: Tensor, kept: list[Any]) -> Tensor:
    """Functions whose last product matters."""
    y = torch.tanh(x @ v) @ w
    if name == "exp":
        return y.exp()
    if name == "branch":
        return y + x if y.sum().item() > 0 else y - x
    if name == "hook":
        y.register_hook(lambda g: g * y.detach())
        return y + x
    if name == "function":
        return Square.apply(y + x)
    if name == "function of views":
        return Square.apply(y.view(-1)).view(N, N) + x
    if name == "appended":
        kept.append(y + x)
        return y + x
    if name == "in place":
        y = y + x
        return y.mul_(x.detach())
    if name == "no_grad":
        with torch.no_grad():
            scale = y + x
        return x * scale + y
    if name == "other result":
        return (x * 2).sin() + (y + x)
    if name == "inner":
        return remat(lambda z: (z + x).sin())(y)
    if name == "transform":
        return vmap(torch.sin)(y)
    assert name == "data"
    return y.data.sin() * x + y


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2 * ctx.saved_tensors[0]


NAMES = ["exp", "branch", "hook", "function", "function of views", "appended", "in place", "no_grad", "other result"]


@KEEPS
@pytest.mark.parametrize("name", [*NAMES, "inner", "transform", "data"])
def test_values_that_are_read(name: str, args: list[Tensor]) -> None:
    lists: list[list[Tensor]] = [[], []]
    actual = by_backward(lambda *args: remat(keeps)(name, *args, kept=lists[0]))(*args)
    expected = by_backward(lambda *args: keeps(name, *args, kept=lists[1]))(*args)
    assert_same(actual, expected)
    assert_same(lists[0][:1], lists[1])


@KEEPS
@pytest.mark.parametrize("name", ["exp", "hook", "no_grad", "other result", "inner", "transform"])
@pytest.mark.parametrize("setting", [by_grad, per_sample])
def test_values_that_are_read_under_transforms(setting: Fun, name: str, args: list[Tensor]) -> None:
    fun = functools.partial(keeps, kept=[])
    if (setting, name) == (per_sample, "hook"):
        return  # torch: vmap and Tensor.register_hook
    actual = setting(lambda *args: remat(fun)(name, *args))(*args)
    assert_same(actual, setting(lambda *args: plain(fun)(name, *args))(*args))


def test_a_rerun_that_reads_what_its_forward_did_not_is_loud(args: list[Tensor]) -> None:
    """Who keeps such a value from a rerun gets NaN."""
    kept: list[Tensor] = []

    @remat
    def fun(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ v) @ w
        if is_rerunning():
            kept.append(y.detach())
        return y + x

    assert_same(by_backward(fun)(*args), by_backward(mlp)(*args))
    assert kept[0].isnan().all()


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, a, b: x + a @ b @ x,
        lambda x, a, b: x + F.linear(x, F.linear(a, b)),
        lambda x, a, b: x + torch.mm(torch.no_grad()(torch.mm)(x, a), x),
        lambda x, a, b: (x.sin(), a @ b)[0],
    ],
)
@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_products_that_are_not_differentiated(fun: Fun, transform: str, args: list[Tensor]) -> None:
    def derivative(ck: Any) -> Any:
        x, a, b = args
        return TRANSFORMS[transform](ck(lambda x: fun(x, a, b)), x)

    assert products(derivative, remat) == products(derivative, plain) + 1
    assert_same(derivative(remat), derivative(plain))


def test_the_last_convolution_runs_once() -> None:
    def fun(x: Tensor, w: Tensor) -> Tensor:
        return x + F.conv2d(x.sin(), w, padding=1)

    def derivative(ck: Any) -> Any:
        leaves = leaf(numbers(2, 4, 256, 256)), leaf(numbers(4, 4, 3, 3, seed=1))
        with CountOps() as count:
            out = ck(fun)(*leaves)
            out.square().sum().backward()
        return out, [t.grad for t in leaves], count["convolution"]

    assert_same(derivative(remat), derivative(plain))


@pytest.mark.parametrize("forward", ["a product", "a call inside"])
def test_a_rerun_that_ends_in_another_call_is_an_error(forward: str, args: list[Tensor]) -> None:
    @remat
    def fun(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ v)
        return x + (remat(torch.mm)(y, w) if is_rerunning() is (forward == "a product") else y @ w)

    with pytest.raises(CheckpointError, match=r"the rerun of .*fun differs .* at call 3 it calls .*mm"):
        by_backward(fun)(*args)


def test_a_rerun_that_goes_by_a_value_that_its_forward_did_not_read_is_an_error(args: list[Tensor]) -> None:
    @remat
    def fun(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x @ v) @ w
        return y - x if is_rerunning() and not y.sum().item() > 0 else y + x

    with pytest.raises(CheckpointError, match=r"the rerun of .*fun .*test_tail.py"):
        by_backward(fun)(*args)


def test_memory_of_the_spared_call_is_freed(args: list[Tensor]) -> None:
    leaves = [leaf(a) for a in args]
    with LiveBytes() as meter:
        out = remat(mlp)(*leaves).sum()
        before = meter.current
        out.backward(retain_graph=True)
        for t in leaves:
            t.grad = None
        assert meter.current <= before


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, v, w: x @ w + x.contiguous(),
        lambda x, v, w: (x @ w).view_as(x) + v.view_as(x @ w),
        lambda x, v, w: (x @ w, v.reshape(N, N), x.view(-1)),
    ],
)
@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_what_is_there_is_not_written_again(fun: Fun, argnum: int, args: list[Tensor]) -> None:
    """Other graphs may have saved it."""

    def loss(*args: Tensor) -> Tensor:
        results = remat(fun)(*args)
        return sum((r.sum() for r in results), torch.zeros(())) if isinstance(results, tuple) else results.sum()

    before = [t._version for t in args]
    grad(loss, argnums=argnum)(*args)
    assert [t._version for t in args] == before


def test_a_number_that_a_product_gives_is_read() -> None:
    n = 2**20

    def fun(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.add(a, b, alpha=F.linear(x, w).squeeze())

    given = [numbers(3), numbers(3, seed=1), numbers(1, n), numbers(1, n, seed=2) / n]

    def derivative(f: Fun) -> Any:
        return grad(lambda a, b: f(a, b, *given[2:]).square().sum(), argnums=(0, 1))(*given[:2])

    assert_same(derivative(remat(fun)), derivative(fun))


@pytest.mark.parametrize("kind", ["a product", "a call inside"])
@pytest.mark.parametrize("of", ["a tensor", "a node"])
@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_a_hook_may_read_what_is_computed_later(transform: str, of: str, kind: str, args: list[Tensor]) -> None:
    x, w, _ = args

    def fun(x: Tensor, ck: Any) -> Tensor:
        later = []
        z = x.sin()
        if of == "a tensor":
            z.register_hook(lambda g: g * later[0].detach())
        else:
            z.grad_fn.register_prehook(lambda grads: (grads[0] * later[0].detach(),))
        later.append(x.cos() @ w if kind == "a product" else ck(torch.tanh)(x))
        return z + later[0]

    actual, expected = (TRANSFORMS[transform](ck(lambda x, ck=ck: fun(x, ck)), x) for ck in (remat, plain))
    assert_same(actual, expected)


@KEEPS
@pytest.mark.parametrize("end", [lambda x, y: x + y, lambda x, y: y, lambda x, y: (x, y), lambda x, y: y.view(-1)])
@pytest.mark.parametrize("keep", [lambda x, y: y, lambda x, y: x + y, lambda x, y: y.view(-1), lambda x, y: y.mT - x])
@pytest.mark.parametrize("kind", ["a product", "a call inside"])
def test_a_value_that_the_function_keeps_is_computed(kind: str, keep: Fun, end: Fun) -> None:
    kept = []
    w = torch.randn(128, 128)

    def fun(x: Tensor) -> Any:
        y = x.tanh() @ w if kind == "a product" else remat(torch.tanh)(x)
        kept.append(keep(x, y))
        return end(x, y)

    out = remat(fun)(torch.randn(128, 128, requires_grad=True))
    (out[1] if isinstance(out, tuple) else out).sum().backward()
    assert_same(kept[0], kept[1])


class SinThenProduct(torch.autograd.Function):
    """A sine, with a product in `jvp`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        x = ctx.saved_tensors[0]
        return (dx * x.cos()) @ torch.eye(N, dtype=x.dtype)


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.mT, x.mT @ g


def inner_gradient(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    h = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((h @ v).square().sum(), h)
    return g @ w


@pytest.mark.parametrize(
    ("fun", "transform"),
    [
        (inner_gradient, ".backward()"),
        (lambda x, v, w: x.sin() + grad(lambda x: (x @ v).sum())(x.detach()) @ w, ".backward()"),
        (lambda x, v, w: Product.apply(w, v) @ w, "grad"),
        (lambda x, v, w: Product.apply(w, v) @ w, "vmap(grad)"),
        (lambda x, v, w: SinThenProduct.apply(w) @ v, "jvp(grad)"),
        (lambda x, v, w: SinThenProduct.apply(w) @ w, "grad(jvp)"),
        (lambda x, v, w: remat(torch.matmul)(SinThenProduct.apply(w), w), "jvp(grad)"),
    ],
)
def test_only_the_last_product_is_skipped(fun: Fun, transform: str, args: list[Tensor]) -> None:
    x, v, w = args
    actual, expected = (TRANSFORMS[transform](ck(lambda w: fun(x, v, w)), w) for ck in (remat, plain))
    assert_same(actual, expected)


@pytest.mark.parametrize("of", [lambda y: y.mean(), lambda y: y.detach().mean()])
def test_a_call_inside_that_hands_on_more_than_its_results(of: Fun) -> None:
    def outer(x: Tensor, ck: Any) -> Tensor:
        found = []

        def inner(x: Tensor) -> Tensor:
            y = x.tanh()
            found.append(of(y))
            return y

        return x + ck(inner)(x) + found[0]

    grads = []
    for ck in (plain, remat):
        x = leaf(numbers(3))
        ck(outer)(x, ck).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(vmap)", "jvp(grad)"])
def test_a_call_of_the_same_name_that_is_not_differentiated(transform: str) -> None:
    z = numbers(3, seed=1)

    def fun(x: Tensor, ck: Any) -> Tensor:
        scale = ck(torch.mul)(x.detach(), z)
        return ck(torch.mul)(x, scale)

    actual, expected = (
        TRANSFORMS[transform](lambda x, ck=ck: ck(lambda x: fun(x, ck))(x), numbers(3)) for ck in (remat, plain)
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)"])
@pytest.mark.parametrize("kind", [lambda x: x > 0, lambda x: x.argmax(-1, keepdim=True), lambda x: x.detach().abs()])
def test_a_call_without_a_derivative_right_before_the_last(kind: Any, transform: str) -> None:
    def fun(x: Tensor, ck: Any) -> Tensor:
        scale = ck(kind)(x)
        return ck(lambda x: x.sin() * scale)(x)

    actual, expected = (
        TRANSFORMS[transform](lambda x, ck=ck: ck(lambda x: fun(x, ck))(x), numbers(3)) for ck in (remat, plain)
    )
    assert_same(actual, expected)


def test_a_function_of_an_extension_in_cpp_may_read_and_save_anything() -> None:
    """Torch gives the nodes of all of them this class, which shows nothing of what they save."""
    kind = type("CppFunction", (), {"name": lambda self: "torch::autograd::CppNode<Kernel>"})
    assert saves_tensors(kind)
    assert is_custom(kind())


def test_a_foreach_op_is_no_function_of_an_extension() -> None:
    (y,) = torch._foreach_mul([leaf(numbers(3))], 2.0)
    assert type(y.grad_fn).__name__ == "CppFunction"
    assert not is_custom(y.grad_fn)


MAPPED: dict[str, Fun] = {
    "an index": lambda w, i: w[i],
    "a lookup": lambda w, i: F.embedding(i, w),
    "a mask": lambda w, i: torch.where(i[:, None] > 1, w[:2], 0.0),
    "a detached value": lambda w, i: w * i.to(w.dtype).sum().detach(),
    "two results": lambda w, i: ((w * i.sum()).sum(0), w.square().sum()),
}


@pytest.mark.parametrize("inner", MAPPED.values(), ids=MAPPED)
def test_a_mapped_argument_without_a_derivative(inner: Fun) -> None:
    """A stand-in for the result of a call inside is mapped where the result is."""

    def loss(w: Tensor, ck: Fun) -> Tensor:
        outer = ck(lambda w, i: ck(inner)(w.tanh(), i))
        out = vmap(lambda i: outer(w, i))(torch.tensor([[0, 2], [1, 4], [2, 2]]))
        return sum(x.sin().sum() for x in (out if isinstance(out, tuple) else (out,)))

    for transform in (".backward()", "grad"):
        w = numbers(5, 3)
        actual, expected = (TRANSFORMS[transform](lambda w, ck=ck: loss(w, ck), w) for ck in (remat, plain))
        assert_same(actual, expected)


@pytest.mark.parametrize(
    ("inner", "skipped"),
    [
        (lambda x: x.tanh().permute(2, 0, 1), True),
        (lambda x: x.tanh().transpose(1, 2), True),
        (lambda x: x.tanh()[:, :1], False),
        (lambda x: x.tanh()[:, :, ::2], False),
        (lambda x: x.tanh()[:, :1].expand(4, 3, 2), False),
    ],
)
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)"])
def test_strides_of_the_result_of_a_call_inside(inner: Fun, skipped: bool, transform: str) -> None:
    strides = []

    def outer(x: Tensor) -> Tensor:
        y = remat(inner)(x.sin())
        strides.append(y.stride())
        return y

    x = numbers(4, 3, 2)
    with CountOps() as count:
        actual = TRANSFORMS[transform](lambda x: x + remat(outer)(x).sum(), x)
    assert_same(actual, TRANSFORMS[transform](lambda x: x + inner(x.sin()).sum(), x))
    assert count["tanh"] == (2 if skipped else 3)
    assert len({*strides}) == 1


def test_a_call_inside_that_gets_one_tensor_twice() -> None:
    """In the forward, the graph can't tell two such operands apart; the rerun gets two tensors."""

    def derivative(w: Tensor, ck: Fun) -> Tensor:
        inner = ck(lambda z, _: z.sin())
        outer = ck(lambda z, w: inner(z, w))
        return grad(lambda z: outer(z, w).sin().sum())(w).sin().sum()

    w = numbers(3)
    actual, expected = (TRANSFORMS[".backward()"](lambda w, ck=ck: derivative(w, ck), w) for ck in (remat, plain))
    assert_same(actual, expected)


@pytest.mark.parametrize("transform", [".backward()", "grad", "hessian", "jvp(grad)"])
def test_a_call_inside_that_also_returns_a_value_without_a_derivative(transform: str) -> None:
    def loss(x: Tensor, ck: Fun) -> Tensor:
        inner = ck(lambda x: (x.sin(), x.detach() * 2))
        outer = ck(lambda x: tuple(y + 1 for y in inner(x.cos())))
        return sum(y.sin().sum() for y in outer(x))

    x = numbers(3)
    actual, expected = (TRANSFORMS[transform](lambda x, ck=ck: loss(x, ck), x) for ck in (remat, plain))
    assert_same(actual, expected)


def test_a_call_inside_of_torchs_checkpoint() -> None:
    """The rerun by torch's checkpoint makes the call. So the one by remat must make it too."""
    torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def loss(x: Tensor, ck: Fun) -> Tensor:
        return ck(lambda x: torchs(ck(lambda x: x.sin().exp()), x.cos()))(x)

    x = numbers(3)
    actual, expected = (TRANSFORMS[".backward()"](lambda x, ck=ck: loss(x, ck), x) for ck in (remat, plain))
    assert_same(actual, expected)


def _by_tensor(z: Tensor) -> None:
    z.register_hook(lambda g: g.clamp(-0.3, 0.3))


def _by_node(z: Tensor) -> None:
    if z.grad_fn is not None:  # in a rerun of the inner function, it is a leaf
        z.grad_fn.register_prehook(lambda grads: tuple(g.clamp(-0.3, 0.3) for g in grads))


@pytest.mark.parametrize("set_hook", [_by_tensor, _by_node])
@pytest.mark.parametrize("of", ["an argument", "a captured tensor"])
@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_a_call_inside_puts_a_hook_on_what_the_outer_function_made(set_hook: Fun, of: str, transform: str) -> None:
    def outer(x: Tensor, ck: Fun) -> Tensor:
        z = x * 2

        def inner(y: Tensor) -> Tensor:
            set_hook(y if of == "an argument" else z)
            return y.sin() * z

        return ck(inner)(z if of == "an argument" else x)

    x = numbers(3)
    actual, expected = (TRANSFORMS[transform](ck(lambda x, ck=ck: outer(x, ck)), x) for ck in (remat, plain))
    assert_same(actual, expected)


@pytest.mark.parametrize("transform", [hessian, lambda f: vmap(grad(f))], ids=["hessian", "vmap(grad)"])
def test_a_call_inside_under_a_vmap_over_nothing(transform: Any) -> None:
    def loss(x: Tensor, ck: Fun) -> Tensor:
        inner = ck(lambda x: x.sin().sum())
        return ck(lambda x: inner(x.exp()))(x)

    x = torch.zeros(0, 3) if transform is not hessian else torch.zeros(0)
    actual, expected = (transform(lambda x, ck=ck: loss(x, ck))(x) for ck in (remat, plain))
    assert_same(actual, expected)
