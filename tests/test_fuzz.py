"""Random programs under random nests of transforms and random policies: the same with `remat` as without it.

`make fuzz N=20000` tries more of them than the test run does, and other ones each time.
"""

import functools
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import optree
import pytest
import torch
from fuzz_programs import (
    COUNTS,
    FORWARD,
    Example,
    Net,
    SinTimes,
    autograd_inside,
    backward,
    double_backward,
    examples,
    scalar,
    scalar_aux,
    scan,
    vjp_later,
    vjp_never,
    vjp_once,
    vjp_twice,
)
from helpers import assert_same, numbers, plain
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, functionalize, grad, hessian, vmap

from remat import _torch_internals as internals
from remat import remat
from remat.debug import LiveBytes
from remat.policies import (
    Policy,
    dots_saveable,
    everything_saveable,
    offload_ops,
    recompute_ops,
    save_at_most,
    save_every,
    save_ops,
)


def run(example: Example, decorator: Any) -> tuple[Any, LiveBytes]:
    """The result, and the meter of what is alive. Whatever happens, no transform or mode is left behind."""
    meter = LiveBytes()
    # Forward AD makes zeros that crash torch where a mode sees them; linearize leaves cycles of its own.
    unmetered = any(word in example.source for word in (*FORWARD, "linearize"))
    try:
        with nullcontext() if unmetered else meter:
            return example.run(decorator), meter
    finally:
        assert internals.stack_depth() == 0
        assert internals.function_modes() == []
        assert not internals.forward_ad_active()
        assert torch.is_grad_enabled()


def with_zeros(result: Any, like: Any) -> Any:
    """Zeros for None where the other has a tensor: the gradient of what a result does not depend on."""

    def zeros(a: Any, b: Any) -> Any:
        return torch.zeros_like(b) if a is None and isinstance(b, torch.Tensor) else a

    return optree.tree_map(zeros, result, like, none_is_leaf=True, namespace="torch")


def scaled(result: Any, like: Any) -> Any:
    """Each tensor over the largest element of its like: what rounds a large element is large for a small one."""

    def over(a: Any, b: Any) -> Any:
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and b.is_floating_point()):
            return a
        return a / b.detach().abs().amax().clamp(min=1) if b.numel() else a

    return optree.tree_map(over, result, like, none_is_leaf=True, namespace="torch")


# What may be an error in place of a right result, and what the error says.
REFUSED = [
    ("SinTimes", "Pass it as an argument"),
    ("Slots(", "Pass it as an argument"),
    ("'b': (", "Pass it as an argument"),  # a tensor in a tuple in a dict, handed straight to a transform
    ("register_hook", "puts a hook on a tensor"),
    ("functionalize", "let the function read view.clone()"),
    # Torch's own, for a tensor that is counted up: autograd goes through all operands of a call.
    *((f".{change}", "modified by an inplace operation") for change in COUNTS),
    # Torch's own, for an operand that some of the results do not depend on: autograd goes through it all the same.
    ("functionalize", "derivative for aten::copy is not implemented"),
    # Torch's own, for a change in place of a result whose elements share memory.
    ("expand(", "more than one element of the written-to tensor"),
]


def refused(example: Example, error: Exception) -> bool:
    """Whether an error may be raised in place of a right result."""
    return any(word in example.source and says in str(error) for word, says in REFUSED)


def agrees(example: Example, policy: Policy | None) -> bool:
    """Compare with the plain function; False where that fails, because torch can't do it."""
    if "mutations_and_views" in example.source and "detach()" in example.source:
        return False  # `detach_copy` has no derivative
    try:
        expected, plain_meter = run(example, plain)
    except Exception:
        return False
    stream = torch.get_rng_state()
    try:
        actual, meter = run(example, partial(remat, policy=policy))
    except RuntimeError as error:
        if refused(example, error):
            return True
        raise
    assert torch.equal(torch.get_rng_state(), stream)
    expected = with_zeros(expected, like=actual)
    assert_same(scaled(actual, like=expected), scaled(expected, like=expected), rounding=1e-8)
    del actual, expected
    assert meter.current <= plain_meter.current, "what remat keeps is freed with the result, without gc"
    return True


POLICIES = [
    everything_saveable,
    dots_saveable,
    ~dots_saveable,
    save_ops("sin", "tanh", "mul"),
    save_ops("copy_", "add_", "mul_", "clone", "fill_", "zeros", "empty_like"),
    offload_ops("sin", "tanh", "mm", "mul", "clone", "mul_", "add_"),
    recompute_ops("mul", "clone"),
    save_at_most(30),
    save_every(2, "sin", "mul", "tanh", "mm"),
]


@pytest.mark.filterwarnings("ignore")  # what torch says once per process would make a replay differ
def test_random_programs(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    """CI tries the same few hundred each time, and stops at the first failure. `make fuzz` goes on, and lists all."""
    wanted = request.config.getoption("--fuzz-examples")
    tried: Counter[bool] = Counter()
    failures: list[str] = []
    phases = [Phase.generate] if wanted else [*Phase]

    @settings(max_examples=int(wanted or 200), derandomize=not wanted, report_multiple_bugs=False, phases=phases)
    @given(examples(), st.sampled_from([None] * len(POLICIES) + POLICIES))
    def same_as_plain(example: Example, policy: Policy | None) -> None:
        gc.disable()
        try:
            agreed = agrees(example, policy)
        except Exception as error:
            if not wanted:
                raise
            failures.append(f"policy={policy}{example!r}{type(error).__name__}: {error}")
            with capsys.disabled():  # now: a long run may be stopped
                print("", failures[-1], sep="\n")
            return
        finally:
            gc.enable()
        tried[agreed] += 1
        if not agreed:
            reject()

    same_as_plain()
    if wanted:
        with capsys.disabled():
            print(f"\nfuzz: {tried[True]} examples agree, {len(failures)} fail; {tried[False]} are beyond torch itself")
    assert not failures
    assert tried[False] < 0.2 * tried.total()


# Programs that were wrong once.


def one_tensor_is_two_operands(ck: Any, x: Tensor, y: Tensor) -> Tensor:
    def outer(xs: list[Tensor], ys: list[Tensor]) -> Any:
        def body(carry: Tensor, step: Tensor) -> Any:
            z = ys[1].clone()
            z.unsqueeze(0)[..., :2].sub_(0.5)
            ck(lambda z: z * ys[0] + step)(z)
            return torch.tanh(carry + y.sum()), xs[0]

        return scan(ck, body, xs[1], torch.stack([ys[0], 0.5 * ys[0], torch.sin(ys[0])]), None)[1]

    return ck(outer)([x, x], [y, y])


def operands_that_are_differentiated_later(ck: Any, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    y = ck(lambda: torch.zeros_like(x) + x)()
    z = ck(lambda: torch.sin(y) * y)()

    def outer(a: Tensor) -> Tensor:
        b = a / (1 + z * z)
        c = torch.zeros_like(z)
        ck(lambda b: (SinTimes.apply(c, x), b))(b)
        return z

    return y, z, ck(outer)(x)


def a_list_that_an_inner_function_returns_from(ck: Any, x: Tensor, y: Tensor) -> Any:
    held = [y.sum().detach()]
    rows = scan(ck, lambda c, _: (c + x.sum(), x), held[0], torch.stack([held[0], held[0].cos()]), None)
    total, ys = scan(ck, lambda c, _: (c + rows[0].sum(), held[0]), held[0], torch.stack([*rows[1], rows[1][0]]), None)
    return ys, scan(ck, lambda c, _: (c + (ys.sum() + 2 * total.sum()), c), total, torch.stack([total, total]), None)


def one_tensor_in_two_places_of_a_module(ck: Any, x: Tensor, _: Tensor) -> Tensor:
    held = {"r": [x, x]}

    def outer(bias: Tensor, h: Tensor = held["r"][0]) -> Tensor:
        return functional_call(Net(ck), {"linear.weight": held["r"][1], "linear.bias": bias}, (h,)).sin()

    return ck(outer)(bias=held["r"][0])


def a_copy_without_a_derivative(ck: Any, x: Tensor, y: Tensor) -> Tensor:
    def outer(z: Tensor) -> Tensor:
        ck(lambda: torch.zeros_like(z).copy_(y))()  # under functionalize, by a `copy` that torch can't differentiate
        return z * 2

    return ck(outer)(x) * y


def a_constant_that_a_call_inside_gives_back(ck: Any, x: Tensor, _: Tensor) -> Tensor:
    held = [x.clone().detach()]

    def outer(_: Tensor, x: Tensor = x) -> Tensor:
        y = ck(lambda _: held[0])(x)
        return ck(lambda _: x.sin())(y)

    return ck(outer)(held[0])


WRONG_ONCE: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
    (one_tensor_is_two_operands, lambda f: vjp_never(hessian(scalar(functionalize(f))))),
    (operands_that_are_differentiated_later, lambda f: backward(vjp_later(hessian(scalar(f))))),
    (a_list_that_an_inner_function_returns_from, lambda f: hessian(scalar(grad(scalar(f))))),
    (one_tensor_in_two_places_of_a_module, lambda f: grad(scalar(f))),
    (
        a_constant_that_a_call_inside_gives_back,
        lambda f: lambda x, _: grad(scalar_aux(vjp_twice(vjp_twice(lambda x: f(x, x)))), has_aux=True)(x),
    ),
    (a_copy_without_a_derivative, lambda f: double_backward(autograd_inside(functionalize(f)))),
]


@pytest.mark.parametrize(("program", "transform"), WRONG_ONCE, ids=lambda f: f.__name__)
def test_a_program_that_was_wrong_once(program: Any, transform: Any) -> None:
    args = (numbers(3, 3) if program is one_tensor_in_two_places_of_a_module else numbers(3)), numbers(3, seed=1)
    expected = transform(lambda *args: program(plain, *args))(*args)
    assert_same(transform(lambda *args: program(remat, *args))(*args), expected)


def test_a_default_that_is_never_read_is_an_operand_of_the_outer_function_too() -> None:
    def program(ck: Any, x: Tensor, y: Tensor) -> Tensor:
        held = [x.unsqueeze(0)]

        def outer(h: Tensor = held[0]) -> Tensor:
            return h.sin() + ck(lambda z, other=held[0]: z.sin())(y).sum()

        return ck(outer)().logsumexp(-1)

    def run(ck: Any) -> Any:
        return backward(vjp_once(vmap(functools.partial(program, ck))))(numbers(2, 3), numbers(2, 3, seed=1))

    assert_same(run(functools.partial(remat, policy=everything_saveable)), run(plain))
