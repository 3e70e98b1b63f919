"""Reruns that differ, in-place changes, and exceptions anywhere: what is said, and what is left behind."""


# ruff: noqa: PT017 - an error is one of two right answers

import functools
import re
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import TRANSFORMS, Fun, Seen, Times, assert_same, leaf, numbers, plain
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn import functional as F

from remat import CheckpointError, RematError, checkpoint, remat
from remat import _torch_internals as internals


class State:
    """Something outside that changes between forward and rerun."""

    def __init__(self) -> None:
        self.runs = Seen()

    def first(self) -> bool:
        self.runs.append(None)
        return len(self.runs) == 1


def another_op(x: Tensor, state: State) -> Tensor:
    y = x.sin()
    return y.exp() if state.first() else y.tanh()


def another_shape(x: Tensor, state: State) -> Tensor:
    return x[: 2 if state.first() else 3].sin().sum() * x


def another_dtype(x: Tensor, state: State) -> Tensor:
    return x.to(torch.float64 if state.first() else torch.float32).sin().double()


def one_op_more(x: Tensor, state: State) -> Tensor:
    y = x.sin()
    return y if state.first() else y.cos()


def one_op_less(x: Tensor, state: State) -> Tensor:
    y = x.sin()
    return y.cos() if state.first() else y


def another_number(x: Tensor, state: State) -> Tensor:
    """-1 and -2 have the same hash."""
    return x.roll(-1 if state.first() else -2)


def another_factor(x: Tensor, state: State) -> Tensor:
    return x.sin() * (-1.0 if state.first() else -2.0)


def other_bounds_of_a_slice(x: Tensor, state: State) -> Tensor:
    return x * (x[..., :2] if state.first() else x[..., 1:3]).sin().sum()


def other_bounds_of_slices(x: Tensor, state: State) -> Tensor:
    begin = 0 if state.first() else 1
    return x * x[None, ..., begin : begin + 2].sin().sum()


def other_numbers_in_a_list(x: Tensor, state: State) -> Tensor:
    return x * x.sin().repeat([1, 1, 2, 4] if state.first() else [1, 1, 4, 2]).view(-1)[:3].sum()


def another_count_of_results(x: Tensor, state: State) -> Any:
    y = x.sin()
    z = y.cos()
    return (y, z) if state.first() else (y,)


DIFFERENT: dict[str, tuple[Callable[..., Any], str]] = {
    "another op": (another_op, "exp|tanh"),
    "another shape": (another_shape, "another shape"),
    "another dtype": (another_dtype, "another shape"),
    "another number": (another_number, "another number"),
    "another factor": (another_factor, "another number"),
    "other bounds of a slice": (other_bounds_of_a_slice, "another number"),
    "other bounds of slices": (other_bounds_of_slices, "another number"),
    "other numbers in a list": (other_numbers_in_a_list, "another shape .* another number"),
    "one op more": (one_op_more, "cos"),
    "one op less": (one_op_less, "cos"),
}

REVERSE = ["grad", "vmap(grad)", "vjp", "grad(grad)", "jvp(grad)", "jacrev", ".backward()", "double backward"]


@pytest.mark.parametrize(("fun", "says"), DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize("transform", REVERSE)
def test_a_rerun_that_differs(fun: Callable[..., Tensor], says: str, transform: str) -> None:
    """The error names the function, the first op that differs and where it was called."""
    state = State()
    with pytest.raises(CheckpointError, match=says) as error:
        TRANSFORMS[transform](lambda x: remat(fun)(x, state), numbers(3, 3))
    message = str(error.value)
    assert fun.__name__ in message
    first = fun.__code__.co_firstlineno
    if fun is one_op_less:
        return  # it was not called
    lines = [int(part.split(":")[1].split()[0].rstrip(",.")) for part in message.split(__file__)[1:]]
    assert any(first <= line <= first + 2 for line in lines)
    assert not internals.transforms_active()
    assert_same(grad(lambda x: remat(torch.sin)(x).sum())(numbers(3)), numbers(3).cos())


@pytest.mark.parametrize("captured", [False, True])
def test_a_rerun_that_computes_with_another_tensor(captured: bool) -> None:
    state, w = State(), leaf(numbers(3))

    def fun(x: Tensor, y: Tensor) -> Tensor:
        return (x * ((w if captured else y) if state.first() else x)).sin()

    out = remat(fun)(leaf(numbers(3)), leaf(numbers(3)))
    with pytest.raises(CheckpointError, match=r"at call 1 it calls .*mul, .*other tensors"):
        out.sum().backward()


def test_a_rerun_depends_on_a_tensor_that_the_forward_did_not_depend_on() -> None:
    state = State()
    out = remat(lambda x, y: x * (y.detach() if state.first() else y))(leaf(numbers(3)), leaf(numbers(3)))
    with pytest.raises(CheckpointError, match=r"at call 1 it calls .*mul, .*other tensors"):
        out.sum().backward()


def test_a_rerun_with_another_structure() -> None:
    a, b = remat(another_count_of_results)(leaf(numbers(3)), State())
    with pytest.raises(CheckpointError, match="another_count_of_results"):
        (a + b).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_that_is_made_anew_is_no_difference(layout: torch.layout) -> None:
    """Its lengths are symbols that no other one has, or can't be asked for."""

    def fun(x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=layout)
        return nested.sin().to_padded_tensor(0.0).sum(0)

    x, expected = (leaf(numbers(3, 2)) for _ in range(2))
    remat(fun)(x).cos().sum().backward()
    fun(expected).cos().sum().backward()
    assert_same(x.grad, expected.grad)


def test_an_op_on_constants_alone_may_differ() -> None:
    """A table that is computed on first use and kept."""
    tables: list[Tensor] = []

    def fun(x: Tensor) -> Tensor:
        if not tables:
            tables.append(torch.arange(3.0).sin())
        return x.sin() * tables[0]

    x = leaf(numbers(3).float())
    remat(fun)(x).sum().backward()
    assert_same(x.grad, x.detach().cos() * tables[0])
    tables.clear()
    assert_same(grad(lambda x: remat(fun)(x).sum())(x.detach()), x.grad)
    tables.clear()
    assert_same(vmap(grad(lambda x: remat(fun)(x).sum()))(x.detach()[None])[0], x.grad)


@pytest.mark.parametrize("transform", REVERSE)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_outside_tensor_that_the_forward_did_not_read(transform: str, requires_grad: bool) -> None:
    a, b = numbers(3, 3), numbers(3, 3, seed=1).requires_grad_(requires_grad)
    state = State()

    def fun(x: Tensor) -> Tensor:
        return x.sin() * (a if state.first() else b)

    with pytest.raises(CheckpointError, match=r"fun.*(outside|depends? on tensor)"):
        TRANSFORMS[transform](remat(fun), numbers(3, 3))
    assert b.grad is None


def test_an_iterator_is_used_up_by_the_forward() -> None:
    x = leaf(numbers(3))
    y = remat(lambda ts: sum(t.sin() for t in ts))(t for t in (x, x))
    with pytest.raises(CheckpointError, match="pass a list: the forward has used the iterator up"):
        y.sum().backward()


def test_a_script_module_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(torch.nn.Linear(3, 3))
    with pytest.raises(RematError, match=r"ScriptModule.* remat\.checkpoint"):
        remat(lambda x: scripted(x).sin())(torch.ones(3, requires_grad=True)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("way", [remat, functools.partial(functools.partial, checkpoint, use_reentrant=False)])
def test_a_parameter_of_a_script_module_that_is_not_called(way: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))).double()

    def derivatives(fun: Any) -> Any:
        return torch.autograd.grad(fun(numbers(2, 3)).sum(), [model[0].weight, model[1].weight])

    def fun(x: Tensor) -> Tensor:
        return model[0](x) @ model[1].weight

    assert_same(derivatives(way(fun)), derivatives(fun))


class Scales(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("x", [numbers(3), leaf(numbers(3))], ids=["of data", "of a leaf"])
def test_what_a_script_module_holds_was_computed(x: Tensor) -> None:
    """The graph of it goes on beyond the call."""
    w = leaf(numbers(3))
    box = SimpleNamespace()
    box.layer = torch.jit.script(Scales(torch.zeros(3, dtype=torch.float64)))
    box.layer.scale = w.exp()
    says = r"ScriptModule, Scales|Mul reads a tensor of shape \[3\].* Pass it as an argument"
    with pytest.raises(RematError, match=says):
        remat(lambda x: box.layer(x).sin())(x).sum().backward()
    assert w.grad is None


def test_the_error_is_torchs_too() -> None:
    state = State()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        remat(another_op)(leaf(numbers(3)), state).sum().backward()
    assert issubclass(CheckpointError, RuntimeError)


@pytest.mark.parametrize(
    ("fun", "name"),
    [
        pytest.param(lambda: another_op, "another_op", id="function"),
        pytest.param(lambda: AnotherOp(), "AnotherOp", id="module"),
        pytest.param(lambda: Callable_(), "Callable_", id="callable object"),
        pytest.param(lambda: Callable_().method, "Callable_.method", id="method"),
        pytest.param(lambda: functools.partial(another_op), "another_op", id="partial"),
    ],
)
def test_errors_name_each_kind_of_function(fun: Callable[[], Any], name: str) -> None:
    state, f = State(), fun()
    with pytest.raises(CheckpointError, match=name):
        remat(f)(leaf(numbers(3)), state).sum().backward()


def test_errors_name_functions_of_torch() -> None:
    with pytest.raises(RematError, match=r"remat: torch\.relu_ changes an argument"):
        remat(torch.relu_)(leaf(numbers(3)).sin())


class AnotherOp(nn.Module):
    def forward(self, x: Tensor, state: State) -> Tensor:
        return another_op(x, state)


class Callable_:  # noqa: N801
    def __call__(self, x: Tensor, state: State) -> Tensor:
        return another_op(x, state)

    def method(self, x: Tensor, state: State) -> Tensor:
        return another_op(x, state)


# Changes in place.

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "+=": lambda t: t.__iadd__(1),
    "setitem": lambda t: t.__setitem__(0, 1.0),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "relu_": lambda t: torch.relu_(t),
    "relu(inplace=True)": lambda t: F.relu(t, inplace=True),
    "a view's add_": lambda t: t[0].add_(1),
    "data": lambda t: t.detach().add_(1),
    "a view's setitem": lambda t: t.view(-1).__setitem__(0, 1.0),
    "zero_": lambda t: t.zero_(),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0]), torch.ones_like(t[:1])),
    "an op of aten": lambda t: torch.ops.aten.add_(t, 1),
}
EACH_WRITE = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def right_or_error(actual: Callable[[], Any], expected: Callable[[], Any]) -> None:
    """The same as the plain function, or an error that says so: never silently wrong."""
    try:
        result = actual()
    except RematError as error:
        assert "in place" in str(error)
        assert "fun" in str(error)
    else:
        assert_same(result, expected())


@EACH_WRITE
@pytest.mark.parametrize(
    "transform",
    [
        "call",
        "grad",
        "vmap(grad)",
        "jvp(grad)",
        "grad(grad)",
        "jvp",
        "vmap",
        ".backward()",
        "double backward",
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_a_differentiated_tensor_that_is_changed(
    write: Callable[[Tensor], Any], transform: str, captured: bool
) -> None:
    def program(ck: Callable[[Any], Any]) -> Fun:
        def of_x(x: Tensor) -> Tensor:
            c = x * 1

            def fun(c: Tensor = c) -> Tensor:
                y = c + 1
                write(c)
                return y.sin()

            return (ck(fun)() if captured else ck(fun)(c)) + c

        return of_x

    x = numbers(3, 3)
    right_or_error(lambda: TRANSFORMS[transform](program(remat), x), lambda: TRANSFORMS[transform](program(plain), x))
    assert_same(x, numbers(3, 3))


@EACH_WRITE
@pytest.mark.parametrize(
    "transform", ["call", "grad", "jvp(grad)", "grad(grad)", "jvp", ".backward()", "double backward"]
)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_constant_that_is_changed(
    write: Callable[[Tensor], Any], transform: str, captured: bool, first: bool
) -> None:
    """A buffer: written once, as without remat, and the rerun starts from what the forward found."""

    def program(ck: Callable[[Any], Any]) -> Fun:
        def of_x(x: Tensor) -> Tensor:
            buffer = torch.arange(-4.0, 5.0, dtype=torch.float64).view(
                3, 3
            )  # torch.func allows writing to its own alone

            def fun(x: Tensor, buffer: Tensor = buffer) -> Tensor:
                if first:
                    y = x.sin() + buffer
                    write(buffer)
                    return y.cos()
                write(buffer)
                return x.sin() * buffer

            y = ck(fun)(x) if captured else ck(fun)(x, buffer)
            return y * buffer

        return of_x

    x = numbers(3, 3)
    expected = TRANSFORMS[transform](program(plain), x)
    if write in (
        WRITES["data"],
        WRITES["a view's add_"],
        WRITES["a view's setitem"],
    ):  # not seen to be this tensor
        right_or_error(lambda: TRANSFORMS[transform](program(remat), x), lambda: expected)
    else:
        assert_same(TRANSFORMS[transform](program(remat), x), expected)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_change_by_an_op_whose_name_does_not_say_so(captured: bool, frozen: bool) -> None:
    weight, indices = (numbers(5, 3) + 2).requires_grad_(not frozen), torch.arange(2)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return x * F.embedding(indices, weight if captured else w, max_norm=1.0)

    reader = r" \(torch.nn.functional.embedding was the first to read it\)" if captured else ""
    with pytest.raises(RematError, match=rf"an unknown line{reader}, by an op .* \(an embedding with max_norm\?\)"):
        remat(f)(leaf(numbers(2, 3)), weight.clone() if captured else weight)


def test_a_change_by_an_op_over_a_list() -> None:
    def program(ck: Callable[[Any], Any]) -> Any:
        x, c = leaf(numbers(3)), numbers(3)

        def fun(x: Tensor) -> Tensor:
            torch._foreach_add_([c], 1)
            return x * c

        ck(fun)(x).sum().backward()
        return x.grad, c

    right_or_error(lambda: program(remat), lambda: program(plain))


def train(module: nn.Module, ck: Callable[[Any], Any], steps: int = 3) -> dict[str, Any]:
    results = {}
    for step in range(steps):
        x = leaf(numbers(4, 3, seed=step) * (step + 1))
        ck(module)(x).sin().sum().backward()
        results[f"x{step}"] = x.grad
    results.update((f"grad of {n}", p.grad) for n, p in module.named_parameters())
    return {**results, **{n: b.clone() for n, b in module.named_buffers()}}


class Average(nn.Module):
    """Keeps a running mean, in several ways of writing."""

    def __init__(self, write: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x.detach().mean(0))
        self.count += 1
        return (x - self.mean).sin() / self.count


def double() -> dict[str, Any]:
    return {"dtype": torch.float64}


STATEFUL: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(3, **double()),
    "BatchNorm, cumulative": lambda: nn.BatchNorm1d(3, momentum=None, **double()),
    "BatchNorm in eval": lambda: nn.BatchNorm1d(3, **double()).eval(),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False, **double()),
    "between layers": lambda: nn.Sequential(
        nn.Linear(3, 3, **double()),
        nn.BatchNorm1d(3, **double()),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(3, **double()),
    ),
    "the same one twice": lambda: (lambda b: nn.Sequential(b, nn.Tanh(), b))(nn.BatchNorm1d(3, **double())),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Linear(1, 4, **double()),
        nn.InstanceNorm1d(3, track_running_stats=True, **double()),
    ),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3, **double())),
    "mul_ and add_": lambda: Average(lambda m, x: m.mean.mul_(0.9).add_(x)),
    "lerp_": lambda: Average(lambda m, x: m.mean.lerp_(x, 0.1)),
    "copy_": lambda: Average(lambda m, x: m.mean.copy_(0.9 * m.mean + x)),
    "setitem": lambda: Average(lambda m, x: m.mean.__setitem__(slice(None), 0.9 * m.mean + x)),
    "+=": lambda: Average(lambda m, x: m.mean.__iadd__(x)),
    "out=": lambda: Average(lambda m, x: torch.add(m.mean, x, out=m.mean)),
    "under no_grad": lambda: Average(lambda m, x: torch.no_grad()(m.mean.add_)(x)),
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_buffers_are_updated_once(make: Callable[[], nn.Module]) -> None:
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        results.append(train(make(), ck))
    assert_same(*results)


def test_a_buffer_that_is_replaced() -> None:
    with pytest.raises(CheckpointError, match=r"rerun of Average.forward .*write in place \(self.mean.copy_"):
        train(Average(lambda m, x: setattr(m, "mean", 0.9 * m.mean + x)), remat)


BN_TRANSFORMS = {
    "grad": lambda f, ps, bs, x: grad(f, has_aux=True)(ps, bs, x),
    "grad(grad)": lambda f, ps, bs, x: grad(
        lambda x: sum(g.sin().sum() for g in grad(f, has_aux=True)(ps, bs, x)[0].values())
    )(x),
    "jvp(grad)": lambda f, ps, bs, x: jvp(lambda x: grad(f, has_aux=True)(ps, bs, x), (x,), (x.cos(),)),
    "vmap(grad)": lambda f, ps, bs, x: vmap(grad(f, has_aux=True), (None, None, 0))(ps, bs, torch.stack([x, x.cos()])),
}


@pytest.mark.parametrize("transform", BN_TRANSFORMS.values(), ids=BN_TRANSFORMS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_batch_norm_by_functional_call(transform: Callable[..., Any], where: str) -> None:
    """torch.func allows writing to buffers of its own: they are cloned, and come back beside the loss."""
    results = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3, **double()), nn.BatchNorm1d(3, **double()))
        if transform is BN_TRANSFORMS["vmap(grad)"]:
            module.eval()

        def loss(ps: Any, bs: Any, x: Tensor) -> Any:
            bs = {k: b + 0 * x.detach().sum().to(b.dtype) for k, b in bs.items()}
            if where == "outside":
                out = ck(lambda x: functional_call(module, {**ps, **bs}, (x,)))(x)
            else:
                out = functional_call(
                    nn.Sequential(Wrapped(module, ck)),
                    {f"0.module.{k}": v for k, v in {**ps, **bs}.items()},
                    (x,),
                )
            return out.sin().sum(), bs

        params = {k: p.detach() for k, p in module.named_parameters()}
        results.append(transform(loss, params, dict(module.named_buffers()), numbers(4, 3)))
    assert_same(*results)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, ck: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.ck = module, ck

    def forward(self, x: Tensor) -> Tensor:
        return self.ck(self.module)(x)


# Exceptions.


class Stop(BaseException):
    """As KeyboardInterrupt: no Exception."""


class Raises(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise RAISED[0]


RAISED: list[BaseException] = [ValueError("mine")]


def surroundings() -> tuple[Any, ...]:
    return (
        internals.stack_depth(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.ones(()).device.type,
        torch.is_autocast_enabled("cpu"),
        torch.autograd.forward_ad._current_level,
        torch._C._is_fwd_grad_enabled(),
    )


# Where the exception comes from, and the transform around (torch has no rule for it under others).
PLACES = [
    (where, t)
    for where in ("forward", "rerun", "inner forward", "inner rerun", "vmap inside")
    for t in (*REVERSE, "grad(vmap)", "functionalize(grad)")
] + [("backward", t) for t in (*REVERSE, "grad(vmap)") if t != "jvp(grad)"]


@pytest.mark.parametrize("exception", [ValueError("mine"), KeyboardInterrupt("mine"), Stop("mine")], ids=repr)
@pytest.mark.parametrize(("where", "transform"), PLACES)
def test_an_exception_leaves_everything_as_it_was(where: str, transform: str, exception: BaseException) -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(None)
        y = x.sin()
        if where == "backward":
            return Raises.apply(y)
        if len(runs) == (2 if "rerun" in where else 1):
            if where == "vmap inside":
                vmap(throw)(y)
            raise exception
        return y

    def throw(_: Tensor) -> Tensor:
        raise exception

    call = remat(lambda x: remat(fun)(x.cos())) if "inner" in where else remat(fun)
    RAISED[0] = exception
    before = surroundings()
    with pytest.raises(type(exception), match="mine"):
        TRANSFORMS[transform](call, numbers(3, 3))
    assert surroundings() == before
    for check in (grad, lambda f: vmap(grad(f)), lambda f: grad(lambda x: grad(f)(x).sum())):
        x = numbers(2, 3) if check is not grad else numbers(3)
        assert_same(check(lambda x: remat(torch.sin)(x).sum())(x), check(lambda x: x.sin().sum())(x))


@pytest.mark.parametrize("where", ["rerun", "backward"])
def test_an_exception_leaves_the_random_stream_as_it_was(where: str) -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(None)
        y = F.dropout(x)
        if len(runs) == 2 and where == "rerun":
            raise ValueError("mine")
        return Raises.apply(y) if where == "backward" else y

    RAISED[0] = ValueError("mine")
    y = remat(fun)(leaf(numbers(3))).sum()
    state = torch.get_rng_state()
    with torch.autocast("cpu"), torch.device("cpu"), pytest.raises(ValueError, match="mine"):
        y.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_backward_that_failed_can_be_tried_again() -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(None)
        if len(runs) == 2:
            raise ValueError("mine")
        return x.sin()

    x = leaf(numbers(3))
    y = remat(fun)(x).sum()
    with pytest.raises(ValueError, match="mine"):
        y.backward(retain_graph=True)
    assert x.grad is None
    y.backward()
    assert_same(x.grad, x.detach().cos())


@pytest.mark.parametrize("retain", [False, True])
def test_backward_twice(retain: bool) -> None:
    for ck in (remat, plain):
        x = leaf(numbers(3))
        y = ck(torch.sin)(x).sum()
        y.backward(retain_graph=retain)
        if retain:
            y.backward()
            assert_same(x.grad, 2 * x.detach().cos())
        else:
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()


def test_the_results_share_a_node() -> None:
    x, y = leaf(numbers(3)), leaf(numbers(3))
    a, b = remat(lambda x, y: (x.sin(), y.exp()))(x, y)
    a.sum().backward()
    with pytest.raises(RuntimeError, match="second time") as error:
        b.sum().backward()
    assert "Its results share one node" in error.value.__notes__[0]


def test_an_error_of_the_users_hooks_has_no_note_about_nodes() -> None:
    """What a checkpoint around it recomputes, say, or what is read from a file that is gone."""

    def fails(_: Any) -> Any:
        raise RuntimeError("the file is gone")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, fails):
        y = remat(torch.sin)(leaf(numbers(3)))
    with pytest.raises(RuntimeError, match="the file is gone") as error:
        y.sum().backward()
    assert not hasattr(error.value, "__notes__")


# Threads.


def in_threads(n: int, run: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * n

    def work(i: int) -> None:
        try:
            results[i] = run(i)
        except BaseException as error:  # shown by the assertion on the results
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def test_backward_in_another_thread() -> None:
    w, x = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
    y = remat(lambda x: F.dropout(torch.tanh(x @ w), 0.0))(x).sum()
    (error,) = in_threads(1, lambda _: y.backward())
    assert error is None
    assert_same((w.grad, x.grad), torch.autograd.grad(torch.tanh(x @ w).sum(), (w, x)))


def test_threads_at_the_same_time() -> None:
    w = numbers(3, 3)
    block = remat(lambda x: torch.tanh(x @ w))

    def run(i: int) -> Any:
        x, results = numbers(3, 3, seed=i), []
        for _ in range(5):
            results.append(grad(lambda x: block(block(x)).sum())(x))
            results.append(vmap(grad(lambda r: block(block(r)).sum()))(x))
            z = leaf(x)
            block(block(z)).sum().backward()
            results.append(z.grad)
        return results

    for i, results in enumerate(in_threads(4, run)):
        x = numbers(3, 3, seed=i)
        expected = grad(lambda x: torch.tanh(torch.tanh(x @ w) @ w).sum())(x)
        assert not isinstance(results, BaseException), results
        for result in results:
            assert_same(result, expected)


def test_one_graph_from_several_threads() -> None:
    x = leaf(numbers(3))
    y = remat(torch.sin)(x)
    results = in_threads(4, lambda i: torch.autograd.grad(y, x, torch.ones(3).double() * i, retain_graph=True)[0])
    for i, result in enumerate(results):
        assert_same(result, i * x.detach().cos())


def test_a_vjp_called_in_another_thread() -> None:
    x = numbers(3)
    _, pull = vjp(remat(torch.sin), x)
    (result,) = in_threads(1, lambda _: pull(torch.ones(3).double()))
    assert_same(result, (x.cos(),))


def test_a_module_made_inside() -> None:
    """Its initialization writes to a parameter that was made out of sight."""
    with pytest.raises(RematError, match=r"in place, at .*test_errors.py.* make that outside, and pass it"):
        remat(lambda x: nn.Linear(3, 3)(x))(torch.ones(3))
    with pytest.raises(CheckpointError, match="If the function makes this parameter"):
        remat(lambda x: x * nn.Parameter(torch.ones(3)))(leaf(numbers(3))).sum().backward()
    with pytest.raises(RematError, match=r"Change a copy instead: x = x.clone\(\)\.$"):
        remat(lambda x: x.add_(1).sin())(leaf(numbers(3)) * 1)


# What can't be lifted.


def test_no_silent_zero_for_what_escapes_every_look() -> None:
    """A tensor whose use no torch function shows is found by the graph, or named in an error."""
    w, x = leaf(numbers(3)), leaf(numbers(3, seed=1))

    class Box:
        def __init__(self, w: Tensor) -> None:
            self.get = lambda: w

    box = Box(w)
    y = remat(lambda x: Times.apply(x, box.get()))(x).sum()
    try:
        y.backward()
    except RematError as error:
        assert "lambda" in str(error)
        assert "Pass it as an argument" in str(error)
    else:
        assert_same((x.grad, w.grad), (w.detach(), x.detach()))


def test_an_intermediate_of_before_is_differentiated_too() -> None:
    """Its graph goes on beyond the call."""
    for ck in (remat, plain):
        v = leaf(numbers(3))
        w = v.exp()
        ck(lambda x: x * w)(leaf(numbers(3))).sum().backward()
        assert_same(v.grad, v.detach().exp() * numbers(3))


# Errors of torch's, or of the user's own, that a rerun raises.


def by_checkpoint(fun: Fun) -> Fun:
    return lambda x: checkpoint(fun, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "who"), [(remat, "Sequential.forward"), (by_checkpoint, "a checkpointed function|Sequential")]
)
def test_an_error_of_a_rerun_says_so(kind: Any, who: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    y = kind(model)(torch.ones(2, 3))
    model.double()
    with pytest.raises(RuntimeError, match="dtype") as caught:
        y.sum().backward()
    (note,) = caught.value.__notes__
    assert re.match(rf"Raised while ({who}) ran again for the backward pass\.", note)


@pytest.mark.parametrize("layer", [nn.LazyLinear(3), nn.LazyBatchNorm1d()], ids=["linear", "norm"])
def test_lazy_modules(layer: nn.Module) -> None:
    model, x = nn.Sequential(layer), leaf(torch.ones(4, 3))
    match = "Sequential.forward calls a lazy module that has yet to make its parameters, .* Call it once before"
    with pytest.raises(RematError, match=match):
        remat(model)(x)
    with torch.no_grad():
        model(x)
    remat(model)(x).sum().backward()


class Interrupted(dict[str, Any]):
    """Parameters: Ctrl-C comes as a rerun sets this one of them."""

    at: str | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        if key == self.at:
            self.at = None
            raise KeyboardInterrupt
        super().__setitem__(key, value)


@pytest.mark.parametrize("at", ["weight", "bias"])
def test_ctrl_c_while_a_rerun_fills_a_module_leaves_its_parameters(at: str) -> None:
    module, x = nn.Linear(3, 3).double(), numbers(2, 3)
    parameters = dict(module.named_parameters())
    module._parameters = Interrupted(module._parameters)  # type: ignore[assignment]
    for p in parameters.values():
        p.register_hook(lambda g: g)  # so the rerun has a stand-in for each
    y = remat(lambda x: module(x).tanh())(x).sum()
    module._parameters.at = at  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        y.backward()
    assert all(getattr(module, name) is p for name, p in parameters.items())
    results = [ck(lambda x: module(x).tanh())(x).sum() for ck in (remat, plain)]
    assert_same(*[torch.autograd.grad(y, [*parameters.values()]) for y in results])
