"""checkpoint_name: no change of a value, and a name that a policy can see, wherever it is given."""

import contextlib
import threading
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import TRANSFORMS, CountOps, assert_same, leaf, numbers
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from remat import remat
from remat._names import checkpoint_name, current_name
from remat._torch_internals import TorchDispatchMode
from remat.policies import save_only_these_names


class Names(TorchDispatchMode):
    """The ops that ran while a name was given, each with its name and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (name := current_name()) is not None:
            self.seen.append((name, func.overloadpacket.__name__))
            self.results.append(out)
        return out


class Pair(NamedTuple):
    a: Any
    b: Any


def named(x: Tensor) -> Tensor:
    return checkpoint_name(checkpoint_name(x.sin(), "sine").cos(), "cosine")


def unnamed(x: Tensor) -> Tensor:
    return x.sin().cos()


def test_without_modes_it_gives_back_what_it_got() -> None:
    x, tree = numbers(3), {"a": [numbers(2)]}
    assert checkpoint_name(x, "x") is x
    assert checkpoint_name(tree, "tree") is tree
    assert vmap(lambda x: checkpoint_name(x, "x"))(x).equal(x)


def test_a_policy_sees_the_name_once() -> None:
    with Names() as names:
        named(numbers(3))
    assert names.seen == [("sine", "alias"), ("cosine", "alias")]
    assert current_name() is None


def test_nothing_is_copied() -> None:
    x = numbers(3)
    with Names() as names:
        y = checkpoint_name(x, "x")
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() != 0
    assert names.results[0].untyped_storage() is y.untyped_storage()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform(transform: str) -> None:
    x = numbers(2, 2)
    with Names() as names:
        actual = TRANSFORMS[transform](named, x)
    assert_same(actual, TRANSFORMS[transform](unnamed, x))
    assert {("sine", "alias"), ("cosine", "alias")} <= set(names.seen)  # forward AD adds ops that check tangents


def test_the_calls_are_the_same_whether_a_policy_looks_on_or_not() -> None:
    """A rerun is compared with its forward by the calls that a torch-function mode sees."""

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Calls():
        named(numbers(3))
    alone, seen = seen, []
    with Names(), Calls():
        named(numbers(3))
    assert alone == seen


@pytest.mark.parametrize(
    "tree", [{"a": 1, "b": [None, "c"]}, Pair(1, (2, 3)), None, [], (), {"a": torch.float32}], ids=repr
)
def test_trees(tree: Any) -> None:
    x = numbers(3)
    with Names() as names:
        out = checkpoint_name({"x": x, "tree": tree, "pair": Pair(x, (x,))}, "n")
    assert out["tree"] == tree
    assert isinstance(out["pair"], Pair)
    assert names.seen == [("n", "alias")] * 3
    assert all(t.equal(x) for t in optree.tree_leaves(out) if isinstance(t, Tensor))


def test_modules() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_name(self.linear(x), "hidden").tanh()

    block = Block()
    with Names() as names:
        block(torch.ones(3)).sum().backward()
        params = {n: p.detach() for n, p in block.named_parameters()}
        vmap(grad(lambda p, x: functional_call(block, p, x).sum()), (None, 0))(params, torch.ones(2, 3))
    assert names.seen == [("hidden", "alias")] * 2


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return checkpoint_name(x.sin(), "sine") * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("transform", ["call", "grad", "vmap", "vmap(grad)", ".backward()", "jacrev"])
def test_inside_of_an_autograd_function(transform: str) -> None:
    with Names() as names:
        actual = TRANSFORMS[transform](Sine.apply, numbers(2))
    assert_same(actual, TRANSFORMS[transform](torch.sin, numbers(2)))
    assert set(names.seen) == {("sine", "alias")}


def test_torchs_selective_checkpointing() -> None:
    def f(x: Tensor) -> Tensor:
        return checkpoint_name(checkpoint_name(x.sin(), "a").sin(), "b").sin().sin()

    def sines_of_backward(*names: str) -> int:
        policy = save_only_these_names(*names)
        y = checkpoint(
            f,
            leaf(numbers(3)),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        with CountOps() as ops:
            y.sum().backward()
        return ops["sin"]

    # The named value is given back, but what it was computed from is computed again all the same.
    assert sines_of_backward() == sines_of_backward("a", "b") == 3

    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        seen.append(current_name())
        return False

    seen: list[str | None] = []
    checkpoint(
        f,
        leaf(numbers(3)),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert [name for name in seen if name] == ["a", "b"]


def test_a_name_ends_with_its_call_and_belongs_to_its_thread() -> None:
    names: list[str | None] = []

    class InAnotherThread(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            thread = threading.Thread(target=lambda: names.append(current_name()))
            thread.start()
            thread.join()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), InAnotherThread():
        checkpoint_name(numbers(3), "x")
    assert names == [None]
    assert current_name() is None


def test_the_name_may_be_a_keyword() -> None:
    """As in JAX."""
    x = numbers(3)
    assert checkpoint_name(x, name="a") is x


@pytest.mark.parametrize("name", [None, 3, b"x", ["x"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match=r"checkpoint_name: name must be a string; got"):
        checkpoint_name(numbers(3), name)
    message = r"got a tensor of shape \[3\] and dtype torch.float64. The order is checkpoint_name\(x, name\)\.$"
    with pytest.raises(TypeError, match=message):
        checkpoint_name("x", numbers(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [None, save_only_these_names("y")])
@pytest.mark.parametrize("where", [contextlib.nullcontext, torch.no_grad])
def test_a_name_changes_no_derivative(where: Any, policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        with where():
            y = checkpoint_name(y, "y")
        return (y.tanh() * x).sum()

    for derivative in (grad(fun), grad(lambda x: remat(fun, policy=policy)(x)), grad(remat(remat(fun, policy=policy)))):
        assert_same(derivative(numbers(3)), grad(lambda x: (x.sin().tanh() * x).sum())(numbers(3)))
