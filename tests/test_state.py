"""What a function reads and writes outside changes between forward and rerun: right, or an error, never silent."""

import contextlib
import functools
import gc
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stateful_programs
import torch
from helpers import (
    DECORATORS,
    KEEPS,
    SOME_TRANSFORMS,
    TRANSFORMS,
    CountOps,
    assert_same,
    at_an_address_of,
    in_turn,
    leaf,
    numbers,
    plain,
    with_constants,
)
from stateful_programs import Stateful
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional as F

from remat import CheckpointError, RematError, checkpoint, fori_loop, is_rerunning, policies, remat, scan
from remat.debug import LiveBytes
from remat.random import key, keyed

pytestmark = KEEPS
Decorator = Callable[[Any], Any]
CHECKED = pytest.mark.parametrize("transform", [".backward()", "grad"])


def gradient(program: Callable[[Decorator, Tensor], Tensor], ck: Decorator, transform: str) -> Tensor:
    if transform == "grad":
        return grad(lambda x: program(ck, x).sum())(numbers(3))
    x = leaf(numbers(3))
    return torch.autograd.grad(program(ck, x).sum(), x)[0]


def agree(program: Callable[[Decorator, Tensor], Tensor], transform: str) -> None:
    expected = gradient(program, plain, transform)
    assert_same(gradient(program, remat, transform), expected)


def right_or_error(run: Callable[[Decorator], Any], ck: Decorator = remat) -> None:
    """The same as with the plain function, or an error of remat's: never silently wrong."""
    expected = run(plain)
    try:
        actual = run(ck)
    except (CheckpointError, RematError):
        return
    assert_same(actual, expected)


def by_checkpoint(use_reentrant: bool) -> Decorator:
    return lambda fun: lambda x: checkpoint(fun, x, use_reentrant=use_reentrant)


MIXED: dict[str, Decorator] = {"remat": remat, "non-reentrant": by_checkpoint(False), "reentrant": by_checkpoint(True)}
NESTS: dict[str, Decorator] = {
    "alone": remat,
    "in itself": lambda fun: remat(lambda x: remat(fun)(x).cos()),
    "twice in itself": lambda fun: remat(lambda x: remat(remat(fun))(x).cos()),
    "under a policy": lambda fun: remat(lambda x: remat(fun)(x).cos(), policy=policies.save_ops("mul")),
}


# What is written in place is written once.


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("program", stateful_programs.IN_PLACE)
def test_what_is_written_in_place_is_written_once(program: Any, nest: str, calls: int) -> None:
    results = []
    for ck in (plain if nest == "alone" else lambda fun: lambda x: fun(x).cos(), NESTS[nest]):
        x, module = leaf(numbers(3)), Stateful(program)
        y: Any = x
        for _ in range(calls):
            y = ck(module)(y)
        results.append((torch.autograd.grad(y.sum(), x), module.state()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("outer", MIXED)
@pytest.mark.parametrize("inner", MIXED)
@pytest.mark.parametrize("program", stateful_programs.IN_PLACE)
def test_what_is_written_in_place_in_mixed_nests(program: Any, inner: str, outer: str) -> None:
    def run(inner: Decorator, outer: Decorator) -> Any:
        x, module = leaf(numbers(3)), Stateful(program)
        for i in range(2):
            fun = inner(module)
            y = outer(lambda x, fun=fun: fun(x).cos())(x * (i + 1))
            y.sum().backward(retain_graph=True)
        return x.grad, module.state()

    assert_same(run(MIXED[inner], MIXED[outer]), run(plain, plain))


@CHECKED
def test_a_counter_in_a_cell(transform: str) -> None:
    ends = []

    def program(ck: Decorator, x: Tensor) -> Tensor:
        count = torch.zeros((), dtype=x.dtype)

        def fun(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return x.sin() * count.clone()

        y = ck(fun)(ck(fun)(x))
        ends.append(count)
        return y

    agree(program, transform)
    assert_same(ends[1], ends[0])


def scaled_by_a_hook(x: Tensor, ck: Decorator, of: str) -> tuple[Tensor, Any]:
    """A hook of a module writes to a variable that the function reads. Two calls, each with its own scale."""
    scale: Any = torch.tensor(2.0, dtype=x.dtype) if of == "a tensor" else 2.0
    net = nn.Tanh()

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal scale
        scale = out.detach().abs().max() if of == "a tensor" else scale + 1

    net.register_forward_hook(hook)
    y = ck(lambda x: (x * scale + net(x * scale) * scale).sin())(x)
    y = ck(lambda x: (x * scale + net(x * scale) * scale).sin())(y)
    return y, scale


@pytest.mark.parametrize("of", ["a number", "a tensor"])
@pytest.mark.parametrize("ck", DECORATORS.values(), ids=DECORATORS)
def test_a_hook_that_writes_to_a_variable_of_the_function(ck: Decorator, of: str) -> None:
    results = []
    for way in (ck, plain):
        x = leaf(numbers(3))
        y, scale = scaled_by_a_hook(x, way, of)
        y.sum().backward()
        results.append((y, scale, x.grad))
    assert_same(*results)


@pytest.mark.parametrize("of", ["a number", "a tensor"])
@pytest.mark.parametrize("transform", ["grad", "grad(grad)", "jvp(grad)", "hessian", "double backward"])
def test_a_hook_that_writes_to_a_variable_under_transforms(transform: str, of: str) -> None:
    actual, expected = (
        TRANSFORMS[transform](lambda x, ck=ck: ck(lambda x: scaled_by_a_hook(x, remat, of)[0])(x), numbers(3))
        for ck in (remat, plain)
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("ck", DECORATORS.values(), ids=DECORATORS)
def test_a_variable_that_a_call_counts_up(ck: Decorator) -> None:
    """It counts once for each call, and each call has its own number."""

    def run(ck: Decorator) -> tuple[int, Tensor]:
        n, x = 0, leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            nonlocal n
            n += 1
            return (x * n).sin()

        ck(fun)(ck(fun)(x)).sum().backward()
        return n, x.grad

    assert_same(run(ck), run(plain))


@pytest.mark.parametrize("ck", DECORATORS.values(), ids=DECORATORS)
def test_a_variable_that_the_first_call_sets(ck: Decorator) -> None:
    """It holds nothing in the rerun, as at the call."""

    def run(ck: Decorator) -> tuple[float, Tensor]:
        x = leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            nonlocal scale
            try:
                return x.sin() * scale * 3
            except NameError:
                scale = 2.0
                return x.sin() * scale

        scale: float
        ck(fun)(x).sum().backward()
        return scale, x.grad

    assert_same(run(ck), run(plain))


@pytest.mark.parametrize("ck", DECORATORS.values(), ids=DECORATORS)
def test_a_hook_that_puts_a_feature_into_a_variable(ck: Decorator) -> None:
    def run(ck: Decorator) -> Tensor:
        x, net, feature = leaf(numbers(3)), nn.Tanh(), None

        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            nonlocal feature
            feature = out

        net.register_forward_hook(hook)
        ck(lambda x: (net(x) * feature).sin())(x).sum().backward()
        return x.grad

    assert_same(run(ck), run(plain))


def test_an_outside_tensor_that_is_written_in_a_nest_of_three() -> None:
    def run(inner: Decorator, middle: Decorator, outer: Decorator) -> Any:
        state, count, x = [numbers(3, seed=1)], numbers(3, seed=2), leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            nonlocal count
            y = (x + state[0].clone()).tanh()
            count += 1
            return y

        first = inner(fun)
        second = middle(lambda x: first(x).cos())
        (gradient,) = torch.autograd.grad(outer(lambda x: second(x).cos())(x).sum(), x)
        return gradient, count

    assert_same(run(remat, remat, remat), run(plain, plain, plain))
    assert_same(run(remat, by_checkpoint(False), remat), run(plain, plain, plain))


@CHECKED
def test_data_changed_in_place(transform: str) -> None:
    ends = []

    def program(ck: Decorator, x: Tensor) -> Tensor:
        mean = torch.zeros(3, dtype=torch.float64)

        def fun(x: Tensor) -> Tensor:
            mean.data.mul_(0.9).add_(1.0)
            return (x * mean).sin()

        y = ck(fun)(x)
        ends.append(mean)
        return y

    agree(program, transform)
    assert_same(ends[1], ends[0])


@CHECKED
def test_data_of_a_new_tensor_changed_in_place(transform: str) -> None:
    """Such a write counts as one to the tensor itself under some transforms only."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        def fun(x: Tensor) -> Tensor:
            table = torch.zeros(3, dtype=torch.float64)
            table.data[1:].copy_(torch.tensor([0.2, 0.3]))
            alias = table.data
            table += 1
            return (x * table).sin() + alias

        return ck(fun)(x)

    agree(program, transform)


@CHECKED
@pytest.mark.parametrize("order", ["read, write", "write, read, write", "write, read"])
@pytest.mark.parametrize("part", [lambda t: t[:2], lambda t: t[::2]], ids=["slice", "every second"])
def test_a_change_of_a_part_of_what_is_read(part: Any, order: str, transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        whole = torch.ones(3, dtype=x.dtype)
        held = [part(whole), whole]

        def fun(x: Tensor) -> Tensor:
            for step in order.split(", "):
                if step == "read":
                    x = (x + held[1]).sin()
                else:
                    held[0].mul_(2)
            return x

        return ck(fun)(x)

    if order == "write, read":
        agree(program, transform)
        return
    gradient(program, plain, transform)
    with pytest.raises(RematError, match=r"two tensors .*share memory, and changes that in place.*take views of it"):
        gradient(program, remat, transform)


# Python's own state happens again. Where another tensor is read then, it is right or an error.


@CHECKED
@pytest.mark.parametrize("nest", ["alone", "in itself"])
@pytest.mark.parametrize("program", stateful_programs.REPLACED)
def test_tensors_that_the_function_replaces(program: Any, nest: str, transform: str) -> None:
    def run(ck: Decorator) -> Tensor:
        def twice(ck: Decorator, x: Tensor) -> Tensor:
            module = Stateful(program)
            return ck(module)(ck(module)(x))

        return gradient(
            twice, ck if ck is not plain or nest == "alone" else lambda fun: lambda x: fun(x).cos(), transform
        )

    right_or_error(run, NESTS[nest])


class Slotted:
    __slots__ = ("t",)


class OfAClass:
    t: Any = None


NAMED: Any = None


def a_list() -> Any:
    held: list[Any] = [None]
    return (lambda t: held.__setitem__(0, t)), (lambda: held[0])


def a_dict_in_a_list() -> Any:
    held: list[dict[str, Any]] = [{}]
    return (lambda t: held[0].update(t=t)), (lambda: held[0]["t"])


def a_tuple_in_a_list() -> Any:
    held: list[Any] = [None]
    return (lambda t: held.__setitem__(0, (t,))), (lambda: held[0][0])


def an_attribute() -> Any:
    held = SimpleNamespace(t=None)
    return (lambda t: setattr(held, "t", t)), (lambda: held.t)


def a_module() -> Any:
    held = nn.Module()
    held.register_buffer("t", None)
    return (lambda t: held.__setattr__("t", t)), (lambda: held.t)


def a_slot() -> Any:
    held = Slotted()
    return (lambda t: setattr(held, "t", t)), (lambda: held.t)


def a_class() -> Any:
    return (lambda t: setattr(OfAClass, "t", t)), (lambda: OfAClass.t)


def a_deque() -> Any:
    held: deque[Any] = deque([None])
    return (lambda t: held.__setitem__(0, t)), (lambda: held[0])


def a_global() -> Any:
    return (lambda t: globals().__setitem__("NAMED", t)), (lambda: NAMED)


PLACES = [a_list, a_dict_in_a_list, a_tuple_in_a_list, an_attribute, a_module, a_slot, a_class, a_deque, a_global]
EACH_PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


KEPT = {
    "result": lambda y: y,
    "view": lambda y: y[:],
    "constant": lambda y: y.detach(),
    "mask": lambda y: (y > 0).double(),
}
EACH_KEPT = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


@CHECKED
@EACH_PLACE
@EACH_KEPT
def test_a_state_that_is_replaced_by_a_result(place: Any, kept: Any, transform: str) -> None:
    def run(ck: Decorator) -> Any:
        put, get = place()
        put(numbers(3))

        def step(x: Tensor) -> Tensor:
            y = x.sin() * get()
            put(kept(y))
            return y

        return gradient(lambda ck, x: ck(step)(x), ck, transform)

    with pytest.raises(CheckpointError, match=r"which its forward did not read|other tensors"):
        run(remat)


@CHECKED
@pytest.mark.parametrize("place", [p for p in PLACES if p not in (a_slot, a_class)])
@EACH_KEPT
def test_a_state_that_is_reset_before_the_backward(place: Any, kept: Any, transform: str) -> None:
    """The rerun puts another in its place, so that nothing holds it at the end."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        put, get = place()
        put(numbers(3))

        def step(x: Tensor) -> Tensor:
            y = x.sin() * get()
            put(kept(y))
            return y.cos()

        out = ck(step)(x)
        put(numbers(3, seed=1))
        return out

    with pytest.raises(CheckpointError, match=r"which its forward did not read"):
        gradient(program, remat, transform)


def halve(held: Any) -> None:
    held.t = held.t * 0.5


def halve_in_place(held: Any) -> None:
    held.t.mul_(0.5)


def count_up(held: Any) -> None:
    held.t += 1


def exchange_two(held: Any) -> None:
    held.t, held.other = held.other, held.t


@CHECKED
@pytest.mark.parametrize("after", [False, True], ids=["read_later", "read_before"])
@pytest.mark.parametrize("change", [halve, halve_in_place, count_up, exchange_two])
def test_a_state_that_is_made_on_first_use_and_changed(change: Any, after: bool, transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        held = SimpleNamespace(t=None)

        def step(x: Tensor) -> Tensor:
            if held.t is None:
                held.t, held.other = torch.full((3,), 2.0).double(), torch.full((3,), 3.0).double()
            before = held.t.clone() * held.other
            change(held)
            return x.sin() * (before if after else held.t.clone())

        return ck(step)(x)

    with pytest.raises(CheckpointError, match=r"step (reads a tensor of shape|.*other tensors)"):
        gradient(program, remat, transform)


@CHECKED
def test_a_table_that_is_made_on_first_use_and_changed_before_the_backward(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        held = SimpleNamespace(t=None)

        def step(x: Tensor) -> Tensor:
            if held.t is None:
                held.t = torch.full((3,), 2.0).double()
            return x.sin() * held.t

        out = ck(step)(x)
        held.t.mul_(2)
        return out.cos()

    with pytest.raises(CheckpointError, match=r"step reads from outside has been modified by an inplace operation"):
        gradient(program, remat, transform)


BODIES: dict[str, Any] = {
    "alone": remat,
    "remat in remat": lambda fun: remat(lambda x: remat(fun)(x) * 1),
    "remat three times": lambda fun: remat(remat(remat(fun))),
    "remat in checkpoint": lambda fun: lambda x: checkpoint(remat(fun), x, use_reentrant=False),
    "checkpoint in remat": lambda fun: remat(lambda x: checkpoint(fun, x, use_reentrant=False)),
    "scan": lambda fun: lambda x: scan(lambda c, _: (fun(c), None), x, length=3)[0],
    "fori_loop": lambda fun: lambda x: fori_loop(0, 3, lambda _, c: fun(c), x),
}


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(vmap)", "grad(grad)", "jacrev"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_table_that_is_made_on_first_use(body: Any, transform: str) -> None:
    held = SimpleNamespace()

    def step(x: Tensor) -> Tensor:
        if held.t is None:
            held.t = torch.zeros(3).double()
            held.t[1:] = torch.arange(2).double() * 2
        return (x * held.t + x).sin()

    def run(body: Any) -> Any:
        held.t = None
        return TRANSFORMS[transform](body(step), numbers(3))

    steps = 3 if body in (BODIES["scan"], BODIES["fori_loop"]) else 1
    assert_same(run(body), run(lambda fun: in_turn(*[fun] * steps)))


@pytest.mark.parametrize("transform", ["vmap(grad)", "jacfwd", "hessian"])
def test_a_table_that_is_made_on_first_use_of_what_is_mapped(transform: str) -> None:
    held = SimpleNamespace()

    def step(x: Tensor) -> Tensor:
        if held.t is None:
            held.t = x.detach().sign() + 2
        return (x * held.t).sin()

    def run(ck: Any) -> Any:
        held.t = None
        return TRANSFORMS[transform](ck(step), numbers(3))

    assert_same(run(remat), run(plain))


def test_a_table_that_is_made_on_first_use_of_what_is_mapped_at_another_level() -> None:
    """The rerun runs below `grad`, and its `vmap` is another one."""
    held = SimpleNamespace(t=None)

    def step(x: Tensor) -> Tensor:
        if held.t is None:
            held.t = x.detach().cos()
        return (x.sin() * held.t).sum()

    with pytest.raises(CheckpointError, match="which its forward did not read"):
        grad(lambda x: vmap(remat(step))(x).sum())(numbers(2, 3))


def test_a_state_with_a_graph_that_is_replaced_is_found_by_a_backward_in_another_thread() -> None:
    """The sequence numbers of that thread begin at 0."""
    held = SimpleNamespace(t=numbers(3))

    def step(x: Tensor) -> Tensor:
        held.t = x.sin() * held.t
        return held.t.cos()

    out = remat(step)(leaf(numbers(3))).sum()
    with ThreadPoolExecutor(1) as pool, pytest.raises(CheckpointError, match=r"which its forward did not read"):
        pool.submit(out.backward).result()


@pytest.mark.parametrize("end", [lambda y: y, lambda y: y * 2], ids=["skipped", "run"])
def test_a_cell_of_an_inner_call_that_is_replaced_before_the_backward(end: Any) -> None:
    scale = numbers(3)
    held = SimpleNamespace(block=remat(lambda x: (x * scale).sin()))
    out = remat(lambda x: end(held.block(x.exp())))(leaf(numbers(3)))
    scale = numbers(3, seed=1)
    with pytest.raises(CheckpointError, match=r"which its forward did not read"):
        out.sum().backward()


def test_a_state_that_a_rerun_replaces_after_the_caller_has_restored_it() -> None:
    first = numbers(3)
    held = SimpleNamespace(t=first)

    def step(x: Tensor) -> Tensor:
        y = x.sin() * held.t
        held.t = y.detach()
        return y.cos()

    def loss(x: Tensor) -> Tensor:
        out = remat(step, policy=policies.everything_saveable)(x).sum()
        held.t = first
        return out

    with pytest.raises(CheckpointError, match=r"which its forward did not read"):
        grad(lambda x: grad(loss)(x).sin().sum())(numbers(3))


INSIDE: dict[str, Any] = {
    "vmap": lambda fun: lambda x: vmap(fun)(x.expand(2, *x.shape))[0],
    "grad": lambda fun: grad(lambda x: fun(x).sum()),
    "jvp": lambda fun: lambda x: jvp(fun, (x,), (x.cos(),))[1],
    "vjp": lambda fun: lambda x: vjp(fun, x)[1](x.cos())[0],
}


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)", "jacrev"])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@EACH_KEPT
def test_a_state_that_is_replaced_inside_a_transform(kept: Any, inside: Any, transform: str) -> None:
    """Its wrapper is of a transform that is over when the rerun finds it."""
    held = SimpleNamespace(t=numbers(3))

    def step(x: Tensor) -> Tensor:
        y = x.sin() * held.t
        held.t = kept(y)
        return y.cos()

    with pytest.raises(CheckpointError, match=r"which its forward did not read|other tensors|differs"):
        TRANSFORMS[transform](remat(inside(step)), numbers(3))


def test_a_state_that_the_first_of_two_backwards_replaces_inside_a_vmap() -> None:
    held = SimpleNamespace(t=numbers(3))
    first = held.t

    def step(x: Tensor) -> Tensor:
        y = x.sin() * held.t
        held.t = y.detach()
        return y.cos()

    x = leaf(numbers(3))
    y = remat(INSIDE["vmap"](step))(x).sum()
    held.t = first
    torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(CheckpointError, match="which its forward did not read"):
        torch.autograd.grad(y, x)


@CHECKED
@EACH_PLACE
@pytest.mark.parametrize("alive", [True, False], ids=["alive", "gone"])
@pytest.mark.parametrize("kind", ["mask", "constant", "leaf"])
def test_a_tensor_that_is_replaced_before_the_backward(place: Any, kind: str, alive: bool, transform: str) -> None:
    """The loop goes on to the next batch: its mask is in the place of this one's."""
    first, second = numbers(3, seed=1), numbers(3, seed=2)
    if kind == "mask":
        first, second = first > 0, second > 0
    kept = []

    def run(ck: Decorator) -> Any:
        put, get = place()
        w, v = first.clone().requires_grad_(kind == "leaf"), second.clone().requires_grad_(kind == "leaf")
        if alive:
            kept.extend([w, v])

        def program(ck: Decorator, x: Tensor) -> Tensor:
            nonlocal w
            put(w)
            y = ck(lambda x: (x.sin() * get()).cos())(x)
            put(v)
            w = None  # type: ignore[assignment]
            return y

        return gradient(program, ck, transform)

    right_or_error(run)


@CHECKED
@pytest.mark.parametrize("grads", [(False, False), (True, True)])
@pytest.mark.parametrize("hold", [list, lambda ws: SimpleNamespace(a=ws)], ids=["list", "attribute"])
def test_tensors_that_change_places(hold: Any, grads: tuple[bool, bool], transform: str) -> None:
    def run(ck: Decorator) -> Any:
        ws = [numbers(3, seed=1 + i).requires_grad_(g) for i, g in enumerate(grads)]
        held = hold(ws)

        def program(ck: Decorator, x: Tensor) -> Tensor:
            def fun(x: Tensor) -> Tensor:
                a, b = held if isinstance(held, list) else held.a
                return torch.sin(x * a) * b

            y = ck(fun)(x)
            (held if isinstance(held, list) else held.a).reverse()
            return y

        return gradient(program, ck, transform)

    right_or_error(run)


@CHECKED
def test_what_arguments_hold_is_as_at_the_call(transform: str) -> None:
    """Lists and dicts are made anew with what they held, numbers too."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        given = {"xs": [x, 2.0], "scale": 3.0, "w": numbers(3, seed=1)}
        y = ck(lambda d: (d["xs"][0] * d["xs"][1]).sin() * d["scale"] * d["w"])(given)
        given["xs"][1] = 5.0
        given["scale"] = 7.0
        given["w"] = numbers(3, seed=2)
        return y

    agree(program, transform)


@CHECKED
def test_cells_defaults_partials_and_self_are_as_at_the_call(transform: str) -> None:
    class Scaled:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def method(self, x: Tensor) -> Tensor:
            return x.sin() * self.scale

    def program(ck: Decorator, x: Tensor) -> Tensor:
        for k in (1.0, 2.0, 3.0):
            scaled = Scaled(k)
            x = ck(lambda x: torch.sin(x * k))(x)
            x = ck(lambda x, k=k: torch.sin(x * k))(x)
            x = ck(scaled.method)(x)
            x = ck(lambda x: scaled.method(x))(x)
        return x

    agree(program, transform)


def test_modules_that_change_places_are_an_error() -> None:
    layers, x = nn.ModuleList([nn.Tanh(), nn.Sigmoid()]), leaf(numbers(3))
    y = remat(lambda x: layers[0](x).sin())(x)
    layers[0], layers[1] = layers[1], layers[0]
    with pytest.raises(CheckpointError, match=r"lambda.* differs .*call 1 it calls .*sigmoid, at .*tanh"):
        y.sum().backward()


FLAG = [True]


@pytest.mark.parametrize("depth", [0, 1, 2])
@CHECKED
def test_a_flag_that_is_flipped_is_an_error(transform: str, depth: int) -> None:
    """The error names the first call that differs."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        def branch(x: Tensor) -> Tensor:
            return x.cos().sin() if FLAG[0] else x.cos().exp()

        fun: Any = branch
        for _ in range(depth):
            fun = ck(lambda x, inner=fun: ck(inner)(x).tanh())
        FLAG[0] = True
        y = ck(fun)(x)
        FLAG[0] = False
        return y

    with pytest.raises(
        CheckpointError, match=r"differs .*call \d it calls .*(exp|<lambda>|branch), at .*test_state\.py:\d+"
    ):
        gradient(program, remat, transform)


@pytest.mark.parametrize("kind", MIXED.values(), ids=MIXED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_nested_tensor_in_reach(kind: Decorator) -> None:
    kept = {"ragged": torch.nested.nested_tensor([numbers(2), numbers(3)]), "scale": 2.0}
    x = leaf(numbers(3))
    kind(lambda x: x.sin() * kept["scale"])(x).sum().backward()
    assert_same(x.grad, 2 * x.detach().cos())


class Odd:
    """An object that has whatever it is asked for, and a class that says nothing of its module."""

    __module__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__wrapped__":
            raise AttributeError(name)
        return self


class WithOdd(nn.Module):
    odd = Odd()

    def forward(self, x: Tensor) -> Tensor:
        return (self.odd, x.sin())[1]


@pytest.mark.parametrize("kind", MIXED.values())
def test_what_is_only_looked_at_may_be_odd(kind: Decorator) -> None:
    x = leaf(numbers(3))
    kind(WithOdd())(x).sum().backward()
    assert_same(x.grad, x.detach().cos())


def a_list_of_modules(module: nn.Module) -> Any:
    modules = [module]
    return lambda x: modules[0](x)


def an_object_with_a_module(module: nn.Module) -> Any:
    holder = SimpleNamespace(module=module)
    return lambda x: holder.module(x)


# As with torch's, the rerun of a checkpoint reads the buffer that is there then.
@pytest.mark.parametrize(
    ("program", "kind"),
    [(stateful_programs.add_in_place, kind) for kind in MIXED.values()]
    + [(stateful_programs.replace_buffer, MIXED["remat"])],
)
@pytest.mark.parametrize("place", [a_list_of_modules, an_object_with_a_module])
def test_modules_that_others_hold(place: Any, program: Any, kind: Decorator) -> None:
    def run(ck: Decorator) -> Any:
        module, x = Stateful(program), leaf(numbers(3))
        fun = ck(place(module))
        return torch.autograd.grad(fun(fun(x)).sum(), x)

    right_or_error(run, kind)


# Changes in place between forward and backward.


@CHECKED
def test_a_constant_that_is_changed_later(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        w = numbers(3, seed=1)
        out, pullback = vjp(ck(lambda x: x.sin() * w.cos()), x)
        w.add_(1)
        return pullback(torch.ones_like(out))[0]

    with pytest.raises(CheckpointError, match=r"\[3\].*modified by an inplace operation.*clone"):
        gradient(program, remat, transform)


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_state_that_foreach_changes_between_two_calls_is_right_or_an_error(policy: Any) -> None:
    class Exchanges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = numbers(3), numbers(3, seed=1)

        def forward(self, x: Tensor) -> Tensor:
            torch._foreach_add_([self.a], 1.0)
            self.a, self.b = self.b, self.a
            return x.sin() * self.a.clone()

    def run(ck: Decorator) -> Any:
        module, x = ck(Exchanges()), leaf(numbers(3))
        y = module(x) + module(x)
        return torch.autograd.grad(y.sum(), x)

    right_or_error(run, remat(policy=policy))


@CHECKED
def test_a_change_through_a_view_of_another_argument(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        def fun(whole: Tensor, part: Tensor, x: Tensor) -> Tensor:
            part.mul_(2)
            return (whole * x * whole).sin()

        whole = numbers(3, seed=1)
        return ck(fun)(whole, whole[:2], x)

    right_or_error(lambda ck: gradient(program, ck, transform))


def test_requires_grad_on_an_argument() -> None:
    gradients = []
    for ck in (plain, remat):

        def slope(x: Tensor) -> Tensor:
            x.requires_grad_()
            return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

        x = numbers(3)
        ck(slope)(x).square().sum().backward()
        gradients.append(x.grad)
    assert_same(gradients[1], gradients[0])


@CHECKED
def test_a_hook_on_an_argument_acts_once(transform: str) -> None:
    def reversed_gradient(x: Tensor) -> Tensor:
        x.register_hook(lambda g: -g)
        return x.sin()

    agree(lambda ck, x: ck(reversed_gradient)(x * 1), transform)


# Random state.


def test_random_state_that_is_put_back() -> None:
    def fun(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return F.dropout(x, 0.5).sin()

    gradients = []
    for ck in (plain, remat):
        torch.manual_seed(0)
        x = leaf(numbers(8))
        y = ck(fun)(x)
        torch.rand(3)
        gradients += torch.autograd.grad(y.sum(), x)
    assert_same(gradients[1], gradients[0])


def test_draws_of_python_and_of_numpy_are_not_repeated() -> None:
    """Use torch's, or pass what was drawn."""
    drawn: list[tuple[float, float]] = []

    def fun(x: Tensor) -> Tensor:
        drawn.append((random.random(), np.random.rand()))
        return x.sin()

    random.seed(0)
    np.random.seed(0)
    remat(fun)(leaf(numbers(3))).sum().backward()
    random.seed(0)
    np.random.seed(0)
    assert drawn == [(random.random(), np.random.rand()) for _ in range(2)]


@pytest.mark.parametrize("write", [lambda t, n: t.fill_(n), lambda t, n: t.mul_(0.5).add_(n)])
def test_a_write_of_another_number_is_an_error(write: Any) -> None:
    state = numbers(3)

    def fun(x: Tensor) -> Tensor:
        write(state, random.random())
        return (x * state).sin()

    out = remat(fun)(leaf(numbers(3))).sum()
    with pytest.raises(CheckpointError, match=r"changes a tensor in place .* with other tensors, numbers or flags"):
        out.backward()


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
        return x * noise, noise

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return cotangent * ctx.saved_tensors[0], None


@CHECKED
def test_a_generator_handed_to_an_autograd_function(transform: str) -> None:
    left = []

    def program(ck: Decorator, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        y = ck(lambda x: Noise.apply(x, generator)[0].sin())(x)
        left.append(generator)
        return y

    agree(program, transform)
    assert_same(torch.rand(3, generator=left[1]), torch.rand(3, generator=left[0]))


def test_backward_in_several_threads() -> None:
    fun = remat(lambda x: F.dropout(x.sin(), 0.5).exp())
    jobs = []
    for seed in range(4):
        torch.manual_seed(seed)
        x = leaf(torch.ones(50_000, dtype=torch.float64))
        y = fun(fun(x)).sum()
        jobs.append((x, y, torch.autograd.grad(y, x, retain_graph=True)[0]))
    wrong = []

    def work(x: Tensor, y: Tensor, expected: Tensor) -> None:
        for _ in range(5):
            if not torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], expected):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Tensors of other kinds, and caches.


def test_a_leaf_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(3, requires_grad=True)
    with pytest.raises(RematError, match=r"made in inference mode: pass x\.clone\(\)"):
        remat(lambda x: x * 2)(x)
    remat(lambda x: x * 2)(x.clone()).sum().backward()
    assert_same(x.grad, torch.full((3,), 2.0))


def test_an_inference_tensor() -> None:
    with torch.inference_mode():
        mask = numbers(3)
    x = leaf(numbers(3))
    remat(lambda x: (x + mask).sin())(x).sum().backward()
    assert_same(x.grad, (x.detach() + mask).cos())


def test_a_sparse_operand() -> None:
    a, x = torch.eye(3, dtype=torch.float64).to_sparse(), leaf(numbers(3, 2))
    remat(lambda x: torch.sparse.mm(a, x).sin().t())(x).sum().backward()
    assert_same(x.grad, x.detach().cos())


def test_autocast_keeps_no_casts_of_a_rerun() -> None:
    ws = [leaf(numbers(64, 64).float()) for _ in range(3)]
    held = []
    with LiveBytes() as meter, torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            h = torch.ones(2, 64)
            for w in ws:
                h = remat(lambda h, w: torch.tanh(h @ w))(h, w)
            torch.autograd.grad(h.float().sum(), ws)
            del h
            held.append(meter.current)
    assert held[0] == held[2]


# Where the rerun can't find its operands.


def test_a_captured_tensor_out_of_reach() -> None:
    def loss(w: Tensor) -> Tensor:
        held = itertools.repeat(w)
        return remat(lambda x: grad(lambda v: (v * x).sin().sum())(next(held)))(numbers(3)).sum()

    with pytest.raises(
        RematError,
        match=r"lambda.* reads a tensor of shape \[3\].* hands straight to a transform.* Pass it as an argument",
    ):
        grad(loss)(numbers(3))


def test_a_constant_out_of_reach() -> None:
    """The forward takes it for a tensor that the function has made, and the rerun meets it again."""

    def loss(w: Tensor) -> Tensor:
        held = itertools.repeat(w.detach() * 2)
        return remat(lambda x: grad(lambda v: (v.sin() * x).sum())(next(held)))(w).sum()

    with pytest.raises(CheckpointError, match=r"reads a tensor of shape \[3\].*, which its forward did not read"):
        jvp(grad(loss), (numbers(3),), (numbers(3),))


def unseen(fun: Any) -> Any:
    def called(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():  # as an extension does it
            return fun(*args)

    return called


@pytest.mark.parametrize("transform", [".backward()", "grad", "jvp(grad)", "backward over forward AD"])
def test_a_result_in_an_attribute_that_no_torch_function_reads(transform: str) -> None:
    def fun(x: Tensor, ck: Any) -> Tensor:
        held = SimpleNamespace(w=x.cos())
        return ck(lambda x: unseen(lambda x: x.sin() * held.w)(x))(x)

    results = [TRANSFORMS[transform](functools.partial(fun, ck=ck), numbers(3)) for ck in (remat, plain)]
    assert_same(*results)


@pytest.mark.parametrize("transform", [".backward()", "grad", "jvp(grad)"])
def test_a_cell_that_no_torch_function_reads_in_a_call_that_the_rerun_skips(transform: str) -> None:
    def fun(w: Tensor, ck: Any) -> Tensor:
        inner = ck(lambda x: unseen(lambda x: x.sin() * w)(x))
        return ck(lambda x: x + inner(x))(w.cos())

    results = [TRANSFORMS[transform](functools.partial(fun, ck=ck), numbers(3)) for ck in (remat, plain)]
    assert_same(*results)


@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)"])
def test_a_result_out_of_reach_that_is_read_without_a_derivative(transform: str) -> None:
    def fun(x: Tensor, ck: Any) -> Tensor:
        held = itertools.repeat(x.cos())

        def scaled(x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = next(held).sum()
            return x * scale

        return ck(scaled)(x)

    results = [TRANSFORMS[transform](functools.partial(fun, ck=ck), numbers(3)) for ck in (remat, plain)]
    assert_same(*results)


def test_a_call_at_the_end_that_writes() -> None:
    def results(ck: Any) -> Any:
        count = torch.zeros(()).double()

        def inner(x: Tensor) -> Tensor:
            count.add_(1)
            return x.sin() * count

        return TRANSFORMS[".backward()"](ck(lambda x: ck(inner)(x.cos())), numbers(3)), count

    assert_same(results(remat), results(plain))


def test_a_backward_in_another_thread_reads_a_result_that_no_torch_function_made() -> None:
    """Sequence numbers of another thread do not tell that the rerun made it."""
    x = leaf(numbers(3))
    y = remat(lambda x: unseen(torch.sin)(x).cos())(x).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert_same(x.grad, torch.autograd.grad(x.sin().cos().sum(), x)[0])


@pytest.mark.parametrize("then", [lambda y: y[:2], lambda y: y.float()])
@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_another_result_of_an_op_that_no_torch_function_sees(then: Any, transform: str) -> None:
    fun = remat(lambda x: unseen(lambda x: then(x.sin()) if is_rerunning() else x.sin())(x))
    with pytest.raises(CheckpointError, match="returned another structure"):
        TRANSFORMS[transform](fun, numbers(3))


@pytest.mark.parametrize("transform", [".backward()", "grad", "grad(grad)", "vmap(grad)"])
def test_a_state_that_is_taken_out_and_replaced(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        state = [x.cos()]

        def step(x: Tensor) -> Tensor:
            before = state.pop()
            state.append(x.sin())
            return x + before

        return remat(step)(x)

    with pytest.raises(CheckpointError, match=r"reads a tensor of shape .* which its forward did not read"):
        TRANSFORMS[transform](fun, numbers(3))


@pytest.mark.parametrize("inside", [unseen, vmap])
@pytest.mark.parametrize("outside", [plain, grad])
def test_a_captured_leaf_out_of_reach(inside: Any, outside: Any) -> None:
    """A rerun finds the leaf itself, which is not the operand below a transform. Hooks leave it alone."""

    def gradients(ck: Any) -> Any:
        w, x = leaf(numbers(3)), leaf(numbers(3, seed=1))
        held = itertools.repeat(w)
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
        with hooks if outside is plain else contextlib.nullcontext():
            out = outside(ck(lambda x: inside(lambda w, x: w * x.sin())(next(held), x).sum()))(x).sum()
        return torch.autograd.grad(out, w)

    if outside is plain:
        assert_same(gradients(remat), gradients(plain))
        return
    how = "it from outside, and no torch function is seen to read it" if inside is unseen else "hands straight to a"
    with pytest.raises(RematError, match=rf"reads a tensor of shape \[3\].* {how}"):
        gradients(remat)


MASKS: dict[int, Tensor] = {}


def masked(x: Tensor) -> Tensor:
    if len(x) not in MASKS:
        MASKS[len(x)] = x.new_ones(len(x)).cumsum(0)
    return x.sin() * MASKS[len(x)]


@CHECKED
def test_a_table_made_from_an_argument_and_kept(transform: str) -> None:
    MASKS.clear()
    agree(lambda ck, x: ck(masked)(x), transform)
    if transform == ".backward()":
        assert_same(MASKS[3], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


GUARDS: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "shape": lambda table, x: table.shape == x.shape,
    "len": lambda table, x: len(table) == len(x),
    "size": lambda table, x: table.size(0) == x.size(0) and table.numel() == x.numel(),
    "device and dtype": lambda table, x: table.device == x.device and table.dtype == x.dtype,
}


@CHECKED
@pytest.mark.parametrize("guard", GUARDS)
def test_a_table_whose_guard_asks_what_it_is(guard: str, transform: str) -> None:
    """The forward, which finds none, does not ask."""
    table: list[Tensor] = []

    def fun(x: Tensor) -> Tensor:
        if not (table and GUARDS[guard](table[0], x)):
            table[:] = [torch.arange(float(len(x)), dtype=x.dtype)]
        return x.sin() * table[0]

    for ck in (remat, by_checkpoint(False)):
        table.clear()
        assert_same(gradient(lambda ck, x: ck(fun)(x), ck, transform), numbers(3).cos() * table[0])


def test_a_tensor_that_is_read_too_early_after_its_shape_was_asked() -> None:
    first, second = (nn.Parameter(numbers(3, seed=i)) for i in range(2))
    now = [first]

    def fun(x: Tensor) -> Tensor:
        y = x.sin() if now[0].shape == x.shape else x
        y = y * now[0]
        now[0] = second
        return y * now[0]

    y = remat(fun)(leaf(numbers(3)))
    with pytest.raises(CheckpointError, match="other tensors"):
        y.sum().backward()


@CHECKED
def test_the_shape_of_a_tensor_is_a_state(transform: str) -> None:
    """A tensor that the forward has made and never read, but for its shape."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        past: list[Tensor] = [torch.ones(0)]

        def fun(x: Tensor) -> Tensor:
            n = len(past[0])
            past[0] = torch.ones(n + len(x))
            return x.sin() * torch.arange(n, n + len(x))

        return ck(fun)(x)

    with pytest.raises(CheckpointError, match=r"reads a tensor of shape \[3\].* which its forward did not read"):
        gradient(program, remat, transform)


def test_data_of_a_transform() -> None:
    mean = torch.zeros(3, dtype=torch.float64)

    def fun(x: Tensor) -> Tensor:
        y = (x * x - mean).sum()
        mean.data = mean * 0.9 + x.detach() * 0.1
        return y

    for ck in (remat, by_checkpoint(False)):
        with pytest.raises(RematError, match=r"sets the \.data of a tensor of shape \[3\].* Write in place"):
            grad(ck(fun))(numbers(3))
    assert_same(mean, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("transform", ["backward", "grad of the input"])
@pytest.mark.parametrize("change", ["new values", "a copy", "the same memory"])
def test_data_of_a_differentiated_tensor(change: str, transform: str) -> None:
    """`module.to(x.device)` sets the data of parameters to what they are."""
    w = nn.Parameter(numbers(3))

    def fun(x: Tensor) -> Tensor:
        data = w.detach()
        w.data = data * 2 if change == "new values" else data.clone() if change == "a copy" else data.view(3)
        return (w * x * x).sum()

    def run(fun: Callable[[Tensor], Tensor]) -> list[Any]:
        x = leaf(numbers(3))
        if transform == "backward":
            fun(x).backward()
            return [x.grad, w.grad]
        return list(torch.autograd.grad(fun(x), x))

    if change != "the same memory":
        with pytest.raises(RematError, match=r"changes an argument or a captured tensor of shape \[3\].* in place"):
            run(remat(fun))
        return
    expected = run(fun)
    w.grad = None
    assert_same(run(remat(fun)), expected)


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["", "dots"])
def test_a_constant_that_is_moved_to_where_it_is(policy: Any, transform: str) -> None:
    """`to` returns a wrapper of the same tensor there, also `torch.as_tensor`."""

    def run(ck: Any) -> Any:
        space = SimpleNamespace(mask=numbers(3), table=numbers(3, seed=1))

        def fun(x: Tensor) -> Tensor:
            space.mask = space.mask.to(x.dtype)
            space.table = torch.as_tensor(space.table, dtype=x.dtype)
            return (x * space.mask).sin() * space.table

        return TRANSFORMS[transform](ck(fun), numbers(3, 3))

    assert_same(run(remat(policy=policy)), run(plain))


def test_a_module_that_is_moved_in_a_recorded_rerun() -> None:
    """`Module.to` asks for the `.grad` of parameters. The operands that modules hold then are no leaves."""
    net = nn.Linear(3, 1).double()

    def run(ck: Any) -> Any:
        net.zero_grad(set_to_none=False)
        x = leaf(numbers(2, 3))
        (first,) = torch.autograd.grad(ck(lambda x: net.to(x.dtype)(x).tanh())(x).sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad, [p.grad for p in net.parameters()]

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("differentiate", [grad, lambda f: lambda x: f(leaf(x)).backward()], ids=["grad", "backward"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("outer", [lambda f: f, remat], ids=["plain", "remat"])
def test_a_nested_call_changes_a_view_of_what_the_outer_function_has_made(
    outer: Any, captured: bool, differentiate: Any
) -> None:
    def fun(x: Tensor) -> Tensor:
        view = (x * 2).view_as(x)
        return remat(lambda *args: (view if captured else args[0]).relu_())(*(() if captured else (view,))).sum()

    with pytest.raises(RematError, match=r"changes an argument or a captured tensor of shape \[3\].* in place"):
        differentiate(outer(fun))(numbers(3))


@pytest.mark.parametrize("how", ["foreach", "out"])
def test_a_derivative_inside_changes_a_buffer(how: str) -> None:
    """By functions that torch.func lets change a captured tensor. It wraps what they change."""

    def run(ck: Any) -> Any:
        buffer, w = torch.ones(3).double(), leaf(numbers(3, seed=1))

        def loss(x: Tensor) -> Tensor:
            if how == "foreach":
                torch._foreach_mul_([buffer], 2.0)
            else:
                torch.mul(buffer, 2, out=buffer)
            return (x * buffer.clone()).sin().sum()

        result = grad(lambda x: ck(lambda x: grad(loss)(x) * w)(x).sum())(numbers(3))
        return result, torch.autograd.grad(result.sum(), w), buffer

    assert_same(run(remat), run(plain))


def test_an_argument_from_another_thread_may_not_be_changed_either() -> None:
    """Sequence numbers of autograd, which tell what is older than a call, are those of a thread."""
    y = leaf(numbers(3)).sin().cos()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RematError, match=r"changes an argument or a captured tensor"):
        pool.submit(remat(lambda y: y.relu_().sum()), y).result()


def test_an_alias_that_no_mode_sees_being_made() -> None:
    """Of what the function has computed: the result is a view of it."""

    class Sub(Tensor):
        pass

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp().as_subclass(Sub)
        z.sum()  # a read
        return z.as_subclass(Tensor)

    x = leaf(numbers(3))
    with LiveBytes() as meter:
        y = remat(fun)(x)
        assert meter.current == 24
    y.sum().backward()
    assert_same(x.grad, (x.sin().exp() * x.cos()).detach())


@CHECKED
def test_memory_made_out_of_sight(transform: str) -> None:
    np = pytest.importorskip("numpy")

    array = np.arange(3.0)
    agree(lambda ck, x: ck(lambda x: x.sin() * torch.from_numpy(array) + torch.from_numpy(array).exp())(x), transform)

    def twice(x: Tensor) -> Tensor:
        made = torch.from_numpy(array)
        return (x * made).sin() * made

    agree(lambda ck, x: ck(twice)(x), transform)
    agree(lambda ck, x: ck(lambda x: ck(twice)(x).cos())(x), transform)
    agree(lambda ck, x: vmap(lambda x: ck(twice)(x))(x.expand(2, 3)).sum(0), transform)


def test_memory_made_out_of_sight_leaves_no_cycle() -> None:
    def run() -> None:
        remat(lambda x: x.sin() * torch.from_numpy(np.arange(3.0)))(leaf(numbers(3))).sum().backward()

    run()  # what is imported for the first call is none of its own
    while gc.collect():  # what tests before have left may take several times
        pass
    gc.disable()
    try:
        run()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_vmap_inside_under_a_mode_that_sees_ops() -> None:
    """What the mode calls when the vmap ends is not taken for calls of the function."""
    w, x = numbers(3, 3), numbers(3, 3, seed=1)

    def loss(ck: Decorator) -> Callable[[Tensor], Tensor]:
        return lambda w: ck(lambda x: vmap(lambda r: (w @ r).tanh())(x.sin().cos()))(x).sum()

    expected = grad(loss(plain))(w)
    for _ in range(10):
        with LiveBytes():
            assert_same(grad(loss(remat))(w), expected)


def test_draws_of_a_keyed_vmap_inside() -> None:
    def fun(x: Tensor) -> Tensor:
        return vmap(lambda r: F.dropout(r, 0.5), randomness="different")(x).sin()

    for seed in range(10):
        gradients = []
        for ck in (plain, remat):
            x = leaf(numbers(3, 4))
            gradients += torch.autograd.grad(ck(keyed(fun))(key(seed), x).sum(), x)
        assert_same(gradients[1], gradients[0])


class KeepsLast(nn.Module):
    """It reads nothing of what it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last * self.last


@pytest.mark.parametrize("call", [lambda m: remat(m), lambda m: remat(lambda x: m(x))], ids=["module", "closure"])
def test_what_is_replaced_may_come_with_a_graph_that_is_gone(call: Any) -> None:
    module, x = KeepsLast(), leaf(numbers(3))
    module(x).sum().backward()
    expected, x.grad = x.grad, None
    call(module)(x).sum().backward()
    assert_same(x.grad, expected)


# Tensors that die inside of the function, and others, made out of sight, that get their identities.

ONES = np.ones(3)


def out_of_sight() -> Tensor:
    return torch.from_numpy(ONES)


def after_one_that_was_written_to(ck: Decorator, x: Tensor) -> Tensor:
    def fun(x: Tensor) -> Tensor:
        written = [torch.from_numpy(np.zeros(3)) for _ in range(50)]
        torch._foreach_add_(written, 2)
        died = {*map(id, written)}
        del written
        ones = at_an_address_of(died, out_of_sight)
        return x.sin() * ones

    return ck(fun)(x)


def after_a_parameter(ck: Decorator, x: Tensor) -> Tensor:
    def fun(x: Tensor) -> Tensor:
        parameters = [nn.Parameter(out_of_sight()) for _ in range(50)]
        scale = torch.stack(parameters).sum().detach()
        died = {*map(id, parameters)}
        del parameters
        ones = at_an_address_of(died, out_of_sight)
        return x.sin() * scale * ones

    return ck(fun)(x)


def after_the_data_of_a_parameter(ck: Decorator, x: Tensor) -> Tensor:
    def fun(x: Tensor, weight: Tensor) -> Tensor:
        died = {id(data) for data in [weight.data for _ in range(50)]}
        count = at_an_address_of(died, lambda: torch.zeros((), dtype=torch.float64))
        count += 1
        return x.sin() * weight * count

    return ck(fun)(x, x.cos())


@CHECKED
@pytest.mark.parametrize(
    "program",
    [after_one_that_was_written_to, after_a_parameter, after_the_data_of_a_parameter],
    ids=lambda p: p.__name__,
)
def test_a_tensor_where_another_one_was(program: Any, transform: str) -> None:
    agree(program, transform)


def test_a_result_that_is_where_a_parameter_was_is_computed_again() -> None:
    def fun(x: Tensor) -> Tensor:
        parameters = [nn.Parameter(out_of_sight()) for _ in range(50)]
        torch.stack(parameters)
        died = {*map(id, parameters)}
        del parameters
        with torch._C.DisableTorchFunction():  # as an extension does it
            return at_an_address_of(died, lambda: x.sin())

    with CountOps() as ops:
        remat(fun)(leaf(numbers(3))).sum().backward()
    assert ops["sin"] == 400  # 200 in each run


def test_draws_three_deep() -> None:
    """The states of generators, which the innermost call compares, are nothing that those around it read."""

    def fun(wrap: Decorator, inner: Decorator) -> Tensor:
        torch.manual_seed(0)
        x = leaf(numbers(3))
        y = wrap(lambda x: inner(lambda x: inner(F.dropout)(x).sin())(x).cos())(x)
        return torch.autograd.grad(y.sum(), x)[0]

    assert_same(fun(checkpoint(use_reentrant=False), remat), fun(plain, plain))


def test_a_result_that_the_next_call_detaches() -> None:
    """Its node is asked for nothing, though it was freed."""

    def run(ck: Decorator) -> Any:
        w = leaf(numbers(3, 3))

        def step(x: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(x @ w + h.detach())

        h = numbers(2, 3)
        for seed in range(3):
            h = ck(step)(numbers(2, 3, seed=seed), h)
            h.sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
        return w.detach(), w.grad

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("transform", [t for t in SOME_TRANSFORMS if "func" not in t])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_table_made_on_first_use_in_one_call_with_a_tensor_of_its_shape(swapped: bool, transform: str) -> None:
    def run(ck: Decorator) -> Any:
        w, made = numbers(3, 3), {}

        def fun(x: Tensor) -> Tensor:
            if not made:
                made["mask"] = torch.ones(3, 3).tril().double()
            return torch.tanh(x @ (made["mask"] * w if swapped else torch.stack([w, made["mask"]]).prod(0)))

        return TRANSFORMS[transform](ck(fun), numbers(3, 3))

    assert_same(run(remat), run(plain))


def test_a_state_that_is_replaced_before_the_call_that_reads_both() -> None:
    held = {"h": numbers(3)}

    def fun(x: Tensor) -> Tensor:
        old = held["h"]
        held["h"] = x.detach().sin()
        return x * (old - held["h"])

    with pytest.raises(CheckpointError, match=r"other tensors.* If the function replaces a state"):
        remat(fun)(leaf(numbers(3, seed=1))).sum().backward()


@pytest.mark.parametrize(
    "start", [1.0, torch.ones(()).double(), torch.ones(1).double()], ids=["number", "scalar", "one"]
)
def test_a_running_average_that_is_replaced_by_one_of_another_shape(start: Any) -> None:
    held = {"m": start}

    def fun(x: Tensor) -> Tensor:
        held["m"] = held["m"] * 0.9 + x.detach().mean(0) * 0.1
        return x * held["m"]

    with pytest.raises(CheckpointError, match=r"other tensors.* If the function replaces a state"):
        remat(fun)(leaf(numbers(2, 3))).sum().backward()


def test_a_rolling_cache_that_is_replaced() -> None:
    held = {"c": numbers(1, 3)}
    bias = numbers(1, 3, seed=1)

    def fun(x: Tensor) -> Tensor:
        held["c"] = torch.cat([held["c"], x.detach()[:1]])
        return x * torch.cat([held["c"], bias]).mean()

    with pytest.raises(CheckpointError, match=r"fun .*other tensors.* fills a cache"):
        remat(fun)(leaf(numbers(2, 3))).sum().backward()


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3).double()], ids=["Dropout", "BatchNorm1d"])
def test_a_module_that_is_switched_to_eval_before_the_backward(layer: nn.Module) -> None:
    layer.train()
    out = remat(lambda x: layer(x).sin())(leaf(numbers(2, 3)))
    layer.eval()
    with pytest.raises(CheckpointError, match=r"another number or flag"):
        out.sum().backward()


def test_a_number_out_of_sight_that_changes() -> None:
    """A cell of a function in a list is not kept as it was."""
    out = x = leaf(numbers(3))
    for i in range(3):
        acts = [lambda t: t * (i + 1)]
        out = remat(lambda t: acts[0](t).sin())(out)
    with pytest.raises(CheckpointError, match=r"another number or flag"):
        out.sum().backward()
    assert x.grad is None


def test_a_state_with_a_history_that_is_replaced() -> None:
    held = SimpleNamespace(h=numbers(3))

    def step(x: Tensor) -> Tensor:
        held.h = torch.tanh(x + held.h.detach())
        return held.h

    out = remat(step)(leaf(numbers(3, seed=1)))
    with pytest.raises(CheckpointError, match=r"step reads a tensor of shape \[3\].* which its forward did not read"):
        out.sum().backward()


def test_a_gradient_that_the_function_reads_and_somebody_zeroes() -> None:
    p = leaf(numbers(3))
    p.grad = numbers(3, seed=1)
    out = remat(lambda x: (x * (p - 0.1 * p.grad)).sin())(leaf(numbers(3, seed=2)))
    p.grad.zero_()
    with pytest.raises(CheckpointError, match=r"has been modified by an inplace operation"):
        out.sum().backward()


class SetUpByTheFirstCall(nn.Module):
    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self.scale.copy_(x.detach().std(0))
        return x * self.scale


def test_a_buffer_that_a_flag_lets_the_first_call_set_up() -> None:
    module = SetUpByTheFirstCall()
    out = remat(module)(leaf(numbers(4, 3)))
    with pytest.raises(CheckpointError, match=r"has changed a tensor of shape \[3\].* does not in the rerun"):
        out.sum().backward()
    with torch.no_grad():
        remat(module)(numbers(4, 3))
    remat(module)(leaf(numbers(4, 3))).sum().backward()


# The same calls with other tensors.

KEEP_AS_STATE: dict[str, Callable[[Any, Tensor], Tensor]] = {}


def keeps(fun: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    KEEP_AS_STATE[fun.__name__] = fun
    return fun


@keeps
def an_attribute(held: Any, x: Tensor) -> Tensor:
    out, held.last = x - held.last, x.detach() if x.requires_grad else x
    return out


@keeps
def an_item(held: Any, x: Tensor) -> Tensor:
    out = x - held.items[-1]
    held.items[-1] = x
    return out


@keeps
def appended(held: Any, x: Tensor) -> Tensor:
    out = x - held.items[-1]
    held.items.append(x)
    return out


@keeps
def exchanged(held: Any, x: Tensor) -> Tensor:
    out = x * held.a - held.b
    held.a, held.b = held.b, held.a
    return out


@keeps
def read_later(held: Any, x: Tensor) -> Tensor:
    out = held.weight.sin() * x * held.last
    held.last = x
    return out


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("program", KEEP_AS_STATE.values(), ids=KEEP_AS_STATE)
def test_a_function_that_keeps_a_tensor_from_outside_for_the_next_call(program: Any, nested: bool) -> None:
    def run(ck: Decorator) -> Tensor:
        weight, tables = leaf(numbers(3)), numbers(4, 3, seed=1).unbind()
        held = SimpleNamespace(weight=weight, last=tables[0], items=[tables[1]], a=tables[2], b=tables[3])

        def step(x: Tensor) -> Tensor:
            return program(held, x) * weight

        around = (lambda x: step(x)) if not nested else lambda x: ck(step)(x).cos()
        for x in numbers(3, 3, seed=2).unbind():
            ck(around)(x).sum().backward()
        assert weight.grad is not None
        return weight.grad

    run(plain)
    with pytest.raises(CheckpointError, match=r"(step|lambda>) .*other tensors"):
        run(remat)


class Flagged:
    flag = True


OTHER_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a chunk": lambda x: x.chunk(3)[int(Flagged.flag)].sin(),
    "an item": lambda x: [x.sin(), x.cos()][int(Flagged.flag)].exp(),
    "one of two results": lambda x: torch.var_mean(x, 0)[int(Flagged.flag)].sin(),
    "the other order": lambda x: (lambda a, b: a * b.sin())(*[x * 1, x * 2][:: 1 if Flagged.flag else -1]),
    "detached": lambda x: x * x if Flagged.flag else x * x.detach(),
    "a table": lambda x: x * (TABLES[0] if Flagged.flag else TABLES[1]).cos(),
    "an index of an assignment": lambda x: assigned(x, int(Flagged.flag), x[0]),
    "a slice of an assignment": lambda x: assigned(x, slice(int(Flagged.flag), 3), x[0]),
    "a number that is assigned": lambda x: assigned(x * 2, 0, 1.0 + Flagged.flag),
    "an index of what is written to": lambda x: written(x, int(Flagged.flag)),
}
TABLES = numbers(3, 3, seed=5).unbind()


def assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    out = torch.zeros(3).double() if isinstance(value, Tensor) else x.clone()
    out[index] = value
    return out.exp() * x


def written(x: Tensor, index: int) -> Tensor:
    out = torch.zeros(3).double()
    out[index].copy_(x[0])
    return out.exp() * x


@pytest.mark.parametrize("fun", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_a_flag_that_passes_other_tensors(fun: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(ck: Decorator, then: bool) -> Tensor:
        monkeypatch.setattr(Flagged, "flag", True)
        _, pull = vjp(lambda x: ck(fun)(x).sum(), numbers(3))
        monkeypatch.setattr(Flagged, "flag", then)
        return pull(torch.ones(()).double())[0]

    assert_same(gradient(remat, True), gradient(plain, True))
    with pytest.raises(CheckpointError, match=r"other tensors|another number or flag|did not read"):
        gradient(remat, False)


def test_two_tables_that_are_made_on_first_use_change_places() -> None:
    held = SimpleNamespace()

    def fun(x: Tensor) -> Tensor:
        if not hasattr(held, "a"):
            held.a, held.b = torch.arange(3.0).double().exp(), torch.arange(3.0).double().cos()
        return x.sin() * torch.sub(held.a, held.b)

    out = remat(fun)(leaf(numbers(3)))
    held.a, held.b = held.b, held.a
    with pytest.raises(CheckpointError, match="other tensors"):
        out.sum().backward()


@pytest.mark.parametrize("transform", [".backward()", "jacrev"])
@pytest.mark.parametrize("how", ["kept", "returned"])
def test_a_leaf_of_the_function_has_no_derivative_outside(how: str, transform: str) -> None:
    """As `pyro.param` makes one on first use. The rerun would make another."""
    store: dict[str, Tensor] = {}

    def fun(x: Tensor) -> Any:
        store.setdefault("w", torch.ones(3, requires_grad=True))
        return (x * store["w"], store["w"]) if how == "returned" else x * store["w"]

    def first(x: Tensor) -> Any:
        out = remat(fun)(x)
        return out[0] if how == "returned" else out

    with pytest.raises(RematError, match=r"makes a tensor of shape \[3\].* requires grad.* Make it outside"):
        TRANSFORMS[transform](first, numbers(3))
    with torch.no_grad():
        remat(fun)(numbers(3))
    assert_same(TRANSFORMS[transform](first, numbers(3)), TRANSFORMS[transform](lambda x: x * store["w"], numbers(3)))


def test_a_leaf_of_the_function_that_its_hook_holds() -> None:
    """Implicit differentiation of a fixed point."""

    def fun(w: Tensor, z: Tensor) -> Tensor:
        z = z.detach().clone().requires_grad_()
        y = torch.tanh(w * z)
        hooks = [
            y.register_hook(lambda g: (hooks[0].remove(), g + torch.autograd.grad(y, z, g, retain_graph=True)[0])[1])
        ]
        return y * 2

    w, z = leaf(numbers(3)), numbers(3, seed=1)
    with pytest.raises(
        RematError, match=r"requires grad, and keeps or returns it, or a hook holds it.* remat\.checkpoint"
    ):
        remat(fun)(w, z)
    assert_same(*(torch.autograd.grad(f(w, z).sum(), w) for f in (checkpointed(use_reentrant=False)(fun), fun)))


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
def test_a_leaf_of_the_function_that_dies_with_the_call(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        w = torch.full((3,), 0.5, dtype=x.dtype, requires_grad=True)
        return torch.autograd.grad((w * w).sin().sum(), w, create_graph=True)[0] * x.sin()

    run = TRANSFORMS[transform]
    assert_same(run(remat(fun), numbers(3)), run(fun, numbers(3)))


def checkpointed(use_reentrant: bool) -> Decorator:
    return lambda f: lambda *args: checkpoint(f, *args, use_reentrant=use_reentrant)


NESTED: dict[str, Decorator] = {
    "remat": remat,
    "policy": functools.partial(remat, policy=policies.everything_saveable),
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant": checkpointed(use_reentrant=True),
}


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("place", ["cell", "default", "argument", "module", "list", "copy", "default and list"])
def test_an_inner_function_reads_a_buffer_that_the_outer_one_writes(
    place: str, is_last: bool, outer: str, inner: str
) -> None:
    """Its rerun must read what the outer rerun writes."""

    def run(outer: Decorator, inner: Decorator) -> Tensor:
        module, x = nn.BatchNorm1d(3).double(), leaf(numbers(3))
        count = module.running_mean
        assert count is not None
        held = [count]
        read: Any = {
            "cell": lambda h: h.sin() * (1 + count),
            "default": lambda h, count=count: h.sin() * (1 + count),
            "argument": lambda h, count: h.sin() * (1 + count),
            "module": lambda h: h.sin() * (1 + module.running_mean),
            "list": lambda h: h.sin() * (1 + held[0]),
            "copy": lambda h: h.sin() * held[0].clone(),
            "default and list": lambda h, count=count: h.sin() * held[0].clone(),
        }[place]

        def function(h: Tensor) -> Tensor:
            count.add_(2)
            y = inner(read)(h, count) if place == "argument" else inner(read)(h)
            return y if is_last else y.exp()

        return torch.autograd.grad(outer(function)(outer(function)(x)).sum(), x)[0]

    assert_same(run(NESTED[outer], NESTED[inner]), run(plain, plain))


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("place", ["cell", "list and cell", "cell and module"])
def test_an_inner_function_reads_a_buffer_that_the_outer_one_writes_later(place: str, outer: str, inner: str) -> None:
    """Its rerun comes after the write in the outer rerun: an error, wherever the inner function finds the buffer."""
    module, x = nn.BatchNorm1d(3).double(), leaf(numbers(3))
    count = module.running_mean
    assert count is not None
    held = [count]

    def read_cell() -> Any:
        return count

    def function(h: Tensor) -> Tensor:
        read: Any = {
            "cell": lambda h: h.sin() * (1 + count),
            "list and cell": lambda h, unused=held[0]: h.sin() * (1 + read_cell()),
            "cell and module": lambda h, unused=read_cell: h.sin() * (1 + module.running_mean),
        }[place]
        y = NESTED[inner](read)(h)
        count.add_(2)
        return y.exp()

    out = NESTED[outer](function)(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, x)


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("reads_before", [False, True])
@pytest.mark.parametrize("place", ["list", "cell", "module"])
@pytest.mark.parametrize("reads_argument", [False, True])
@pytest.mark.parametrize("writes_argument", [False, True])
def test_an_inner_function_gets_a_buffer_as_an_argument_and_finds_it_elsewhere(
    writes_argument: bool, reads_argument: bool, place: str, reads_before: bool, outer: str, inner: str
) -> None:
    """In an outer rerun it finds the original in one place and the stand-in in another: they are one tensor."""

    def run(outer: Decorator, inner: Decorator) -> Tensor:
        module, x = nn.BatchNorm1d(3).double(), leaf(numbers(3))
        count = module.running_mean
        assert count is not None
        held = [count.fill_(0.7)]
        found = {"list": lambda: held[0], "cell": lambda: count, "module": lambda: module.running_mean}[place]

        def function(h: Tensor, given: Any) -> Tensor:
            if reads_before:
                h = h * given.clone()
            (given if writes_argument else found()).mul_(0.9)
            return h.cos() * (given if reads_argument else found()).clone()

        return torch.autograd.grad(outer(lambda h: inner(function)(h, found()).cos())(x).sum(), x)[0]

    if outer == "reentrant" and inner in ("remat", "policy") and not reads_before:
        with pytest.raises(CheckpointError, match="sets up a tensor"):  # to be an argument is the first use
            run(NESTED[outer], NESTED[inner])
    else:
        assert_same(run(NESTED[outer], NESTED[inner]), run(plain, plain))


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("middle", NESTED)
def test_an_inner_function_asks_for_a_flag_of_a_buffer_and_then_writes_it(middle: str, inner: str) -> None:
    def run(outer: Decorator, middle: Decorator, inner: Decorator) -> Tensor:
        count, x = torch.full((3,), 0.7, dtype=torch.float64), leaf(numbers(3))
        held = [count]

        def write(h: Tensor) -> Tensor:
            if not held[0].requires_grad:
                count.mul_(0.9)
            return h.cos()

        def function(h: Tensor) -> Tensor:
            return (inner(write)(h) * count.clone()).sin()

        return torch.autograd.grad(outer(lambda h: middle(function)(h).cos())(x).sum(), x)[0]

    assert_same(run(NESTED["reentrant"], NESTED[middle], NESTED[inner]), run(plain, plain, plain))


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("outer", NESTED)
def test_an_inner_function_closes_over_a_buffer_that_the_outer_one_writes_and_leaves_it(outer: str, inner: str) -> None:
    """In the rerun of a checkpoint, it must save as many tensors as in the forward."""

    def run(outer: Decorator, inner: Decorator) -> Tensor:
        count, x = torch.full((3,), 0.7, dtype=torch.float64), leaf(numbers(3))

        def function(h: Tensor) -> Tensor:
            count.mul_(0.9)
            return inner(lambda h, unused=lambda: count: h.cos())(h).sin() * count.clone()

        return torch.autograd.grad(outer(function)(x).sum(), x)[0]

    assert_same(run(NESTED[outer], NESTED[inner]), run(plain, plain))


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("place", ["cell", "dict"])
@pytest.mark.parametrize("order", [1, 2])
def test_the_default_of_an_inner_function_is_a_buffer_that_it_finds_elsewhere_and_writes(
    order: int, place: str, outer: str, inner: str
) -> None:
    def run(outer: Decorator, inner: Decorator) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            state = 0.7 + x.detach() * 0
            held = {0: state}

            def function(h: Tensor) -> Tensor:
                def write(h: Tensor, unused: Any = held[0]) -> Tensor:
                    (state if place == "cell" else held[0]).mul_(0.9)
                    return h.cos()

                return inner(write)(h).cos()

            return outer(function)(x).sum()

        return grad(loss if order == 1 else lambda x: grad(loss)(x).square().sum())(numbers(3))

    assert_same(run(NESTED[outer], NESTED[inner]), run(plain, plain))


@pytest.mark.parametrize("inner", NESTED)
@pytest.mark.parametrize("middle", NESTED)
def test_a_reentrant_rerun_finds_a_weight_in_a_module_and_in_a_list(middle: str, inner: str) -> None:
    def run(outer: Decorator, middle: Decorator, inner: Decorator) -> Any:
        layer: Any = with_constants(nn.Linear(3, 3, bias=False).double())
        x = leaf(numbers(2, 3))
        in_list, in_cell = [layer.weight], layer.weight

        def function(h: Tensor) -> Tensor:
            weight = in_list[0]

            def around(h: Tensor) -> Tensor:
                def product(h: Tensor, w: Tensor, unused: Any = lambda: in_cell) -> Tensor:
                    return h.cos() @ w.clone()

                return inner(product)(h, layer.weight).cos() + weight.sum()

            return middle(around)(h).cos()

        outer(function)(x).sum().backward()
        return x.grad, layer.weight.grad

    assert_same(run(NESTED["reentrant"], NESTED[middle], NESTED[inner]), run(plain, plain, plain))


class LooksUp:
    """Functions that look up others by their identity: in a set, as keys."""

    def __init__(self, weight: Tensor) -> None:
        def act(x: Tensor) -> Tensor:
            return (x * weight).sin()

        def itself(x: Tensor) -> Tensor:
            return act(x).exp() if itself in gated else x

        def one(x: Tensor, depth: int = 2) -> Tensor:
            return another(x, depth) * factors.get(one, 1.0)

        def another(x: Tensor, depth: int) -> Tensor:
            return one(act(x), depth - 1) if depth else x * factors.get(another, 1.0)

        part, inner = functools.partial(torch.mul, weight), remat(act)
        gated, factors = {act, itself}, {part: 2.0, inner: 3.0, torch.cos: 4.0, one: 5.0, another: 6.0}
        self.functions: dict[str, Callable[[Tensor], Tensor]] = {
            "in a set": lambda x: act(x).exp() if act in gated else act(x).cos(),
            "as keys": lambda x: part(x).cos() * factors[part] + inner(x) * factors[inner],
            "by a default": lambda x, f=act: f(x).exp() if f in gated else f(x).cos(),
            "itself": itself,
            "each other": one,
        }


@pytest.mark.parametrize("around", ["remat", "policy", "checkpoint"])
@pytest.mark.parametrize("how", ["in a set", "as keys", "by a default", "itself", "each other"])
def test_a_function_that_is_as_it_was_at_the_call_is_the_very_same_in_a_rerun(how: str, around: str) -> None:
    weight, x = leaf(numbers(3)), leaf(numbers(3, seed=1))
    function = LooksUp(weight).functions[how]
    gradients = [torch.autograd.grad(ck(function)(x).sum(), (x, weight)) for ck in (NESTED[around], plain)]
    assert_same(*gradients)


def test_a_function_that_is_looked_up_and_closes_over_what_a_transform_replaces_is_an_error() -> None:
    function = LooksUp(numbers(3)).functions["in a set"]

    def loss(weight: Tensor) -> Tensor:
        return remat(LooksUp(weight).functions["in a set"])(numbers(3, seed=1)).sum()

    assert_same(grad(lambda x: remat(function)(x).sum())(numbers(3)), grad(lambda x: function(x).sum())(numbers(3)))
    with pytest.raises(CheckpointError, match="where the forward called"):
        grad(loss)(numbers(3))


@pytest.mark.parametrize("inner", ["remat", "policy"])
@pytest.mark.parametrize("outer", ["remat", "policy"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("way", ["argument and dict", "unread default", "unread default and cell"])
def test_a_tensor_of_a_transform_lies_in_several_places(way: str, order: int, outer: str, inner: str) -> None:
    """In an outer rerun, the inner function finds the original in one place and the stand-in in another."""

    def run(outer: Decorator, inner: Decorator) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            state = 0.7 + x.detach() * 0
            held = {0: state}

            def found() -> Tensor:
                return (held[0], state)[0] if way == "argument and dict" else state

            def level(depth: int, h: Tensor) -> Tensor:
                if depth == 0:
                    return outer(lambda h: level(1, h))(h).cos()
                if depth == 1 and way == "argument and dict":
                    return inner(lambda h, given: level(2, h) * given.clone())(h, found()).cos()
                if depth == 1:
                    return inner(lambda h: inner(lambda h, unused=held[0]: level(2, h))(h))(h).cos()
                if way != "unread default":
                    return (h * found().clone()).sin()
                return h.cos()

            return level(0, x).sum()

        return grad(loss if order == 1 else lambda x: grad(loss)(x).square().sum())(numbers(3))

    assert_same(run(NESTED[outer], NESTED[inner]), run(plain, plain))


class SineOfNumpy(torch.autograd.Function):
    """No torch function is seen to make its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("transform", [".backward()", "double backward", "create_graph twice"])
def test_a_change_in_place_of_what_was_made_unseen(transform: str) -> None:
    def fun(x: Tensor) -> Tensor:
        y = SineOfNumpy.apply(x * 2)
        y.mul_(2)
        y[0] = 1.0
        y.view(-1)[1:4].add_(x.detach().view(-1)[:3])
        return y.sin() * x

    def nested(x: Tensor) -> Tensor:
        y = SineOfNumpy.apply(x)
        y += 1
        return remat(lambda y: remat(fun)(y) * x)(y.exp())

    run = {
        ".backward()": lambda f, x: torch.autograd.grad(f(x).sum(), x),
        "double backward": lambda f, x: torch.autograd.grad(
            torch.autograd.grad(f(x).sum(), x, create_graph=True)[0].square().sum(), x
        ),
        "create_graph twice": lambda f, x: [torch.autograd.grad(f(x).sum(), x, create_graph=True) for _ in range(2)],
    }[transform]
    for f in (fun, nested):
        assert_same(run(remat(f), leaf(numbers(3, 3))), run(f, leaf(numbers(3, 3))))
