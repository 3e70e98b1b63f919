"""Functions that look as if their code showed what they do, and do something else besides."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import assert_same, leaf, numbers
from torch import Tensor, nn
from torch.func import grad

from remat import CheckpointError, _code, _pure, remat
from remat.compat import checkpoint


class Case(NamedTuple):
    """One call, and what happens between it and the backward."""

    fun: Callable[..., Tensor]
    args: tuple[Any, ...]
    wrt: tuple[Tensor, ...]
    then: Callable[[], Any] = lambda: None


MODEL: Any = None


class Recursive(nn.Module):
    """A method that calls its own module, by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.n = nn.Parameter(numbers(3)), 0
        self.extra = [leaf(numbers(3, seed=1))]
        self.owner = (self,)

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return (x * self.w * self.extra[0] * self.n).tanh()

    def by_a_global(self, x: Tensor) -> Tensor:
        return MODEL(x.sin()) * 1.0  # type: ignore[no-any-return]

    def by_a_tuple(self, x: Tensor) -> Tensor:
        return self.owner[0](x.sin()) * 1.0

    def by_a_helper(self, x: Tensor) -> Tensor:
        return helper(x.sin()) * 1.0


def helper(x: Tensor) -> Tensor:
    return MODEL(x)  # type: ignore[no-any-return]


def recursive(name: str) -> Case:
    global MODEL
    MODEL, x = Recursive(), leaf(numbers(2, 3, seed=2))
    return Case(getattr(MODEL, name), (x,), (x, MODEL.w, MODEL.extra[0]))


class ReadsBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm((x - self.norm.running_mean).sin())
        return y * y  # type: ignore[no-any-return]


class ReadsAfter(ReadsBefore):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y * self.norm.running_var.sqrt()).sin()  # type: ignore[union-attr,operator,no-any-return]


def statistics(kind: type[nn.Module]) -> Case:
    x = leaf(numbers(4, 3))
    return Case(kind(), (x,), (x,))


def statistics_as_an_argument() -> Case:
    norm, x = nn.BatchNorm1d(3).double(), leaf(numbers(4, 3))

    def fun(x: Tensor, mean: Tensor) -> Tensor:
        y = ((x - mean) * 2).sin()
        return norm(y) * y  # type: ignore[no-any-return]

    return Case(fun, (x, norm.running_mean), (x,))


@dataclass
class Settings:
    p: float = 0.5


SETTINGS, USUAL = Settings(), Settings()


def equal_settings(x: Tensor) -> Tensor:
    return (x * x).sin() if SETTINGS == USUAL else (x * x).cos()


def settings_among_others(x: Tensor) -> Tensor:
    return (x * x).sin() if SETTINGS in (USUAL,) else (x * x).cos()


class Compares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings, self.usual = SETTINGS, USUAL

    def forward(self, x: Tensor) -> Tensor:
        return (x * x).sin() if self.are_equal(self.settings, self.usual) else (x * x).cos()

    def are_equal(self, a: Any, b: Any) -> bool:
        return a == b  # type: ignore[no-any-return]


def settings_as_text(x: Tensor) -> Tensor:
    return (x * x * len(f"{SETTINGS}")).sin()


def settings_by_format(x: Tensor) -> Tensor:
    return (x * x * float("{0.p}".format(SETTINGS))).sin()  # noqa: UP030, UP032


def settings(fun: Callable[..., Tensor]) -> Case:
    SETTINGS.p, x = 0.5, leaf(numbers(3))
    return Case(fun, (x,), (x,), lambda: setattr(SETTINGS, "p", 9.125))


class Roles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(numbers(3))
        self.register_buffer("b", numbers(3, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a * self.b.sin()).tanh()


def roles_that_changed() -> Case:
    module, x = Roles(), leaf(numbers(2, 3, seed=2))
    remat(module)(x)
    checkpoint(module, x, use_reentrant=False)
    a, b = module.a, module.b
    del module.a, module.b
    module.b = nn.Parameter(b)
    module.register_buffer("a", a.detach())
    return Case(module, (x,), (x, module.b))


class OfTheClass(nn.Module):
    k: float = 2.0
    w: Any = leaf(numbers(3))

    def __init__(self) -> None:
        super().__init__()
        self.k, self.w = 1.0, 1

    def forward(self, x: Tensor) -> Tensor:
        return ((x * __class__.k).sin() * __class__.w).sin()  # type: ignore[name-defined,no-any-return]


def attributes_of_the_class() -> Case:
    OfTheClass.k, x = 2.0, leaf(numbers(2, 3))
    return Case(OfTheClass(), (x,), (x, OfTheClass.w), lambda: setattr(OfTheClass, "k", 9.0))


class Initializes(nn.Module):
    """It has attributes with the names of what it uses of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.init = True

    def trunc_normal_(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0 + 1
        nn.init.trunc_normal_(y.detach())
        return (y * x).sin()


def draws_by_init() -> Case:
    torch.manual_seed(0)
    x = leaf(numbers(2, 3))
    return Case(Initializes(), (x,), (x,), lambda: torch.manual_seed(9))


class Noisy(nn.Sequential):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.noise = float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.noise


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Noisy(nn.Tanh(), nn.Sigmoid(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[:2](x).sin()


def slices() -> Case:
    module, x = Slices(), leaf(numbers(2, 3))
    torch.manual_seed(1)
    return Case(module, (x,), (x,), lambda: torch.manual_seed(9))


CASES: dict[str, Callable[[], Case]] = {
    "its own module, by a global": lambda: recursive("by_a_global"),
    "its own module, by a tuple": lambda: recursive("by_a_tuple"),
    "its own module, by a helper": lambda: recursive("by_a_helper"),
    "statistics, before": lambda: statistics(ReadsBefore),
    "statistics, after": lambda: statistics(ReadsAfter),
    "statistics, as an argument": statistics_as_an_argument,
    "settings that are equal": lambda: settings(equal_settings),
    "settings that another method compares": lambda: settings(Compares()),
    "settings among others": lambda: settings(settings_among_others),
    "settings as text": lambda: settings(settings_as_text),
    "settings by format": lambda: settings(settings_by_format),
    "names that change roles": roles_that_changed,
    "attributes of the class": attributes_of_the_class,
    "draws by nn.init": draws_by_init,
    "slices of a sequence": slices,
}
WAYS: dict[str, Callable[..., Any]] = {
    "remat": remat,
    "checkpoint": lambda fun: lambda *args: checkpoint(fun, *args, use_reentrant=False),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_same_as_plain(make: Callable[[], Case], way: Callable[..., Any], create_graph: bool) -> None:
    def run(way: Callable[..., Any]) -> Any:
        case = make()
        loss = (way(case.fun)(*case.args) * numbers(3, seed=9)).sum()
        case.then()
        return loss.detach(), torch.autograd.grad(loss, case.wrt, create_graph=create_graph)

    assert_same(run(way), run(lambda fun: fun))


def test_the_order_in_a_set_of_tensors_is_that_of_their_addresses() -> None:
    assert _pure.reads(lambda a, b: sum(x.sin() for x in {a, b})) is None
    assert _pure.reads(lambda a, b: sum(x.sin() for x in set((a, b)))) is None  # noqa: C405
    assert _pure.reads(lambda a: a.sin() if a.dim() in {1, 2} else a.cos()) is not None


@pytest.mark.parametrize("twice", [lambda x, items: (x, items, items), lambda x, items: (x, items, {"a": items})])
def test_a_list_that_is_given_twice(twice: Callable[..., Any]) -> None:
    def fun(x: Tensor, a: list[Tensor], b: Any) -> Tensor:
        a.append(x.sin())
        return x * (b["a"] if type(b) is dict else b)[-1].exp()

    x = leaf(numbers(3))
    loss = remat(fun)(*twice(x, [x])).sum()
    with pytest.raises(CheckpointError, match="differs from its forward run"):
        loss.backward()
    loss = checkpoint(fun, *twice(x, [x]), use_reentrant=False).sum()
    with pytest.raises(CheckpointError, match="changes a list or a dict that it is given twice"):
        loss.backward()

    def reads(x: Tensor, a: list[Tensor], b: Any) -> Tensor:
        return np.sin(1) * x * (a[-1] + (b["a"] if type(b) is dict else b)[-1]).exp()  # type: ignore[no-any-return]

    found, expected = (
        torch.autograd.grad(f(*twice(x, [x])).sum(), x)
        for f in (lambda *args: checkpoint(reads, *args, use_reentrant=False), reads)
    )
    assert_same(found, expected)


class Removes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.remove = True

    def forward(self, x: Tensor, items: list[int]) -> Tensor:
        if self.remove:
            items.remove(items[0])
        return x.tanh().sum()


def test_a_list_that_a_module_changes_by_a_name_of_its_own() -> None:
    items = [1, 2, 3]
    grad(lambda x: remat(Removes())(x, items))(torch.ones(2**16))
    assert items == [2, 3]


def test_a_function_of_torch_that_was_replaced_by_one_that_has_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = leaf(numbers(3)), leaf(numbers(3, seed=1))
    monkeypatch.setattr(torch, "dist", lambda a, b: ((a - b) * w).norm())
    (gradient,) = torch.autograd.grad(remat(lambda x: torch.dist(x, x.sin()))(x), w, create_graph=True)
    assert_same(gradient.detach(), torch.autograd.grad(torch.dist(x, x.sin()), w)[0])


def calls_itself(self: Any, x: Any) -> Any:
    for _ in range(3):
        x = self(x)
    return x


def hands_itself_on(self: Any, x: Any) -> Any:
    return helper(self, x.T)  # type: ignore[call-arg,arg-type]


def renames_itself(self: Any, x: Any) -> Any:
    y = x.sin()
    me = self
    return me(y)


def calls_itself_in_a_list(self: Any, x: Any) -> Any:
    return [self(y) for y in x]


@pytest.mark.parametrize("method", [calls_itself, hands_itself_on, renames_itself, calls_itself_in_a_list])
def test_methods_that_do_more_with_self_than_ask_it(method: Any) -> None:
    assert not _code.asks_alone(method.__code__), sys.version


def test_methods_that_ask_self_alone() -> None:
    assert _code.asks_alone((lambda self, x: self.a(x) + x @ self.b * self.c).__code__)


class Collects(nn.Module):
    """It appends to a list, or to its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.others = nn.ModuleList([nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        found.append(self.parts(x))
        return torch.stack(found).sin()

    def grow(self, x: Tensor) -> Tensor:
        self.parts.append(self.others[0])
        return self.parts(x).sin()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_list_beside_modules_that_are_lists(way: Callable[..., Any]) -> None:
    module, x = Collects(), leaf(numbers(2, 3))
    assert _pure.reads(module) is not None
    found, expected = (torch.autograd.grad(f(x).sum(), x) for f in (way(module), module))
    assert_same(found, expected)
    loss = way(module.grow)(x).sum()
    with pytest.raises(RuntimeError, match="was replaced"):
        loss.backward()
