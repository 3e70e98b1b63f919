"""What a function reads besides its arguments changes between forward and rerun: right, or an error, never silent."""

import copy
import gc
import itertools
import logging
import queue
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stateful_programs
import torch
from helpers import Seen, assert_same, at_an_address_of, leaf, numbers, plain
from stateful_programs import Stateful, a_new_key, append, replace_buffer, replace_item, result_of_the_last_call
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.nn import functional as F

from remat import CheckpointError, RematError, checkpoint, policies, remat
from remat.debug import LiveBytes
from remat.random import key, keyed

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


SCALE = 1.0
WEIGHT = torch.ones(())


@CHECKED
def test_a_loop_variable_that_is_global(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        global SCALE, WEIGHT
        for SCALE in (1.0, 2.0, 3.0):
            WEIGHT = torch.full((), SCALE + 1, dtype=torch.float64)
            x = ck(lambda x: torch.sin(x * SCALE) * WEIGHT)(x)
        return x

    agree(program, transform)
    assert SCALE == 3.0
    assert_same(WEIGHT, torch.full((), 4.0, dtype=torch.float64))


class Recurrent:
    def __init__(self) -> None:
        self.h = torch.ones(3, dtype=torch.float64)


STATE = Recurrent()


def step_of_a_global_object(x: Tensor) -> Tensor:
    STATE.h = torch.tanh(STATE.h.detach() + x)
    return STATE.h * x


@CHECKED
def test_state_of_a_global_object(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        STATE.h = torch.ones(3, dtype=torch.float64)
        return ck(step_of_a_global_object)(ck(step_of_a_global_object)(x))

    agree(program, transform)


class Statistics(nn.Module):
    """Keeps its statistic in a dict, and the last ones in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.now = {"mean": torch.zeros((), dtype=torch.float64)}
        self.last: list[Tensor | None] = [None]

    def forward(self, x: Tensor) -> Tensor:
        self.last[0] = self.now["mean"] if self.last[0] is None else self.last[0] + 1
        self.now["mean"] = 0.9 * self.now["mean"] + 0.1 * x.detach().mean()
        return (x * (1 + self.now["mean"] + self.last[0])).sin()


def test_statistics_in_containers() -> None:
    modules, gradients = [], []
    for ck in (plain, remat):
        x, module = leaf(numbers(3)), Statistics()
        y = ck(module)(ck(module)(x))
        gradients += torch.autograd.grad(y.sum(), x)
        modules.append(module)
    assert_same(gradients[1], gradients[0])
    assert_same((modules[1].now, modules[1].last), (modules[0].now, modules[0].last))


NESTS: dict[str, Decorator] = {
    "alone": remat,
    "in itself": lambda fun: remat(lambda x: remat(fun)(x).cos()),
    "twice in itself": lambda fun: remat(lambda x: remat(remat(fun))(x).cos()),
    "under a policy": lambda fun: remat(lambda x: remat(fun)(x).cos(), policy=policies.save_ops("mul")),
}


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("program", stateful_programs.PROGRAMS)
def test_programs_with_state(program: Any, nest: str, calls: int) -> None:
    results = []
    for ck in (plain if nest == "alone" else lambda fun: lambda x: fun(x).cos(), NESTS[nest]):
        x, module = leaf(numbers(3)), Stateful(program)
        y: Any = x
        for _ in range(calls):
            y = ck(module)(y)
        results.append((torch.autograd.grad(y.sum(), x), module.state()))
    assert_same(results[1], results[0])


def by_checkpoint(use_reentrant: bool) -> Decorator:
    return lambda fun: lambda x: checkpoint(fun, x, use_reentrant=use_reentrant)


MIXED: dict[str, Decorator] = {"remat": remat, "non-reentrant": by_checkpoint(False), "reentrant": by_checkpoint(True)}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("outer", MIXED)
@pytest.mark.parametrize("inner", MIXED)
@pytest.mark.parametrize("program", stateful_programs.PROGRAMS)
def test_programs_with_state_in_mixed_nests(program: Any, inner: str, outer: str, calls: int) -> None:
    def run(inner: Decorator, outer: Decorator) -> Any:
        x, module = leaf(numbers(3)), Stateful(program)
        for i in range(calls):
            fun = inner(module)
            y = outer(lambda x, fun=fun: fun(x).cos())(x * (i + 1))
            y.sum().backward(retain_graph=True)
        return x.grad, module.state(), list(module.named)

    if program is result_of_the_last_call and outer == "reentrant":  # as torch's, it keeps no graph of what is inside
        return
    assert_same(run(MIXED[inner], MIXED[outer]), run(plain, plain))


CALLS = LAST = 0


class CountsInGlobals(nn.Module):
    def forward(self, x: Tensor, memory: list[int] = []) -> Tensor:  # noqa: B006
        global CALLS, LAST
        CALLS += 1
        LAST = len(memory) + CALLS  # it is never read
        memory.append(CALLS)
        return (x * CALLS * len(memory)).sin()


@pytest.mark.parametrize("kind", [plain, *MIXED.values()])
def test_state_of_the_code_of_a_module(kind: Decorator) -> None:
    global CALLS
    CALLS = 0
    assert CountsInGlobals.forward.__defaults__ is not None
    memory = CountsInGlobals.forward.__defaults__[0]
    memory.clear()
    x = leaf(numbers(3))
    y = x
    for _ in range(2):
        y = kind(CountsInGlobals())(y)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    x = x.detach()
    assert_same(gradient, (x.sin() * 4).cos() * 4 * x.cos())
    assert (CALLS, LAST, memory) == (2, 3, [1, 2])


COUNTED: list[int] = []


def counted(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    COUNTED.append(CALLS)
    return scaled_by_count(x)


def scaled_by_count(x: Tensor) -> Tensor:
    return x * CALLS * len(COUNTED)


def sine_of_counted(x: Tensor) -> Tensor:
    return counted(x).sin()


@pytest.mark.parametrize("kind", [plain, *MIXED.values()])
def test_state_of_functions_that_are_called_by_name(kind: Decorator) -> None:
    global CALLS
    CALLS = 0
    COUNTED.clear()
    x = leaf(numbers(3))
    y = kind(sine_of_counted)(kind(sine_of_counted)(x))
    CALLS += 10
    (gradient,) = torch.autograd.grad(y.sum(), x)
    x = x.detach()
    assert_same(gradient, (x.sin() * 4).cos() * 4 * x.cos())
    assert (CALLS, COUNTED) == (12, [1, 2])


class Settings:
    scale = 2.0


class Scaled(Settings, nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


def by_settings() -> Callable[[Tensor], Tensor]:
    settings = Settings()
    return lambda x: (x * settings.scale).sin()


@pytest.mark.parametrize("kind", MIXED.values())
@pytest.mark.parametrize("make", [Scaled, by_settings])
def test_attributes_of_the_class_of_an_object(make: Any, kind: Decorator) -> None:
    Settings.scale = 2.0
    x, seen = leaf(numbers(3)), Seen()
    fun = make()
    y = kind(lambda x: (seen.append(0), fun(x))[1])(x)
    Settings.scale = 3.0
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_same(gradient, (x.detach() * 2).cos() * 2)
    assert Settings.scale == 3.0


class Slotted:
    __slots__ = ("k",)


class SlottedTwice(Slotted):
    __slots__ = ("k",)

    @property
    def both(self) -> Any:
        return Slotted.k.__get__(self) + self.k  # type: ignore[attr-defined]


class Hidden(Slotted):
    @property
    def k(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not to be asked for")


@pytest.mark.parametrize("kind", MIXED.values())
def test_slots_of_the_same_name_and_behind_a_property(kind: Decorator) -> None:
    twice, hidden, x = SlottedTwice(), Hidden(), leaf(numbers(3))

    def set_all(first: float, second: float, third: float) -> None:
        Slotted.k.__set__(twice, first)  # type: ignore[attr-defined]
        twice.k = second
        Slotted.k.__set__(hidden, third)  # type: ignore[attr-defined]

    set_all(1.0, 2.0, 3.0)
    y = kind(lambda x: (x * twice.both * Slotted.k.__get__(hidden)).sin())(x)  # type: ignore[attr-defined]
    set_all(4.0, 5.0, 6.0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_same(gradient, (x.detach() * 9).cos() * 9)
    assert (twice.both, Slotted.k.__get__(hidden)) == (9.0, 6.0)  # type: ignore[attr-defined]


@torch.no_grad()
def counted_without_grad() -> int:
    global CALLS
    CALLS += 1
    return CALLS


act = torch.sin


def made_by_the_function(x: Tensor) -> Tensor:
    global MADE
    try:
        MADE += 1  # type: ignore[name-defined]
    except NameError:
        MADE = 1
    return act(x * MADE * counted_without_grad())


@pytest.mark.parametrize("kind", MIXED.values())
def test_globals_that_are_made_or_replaced_and_helpers_under_decorators(kind: Decorator) -> None:
    global CALLS, act
    CALLS, act = 0, torch.sin
    globals().pop("MADE", None)
    x = leaf(numbers(3))
    y = kind(made_by_the_function)(x)
    act = torch.exp
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_same(gradient, x.detach().cos())
    assert (CALLS, globals()["MADE"], act) == (1, 1, torch.exp)


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


class Near:
    """The first of some objects, each of which holds the next one."""

    def __init__(self, steps: int, number: float) -> None:
        self.next = number if steps == 0 else Near(steps - 1, number)

    def last(self) -> Any:
        obj = self
        while isinstance(obj.next, Near):
            obj = obj.next
        return obj


@pytest.mark.parametrize("kind", MIXED.values())
def test_state_four_steps_away(kind: Decorator) -> None:
    near, x = Near(3, 2.0), leaf(numbers(3))
    y = kind(lambda x: (x * near.next.next.next.next).sin())(x)
    near.last().next = 3.0
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_same(gradient, (x.detach() * 2).cos() * 2)


@pytest.mark.parametrize("kind", MIXED.values())
def test_children_that_change_places(kind: Decorator) -> None:
    """The second one is found by number, which is no reason for a watched function to be stopped."""
    seen, x = Seen(), leaf(numbers(3))
    layers = nn.ModuleList([nn.Tanh(), nn.Sigmoid()])

    def fun(x: Tensor) -> Tensor:
        seen.append(0)
        return layers[0](x).sin()

    expected = torch.autograd.grad(x.tanh().sin().sum(), x)
    y = kind(fun)(x)
    layers[0], layers[1] = layers[1], layers[0]
    assert_same(torch.autograd.grad(y.sum(), x), expected)
    assert isinstance(layers[0], nn.Sigmoid)


@pytest.mark.parametrize("kind", MIXED.values())
def test_attributes_of_a_module_that_is_only_a_place(kind: Decorator) -> None:
    place = nn.Module()
    place.count = 0

    def fun(x: Tensor) -> Tensor:
        place.count += 1
        return (x * place.count).sin()

    x = leaf(numbers(3))
    (gradient,) = torch.autograd.grad(kind(fun)(x).sum(), x)
    assert_same(gradient, x.detach().cos())
    assert place.count == 1


def test_a_cell_that_is_added_to_in_a_nest_of_three() -> None:
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

    assert_same(run(remat, by_checkpoint(False), remat), run(plain, plain, plain))


@pytest.mark.parametrize("kind", MIXED.values())
def test_what_was_replaced_unread_can_be_seen_in_the_rerun(kind: Decorator) -> None:
    seen = Seen()

    def program(m: Any, x: Tensor) -> Tensor:
        seen.append((m.buffer.shape, m.buffer.dtype, m.buffer.device, len(m.named["mean"])))
        m.buffer, m.named["mean"] = x.detach() * 2, x.detach() * 3
        return x.sin() * m.buffer * m.named["mean"]

    kind(Stateful(program))(leaf(numbers(3))).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("kind", MIXED.values())
def test_a_nested_tensor_in_reach(kind: Decorator) -> None:
    kept = {"ragged": torch.nested.nested_tensor([numbers(2), numbers(3)]), "scale": 2.0}
    x = leaf(numbers(3))
    kind(lambda x: x.sin() * kept["scale"])(x).sum().backward()
    assert_same(x.grad, 2 * x.detach().cos())


@pytest.mark.parametrize("kind", MIXED.values())
@pytest.mark.parametrize("read", [lambda t, x: t * x, lambda t, x: torch.cat([t, x])[:3]])
def test_what_was_replaced_unread_is_an_error_to_read_in_the_rerun(read: Any, kind: Decorator) -> None:
    runs = Seen()

    def program(m: Any, x: Tensor) -> Tensor:
        runs.append(1)
        y = x.sin() if len(runs) == 1 else read(m.named["mean"], x)
        m.named["mean"] = x.detach() * 3
        return y * m.named["mean"]

    y = kind(Stateful(program))(leaf(numbers(3))).sum()
    with pytest.raises(CheckpointError, match=r"(mul|cat) in a rerun got a tensor.* replaced without reading it"):
        y.backward()


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_state_that_foreach_changes_between_two_calls_is_an_error(policy: Any) -> None:
    class Exchanges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = numbers(3), numbers(3, seed=1)

        def forward(self, x: Tensor) -> Tensor:
            torch._foreach_add_([self.a], 1.0)
            self.a, self.b = self.b, self.a
            return x.sin() * self.a.clone()

    module, x = remat(Exchanges(), policy=policy), leaf(numbers(3))
    y = module(x) + module(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def in_a_list(module: nn.Module) -> Any:
    modules = [module]
    return lambda x: modules[0](x)


def in_an_object(module: nn.Module) -> Any:
    holder = SimpleNamespace(module=module)
    return lambda x: holder.module(x)


def in_a_list_of_a_module(module: nn.Module) -> Any:
    parent = Stateful(lambda m, x: m.others[0](x))
    parent.others = [module]
    return parent


@pytest.mark.parametrize("kind", MIXED.values())
@pytest.mark.parametrize("place", [in_a_list, in_an_object, in_a_list_of_a_module])
def test_modules_that_others_hold(place: Any, kind: Decorator) -> None:
    results = []
    for wrap in (plain, kind):
        module, x = Stateful(stateful_programs.replace_buffer), leaf(numbers(3))
        fun = wrap(place(module))
        results.append((*torch.autograd.grad(fun(fun(x)).sum(), x), module.state()))
    assert_same(results[1], results[0])


class History(list[Tensor]):
    count = 0

    def append(self, tensor: Tensor) -> None:
        super().append(tensor)
        self.count += 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_attributes_of_a_list_and_a_deque_beside_it(use_reentrant: bool) -> None:
    history, log = History([numbers(3)]), deque([0])
    module = Stateful(None)
    module.log, module.history = log, history

    def fun(x: Tensor) -> Tensor:
        module.history.append(module.history[-1] * 2)
        module.log.append(1)
        return (x * module.history.count).sin() * module.history[-1]

    x = leaf(numbers(3, seed=1))
    (gradient,) = torch.autograd.grad(by_checkpoint(use_reentrant)(fun)(x).sum(), x)
    assert_same(gradient, x.detach().cos() * numbers(3) * 2)
    assert (len(history), history.count) == (2, 1)


@CHECKED
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("program", [replace_buffer, replace_item, append, a_new_key])
def test_programs_with_state_in_turn(program: Any, nest: str, transform: str) -> None:
    def run(ck: Decorator, x: Tensor) -> Tensor:
        module = Stateful(program)
        return ck(module)(ck(module)(x))

    expected = gradient(run, plain if nest == "alone" else lambda fun: lambda x: fun(x).cos(), transform)
    assert_same(gradient(run, NESTS[nest], transform), expected)


@pytest.mark.parametrize("ck", MIXED)
def test_a_dict_keeps_its_order(ck: str) -> None:
    used = dict.fromkeys("ab", 0)

    def fun(x: Tensor, name: str) -> Tensor:
        used[name] = used.pop(name) + 1
        return x.sin() * used[name]

    y = leaf(numbers(3))
    for name in "ab":
        y = MIXED[ck](lambda x, name=name: fun(x, name))(y)
    y.sum().backward()
    assert list(used) == ["a", "b"]


@pytest.mark.parametrize("ck", MIXED)
def test_what_a_thread_hands_over_during_a_rerun_stays(ck: str) -> None:
    holder = SimpleNamespace(ready=threading.Event(), rows=queue.Queue(), batch=futures.Future(), scale=1.0)
    turn = itertools.count()

    def hand_over() -> None:
        holder.ready.set()
        holder.rows.put(1)
        holder.batch.set_result(1)

    def fun(x: Tensor) -> Tensor:
        holder.scale = 2.0
        if next(turn) == 1:
            thread = threading.Thread(target=hand_over)
            thread.start()
            thread.join()
        return x.sin() * holder.scale

    MIXED[ck](fun)(leaf(numbers(3))).sum().backward()
    assert holder.ready.is_set()
    assert holder.rows.unfinished_tasks == 1
    assert holder.batch.done()


class Factory(OrderedDict[str, Any]):
    """It holds classes, and gives instances of them."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Shelf(dict[str, Any]):
    """It counts what its user puts there and takes out."""

    used = 0

    def __getitem__(self, key: str) -> Any:
        self.used += 1
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.used += 1
        super().__setitem__(key, value)


class Row(list[Any]):
    """It gives copies."""

    def __getitem__(self, i: Any) -> Any:
        return copy.copy(super().__getitem__(i))

    def __iter__(self) -> Any:
        raise AssertionError("nobody asks for all")


@pytest.mark.parametrize("ck", MIXED)
def test_dicts_and_lists_with_methods_of_their_own(ck: str) -> None:
    """What they hold is read and put back past these methods."""
    parts = [SimpleNamespace(scale=2.0)]
    held = SimpleNamespace(made=Factory(act=nn.Tanh), shelf=Shelf(scale=3.0), row=Row(parts), turn=0)

    def fun(x: Tensor) -> Tensor:
        held.turn += 1
        held.shelf["scale"] = held.shelf["scale"] + 1.0
        return held.made["act"](x).sin() * held.shelf["scale"] * held.row[0].scale

    x = leaf(numbers(3))
    MIXED[ck](fun)(x).sum().backward()
    assert held.turn == 1
    assert dict(held.made.items()) == {"act": nn.Tanh}
    assert dict.get(held.shelf, "scale") == 4.0
    assert list.__getitem__(held.row, 0) is parts[0]
    assert held.shelf.used in (3, 6)  # by one run, or two
    expected = leaf(numbers(3))
    (expected.tanh().sin() * 8.0).sum().backward()
    assert_same(x.grad, expected.grad)


@pytest.mark.parametrize("ck", MIXED)
def test_a_logger_that_is_made_between_forward_and_rerun_is_there_in_the_rerun(ck: str) -> None:
    logger, late, found = logging.getLogger(__name__), f"{__name__}.{ck}", deque[bool]()

    def fun(x: Tensor) -> Tensor:
        found.append(late in logger.manager.loggerDict)
        return x.sin().tanh()

    y = MIXED[ck](fun)(leaf(numbers(3)))
    logging.getLogger(late)
    y.sum().backward()
    assert list(found) == [False, True]


@CHECKED
def test_a_list_that_several_calls_put_tensors_and_numbers_into(transform: str) -> None:
    """It holds those of the forward in the end."""
    items: list[Any] = []

    def program(ck: Decorator, x: Tensor) -> Tensor:
        def layer(x: Tensor, k: int) -> Tensor:
            y = x.sin()
            items.extend([y.detach(), k])
            return y * k

        for k in (1, 2, 3):
            x = ck(layer)(x, k)
        return x

    gradient(program, plain, transform)
    expected, items = items, []
    gradient(program, remat, transform)
    assert items[1::2] == [1, 2, 3]
    if transform == ".backward()":
        assert_same(items, expected)


@CHECKED
@pytest.mark.parametrize("holder", ["list", "dict", "slots", "class", "function", "deque"])
def test_numbers_that_change_in_containers(holder: str, transform: str) -> None:
    class Slots:
        __slots__ = ("k",)

    class Settings:
        k = 0

    def function() -> None: ...

    def program(ck: Decorator, x: Tensor) -> Tensor:
        items: Any = {"list": [0], "dict": {0: 0}, "deque": deque([0])}.get(holder)
        named: Any = {"slots": Slots(), "class": Settings, "function": function}.get(holder)
        for k in (1, 2):
            if items is not None:
                items[0] = k
            else:
                named.k = k
            x = ck((lambda x: torch.sin(x * items[0])) if named is None else lambda x: torch.sin(x * named.k))(x)
        return x

    if holder == "deque":
        with pytest.raises(CheckpointError, match=r"call 1.*test_state\.py:\d+ got the arguments .*2.*where.*1"):
            agree(program, transform)
    else:
        agree(program, transform)


class Window:
    """Settings in a class, and in its base."""

    size, history = 1, [1.0]


class Narrow(Window):
    scale = torch.tensor(2.0, dtype=torch.float64)


class Windowed(nn.Module):
    shift = 0

    def forward(self, x: Tensor) -> Tensor:
        Windowed.shift += 1
        Narrow.history.append(2.0)
        Narrow.scale = Narrow.scale * 2
        mask = torch.ones(3, 3, dtype=x.dtype).tril(Narrow.size - self.shift)  # no call that depends on x
        return (mask @ x * len(Window.history) * Narrow.scale).sin()


@pytest.mark.parametrize("kind", [plain, *MIXED.values()])
def test_attributes_of_classes(kind: Decorator) -> None:
    Windowed.shift, Window.size, Window.history, Narrow.scale = 0, 1, [1.0], torch.tensor(2.0, dtype=torch.float64)
    x = leaf(numbers(3))
    y = kind(Windowed())(x)
    Window.size = 3
    (gradient,) = torch.autograd.grad(y.sum(), x)
    mask = torch.ones(3, 3, dtype=x.dtype).tril()
    assert_same(gradient, mask.T @ (mask @ x.detach() * 8).cos() * 8)
    assert (Windowed.shift, Window.size, Window.history) == (1, 3, [1.0, 2.0])
    assert_same(Narrow.scale, torch.tensor(4.0, dtype=torch.float64))


@CHECKED
def test_tensors_that_change_places(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        ws = [numbers(3, seed=1), numbers(3, seed=2)]
        y = ck(lambda x: torch.sin(x * ws[0]) * ws[1])(x)
        ws.reverse()
        return y

    agree(program, transform)


@pytest.mark.parametrize("numbers_of", [(1.0, 1.0 + 1e-9), (1e-9, 2e-9), (1.7e9, 1.7e9 + 1)])
def test_numbers_that_differ_a_little(numbers_of: tuple[float, float]) -> None:
    held, x = deque([numbers_of[0]]), leaf(numbers(3))
    y = remat(lambda x: x.sin() * held[0])(x)
    held[0] = numbers_of[1]
    with pytest.raises(CheckpointError, match="got the arguments"):
        y.sum().backward()


def test_numbers_computed_from_tensors_may_be_rounded() -> None:
    held, x = deque([1.0]), leaf(numbers(3))
    y = remat(lambda x: x.sin() * (x.detach().norm().item() * held[0]))(x)
    held[0] = 1 + 1e-9
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_a_number_that_is_none() -> None:
    x = leaf(numbers(3))
    y = remat(lambda x: x.sin() * x.detach().norm().item() * float("nan"))(x)
    assert torch.autograd.grad(y.sum(), x)[0].isnan().all()


@CHECKED
def test_a_constant_that_is_changed_later(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        w = numbers(3, seed=1)
        out, pullback = vjp(ck(lambda x: x.sin() * w.cos()), x)
        w.add_(1)
        return pullback(torch.ones_like(out))[0]

    with pytest.raises(CheckpointError, match=r"\[3\].*changed in place.*clone"):
        gradient(program, remat, transform)


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
def test_a_change_through_a_view_of_another_argument(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        def fun(whole: Tensor, part: Tensor, x: Tensor) -> Tensor:
            part.mul_(2)
            return (whole * x * whole).sin()

        whole = numbers(3, seed=1)
        return ck(fun)(whole, whole[:2], x)

    gradient(program, plain, transform)
    with pytest.raises(RematError, match=r"shape \[3\] and \[2\] in place .* share their memory"):
        gradient(program, remat, transform)


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


@CHECKED
def test_the_generator_of_python(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        random.seed(0)
        for _ in range(3):
            x = ck(lambda x: torch.sin(x * random.random() + random.gauss(0, 1)))(x)
        return x * random.random()

    agree(program, transform)


@CHECKED
def test_the_generator_of_numpy(transform: str) -> None:
    def program(ck: Decorator, x: Tensor) -> Tensor:
        np.random.seed(0)
        for _ in range(3):
            x = ck(lambda x: torch.sin(x * np.random.rand() + np.random.randn()))(x)
        return x * np.random.rand()

    agree(program, transform)


def test_a_function_that_seeds() -> None:
    def fun(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x.sin()

    torch.manual_seed(0)
    x = leaf(numbers(3))
    y = remat(fun)(x)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    torch.rand(3)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert_same(torch.rand(3), expected)


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
        held = deque([w])
        return remat(lambda x: grad(lambda v: (v * x).sin().sum())(held[0]))(numbers(3)).sum()

    with pytest.raises(RematError, match=r"lambda.*deque.*argument"):
        grad(loss)(numbers(3))


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


@pytest.mark.parametrize("depth", range(3))
def test_what_is_replaced_and_only_handed_on_may_come_with_a_graph_that_is_gone(depth: int) -> None:
    """Functions inside are given it, or find it, and none of them reads it."""

    def run(ck: Decorator) -> list[Tensor]:
        x = leaf(numbers(3))
        state = nn.Module()
        state.last = (x * 5).cos()
        state.last.sum().backward()
        ignores = ck(lambda x, unused: (x * 2).sin())
        inside = [lambda x: ignores(x, state.last)]
        for _ in range(depth):
            inside.append(ck(lambda x, fun=inside[-1]: fun(x) * 1))
        fun = inside[-1]

        def replaces(x: Tensor) -> Tensor:
            state.last = fun(x)
            return state.last.exp()

        return [*torch.autograd.grad(ck(replaces)(x).sum(), x), *torch.autograd.grad(ck(replaces)(x).sum(), x)]

    assert_same(run(remat), run(plain))


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


def test_a_constant_that_is_found_where_another_one_was_is_an_error() -> None:
    found: deque[Tensor] = deque()

    def fun(x: Tensor) -> Tensor:
        if found:
            return x.sin() * found[0].cos()
        read = [torch.ones(3, dtype=torch.float64) for _ in range(50)]
        for t in read:
            t.cos()
        died = {*map(id, read)}
        del read, t
        found.append(at_an_address_of(died, lambda: torch.full((3,), 2.0, dtype=torch.float64)))
        return x.sin() * found[0].sin()

    y = remat(fun)(leaf(numbers(3))).sum()
    with pytest.raises(CheckpointError, match="that its forward run was not seen to read"):
        y.backward()


def test_a_result_that_is_where_a_parameter_was_is_computed_again() -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(1)
        parameters = [nn.Parameter(out_of_sight()) for _ in range(50)]
        torch.stack(parameters)
        died = {*map(id, parameters)}
        del parameters
        with torch._C.DisableTorchFunction():  # as an extension does it
            return at_an_address_of(died, lambda: x.sin())

    remat(fun)(leaf(numbers(3))).sum().backward()
    assert len(runs) == 2


def test_draws_three_deep() -> None:
    """The states of generators, which the innermost call compares, are nothing that those around it read."""

    def fun(wrap: Decorator, inner: Decorator) -> Tensor:
        torch.manual_seed(0)
        x = leaf(numbers(3))
        y = wrap(lambda x: inner(lambda x: inner(F.dropout)(x).sin())(x).cos())(x)
        return torch.autograd.grad(y.sum(), x)[0]

    assert_same(fun(checkpoint(use_reentrant=False), remat), fun(plain, plain))


class CountingList(list):  # type: ignore[type-arg]
    total = 0

    def append(self, item: Any) -> None:
        self.total += 1
        super().append(item)


class CountingDict(dict):  # type: ignore[type-arg]
    total = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.total += 1
        super().__setitem__(key, value)


@CHECKED
def test_attributes_of_lists_and_dicts(transform: str) -> None:
    """They are put back with what the lists and dicts hold."""

    def program(ck: Decorator, x: Tensor) -> Tensor:
        history, table = CountingList(), CountingDict()

        def fun(x: Tensor) -> Tensor:
            history.append(1)
            table["a"] = 2
            return x.sin() * (history.total + 2 * table.total)

        fun = ck(fun)
        y = fun(x) + fun(x)
        held.append((history, table))
        return y

    held: list[Any] = []
    agree(program, transform)
    assert [(h.total, len(h), t.total) for h, t in held] == [(2, 2, 2)] * 2


def test_a_result_that_the_next_call_detaches() -> None:
    """Its node is asked for nothing, though it was freed."""

    def run(ck: Decorator) -> Any:
        calls: list[int] = []
        w = leaf(numbers(3, 3))

        def step(x: Tensor, h: Tensor) -> Tensor:
            calls.append(0)  # so that it is watched
            return torch.tanh(x @ w + h.detach())

        h = numbers(2, 3)
        for seed in range(3):
            h = ck(step)(numbers(2, 3, seed=seed), h)
            h.sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
        return w.detach(), w.grad

    assert_same(run(remat), run(plain))
