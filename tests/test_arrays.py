"""Functions that compute on the memory of arrays, of NumPy's and of others, beside torch: right, or an error."""

# ruff: noqa: PT017 - an error is one of two right answers

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CHECKPOINTS, TRANSFORMS, CountOps, Fun, Seen, assert_same, leaf, numbers
from torch import Tensor

from remat import CheckpointError, RematError, checkpoint, policies, remat
from remat.compat import create_selective_checkpoint_contexts

aten = torch.ops.aten


def array_of(t: Tensor) -> Any:
    return t.detach().numpy()


def halved(t: Tensor) -> None:
    array_of(t)[...] *= 0.5


def part_set(t: Tensor) -> None:
    array_of(t[0])[...] = 2.0


def through_dlpack(t: Tensor) -> None:
    torch.from_dlpack(t.detach()).mul_(0.5)


def back_from_numpy(t: Tensor) -> None:
    torch.from_numpy(array_of(t)).add_(1.0)


def as_array(t: Tensor) -> None:
    np.asarray(t.detach())[...] += 1


def by_python(t: Tensor) -> None:
    t.detach().apply_(lambda a: a + 1)


def by_python_of_two(t: Tensor) -> None:
    t.detach().map_(t.detach().cos(), lambda a, b: a * b)


WRITES = {
    f.__name__: f for f in (halved, part_set, through_dlpack, back_from_numpy, as_array, by_python, by_python_of_two)
}


def a_result(write: Any, x: Tensor) -> Tensor:
    y = x.sin()
    write(y)
    return y.cos() * y


def a_second_result(write: Any, x: Tensor) -> Tensor:
    y = x.sin()
    z = y.exp()
    write(z)
    return z.cos() * y


def what_is_filled(write: Any, x: Tensor) -> Tensor:
    t = torch.zeros_like(x)
    write(t)
    return x.sin() * t.exp()


def twice(write: Any, x: Tensor) -> Tensor:
    y = x.sin()
    write(y)
    write(y)
    return (y @ y).cos()


def a_copy_between_reads(write: Any, x: Tensor) -> Tensor:
    y = x @ x
    t = y.detach().clone()
    before = t.sin()
    write(t)
    between = t.cos()
    write(t)
    return y * t * before * between


def before_a_change_in_place(write: Any, x: Tensor) -> Tensor:
    y = x @ x
    write(y)
    return y.mul_(2).sin() @ x


def written_between_reads(x: Tensor) -> Tensor:
    y = x.sin()
    array = array_of(y)
    before = y.exp()
    array[...] += 1
    between = y.exp()
    array *= 2
    return before * between * y.sin()


def a_view_that_is_written_between_reads(x: Tensor) -> Tensor:
    y = (x @ x).clone()
    array, view = array_of(y), y.view(9)[:3]
    array[0] = 5
    before = view.exp()
    array[0] = 6
    return (before * view.exp()).sum() * y


def filled_in_a_loop(x: Tensor) -> Tensor:
    t = torch.zeros(3, 3, dtype=x.dtype)
    array = t.numpy()
    for i in range(3):
        array[i] = i
        x = (x * t).sin() + x
    return x


def filled_with_results(x: Tensor) -> Tensor:
    t, found = torch.empty(3, 3, dtype=x.dtype), x
    array = t.numpy()
    for i in range(3):
        array[...] = array_of(x.sin() * i)
        found = found + (t * x).exp()
    return found


def written_by_torch_too(x: Tensor) -> Tensor:
    y = (x @ x).detach().clone()
    array = y.numpy()
    y.add_(1)
    before = y.exp() * x
    array *= 2
    return before + y


def numbers_of_a_result(x: Tensor) -> Tensor:
    y = x @ x
    return (y * y.tolist()[0][0]).sin() * y


def read_in_what_dies(write: Any, x: Tensor) -> Tensor:
    y = x.sin()
    write(y)
    return torch.stack([x @ x, y]).sum(0) + y


RIGHT: dict[str, Fun] = {
    f"{part.__name__}, {name}": lambda x, part=part, write=write: part(write, x)
    for part in (
        a_result,
        a_second_result,
        what_is_filled,
        twice,
        a_copy_between_reads,
        before_a_change_in_place,
        read_in_what_dies,
    )
    for name, write in WRITES.items()
} | {
    f.__name__: f
    for f in (
        written_between_reads,
        a_view_that_is_written_between_reads,
        filled_in_a_loop,
        filled_with_results,
        written_by_torch_too,
        numbers_of_a_result,
    )
}


def an_array_that_changes(x: Tensor) -> Tensor:
    array = np.ones((3, 3))
    t = torch.from_numpy(array)
    before = x.sin() * t
    array[...] = 2
    after = x.sin() * t
    return (before * after).exp() * after


def one_array_in_two_tensors(x: Tensor) -> Tensor:
    array = np.ones((3, 3))
    a = torch.from_numpy(array)
    a.add_(1)
    b = torch.from_numpy(array)
    y = (x * b).exp()
    a.add_(1)
    return y * b * a


def an_array_that_torch_changes(x: Tensor) -> Tensor:
    t = torch.from_numpy(np.ones((3, 3)))
    t.mul_(2)
    return t * x.sin()


REFUSED = {
    an_array_that_changes: r"the array has changed since.* torch.tensor\(array\)",
    one_array_in_two_tensors: r"the array has changed since.* torch.tensor\(array\)",
    an_array_that_torch_changes: r"changes .* in place, read at .* torch.tensor\(array\)",
}
OPS = [aten.mm.default, aten.sin.default, aten.exp.default, aten.mul.Tensor, aten.clone.default]
POLICIES = {
    "no": None,
    "nothing": policies.save_ops(),
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "some ops": policies.save_ops(*OPS),
    "changes": policies.save_ops(aten.add_.Tensor),
}


FIRST = (".backward()", "double backward")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("fun", RIGHT.values(), ids=RIGHT)
def test_remat(fun: Fun, policy: Any) -> None:
    for transform in FIRST:
        actual = TRANSFORMS[transform](remat(fun, policy=policy), numbers(3, 3))
        assert_same(actual, TRANSFORMS[transform](fun, numbers(3, 3)))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_numbers_of_an_argument_beside_a_change_in_place(policy: Any) -> None:
    """What a rerun computes to have the numbers there is no op of the function."""

    def fun(x: Tensor, scale: Tensor) -> Tensor:
        y = x.sin()
        scale.mul_(0.9)
        y = y + scale
        array_of(x)
        return (y * x.tolist()[0][0]).sin()

    actual, expected = (
        TRANSFORMS[".backward()"](lambda x, f=f: f(x, numbers(3, seed=1)), numbers(3, 3))
        for f in (remat(fun, policy=policy), fun)
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_a_rerun_alone_puts_aside_after_an_array_was_taken(policy: Any) -> None:
    """It is computed there and then, for the array changes."""
    aside, runs = Seen(), Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(1)
        y = x @ x
        array = array_of(y)
        before = y.detach().clone()
        array += 1
        if len(runs) > 1:
            aside.append(before)
        return y.mul(2).sin()

    TRANSFORMS[".backward()"](remat(fun, policy=policy), numbers(3, 3))
    assert_same([*aside], [numbers(3, 3) @ numbers(3, 3)])


def test_results_of_memory_that_was_given_away_are_kept() -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.detach() * 2
        array = array_of(y)
        z = y.sin()
        array *= 3
        return x * z * y.cos().exp()

    x = leaf(numbers(3, 3))
    y = remat(fun, policy=policies.everything_saveable)(x).sum()
    with CountOps() as ops:
        y.backward()
    assert not ops["sin"] + ops["exp"]


@pytest.mark.parametrize("mutable", [True, False])
@pytest.mark.parametrize("ops", [[aten.mul.Tensor], [aten.add_.Tensor], [aten.mul.Tensor, aten.add_.Tensor]])
def test_what_selective_checkpointing_keeps_is_changed_and_then_given_away(ops: Any, mutable: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        y = (x * 2).add_(1)
        return x.sin() * torch.tensor(array_of(y))

    contexts = functools.partial(create_selective_checkpoint_contexts, ops, allow_cache_entry_mutation=mutable)
    is_right = mutable or aten.mul.Tensor not in ops
    told = None if is_right else pytest.raises(CheckpointError, match=r"has been mutated: a result of aten.mul.Tensor")
    with told or contextlib.nullcontext():
        actual = TRANSFORMS[".backward()"](
            lambda x: checkpoint(fun, x, use_reentrant=False, context_fn=contexts), numbers(3, 3)
        )
        assert_same(actual, TRANSFORMS[".backward()"](fun, numbers(3, 3)))


@pytest.mark.parametrize("ck", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("fun", RIGHT.values(), ids=RIGHT)
def test_checkpoint(fun: Fun, ck: Callable[[Fun], Fun]) -> None:
    for transform in FIRST[: 1 if ck is CHECKPOINTS["reentrant"] else 2]:
        assert_same(TRANSFORMS[transform](ck(fun), numbers(3, 3)), TRANSFORMS[transform](fun, numbers(3, 3)))


@pytest.mark.parametrize("transform", [".backward()", "grad", "grad(grad)", "jvp(grad)"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("fun", "match"), REFUSED.items())
def test_right_or_an_error_of_remat(fun: Fun, match: str, policy: Any, transform: str) -> None:
    expected = TRANSFORMS[transform](fun, numbers(3, 3))
    try:
        actual = TRANSFORMS[transform](remat(fun, policy=policy), numbers(3, 3))
    except (CheckpointError, RematError) as error:
        assert fun.__name__ in str(error)
        with pytest.raises(type(error), match=match):
            raise
    else:
        assert_same(actual, expected)


@pytest.mark.parametrize("ck", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize(("fun", "match"), REFUSED.items())
def test_right_or_an_error_of_checkpoint(fun: Fun, match: str, ck: Callable[[Fun], Fun]) -> None:
    expected = TRANSFORMS[".backward()"](fun, numbers(3, 3))
    try:
        actual = TRANSFORMS[".backward()"](ck(fun), numbers(3, 3))
    except CheckpointError as error:
        with pytest.raises(CheckpointError, match=match):
            raise error from None
    else:
        assert_same(actual, expected)


@pytest.mark.parametrize("ck", [remat, *CHECKPOINTS.values()], ids=["remat", *CHECKPOINTS])
def test_the_interface_to_arrays_on_a_gpu(ck: Callable[[Fun], Fun]) -> None:
    """It is a property of Python's."""

    def fun(x: Tensor) -> Tensor:
        with pytest.raises(AttributeError, match="on non-CUDA tensor type"):
            x.detach().__cuda_array_interface__  # noqa: B018
        return x.sin()

    assert_same(TRANSFORMS[".backward()"](ck(fun), numbers(3)), TRANSFORMS[".backward()"](fun, numbers(3)))


def pickled(t: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(t.detach()))  # type: ignore[no-any-return]


def saved(t: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(t.detach(), file)
    file.seek(0)
    return file


@torch.library.custom_op("remat_tests::exponential", mutates_args=())
def exponential(x: Tensor) -> Tensor:
    return x.exp()


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.scale = float(array_of(output).sum() + array_of(inputs[0]).sum())


exponential.register_autograd(lambda ctx, cotangent: cotangent * ctx.scale, setup_context=_setup)


def packed(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def hooked(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return (y * 2).cos()

    return hooked


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pickle": lambda x, w: ((x @ w).sin() * pickled((x @ w).sin() * 2)).exp(),
    "torch.save": lambda x, w: ((x @ w).sin() * torch.load(saved((x @ w).sin() * 2))).exp(),
    "deepcopy": lambda x, w: ((x @ w).sin() * copy.deepcopy((x @ w).sin().detach() * 2)).exp(),
    "text": lambda x, w: (x @ w).sin() * len(str(((x @ w).sin().detach() * 2).round(decimals=1))),
    "a hook with an array": packed(lambda t: array_of(t).copy(), torch.from_numpy),
    "a hook with a file": packed(saved, torch.load),
    "the rules of a custom op": lambda x, w: exponential((x @ w).sin() * 3).cos(),
}
READ_POLICIES = [
    None,
    policies.dots_saveable,
    policies.everything_saveable,
    policies.offload_ops("mm"),
    policies.save_ops("remat_tests::exponential"),
]


@pytest.mark.parametrize("policy", READ_POLICIES, ids=str)
@pytest.mark.parametrize("fun", READERS.values(), ids=READERS)
def test_memory_that_is_read_out_of_sight(fun: Callable[[Tensor, Tensor], Tensor], policy: Any) -> None:
    def run(fun: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        x, w = leaf(numbers(3, 4)), numbers(4, 4, seed=1)
        fun(x, w).sum().backward()
        return x.grad

    expected = run(fun)
    garbage = [torch.full((3, 4), 1e9, dtype=torch.float64) for _ in range(100)]  # what is not computed finds this
    del garbage
    assert_same(run(remat(fun, policy=policy)), expected)
