"""What can be told of a function from its code, and that nothing goes wrong where that is relied on."""

import functools
import gc
import math
import operator
import random
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Fun, assert_same, in_turn, leaf, numbers
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import relu
from torch.nn.modules import module as module_hooks
from torch.utils.flop_counter import FlopCounterMode

from remat import CheckpointError, RematError, _code, _pure, policies, remat
from remat.compat import checkpoint

WAYS = pytest.mark.parametrize(
    "way", [lambda f, x: remat(f)(x), functools.partial(checkpoint, use_reentrant=False)], ids=["remat", "checkpoint"]
)
LAYERS = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
WEIGHT = numbers(3, 3, seed=7)
SCALE = 2.0
COUNT = 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.act = 3, F.gelu
        self.norm, self.linear, self.out = nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attend(self.norm(x)))

    def attend(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(-1, (self.heads, -1))
        return self.act(q / math.sqrt(q.shape[-1])).flatten(-2)


class Factor(Block):
    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


class Randomized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rrelu = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.rrelu(x)


class Lists(Block):
    def forward(self, x: Tensor) -> Tensor:
        for module in self._modules.values():
            x = module(x)
        return x


class Finds(Block):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * len(self.value)


class Both(Block):
    def __init__(self) -> None:
        super().__init__()
        self.acts = (torch.sin, torch.cos)

    def forward(self, x: Tensor) -> Tensor:
        for act in self.acts:
            x = act(x)
        return x


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(3, 3), "then": nn.Tanh()}).double()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return self.parts["first"](x)


class Described(Block):
    @property
    def factor(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Static(Block):
    @staticmethod
    def double_it(x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.double_it(x)


class Remembers(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return super().forward(x)


class InDoubles(nn.LayerNorm):
    """As in CLIP."""

    def __init__(self) -> None:
        super().__init__(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).type(x.dtype)


class AttendsTwice(Block):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(super().attend(x))


class RemembersBelow(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin())


class Indexed(Block):
    def __getitem__(self, index: int) -> Tensor:
        return WEIGHT[index]


def product(x: Tensor) -> Tensor:
    return torch.tanh(x @ x)


def calls_another(x: Tensor) -> Tensor:
    return F.softmax(product(x) * SCALE, -1)


def loops(x: Tensor) -> Tensor:
    found = [x.sin() for _ in range(2)]
    for i, y in enumerate(found):
        found.append(y * i) if i < 2 else None
    return torch.stack(found).sum(0)


def has_inner(x: Tensor) -> Tensor:
    y = x.cos()

    def inner(z: Tensor) -> Tensor:
        return z * y

    return inner(x)


def forgets(x: Tensor, y: Tensor | None = None) -> Tensor:
    del y
    return x.sin()


def captures(w: Any) -> Fun:
    return lambda x: torch.tanh(x @ w)


def scales(factor: float) -> Fun:
    return lambda x: torch.tanh(x * factor)


def uses(module: Any) -> Fun:
    return lambda x: module(x)


def reads_a_global_tensor(x: Tensor) -> Tensor:
    return x @ WEIGHT


def counts(x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x.sin()


def draws_by_hand(x: Tensor) -> Tensor:
    return x * random.random()


def calls_an_impure_one(x: Tensor) -> Tensor:
    return draws_by_hand(x).sin()


def writes_to_an_argument(x: Tensor) -> Tensor:
    x += 1
    return x.sin()


def writes_in_place(x: Tensor) -> Tensor:
    return x.mul_(2).sin()


def assigns_to_a_slice(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 1
    return y


def reads_an_attribute(x: Tensor) -> Tensor:
    return x * x.scale


def differentiates(x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: x.sin().sum())(x)


def writes_out(x: Tensor) -> Tensor:
    return torch.sin(x, out=WEIGHT)


def may_write_if_told(x: Tensor, flag: bool = False) -> Tensor:
    return F.relu(x, flag)


def catches(x: Tensor) -> Tensor:
    try:
        return torch.exp(torch.sin(x))
    except:  # noqa: E722
        return torch.cos(x)


def cleans_up(x: Tensor) -> Tensor:
    try:
        return torch.exp(torch.sin(x))
    finally:
        x = x + 1


def unpacks(*args: Any) -> Tensor:
    return F.relu(*args)


def unpacks_true(x: Tensor) -> Tensor:
    return F.dropout(x, *(0.0, True, True))


def hands_on(x: Tensor, *shape: int, **options: Any) -> Tensor:
    return torch.sum(x.reshape(*shape, -1), **options)


def waves(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.rfft(x) * torch.linalg.inv(x + 4 * torch.eye(3))[0, 0])


def may_write(x: Tensor) -> Tensor:
    return F.relu(x, True)


def may_write_and_is_imported(x: Tensor) -> Tensor:
    return relu(x, True)


def tells_others_by_name(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.0)
    return F.scaled_dot_product_attention(y, y, y, is_causal=True).sum(-1, keepdim=True)


def tells_others_and_may_write(x: Tensor) -> Tensor:
    return F.relu(x.sum(-1, keepdim=True), True)


def may_write_by_name(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def imports(x: Tensor) -> Tensor:
    import time

    return x * time.time()


def looks_by_name(x: Tensor) -> Tensor:
    return getattr(x, "sin")()  # noqa: B009


def generates(x: Tensor) -> Any:
    yield x.sin()


def assigns_to_a_cell() -> Fun:
    total = 0

    def fun(x: Tensor) -> Tensor:
        nonlocal total
        total = total + 1
        return x.sin()

    return fun


def matches(x: Tensor) -> Tensor:
    match x:
        case Tensor(grad=None):
            return x.sin()
    return x


@functools.wraps(F.gelu)
def looks_like_torchs(x: Tensor) -> Tensor:
    return x * 2


def calls_what_looks_like_torchs(x: Tensor) -> Tensor:
    return looks_like_torchs(x).sin()


def with_default(x: Tensor, w: Tensor = WEIGHT) -> Tensor:
    return x @ w


def hooked() -> nn.Module:
    module = Block()
    module.linear.register_forward_hook(lambda *_: None)
    return module


@dataclass
class Scale:
    factor: float = 2.0

    def of(self, x: Tensor) -> Tensor:
        return x * self.factor


class Options:
    def __init__(self, **options: Any) -> None:
        self.scale, self.power = Scale(), 2
        vars(self).update(options)


OPTIONS = Options()


def reads_global_settings(x: Tensor) -> Tensor:
    return x.sin() * OPTIONS.scale.factor**OPTIONS.power


class Configured(nn.Module):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options, self.linear = options, nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.options.scale.of(self.linear(x)) ** self.options.power


class Called(Scale):
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Asked(Options):
    def __getattr__(self, name: str) -> Any:
        return 2


class WithProperty(Options):
    @property
    def scale(self) -> Scale:  # type: ignore[override]
        return Scale()

    @scale.setter
    def scale(self, scale: Scale) -> None:
        pass


class ComparesByOthers(Options):
    __eq__ = operator.eq  # no function of Python's: it has no code


class Entries(dict[str, Any]):
    scale, power = Scale(), 2


class Counted(Scale):
    def of(self, x: Tensor) -> Tensor:
        self.factor = self.factor + 1
        return x * self.factor


def with_attribute(of: nn.Module | None = None, **attributes: Any) -> nn.Module:
    module = of or nn.ReLU()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Rematted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3).double())

    @remat
    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean(0))
        return torch.sin(x) + self.mean * x


KNOWN: dict[str, Any] = {
    "product": product,
    "calls another": calls_another,
    "loops": loops,
    "an inner function": has_inner,
    "a name that is deleted": forgets,
    "what may write": may_write_if_told,
    "True by name": tells_others_by_name,
    "an operation": F.normalize,
    "a captured tensor": captures(WEIGHT),
    "a captured number": scales(2.0),
    "a module": Block(),
    "its forward": Block().forward,
    "another method": Block().attend,
    "super": nn.Sequential(InDoubles(), AttendsTwice(), nn.Conv1d(3, 3, 1).double()),
    "a captured module": uses(LAYERS),
    "a captured method": uses(Block().attend),
    "a captured function": uses(product),
    "a captured operation": uses(torch.tanh),
    "captured ones": in_turn(torch.sin, LAYERS, product),
    "unpacks": unpacks,
    "hands on": hands_on,
    "of several namespaces": waves,
    "a builtin": torch.sin,
    "a stock module": nn.ReLU(),
    "one that has a stride": nn.AvgPool1d(1),
    "modules by name": ByName(),
    "settings": Configured(Options()),
    "global settings": reads_global_settings,
    "a global tensor": reads_a_global_tensor,
    "one of another function": uses(reads_a_global_tensor),
}
UNKNOWN: dict[str, Any] = {
    f.__name__: f
    for f in (
        counts,
        draws_by_hand,
        calls_an_impure_one,
        writes_to_an_argument,
        writes_in_place,
        assigns_to_a_slice,
        reads_an_attribute,
        differentiates,
        writes_out,
        may_write,
        may_write_and_is_imported,
        tells_others_and_may_write,
        catches,
        cleans_up,
        may_write_by_name,
        unpacks_true,
        without_gradient,
        imports,
        looks_by_name,
        generates,
        matches,
        with_default,
    )
} | {
    "assigns to a cell": assigns_to_a_cell(),
    "captures an impure one": uses(draws_by_hand),
    "captures a list": captures([WEIGHT]),
    "captures a tensor in a tuple": in_turn(torch.sin, WEIGHT),
    "a partial": functools.partial(product),
    "an object": types.SimpleNamespace(),
    "another builtin": torch.rrelu,
    "a module that remembers": Remembers(),
    "one below that remembers": RemembersBelow(),
    "a module with an operator": Indexed(),
    "a number of the class": Factor(),
    "a module by the name of an operation": Randomized(),
    "a module by no name": Lists(),
    "a property": Described(),
    "a static method": Static(),
    "a method that is remat'd": Rematted().forward,
    "a method with a list": types.MethodType(captures([WEIGHT]), Block()),
    "a range": Finds(range(3)),
    "a list": Finds([1.0]),
    "a module with a hook": hooked(),
    "a module with another forward": with_attribute(forward=draws_by_hand),
    "in place": nn.ReLU(inplace=True),
    "statistics": nn.InstanceNorm1d(3, track_running_stats=True),
    "an embedding that renormalizes": nn.Embedding(3, 3, max_norm=1.0),
    "a stock module with a method of its own": with_attribute(nn.Conv1d(3, 3, 1), _conv_forward=draws_by_hand),
    "a stock module with another forward": with_attribute(nn.BatchNorm1d(3), forward=draws_by_hand),
    "flattened weights": nn.LSTM(3, 3),
    "parametrized": nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("fun", KNOWN.values(), ids=KNOWN)
def test_known(fun: Any) -> None:
    assert _pure.reads(fun) is not None
    assert _pure.reads(fun) is _pure.reads(fun)


@pytest.mark.parametrize("fun", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown(fun: Any) -> None:
    assert _pure.reads(fun) is None


SPACES = {
    torch: "",
    Tensor: "",
    F: "",
    torch.linalg: "linalg_",
    torch.special: "special_",
    torch.fft: "fft_",
}


def test_operations_only_compute() -> None:
    """By the schemas of the ops: none writes to an argument, and those that draw are known to."""
    ops = set()
    for name in _code.OPS:
        assert any(hasattr(space, name) for space in SPACES)
        for space, prefix in SPACES.items():
            packet = getattr(torch.ops.aten, prefix + name, None) if hasattr(space, name) else None
            for overload in () if packet is None else packet.overloads():
                op = getattr(packet, overload)
                ops.add(name)
                assert not any(a.alias_info and a.alias_info.is_write and not a.is_out for a in op._schema.arguments)
                assert name in _code.DRAWS or torch.Tag.nondeterministic_seeded not in op.tags
    assert len(ops) > 0.9 * len(_code.OPS)


def test_who_draws() -> None:
    assert _pure.reads(nn.Dropout()) is not None
    drop = F.dropout
    drawing = (
        nn.Dropout(),
        F.dropout,
        torch.randn,
        lambda x: x * torch.rand(3),
        lambda x: drop(x),
        in_turn(torch.randn),
    )
    for fun, draws in {nn.Tanh(): False, **dict.fromkeys(drawing, True)}.items():
        found = _pure.reads(fun)
        assert found is not None
        assert found.draws == draws


CHANGES: dict[str, Callable[[Block], Any]] = {
    "a hook": lambda m: m.norm.register_forward_pre_hook(lambda *_: None),
    "another child": lambda m: setattr(m, "out", Remembers()),
    "another method": lambda m: setattr(m, "attend", draws_by_hand),
    "another class": lambda m: setattr(m, "__class__", Remembers),
    "another function": lambda m: setattr(m, "act", lambda x: x * random.random()),
    "a hook for all": lambda m: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


NO_SETTINGS: dict[str, Any] = {
    "with an operator": Options(scale=Called()),
    "that make attributes": Asked(),
    "with a property": WithProperty(),
    "of a container": Entries(),
    "with a comparison that is no function": ComparesByOthers(),
    "with a list": Options(power=[2]),
    "with a tensor": Options(power=WEIGHT),
    "with a method that assigns": Options(scale=Counted()),
    "with another method": Options(scale=random.Random()),
}


@pytest.mark.parametrize("options", NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_objects_that_are_no_settings(options: Any) -> None:
    assert _pure.reads(Configured(options)) is None


CHANGES_OF_SETTINGS: dict[str, Callable[[Options], Any]] = {
    "a list": lambda options: setattr(options, "power", [2]),
    "another object": lambda options: setattr(options, "scale", Called()),
    "another class": lambda options: setattr(options, "__class__", Asked),
    "another name": lambda options: setattr(options.scale, "of", draws_by_hand),
}


@pytest.mark.parametrize("change", CHANGES_OF_SETTINGS.values(), ids=CHANGES_OF_SETTINGS)
def test_settings_that_come_to_be_something_else(change: Callable[[Options], Any]) -> None:
    module = Configured(Options())
    assert _pure.reads(module) is not None
    change(module.options)
    assert _pure.reads(module) is None


@WAYS
def test_settings_count_as_they_were(way: Any) -> None:
    module, x = Configured(Options()), leaf(numbers(3, 3))
    assert _pure.reads(module) is not None
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).sin().sum(), inputs)
    y = way(module, x)
    module.options.scale.factor, module.options.power = 5.0, 1
    assert_same(torch.autograd.grad(y.sin().sum(), inputs), expected)
    assert (module.options.scale.factor, module.options.power) == (5.0, 1)


def test_two_settings_that_are_equal() -> None:
    first, second = Configured(Options()), Configured(Options())
    both = nn.Sequential(first, second)
    assert _pure.reads(both) is not None
    second.options.scale.factor = [2.0]
    assert _pure.reads(both) is None


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_known_before_a_change(change: Callable[[Block], Any]) -> None:
    module = Block()
    assert _pure.reads(module) is not None
    handle = change(module)
    assert _pure.reads(module) is None
    if hasattr(handle, "remove"):
        handle.remove()
        assert _pure.reads(module) is not None


def with_weight(w: Any) -> Fun:
    def fun(x: Tensor, w: Any = w) -> Tensor:
        return x * w

    return fun


def test_defaults_are_part_of_a_function() -> None:
    assert _pure.reads(with_weight(2.0)) is not None
    w, x = leaf(WEIGHT), leaf(numbers(3, 3))
    assert _pure.reads(with_weight(w)) is None
    expected = torch.autograd.grad((x * w).sum(), [x, w])
    assert_same(torch.autograd.grad(remat(with_weight(w))(x).sum(), [x, w]), expected)


def test_a_module_that_comes_to_work_in_place() -> None:
    module = nn.ReLU()
    assert _pure.reads(module) is not None
    module.inplace = True
    assert _pure.reads(module) is None


class Inherits(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = 0


def shadow(module: Inherits) -> None:
    del module.spare
    module.attend = draws_by_hand


def override(module: Inherits) -> None:
    Inherits.attend = draws_by_hand


def reload(module: Inherits) -> None:
    Block.attend.__code__ = draws_by_hand.__code__


@pytest.mark.parametrize("change", [shadow, override, reload])
def test_a_method_that_was_replaced(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Inherits()
    assert _pure.reads(module) is not None
    monkeypatch.setattr(Inherits, "attend", Block.attend)
    monkeypatch.delattr(Inherits, "attend")
    monkeypatch.setattr(Block.attend, "__code__", Block.attend.__code__)
    change(module)
    assert _pure.reads(module) is None


def test_a_tuple_that_was_replaced() -> None:
    module = Both()
    assert _pure.reads(module) is not None
    module.acts = (torch.sin, draws_by_hand)
    assert _pure.reads(module) is None


@pytest.mark.parametrize(("space", "name"), [(F, "gelu"), (torch, "tanh"), (Tensor, "tanh")])
def test_an_operation_that_was_replaced(space: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fun(x: Tensor) -> Tensor:
        return torch.tanh(F.gelu(x)).tanh()

    assert _pure.reads(fun) is not None
    monkeypatch.setattr(space, name, draws_by_hand)
    assert _pure.reads(fun) is None
    monkeypatch.undo()
    assert _pure.reads(fun) is not None


def test_nothing_is_kept_alive() -> None:
    module = Block()
    parts = [weakref.ref(x) for x in (module, module.linear, module.linear.weight)]
    assert _pure.reads(module) is not None
    assert _pure.reads(uses(module)) is not None
    del module
    gc.collect()
    assert [ref() for ref in parts] == [None] * 3


# Where it is relied on.


def gradients(fun: Any, x: Tensor, between: Callable[[], Any] = lambda: None) -> Any:
    y = checkpoint(fun, x, use_reentrant=False)
    between()
    parameters = list(fun.parameters()) if isinstance(fun, nn.Module) else []
    return torch.autograd.grad(y.sin().sum(), [x, *parameters])


@pytest.mark.parametrize("fun", [f for f in KNOWN.values() if f not in (KNOWN["another method"],)])
def test_same_as_plain(fun: Any) -> None:
    x = leaf(numbers(3, 3))
    assert_same(gradients(fun, x)[0], torch.autograd.grad(fun(x).sin().sum(), x)[0])


def test_dropout_draws_the_same_again() -> None:
    module, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).double(), leaf(numbers(3, 3))
    torch.manual_seed(0)
    found = gradients(module, x, lambda: torch.rand(5))
    torch.manual_seed(0)
    assert_same(found, torch.autograd.grad(module(x).sin().sum(), [x, *module.parameters()]))


def test_a_parameter_that_was_replaced_counts_as_it_was() -> None:
    module, x = Block(), leaf(numbers(3, 3))
    weight = module.linear.weight
    y = checkpoint(module, x, use_reentrant=False).sum()
    module.linear.weight = nn.Parameter(torch.zeros_like(weight))
    found = torch.autograd.grad(y, [x, weight])
    assert module.linear.weight is not weight
    module.linear.weight = weight
    assert_same(found, torch.autograd.grad(module(x).sum(), [x, weight]))


def forget(module: Block) -> None:
    _pure._found.clear()


def hook_for_a_while(module: Block) -> None:
    handle = module.linear.register_forward_hook(lambda *_: None)
    assert _pure.reads(module) is None
    handle.remove()


def note(module: Block) -> None:
    module.linear.output_shape = (3, 3)


@WAYS
@pytest.mark.parametrize("event", [forget, hook_for_a_while, note])
def test_what_changes_nothing_is_no_error(way: Any, event: Any) -> None:
    module, x = Block(), leaf(numbers(3, 3))
    y = way(module, x).sum()
    event(module)
    assert_same(torch.autograd.grad(y, x), torch.autograd.grad(module(x).sum(), x))


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.generator(x))


@WAYS
def test_what_it_does_not_read_may_change(way: Any) -> None:
    module, x = Adversaries(), leaf(numbers(3, 3))
    y = way(module, x).sum()
    with torch.no_grad():
        module.steps += 1
        module.critic.weight.zero_()
    assert_same(torch.autograd.grad(y, x), torch.autograd.grad(module(x).sum(), x))


@WAYS
def test_a_parameter_that_there_was_none_of(way: Any) -> None:
    module, x = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()).double(), leaf(numbers(3, 3))
    expected = torch.autograd.grad(module(x).sum(), x)
    y = way(module, x).sum()
    module[0].bias = nn.Parameter(numbers(3))
    assert_same(torch.autograd.grad(y, x), expected)
    assert module[0].bias is not None


@WAYS
def test_the_order_of_parameters_stays(way: Any) -> None:
    module, x = Block(), leaf(numbers(3, 3))
    names = [name for name, _ in module.named_parameters()]
    y = way(module, x).sum()
    module.linear.weight = nn.Parameter(module.linear.weight.detach().clone())
    y.backward()
    assert [name for name, _ in module.named_parameters()] == names


def test_a_parameter_that_was_changed_in_place_is_an_error() -> None:
    module, x = Block(), leaf(numbers(3, 3))

    def change() -> None:
        with torch.no_grad():
            module.linear.weight.zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(module, x, change)


@pytest.mark.parametrize("change", [c for name, c in CHANGES.items() if "hook" not in name])
def test_a_module_that_was_changed_is_an_error(change: Callable[[Block], Any]) -> None:
    module, x = Block(), leaf(numbers(3, 3))
    y = checkpoint(module, x, use_reentrant=False).sum()
    change(module)
    with pytest.raises(CheckpointError, match=r"a module or a function that .* uses was replaced"):
        y.backward()


@pytest.mark.parametrize("register", ["of the module", "of all modules"])
def test_a_hook_that_is_registered_after_the_forward(register: str) -> None:
    module, x, seen = Block(), leaf(numbers(3, 3)), []
    expected = torch.autograd.grad(module(x).sum(), x)
    made = checkpoint(module, x, use_reentrant=False).sum(), remat(module)(x).sum()
    hook = (
        module.norm.register_forward_hook if register == "of the module" else module_hooks.register_module_forward_hook
    )
    handle = hook(lambda module, *_: seen.append(module))
    try:
        assert_same(torch.autograd.grad(made[0], x), expected)
        assert module.norm in seen
        with pytest.raises(CheckpointError, match="given a hook"):
            torch.autograd.grad(made[1], x)
    finally:
        handle.remove()


ACTIVATION: Any = torch.tanh


def activated(x: Tensor) -> Tensor:
    return ACTIVATION(x).cos()


@WAYS
def test_a_hook_for_all_modules_where_a_name_comes_to_mean_a_module(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(numbers(3))
    assert_same(*(torch.autograd.grad(f(x).sum(), x) for f in (functools.partial(way, activated), activated)))
    monkeypatch.setattr(f"{__name__}.ACTIVATION", nn.Tanh())
    handle = module_hooks.register_module_forward_hook(lambda module, args, out: 2 * out)
    try:
        expected = torch.autograd.grad(activated(x).sum(), x)
        assert _pure.reads(activated) is None
        assert_same(torch.autograd.grad(way(activated, x).sum(), x), expected)
    finally:
        handle.remove()


def test_a_counter_of_flops_around_the_backward() -> None:
    module, x = Block(), leaf(numbers(3, 3))
    y = checkpoint(module, x, use_reentrant=False).sum()
    with FlopCounterMode(display=False) as counter:
        y.backward()
    assert counter.get_total_flops() > 0


def test_children_that_change_places_are_an_error() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    def swapped(module: Any) -> None:
        module.a, module.b = module.b, module.a

    def renamed(module: Any) -> None:
        a, b = module.a, module.b
        del module.a, module.b
        module.b, module.a = a, b

    for change in (swapped, renamed):
        for way in (remat, lambda module: functools.partial(checkpoint, module, use_reentrant=False)):
            module = Two()
            y = way(module)(leaf(numbers(3, 3)))
            change(module)
            with pytest.raises(CheckpointError, match="was replaced"):
                y.sum().backward()


@pytest.mark.parametrize("make", [lambda f: f, lambda f: lambda x, flag: f(x, flag)])
def test_an_operation_that_is_told_to_write(make: Any) -> None:
    fun = make(lambda x, flag: may_write_if_told(x, flag).sin())
    with pytest.raises(RematError, match=r"changes .*in place, at .*test_pure"):
        remat(fun)(leaf(numbers(3, 3)).sin(), True)
    x = leaf(numbers(3, 3))
    found = checkpoint(fun, x.sin(), True, use_reentrant=False).sum()
    assert_same(torch.autograd.grad(found, x), torch.autograd.grad(fun(x.sin(), True).sum(), x))


@pytest.mark.parametrize("way", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_an_operation_that_is_told_to_write_by_an_attribute_is_an_error(way: Any) -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.write = True

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x, self.write)

    with pytest.raises(RematError, match=r"changes .*in place.*a place out of sight"):
        way(Told())(leaf(numbers(3, 3)).sin())


def test_globals_count_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(numbers(3, 3))
    expected = torch.autograd.grad(calls_another(x).sin().sum(), x)
    y = checkpoint(calls_another, x, use_reentrant=False).sin().sum()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    monkeypatch.setitem(globals(), "product", torch.sin)
    assert_same(torch.autograd.grad(y, x), expected)
    assert globals()["SCALE"] == 3.0


FREE = leaf(numbers(3, 3, seed=8))


def reads_globals(x: Tensor) -> Tensor:
    return torch.tanh(reads_a_global_tensor(x) @ FREE)


@WAYS
def test_global_tensors_count_as_they_were(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, free = leaf(numbers(3, 3)), FREE
    assert _pure.reads(reads_globals) is not None
    expected = torch.autograd.grad(reads_globals(x).sin().sum(), [x, free])
    for other in (leaf(numbers(3, 3, seed=9)), nn.Parameter(numbers(3, 3)), None):
        y = way(reads_globals, x).sin().sum()
        with monkeypatch.context() as patch:
            if other is None:
                patch.delitem(globals(), "FREE")
            else:
                patch.setitem(globals(), "FREE", other)
            assert_same(torch.autograd.grad(y, [x, free]), expected)
            assert globals().get("FREE") is other


@WAYS
def test_second_derivatives_by_global_tensors(way: Any) -> None:
    def derivatives(way: Any) -> Any:
        x = leaf(numbers(3, 3))
        g = torch.autograd.grad(way(reads_globals, x).sin().sum(), [x, FREE], create_graph=True)
        return torch.autograd.grad(sum(t.sin().sum() for t in g), [x, FREE])

    assert_same(derivatives(way), derivatives(lambda f, x: f(x)))


def test_global_tensors_under_transforms() -> None:
    def derivatives(fun: Fun) -> Any:
        by_x = vmap(grad(lambda x: fun(x).sin().sum()))(numbers(2, 3, 3))
        by_both = torch.autograd.grad(grad(lambda x: fun(x).sin().sum())(numbers(3, 3)).sin().sum(), FREE)
        return by_x, by_both

    assert_same(derivatives(remat(reads_globals)), derivatives(reads_globals))


@WAYS
def test_global_tensors_that_are_changed_in_place(way: Any) -> None:
    y = way(reads_globals, leaf(numbers(3, 3))).sum()
    with torch.no_grad():
        FREE.mul_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


@WAYS
def test_global_tensors_in_threads(way: Any) -> None:
    def derivative(way: Any, seed: int) -> Tensor:
        x = leaf(numbers(3, 3, seed=seed))
        return torch.autograd.grad(way(reads_globals, x).sin().sum(), x)[0]

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(functools.partial(derivative, way), range(40))]
    assert_same(found, [derivative(lambda f, x: f(x), seed) for seed in range(40)])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = 2.0, nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale * SCALE)


@pytest.mark.parametrize("way", [lambda f, x: remat(f)(x), functools.partial(checkpoint, use_reentrant=False)])
@pytest.mark.parametrize("make", [lambda m: m, uses, lambda m: m.forward, lambda m: lambda x: call(m, x)])
def test_numbers_in_modules_and_globals_count_as_they_were(
    way: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Scaled(), leaf(numbers(3, 3))
    inputs = [x, *module.parameters()]
    fun = make(module)
    assert _pure.reads(fun) is not None
    expected = torch.autograd.grad(fun(x).sum(), inputs)
    y = way(fun, x)
    module.scale = 3.0
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert_same(torch.autograd.grad(y.sum(), inputs), expected)
    assert module.scale == SCALE == 3.0


def call(fun: Fun, x: Tensor) -> Tensor:
    return fun(x)


class InTurn(nn.Module):
    def __init__(self, *functions: Fun) -> None:
        super().__init__()
        self.functions: Any = functions
        self.read, self.unread = (nn.Parameter(numbers(3, seed=seed)) for seed in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x * self.read)
        return x


@pytest.mark.parametrize("after", [(torch.sin, draws_by_hand), [torch.sin], ()])
def test_a_tuple_of_functions_that_comes_to_be_something_else(after: Any) -> None:
    module = InTurn(torch.sin)
    assert _pure.reads(module) is not None
    module.functions = after
    assert (_pure.reads(module) is None) == (after != ())


@pytest.mark.parametrize("way", [lambda f, x: remat(f)(x), functools.partial(checkpoint, use_reentrant=False)])
def test_a_parameter_that_is_not_read_may_be_changed(way: Any) -> None:
    module, x = InTurn(torch.sin), leaf(numbers(3))
    expected = torch.autograd.grad(module(x).sum(), [x, module.read])
    y = way(module, x)
    with torch.no_grad():
        module.unread.mul_(2)
    assert_same(torch.autograd.grad(y.sum(), [x, module.read]), expected)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_method_that_is_remat_d(reentrant: bool | None) -> None:
    def run(way: Callable[[Fun, Tensor], Tensor]) -> Any:
        module, x = Rematted(), leaf(numbers(3, 3))
        return *torch.autograd.grad(way(module.forward, x).sum(), x), module.mean

    way = functools.partial(checkpoint, use_reentrant=reentrant)
    assert_same(run((lambda fun, x: remat(fun)(x)) if reentrant is None else way), run(call))


@pytest.mark.parametrize("way", [lambda f, x: remat(f)(x), functools.partial(checkpoint, use_reentrant=False)])
def test_what_a_method_captures(way: Any) -> None:
    w, x = leaf(numbers(3, 3, seed=1)), leaf(numbers(3, 3))

    class Captures(Block):
        def attend(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) @ w)

    fun = Captures().attend
    assert _pure.reads(fun) is not None
    expected = torch.autograd.grad(fun(x).sum(), [x, w])
    y, original, w = way(fun, x), w, leaf(torch.zeros(3, 3).double())
    assert_same(torch.autograd.grad(y.sum(), [x, original]), expected)


def test_a_loop_variable_counts_as_it_was() -> None:
    modules, x = [Block() for _ in range(3)], leaf(numbers(3, 3))

    def all_of_them(way: Callable[[Fun, Tensor], Tensor]) -> Any:
        y = x
        for module in modules:
            y = way(lambda x: module(x), y)
        return torch.autograd.grad(y.sum(), [x, *(p for m in modules for p in m.parameters())])

    assert_same(all_of_them(functools.partial(checkpoint, use_reentrant=False)), all_of_them(lambda fun, x: fun(x)))


def test_a_function_of_the_function_that_was_replaced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls_deeper(x: Tensor) -> Tensor:
        return calls_another(x).sin()

    x = leaf(numbers(3, 3))
    y = checkpoint(calls_deeper, x, use_reentrant=False).sum()
    monkeypatch.setitem(globals(), "product", torch.sin)
    with pytest.raises(CheckpointError, match="calls_deeper uses was replaced"):
        y.backward()


# Stock modules that are known.


STOCK: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "BatchNorm1d, no momentum": (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "BatchNorm1d, no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "BatchNorm1d, eval": (lambda: nn.BatchNorm1d(3).eval(), (4, 3)),
    "BatchNorm2d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)), (2, 3, 4, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2, affine=False), (2, 2, 2, 2, 3)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 5)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, padding="same", bias=False), (2, 3, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2), (1, 2, 3, 3, 3)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (2, 3, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 2), (2, 3, 3, 3)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 2, 2), (1, 2, 2, 2, 2)),
    "Dropout2d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3)), (2, 3, 4, 4)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), (2, 3)),
    "LSTMCell": (lambda: Twice(nn.LSTMCell(3, 3, bias=False)), (2, 3)),
    "RNNCell": (lambda: nn.RNNCell(3, 4, nonlinearity="relu"), (3,)),
    "MultiheadAttention": (lambda: SelfAttention(), (2, 3, 4)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True), (2, 3, 4)),
    "TransformerEncoderLayer, a function": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.2, product_free), (2, 3, 4)),
    "TransformerDecoderLayer": (lambda: SelfDecoder(), (2, 3, 4)),
}


def product_free(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


class Twice(nn.Module):
    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.cell(x, self.cell(x)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class SelfDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 8, 0.2, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x * 2)


@pytest.mark.parametrize(
    "way", [remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False)], ids=["remat", "checkpoint"]
)
@pytest.mark.parametrize("stock", STOCK)
def test_stock_modules(stock: str, way: Any) -> None:
    make, shape = STOCK[stock]

    def run(way: Any) -> list[Any]:
        torch.manual_seed(0)
        module, x = make().double(), leaf(numbers(*shape))
        found: list[Any] = []
        for _ in range(2):
            module.zero_grad()
            (g,) = torch.autograd.grad(way(module)(x).sin().sum(), x, create_graph=True)
            (g * g).sum().backward()
            found += [g, x.grad, torch.rand(2), *(p.grad for p in module.parameters())]
            way(module)(x).cos().sum().backward()
            found += [x.grad.clone() if x.grad is not None else None, *(p.grad for p in module.parameters())]
            found += [t.clone() for t in module.state_dict().values()]
        return found

    assert _pure.reads(make()) is not None
    assert_same(run(way), run(lambda module: module))


def test_an_embedding() -> None:
    def run(way: Any) -> list[Any]:
        torch.manual_seed(0)
        table, x = nn.Embedding(5, 3, padding_idx=0).double(), leaf(numbers(4, 3))
        way(lambda i, x: (table(i) * x).sin())(torch.tensor([0, 1, 1, 3]), x).sum().backward()
        return [table.weight.grad, x.grad]

    expected = run(lambda f: f)
    assert_same(run(remat), expected)
    assert_same(run(lambda f: functools.partial(checkpoint, f, use_reentrant=False)), expected)


def test_an_embedding_that_comes_to_renormalize() -> None:
    table = nn.Embedding(5, 3)
    assert _pure.reads(table) is not None
    table.max_norm = 1.0
    assert _pure.reads(table) is None


@pytest.mark.parametrize("way", [remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False)])
def test_statistics_between_forward_and_backward(way: Any) -> None:
    def run(way: Any) -> list[Any]:
        norm, x = nn.BatchNorm1d(3).double(), leaf(numbers(4, 3))
        y = way(norm)(x)
        norm.eval()
        z = way(norm)(x)
        (y.sin() + z.cos()).sum().backward()
        return [x.grad, norm.weight.grad, *norm.buffers()]

    assert_same(run(way), run(lambda f: f))


def test_statistics_in_eval_that_are_changed_before_the_backward() -> None:
    norm, x = nn.BatchNorm1d(3).double().eval(), leaf(numbers(4, 3))
    y = checkpoint(norm, x, use_reentrant=False).sin().sum()
    norm.reset_running_stats()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("way", [remat, lambda f: functools.partial(checkpoint, f, use_reentrant=False)])
def test_statistics_in_eval_that_torch_changes_without_counting(way: Any) -> None:
    norm, other = nn.BatchNorm1d(3).double().eval(), nn.BatchNorm1d(3).double()
    x, w = numbers(4, 3), leaf(numbers(3))
    loss = way(lambda w: (norm(x) * w).sin())(w).sum()
    before = norm.running_mean._version  # type: ignore[union-attr]
    other(x)
    norm.train()(x)
    assert norm.running_mean._version == before  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"a BatchNorm that .*<lambda> calls in eval mode ran in training mode"):
        loss.backward()
    norm.eval()
    assert_same(
        torch.autograd.grad(way(lambda w: (norm(x) * w).sin())(w).sum(), w),
        torch.autograd.grad((norm(x) * w).sin().sum(), w),
    )


# What code does not show.


def normed(x: Tensor) -> Tensor:
    return (x - normed.mean) * normed.std  # type: ignore[attr-defined]


@WAYS
def test_attributes_of_functions(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, mean = leaf(numbers(3)), nn.Parameter(numbers(3, seed=1))
    monkeypatch.setattr(normed, "std", 2.0, raising=False)
    monkeypatch.setattr(normed, "mean", mean, raising=False)
    assert _pure.reads(normed) is None
    assert_same(*(torch.autograd.grad(y.sin().sum(), [x, mean]) for y in (way(normed, x), normed(x))))

    def loss(fun: Fun) -> Fun:
        def of(mean: Tensor, x: Tensor) -> Tensor:
            normed.mean = mean  # type: ignore[attr-defined]
            return fun(x).sin().sum()

        return of

    found, expected = (
        torch.func.grad(loss(f), argnums=(0, 1))(mean.detach(), x.detach()) for f in (lambda x: way(normed, x), normed)
    )
    assert_same(found, expected)


def test_a_function_that_gets_an_attribute() -> None:
    def fun(x: Tensor) -> Tensor:
        return x * (product.mean if hasattr_mean else 1.0)  # type: ignore[attr-defined]

    hasattr_mean = False
    assert _pure.reads(fun) is not None
    try:
        product.mean = 2.0  # type: ignore[attr-defined]
        assert _pure.reads(fun) is None
    finally:
        del product.mean  # type: ignore[attr-defined]
    assert _pure.reads(fun) is not None


class CalledOtherwise(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.scale = nn.Parameter(numbers(3))

    def _call_impl(self, x: Tensor) -> Tensor:
        return self.forward(x) * self.scale


class Asked:
    def __get__(self, module: Any, kind: Any = None) -> Any:
        return 2.0 if module is None else module.weight

    def __set__(self, module: Any, value: Any) -> None:
        raise AttributeError


class Hidden(nn.Linear):
    factor = Asked()

    def __init__(self) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.__dict__["factor"] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Parameters(dict):
    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * 2


def with_other_parameters() -> nn.Module:
    module = nn.Linear(3, 3, dtype=torch.float64)
    module._parameters = Parameters(module._parameters)
    return module


@WAYS
@pytest.mark.parametrize("make", [CalledOtherwise, Hidden, with_other_parameters])
def test_modules_that_do_more_than_their_forward(make: Any, way: Any) -> None:
    torch.manual_seed(0)
    module, x = make(), leaf(numbers(3))
    assert _pure.reads(module) is None
    wrt = [x, *module.parameters()]
    found, expected = (torch.autograd.grad(y.sin().sum(), wrt, allow_unused=True) for y in (way(module, x), module(x)))
    assert_same(found, expected)


def doubled(original: Fun) -> Fun:
    return lambda *args, **kwargs: original(*args, **kwargs) * 2


PATCHES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a function that Conv1d calls": (lambda: nn.Conv1d(3, 3, 1), F, "conv1d"),
    "a function that attention calls": (lambda: SelfAttention(), F, "scaled_dot_product_attention"),
    "a method of Conv1d": (lambda: nn.Conv1d(3, 3, 1), nn.Conv1d, "_conv_forward"),
    "a method of the encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8), nn.TransformerEncoderLayer, "_sa_block"),
    "how modules are called": (Block, nn.Module, "__call__"),
    "what that calls": (Block, nn.Module, "_call_impl"),
    "how a class is called": (Block, Block, "__call__"),
    "where a class finds attributes": (Block, Block, "__getattr__"),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_what_is_patched_after_a_call(patch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, space, name = PATCHES[patch]
    module = make()
    assert _pure.reads(module) is not None
    with monkeypatch.context() as context:
        context.setattr(space, name, doubled(getattr(space, name)))
        assert _pure.reads(module) is None
    assert _pure.reads(module) is not None


def test_code_that_is_replaced_in_what_looks_like_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(numbers(3))
    y = remat(calls_what_looks_like_torchs)(x).sum()
    monkeypatch.setattr(looks_like_torchs, "__code__", product.__code__)
    with pytest.raises(CheckpointError):
        y.backward()


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = 1.0, nn.Parameter(numbers(3))
        self.weight.scale = nn.Parameter(numbers(3, seed=1))  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.weight.scale * self.scale  # type: ignore[attr-defined]


def test_attributes_of_parameters() -> None:
    module, x = Quantized(), leaf(numbers(3))
    wrt = [x, module.weight, module.weight.scale]
    for policy in (None, policies.dots_saveable):
        found, expected = (
            torch.autograd.grad(f(x).sum(), wrt, create_graph=True) for f in (remat(module, policy=policy), module)
        )
        assert_same(found, expected)


def called_by(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


class Calls(Block):
    """Methods by which the module itself is called."""

    def itself(self, x: Tensor) -> Tensor:
        return self(x).sin()

    def by_another(self, x: Tensor) -> Tensor:
        return self.itself(x)

    def in_a_lambda(self, x: Tensor) -> Tensor:
        return (lambda y: self(y))(x)

    def in_a_list(self, x: Tensor) -> Tensor:
        return torch.stack([self(y) for y in (x, x)]).sum(0)

    def by_a_function(self, x: Tensor) -> Tensor:
        return called_by(self, x)

    def by_another_name(self, x: Tensor) -> Tensor:
        module = self
        return module(x)


@pytest.mark.parametrize("name", sorted(vars(Calls).keys() - vars(nn.Module).keys()))
def test_methods_that_call_their_module(name: str) -> None:
    def second_derivatives(way: Any) -> Any:
        torch.manual_seed(0)
        module, x = Calls(), leaf(numbers(3))
        (g,) = torch.autograd.grad(way(getattr(module, name))(x).sin().sum(), x, create_graph=True)
        g.sin().sum().backward()
        return g.detach(), x.grad, [p.grad for p in module.parameters()]

    assert _pure.reads(getattr(Calls(), name)) is not None
    assert_same(second_derivatives(remat), second_derivatives(lambda f: f))


def test_methods_that_ask_their_module_alone() -> None:
    class Unknown(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.checkpointed(x, print)

        def checkpointed(self, x: Tensor, see: Any) -> Tensor:
            see(x)
            return remat(self.attend)(x)

    assert _pure.reads(Unknown().forward) is None
    assert _pure.reads(Unknown().attend) is not None
