"""Calls that need not be watched: their native graph saves nothing, and is left where the derivative is recorded."""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CountOps, Fun, assert_same, in_turn, leaf, numbers, plain
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from remat import CheckpointError, RematError, _pure, _replay, checkpoint_name, policies, remat
from remat.compat import (
    GraphExecGroup,
    _checkpoint,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from remat.debug import LiveBytes

Way = Callable[[Fun], Fun]
WAYS = pytest.mark.parametrize(
    "way", [remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False)], ids=["remat", "checkpoint"]
)


def reentrant(fun: Fun) -> Fun:
    return functools.partial(checkpoint, fun, use_reentrant=True)


WAYS_AND_REENTRANT = pytest.mark.parametrize(
    "way",
    [remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False), reentrant],
    ids=["remat", "checkpoint", "reentrant"],
)

UNIT = 1024 * 8


def steps(x: Tensor) -> Tensor:
    for _ in range(10):
        x = torch.sin(x)
    return x


def tanh(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def chain(block: Fun) -> Fun:
    def fun(x: Tensor) -> Tensor:
        for _ in range(20):
            x = block(x)
        return x.sum()

    return fun


def backward(fun: Fun, x: Tensor) -> None:
    fun(x.clone().requires_grad_()).backward()


def double_backward(fun: Fun, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(fun(x), x, create_graph=True)
    g.sum().backward()


def peak(run: Callable[[], Any], unit: int = UNIT) -> float:
    """In results of one step."""
    with LiveBytes() as meter:
        run()
    assert meter.current <= unit  # a gradient at most
    return meter.peak / unit


def test_known() -> None:
    assert _pure.reads(steps) is not None
    assert _pure.reads(tanh) is not None


@pytest.mark.parametrize(
    ("transform", "bound"),
    [
        (backward, 20 + 10 + 5),
        (double_backward, 80),
        (lambda f, x: grad(f)(x), 20 + 10 + 5),
        (lambda f, x: vmap(grad(f))(x.expand(3, -1)), 3 * (20 + 10 + 5)),
        (lambda f, x: grad(lambda x: grad(f)(x).sum())(x), 80),
    ],
    ids=[".backward()", "double backward", "grad", "vmap(grad)", "grad(grad)"],
)
@pytest.mark.parametrize("size", [1024, 8192])
def test_memory(transform: Any, bound: int, size: int) -> None:
    """20 blocks of 10 steps: the results of the blocks, and those of the steps of one of them."""
    x = numbers(size)
    assert peak(lambda: transform(chain(remat(steps)), x), x.nbytes) <= bound
    assert peak(lambda: transform(chain(steps), x), x.nbytes) > 190


def watched(*args: Any) -> None:
    raise AssertionError("watched")


def test_no_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Tensor, fun: Fun = tanh) -> Tensor:
        return remat(fun)(x, x).sum()

    monkeypatch.setattr(_replay, "Run", watched)
    x = numbers(3, 3)
    with pytest.raises(AssertionError, match="watched"):
        loss(leaf(x), lambda x, y: torch.ops.aten.mul(x, y))
    loss(leaf(x)).backward()
    grad(loss)(x)
    vmap(grad(loss))(x.expand(2, 3, 3))
    grad(lambda x: grad(loss)(x).sum())(x)


def scaled(w: Tensor, x: Tensor, factor: float = 1.0, bias: Tensor | None = None) -> Tensor:
    return torch.addmm(bias, x, w) * factor


W = leaf(numbers(3, 3, seed=1))
PUT_TOGETHER: dict[str, Fun] = {
    "a partial": functools.partial(scaled, W, factor=2.0, bias=W[0]),
    "a partial of one": functools.partial(functools.partial(scaled, W), bias=W[0]),
    "functions in a tuple": in_turn(torch.sin, steps, nn.Tanh()),
    "one that hands on": functools.partial(lambda *args, **kwargs: scaled(*args, **kwargs), W, bias=W[0]),
}


@WAYS
@pytest.mark.parametrize("fun", PUT_TOGETHER.values(), ids=PUT_TOGETHER)
def test_functions_that_are_put_together(way: Way, fun: Fun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "Run", watched)
    monkeypatch.setattr(_checkpoint, "Region", watched)
    x = leaf(numbers(3, 3))
    wrt = [x] if fun is PUT_TOGETHER["functions in a tuple"] else [x, W]
    y = way(fun)(x)
    assert_same(torch.autograd.grad(y.sin().sum(), wrt), torch.autograd.grad(fun(x).sin().sum(), wrt))
    if way is remat:
        assert_same(grad(lambda x: way(fun)(x).sum())(x), grad(lambda x: fun(x).sum())(x))


def test_sequences_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint, "Region", watched)
    x, net = leaf(numbers(3, 3)), [torch.sin, nn.Linear(3, 3).double(), nn.Tanh(), steps]
    y = checkpoint_sequential(net, 2, x, use_reentrant=False)
    assert_same(*(torch.autograd.grad(z.sum(), x) for z in (y, in_turn(*net)(x))))


def relu(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.relu(x, *args, **options).sin()


def relu_as_told(x: Tensor, told: Any, key: Any) -> Tensor:
    return F.relu(x, **told[key]).sin()


FLAGS: dict[str, tuple[Fun, tuple[Any, ...], dict[str, Any]]] = {
    "an argument": (relu, (True,), {}),
    "a keyword": (relu, (), {"inplace": 1}),
    "a keyword in a dict": (relu_as_told, ({"key": {"inplace": 1}}, "key"), {}),
    "a keyword in a list": (relu_as_told, ([{"inplace": 1}], 0), {}),
    "a keyword in a tuple": (relu_as_told, (({"inplace": 1},), 0), {}),
}


@WAYS
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_handed_on(way: Way, flag: str) -> None:
    """It tells to work in place: such a call is watched."""
    fun, args, kwargs = FLAGS[flag]
    x = leaf(numbers(3, 3))
    if way is remat:
        with pytest.raises(RematError, match=r"changes an argument .*test_unwatched"):
            way(fun)(x * 2, *args, **kwargs)
    else:
        assert_same(*(torch.autograd.grad(f(x * 2, *args, **kwargs).sum(), x) for f in (way(fun), fun)))


@WAYS
@pytest.mark.parametrize("options", [{"out": torch.zeros(3).double()}, {"dim": 0}])
def test_keywords_that_are_handed_on(options: dict[str, Any], way: Way) -> None:
    """Those that tell to write to something: such a call is watched."""

    def fun(x: Tensor, options: dict[str, Any]) -> Tensor:
        return F.normalize(x.detach(), **{"dim": 0} | options) * x

    x = leaf(numbers(3))
    assert_same(*(torch.autograd.grad(f(x, options).sum(), x) for f in (way(fun), fun)))


class Steps:
    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return self.count


@WAYS
@pytest.mark.parametrize("around", [lambda o: {"o": o}, lambda o: [o], lambda o: (o,)], ids=["dict", "list", "tuple"])
def test_what_an_argument_holds_has_code_of_its_own(way: Way, around: Fun) -> None:
    """It counts how often it was asked: such a call is watched."""

    def fun(x: Tensor, holder: Any) -> Tensor:
        (key,) = holder if type(holder) is dict else (0,)
        return torch.sin(x * holder[key][0]).exp()

    x = leaf(numbers(3))
    assert_same(*(torch.autograd.grad(f(x, around(Steps())).sum(), x) for f in (way(fun), fun)))


@WAYS
def test_arguments_in_containers_are_not_watched(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "Run", watched)
    monkeypatch.setattr(_checkpoint, "Region", watched)

    def fun(given: Any) -> Tensor:
        return torch.sin(given[0]["x"][0]) * given[1]

    x = leaf(numbers(3))
    assert_same(*(torch.autograd.grad(f([{"x": (x,)}, 2.0]).sum(), x) for f in (way(fun), fun)))


@WAYS
def test_nothing_is_computed_that_nobody_needs(way: Way) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = way(tanh)(x, w)
    with CountOps() as ops:
        y.sum().backward()
    assert (ops["tanh"], ops["mm"]) == (1, 3)
    with CountOps() as ops:
        torch.autograd.grad(way(tanh)(x, w).sum(), x, create_graph=True)
    assert (ops["tanh"], ops["tanh_backward"]) == (2, 1)


def test_where_hooks_are_refused_in_the_backward() -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = remat(tanh)(x, w)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        found = torch.autograd.grad(y.sum(), [x, w])
    assert_same(found, torch.autograd.grad(tanh(x, w).sum(), [x, w]))


def views(x: Tensor) -> Any:
    return x.view(-1), x.sin(), x.T


def with_itself(x: Tensor) -> Any:
    y = x.cos()
    return y, x, y


def group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x, 3).square()


def two_results(x: Tensor) -> Any:
    return x.sin(), x.exp()


def no_leaf_of_mine(x: Tensor) -> Any:
    return [x.detach().sin(), (x * 2).argmax(), {"y": x.sigmoid()}]


@WAYS
@pytest.mark.parametrize("fun", [views, with_itself, group_norm, two_results, no_leaf_of_mine, torch.tanh])
def test_every_order(way: Way, fun: Any) -> None:
    def orders(fun: Any) -> list[Tensor]:
        x = leaf(numbers(4, 3))
        found = []
        loss: Any = sum(
            (t * (1.5 + i)).sum() for i, t in enumerate(torch.utils._pytree.tree_leaves(fun(x))) if t.requires_grad
        )
        for _ in range(3):
            (g,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
            if g is None or not g.requires_grad:
                break
            found.append(g.detach())
            loss = (g.sin() * x).sum()
        return found

    assert_same(orders(way(fun)), orders(fun))


@WAYS
@pytest.mark.parametrize("x_then", [False, True])
@pytest.mark.parametrize("w_then", [False, True])
def test_what_requires_grad_is_what_did(way: Way, x_then: bool, w_then: bool) -> None:
    """`x * w` saves the one of which the other's gradient is taken: not that of which it would be now."""
    x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
    x.requires_grad_(False)
    y = way(lambda x, w: (x * w).sum())(x, w)
    x.requires_grad_(x_then)
    w.requires_grad_(w_then)
    w.requires_grad_()
    (g,) = torch.autograd.grad(y, w)
    assert_same(g, x.detach())


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@WAYS
def test_a_parameter_that_is_frozen_in_between(way: Way) -> None:
    module, x = Frozen(), numbers(2, 3)
    expected = torch.autograd.grad(module(x).sum(), module.b.weight)
    y = way(module)(x).sum()
    module.a.requires_grad_(False)
    assert_same(torch.autograd.grad(y, module.b.weight), expected)


@WAYS_AND_REENTRANT
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("create", [False, True])
def test_what_is_held(way: Way, retain: bool, create: bool) -> None:
    """After the backward pass nothing is, though the result lives, unless the graph is retained."""
    x = leaf(numbers(3, 3)) * 2
    w = leaf(numbers(3, 3, seed=1))
    y = way(tanh)(x, w).sum()
    ref = weakref.ref(x)
    torch.autograd.grad(y, w, retain_graph=retain, create_graph=create)
    del x
    gc.collect()
    if way in (remat, reentrant) or not create:  # of a native graph that is recorded
        assert (ref() is not None) == retain
    assert y.requires_grad


@WAYS_AND_REENTRANT
def test_no_cycles(way: Way) -> None:
    gc.disable()
    try:
        x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        y = way(lambda x: tanh(x, w))(x)
        ref = weakref.ref(y)
        y.sum().backward()
        del y
        assert ref() is None
    finally:
        gc.enable()


@WAYS_AND_REENTRANT
def test_a_cell_that_holds_the_result_later_makes_no_cycle(way: Way) -> None:
    def result() -> Any:
        x = leaf(numbers(3, 3))
        h = x * 2
        h = way(lambda x: torch.sin(h) * x)(x)
        return weakref.ref(h)

    gc.disable()
    try:
        assert result()() is None
    finally:
        gc.enable()


@WAYS
def test_hooks_see_the_operands_alone(way: Way) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = way(tanh)(x, w).sum()
    assert len(seen) == 2
    assert all(any(torch.equal(s, t) for t in (x, w)) for s in seen)
    assert_same(torch.autograd.grad(y, [x, w]), torch.autograd.grad(tanh(x, w).sum(), [x, w]))


@WAYS
def test_an_argument_that_was_changed_in_place_is_an_error(way: Way) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    for create in (False, True):
        y = way(tanh)(x, w).sum()
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by .*DoubleTensor \[3, 3\]\], which tanh was given"):
            torch.autograd.grad(y, x, create_graph=create)


@WAYS
def test_results_may_be_changed_in_place(way: Way) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    got, expected = way(tanh)(x, w), torch.tanh(x @ w).clone()
    for y in (got, expected):
        y.mul_(2).add_(1)
    assert_same(torch.autograd.grad(got.sum(), [x, w]), torch.autograd.grad(expected.sum(), [x, w]))


@WAYS
def test_backward_in_other_surroundings(way: Way) -> None:
    def fun(x: Tensor, w: Tensor) -> Tensor:
        return tanh(x, w).double() * torch.linspace(1, 2, 3).double()

    x, w = (leaf(numbers(3, 3, seed=i).float()) for i in range(2))
    results = way(fun)(x, w), fun(x, w)

    def compare() -> None:
        assert_same(*(torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for y in results))

    with torch.device("meta"):
        compare()
    with torch.autocast("cpu", torch.bfloat16):
        compare()
    torch.set_default_dtype(torch.float64)
    try:
        compare()
    finally:
        torch.set_default_dtype(torch.float32)


@WAYS
def test_batched_backward(way: Way) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = way(tanh)(x, w)
    cotangents = numbers(2, 3, 3, seed=2)
    batched = torch.autograd.grad(tanh(x, w), [x, w], cotangents, is_grads_batched=True)
    assert_same(torch.autograd.grad(y, [x, w], cotangents, retain_graph=True, is_grads_batched=True), batched)
    mapped = vmap(lambda c: torch.autograd.grad(y, [x, w], c, retain_graph=True))(cotangents)
    assert_same(mapped, batched)


@WAYS
def test_groups(way: Way) -> None:
    x = leaf(numbers(3))
    y, z = way(two_results)(x)
    with CountOps() as ops, GraphExecGroup():
        y.sum().backward(retain_graph=True)
        z.sum().backward()
    assert ops["exp"] == (2 if way is remat else 1)
    assert_same(x.grad, x.detach().cos() + x.detach().exp())


def test_a_hook_that_a_module_gets_before_the_backward_of_the_reentrant_variant() -> None:
    module, x = nn.Linear(3, 3).double(), leaf(numbers(3, 3))
    y = checkpoint(module, x, use_reentrant=True)
    module.register_forward_hook(lambda module, args, out: None)
    assert_same(*(torch.autograd.grad(z.sin().sum(), x) for z in (y, module(x))))


def test_complex_results_of_the_reentrant_variant() -> None:
    def fun(x: Tensor) -> Any:
        return torch.sin(x), torch.complex(x, x * 2) * x, x.long()

    def loss(results: Any) -> Tensor:
        sines, products, _ = results
        return products.abs().sum() + sines.sum()

    x = leaf(numbers(3))
    found = checkpoint(fun, x, use_reentrant=True)
    assert [r.requires_grad for r in found] == [True, True, False]
    assert_same(*(torch.autograd.grad(loss(r), x) for r in (found, fun(x))))


@pytest.mark.parametrize("draws", [False, True])
def test_a_rerun_is_given_what_a_selective_context_keeps(draws: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        return torch.sin(x).exp() * (torch.rand(3).double() if draws else 2)

    x = leaf(numbers(3))
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    torch.manual_seed(0)
    y = checkpoint(fun, x, use_reentrant=False, context_fn=contexts)
    torch.manual_seed(0)
    expected = torch.autograd.grad(fun(x).sum(), x)
    with CountOps() as ops:
        assert_same(torch.autograd.grad(y.sum(), x), expected)
    assert (ops["sin"], ops["exp"]) == (0, 1)


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots"])
def test_what_was_computed_from_an_argument_that_was_changed_is_an_error(policy: Any) -> None:
    x = leaf(numbers(3, 3)) * 1
    y = remat(policy=policy)(lambda x: torch.sin(x * 2).exp())(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        y.sum().backward()


@WAYS
def test_a_backward_within_a_backward(way: Way) -> None:
    def run(fun: Fun) -> Any:
        x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        h = x * 2
        y = fun(h, w).sin().sum()
        inner: list[Tensor] = []
        h.register_hook(lambda g: inner.extend(torch.autograd.grad(y, w, retain_graph=True)))  # type: ignore[no-untyped-call]
        return torch.autograd.grad(y, [x, w], retain_graph=True), inner

    assert_same(run(way(tanh)), run(tanh))


@WAYS
def test_a_number_of_saved_tensors_that_is_another_is_an_error(way: Way) -> None:
    table = [1.0]

    def counts(x: Tensor, powers: Any) -> Tensor:
        for p in powers:
            x = torch.sin(x) * p
        return x

    x = leaf(numbers(3))
    y = way(counts)(x, table)
    table.append(2.0)  # a list that was given counts as it was
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(counts(x, [1.0]).sum(), x))


@pytest.mark.parametrize("fill", ["append", "update"])
def test_what_is_put_into_an_argument_has_a_derivative_of_its_own(fill: str) -> None:
    def leaks(x: Tensor, found: Any) -> Tensor:
        y = torch.sin(x)
        if fill == "append":
            found.append(y.exp())
        else:
            found.update({"y": y.exp()})
        return y.cos()

    assert _pure.reads(leaks) is not None
    results = []
    for fun in (remat(leaks), leaks):
        x, found = leaf(numbers(3)), [] if fill == "append" else {"y": 1.0}
        y = fun(x, found)
        other = found[0] if fill == "append" else found["y"]
        (g,) = torch.autograd.grad((y + 2 * other).sum(), x, create_graph=True)
        results.append((g.detach(), *torch.autograd.grad(g.sum(), x)))
    assert_same(*results)


def test_a_function_that_asks_what_requires_grad_is_watched() -> None:
    assert _pure.reads(lambda x, w: x * w if w.requires_grad else x) is None
    assert _pure.reads(lambda x: x * torch.ones(3, requires_grad=True)) is None


@WAYS
@pytest.mark.parametrize("part", ["__defaults__", "__kwdefaults__", "__code__"])
def test_a_function_that_was_made_another_is_an_error(way: Way, part: str) -> None:
    def scales(x: Tensor, factor: float = 2.0, *, other: float = 3.0) -> Tensor:
        return torch.sin(x * factor) * other

    def divides(x: Tensor, factor: float = 2.0, *, other: float = 3.0) -> Tensor:
        return torch.sin(x / factor) * other

    def calls(x: Tensor) -> Tensor:
        return inner(x).cos()

    def draws(x: Tensor) -> Tensor:
        return inner(x) * torch.rand(3)

    inner, x = scales, leaf(numbers(3))
    new = {"__defaults__": (5.0,), "__kwdefaults__": {"other": 7.0}, "__code__": divides.__code__}[part]
    for fun in (scales, calls, draws):
        assert _pure.reads(fun) is not None
        before = getattr(scales, part)
        torch.manual_seed(0)
        y = way(fun)(x).sum()
        torch.manual_seed(0)
        expected = torch.autograd.grad(fun(x).sum(), x)
        setattr(scales, part, new)
        with pytest.raises(CheckpointError, match="was replaced"):
            torch.autograd.grad(y, x, retain_graph=True)
        setattr(scales, part, before)
        assert_same(torch.autograd.grad(y, x), expected)


@WAYS
@pytest.mark.parametrize("create", [False, True])
def test_a_second_pass_over_a_freed_graph_is_torchs_error(way: Way, create: bool) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = way(tanh)(x, w).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x, create_graph=create)


def test_where_hooks_are_refused() -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        y = remat(tanh)(x, w).sum()
    assert_same(torch.autograd.grad(y, [x, w]), torch.autograd.grad(tanh(x, w).sum(), [x, w]))


@WAYS
def test_unpack_outside_of_backward(way: Way) -> None:
    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = way(tanh)(x, w)
    node = y.grad_fn if type(y.grad_fn).__name__ == "TanhBackward0" else y.grad_fn.next_functions[0][0]
    assert_same(node._saved_result.detach(), tanh(x, w).detach())
    y.sum().backward()
    assert x.grad is not None


def test_an_error_in_the_rerun_leaves_all_as_it_was() -> None:
    module, x = Frozen(), leaf(numbers(2, 3))
    y = remat(module)(x)
    module.a = nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match="was replaced"):
        y.sum().backward()
    assert torch.is_grad_enabled()
    assert_same(torch.sin(x).grad_fn._saved_self, x)  # no hooks are left


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(w.T @ x.sin())


@pytest.mark.parametrize("inner", [remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False)])
@pytest.mark.parametrize("outer", [checkpoint, torch.utils.checkpoint.checkpoint])
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_a_region_around_it_sees_the_same_saved_in_its_rerun(
    outer: Any, inner: Way, create: bool, device: bool
) -> None:
    """Whether it is watched must not depend on what is around the region then."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()

    def fun(way: Way, x: Tensor, w: Tensor) -> Tensor:
        y = way(transposed)(x, w)
        z, n = way(lambda w, x: (x @ w, x.argmax()))(w, y)
        return way(layers)(z.cos()) + n

    x, w = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    expected = torch.autograd.grad(fun(lambda f: f, x, w).sum(), [x, w])
    with torch.device("cpu") if device else contextlib.nullcontext():
        y = outer(functools.partial(fun, inner), x, w, use_reentrant=False)
    found = torch.autograd.grad(y.sum(), [x, w], create_graph=create)
    assert_same([g.detach() for g in found], list(expected))


def keeps(x: Tensor) -> Tensor:
    return x


def flattens(x: Tensor) -> Tensor:
    return x.view(-1)


def stops(x: Tensor) -> Tensor:
    return x.softmax(-1).detach()


def twice(x: Tensor) -> Tensor:
    return x.sin() * x.exp()


@WAYS
@pytest.mark.parametrize("fun", [nn.Identity(), nn.Flatten(0), keeps, flattens, stops, twice])
def test_in_a_region_that_runs_again_without_being_watched(way: Way, fun: Any) -> None:
    def outer(fun: Any, x: Tensor) -> Tensor:
        return (fun(x.exp()) * x.sin().cos()).exp().tanh()

    x = leaf(numbers(3))
    y = checkpoint(functools.partial(outer, way(fun)), x, use_reentrant=False)
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(outer(fun, x).sum(), x))


@WAYS
def test_one_tensor_given_twice_in_a_region(way: Way) -> None:
    def two(a: Tensor, b: Tensor) -> Tensor:
        return a.sin() * b.exp()

    def outer(fun: Any, x: Tensor) -> Tensor:
        h = x.cos()
        return fun(h, h).tanh()

    x = leaf(numbers(3))
    y = checkpoint(functools.partial(outer, way(two)), x, use_reentrant=False)
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(outer(two, x).sum(), x))


def test_what_a_transform_has_left_behind() -> None:
    x, w, left = leaf(numbers(3)), leaf(numbers(3, seed=1)), []
    grad(lambda a: (left.append(a * x), a.sum())[1])(numbers(3, seed=2))

    def fun(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin()

    for create in (False, True):
        expected = torch.autograd.grad(fun(left[0], w).sum(), [x, w], retain_graph=True)
        found = torch.autograd.grad(remat(fun)(left[0], w).sum(), [x, w], retain_graph=True, create_graph=create)
        assert_same([g.detach() for g in found], list(expected))


@WAYS
def test_hooks_of_all_modules_are_no_matter_to_a_function_without_modules(way: Way) -> None:
    x = leaf(numbers(3))
    y = way(twice)(x).sum()
    with FlopCounterMode(display=False):
        assert_same(torch.autograd.grad(y, x), torch.autograd.grad(twice(x).sum(), x))


FACTOR = 2.0


@WAYS
def test_threads_that_run_again_what_a_global_has_changed(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def scales(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.sin(x * FACTOR)
        return x

    x = leaf(numbers(3))
    wrong: list[Any] = []

    def work(expected: Tensor, ys: list[Tensor]) -> None:
        wrong.extend(y for y in ys if not torch.equal(torch.autograd.grad(y, x)[0], expected))

    threads = []
    for factor in (2.0, 3.0, 5.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        expected = torch.autograd.grad(scales(x).sum(), x)[0]
        ys = [way(scales)(x).sum() for _ in range(50)]
        threads.append(threading.Thread(target=work, args=(expected, ys)))
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert FACTOR == 7.0


def test_errors_name_the_function() -> None:
    module, x = Frozen(), leaf(numbers(2, 3))
    y = remat(module)(x).sum()
    y.backward(retain_graph=True)
    module.register_forward_hook(lambda *args: None)
    with pytest.raises(CheckpointError, match=r"remat: .*Frozen uses was replaced, or given a hook"):
        y.backward()


@WAYS
def test_a_rerun_under_autocast_leaves_nothing_in_its_cache(way: Way) -> None:
    x, w = leaf(torch.randn(3, 3)), leaf(torch.randn(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        y = way(tanh)(x, w)
        expected = torch.autograd.grad(tanh(x, w).float().sum(), [x, w])
        assert_same(torch.autograd.grad(y.float().sum(), [x, w]), expected)
        cast = weakref.ref(w)
        del x, w, y, expected
        gc.collect()
        assert torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        assert cast() is None


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3).double(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.linear(x))) * torch.rand_like(x)


@WAYS
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_draws(way: Way, create: bool, training: bool) -> None:
    """The same again in the rerun, and the generator goes on as if there had been none."""
    module, x = Drops().train(training), leaf(numbers(4, 3))
    reads = _pure.reads(module)
    assert reads is not None
    assert reads.draws
    found = []
    for fun in (way(module), module):
        torch.manual_seed(3)
        y = fun(x)
        torch.rand(1)
        grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], create_graph=create)
        second = torch.autograd.grad(grads[0].sum(), x)[0] if create else None
        found.append(([g.detach() for g in grads], second, torch.rand(3)))
    assert_same(*found)


def test_draws_are_not_repeated_where_that_was_told() -> None:
    x = leaf(torch.ones(1000))
    y = checkpoint(nn.Dropout(), x, use_reentrant=False, preserve_rng_state=False)
    before = torch.get_rng_state()
    y.sum().backward()
    assert not torch.equal(before, torch.get_rng_state())


def test_large_tensors_stop_early() -> None:
    """Under plain autograd there is no limit to the size: the rerun ends as torch's own does."""
    x, w = leaf(numbers(100, 100)), leaf(numbers(100, 100, seed=1))

    def fun(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint_name(torch.tanh(x @ w), "hidden") @ w

    assert _pure.reads(fun) is not None
    with CountOps() as ops:
        remat(fun)(x, w).sum().backward()
    assert (ops["mm"], ops["tanh"]) == (2 + 1 + 4, 2)
    assert_same((x.grad, w.grad), torch.autograd.grad(fun(x, w).sum(), [x, w]))


# What the rerun saves has the metadata of what the forward saved.


@WAYS
def test_data_of_another_shape(way: Way) -> None:
    a, x = numbers(3, 3), leaf(numbers(3, 3, seed=1))
    y = way(lambda a, x: (a * x).sin())(a, x)
    a.data = torch.ones(1, 3, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"position 0: shape torch.Size\(\[3, 3\]\) in the forward, .*\[1, 3\]"):
        y.sum().backward()


def test_data_of_another_shape_without_the_check() -> None:
    a, x = numbers(3, 3), leaf(numbers(3, 3, seed=1))
    y = checkpoint(lambda a, x: (a * x).sin(), a, x, use_reentrant=False, determinism_check="none")
    a.data = torch.ones(1, 3, dtype=torch.float64)
    y.sum().backward()
    assert x.grad is not None


@WAYS
def test_tensors_that_are_keys(way: Way) -> None:
    def fun(d: dict[Tensor, Tensor]) -> Tensor:
        return sum(torch.sin(k * v) for k, v in d.items())  # type: ignore[return-value]

    key, x = numbers(3), leaf(numbers(3, seed=1))
    expected = torch.autograd.grad(fun({key: x}).sum(), x)
    assert_same(torch.autograd.grad(way(fun)({key: x}).sum(), x), expected)
    y = way(fun)({key: x}).sum()
    with torch.no_grad():
        key.add_(1)
    with pytest.raises(RuntimeError, match=r"in place|inplace"):
        y.backward()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).softmax(-1)


class Block(nn.Module):
    """Two parts that both say `self.norm`, and mean two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(4, dtype=torch.float64)

    def first(self, x: Tensor) -> Tensor:
        return x + self.attention(x)

    def second(self, x: Tensor) -> Tensor:
        return x + self.norm(x).sin()


@WAYS
def test_a_parameter_of_the_same_name_that_an_optimizer_steps_in_the_backward(way: Way) -> None:
    def run(wrap: Any) -> list[Tensor]:
        block = Block()
        for p in block.parameters():

            def step(p: Tensor) -> None:
                with torch.no_grad():
                    p -= p.grad
                p.grad = None

            p.register_post_accumulate_grad_hook(step)
        x = leaf(numbers(3, 4))
        wrap(block.second)(wrap(block.first)(x)).square().sum().backward()
        return [x.grad, *(p.detach() for p in block.parameters())]

    assert_same(run(way), run(plain))


@WAYS
def test_a_parameter_that_is_read_and_was_changed_in_place(way: Way) -> None:
    block = Block()
    y = way(block.second)(leaf(numbers(3, 4)))
    with torch.no_grad():
        block.norm.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


EARLY_OR_LATE = pytest.mark.parametrize(
    "way",
    [*WAYS.args[1], lambda f: functools.partial(checkpoint, f, use_reentrant=False, early_stop=False)],
    ids=["remat", "checkpoint", "no early stop"],
)


def with_a_product(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return tanh(x, w) + a * b


def with_another_result(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    return tanh(x, w) + a * b, x.sin()


@EARLY_OR_LATE
@pytest.mark.parametrize("fun", [with_a_product, with_another_result])
def test_an_optimizer_that_steps_before_the_rerun_meets_the_parameter(way: Way, fun: Any) -> None:
    """The product saves parameters alone, which have their gradients before the first of what is computed again."""

    def run(fun: Any) -> list[Tensor]:
        x, w, a, b = (leaf(numbers(3, 3, seed=i)) for i in range(4))
        y = fun(x, w, a, b)
        for p in (a, b):

            def step(p: Tensor) -> None:
                with torch.no_grad():
                    p -= p.grad

            p.register_post_accumulate_grad_hook(step)
        (y[0] if isinstance(y, tuple) else y).square().sum().backward()
        return [x.grad, w.grad, a.detach(), b.detach()]

    assert_same(run(way(fun)), run(fun))


@EARLY_OR_LATE
def test_what_is_computed_from_a_changed_argument_is_asked_for(way: Way) -> None:
    x, a = leaf(numbers(3)), leaf(numbers(3, seed=1))
    y, z = way(lambda x, a: (x.sin(), (a * 2).cos()))(x, a)
    with torch.no_grad():
        a += 1
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.DoubleTensor \[3\]\]"):
        (y + z).sum().backward()


@WAYS
@pytest.mark.parametrize("fun", [torch.mul, lambda x, w: torch.sin(x * w)], ids=["operands", "more"])
def test_a_tensor_that_the_graph_holds_can_not_be_swapped(way: Way, fun: Any) -> None:
    """As in plain autograd: another one in its place would give another gradient."""
    x, w = numbers(3), leaf(numbers(3, seed=1))
    y = way(lambda x, w: fun(x, w))(x, w).sum()
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(x, torch.ones(3).double())
    y.backward()
    torch.utils.swap_tensors(x, torch.ones(3).double())
    assert_same(x, torch.ones(3).double())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_argument_that_was_detached_in_place_is_an_error_at_higher_orders(requires_grad: bool) -> None:
    x, w = leaf(numbers(3, 3)) * 2, leaf(numbers(3, 3, seed=1))
    y = remat(tanh)(x, w).sum()
    x.detach_().requires_grad_(requires_grad)
    with pytest.raises(CheckpointError, match=r"tanh \(shape \[3, 3\], torch.float64\) was detached in place"):
        torch.autograd.grad(y, w, create_graph=True)


def test_what_only_an_unneeded_result_needs_is_not_computed() -> None:
    x = leaf(numbers(3))
    y = remat(torch.tanh)(x)
    z, _ = remat(lambda x, y: (x.sin(), y.cos()))(x, y)
    with CountOps() as ops:
        z.sum().backward()
    assert ops["tanh"] == 0


def test_functions_that_call_each_other_a_thousand_deep_are_watched() -> None:
    names: dict[str, Any] = {}
    for i in range(1500):
        exec(f"def f{i}(x): return f{i + 1}(x) if x.dim() > 5 else x.sin()", names)
    names["f1500"] = torch.sin
    x = leaf(numbers(3))
    remat(names["f0"])(x).sum().backward()
    assert_same(x.grad, x.detach().cos())


HIDDEN: dict[str, Callable[[Any], Tensor]] = {
    "in a set": lambda held: next(iter(held)),
    "under a number": lambda held: held[1],
    "in a function": lambda held: held(),
}


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots_saveable"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_what_a_list_among_the_arguments_is_given_in_disguise(kind: str, policy: Any, create_graph: bool) -> None:
    def run(way: Way) -> Any:
        def fun(x: Tensor, out: list[Any]) -> Tensor:
            y = x.sin()
            z = y.exp()
            held = {z} if kind == "in a set" else {1: z} if kind == "under a number" else lambda: z
            out.append(held)
            return y.cos()

        x, out = leaf(numbers(4)), list[Any]()
        y = way(fun)(x, out)
        return torch.autograd.grad(y.sum() + HIDDEN[kind](out[0]).sum(), x, create_graph=create_graph)

    assert_same(run(remat(policy=policy)), run(plain))


class TestAttributesOfTensors:
    """Somebody has given a tensor an attribute whose name means something elsewhere."""

    def test_of_an_argument(self) -> None:
        x = leaf(numbers(4))
        x.eps = 3.0  # type: ignore[attr-defined]
        y = remat(lambda x: (x * x.eps).sin())(x).sum()
        with pytest.raises(AttributeError, match="eps"):
            y.backward()

    def test_that_requires_grad(self) -> None:
        x, e, c = leaf(numbers(4)), leaf(numbers(4, seed=1)), torch.ones(4)
        c.eps = e  # type: ignore[attr-defined]

        def fun(x: Tensor, c: Tensor) -> Tensor:
            return (x * c.eps).sin()  # type: ignore[attr-defined,no-any-return]

        actual = torch.autograd.grad(remat(fun)(x, c).sum(), (x, e), create_graph=True)
        assert_same(actual, torch.autograd.grad(fun(x, c).sum(), (x, e), create_graph=True))

    def test_of_a_parameter_that_gets_it_after_the_first_call(self) -> None:
        layer, x = nn.Linear(3, 3).double(), leaf(numbers(3))

        @remat
        def fun(x: Tensor, later: bool) -> Tensor:
            return (x * layer.weight.eps if later else x @ layer.weight).sin()  # type: ignore[no-any-return]

        fun(x, False)
        layer.weight.eps = leaf(numbers(3, seed=1))  # type: ignore[assignment]
        wrt = (x, layer.weight.eps)
        actual = torch.autograd.grad(fun(x, True).sum(), wrt, create_graph=True)
        assert_same(actual, torch.autograd.grad(fun.__wrapped__(x, True).sum(), wrt, create_graph=True))


@WAYS_AND_REENTRANT
def test_backward_in_inference_mode(way: Way) -> None:
    def run(way: Way) -> Tensor | None:
        x = leaf(numbers(4))
        y = way(lambda x: x.sin().cos())(x).sum()
        with torch.inference_mode():
            y.backward()
        return x.grad

    assert_same(run(way), run(plain))
