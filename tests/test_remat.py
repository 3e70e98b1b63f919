"""The decorator: what it takes, what it keeps of it, static arguments, pickling."""

import abc
import contextlib
import copy
import dataclasses
import functools
import inspect
import pickle
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers import KEEPS, SOME_TRANSFORMS, TRANSFORMS, CountOps, Seen, assert_same, leaf, numbers
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from remat import CheckpointError, checkpoint, is_rerunning, policies, remat


@remat
def at_top(x: Tensor, *, scale: float = 2.0) -> Tensor:
    """Some documentation."""
    return x.tanh() * scale


def undecorated(x: Tensor, *, scale: float = 2.0) -> Tensor:
    """Some documentation."""
    return x.tanh() * scale


class Holder:
    def __init__(self, scale: Tensor | float = 2.0) -> None:
        self.scale = scale

    @remat
    def method(self, x: Tensor) -> Tensor:
        """A method."""
        return x.tanh() * self.scale

    alias = method

    @remat(preserve_rng_state=False)
    def with_options(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale

    @staticmethod
    @remat
    def static_outside(x: Tensor) -> Tensor:
        return x.tanh() * 2

    @remat
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return x.tanh() * 2

    @classmethod
    @remat
    def class_outside(cls, x: Tensor) -> Tensor:
        assert issubclass(cls, Holder)
        return x.tanh() * 2

    @remat
    @classmethod
    def class_inside(cls, x: Tensor) -> Tensor:
        assert issubclass(cls, Holder)
        return x.tanh() * 2

    @property
    @remat
    def value(self) -> Tensor:
        return self.input.tanh() * 2

    @remat
    def __call__(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale

    def plain(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale


class Child(Holder):
    def method(self, x: Tensor) -> Tensor:
        return super().method(x) * 1


class Module(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Its forward."""
        return x.tanh() * 2


class Decorated(nn.Module):
    @remat
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * 2


def property_of(x: Tensor) -> Tensor:
    holder = Holder()
    holder.input = x
    return holder.value


WAYS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "@remat": lambda: at_top,
    "@remat()": lambda: remat()(undecorated),
    "@remat(options)": lambda: remat(preserve_rng_state=False)(undecorated),
    "remat(fun)": lambda: remat(undecorated),
    "remat(fun, options)": lambda: remat(undecorated, preserve_rng_state=True),
    "a lambda": lambda: remat(lambda x: x.tanh() * 2),
    "a partial": lambda: remat(functools.partial(undecorated, scale=2.0)),
    "a partial of it": lambda: functools.partial(at_top, scale=2.0),
    "a method in a class body": lambda: Holder().method,
    "a method with options": lambda: Holder().with_options,
    "a method by the class": lambda: functools.partial(Holder.method, Holder()),
    "a method of a child": lambda: Child().method,
    "a method by another name": lambda: Holder().alias,
    "a static method": lambda: Holder.static_outside,
    "a static method, of an instance": lambda: Holder().static_outside,
    "a static method inside": lambda: Holder().static_inside,
    "a class method": lambda: Holder.class_outside,
    "a class method inside": lambda: Child().class_inside,
    "a property": lambda: property_of,
    "a decorated __call__": lambda: Holder(),
    "a bound method": lambda: remat(Holder().plain),
    "a callable object": lambda: remat(type("Made", (), {"__call__": lambda self, x: x.tanh() * 2})()),
    "a module": lambda: remat(Module()),
    "a module's decorated forward": lambda: Decorated(),
    "a module in a Sequential": lambda: nn.Sequential(Decorated(), nn.Identity()),
    "remat of remat": lambda: remat(remat(undecorated)),
    "a wrapped function": lambda: remat(functools.wraps(undecorated)(lambda *a, **k: undecorated(*a, **k))),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
def test_every_way_to_use_it(way: Callable[[], Any], transform: str) -> None:
    x = numbers(3, 3)
    assert_same(TRANSFORMS[transform](way(), x), TRANSFORMS[transform](undecorated, x))


@pytest.mark.parametrize("way", [w for n, w in WAYS.items() if n != "remat of remat"])
def test_every_way_runs_again_once(way: Callable[[], Any]) -> None:
    with CountOps() as ops:
        way()(leaf(numbers(3))).sum().backward()
    assert ops["tanh"] == 2


def test_keeps_what_describes_the_function() -> None:
    fun = remat(undecorated)
    assert fun.__wrapped__ is undecorated
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(fun, name) == getattr(undecorated, name)
    assert inspect.signature(fun) == inspect.signature(undecorated)
    assert inspect.unwrap(fun) is undecorated
    assert inspect.signature(Holder().method) == inspect.signature(Holder().plain)
    assert Holder.method.__doc__ == "A method."
    module = Module()
    assert inspect.signature(remat(module)) == inspect.signature(module)
    assert list(inspect.signature(remat(functools.partial(undecorated, scale=1.0))).parameters) == [
        "x",
        "scale",
    ]
    assert "undecorated" in repr(fun)
    assert callable(fun)


def test_keeps_attributes_of_the_function() -> None:
    def fun(x: Tensor) -> Tensor:
        return x

    fun.tag = "mine"
    assert remat(fun).tag == "mine"


def test_a_method_is_bound_to_its_instance() -> None:
    holder = Holder()
    assert holder.method.__self__ is holder
    assert inspect.ismethod(holder.method)
    assert not inspect.ismethod(Holder.method)


@pytest.mark.parametrize("name", ["method", "with_options", "alias"])
def test_a_method_is_made_of_a_function(name: str) -> None:
    """Tools that look for code or a file find some."""
    method = getattr(Holder(), name)
    assert isinstance(method.__func__, types.FunctionType)
    assert inspect.getsource(method).lstrip().startswith("@remat")
    assert inspect.getfile(method) == remat.__code__.co_filename
    assert method == getattr(method.__self__, name)


@pytest.mark.parametrize("name", ["method", "plain"])
def test_a_method_that_is_mocked(name: str) -> None:
    with mock.patch.object(Holder, name, autospec=True, side_effect=getattr(Holder, name)) as mocked:
        x = leaf(numbers(3))
        getattr(Holder(), name)(x).sum().backward()
    assert mocked.call_count == 1
    assert_same(x.grad, grad(lambda x: undecorated(x).sum())(x.detach()))


def test_a_function_as_the_default_of_a_field_is_no_method() -> None:
    """It can be pickled with its object."""
    made = dataclasses.make_dataclass("Made", [("fun", Any, dataclasses.field(default=remat(undecorated)))])()
    assert_same(roundtrip(made.fun)(numbers(3)), undecorated(numbers(3)))


def test_an_abstract_method_stays_abstract() -> None:
    class Base(abc.ABC):
        @remat
        @abc.abstractmethod
        def method(self, x: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="abstract"):
        Base()


def test_positional_only_and_odd_names_pass_through() -> None:
    fun = remat(lambda fun, /, self, args, **kwargs: fun.sin() * self * args * kwargs["kwargs"])
    x = leaf(numbers(3))
    fun(x, self=2, args=3, kwargs=4).sum().backward()
    assert_same(x.grad, 24 * x.detach().cos())


@pytest.mark.parametrize("bad", [3, "text", numbers(1), [torch.sin]])
def test_what_is_not_callable(bad: Any) -> None:
    with pytest.raises(TypeError, match="remat: fun must be callable; got"):
        remat(bad)


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x.sin()


class GeneratorObject:
    def __call__(self, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()


async def coroutine(x: Tensor) -> Tensor:
    return x.sin()


async def async_generator(x: Tensor) -> AsyncIterator[Tensor]:
    yield x.sin()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (policies.dots_saveable, r"got a policy as the function. Write @remat\(policy=dots_saveable\)"),
        (nn.Linear, r"got a class of modules, Linear. Decorate its forward, or wrap .* remat\.nn\.remat_module"),
        (generator, r"generator is a generator or async function: its body runs after the call"),
        (types.MethodType(generator, numbers(3)), r"generator is a generator or async function"),
        (staticmethod(generator), r"generator is a generator or async function"),
        (functools.partial(generator), r"generator is a generator or async function"),
        (GeneratorObject(), r"GeneratorObject\.__call__ is a generator or async function"),
        (coroutine, r"coroutine is a generator or async function"),
        (async_generator, r"async_generator is a generator or async function"),
        (property(lambda self: 0), r"fun must be callable; got a property\. Write @property above @remat"),
        (
            torch.ones(2),
            r"fun must be callable; got a tensor of shape \[2\] and dtype torch.float32\. Write remat\(f\)",
        ),
    ],
)
def test_what_can_not_run_again_as_a_whole(bad: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"remat: {message}"):
        remat(bad)


@pytest.mark.parametrize("name", [True, False])
def test_a_method_of_a_callable_object(name: bool) -> None:
    class Calls:
        def __init__(self, fun: Any) -> None:
            self.fun = fun
            if name:
                functools.update_wrapper(self, fun)

        def __call__(self, *args: Any) -> Any:
            return self.fun(*args)

    layer, x = nn.Linear(3, 3), leaf(torch.ones(3))
    expected = torch.autograd.grad(layer(x).sin().sum(), x)
    layer.forward = types.MethodType(Calls(nn.Linear.forward), layer)  # type: ignore[method-assign]
    for fun in (remat(lambda x: layer(x)), remat(layer.forward), lambda x: checkpoint(layer, x, use_reentrant=False)):
        assert_same(torch.autograd.grad(fun(x).sin().sum(), x), expected)


def test_other_classes_are_functions() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor

    x = leaf(numbers(3))
    remat(Pair)(x, x.sin()).b.sum().backward()
    assert_same(x.grad, x.detach().cos())


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        remat(torch.sin, None)


def test_an_unknown_option() -> None:
    with pytest.raises(TypeError, match="preserve"):
        remat(torch.sin, preserve=True)


def test_errors_of_a_wrong_call_are_the_functions_own() -> None:
    with pytest.raises(TypeError, match=r"undecorated\(\) .*argument"):
        remat(undecorated)(numbers(3), 1, 2, 3)
    with pytest.raises(TypeError, match="missing"):
        remat(undecorated)()


# Static arguments.


class NotATree:
    def __init__(self, w: Tensor) -> None:
        self.w = w


def choose(x: Tensor, mode: Any, y: Tensor, *, deep: Any = None) -> Tensor:
    assert not isinstance(mode, Tensor)
    out = x.sin() * y if mode == "sin" or isinstance(mode, dict) else x.cos() * y
    return out if deep is None else out * deep["w"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"static_argnums": 1}, id="a number"),
        pytest.param({"static_argnums": (1,)}, id="a tuple"),
        pytest.param({"static_argnums": [1]}, id="a list"),
        pytest.param({"static_argnums": -2}, id="negative"),
        pytest.param({"static_argnames": "mode"}, id="a name"),
        pytest.param({"static_argnames": ("mode",)}, id="names"),
        pytest.param({"static_argnames": ["mode", "deep"]}, id="a list of names"),
        pytest.param({"static_argnums": 1, "static_argnames": "deep"}, id="both"),
        pytest.param({"static_argnums": 1, "static_argnames": "mode"}, id="the same one twice"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", ".backward()", "jvp"])
def test_static_arguments(options: dict[str, Any], by_name: bool, transform: str) -> None:
    fun = remat(choose, **options)
    y = numbers(3, 3, seed=1)
    for mode in ("sin", "cos", {"a": 1}):
        call = (lambda x: fun(x, y=y, mode=mode)) if by_name else (lambda x: fun(x, mode, y))
        assert_same(
            TRANSFORMS[transform](call, numbers(3, 3)),
            TRANSFORMS[transform](lambda x: choose(x, mode, y), numbers(3, 3)),
        )


def test_a_static_argument_of_a_builtin_without_a_signature() -> None:
    fun = remat(torch.cumsum, static_argnums=1)
    assert_same(*(grad(lambda x, f=f: f(x, 0).sin().sum())(numbers(3)) for f in (fun, torch.cumsum)))


def test_a_static_argument_arrives_as_it_is() -> None:
    seen = Seen()

    def fun(x: Tensor, config: Any) -> Tensor:
        seen.append(config)
        return x.sin()

    config = {"sizes": [1, 2], "t": torch.ones(1)}
    remat(fun, static_argnums=1)(leaf(numbers(3)), config).sum().backward()
    assert [c is config for c in seen] == [True, True]


@pytest.mark.parametrize("transform", SOME_TRANSFORMS)
def test_a_tensor_in_a_static_argument_is_captured(transform: str) -> None:
    """Static means out of the tree: never a silent zero."""

    def program(ck: Callable[..., Any]) -> Any:
        return lambda x: ck(lambda y, config: y * config["w"][0].sin())(x * 2, {"w": [x]})

    x = numbers(3, 3)
    actual = TRANSFORMS[transform](program(lambda f: remat(f, static_argnums=1)), x)
    assert_same(actual, TRANSFORMS[transform](program(lambda f: f), x))


def test_static_arguments_of_methods_count_self() -> None:
    class Net:
        @remat(static_argnums=2)
        def __call__(self, x: Tensor, mode: str) -> Tensor:
            return x.sin() if mode == "sin" else x.cos()

    assert_same(grad(lambda x: Net()(x, "sin").sum())(numbers(3)), numbers(3).cos())


def test_a_negative_number_counts_the_call_where_there_are_stars() -> None:
    fun = remat(lambda *args: args[0].sin() * args[-1]["k"], static_argnums=-1)
    assert_same(grad(lambda x: fun(x, x, {"k": 2}).sum())(numbers(3)), 2 * numbers(3).cos())


@pytest.mark.parametrize(
    ("options", "rule", "got", "hint"),
    [
        ({"static_argnums": 3}, r"static_argnums must be in \[-3, 3\) for choose\(x, mode, y", "got 3", "2"),
        ({"static_argnums": -4}, r"static_argnums must be in \[-3, 3\)", "got -4", "-3"),
        ({"static_argnums": (0, 7)}, r"static_argnums must be in \[-3, 3\)", "got 7", "2"),
        ({"static_argnums": "mode"}, "static_argnums must be int", "'mode'", ""),
        ({"static_argnums": 1.5}, "static_argnums must be int", "1.5", ""),
        ({"static_argnums": True}, "static_argnums must be int", "True", ""),
        ({"static_argnames": "mod"}, "static_argnames must name", "got 'mod'", "mode"),
        ({"static_argnames": ("deep", "modes")}, "static_argnames must name", "got 'modes'", "mode"),
        ({"static_argnames": 1}, "static_argnames must be name", "1", ""),
        ({"static_argnames": (1,)}, "static_argnames must be name", "1", ""),
    ],
)
def test_bad_static_arguments(options: dict[str, Any], rule: str, got: str, hint: str) -> None:
    """The error says the rule, what was given and what to write, when the function is decorated."""
    with pytest.raises((TypeError, ValueError), match=rule) as error:
        remat(choose, **options)
    message = str(error.value)
    assert message.startswith("remat: ")
    assert got in message
    assert hint in message


# Side effects.


@KEEPS
@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_side_effects_happen_again(transform: str) -> None:
    found: list[Any] = []
    named: dict[str, Any] = {}
    holder = types.SimpleNamespace(count=0)

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        found.append(is_rerunning())
        named[str(len(named))] = y
        holder.count += 1
        return y * y

    if transform == "grad":
        grad(lambda x: remat(fun)(x).sum())(numbers(3))
    else:
        remat(fun)(leaf(numbers(3))).sum().backward()
    assert found == [False, True]
    assert [*named] == ["0", "1"]
    assert holder.count == 2


@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_once_for_each_derivative(transform: str) -> None:
    runs: list[bool] = []

    def fun(x: Tensor) -> Tensor:
        runs.append(is_rerunning())
        return x.sin()

    if transform == "grad":
        _, pull = vjp(remat(fun), numbers(3))
        for _ in range(3):
            pull(numbers(3))
    else:
        y = remat(fun)(leaf(numbers(3))).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
    assert runs == [False, True, True, True]
    assert not is_rerunning()


def test_a_rerun_in_a_rerun_and_an_exception_in_one() -> None:
    runs: list[bool] = []
    fails: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        runs.append(is_rerunning())
        if fails:
            raise ValueError("now")
        return x.sin()

    y = remat(lambda x: remat(inner)(x).cos())(leaf(numbers(3))).sum()
    y.backward(retain_graph=True)
    assert runs[0] is False
    assert all(runs[1:])
    fails.append(True)
    with pytest.raises(ValueError, match="now"):
        y.backward()
    assert not is_rerunning()


@pytest.mark.parametrize("run", ["no_grad", "plain numbers"])
def test_what_nothing_differentiates_runs_once(run: str) -> None:
    runs: list[bool] = []
    fun = remat(lambda x: (runs.append(is_rerunning()), x.sin())[1])
    with torch.no_grad() if run == "no_grad" else contextlib.nullcontext():
        fun(numbers(3).requires_grad_(run == "no_grad"))
    assert runs == [False]


@KEEPS
def test_a_cache_of_results_is_an_error() -> None:
    """The rerun finds the result of the forward there, and computes nothing."""
    y = remat(functools.lru_cache(lambda x: x.sin().tanh()))(leaf(numbers(3)))
    with pytest.raises(CheckpointError, match=r"ended after 0 of 2 torch calls.*Tensor\.sin"):
        y.sum().backward()


# Pickling and copying.


def roundtrip(obj: Any) -> Any:
    return pickle.loads(pickle.dumps(obj))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: at_top, id="decorated at the top"),
        pytest.param(lambda: remat(undecorated), id="wrapped"),
        pytest.param(lambda: remat(undecorated, preserve_rng_state=False), id="with options"),
        pytest.param(lambda: remat(functools.partial(undecorated, scale=2.0)), id="a partial"),
        pytest.param(lambda: functools.partial(at_top, scale=2.0), id="in a partial"),
        pytest.param(lambda: remat(Module()), id="a module"),
        pytest.param(lambda: Decorated(), id="a module with a decorated forward"),
        pytest.param(lambda: Holder().method, id="a bound decorated method"),
        pytest.param(lambda: functools.partial(Holder.alias, Holder()), id="a method by another name"),
        pytest.param(lambda: remat(Holder().plain), id="a bound method"),
        pytest.param(lambda: Holder(), id="an object with decorated methods"),
        pytest.param(lambda: remat(torch.tanh), id="a builtin"),
        pytest.param(lambda: remat(choose, static_argnums=1), id="static arguments"),
    ],
)
@pytest.mark.parametrize("copied", [roundtrip, copy.copy, copy.deepcopy])
def test_pickles_and_copies_as_the_function_does(make: Callable[[], Any], copied: Any) -> None:
    fun = make()
    again = copied(fun)
    arguments = ("sin", torch.ones(3).double()) if getattr(fun, "__name__", "") == "choose" else ()
    x = numbers(3)
    with CountOps() as ops:
        actual = grad(lambda x: again(x, *arguments).sum())(x)
    assert_same(actual, grad(lambda x: fun(x, *arguments).sum())(x))
    assert ops["tanh"] + ops["sin"] == 2  # it still runs again


def test_what_can_not_be_pickled_says_so() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(remat(lambda x: x))


def test_a_copied_module_has_parameters_of_its_own() -> None:
    module = nn.Linear(3, 3)
    fun = copy.deepcopy(remat(module))
    fun(torch.ones(3)).sum().backward()
    assert module.weight.grad is None


# Modules.


def test_a_decorated_forward_leaves_the_module_a_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3).double()

        @remat
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()

    net = Net()
    assert list(net.state_dict()) == ["linear.weight", "linear.bias"]
    params = {k: p.detach() for k, p in net.named_parameters()}
    per_sample = vmap(grad(lambda ps, x: functional_call(net, ps, (x,)).sum()), in_dims=(None, 0))
    expected = vmap(
        grad(lambda ps, x: torch.tanh(x @ ps["linear.weight"].t() + ps["linear.bias"]).sum()),
        in_dims=(None, 0),
    )
    assert_same(per_sample(params, numbers(4, 3)), expected(params, numbers(4, 3)))


def test_a_module_is_called_with_its_hooks() -> None:
    module, calls = Module(), Seen()
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    remat(module)(numbers(3))
    assert calls == ["before", "forward"]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("concrete", "Write static_argnums"),
        ("use_reentrant", r"belongs to remat\.checkpoint"),
        ("context_fn", r"Write policy=.*, or remat\.checkpoint"),
        ("determinism_check", "always compares"),
        ("polcy", "Did you mean policy"),
        ("speed", "It takes policy, static_argnums"),
    ],
)
def test_options_that_it_does_not_have(option: str, says: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{option}'.* {says}"):
        remat(torch.sin, **{option: True})


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_prevent_cse_means_nothing(prevent_cse: bool) -> None:
    x = leaf(numbers(3))
    with CountOps() as ops:
        remat(torch.tanh, prevent_cse=prevent_cse)(x).sum().backward()
    assert ops["tanh"] == 2
