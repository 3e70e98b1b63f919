"""What a function under remat may rely on: what is as at the call, what is found, what is left as it was."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import gc
import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import optree
import pytest
import torch
from helpers import (
    KEEPS,
    TRANSFORMS,
    UNIT,
    CountOps,
    ReadsTwice,
    Times,
    activation,
    assert_same,
    leaf,
    numbers,
    plain,
    with_constants,
)
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from remat import CheckpointError, RematError, checkpoint, is_rerunning, remat
from remat._places import still_filled
from remat.debug import LiveBytes

Decorator = Callable[[Any], Any]
SETTINGS: dict[str, Callable[[Any, Tensor], Any]] = {
    ".backward()": lambda f, x: torch.autograd.grad(f(x := leaf(x)).sum(), x)[0],
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vmap(grad)": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, x.cos()])),
    "grad(grad)": lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).sin().sum())(x),
    "jvp(grad)": lambda f, x: jvp(grad(lambda x: f(x).sum()), (x,), (x.cos(),)),
}
EACH_SETTING = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def same(setting: Any, program: Callable[[Decorator], Any], *shape: int) -> None:
    x = numbers(*(shape or (3,)))
    assert_same(setting(program(remat), x), setting(program(plain), x))


# What has attributes keeps them.


@EACH_SETTING
def test_a_decorated_function_in_a_cell_keeps_its_attributes(setting: Any) -> None:
    def program(ck: Decorator) -> Any:
        w = numbers(3, seed=1)

        def f(x: Tensor) -> Tensor:
            return x.sin() * f.scale * w

        f = ck(f)
        f.scale = 2.0
        return lambda x: ck(f)(x).cos()

    same(setting, program)


@EACH_SETTING
def test_an_attribute_of_a_decorated_function_changes_between_two_calls(setting: Any) -> None:
    """The two calls hold the same function, and each has its own attributes."""

    def program(ck: Decorator) -> Any:
        def run(x: Tensor) -> Tensor:
            w = x * 2

            def f(x: Tensor) -> Tensor:
                return x.sin() * f.scale * w

            f = ck(f)
            for f.scale in (2.0, 3.0):
                x = ck(lambda x: f(x).cos())(x)
            return x

        return run

    same(setting, program)


@pytest.mark.parametrize("captured", [False, True])
@EACH_SETTING
def test_a_tensor_keeps_what_somebody_has_given_to_it(setting: Any, captured: bool) -> None:
    def program(ck: Decorator) -> Any:
        def run(x: Tensor) -> Tensor:
            x = x * 1
            x.scale = 3.0
            return ck(lambda: x.sin() * x.scale)() if captured else ck(lambda x: x.sin() * x.scale)(x)

        return run

    same(setting, program)


# Captures that no code names.


class Slots:
    __slots__ = ("w",)


class OfClass:
    w: Any = None


REGISTRY: dict[str, Any] = {}


def by_name(name: str) -> Any:
    return REGISTRY[name]


def in_a_deque(w: Tensor) -> Any:
    held = deque([w])
    return lambda: held[0]


def in_a_slot(w: Tensor) -> Any:
    held = Slots()
    held.w = w
    return lambda: held.w


def in_a_class(w: Tensor) -> Any:
    OfClass.w = w
    return lambda: OfClass.w


def in_a_registry(w: Tensor) -> Any:
    REGISTRY["w"] = w
    return lambda: by_name("w")


def in_a_generator(w: Tensor) -> Any:
    def forever() -> Iterator[Tensor]:
        while True:
            yield w

    held = forever()
    return lambda: next(held)


HIDDEN = [in_a_deque, in_a_slot, in_a_class, in_a_registry, in_a_generator]
EACH_HIDDEN = pytest.mark.parametrize("hide", HIDDEN, ids=lambda h: h.__name__)


@EACH_HIDDEN
@pytest.mark.parametrize("read", [torch.mul, Times.apply], ids=["seen", "unseen"])
def test_a_leaf_is_found_wherever_it_is(hide: Any, read: Any) -> None:
    grads = []
    for ck in (remat, plain):
        w, x = leaf(numbers(3, seed=1)), leaf(numbers(3))
        get = hide(w)
        ck(lambda x, get=get: read(x.sin(), get()).cos())(x).sum().backward()
        grads.append((x.grad, w.grad))
    assert_same(*grads)


@EACH_HIDDEN
def test_a_tensor_with_a_graph_is_found_where_a_torch_function_reads_it(hide: Any) -> None:
    grads = []
    for ck in (remat, plain):
        v, x = leaf(numbers(3, seed=1)), leaf(numbers(3))
        get = hide(v.exp())
        ck(lambda x, get=get: (x.sin() * get()).cos())(x).sum().backward()
        grads.append((x.grad, v.grad))
    assert_same(*grads)


def by_an_extension(x: Tensor, w: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x * w


def test_a_parameter_deep_in_modules_that_an_extension_reads() -> None:
    grads = []
    for ck in (remat, plain):
        w = nn.Parameter(numbers(3, seed=1))
        module: nn.Module = nn.ParameterList([w])
        for _ in range(8):
            module = nn.Sequential(module)

        def fun(x: Tensor, module: nn.Module = module) -> Tensor:
            return by_an_extension(x.sin(), next(module.parameters())).cos()

        grad(lambda x, ck=ck, fun=fun: ck(fun)(x).sum())(numbers(3)).sum().backward()
        grads.append(w.grad)
    assert_same(*grads)


@pytest.mark.parametrize("read", [Times.apply, by_an_extension], ids=["Times", "Mul"])
@pytest.mark.parametrize("hide", [in_a_slot, in_a_class, in_a_generator], ids=lambda h: h.__name__)
def test_what_is_found_nowhere_is_an_error_of_the_forward(hide: Any, read: Any) -> None:
    """It names the op, shape and dtype, and says what to do."""
    get = hide(leaf(numbers(3, seed=1)).exp())
    with pytest.raises(RematError, match=r"(Times|[Mm]ul) .*shape \[3\], torch.float64.* Pass it as an argument"):
        remat(lambda x: read(x.sin(), get()).cos())(leaf(numbers(3)))


@EACH_HIDDEN
def test_hidden_tensors_of_a_transform_are_right_or_an_error(hide: Any) -> None:
    def loss(ck: Decorator) -> Any:
        def of(w: Tensor) -> Tensor:
            get = hide(w.exp())
            return ck(lambda x: (x.sin() * get()).cos())(numbers(3)).sum()

        return of

    assert_same(grad(loss(remat))(numbers(3)), grad(loss(plain))(numbers(3)))


# Parameters and buffers that `functional_call` has swapped in.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3, bias=False).double()
        self.second.weight = self.first.weight  # tied
        self.register_buffer("scale", numbers(3, seed=4))
        with torch.no_grad():
            self.first.weight.copy_(numbers(3, 3, seed=5))
            self.first.bias.copy_(numbers(3, seed=6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


GLOBAL = Block()


def by_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


class Around(nn.Module):
    def __init__(self, ck: Decorator, how: str) -> None:
        super().__init__()
        self.block = GLOBAL if how == "a global" else Block()
        block = self.block
        vars(self)["run"] = {  # not as a module of its own
            "a cell": lambda: ck(lambda x: block(x)),
            "the module": lambda: ck(block),
            "bound self": lambda: ck(block.forward),
            "a global": lambda: ck(by_global),
            "a list": lambda blocks=[block]: ck(lambda x: blocks[0](x)),
            "two deep": lambda: ck(lambda x: ck(lambda x: ck(block)(x))(x)),
        }[how]()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x).cos()


@pytest.mark.parametrize("how", ["a cell", "the module", "bound self", "a global", "a list", "two deep"])
@pytest.mark.parametrize("transform", ["base", "grad", "vmap(grad)", "grad(grad)"])
def test_parameters_and_buffers_of_functional_call(how: str, transform: str) -> None:
    """Tied weights, and a plain buffer that needs no gradient."""
    results = []
    for ck in (remat, plain):
        around, x = Around(ck, how), numbers(2, 3)
        own = {k: t.clone() for k, t in around.block.state_dict(keep_vars=True).items()}
        given = {f"block.{k}": t.detach() * 0.5 for k, t in around.block.named_parameters()}
        buffers = {"block.scale": numbers(3, seed=9)}

        def loss(given: Any, buffers: Any, x: Tensor, around: Any = around) -> Tensor:
            return functional_call(around, {**given, **buffers}, (x,)).sum()

        if transform == "base":
            given = {k: leaf(t) for k, t in given.items()}
            y = loss(given, buffers, x)
            y.backward()
            results.append({k: t.grad for k, t in given.items()})
        elif transform == "grad":
            results.append(grad(loss)(given, buffers, x))
        elif transform == "vmap(grad)":
            batch = {"block.scale": torch.stack([buffers["block.scale"], numbers(3, seed=10)])}
            results.append(vmap(grad(loss), (None, {"block.scale": 0}, None))(given, batch, x))
        else:
            norm = lambda *args, loss=loss: sum(g.square().sum() for g in grad(loss)(*args).values())  # noqa: E731
            results.append(grad(norm)(given, buffers, x))
        assert_same(
            {k: t.detach() for k, t in around.block.state_dict().items()}, {k: t.detach() for k, t in own.items()}
        )
    assert_same(*results)


# What surrounds the forward.


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.Tensor.sin else out


class DoublesOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


@pytest.mark.parametrize("mode", [Doubles, DoublesOps])
@pytest.mark.parametrize("depth", [1, 2])
def test_modes_around_the_forward_alone(mode: Any, depth: int) -> None:
    grads = []
    for ck in (remat, plain):
        x = leaf(numbers(3))
        with mode():
            y = ck(lambda x, ck=ck: (ck if depth == 2 else plain)(lambda x: x.sin().cos())(x).exp())(x)
        y.sum().backward()
        grads.append(x.grad)
    assert_same(*grads)
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


Handle = Callable[[Any, Any], Any]


class Handles(TorchFunctionMode):
    """Does more with the result of each torch call."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(func, func(*args, **(kwargs or {})))


class Handled(Tensor):
    """A class that does so itself."""

    handle: ClassVar[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return cls.handle(func, out) if isinstance(out, Tensor) else out


def reads_the_product() -> tuple[Handle, Tensor]:
    return lambda func, out: out.tanh() if func is F.linear else out, torch.ones(1)


def draws() -> tuple[Handle, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def handle(func: Any, out: Any) -> Any:
        return out * torch.rand(128, 128, generator=generator, dtype=out.dtype) if func is Tensor.sin else out

    return handle, torch.ones(1)


def writes() -> tuple[Handle, Tensor]:
    scale = numbers(1)

    def handle(func: Any, out: Any) -> Any:
        return out * scale.mul_(0.9).add_(0.1).clone() if func is Tensor.sin else out

    return handle, scale


def handled(make: Any, by: str, states: list[Tensor]) -> Callable[[Decorator], Any]:
    """A program whose torch calls a mode or a class handles."""

    def program(ck: Decorator) -> Any:
        handle, state = make()
        states.append(state)
        w = numbers(128, 128, seed=1)
        if by == "class":
            Handled.handle = staticmethod(handle)
            w = w.as_subclass(Handled)
        block = ck(lambda x: F.linear((x + w).sin(), w) + x)

        def fun(x: Tensor) -> Tensor:
            with contextlib.ExitStack() as modes:
                for _ in range({"mode": 1, "modes": 2}.get(by, 0)):
                    modes.enter_context(Handles(handle))
                    modes.enter_context(torch.device("cpu"))
                return cast(Tensor, block(x)).as_subclass(Tensor)

        return fun

    return program


BY = pytest.mark.parametrize("by", ["mode", "class", "modes"])


@EACH_SETTING
@BY
@pytest.mark.parametrize("make", [reads_the_product, draws])
def test_what_a_mode_or_a_class_does_with_a_result_belongs_to_the_function(make: Any, by: str, setting: Any) -> None:
    if setting is SETTINGS["vmap(grad)"]:
        setting = lambda f, x: vmap(grad(lambda x: f(x).sum()), randomness="same")(torch.stack([x, x.cos()]))  # noqa: E731
    same(setting, handled(make, by, []), 128, 128)


@BY
@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_what_a_mode_or_a_class_writes_to_is_written_once(ck: Decorator, by: str) -> None:
    states: list[Tensor] = []
    program = handled(writes, by, states)
    grads = [SETTINGS[".backward()"](program(way), numbers(128, 128)) for way in (ck, plain)]
    assert_same(*grads)
    assert_same(*states)


def halves_the_gradient(y: Any) -> Any:
    if y.requires_grad:
        y.register_hook(lambda g: g * 0.5)
    return y


LOOKS: dict[str, Callable[[Any], Any]] = {
    "hook": halves_the_gradient,
    "shape": lambda y: (y.shape, y)[1],
    "norm": lambda y: (y.norm(), y)[1],
    "sum": lambda y: y + 1,
    "plain": lambda y: y.as_subclass(Tensor) * 2,
    "in place": lambda y: y.mul_(2),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("nest", ["remat", "remat in remat", "remat in checkpoint"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_class_that_uses_its_results(look: str, nest: str, order: int) -> None:
    Handled.handle = staticmethod(lambda func, out: LOOKS[look](out) if func is F.linear else out)
    w = leaf(numbers(3, 3, seed=1))
    outer = functools.partial(functools.partial, checkpoint, use_reentrant=False)

    def derivative(ck: Decorator, outer: Any = plain) -> Any:
        x = leaf(numbers(3, 3).as_subclass(Handled))
        y = outer(lambda x: ck(lambda x: F.linear(x, w).sin())(x))(x).as_subclass(Tensor)
        wrt = [x, w]
        grads = torch.autograd.grad(y.sin().sum(), wrt, create_graph=order == 2)
        if order == 2:
            grads = torch.autograd.grad(grads[0].as_subclass(Tensor).square().sum(), wrt)
        return [g.as_subclass(Tensor).detach() for g in grads]

    around = {"remat": plain, "remat in remat": remat, "remat in checkpoint": outer}[nest]
    assert_same(derivative(remat, around), derivative(plain))


def test_memory_under_a_class_that_looks_at_its_results() -> None:
    Handled.handle = staticmethod(lambda func, out: (func is F.linear and out.shape, out)[1])
    w = leaf(numbers(64, 64, seed=1))

    def fun(x: Tensor) -> Tensor:
        for _ in range(8):
            x = F.linear(x, w).sin()
        return x

    def held(ck: Decorator) -> int:
        x = leaf(numbers(64, 64).as_subclass(Handled))
        with LiveBytes() as meter:
            y = ck(fun)(x)
        assert y.requires_grad
        return meter.current

    assert held(remat) * 4 < held(plain)


class OutOfSight(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
@pytest.mark.parametrize("what", ["write", "draw", "hook", "nothing"])
def test_a_mode_that_handles_calls_out_of_sight(ck: Decorator, what: str) -> None:
    count, x = numbers(3), leaf(numbers(3))

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        if what == "write":
            count.add_(1)
        elif what == "hook":
            x.register_hook(lambda g: g * 2)
        elif what == "draw":
            y = y * torch.rand(3, generator=torch.Generator())
        return y.add_(1).cos()  # its own may be written to

    with OutOfSight():
        if what != "nothing":
            with pytest.raises(RematError, match=r"handles it out of sight.*DisableTorchFunctionSubclass\(\) there"):
                ck(fun)(x)
            return
        y = ck(fun)(x)
    y.sum().backward()
    assert_same(x.grad, *torch.autograd.grad(fun(x).sum(), x))


class Adds(TorchFunctionMode):
    """Adds a number to sines, counts them, and says nothing about empty keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.count = leaf(numbers(1)), torch.zeros(1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert kwargs is None or kwargs
        out = func(*args, **(kwargs or {}))
        return out + self.number * self.count.add_(1) ** 0 if func is Tensor.sin else out


@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_a_mode_around_a_mode_in_the_function(ck: Decorator) -> None:
    def run(ck: Decorator) -> list[Any]:
        x = leaf(numbers(3))

        def outer(x: Tensor) -> Tensor:
            with Handles(lambda func, out: out):
                return cast(Tensor, ck(lambda h: h.sin().cos())(x)).sin()

        with Adds() as adds:
            y = ck(outer)(x)
        y.sum().backward()
        return [x.grad, adds.number.grad, adds.count]

    assert_same(run(ck), run(plain))


class ByInstance(Tensor):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Duck:
    """Not a tensor, but torch asks it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(numbers(3) if isinstance(a, Duck) else a for a in args), **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Defining your `__torch_function__` as a plain method")
def test_handlers_that_are_methods_of_objects() -> None:
    same(SETTINGS[".backward()"], lambda ck: lambda x: ck(lambda x: torch.add(Duck(), x.sin()).cos())(x))
    same(SETTINGS[".backward()"], lambda ck: lambda x: ck(lambda x: x.as_subclass(ByInstance).sin().cos())(x))


def test_a_function_may_keep_what_a_class_returns() -> None:
    kept = []

    def fun(x: Tensor) -> Tensor:
        positive = x > 0
        kept.append(positive)
        return torch.where(positive, x.sin(), x * 2).cos()

    def program(ck: Decorator) -> Any:
        Handled.handle = staticmethod(lambda func, out: out)
        return lambda x: cast(Tensor, ck(fun)(x.as_subclass(Handled))).as_subclass(Tensor)

    same(SETTINGS[".backward()"], program)
    assert all(isinstance(mask, Handled) for mask in kept)


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@pytest.mark.parametrize("in_thread", [False, True])
def test_context_variables_are_as_at_the_call(in_thread: bool) -> None:
    x = leaf(numbers(3))
    token = VARIABLE.set(3.0)
    y = remat(lambda x: x.sin() * VARIABLE.get())(x).sum()
    VARIABLE.reset(token)
    if in_thread:
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    else:
        y.backward()
    assert_same(x.grad, 3 * x.detach().cos())
    assert VARIABLE.get() == 1.0


COLLECTED: contextvars.ContextVar[Any] = contextvars.ContextVar("collected", default=None)


@KEEPS
@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
@pytest.mark.parametrize("collect", [list, dict, set])
def test_what_a_context_variable_collects_is_not_held(ck: Decorator, collect: Any) -> None:
    """The rerun finds what the variable holds then, as with torch's checkpoint."""

    def fun(x: Tensor) -> Tensor:
        y, found = x.sin(), COLLECTED.get()
        if isinstance(found, list):
            found.append(y)
        elif isinstance(found, dict):
            found["y"] = y
        elif found is not None:
            found.add(y)
        return y.cos()

    x, scale = leaf(numbers(3)), VARIABLE.set(3.0)
    token = COLLECTED.set(collect())
    y = ck(lambda x: fun(x) * VARIABLE.get())(x)
    found = COLLECTED.get()
    (collected,) = found.values() if collect is dict else found
    COLLECTED.reset(token)
    VARIABLE.reset(scale)
    ref = weakref.ref(collected)
    del found, collected, token
    assert ref() is None
    y.sum().backward()
    z = x.detach().requires_grad_()
    (z.sin().cos() * 3).sum().backward()
    assert_same(x.grad, z.grad)


@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
@pytest.mark.parametrize("holds", [[], {}, set(), OrderedDict()])
def test_a_context_variable_that_is_empty_in_the_backward_pass_can_be_read(ck: Decorator, holds: Any) -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("callbacks")

    def fun(x: Tensor) -> Tensor:
        for _ in variable.get():  # no default
            x = x.exp()
        return x.sin()

    x = leaf(numbers(3))

    def forward() -> Tensor:
        variable.set(holds)
        return cast(Tensor, ck(fun)(x))

    contextvars.copy_context().run(forward).sum().backward()  # nothing has set it there
    assert_same(x.grad, x.detach().cos())


def test_a_context_variable_that_the_function_sets_stays_in_the_rerun() -> None:
    def run() -> None:
        x = leaf(numbers(3))
        y = remat(lambda x: (VARIABLE.set(VARIABLE.get() + 1), x.sin())[1])(x)
        before = VARIABLE.get()
        y.sum().backward()
        assert VARIABLE.get() == before

    contextvars.copy_context().run(run)


@pytest.mark.parametrize("hold", ["cell", "argument", "list", "attribute"])
@EACH_SETTING
def test_explicit_generators_draw_the_same_again(setting: Any, hold: str) -> None:
    left = []

    def program(ck: Decorator) -> Any:
        generator = torch.Generator().manual_seed(7)
        held: Any = [generator]
        left.append(generator)

        def noisy(x: Tensor, g: Any) -> Tensor:
            return (x * torch.rand(3, generator=g, dtype=x.dtype)).sin() * torch.randn(3, generator=g, dtype=x.dtype)

        return {
            "cell": lambda: ck(lambda x: noisy(x, generator)),
            "argument": lambda: lambda x: ck(noisy)(x, generator),
            "list": lambda: ck(lambda x: noisy(x, held[0])),
            "attribute": lambda: ck(functools.partial(lambda x, m: noisy(x, m.g), m=_with(g=generator))),
        }[hold]()

    if setting is SETTINGS["vmap(grad)"]:
        setting = lambda f, x: vmap(grad(lambda x: f(x).sum()), randomness="same")(torch.stack([x, x.cos()]))  # noqa: E731
    same(setting, program)
    assert torch.equal(left[0].get_state(), left[1].get_state())


def _with(**attributes: Any) -> Any:
    module = nn.Module()
    vars(module).update(attributes)
    return module


@EACH_SETTING
def test_draws_in_a_fork_inside(setting: Any) -> None:
    def program(ck: Decorator) -> Any:
        def fun(x: Tensor) -> Tensor:
            y = F.dropout(x.sin(), 0.5)
            with torch.random.fork_rng(devices=[]):
                y = y + F.dropout(x, 0.5)
                torch.manual_seed(3)
                y = y * torch.rand(3, dtype=x.dtype)
            return y * F.dropout(y.cos(), 0.3)

        def seeded(x: Tensor) -> Tensor:
            torch.manual_seed(0)
            return ck(fun)(x)

        return seeded

    if setting is SETTINGS["vmap(grad)"]:
        setting = lambda f, x: vmap(grad(lambda x: f(x).sum()), randomness="different")(torch.stack([x, x]))  # noqa: E731
    same(setting, program)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("in_threads", [False, True])
def test_several_forwards_before_the_first_backward(order: tuple[int, ...], in_threads: bool) -> None:
    grads = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        w = leaf(numbers(3, 3))
        norm = nn.BatchNorm1d(3).double()
        fun = ck(lambda x, w=w, norm=norm: F.dropout(norm(x @ w).tanh(), 0.5))
        xs = [leaf(numbers(4, 3, seed=i)) for i in range(3)]
        ys = [fun(x).sum() for x in xs]
        for i in order:
            if in_threads:
                thread = threading.Thread(target=ys[i].backward)
                thread.start()
                thread.join()
            else:
                ys[i].backward()
        grads.append((w.grad, [x.grad for x in xs], [*norm.buffers()]))
    assert_same(*grads)


# What it costs is no matter of how it is written.


class Settings:
    factor = 2.0


def written_plainly(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sin().exp() * 2.0


def with_try(x: Tensor, w: Tensor) -> Tensor:
    try:
        return torch.tanh(x @ w).sin().exp() * 2.0
    finally:
        _ = None


def with_a_dict(x: Tensor, w: Tensor) -> Tensor:
    found: dict[str, Tensor] = {}
    found["h"] = torch.tanh(x @ w)
    return found["h"].sin().exp() * 2.0


def with_getattr(x: Tensor, w: Tensor) -> Tensor:
    return getattr(torch, "tanh")(x @ w).sin().exp() * getattr(Settings, "factor")  # noqa: B009


def with_a_print(x: Tensor, w: Tensor) -> Tensor:
    print(end="")
    return torch.tanh(x @ w).sin().exp() * 2.0


def with_an_op_in_place(x: Tensor, w: Tensor) -> Tensor:
    return (torch.tanh(x @ w).sin().exp() + 0).mul_(2.0)


def with_item(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).sin().exp() * torch.tensor(2.0).item()


WRITTEN = [with_try, with_a_dict, with_getattr, with_a_print, with_an_op_in_place, with_item]


@EACH_SETTING
@pytest.mark.parametrize("size", [3, 64])
def test_as_many_ops_however_it_is_written(setting: Any, size: int) -> None:
    def ops_of(fun: Any) -> Any:
        w = numbers(size, size, seed=1) / size
        with CountOps() as ops:
            setting(lambda x: remat(fun)(x, w), numbers(size, size))
        return {name: ops[name] for name in ("mm", "bmm", "tanh", "sin", "exp")}

    expected = ops_of(written_plainly)
    assert expected["tanh"] >= 2
    assert {f.__name__: ops_of(f) for f in WRITTEN} == {f.__name__: expected for f in WRITTEN}


@pytest.mark.parametrize("fun", [written_plainly, *WRITTEN], ids=lambda f: f.__name__)
def test_as_little_memory_however_it_is_written(fun: Any) -> None:
    x, w = leaf(torch.randn(64, 64)), leaf(torch.randn(64, 64))
    with LiveBytes() as meter:
        y = remat(fun)(x, w)
    assert meter.current == y.numel() * 4


# Meters see the truth.


@pytest.mark.parametrize("mode", [lambda: FlopCounterMode(display=False), ModuleTracker], ids=["flops", "modules"])
def test_memory_is_saved_under_meters(mode: Any) -> None:
    block = remat(lambda x: x.sin().exp().cos().tanh())
    x = activation().requires_grad_()
    with mode(), LiveBytes() as meter:
        y = block(block(block(x)))
        assert meter.current / UNIT == 3
        y.sum().backward()


@pytest.mark.parametrize("mode", [ModuleTracker, ModTracker, MemTracker])
@pytest.mark.parametrize("depth", [1, 2])
def test_trackers_of_modules(mode: Any, depth: int) -> None:
    """Two of them put hooks on tensors in the forward alone."""
    grads = []
    for ck, of in ((remat, mode), (plain, contextlib.nullcontext)):
        net, x = with_constants(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()), leaf(numbers(2, 3))
        fun = ck(lambda x, net=net: net(x).sin())
        with of(), LiveBytes() as meter:
            y = (ck(lambda x, fun=fun: fun(x) * 2) if depth == 2 else fun)(x)
            if ck is remat and mode is not MemTracker:
                assert meter.current == y.numel() * 8
            y.sum().backward()
        grads.append([p.grad for p in (x, *net.parameters())])
    assert_same(*grads)


def test_memory_is_saved_under_hooks_of_many_gradients() -> None:
    ws = [activation().requires_grad_() for _ in range(2)]
    handle = torch.autograd.graph.register_multi_grad_hook(ws, lambda grads: None)
    with LiveBytes() as meter:
        y = remat(lambda x: (x.sin().exp() * ws[0] + ws[1]).cos())(activation().requires_grad_())
        assert meter.current / UNIT <= 2  # the argument and the result
    y.sum().backward()
    handle.remove()


def test_flops_count_the_rerun() -> None:
    def flops(ck: Decorator) -> int:
        x, w = leaf(numbers(8, 8)), leaf(numbers(8, 8, seed=1))
        with FlopCounterMode(display=False) as counter:
            ck(lambda x: (x @ w).sin())(x).sum().backward()
        return counter.get_total_flops()

    assert flops(remat) == flops(plain) + 2 * 8**3


# Other kinds of tensors and graphs.


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_sparse_operand_that_requires_grad(nested: bool, captured: bool) -> None:
    grads = []
    for ck in (lambda f: remat(lambda *args: remat(f)(*args)) if nested else remat(f), plain):
        v, x = leaf(numbers(3).abs()), leaf(numbers(3, 4))
        a = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 0, 2]]), v, (3, 3))
        if captured:
            y = ck(lambda x, a=a: torch.sparse.mm(a, x).sin())(x)
        else:
            y = ck(lambda a, x: torch.sparse.mm(a, x).sin())(a, x)
        y.sum().backward()
        grads.append((v.grad, x.grad))
    assert_same(*grads)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "diagonal",
    [
        lambda v: torch.sparse_coo_tensor([[0, 1, 2], [0, 1, 2]], v, (3, 3)),
        lambda v: torch.sparse_csr_tensor([0, 1, 2, 3], [0, 1, 2], v, (3, 3)),
    ],
)
def test_a_sparse_result_that_shares_memory_with_another(diagonal: Any) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        v = x.sin()
        return diagonal(v), v.view(3, 1)

    grads = []
    for ck in (remat, plain):
        x = leaf(numbers(3))
        a, v = ck(f)(x)
        (torch.sparse.mm(a, numbers(3, 2)).sum() + (v**2).sum()).backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_a_write_beside_a_sparse_constant_under_a_transform() -> None:
    a = numbers(3, 3).to_sparse()

    def f(x: Tensor) -> Tensor:
        return torch.zeros_like(x).add_(a @ x).sin()

    assert_same(*(grad(lambda x, ck=ck: ck(f)(x).sum())(numbers(3)) for ck in (remat, plain)))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch can't split the backward of an autograd.Function")
def test_the_split_backward_of_a_pipeline_stage() -> None:
    grads = []
    for ck in (remat, plain):
        torch.manual_seed(0)
        m, x = Stage(), leaf(numbers(2, 3))
        _, groups = stage_backward_input([ck(m)(x).sum()], None, [x], m.parameters())
        stage_backward_weight(m.parameters(), groups)
        grads.append((x.grad, [p.grad for p in m.parameters()]))
    assert_same(*grads)


# Nests.


def deep(n: int, fun: Any) -> Any:
    for _ in range(n):
        fun = remat(lambda x, inner=fun: inner(x).sin())
    return fun


def test_a_deep_nest_runs_each_level_once_for_each_level_above_it() -> None:
    """Not once for each path: 3 levels and 6 differ by a factor below 2 ** 2, not 2 ** 3."""

    def sines(n: int) -> int:
        with CountOps() as ops:
            deep(n, torch.cos)(leaf(numbers(3))).sum().backward()
        return ops["sin"] + ops["cos"]

    counts = [sines(n) for n in (4, 8, 16)]
    assert counts[1] <= 4 * counts[0]
    assert counts[2] <= 4 * counts[1]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_captured_tensor_is_read_once_at_each_level(requires_grad: bool) -> None:
    """Through optree, which calls no torch function: no search is doubled with each level."""
    calls = 0

    def count(t: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return t

    def nest(n: int, w: Tensor) -> Any:
        if n == 0:
            return lambda x: x * optree.tree_map(count, {"w": w})["w"]
        inner = nest(n - 1, w)
        return remat(lambda x: inner(x).sin())

    with CountOps() as ops:
        nest(12, numbers(3).requires_grad_(requires_grad))(leaf(numbers(3))).sum().backward()
    assert ops["mul"] < 200


# An exception anywhere leaves torch as it was, and so does Ctrl-C.


class Stop(BaseException):
    """As KeyboardInterrupt: no Exception."""


def surroundings(module: nn.Module) -> Any:
    return (
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        VARIABLE.get(),
        is_rerunning(),
        [*map(id, (*module.parameters(), *module.buffers()))],
        torch.get_rng_state().sum().item(),
    )


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine"), Stop("mine")], ids=repr)
@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("setting", ["base", "grad", "vmap(grad)"])
def test_an_exception_at_any_torch_call_of_a_rerun(setting: str, call: int, error: BaseException) -> None:
    block = Block()
    armed: list[int] = []

    def tick() -> None:
        if armed:
            armed[0] -= 1
            if armed[0] < 0:
                raise error

    class Ticks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_rerunning():
                tick()
            return func(*args, **(kwargs or {}))

    def fun(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return remat(block)(F.dropout(x, 0.0).sin()) + remat(lambda x: x.cos())(x)

    def run(given: Any) -> Any:
        fun_ = remat(fun)
        x = numbers(2, 3)
        if setting == "base":
            y = fun_(leaf(x)).sum()
            return y.backward
        of = lambda p, x: functional_call(_Calls(fun_, block), {f"block.{k}": v for k, v in p.items()}, (x,)).sum()  # noqa: E731
        if setting == "grad":
            return lambda: grad(of)(given, x)
        return lambda: vmap(grad(of), (None, 0))(given, torch.stack([x, x.cos()]))

    given = {k: p.detach() for k, p in block.named_parameters()}
    go = run(given)
    before = surroundings(block)
    armed.append(call)
    with Ticks(), pytest.raises(type(error), match="mine"):
        go()
    armed.clear()
    assert surroundings(block) == before
    go = run(given)
    go()
    assert surroundings(block)[:-1] == before[:-1]


class _Calls(nn.Module):
    def __init__(self, fun: Any, block: nn.Module) -> None:
        super().__init__()
        self.fun, self.block = fun, block

    def forward(self, x: Tensor) -> Tensor:
        return self.fun(x)


# Nothing leaks.


class Thing:
    """Something that can be seen to die."""


def closes_over(thing: Any, x: Tensor) -> Any:
    def fun(y: Tensor) -> Tensor:
        assert thing is not None
        return (y * x).sin()

    return fun


def recursive(thing: Any, x: Tensor) -> Any:
    def fun(y: Tensor, n: int = 2) -> Tensor:
        assert thing is not None
        return fun(y * x, n - 1).sin() if n else y

    return fun


def two_that_call_each_other(thing: Any, x: Tensor) -> Any:
    def even(y: Tensor, n: int = 3) -> Tensor:
        assert thing is not None
        return odd(y * x, n - 1) if n else y

    def odd(y: Tensor, n: int) -> Tensor:
        return even(y.sin(), n - 1) if n else y

    return lambda y: even(y)


class Holder:
    def __init__(self, thing: Any, x: Tensor) -> None:
        self.thing, self.x = thing, x

    def method(self, y: Tensor) -> Tensor:
        return (y * self.x).sin()


def a_method(thing: Any, x: Tensor) -> Any:
    return Holder(thing, x).method


def keeps_its_result(thing: Any, x: Tensor) -> Any:
    held: list[Tensor] = []

    def fun(y: Tensor) -> Tensor:
        assert thing is not None
        held.append(y.detach())
        return (y * x).sin()

    return fun


CLOSURES = [closes_over, recursive, two_that_call_each_other, a_method, keeps_its_result]


@pytest.mark.parametrize("way", [".backward()", "never", "grad", "vmap(grad)", "twice", "an error"])
@pytest.mark.parametrize("make", CLOSURES, ids=lambda m: m.__name__)
def test_arguments_closures_and_results_die_with_the_graph(make: Any, way: str, no_gc: None) -> None:
    def run(ck: Decorator) -> list[Any]:
        thing, x, y = Thing(), leaf(numbers(3)), leaf(numbers(3, seed=1))
        fun = ck(make(thing, x))
        refs = [weakref.ref(x), weakref.ref(y)]
        if make not in (recursive, two_that_call_each_other):  # these are cycles themselves
            refs += [weakref.ref(thing), weakref.ref(fun)]
        if way == "grad":
            grad(lambda y: fun(y).sum())(y.detach())
        elif way == "vmap(grad)":
            vmap(grad(lambda y: fun(y).sum()))(torch.stack([y.detach()] * 2))
        else:
            z = fun(y)
            refs.append(weakref.ref(z))
            if way != "never":
                z.sum().backward(retain_graph=way == "twice")
            if way == "twice":
                z.sum().backward()
            if way == "an error":
                with pytest.raises(RuntimeError, match="second time"):
                    z.sum().backward()
        if make in (recursive, two_that_call_each_other):
            refs = refs[2:]  # the cycle holds x
        return refs

    refs = run(remat)
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_rerun_makes_no_cycles(no_gc: None) -> None:
    def run(ck: Decorator) -> int:
        x = leaf(numbers(3))
        gc.collect()
        for _ in range(3):
            thing = Thing()
            ck(recursive(thing, leaf(numbers(3))))(x).sum().backward()
        return gc.collect()

    run(remat)
    assert run(remat) <= run(plain)


# What torch functions are given besides tensors; what is read inside of an autograd.Function.


@pytest.mark.parametrize(
    "draw",
    [
        lambda n, g: torch.binomial(n, n / 20, g),
        lambda n, g: torch.ops.aten.poisson.default(n, g),
        lambda n, g: torch._standard_gamma(n, g),
    ],
)
def test_a_generator_by_position(draw: Any) -> None:
    generator, n = torch.Generator().manual_seed(0), torch.full((8,), 9.0).double()
    x = leaf(torch.ones(8).double())
    y = remat(lambda z: z * draw(n, generator))(x)
    y.sum().backward()
    assert_same(x.grad, y.detach())
    assert torch.equal(generator.get_state(), _after(lambda: draw(n, again), again := torch.Generator()))


def _after(draw: Any, generator: torch.Generator) -> Tensor:
    generator.manual_seed(0)
    draw()
    return generator.get_state()


GENERATOR, SCALE, COUNT = torch.Generator(), torch.ones(3).double(), torch.zeros(3).double()


def drawn(a: Tensor) -> Tensor:
    return torch.rand(3, generator=GENERATOR, dtype=torch.float64)


def counted(a: Tensor) -> Tensor:
    return COUNT.add_(1)


def scaled(a: Tensor) -> Tensor:
    return SCALE


class TimesRead(torch.autograd.Function):
    """a times what a function reads from elsewhere."""

    @staticmethod
    def forward(a: Tensor, read: Any) -> Tensor:
        return a * read(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, out = ctx.saved_tensors
        return g * out / a, None


@pytest.mark.parametrize("read", [drawn, counted, scaled])
def test_what_an_autograd_function_reads_itself(read: Any) -> None:
    results = []
    for ck in (plain, remat):
        GENERATOR.manual_seed(0)
        COUNT.zero_()
        out, pull = vjp(lambda a, ck=ck: ck(lambda a: TimesRead.apply(a.sin(), read))(a).sin(), numbers(3))
        results.append((out, pull(torch.ones_like(out)), COUNT.clone()))
    assert_same(*results)


def test_what_an_autograd_function_reads_itself_has_changed() -> None:
    _, pull = vjp(remat(lambda a: TimesRead.apply(a, scaled)), numbers(3))
    SCALE.mul_(1)
    with pytest.raises(CheckpointError, match="modified by an inplace operation"):
        pull(torch.ones(3).double())


class Step(enum.IntEnum):
    ONE = 1
    TWO = 2


@pytest.mark.parametrize(("before", "after"), [(np.cos(0.3), np.cos(1.2)), (np.float32(1), np.float32(2)), tuple(Step)])
def test_another_number_of_a_class_of_its_own(before: Any, after: Any) -> None:
    schedule = SimpleNamespace(scale=before)
    y = remat(lambda x: x * schedule.scale)(leaf(numbers(3)))
    schedule.scale = after
    with pytest.raises(CheckpointError, match="another number or flag"):
        y.sum().backward()


@KEEPS
def test_a_hook_of_a_node_that_reads_the_last_product() -> None:
    def with_hook(x: Tensor) -> Tensor:
        y = x @ x
        y.grad_fn.register_prehook(lambda g: (g[0] * y.detach(),))
        return y

    grads = []
    for ck in (plain, remat):
        x = leaf(numbers(128, 128) / 128)
        ck(with_hook)(x).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


class Image(Tensor):
    scale = 1.0


@pytest.mark.parametrize("captured", [False, True])
def test_a_tensor_of_a_class_of_its_own_keeps_what_somebody_has_given_to_it(captured: bool) -> None:
    def gradient(ck: Decorator) -> Tensor:
        x = leaf(numbers(3))
        image = (x * 1).as_subclass(Image)
        image.scale = 3.0
        fun = lambda y: torch.full((3,), y.scale).double() * y.sin()  # noqa: E731
        out = ck(lambda: fun(image))() if captured else ck(fun)(image)
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    assert_same(gradient(remat), gradient(lambda fun: fun))


def test_places_that_reruns_of_two_threads_fill() -> None:
    """The first to fill them may leave them first: each thread has its backward pass."""
    held = {"w": torch.ones(1)}
    before, one, two = held["w"], torch.zeros(1), torch.zeros(2)
    first, second = still_filled([((held, "w"), one)]), still_filled([((held, "w"), two)])
    with contextlib.ExitStack() as stack:
        first.__enter__()
        stack.enter_context(second)
        first.__exit__(None, None, None)
        assert held["w"] is two
    assert held["w"] is before
    with still_filled([((held, "w"), one)]):
        held["w"] = two  # by the function
    assert held["w"] is two


@KEEPS
def test_an_auxiliary_loss_on_an_attribute_that_is_differentiated_after_a_rerun() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            self.aux = self.gate(x).logsumexp(-1).square().mean()
            return x * self.gate(x.detach()).softmax(-1)

    block, x = Block(), leaf(numbers(4, 3))
    gradients = []
    for ck in (remat, plain):
        out = ck(block.forward)(x * 2)
        gradients.append(torch.autograd.grad(out.sum() + block.aux, x)[0])
    assert_same(*gradients)
    remat(block.forward)(x * 2).sum().backward(retain_graph=True)
    with pytest.raises(RematError, match=r"Block.forward has kept a tensor that it computed .*Return the tensor"):
        block.aux.backward()


@KEEPS
def test_what_a_function_keeps_does_not_stop_an_outer_derivative() -> None:
    """The rerun's graph ends at the user's own tensor, or at one of a pass around: these may be reached."""
    held, x = SimpleNamespace(t=None), numbers(4, 3)

    def step(w: Tensor, x: Tensor) -> Tensor:
        held.t = w.sin()
        return (x @ held.t).tanh()

    gradients = []
    for ck in (remat, plain):
        w = leaf(numbers(3, 3))
        fun = ck(step)
        grad(lambda w, fun=fun: fun(w, fun(w, x)).sum())(w).square().sum().backward()
        assert not w._backward_hooks
        gradients.append(w.grad)
    assert_same(*gradients)


class DoublesInNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.numpy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.mark.parametrize(
    ("function", "message"),
    [(ReadsTwice, "returned another tensor"), (DoublesInNumPy, "does not depend on tensor 1 of the 2 in its argument")],
    ids=["of ops", "of numpy"],
)
def test_a_rerun_calls_an_autograd_function_with_another_argument(function: Any, message: str) -> None:
    """No torch-function mode sees that call. It sees the ops in it, and the graph shows what it depends on."""
    runs = itertools.count()
    a, b = leaf(numbers(3)), leaf(numbers(3, seed=1))
    y = remat(lambda a, b: function.apply(b if next(runs) else a))(a, b)
    with pytest.raises(CheckpointError, match=message):
        y.sum().backward()


class TimesNumber(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: float) -> Tensor:
        return x * k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.k, None


class Step(TimesNumber):
    """Its number is only for the backward: the slope of a surrogate gradient."""

    @staticmethod
    def forward(x: Tensor, k: float) -> Tensor:
        return (x > 0).to(x.dtype)


class SteepStep(Step):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 10 * g * ctx.k, None


CHANGING: dict[str, Callable[[Tensor, Any], Any]] = {
    "a number for a Function": lambda x, s: TimesNumber.apply(x, s.k).sin(),
    "a number for a Function that makes the result": lambda x, s: TimesNumber.apply(x, s.k),
    "a number for the backward of a Function": lambda x, s: Step.apply(x, s.k).sin(),
    "which Function": lambda x, s: (Step if s.k < 2 else SteepStep).apply(x, 1.0).sin(),
    "which result": lambda x, s: (x.sin(), x.cos())[s.k > 2],
    "an array as an index": lambda x, s: x.sin()[s.array].exp(),
    "a tensor of an array": lambda x, s: torch.tensor(s.array) * x.sin(),
    "a range as an index": lambda x, s: x.sin()[range(int(s.k), int(s.k) + 1)].exp(),
}


@pytest.mark.parametrize("transform", [".backward()", "vjp", "vmap"])
@pytest.mark.parametrize("fun", CHANGING.values(), ids=CHANGING)
def test_what_a_rerun_passes_to_functions_and_returns_is_compared(fun: Any, transform: str) -> None:
    state, x = SimpleNamespace(k=1.0, array=np.array([0, 1, 0])), numbers(3, 3)[:, 0].contiguous()

    def run(ck: Any, change: Callable[[], Any]) -> Any:
        f = ck(lambda x: fun(x, state))
        if transform == "vjp":
            y, pullback = vjp(f, x)
            change()
            return pullback(torch.ones_like(y))
        given = leaf(x if transform == ".backward()" else x.expand(2, 3))
        y = f(given) if transform == ".backward()" else vmap(f)(given)
        change()
        return torch.autograd.grad(y.sum(), given)

    assert_same(run(remat, lambda: None), run(plain, lambda: None))
    with pytest.raises(CheckpointError, match=r"returned another tensor|was given|at call"):
        run(remat, lambda: vars(state).update(k=2.5, array=np.array([1, 1, 0])))


with torch.inference_mode():
    TABLE = numbers(3)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "hessian", "grad(grad)"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("in_a_cell", [False, True])
def test_a_table_made_in_inference_mode(in_a_cell: bool, nested: bool, transform: str) -> None:
    """Autograd can't save it. Under a transform, it saves the wrapper."""

    def fun(x: Tensor, ck: Decorator) -> Tensor:
        table = TABLE
        inner = ck((lambda x: (x * table).sin()) if in_a_cell else (lambda x: (x * TABLE).sin()))
        return ck(lambda x: inner(x.cos()).sin())(x) if nested else inner(x)

    results = [TRANSFORMS[transform](functools.partial(fun, ck=ck), numbers(3, seed=1)) for ck in (remat, plain)]
    assert_same(*results)


@pytest.mark.parametrize("transform", [".backward()", "grad"])
def test_a_generator_that_the_function_makes_and_seeds(transform: str) -> None:
    """The same seed draws the same numbers. Another is noticed."""

    def drawing(seeds: Iterator[int]) -> Any:
        return lambda x: x.sin() * torch.randn(3, generator=torch.Generator().manual_seed(next(seeds))).double()

    run = TRANSFORMS[transform]
    same = itertools.repeat(3)
    assert_same(run(remat(drawing(same)), numbers(3)), run(drawing(same), numbers(3)))
    with pytest.raises(CheckpointError, match="was given other tensors"):
        run(remat(drawing(itertools.count())), numbers(3))


@pytest.mark.parametrize("around", ["nothing", "remat", "checkpoint"])
def test_other_threads_may_use_the_module_of_a_function(around: str) -> None:
    """A rerun puts nothing into it that is not there already: checkpoints save aliases of parameters."""
    module, held = nn.Linear(3, 3).double(), []

    def look(x: Tensor) -> Tensor:
        held.append(module.weight is weight)
        return x

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return look(x).clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return look(gradient)

    fun = remat(lambda x: Looks.apply(module(x)).tanh())
    outer = {"nothing": lambda f: f, "remat": remat, "checkpoint": checkpoint(use_reentrant=False)}[around]
    weight = module.weight
    outer(lambda x: fun(x).sin() + fun(x * 2))(leaf(numbers(3))).sum().backward()
    assert len(held) >= 6
    assert all(held)
