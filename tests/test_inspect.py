"""saved_residuals, print_saved_residuals, list_ops, and what REMAT_LOG=residuals says."""

import copy
import dataclasses
import functools
import inspect
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import UNIT, Seen, activation, leaf, numbers
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, vmap
from torch.nn import functional as F

import remat._inspect._mistakes as _mistakes
import remat._remat as _remat
from remat import (
    RematError,
    Residual,
    checkpoint,
    checkpoint_name,
    list_ops,
    policies,
    print_saved_residuals,
    remat,
    saved_residuals,
)
from remat._inspect._tables import bytes_text
from remat.debug import LiveBytes
from remat.nn import remat_module

aten = torch.ops.aten
W = numbers(3, 3)
FACTOR = numbers(1)
LINEAR = nn.Linear(3, 3).double()


def whys(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    return [r.why for r in saved_residuals(fun, *args, **kwargs)]


def layer(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(checkpoint_name(x @ w, "hidden")).sin()


def line_of(fun: Any, text: str) -> str:
    """file:line of a line of a function."""
    lines, start = inspect.getsourcelines(fun)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


# What is listed.


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, []),
        (policies.nothing_saveable, []),
        (policies.everything_saveable, ["output of aten.tanh.default"]),
        (policies.dots_saveable, ["named 'hidden'"]),
        (policies.save_only_these_names("hidden"), ["named 'hidden'"]),
        (policies.save_ops("tanh"), ["output of aten.tanh.default"]),
        (policies.offload_ops("tanh"), ["output of aten.tanh.default"]),
        (policies.save_ops("sin"), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["itself", "inside"])
def test_what_a_policy_keeps(policy: Any, kept: list[str], how: str) -> None:
    fun = remat(layer, policy=policy)
    looked_at = fun if how == "itself" else lambda w, x: fun(w, x).sum()
    residuals = saved_residuals(looked_at, W, numbers(2, 3))
    assert [r.why for r in residuals] == ["from the argument w", "from the argument x", *kept]
    assert [r.shape for r in residuals] == [(3, 3), (2, 3), *[(2, 3)] * len(kept)]
    assert [r.nbytes for r in residuals] == [72, 48, *[48] * len(kept)]
    assert {(r.dtype, r.device) for r in residuals} == {(torch.float64, torch.device("cpu"))}


def test_a_plain_function() -> None:
    assert whys(layer, W, numbers(2, 3)) == [
        "from the argument w",
        "from the argument x",
        "output of aten.tanh.default",
    ]
    assert whys(lambda x: x + 1, W) == []
    assert whys(lambda x: x.detach().sin(), W) == []
    assert whys(lambda x: 3, W) == []


def test_where() -> None:
    def fun(x: Tensor) -> Tensor:
        y = x.exp()
        z = checkpoint_name(y.tanh(), "z")
        return (z * y).sum()

    for decorate in (lambda f: f, lambda f: remat(f, policy=policies.everything_saveable)):
        found = {r.why: r.where for r in saved_residuals(decorate(fun), W)}
        found.pop("from the argument x", None)
        assert found == {"output of aten.exp.default": line_of(fun, "exp()"), "named 'z'": line_of(fun, "tanh()")}


def test_an_offloaded_value_says_what_it_is() -> None:
    def fun(x: Tensor) -> Tensor:
        return checkpoint_name(x.sin(), "s").exp().cos()

    policy = policies.offload_ops("exp") | policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["s"]
    )
    residuals = saved_residuals(remat(fun, policy=policy), W)
    assert [(r.why, r.where) for r in residuals[1:]] == [("output of aten.exp.default", line_of(fun, "exp()"))]
    residuals = saved_residuals(remat(lambda x: checkpoint_name(x.sin(), "s").cos(), policy=policy), W)
    assert [(r.why, r.nbytes) for r in residuals[1:]] == [("named 's'", 72)]


def test_arguments_by_their_names() -> None:
    def fun(x: Any, *rest: Any, scale: Any = None, **others: Any) -> Tensor:
        return x["w"] * x["b"][1] * rest[0] * scale * others["last"].a * others["lone"]

    def tensors() -> Iterator[Tensor]:
        for i in range(6):
            yield numbers(3, seed=i)

    a, b, c, d, e, f = tensors()
    arguments = {"w": a, "b": [None, b]}, c
    named = {"scale": d, "last": types.SimpleNamespace(a=e), "lone": f}
    found = [w for w in whys(fun, *arguments, **named) if "argument" in w]
    assert sorted(found) == sorted(
        [
            "from the argument x['b'][1]",
            "from the argument x['w']",
            "from the argument rest[0]",
            "from the argument scale",
            "from the argument others['lone']",
            "from the argument others['last'].a",
        ]
    )


def test_captured_tensors_by_their_names() -> None:
    w = leaf(numbers(3, 3))
    ws = {"a": [w]}

    def block(x: Tensor, factor: Tensor = FACTOR) -> Tensor:
        return (x @ w * W).sin() * factor

    def model(x: Tensor) -> Tensor:
        return remat(block)(x).cos()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = LINEAR

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        def loss(self, x: Tensor) -> Tensor:
            return self(x).sum()

    x = numbers(3, 3, seed=3)
    captured = ["captured w (closure of block)"]  # W and the factor need no gradient: they are not held
    assert sorted(w for w in whys(model, x) if "captured" in w) == sorted(captured)
    assert sorted(w for w in whys(remat(model), x) if "captured" in w) == sorted(captured)
    assert "captured ws['a'][0] (closure of <lambda>)" in whys(lambda x: x @ ws["a"][0], x.clone().requires_grad_())
    assert "captured weight (closure of Linear)" in whys(LINEAR, x.clone().requires_grad_())
    assert "captured linear.weight (closure of Model)" in whys(remat(Model()), x)
    assert "captured self.linear.weight (closure of loss)" in whys(remat(Model().loss), x)
    assert "captured LINEAR.weight (closure of <lambda>)" in whys(remat(lambda x: LINEAR(x)), x)
    assert "from the argument model.linear.weight" in whys(
        lambda model, x: model(x), Model(), x.clone().requires_grad_()
    )
    partial = functools.partial(torch.mul, w)
    assert "captured a tensor (closure of partial)" in whys(partial, x.clone().requires_grad_())


def test_a_variable_that_is_not_set_has_no_name() -> None:
    def model(x: Tensor) -> Tensor:
        return x.sin() if x.numel() else never

    if not callable(model):
        never = W
    assert whys(model, numbers(3)) == ["from the argument x"]


@dataclasses.dataclass
class Output:
    loss: Tensor


torch.export.register_dataclass(Output)


def test_results_in_an_object_that_torch_knows_as_a_tree() -> None:
    assert whys(lambda x: Output(x.exp().sum()), W) == ["output of aten.exp.default"]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch finds a node by a view of its result, which holds that")
def test_what_a_nested_tensor_consists_of() -> None:
    x, w = torch.nested.nested_tensor_from_jagged(numbers(6, 2), torch.tensor([0, 2, 6])), leaf(numbers(2, 2))

    def fun(x: Tensor) -> Tensor:
        return (x @ w).sin()

    kept = [
        "from the argument x",
        "from the argument x",
        "captured w (closure of fun)",
    ]
    product = "output of aten.mm.default"
    assert [r.why for r in saved_residuals(fun, x)] == [*kept, product]
    assert [r.why for r in saved_residuals(remat(fun), x)] == kept
    assert [r.why for r in saved_residuals(remat(fun, policy=policies.dots_saveable), x)] == [*kept, product]
    assert {(o.op, o.nbytes, o.flops) for o in list_ops(fun, x)} == {
        (f"aten.{op}.default", 96, n) for op, n in (("mm", 48), ("sin", 0))
    }


def test_a_storage_is_listed_once() -> None:
    x = numbers(4, 4)
    assert whys(lambda x, y: x[0] * y[1] * x[2], x, x[1:]) == ["from the argument x", "output of aten.mul.Tensor"]

    def fun(x: Tensor) -> Tensor:
        y = x.exp()
        return y.sin() * y.cos() * y.view(2, -1)[0].sum()

    assert sum("exp" in w for w in whys(fun, x)) == 1


def test_what_hooks_unpack_is_listed_each_time() -> None:
    def fun(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.tolist(), torch.tensor):
            return x.exp().exp().exp()

    residuals = saved_residuals(fun, numbers(3).requires_grad_())
    assert len(residuals) == 3


BLOCK = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
WRAPPED = remat_module(copy.deepcopy(BLOCK))
BY_CHECKPOINT: dict[str, Any] = {
    "checkpoint": lambda x: checkpoint(BLOCK, x, use_reentrant=False).exp(),
    "reentrant": lambda x: checkpoint(BLOCK, x, use_reentrant=True).exp(),
    "watched": lambda x: checkpoint(lambda x: (Seen(), BLOCK(x))[1], x, use_reentrant=False).exp(),
    "a wrapped module": lambda x: WRAPPED(x).exp(),
    "torch's": lambda x: torch.utils.checkpoint.checkpoint(BLOCK, x, use_reentrant=False).exp(),
}


@pytest.mark.parametrize("kind", BY_CHECKPOINT)
def test_what_is_under_checkpoint_is_not_run_again_to_look_at_it(kind: str, capsys: Any) -> None:
    x = torch.ones(2, 3).requires_grad_()
    computed = [r.why for r in saved_residuals(BY_CHECKPOINT[kind], x) if r.computed]
    assert computed == ["output of aten.exp.default"]
    print_saved_residuals(BY_CHECKPOINT[kind], x)
    plain = "24 B" if kind == "torch's" else "48 B"
    assert f"captured tensors: 24 B; without remat: {plain}" in capsys.readouterr().out


def test_gradients_are_those_of_what_requires_grad() -> None:
    x, w = numbers(3, 3), numbers(3, 3).requires_grad_()
    assert whys(torch.matmul, x, w) in (["from the argument input"], ["from the argument args[0]"])
    assert whys(lambda x, w: x @ w, x, w) == ["from the argument x"]
    assert whys(lambda x, w: x @ w, x, w.detach()) == ["from the argument x", "from the argument w"]


def test_the_function_may_use_transforms() -> None:
    fun = remat(lambda w, x: torch.tanh(x @ w), policy=policies.dots_saveable)
    found = whys(lambda w, x: vmap(fun, (None, 0))(w, x).sum(), W, numbers(5, 3))
    assert found == ["from the argument w", "from the argument x", "output of aten.mm.default"]
    found = whys(lambda w, x: grad(lambda w: fun(w, x).sum())(w), W, numbers(5, 3))
    assert found[:2] == ["from the argument w", "from the argument x"]


@pytest.mark.parametrize("look", [saved_residuals, print_saved_residuals, list_ops])
def test_inside_of_a_transform_it_is_an_error(look: Any) -> None:
    with pytest.raises(RematError, match=rf"{look.__name__}: call it outside all transforms"):
        grad(lambda x: (look(torch.sin, x), x.sum())[1])(W)


class Ten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = F.gelu(x.sin())
        return x


@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(lambda x: x.sin().cos().exp(), id="plain"),
        pytest.param(Ten(), id="a module"),
        pytest.param(remat(Ten()), id="remat"),
        pytest.param(lambda x: remat(Ten())(remat(Ten())(x)), id="remat twice"),
        pytest.param(remat(Ten(), policy=policies.save_ops("sin")), id="a policy"),
        pytest.param(remat(Ten(), policy=policies.offload_ops("sin")), id="offloaded"),
        pytest.param(remat(Ten(), policy=policies.everything_saveable), id="everything"),
        pytest.param(lambda x: remat(lambda x: F.dropout(x).sin())(x).cos(), id="random"),
        pytest.param(lambda x: (x.sin().view(2, -1)[0].cos(), x.tanh()), id="views and two results"),
        pytest.param(lambda x: torch.zeros_like(x).add_(x).sin_().mul_(x), id="in place"),
        pytest.param(lambda x: vmap(remat(lambda x: x.sin().cos()))(x.view(2, -1)), id="vmap"),
    ],
)
def test_live_memory_is_the_truth(fun: Callable[[Tensor], Any]) -> None:
    """What is listed is what the open graph holds."""
    x = activation().requires_grad_()
    with LiveBytes() as meter:
        out = fun(x)
        edges = [get_gradient_edge(t) for t in (out if isinstance(out, tuple) else (out,))]
        del out
        held = meter.current
    assert sum(r.nbytes for r in saved_residuals(fun, x) if r.computed) == held
    assert held % UNIT < UNIT / 8
    del edges


def test_looking_changes_nothing() -> None:
    x, linear = numbers(2, 3).requires_grad_(), LINEAR
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        fun = remat(lambda x: F.dropout(linear(x)).sin(), policy=policies.save_ops("addmm"))
        saved_residuals(fun, x)
        print_saved_residuals(fun, x)
        list_ops(fun, x)
        assert not torch.is_grad_enabled()
    assert torch.rand(1) == expected
    assert x.grad is None
    assert linear.weight.grad is None
    with LiveBytes() as meter:
        saved_residuals(fun, x)
        print_saved_residuals(fun, x)
    assert meter.current == 0


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable", "b", "a", "ac", "none"])
def test_as_many_as_in_jax(policy: str) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    jax_name = pytest.importorskip("jax.ad_checkpoint").checkpoint_name

    def make(module: Any) -> Any:
        if policy == "none":
            return None
        return getattr(module, policy) if len(policy) > 2 else module.save_only_these_names(*policy)

    def program(np: Any, name: Any, w: Any, x: Any) -> Any:
        a = name(np.sin(x @ w), "a")
        b = name(np.cos(a) @ w, "b")
        return np.sin(name(np.sin(b), "c"))

    w, x = torch.ones(3, 3), torch.ones(2, 3)
    ours = saved_residuals(remat(lambda w, x: program(torch, checkpoint_name, w, x), policy=make(policies)), w, x)
    in_jax = jax.checkpoint(lambda w, x: program(jnp, jax_name, w, x), policy=make(jax.checkpoint_policies))
    saved_in_jax = pytest.importorskip("jax._src.ad_checkpoint").saved_residuals
    theirs = saved_in_jax(in_jax, jnp.ones((3, 3)), jnp.ones((2, 3)))

    def shapes(residuals: Any, given: bool) -> list[tuple[int, ...]]:
        return sorted(shape for shape, why in residuals if why.startswith("from the argument") == given)

    found = [(r.shape, r.why) for r in ours]
    expected = [(aval.shape, why) for aval, why in theirs]
    assert shapes(found, given=True) == shapes(expected, given=True)
    if (
        policy != "everything_saveable"
    ):  # JAX saves the cosines that derivatives of sines are made of; torch computes them
        assert shapes(found, given=False) == shapes(expected, given=False)
    else:
        assert len(shapes(found, given=False)) <= len(shapes(expected, given=False))


# Tables.


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    def fun(w: Tensor, x: Tensor) -> Tensor:
        return remat(layer, policy=policies.save_ops("tanh"))(w, remat(layer)(w, x)).exp().exp().exp()

    w, x = torch.ones(64, 64), torch.ones(16, 64)
    print_saved_residuals(fun, w, x)
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[0].strip()) == ["size", "tensor", "device", "why", "where"]
    assert re.split("  +", lines[1].strip())[:4] == ["16 KiB", "float32[64, 64]", "cpu", "from the argument w"]
    starts = {line.index("cpu") for line in lines[1:8] if "cpu" in line}
    assert len(starts) == 1
    # the input of the second block, its tanh, and what the exponentials return
    assert lines[-3] == "held besides arguments and captured tensors: 20 KiB; without remat: 24 KiB"
    matmul = 2 * 16 * 64 * 64
    assert re.fullmatch(r"forward and backward: [\d.]+ [mun]?s; without remat: [\d.]+ [mun]?s", lines[-2])
    assert lines[-1] == f"recomputed on backward: {matmul / 1e3:.1f} kFLOP of {6 * matmul / 1e3:.1f} kFLOP"


def test_a_view_is_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    def fun(x: Tensor) -> Tensor:
        a, b = x.exp().chunk(2)
        return remat(torch.sin)(a) + a.cos() + remat(torch.sin)(b[:1]) + remat(torch.sin)(x[0])

    x = torch.ones(200, 1024)
    print_saved_residuals(fun, x)
    rows = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows[1:3]] == [
        ["800 KiB", "float32[1024], view of 800 KiB", "cpu", "from the argument x"],
        ["800 KiB", "float32[200, 1024]", "cpu", "output of aten.exp.default"],
    ]
    [given, a, *_] = saved_residuals(lambda x: remat(torch.sin)(x.sin()[:2]), x)
    assert (given.is_view, a.is_view, a.shape, a.nbytes) == (False, True, (2, 1024), 800 * 1024)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_list_ops() -> None:
    def fun(w: Tensor, x: Tensor) -> Tensor:
        return checkpoint_name((x @ w).sin(), "s").view(-1) * (x @ w).view(-1).sum()

    w, x = torch.ones(64, 64), torch.ones(16, 64)
    ops = list_ops(fun, w, x)
    by_name = {o.op: o for o in ops}
    assert len(by_name) == len(ops) == len(list(ops)) == len(ops[:])
    assert by_name["aten.mm.default"].count == 2
    assert by_name["aten.mm.default"].flops == 2 * 2 * 16 * 64 * 64
    assert by_name["aten.mm.default"].nbytes == 2 * 4 * 16 * 64
    assert by_name["aten.view.default"].nbytes == 0
    assert "aten.alias.default" not in by_name
    assert all(o.seconds > 0 for o in ops)
    assert [o.seconds for o in ops] == sorted((o.seconds for o in ops), reverse=True)
    assert repr(policies.save_ops(*by_name))  # each can be named
    table = repr(ops).splitlines()
    assert table[0].split() == ["op", "count", "size", "FLOPs", "time"]
    assert len(table) == len(ops) + 1
    assert len({len(line) for line in table}) == 1
    assert {o.op for o in list_ops(remat(fun), w, x)} == set(by_name)
    assert "aten.bmm.default" in {o.op for o in list_ops(vmap(torch.mm), w[None], w[None])}


def test_what_is_listed_is_what_a_policy_sees() -> None:
    seen: set[str] = set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.add(str(op))
        return False

    def fun(x: Tensor) -> Tensor:
        return F.layer_norm(LINEAR(x).relu_(), (3,)).softmax(-1)[0]

    remat(fun, policy=policy)(numbers(2, 3).requires_grad_())
    assert {o.op for o in list_ops(fun, numbers(2, 3))} == seen


# The log.


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(_remat, "watchers", [_mistakes.logging_watch])
    monkeypatch.setattr(_mistakes, "_logged", set())
    caplog.set_level(logging.INFO, logger="remat")
    return caplog


def warnings_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelno == logging.WARNING]


def tables_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelno == logging.INFO]


def big_head(x: Tensor) -> Tensor:
    """What comes after the blocks, with enough of its own to be worth a rerun before it."""
    for _ in range(20):
        x = x.sin()
    return x.sum()


def block(x: Tensor) -> Tensor:
    return torch.tanh(x @ W).sin().cos()


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap(grad)"])
def test_each_call_is_logged(log: pytest.LogCaptureFixture, transform: str) -> None:
    kept = remat(block, policy=policies.dots_saveable)

    def loss(x: Tensor) -> Tensor:
        return big_head(kept(remat(block)(x)))

    if transform == "backward":
        loss(numbers(2, 3).requires_grad_()).backward()
    elif transform == "grad":
        grad(loss)(numbers(2, 3))
    else:
        vmap(grad(loss))(numbers(4, 2, 3))
    first, second = tables_of(log)  # the reruns are no calls
    assert re.match(rf"remat: block \({re.escape(line_of(loss, 'big_head'))}\) keeps 0 B and drops \d+ B", first)
    assert "captured W (closure of block)" in first
    assert "from the argument x" in first
    assert "output of aten.mm.default" in second
    assert line_of(block, "x @ W") in second
    assert warnings_of(log) == []


def test_equal_calls_are_logged_once(log: pytest.LogCaptureFixture) -> None:
    kept = remat(block, policy=policies.dots_saveable)
    for _ in range(2):  # the second step says nothing new
        x = numbers(2, 3).requires_grad_()
        for _ in range(12):
            x = kept(x)
        big_head(x).backward()
    [table] = tables_of(log)
    assert re.match(r"remat: block \(.*\) keeps .* besides arguments and captured tensors ×12\n", table)


def test_without_the_variable_nothing_is_logged() -> None:
    assert log_of_a_fresh_shell("") == ""


def test_what_can_not_be_logged() -> None:
    assert log_of_a_fresh_shell("other") == "remat: REMAT_LOG can ask for 'residuals'; got 'other'.\n"


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap(grad)"])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (remat(lambda x: block(block(x)).sum()), r"remat: .*<lambda>.* is nearly all of the computation"),
        (lambda x: remat(lambda x: block(block(x)))(x).sum(), r".*<lambda>.* is nearly all of"),
        (lambda x: remat(block)(big_head(x) * x).sum(), r"remat: block \(.*\) runs again right after its forward"),
        (lambda x: remat(block)(remat(block)(x)).mean(), r"remat: block \(.*\) runs again right after its forward"),
        (lambda x: big_head(remat(block, policy=policies.save_ops("bmm", "mv"))(x)), r".*matches nothing in block"),
        (lambda x: big_head(remat(block, policy=policies.save_only_these_names("a"))(x)), r".*matches nothing in"),
        (
            lambda x: big_head(x) + remat(lambda x: x.sin().cos().exp().sum())(x),
            r".* runs again right after its forward",
        ),
        # What is no mistake.
        (lambda x: big_head(remat(block)(x)), None),
        (lambda x: big_head(remat(block, policy=policies.nothing_saveable)(x)), None),
        (lambda x: big_head(remat(block, policy=policies.save_ops("mm"))(x)), None),
        (lambda x: big_head(remat(block, policy=policies.save_ops("cos"))(x)), None),
        (remat(lambda x: big_head(remat(block)(x))), None),
        (lambda x: big_head(x) + remat(lambda x: x.square().sum())(x), None),
        (lambda x: x + remat(block)(x.detach()).sum(), None),
        (remat(lambda x: x.sum()), None),
    ],
)
def test_mistakes(log: pytest.LogCaptureFixture, loss: Any, expected: str | None, transform: str) -> None:
    x = numbers(4, 2, 3)
    for _ in range(2):  # said once
        if transform == "backward":
            loss(x[0].clone().requires_grad_()).sum().backward()
        elif transform == "grad":
            grad(lambda x: loss(x).sum())(x[0])
        else:
            vmap(grad(lambda x: loss(x).sum()))(x)
    found = warnings_of(log)
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1
        assert re.match(expected, found[0])


def test_mistakes_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = remat(block, policy=policies.save_ops("bmm"))
    print_saved_residuals(lambda x: wrong(x).sum(), numbers(2, 3))
    out = capsys.readouterr().out
    assert "matches nothing in block" in out
    assert "is nearly all of the computation" in out
    print_saved_residuals(lambda x: big_head(remat(block)(x)), numbers(2, 3))
    assert "\nremat:" not in capsys.readouterr().out


@pytest.mark.parametrize("fun", [remat(block), lambda x: remat(block)(x), remat(lambda x: (block(x), x))])
def test_a_block_by_itself_is_no_mistake(capsys: pytest.CaptureFixture[str], fun: Any) -> None:
    print_saved_residuals(fun, numbers(2, 3))
    assert "\nremat:" not in capsys.readouterr().out


def test_a_loss_by_itself_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_saved_residuals(remat(lambda x: block(x).sum()), numbers(2, 3))
    assert "is nearly all of the computation" in capsys.readouterr().out


@pytest.mark.parametrize("look", [saved_residuals, print_saved_residuals, list_ops])
def test_the_function_comes_first(look: Any) -> None:
    with pytest.raises(TypeError, match=f"{look.__name__}: got a class of modules, Linear. Make a module of it first"):
        look(nn.Linear, numbers(3))
    with pytest.raises(TypeError, match=f"{look.__name__}: the function comes first, then its arguments; got Tensor"):
        look(numbers(3).sin())


def test_the_log_holds_nothing(log: pytest.LogCaptureFixture) -> None:
    fun = remat(block, policy=policies.dots_saveable)
    x = numbers(2, 3).requires_grad_()
    for run in (lambda: fun(x), lambda: torch.autograd.grad(fun(x).sum(), x), lambda: grad(lambda x: fun(x).sum())(x)):
        with LiveBytes() as meter:
            run()
        assert meter.current == 0


def log_of_a_fresh_shell(variable: str) -> str:
    code = "import torch, remat\nremat.remat(lambda x: x.sin())(torch.ones(2, requires_grad=True)).sum().backward()"
    environment = {**os.environ, "REMAT_LOG": variable}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def test_a_fresh_shell_shows_the_log() -> None:
    log = log_of_a_fresh_shell("other,residuals")
    assert "remat: <lambda> (<string>:2) keeps 0 B" in log
    assert "from the argument x" in log


def test_a_residual_is_a_value() -> None:
    [a] = saved_residuals(remat(torch.sin), numbers(3))
    [b] = saved_residuals(remat(torch.sin), numbers(3))
    assert isinstance(a, Residual)
    assert (a.shape, a.why, hash(a.why)) == (b.shape, b.why, hash(b.why))
    with pytest.raises(AttributeError):
        a.nbytes = 3  # type: ignore[misc]
