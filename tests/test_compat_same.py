"""What torch.utils.checkpoint does, and remat.compat too: each test runs against both."""

import contextlib
import copy
import functools
import itertools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import grad as grad_of

import remat.compat
from tests.helpers import Adjoint, CountOps, ReadsTwice, Reversible, Seen, assert_same, leaf, numbers, with_constants

MODULES = {"torch": torch.utils.checkpoint, "remat": remat.compat}


def each_from(*version: int) -> Any:
    """A test of both modules; of ours alone before this version of torch, which does otherwise."""
    modules = MODULES if torch.__version__ >= version else {"remat": remat.compat}
    return pytest.mark.parametrize("api", modules.values(), ids=modules)


@pytest.fixture(params=MODULES)
def api(request: pytest.FixtureRequest) -> Any:
    return MODULES[request.param]


def debugs(test: Any) -> Any:
    """A test of torch's debug mode, which logs what pytest's handlers can't format."""

    @functools.wraps(test)
    def without_handlers(*args: Any, **kwargs: Any) -> None:
        logger = logging.getLogger("LoggingTensor")
        handlers, logging.root.handlers = logging.root.handlers, []
        try:
            test(*args, **kwargs)
        finally:
            logging.root.handlers = handlers
            logger.propagate, logger.filters = True, []  # which it leaves changed

    return without_handlers


both_variants = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Calls:
    """Counts the calls of a function."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self.fun, self._seen = fun, Seen()

    @property
    def count(self) -> int:
        return len(self._seen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._seen.append(0)
        return self.fun(*args, **kwargs)


def plain(fun: Any, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    return fun(*args, **kwargs)


def compare(api: Any, run: Callable[[Any], Any]) -> Any:
    """`run(checkpoint)` is the same with `checkpoint` as with a plain call."""
    actual = run(functools.partial(api.checkpoint, use_reentrant=False))
    assert_same(actual, run(plain))
    return actual


# Both variants.


CALLED_IN_THE_BACKWARD: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "parameters read inside": lambda net: lambda x: Adjoint.apply(net, x, *net.parameters()),
    "parameters in a cell": lambda net: (lambda ps: lambda x: Adjoint.apply(net, x, *ps))(tuple(net.parameters())),
    "parameters in a list": lambda net: (lambda ps: lambda x: Adjoint.apply(net, x, *ps))([*net.parameters()]),
    "accumulates": lambda net: lambda x: Reversible.apply(net, x.sin()),
}


@both_variants
@pytest.mark.parametrize("make", CALLED_IN_THE_BACKWARD)
def test_a_backward_that_differentiates_a_module(api: Any, use_reentrant: bool, make: str) -> None:
    results = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=use_reentrant), plain):
        net, x = with_constants(nn.Linear(3, 3).double()), leaf(numbers(2, 3))
        fun = CALLED_IN_THE_BACKWARD[make](net)
        checkpoint(lambda x, fun=fun: fun(x).sin(), x).square().sum().backward()
        results.append([p.grad for p in (x, *net.parameters())])
    assert_same(*results)


@both_variants
def test_a_function_runs_once_in_the_forward_and_once_in_the_backward(api: Any, use_reentrant: bool) -> None:
    x, fun = leaf(numbers(3)), Calls(lambda x, k: (x.sin() * k).cos())
    y = api.checkpoint(fun, x, 2.0, use_reentrant=use_reentrant)
    assert fun.count == 1
    y.sum().backward()
    assert fun.count == 2
    z = leaf(x)
    (z.sin() * 2.0).cos().sum().backward()
    assert_same(x.grad, z.grad)


@both_variants
def test_modules_and_parameters(api: Any, use_reentrant: bool) -> None:
    results = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=use_reentrant), plain):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        x = leaf(numbers(2, 3))
        checkpoint(net, checkpoint(net, x)).square().sum().backward()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    assert_same(*results)


@both_variants
@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_random_draws(api: Any, use_reentrant: bool, preserve_rng_state: bool) -> None:
    masks = Seen()

    def fun(x: Tensor) -> Tensor:
        masks.append(torch.rand(100))
        return F.dropout(x).sin()

    torch.manual_seed(0)
    x = leaf(numbers(100))
    y = api.checkpoint(fun, x, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    after_forward = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(masks[0], masks[1]) == preserve_rng_state
    if preserve_rng_state:
        assert torch.equal(after_forward, torch.get_rng_state())
        assert torch.equal(x.grad == 0, y == 0)


@both_variants
@pytest.mark.parametrize("forward", [True, False])
def test_autocast(api: Any, use_reentrant: bool, forward: bool) -> None:
    seen = Seen()

    def fun(x: Tensor) -> Tensor:
        y = x @ x
        enabled = torch.is_autocast_enabled("cpu")
        seen.append((y.dtype, enabled, enabled and torch.is_autocast_cache_enabled()))
        return y.sin()

    x = leaf(numbers(3, 3).float())
    with torch.autocast("cpu", torch.bfloat16, enabled=forward, cache_enabled=False):
        y = api.checkpoint(fun, x, use_reentrant=use_reentrant).sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=not forward):
        y.backward()
    assert seen == [(torch.bfloat16 if forward else torch.float32, forward, False)] * 2


@both_variants
def test_several_results_and_results_that_are_no_tensors(api: Any, use_reentrant: bool) -> None:
    x = leaf(numbers(3))
    a, n, b, i = api.checkpoint(lambda x: (x.sin(), 7, x.cos(), x.argmax()), x, use_reentrant=use_reentrant)
    assert n == 7
    assert int(i) == int(x.argmax())
    (a.sum() + b.square().sum()).backward()
    z = leaf(x)
    (z.sin().sum() + z.cos().square().sum()).backward()
    assert_same(x.grad, z.grad)


@both_variants
def test_captured_tensors_of_inference_mode(api: Any, use_reentrant: bool) -> None:
    module = nn.Module()
    with torch.inference_mode():
        table, other = numbers(3), numbers(3, seed=1)
        module.register_buffer("table", numbers(3, seed=2))

    def fun(x: Tensor, t: Tensor = other) -> Tensor:
        return x.sin() + table + t + module.table

    x, z = leaf(numbers(3)), leaf(numbers(3))
    checkpoint = functools.partial(api.checkpoint, use_reentrant=use_reentrant)
    checkpoint(lambda x: checkpoint(fun, x).cos() + table, x).sum().backward()
    (fun(z).cos() + table).sum().backward()
    assert_same(x.grad, z.grad)


@both_variants
def test_only_some_results_are_used(api: Any, use_reentrant: bool) -> None:
    x = leaf(numbers(3))
    a, _ = api.checkpoint(lambda x: (x.sin(), x.exp()), x, use_reentrant=use_reentrant)
    a.sum().backward()
    assert_same(x.grad, x.detach().cos())


@both_variants
def test_retain_graph(api: Any, use_reentrant: bool) -> None:
    x, fun = leaf(numbers(3)), Calls(lambda x: x.sin().exp())
    y = api.checkpoint(fun, x, use_reentrant=use_reentrant).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert_same(x.grad, 2 * first)
    assert fun.count == 3
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@both_variants
def test_without_grad_it_just_runs(api: Any, use_reentrant: bool) -> None:
    x, fun = leaf(numbers(3)), Calls(torch.sin)
    with torch.no_grad():
        y = api.checkpoint(fun, x, use_reentrant=use_reentrant)
    assert not y.requires_grad
    assert fun.count == 1


@both_variants
def test_an_exception_passes_through(api: Any, use_reentrant: bool) -> None:
    class OwnError(Exception):
        pass

    def fun(x: Tensor) -> Tensor:
        x.sin()
        raise OwnError

    for _ in range(2):
        with pytest.raises(OwnError):
            api.checkpoint(fun, leaf(numbers(3)), use_reentrant=use_reentrant)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch._C._len_torch_function_stack()


@both_variants
def test_an_exception_of_the_rerun_passes_through(api: Any, use_reentrant: bool) -> None:
    class OwnError(Exception):
        pass

    x, state = leaf(numbers(3)), torch.get_rng_state()

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        if calls.count == 2:
            raise OwnError
        return y.cos()

    calls = Calls(fun)
    y = api.checkpoint(calls, x, use_reentrant=use_reentrant).sum()
    with pytest.raises(OwnError):
        y.backward(retain_graph=True)
    assert not torch._C._len_torch_function_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(state, torch.get_rng_state())
    y.backward()
    assert_same(x.grad, -x.detach().sin().sin() * x.detach().cos())


@both_variants
def test_views_and_in_place_changes_inside(api: Any, use_reentrant: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        y[0] = 1.0
        y = y.view(3, 1).relu_()
        y = y + 1
        y *= 2
        return y.t() * x

    x, z = leaf(numbers(3)), leaf(numbers(3))
    api.checkpoint(fun, x, use_reentrant=use_reentrant).exp().sum().backward()
    fun(z).exp().sum().backward()
    assert_same(x.grad, z.grad)


@both_variants
def test_custom_autograd_functions(api: Any, use_reentrant: bool) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x**3 * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return 3 * x**2 * w * g, (x**3 * g).sum()

    def run(checkpoint: Any) -> Any:
        w, x = leaf(numbers(1)[0]), leaf(numbers(3))
        checkpoint(lambda x: Cube.apply(Cube.apply(x.sin(), w), w).cos(), x).sum().backward()
        return x.grad, w.grad

    assert_same(run(functools.partial(api.checkpoint, use_reentrant=use_reentrant)), run(plain))


# The reentrant variant.


def test_reentrant_records_no_graph(api: Any) -> None:
    seen = Seen()

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        seen.append((torch.is_grad_enabled(), y.requires_grad))
        return y

    x = leaf(numbers(3))
    y = api.checkpoint(fun, x, use_reentrant=True)
    assert "CheckpointFunction" in y.grad_fn.name()
    y.sum().backward()
    assert seen == [(False, False), (True, True)]


def test_reentrant_needs_an_input_that_requires_grad(api: Any) -> None:
    w = leaf(numbers(3))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True. Gradients will be None"):
        y = api.checkpoint(lambda x: x * w, numbers(3), use_reentrant=True)
    assert not y.requires_grad


def test_reentrant_has_positional_arguments_only(api: Any) -> None:
    x = leaf(numbers(3))
    with pytest.raises(ValueError, match="Unexpected keyword arguments: k"):
        api.checkpoint(lambda x, k: x * k, x, k=2, use_reentrant=True)
    message = "Passing `context_fn`.*`debug`.* is only supported when use_reentrant=False"
    with pytest.raises(ValueError, match=message):
        api.checkpoint(torch.sin, x, use_reentrant=True, debug=True)
    with pytest.raises(ValueError, match=message):
        api.checkpoint(torch.sin, x, use_reentrant=True, context_fn=lambda: api.noop_context_fn())


def test_reentrant_without_gradients(api: Any) -> None:
    x = leaf(numbers(3))
    y = api.checkpoint(lambda x: x.detach().sin(), x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        y.sum().backward()


def test_reentrant_does_not_touch_what_is_no_tensor(api: Any) -> None:
    x = leaf(numbers(3))
    out = api.checkpoint(lambda x: {"y": x.sin()}, x, use_reentrant=True)
    assert not out["y"].requires_grad


def test_reentrant_takes_tensors_in_containers(api: Any) -> None:
    x, w = leaf(numbers(3)), leaf(numbers(3))
    api.checkpoint(lambda x, ws: x * ws["w"], x, {"w": w}, use_reentrant=True).sum().backward()
    assert_same((x.grad, w.grad), (w.detach(), x.detach()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # in the forward of the outer one
def test_reentrant_nests(api: Any) -> None:
    w, x = leaf(numbers(3, 3)), leaf(numbers(3))

    def inner(x: Tensor) -> Tensor:
        return (w @ x).sin()

    def outer(x: Tensor) -> Tensor:
        return api.checkpoint(inner, api.checkpoint(inner, x, use_reentrant=True), use_reentrant=True)

    api.checkpoint(outer, x, use_reentrant=True).sum().backward()
    actual, w.grad, z = (x.grad, w.grad), None, leaf(numbers(3))
    inner(inner(z)).sum().backward()
    assert_same(actual, (z.grad, w.grad))


def test_checkpoint_function_can_be_applied(api: Any) -> None:
    x = leaf(numbers(3))
    api.CheckpointFunction.apply(torch.sin, True, x).sum().backward()
    assert_same(x.grad, x.detach().cos())
    assert issubclass(api.CheckpointFunction, torch.autograd.Function)


# The non-reentrant variant.


class Pair(NamedTuple):
    a: Tensor
    b: Any


def test_nested_structures_in_and_out(api: Any) -> None:
    def fun(x: Any, *rest: Any, scale: Any, flag: bool = False) -> Any:
        y = x.a * x.b["b"][0] * rest[0] * scale["s"]
        return {"y": (y.sin(), [y.cos(), flag]), "n": 3, "p": Pair(y.exp(), None)}

    def run(checkpoint: Any) -> Any:
        ts = [leaf(numbers(3, seed=i)) for i in range(4)]
        pair = Pair(ts[0], {"b": [ts[1], None]})
        out = checkpoint(fun, pair, ts[2], scale={"s": ts[3]}, flag=True)
        assert out["y"][1][1] is True
        loss = out["y"][0].sum() + out["y"][1][0].square().sum() + out["p"].a.sum()
        return grad_of(loss, ts)

    compare(api, run)


def test_closures(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        x, w, h = leaf(numbers(3)), leaf(numbers(3, seed=1)), leaf(numbers(3, seed=2))
        g = h.sin()
        return grad_of(checkpoint(lambda x: (x * w).sin() * g, x).sum(), [x, w, h])

    compare(api, run)


def test_inputs_need_not_require_grad(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        w = leaf(numbers(3))
        return grad_of(checkpoint(lambda x: (x * w).sin(), numbers(3)).sum(), w)

    compare(api, run)


def test_detached_parts(api: Any) -> None:
    def fun(x: Tensor) -> Any:
        y = x.sin()
        with torch.no_grad():
            n = y.norm()
        return y / n + y.detach().exp() * x, y.detach()

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        y, d = checkpoint(fun, x)
        assert not d.requires_grad
        return grad_of(y.sum(), x)

    compare(api, run)


def test_the_graph_is_recorded(api: Any) -> None:
    x = leaf(numbers(3))
    y = api.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)
    assert y.grad_fn.name() == "CosBackward0"
    assert y.grad_fn.next_functions[0][0].name() == "SinBackward0"


@pytest.mark.parametrize("early_stop", [True, False])
def test_backward_inside_of_the_function(api: Any, early_stop: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.cos()
        (g,) = grad_of(z.sum(), x, retain_graph=True)
        return x.cos() * g * z

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        checkpoint(fun, x, **({} if checkpoint is plain else {"early_stop": early_stop})).sum().backward()
        return x.grad

    compare(api, run)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("retain", [True, False])
def test_backward_inside_of_the_function_with_a_graph(api: Any, early_stop: bool, retain: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        (g,) = grad_of(y.exp().sum(), x, create_graph=True) if retain else grad_of(y.exp().sum(), x)
        return x.cos() * g

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        checkpoint(fun, x, **({} if checkpoint is plain else {"early_stop": early_stop})).sum().backward()
        return x.grad

    compare(api, run)


def test_backward_through_nested_calls_inside_of_the_function(api: Any) -> None:
    """The nested calls capture what the outer function has computed."""

    def run(checkpoint: Any) -> Any:
        def fun(w: Tensor, x: Tensor) -> Tensor:
            q, b = w.tanh(), x.cos()
            y = checkpoint(lambda b: b.sin() * q, b)
            z = checkpoint(lambda b: b.cos() * q * y, b)
            (g,) = grad_of(z.sum(), b, retain_graph=True)
            return y * g

        w, x = leaf(numbers(3)), leaf(numbers(3, seed=1))
        return grad_of(checkpoint(fun, w, x).sum(), [w, x])

    compare(api, run)


def test_a_reentrant_call_inside_captures_what_the_outer_function_computed(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        def fun(w: Tensor, x: Tensor) -> Tensor:
            q = w.tanh()
            inner = {} if checkpoint is plain else {"use_reentrant": True}
            return checkpoint(lambda a: a.sin() * q, x.cos(), **inner)

        w, x = leaf(numbers(3)), leaf(numbers(3, seed=1))
        checkpoint(fun, w, x).sum().backward()
        return w.grad, x.grad

    compare(api, run)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_nesting(api: Any, depth: int) -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin().exp()

    def nest(checkpoint: Any, depth: int) -> Any:
        if depth == 0:
            return block
        inner = nest(checkpoint, depth - 1)
        return lambda x, w: checkpoint(inner, checkpoint(inner, x, w).cos() + w, w)

    def run(checkpoint: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        return grad_of(nest(checkpoint, depth)(x, w).sum(), [x, w])

    compare(api, run)


def test_double_backward(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        (g,) = grad_of(checkpoint(lambda x: (x * w).sin().exp(), x).sum(), x, create_graph=True)
        (h,) = grad_of(g.cos().sum(), x, create_graph=True)
        return g, h, grad_of(h.sum(), [x, w])

    compare(api, run)


def test_partial_backward_passes(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        y, z = checkpoint(lambda x: (x.sin().exp(), x.cos().exp()), x)
        return grad_of(y.sum(), x), grad_of(z.sum(), x)

    compare(api, run)


@pytest.mark.parametrize("where", ["argument", "context"])
@pytest.mark.parametrize("early", [True, False])
def test_early_stop(api: Any, where: str, early: bool) -> None:
    """The last op, whose result is not saved, runs again only without early stop."""
    x, fun = leaf(numbers(64, 64)), lambda x: x.sin().cos() + 1
    if where == "argument":
        y = api.checkpoint(fun, x, use_reentrant=False, early_stop=early)
    else:
        with api.set_checkpoint_early_stop(early):
            y = api.checkpoint(fun, x, use_reentrant=False, early_stop=not early)
    with CountOps() as ops:
        y.sum().backward()
    assert ops["add"] == (not early)


class EndsWell:
    """A context that allows an end, or an `Exception`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            raise TypeError(f"ended by {kind}")


def test_early_stop_in_a_context_that_knows_only_exceptions(api: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        with EndsWell():
            return x.sin().cos() + 1

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        return grad_of(checkpoint(fun, x).sum(), x)

    compare(api, run)


def test_early_stop_spares_the_last_matmul(api: Any) -> None:
    x, w = leaf(numbers(64, 64)), leaf(numbers(64, 64, seed=1))
    y = api.checkpoint(lambda x: torch.relu(x @ w) @ w + 1, x, use_reentrant=False)
    with CountOps() as ops:
        y.sum().backward()
    assert ops["mm"] == 1 + 4
    assert ops["add"] == 1  # of the two gradients of w


def test_early_stop_spares_the_end_of_nested_regions(api: Any) -> None:
    x, w = leaf(numbers(64, 64)), leaf(numbers(64, 64, seed=1))

    def inner(x: Tensor) -> Tensor:
        return torch.relu(x @ w).sin() @ w

    def outer(x: Tensor) -> Tensor:
        x = api.checkpoint(inner, x, use_reentrant=False)
        return api.checkpoint(inner, x, use_reentrant=False)

    y = api.checkpoint(outer, x, use_reentrant=False).sum()
    with CountOps() as ops:
        y.backward()
    assert ops["relu"] == 1 + 2  # the outer reruns the first inner one, and each inner one itself
    assert ops["mm"] == 2 + 2 + 2 * 4


def test_unpack_outside_of_backward(api: Any) -> None:
    x = leaf(numbers(3))
    y = api.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)
    assert_same(y.grad_fn._saved_result.detach(), x.detach().sin().exp())
    y.sum().backward()
    assert_same(x.grad, x.detach().sin().exp() * x.detach().cos())


@each_from(2, 12)
def test_saved_tensors_hooks_of_the_user(api: Any) -> None:
    """Hooks around a region see what it is given; hooks inside of it come before its own."""
    packed: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t.detach().clone()

    x = leaf(numbers(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = api.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)
    assert packed == [(3,)]
    y.sum().backward()
    assert_same(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_in_place_change_of_a_positional_argument(api: Any) -> None:
    x, k = leaf(numbers(3)), numbers(3)
    y = api.checkpoint(lambda x, k: (x * k).sin(), x, k, use_reentrant=False)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_batched_gradients(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        y = checkpoint(lambda x: x.sin().exp(), x)
        return grad_of(y, x, torch.eye(3, dtype=x.dtype), is_grads_batched=True)

    compare(api, run)


def test_hooks_of_tensors_and_modules(api: Any) -> None:
    def run(checkpoint: Any) -> Any:
        seen = Seen()
        torch.manual_seed(0)
        net = nn.Linear(3, 3).double()
        net.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        x = leaf(numbers(2, 3))
        x.register_hook(lambda g: g * 2)
        net.weight.register_hook(lambda g: g * 3)
        checkpoint(lambda x: net(x).sin(), x).sum().backward()
        return x.grad, net.weight.grad, [*seen]

    compare(api, run)


# The determinism check.


def mismatch(api: Any, forward: Any, rerun: Any, **options: Any) -> Any:
    """A checkpointed call whose rerun is another function."""
    calls = Calls(lambda x: (forward if calls.count == 1 else rerun)(x))
    return api.checkpoint(calls, leaf(numbers(3)), use_reentrant=False, **options).sum()


OTHER_METADATA = (
    r"different metadata than during the forward pass\.\ntensor at position \d:\s"
    r"saved metadata: {'shape': torch.Size\(\[3\]\), 'dtype': torch.float64, 'device': device\(type='cpu'\)}(\n|; )"
    r"recomputed metadata: {'shape': "
)
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "fewer": (lambda x: x.sin().cos(), lambda x: x.sin(), "different number of tensors"),
    "shape": (lambda x: x.sin().exp(), lambda x: x[:2].sin().exp(), OTHER_METADATA),
    "dtype": (lambda x: x.sin().exp(), lambda x: x.float().sin().exp(), OTHER_METADATA),
    "device": (lambda x: x.sin().exp(), lambda x: x.to("meta").sin().exp(), OTHER_METADATA),
}


@debugs
@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("debug", [False, True])
def test_a_rerun_that_differs(api: Any, case: str, debug: bool) -> None:
    forward, rerun, message = DIFFERENT[case]
    with pytest.raises(api.CheckpointError, match=None if debug else message) as caught:
        mismatch(api, forward, rerun, debug=debug).backward()
    assert isinstance(caught.value, torch.utils.checkpoint.CheckpointError)
    if not debug:
        assert "debug=True" in str(caught.value)


def test_more_tensors(api: Any) -> None:
    with pytest.raises(api.CheckpointError, match=r"number of tensors|more tensors"):
        mismatch(api, lambda x: x.sin(), lambda x: x.sin().cos(), early_stop=False).backward()


def test_without_the_determinism_check(api: Any) -> None:
    y = mismatch(api, lambda x: x.sin(), lambda x: x.float().sin(), determinism_check="none")
    with pytest.raises(api.CheckpointError):
        mismatch(api, lambda x: x.sin(), lambda x: x.float().sin()).backward()
    y.backward()


def test_the_name_of_the_determinism_check(api: Any) -> None:
    with pytest.raises(ValueError, match=r"determinism_check should be one of \['default', 'none'\], but got often"):
        api.checkpoint(torch.sin, leaf(numbers(3)), use_reentrant=False, determinism_check="often")


@debugs
@pytest.mark.parametrize(
    ("setting", "argument", "on"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False)],
)
def test_debug_enabled(api: Any, setting: Any, argument: bool, on: bool) -> None:
    forward, rerun, _ = DIFFERENT["fewer"]
    with api.set_checkpoint_debug_enabled(setting):
        y = mismatch(api, forward, rerun, debug=argument)
    with pytest.raises(api.CheckpointError) as caught:
        y.backward()
    assert ("aten.sin" in str(caught.value) or "aten.cos" in str(caught.value)) == on


@debugs
@pytest.mark.parametrize("debug", [False, True])
def test_unpacking_twice(api: Any, debug: bool) -> None:
    y = api.checkpoint(lambda x: ReadsTwice.apply(x.sin()), leaf(numbers(3)), use_reentrant=False, debug=debug)
    with pytest.raises(api.CheckpointError, match=None if debug else "already unpacked once"):
        y.sum().backward()


# Groups of backward passes.


def test_a_group_reruns_once(api: Any) -> None:
    def run(group: Any) -> tuple[int, Any]:
        x, fun = leaf(numbers(3)), Calls(lambda x: (x.sin().exp(), x.cos().exp()))
        y, z = api.checkpoint(fun, x, use_reentrant=False)
        with group:
            y.sum().backward()
            z.sum().backward()
        return fun.count, x.grad

    alone, expected = run(api.noop_context_fn()[0])
    together, actual = run(api.GraphExecGroup())
    assert (alone, together) == (3, 2)
    assert_same(actual, expected)


def test_backward_passes_of_a_group_do_not_overlap(api: Any) -> None:
    x = leaf(numbers(3))
    y = api.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum()
    with api.GraphExecGroup():
        y.backward(retain_graph=True)
        with pytest.raises(api.CheckpointError, match="already unpacked once"):
            y.backward()
    with api.GraphExecGroup():
        y.backward()


def test_groups_do_not_nest(api: Any) -> None:
    with api.GraphExecGroup(), pytest.raises(RuntimeError, match="cannot be nested"), api.GraphExecGroup():
        pass
    with api.GraphExecGroup():
        pass


# Warnings.


def test_the_warning_without_use_reentrant(api: Any) -> None:
    x = leaf(numbers(3))
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        y = api.checkpoint(torch.sin, x)
    assert "CheckpointFunction" in y.grad_fn.name()
    with pytest.warns(UserWarning, match="use_reentrant parameter"):
        api.checkpoint_sequential([torch.sin, torch.cos], 2, x)


# Sequences.


@both_variants
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5])
def test_sequential(api: Any, use_reentrant: bool, segments: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(3, 3), nn.Tanh())), nn.Linear(3, 3)).double()
    twin, x, z = copy.deepcopy(net), leaf(numbers(2, 3)), leaf(numbers(2, 3))
    calls = [Calls(m) for m in net]
    api.checkpoint_sequential(calls, segments, x, use_reentrant=use_reentrant).sum().backward()
    twin(z).sum().backward()
    assert_same((x.grad, [p.grad for p in net.parameters()]), (z.grad, [p.grad for p in twin.parameters()]))
    size = 5 // segments
    again = size * (segments - 1)
    assert [c.count for c in calls[:again]] == [2] * again
    assert [c.count for c in calls[again:]] == [1] * (5 - again)


def test_sequential_takes_a_sequential_and_no_other_keywords(api: Any) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), leaf(numbers(2, 3))
    assert_same(api.checkpoint_sequential(net, 2, x, use_reentrant=False, preserve_rng_state=False), net(x))
    with pytest.raises(ValueError, match="Unexpected keyword arguments: speed"):
        api.checkpoint_sequential(net, 2, x, use_reentrant=False, speed=1)


# The other names.


def test_detach_variable(api: Any) -> None:
    x = leaf(numbers(3)).sin()
    a, b, c = api.detach_variable((x, 3, numbers(2)))
    assert (a.is_leaf, a.requires_grad, b, c.requires_grad) == (True, True, 3, False)
    with pytest.raises(RuntimeError, match="list"):
        api.detach_variable([x])


def test_check_backward_validity(api: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.check_backward_validity([1, leaf(numbers(1))])
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        api.check_backward_validity([1, numbers(1)])


def test_default_device_type(api: Any) -> None:
    before = api.DefaultDeviceType.get_device_type()
    try:
        assert before == "cpu" or torch.accelerator.is_available()
        api.DefaultDeviceType.set_device_type("meta")
        assert api.DefaultDeviceType.get_device_type() == "meta"
    finally:
        api.DefaultDeviceType.set_device_type(before)


def test_device_states(api: Any) -> None:
    assert api.get_device_states(numbers(3), [numbers(3)], 1) == ([], [])
    api.set_device_states([], [])
    api.set_device_states([0], [torch.get_rng_state()], device_type="meta")


def test_enumeration_of_policies(api: Any) -> None:
    names = ["MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"]
    assert [p.name for p in api.CheckpointPolicy] == names
    assert api.CheckpointPolicy.MUST_SAVE == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def test_every_public_name_is_there() -> None:
    assert set(torch.utils.checkpoint.__all__) <= set(remat.compat.__all__)
    shared = {n for n in remat.compat.__all__ if getattr(remat.compat, n) is getattr(torch.utils.checkpoint, n, None)}
    assert shared - {"CheckpointPolicy"} == {  # they have nothing to do with the engine
        "DefaultDeviceType",
        "SAC_IGNORED_OPS",
        "check_backward_validity",
        "detach_variable",
        "get_device_states",
        "noop_context_fn",
        "set_device_states",
    }


# Side effects, contexts and hooks.


@both_variants
def test_side_effects_happen_again(api: Any, use_reentrant: bool) -> None:
    seen: list[int] = []
    module = nn.Linear(3, 3).double()
    module.calls = 0

    def fun(x: Tensor) -> Tensor:
        seen.append(len(seen))
        module.calls += 1
        return module(x).sin().exp()

    api.checkpoint(fun, leaf(numbers(3)), use_reentrant=use_reentrant).sum().backward()
    assert (seen, module.calls) == ([0, 1], 2)


@pytest.mark.parametrize("where", ["dict", "attribute", "cell"])
def test_what_the_context_of_the_rerun_sets_is_seen(api: Any, where: str) -> None:
    flags, module, again = {"again": False}, nn.Module(), False
    module.again = False
    seen = []

    def fun(x: Tensor) -> Tensor:
        seen.append({"dict": flags["again"], "attribute": module.again, "cell": again}[where])
        return x.sin().tanh()

    @contextlib.contextmanager
    def rerun() -> Any:
        nonlocal again
        flags["again"] = module.again = again = True
        try:
            yield
        finally:
            flags["again"] = module.again = again = False

    contexts = lambda: (contextlib.nullcontext(), rerun())  # noqa: E731
    api.checkpoint(fun, leaf(numbers(3)), use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen == [False, True]
    assert not again


@each_from(2, 12)
def test_hooks_of_the_user_see_positional_arguments_alone(api: Any) -> None:
    w, k, packed = leaf(numbers(4, 3)), numbers(5, 3), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        api.checkpoint(lambda x, k: (x @ w.T).sin() + k.sum(), leaf(numbers(2, 3)), k=k, use_reentrant=False)
    assert packed == [(2, 3)]


def test_mutation_of_saved_tensors_may_be_allowed(api: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        z = y * y
        y.mul_(0)
        return z

    x = leaf(numbers(3))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        api.checkpoint(fun, x, use_reentrant=False).sum().backward()
    assert_same(x.grad, (2 * x.sin() * x.cos()).detach())


@both_variants
def test_frozen_parameters_that_hooks_gather(api: Any, use_reentrant: bool) -> None:
    """The way of ZeRO-3."""

    def gather(m: nn.Module, *_: Any) -> None:
        m.weight.data, m.bias.data = m.full

    def release(m: nn.Module, *_: Any) -> None:
        m.weight.data, m.bias.data = torch.empty(0), torch.empty(0)

    def run(checkpoint: Any) -> Any:
        norm, x = nn.LayerNorm(8).requires_grad_(False), leaf(numbers(4, 8).float())
        norm.full = norm.weight.data, norm.bias.data
        release(norm)
        norm.register_forward_pre_hook(gather)
        norm.register_full_backward_pre_hook(gather)
        norm.register_forward_hook(release)
        norm.register_full_backward_hook(release)
        checkpoint(lambda x: norm(x).tanh(), x).sum().backward()
        return x.grad

    checkpoint = functools.partial(api.checkpoint, use_reentrant=use_reentrant)
    if use_reentrant:
        assert_same(run(checkpoint), run(plain))
    else:
        with pytest.raises(api.CheckpointError, match="different metadata"):
            run(checkpoint)


PHRASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "more": (torch.sin, lambda x: x.sin().cos(), {"early_stop": False}, "trying to save more tensors"),
    "fewer": (lambda x: x.sin().cos(), torch.sin, {}, "A different number of tensors was saved during the original"),
    "debug": (torch.sin, lambda x: x[:2].sin(), {"debug": True}, "You are seeing this error because you passed `debug"),
}


@debugs
@pytest.mark.parametrize("case", PHRASES)
def test_the_phrases_of_errors(api: Any, case: str) -> None:
    forward, rerun, options, phrase = PHRASES[case]
    with pytest.raises(api.CheckpointError, match=phrase):
        mismatch(api, forward, rerun, **options).backward()


@each_from(2, 12)
def test_errors_hint_at_compiled_functions(api: Any) -> None:
    phrases = (
        "Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions",
        "Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache",
    )
    for case in ("more", "fewer"):
        forward, rerun, options, _ = PHRASES[case]
        with pytest.raises(api.CheckpointError) as caught:
            mismatch(api, forward, rerun, **options).backward()
        assert all(phrase in str(caught.value) for phrase in phrases)


def selective(api: Any, policy: Any) -> Any:
    contexts = functools.partial(api.create_selective_checkpoint_contexts, policy)
    return api.checkpoint(torch.sin, leaf(numbers(3)), use_reentrant=False, context_fn=contexts)


MISUSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "read twice": (
        lambda api: api.checkpoint(ReadsTwice.apply, leaf(numbers(3)), use_reentrant=False).sum().backward(),
        "Unpack is being triggered for a tensor that was already unpacked once.* make sure to do so only once",
    ),
    "no tuple": (lambda api: api.detach_variable([]), "Only tuple of tensors is supported. Got Unsupported input type"),
    "no op": (
        lambda api: selective(api, ["mm"]),
        "Expected op in `op_list` to be an OpOverload but got: .*mm.* of type",
    ),
    "no policy": (lambda api: selective(api, 3), "policy_fn_or_list must be either a function or a list of ops"),
    "no keyword": (
        lambda api: api.checkpoint(torch.sin, leaf(numbers(3)), use_reentrant=True, k=2),
        "Unexpected keyword arguments: k",
    ),
}


@pytest.mark.parametrize("case", MISUSES)
def test_the_phrases_of_misuses(api: Any, case: str) -> None:
    misuse, phrase = MISUSES[case]
    with pytest.raises((RuntimeError, ValueError, TypeError), match=phrase):
        misuse(api)


def test_backward_passes_that_overlap_are_told_so(api: Any) -> None:
    y = api.checkpoint(lambda x: x.sin().exp(), leaf(numbers(3)), use_reentrant=False).sum()
    with api.GraphExecGroup():
        y.backward(retain_graph=True)
        with pytest.raises(api.CheckpointError, match="Performing two backward calls that overlap"):
            y.backward()


@both_variants
def test_a_module_that_is_moved_to_where_it_is(api: Any, use_reentrant: bool) -> None:
    """It sets `.data` of its parameters to what they have."""
    results = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=use_reentrant), plain):
        net, x = with_constants(nn.Linear(3, 3).double()), leaf(numbers(2, 3))
        checkpoint(lambda x, net=net: net.to(x.device)(x).sin(), x).sum().backward()
        results.append([p.grad for p in (x, *net.parameters())])
    assert_same(*results)


@both_variants
@pytest.mark.parametrize("how", ["copy_", "data", "module"])
def test_a_parameter_that_the_function_makes_and_fills(api: Any, use_reentrant: bool, how: str) -> None:
    def fun(x: Tensor) -> Tensor:
        layer = nn.Linear(3, 3).double()
        w = layer.weight if how == "module" else nn.Parameter(torch.zeros_like(layer.weight))
        if how == "data":
            w.data = torch.full_like(w, 0.5)
        else:
            with torch.no_grad():
                w.copy_(torch.full_like(w, 0.5))
        return (x @ w).sin()

    grads = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=use_reentrant), plain):
        x = leaf(numbers(2, 3))
        checkpoint(fun, x).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


# User code finds its own tensors in a rerun.


def reads_an_attribute(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) * layer.weight.scale  # type: ignore[operator]


def asks_for_the_class(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) * (2 if isinstance(layer.weight, nn.Parameter) else 1)


def looks_up_by_identity(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) * (2 if layer.weight in layer.known else 1)  # type: ignore[operator]


def asks_for_the_gradient(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) * (1 if layer.weight.grad is None else 2)


def changes_it_in_place(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.weight.clamp_(-1, 1)
    return asks_for_the_class(layer, x) * reads_an_attribute(layer, x)


OF_A_PARAMETER = [reads_an_attribute, asks_for_the_class, looks_up_by_identity, asks_for_the_gradient]


@pytest.mark.parametrize(
    ("use_reentrant", "of_a_parameter"),
    [*itertools.product([True, False], OF_A_PARAMETER), (False, changes_it_in_place)],
)
def test_what_user_code_asks_of_a_parameter(api: Any, use_reentrant: bool, of_a_parameter: Any) -> None:
    results = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=use_reentrant), plain):
        layer, x = with_constants(nn.Linear(3, 3).double()), leaf(numbers(2, 3))
        layer.weight.scale, layer.known = 3.0, {layer.weight}
        for _ in range(2):
            checkpoint(functools.partial(of_a_parameter, layer), x).sin().sum().backward()
        results.append([p.grad for p in (x, *layer.parameters())])
    assert_same(*results)


def test_an_attribute_of_a_tensor_that_an_outer_function_makes(api: Any) -> None:
    """The reentrant variant of torch has no derivative with respect to such a tensor.

    It runs several times: in a rerun, another tensor may get the address of the first.
    """
    results = []
    for checkpoint in (*[functools.partial(api.checkpoint, use_reentrant=False)] * 50, plain):
        x = leaf(numbers(3))

        def fun(x: Tensor, checkpoint: Any = checkpoint) -> Tensor:
            h = x.sin()
            h.scale = 3.0  # type: ignore[attr-defined]
            return checkpoint(lambda y: (y * getattr(h, "scale", 1.0) * h).tanh(), h * 1)

        checkpoint(fun, x).sum().backward()
        results.append(x.grad)
    assert_same(results[:-1], results[-1:] * 50)


@both_variants
def test_other_threads_find_the_parameters_of_a_module_during_a_rerun(api: Any, use_reentrant: bool) -> None:
    layer, x, found = nn.Linear(3, 3).double(), leaf(numbers(2, 3)), []

    def fun(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(layer.weight))
        thread.start()
        thread.join()
        return layer(x).tanh()

    api.checkpoint(fun, x, use_reentrant=use_reentrant).sum().backward()
    assert [weight is layer.weight for weight in found] == [True, True]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class AddsToMainGrad(Product):
    """As Megatron's fused accumulation: the gradient of the weight goes to an attribute of it."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        gradient, of_weight = Product.backward(ctx, g)
        ctx.saved_tensors[1].main_grad.add_(of_weight)
        return gradient, None


GIVES_WEIGHT: dict[str, Callable[[nn.Linear], Callable[[Tensor], Tensor]]] = {
    "from a module": lambda layer: lambda x: Product.apply(x, layer.weight).tanh(),
    "from a cell": lambda layer: (lambda w: lambda x: Product.apply(x, w).tanh())(layer.weight),
    "and reads it": lambda layer: lambda x: (Product.apply(x, layer.weight) * layer.weight.sum()).tanh(),
    "and reads it detached": lambda layer: lambda x: Product.apply(x, layer.weight) * layer.weight.detach().sum(),
    "in a list, computed": lambda layer: (lambda ws: lambda x: Product.apply(x, ws[0]).tanh())([layer.weight * 2]),
    "and another": lambda layer: lambda x: layer(Product.apply(x, layer.weight)).tanh(),
}


@both_variants
@pytest.mark.parametrize("gives", GIVES_WEIGHT)
def test_hooks_of_a_weight_that_an_autograd_function_gets_are_called_once(
    api: Any, use_reentrant: bool, gives: str
) -> None:
    results = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=use_reentrant), plain):
        layer, x, seen = with_constants(nn.Linear(3, 3).double()), leaf(numbers(2, 3)), Seen()
        layer.weight.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        layer.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        for _ in range(2):
            checkpoint(GIVES_WEIGHT[gives](layer), x).sum().backward()
        results.append((x.grad, layer.weight.grad, layer.bias.grad, *seen))
    assert_same(*results)


@pytest.mark.parametrize("gives", GIVES_WEIGHT)
def test_reentrant_under_autograd_grad_with_a_weight_that_an_autograd_function_gets(gives: str) -> None:
    """It is an error with torch."""
    results = []
    for checkpoint in (functools.partial(remat.compat.checkpoint, use_reentrant=True), plain):
        layer, x, seen = with_constants(nn.Linear(3, 3).double()), leaf(numbers(2, 3)), Seen()
        layer.weight.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
        results.append((grad_of(checkpoint(GIVES_WEIGHT[gives](layer), x).sum(), [x, layer.weight]), *seen))
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("how", [".backward()", "autograd.grad"])
def test_reentrant_with_weights_that_nothing_finds(how: str) -> None:
    """A ScriptModule reads its weights in C++."""
    layer, x = torch.jit.script(with_constants(nn.Linear(3, 3).double())), leaf(numbers(2, 3))
    y = remat.compat.checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=True).sum()
    if how == "autograd.grad":
        with pytest.raises(remat.RematError, match="Pass it as an argument, use use_reentrant=False"):
            grad_of(y, x)
        return
    y.backward()
    found = [p.grad for p in (x, *layer.parameters())]
    for p in (x, *layer.parameters()):
        p.grad = None
    layer(x).tanh().sum().backward()
    assert_same(found, [p.grad for p in (x, *layer.parameters())])


class Slot:
    __slots__ = ("held",)


def times_sine(a: Tensor, b: Tensor) -> Tensor:
    return a * b.sin()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_reentrant_with_an_outside_result_that_nothing_finds_beside_a_weight_that_a_function_gets(api: Any) -> None:
    results, scripted, slot = [], torch.jit.script(times_sine), Slot()
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=True), plain):
        w, v, x = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1)), leaf(numbers(3, 3, seed=2))
        slot.held = v * 2  # type: ignore[attr-defined]
        checkpoint(lambda x, w=w: scripted(Product.apply(x, w), slot.held).tanh(), x).sum().backward()
        results.append([t.grad for t in (w, v, x)])
    assert_same(*results)


def test_a_backward_that_adds_to_an_attribute_of_a_weight(api: Any) -> None:
    """With torch, only the reentrant variant gives the backward the weight itself."""
    results = []
    for checkpoint in (functools.partial(api.checkpoint, use_reentrant=True), plain):
        layer, x = nn.Module(), leaf(numbers(2, 3))
        layer.register_parameter("weight", nn.Parameter(numbers(3, 3)))
        layer.weight.main_grad = torch.zeros(3, 3, dtype=torch.float64)
        checkpoint(lambda x, m=layer: AddsToMainGrad.apply(x, m.weight).tanh(), x).sum().backward()
        results.append((x.grad, layer.weight.main_grad))
    assert_same(*results)
