"""Nothing leaks: with gc off, all is freed as soon as the backward is done, or the result dropped."""

# ruff: noqa: F821, PT017 - `del` is the point, and an exception must not be held by pytest

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import KEEPS, TRANSFORMS, UNIT, Fun, Seen, activation, leaf, numbers, plain
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn import functional as F

from remat import CheckpointError, checkpoint, policies, remat
from remat.debug import LiveBytes

pytestmark = pytest.mark.usefixtures("no_gc")


class Big:
    """Something that a function closes over."""


def held(run: Callable[[Callable[[Fun], Any]], Any]) -> list[str]:
    """What is still alive of a call after `run`, without gc."""
    refs: dict[str, Any] = {}

    def make(fun: Fun) -> Any:
        big = Big()

        def block(x: Tensor) -> Tensor:
            assert big is not None
            return fun(x)

        wrapped = remat(block)
        refs.update(object=weakref.ref(big), function=weakref.ref(block), wrapper=weakref.ref(wrapped))
        return wrapped

    run(make)
    return [name for name, ref in refs.items() if ref() is not None]


def error_of(run: Callable[[], Any]) -> str:
    """The message of the error that `run` raises. Nothing holds the error afterwards, as `pytest.raises` would."""
    try:
        run()
    except RuntimeError as error:
        return str(error)
    pytest.fail("no exception")


FUNS: dict[str, Fun] = {
    "sin": torch.sin,
    "several results": lambda x: x.sin() * (lambda a, b: a + b)(x.sin(), x.cos()),
    "kwargs and lists": lambda x: torch.cat([x.sin(), x], dim=0)[:3] * torch.stack((x, x)).sum(dim=0),
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "remat inside": lambda x: remat(lambda y: remat(torch.sin)(y) * x)(x),
    "grad inside": lambda x: grad(lambda y: (y.sin() * x).sum())(x),
    "in place": lambda x: x.sin().mul_(2).relu_(),
    "views": lambda x: x.sin().t()[0].expand(3, 3),
    "a constant": lambda x: x.sin() * torch.ones(3, dtype=x.dtype),
}


@pytest.mark.parametrize(
    "transform",
    [
        "call",
        "grad",
        "vjp",
        "vjp never called",
        "jvp",
        "vmap",
        "vmap(grad)",
        "grad(grad)",
        "jvp(grad)",
        "grad(jvp)",
        "functionalize(grad)",
        ".backward()",
        "double backward",
        "forward AD",
        ".backward() of vmap",
    ],
)
@pytest.mark.parametrize("fun", FUNS.values(), ids=FUNS)
def test_all_is_freed_by_reference_counts(fun: Fun, transform: str) -> None:
    if fun is FUNS["dropout"] and "vmap" in transform:
        fun = torch.sin
    with LiveBytes() as meter:
        assert held(lambda make: TRANSFORMS[transform](make(fun), numbers(3, 3))) == []
        x = numbers(3, 3)
        start = meter.current
        TRANSFORMS[transform](remat(fun), x)
        assert meter.current == start


@pytest.mark.parametrize("w", ["cell", "attribute", "list", "default", "module", "global"])
@pytest.mark.parametrize("run", ["backward", "dropped", "grad", "vmap(grad)", "grad(grad)"])
def test_captured_tensors_are_freed(w: str, run: str) -> None:
    with LiveBytes() as meter:
        captured = activation().requires_grad_()
        ref = weakref.ref(captured)
        box = Big()
        box.w = captured
        module = nn.Module()
        module.w = nn.Parameter(captured.detach())
        values = [captured]
        namespace = {"w": captured}
        exec("def of_global(x): return x.sin() * w", namespace)
        fun = {
            "cell": lambda x: x.sin() * captured,
            "attribute": lambda x: x.sin() * box.w,
            "list": lambda x: x.sin() * values[0],
            "default": lambda x, w=captured: x.sin() * w,
            "module": lambda x: x.sin() * module.w,
            "global": namespace["of_global"],
        }[w]
        x = activation()
        if run == "backward":
            remat(fun)(x).sum().backward()
        elif run == "dropped":
            remat(fun)(x)
        elif run == "grad":
            grad(lambda x: remat(fun)(x).sum())(x)
        elif run == "vmap(grad)":
            vmap(grad(lambda x: remat(fun)(x).sum()))(torch.stack([x, x]))
        else:
            grad(lambda x: grad(lambda x: remat(fun)(x).sum())(x).sum())(x)
        namespace.clear()  # a function and its globals are a cycle
        del captured, box, module, values, fun, x
        assert ref() is None
    assert meter.current == 0


def test_intermediates_are_freed_during_the_backward_not_after() -> None:
    """A hook between two blocks finds nothing of the later block's rerun alive."""
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        seen = Seen()

        @remat
        def block(x: Tensor) -> Tensor:
            for _ in range(10):
                x = x.sin()
            return x

        y = block(x)
        y.register_hook(lambda g: seen.append(meter.current))
        z = block(y).sum()
        held_before = meter.current
        z.backward()
    assert seen[0] <= held_before + 2 * UNIT


def test_a_dropped_result_frees_its_inputs() -> None:
    x = leaf(numbers(3))
    y = x * 2
    ref = weakref.ref(y)
    z = remat(torch.sin)(y)
    del y
    del z
    assert ref() is None


def test_inputs_are_freed_by_the_backward_though_the_result_lives() -> None:
    with LiveBytes() as meter:
        x = activation().requires_grad_()
        w = activation()
        y = remat(lambda x: (x * w).sin())(x.exp())
        del w
        before = meter.current
        y.sum().backward()
        x.grad = None
        assert meter.current < before  # x and the result are left
        assert meter.current <= 2 * UNIT
        del x
        y.detach()


def test_the_closure_is_freed_by_the_backward_though_the_result_lives() -> None:
    big = Big()
    ref = weakref.ref(big)
    x = leaf(numbers(3))

    def make(big: Any) -> Fun:
        return lambda x: x.sin() if big else x

    y = remat(make(big))(x)
    del big
    assert ref() is not None
    y.sum().backward()
    assert ref() is None
    assert y.grad_fn is not None


def test_loops_of_training_do_not_grow() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))
    block = remat(module)
    with LiveBytes() as meter:
        levels = []
        for _ in range(5):
            block(block(torch.randn(8, 16))).sum().backward()
            module.zero_grad()
            levels.append(meter.current)
    assert len(set(levels[1:])) == 1


def test_functional_call_frees_its_parameters() -> None:
    module = nn.Linear(16, 16)
    with LiveBytes() as meter:
        params = {k: p.detach() * 2 for k, p in module.named_parameters()}
        block = remat(module)
        x = torch.randn(4, 16)
        grad(lambda ps: functional_call(block, ps, (x,)).sum())(params)
        del params, x
    assert meter.current == 0


@pytest.mark.parametrize("where", ["forward", "rerun"])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)"])
def test_an_exception_leaves_nothing_alive(where: str, transform: str) -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(None)
        if len(runs) == (1 if where == "forward" else 2):
            raise ValueError("mine")
        return x.sin().cos()

    with LiveBytes() as meter:
        try:
            TRANSFORMS[transform](remat(fun), numbers(3, 3))
        except ValueError as error:
            assert str(error) == "mine"
            error.__traceback__ = None
        else:
            pytest.fail("no exception")
        gc.collect()  # torch's own transforms leave frames in cycles
    assert meter.current == 0


@pytest.mark.parametrize("wrap", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_an_error_in_a_torch_call_frees_its_arguments(wrap: Callable[[Fun], Fun]) -> None:
    made = []

    def fun(x: Tensor) -> Tensor:
        h = x.sin()
        made.append(weakref.ref(h))
        return h @ torch.ones(7, dtype=h.dtype)

    assert "inconsistent tensor size" in error_of(lambda: wrap(fun)(leaf(numbers(3))))
    assert made[0]() is None


def test_a_checkpoint_error_leaves_nothing_alive() -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(None)
        return x.sin() if len(runs) == 1 else x.cos()

    with LiveBytes() as meter:
        x = activation().requires_grad_()
        with pytest.raises(CheckpointError):
            remat(fun)(x).sum().backward()
        del x
        gc.collect()
    assert meter.current == 0


@pytest.mark.parametrize("sets_up", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_error_for_a_tensor_that_has_changed_frees_the_rerun(use_reentrant: bool, sets_up: bool) -> None:
    table, flags, made = torch.ones(3).double(), [not sets_up], []

    def fun(x: Tensor) -> Tensor:
        if not flags[0]:
            table.fill_(1.0)
            flags[0] = True
        y = x.sin()
        made.append(weakref.ref(y))
        return (y * table).sin()

    y = checkpoint(fun, leaf(numbers(3)), use_reentrant=use_reentrant)
    table.add_(1)
    assert "modified by an inplace operation" in error_of(y.sum().backward)
    assert made[1]() is None


def test_a_tensor_that_only_the_proof_finds_leaves_no_cycle() -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        with torch._C.DisableTorchFunction():  # as an extension does it
            return (y * held[0]).sin()

    with LiveBytes() as meter:
        held = [activation().requires_grad_()]
        for _ in range(2):  # at the first one, remat may collect garbage
            remat(fun)(activation().requires_grad_())
        assert meter.current == UNIT


def test_a_vjp_is_freed_with_its_function() -> None:
    with LiveBytes() as meter:
        x = activation()
        out, pull = vjp(remat(lambda x: x.sin().cos()), x)
        pull(out)
        pull(out)
        del out, pull, x
        assert meter.current == 0


def test_no_reference_cycles() -> None:
    """Gc finds nothing to collect after calls of every kind."""
    w = leaf(numbers(3, 3))
    block = remat(lambda x: F.dropout(torch.tanh(torch.cat([x @ w, x])[:3]), p=0.5))
    for run in (
        lambda: block(numbers(3, 3)),
        lambda: block(numbers(3, 3)).sum().backward(),
        lambda: grad(lambda x: block(x).sum())(numbers(3, 3)),
    ):
        run()
        w.grad = None
        gc.collect()
        run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        garbage = [
            type(o).__name__ for o in gc.garbage if type(o).__module__.startswith("remat") or isinstance(o, Tensor)
        ]
        gc.garbage.clear()
        assert garbage == []


@pytest.mark.parametrize("op", [torch.tanh, torch.exp, torch.sigmoid], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "hooks",
    [torch.autograd.graph.save_on_cpu, torch.autograd.graph.allow_mutation_on_saved_tensors],
    ids=lambda f: f.__name__,
)
def test_hooks_around_an_op_that_saves_its_result(op: Fun, hooks: Any) -> None:
    """A node that packs its own result as it is would hold itself, where gc does not see it."""
    refs = []

    @remat
    def fun(x: Tensor) -> Tensor:
        y = op(x)
        refs.append(weakref.ref(y))
        return y * 2

    x = leaf(numbers(3))
    with hooks():
        fun(x).sum().backward()
    gc.collect()
    assert [ref() for ref in refs[:1]] == [None]


def test_the_classes_of_leaves_are_not_kept() -> None:
    class Option:
        """What a user passes."""

    remat(lambda x, option: x.sin())(leaf(numbers(3)), Option())
    ref = weakref.ref(Option)
    del Option
    gc.collect()
    assert ref() is None


def test_parameters_of_a_module_that_is_replaced_are_freed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = numbers(3, 4).float()
    remat(model)(x).sum().backward()
    seen = weakref.ref(model[1].weight)
    model[1] = nn.Identity()
    assert seen() is None
    remat(model)(x).sum().backward()


@pytest.mark.parametrize("kind", ["remat", "partial", "wraps", "attribute"])
def test_a_result_is_freed_that_a_function_in_reach_holds_later(kind: str) -> None:
    """The parts of a closure do not hold the functions themselves, whatever holds those."""

    def run(x: Tensor) -> weakref.ref[Tensor]:
        held = [x]

        def inner(a: Tensor) -> Tensor:
            return a * held[0]

        @functools.wraps(inner)
        def wrapped(a: Tensor) -> Tensor:
            return inner(a)

        def caller(a: Tensor) -> Tensor:
            return caller.inner(a)

        caller.inner = inner
        fun = {"remat": remat(inner), "partial": functools.partial(inner), "wraps": wrapped, "attribute": caller}[kind]
        y = remat(lambda a: fun(a).sin())(x)
        del caller.inner
        held = y  # `inner` reads it from now on
        return weakref.ref(y)

    gc.disable()
    try:
        assert run(leaf(numbers(3)))() is None
    finally:
        gc.enable()


def test_local_classes_go_with_what_they_hold() -> None:
    """No cache of ours holds them: a class of arguments, an autograd.Function under a transform."""

    def run(ck: Callable[[Fun], Fun]) -> weakref.ref[Tensor]:
        held = numbers(3)

        class Numbers(list[Tensor]):
            def other(self) -> Tensor:
                return held

        class Number(int):
            def other(self) -> Tensor:
                return held

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x * held

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

            @staticmethod
            def backward(ctx: Any, cotangent: Tensor) -> Tensor:
                return cotangent * held

        class Kind(Tensor):
            def other(self) -> Tensor:
                return held

        def fun(x: Tensor) -> Tensor:
            y = torch.stack(Numbers([x, x])).sum(Number(0))
            return Scaled.apply(y) + x.as_subclass(Kind).sin().as_subclass(Tensor)

        grad(lambda x: ck(fun)(x).sum())(numbers(3))
        ck(fun)(leaf(numbers(3))).sum().backward()
        ck(fun)(leaf(numbers(3))).sum().backward()
        return weakref.ref(held)

    for ck in (plain, remat, remat(policy=policies.dots_saveable), checkpoint(use_reentrant=False)):
        ref = run(ck)
        gc.collect()  # a class is a cycle
        assert ref() is None


def test_retain_grad_inside_with_a_recorded_backward(no_gc: None) -> None:
    def step() -> None:
        @remat
        def fun(x: Tensor) -> Tensor:
            y = x.sin()
            y.retain_grad()
            return y.cos()

        x = leaf(activation())
        (g,) = torch.autograd.grad(fun(x).sum(), x, create_graph=True)
        g.square().sum().backward()

    step()
    with LiveBytes() as meter:
        step()
        assert meter.current == 0


@KEEPS
@pytest.mark.parametrize("hooks", [False, True])
def test_a_hook_inside_under_hooks_of_saved_tensors(hooks: bool, no_gc: None) -> None:
    """The forward's graph, which the hook holds, holds no tensors."""
    same = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)

    def fun(x: Tensor) -> Tensor:
        y = x.sin().exp()
        total = y.sum()  # a number, with the graph behind it
        y.register_hook(lambda g: g * total.detach())
        return y.cos()

    x = leaf(activation())
    with LiveBytes() as meter, same if hooks else torch.enable_grad():
        out = remat(fun)(x)
        assert meter.current <= 1.1 * UNIT, "the result"
    out.sum().backward()


def test_a_recursive_function_that_a_rerun_makes_anew() -> None:
    """It refers to itself by a cell, which is a cycle."""
    w = leaf(numbers(3)).sin()
    seen = []

    def fun(n: int, x: Tensor) -> Tensor:
        seen.append(weakref.ref(fun))
        return fun(n - 1, x.sin() * w) if n else x.cos()

    torch.autograd.grad(remat(fun)(1, leaf(numbers(3))).sum(), w)
    assert [ref() for ref in seen] == [fun, fun, None, None]


@pytest.mark.parametrize("wrap", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_a_nest_takes_each_function_apart_once(wrap: Callable[[Fun], Fun]) -> None:
    """All calls of a nest are pending at its innermost rerun, and each closes over the functions inside."""
    parts = []

    def around(fun: Fun) -> Fun:
        return wrap(lambda x: fun(x).cos())

    def innermost(x: Tensor) -> Tensor:
        parts.append(sum(type(x).__name__ in ("_Function", "_Made") for x in gc.get_objects()))
        return x.sin()

    fun: Fun = innermost
    for _ in range(20):
        fun = around(fun)
    x = leaf(numbers(3))
    before = sum(type(x).__name__ in ("_Function", "_Made") for x in gc.get_objects())
    fun(x).sum().backward()
    assert max(parts) - before <= 4 * 21  # it is 420 if each call takes all apart


@pytest.mark.parametrize("wrap", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_a_function_among_its_own_defaults_frees_the_others(wrap: Callable[[Fun], Fun], no_gc: None) -> None:
    """A rerun makes it anew."""
    k = 2.0

    def fun(x: Tensor, me: Any = None, w: Any = None) -> Tensor:
        return (x * w * k).sin()

    def step() -> None:
        fun.__defaults__ = (fun, activation())
        wrap(fun)(leaf(activation())).sum().backward()

    step()
    with LiveBytes() as meter:
        for _ in range(3):
            step()
        assert meter.current <= UNIT  # the default of the last step
