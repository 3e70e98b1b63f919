"""`custom_remat`: functions with a rule of their own for what is kept."""

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from helpers import TRANSFORMS, CountOps, Fun, assert_same, leaf, numbers, plain
from torch import Tensor, nn
from torch.func import grad, jacfwd, jvp, vmap

from remat import RematError, custom_remat, remat, saved_residuals
from remat.debug import LiveBytes
from remat.policies import dots_saveable, everything_saveable, nothing_saveable, save_only_these_names

SAVES_COS = save_only_these_names("cos")


def sin_fwd(policy: Any, x: Tensor) -> Any:
    return x.sin(), x.cos() if policy == SAVES_COS else None


def sin_rem(cos: Any, x: Tensor) -> Any:
    return None, x.cos() if cos is None else cos


sin = custom_remat(torch.sin, sin_fwd, sin_rem, lambda cos, g: (g * cos,))


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT) / math.sqrt(q.shape[-1])


def attention_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v


def attention_fwd(policy: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = scores_of(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ v
    return out, (out, lse)


def attention_rem(kept: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return kept[0], (*kept, q, k, v)


def attention_bwd(kept: Any, g: Tensor) -> Any:
    out, lse, q, k, v = kept
    weights = (scores_of(q, k) - lse).exp()
    of_scores = weights * (g @ v.mT - (g * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return of_scores @ k, of_scores.mT @ q, weights.mT @ g


attention = custom_remat(attention_plain, attention_fwd, attention_rem, attention_bwd)
POLICIES = [None, nothing_saveable, everything_saveable, dots_saveable, SAVES_COS]
PROGRAMS: dict[str, tuple[Fun, Fun]] = {
    "sines": (lambda x: sin(sin(x) * x), lambda x: (x.sin() * x).sin()),
    "attention": (
        lambda x: attention(x, x.cos(), x * 2).tanh() @ x,
        lambda x: attention_plain(x, x.cos(), x * 2).tanh() @ x,
    ),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("program", "policy"),
    [*(("sines", policy) for policy in POLICIES), ("attention", None), ("attention", everything_saveable)],
)
def test_same_as_the_function(program: str, transform: str, policy: Any) -> None:
    custom, expected = PROGRAMS[program]
    x = numbers(3, 3)
    run = TRANSFORMS[transform]
    if (program, transform) == ("attention", "backward over forward AD"):
        with pytest.raises(
            RuntimeError, match="modified by an inplace operation"
        ):  # torch does that to its own softmax
            run(expected, x)
        expected = remat(expected)
    assert_same(run(remat(custom, policy=policy), x), run(expected, x), rounding=1e-9)
    assert_same(
        run(lambda x: remat(custom, policy=policy)(x.sin()).cos(), x),
        run(lambda x: expected(x.sin()).cos(), x),
        rounding=1e-9,
    )


@pytest.mark.parametrize("policy", [None, SAVES_COS])
@pytest.mark.parametrize("transform", [".backward()", "grad", "vmap(grad)", "grad(grad)", "jvp(grad)"])
@pytest.mark.parametrize("inner", ["jvp", "jacfwd", "jvp(grad)", "grad(jvp)", "vmap(jvp)"])
def test_transforms_inside(inner: str, transform: str, policy: Any) -> None:
    transformed: Any = {
        "jvp": lambda fun, x: jvp(fun, (x,), (x.cos(),))[1],
        "jacfwd": lambda fun, x: jacfwd(fun)(x[0]),
        "jvp(grad)": lambda fun, x: jvp(grad(lambda x: fun(x).sum()), (x,), (x.cos(),))[1],
        "grad(jvp)": lambda fun, x: grad(lambda x: jvp(fun, (x,), (x.cos(),))[1].sum())(x),
        "vmap(jvp)": lambda fun, x: vmap(lambda x, t: jvp(fun, (x,), (t,))[1])(x, x.cos()),
    }[inner]
    custom, expected = (lambda x, fun=fun: transformed(fun, x) for fun in PROGRAMS["sines"])
    x, run = numbers(3, 3), TRANSFORMS[transform]
    assert_same(run(remat(custom, policy=policy), x), run(expected, x))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_rules_hold_in_a_nested_call(transform: str) -> None:
    """The outer rerun skips the inner call, which therefore runs only for its own derivative."""
    x, run = numbers(3, 3), TRANSFORMS[transform]
    assert_same(run(remat(lambda x: x + remat(sin)(x)), x), run(lambda x: x + x.sin(), x), rounding=1e-9)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("policy", [None, everything_saveable, SAVES_COS])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_result_may_be_changed_in_place(transform: str, policy: Any) -> None:
    x, run = numbers(3, 3), TRANSFORMS[transform]

    def changed(f: Fun) -> Fun:
        return lambda x: torch.relu_(f(x).mul_(2)) * x

    assert_same(run(remat(changed(sin), policy=policy), x), run(changed(torch.sin), x), rounding=1e-9)


def ops_again(policy: Any, fun: Fun, *names: str) -> list[int]:
    x = leaf(numbers(3, 3))
    out = remat(fun, policy=policy)(x).sum()
    with CountOps() as ops:
        out.backward()
    return [ops[name] for name in names]


def test_the_rule_says_what_is_kept() -> None:
    """JAX's `test_remat_of_scan_funky_custom_jvp`, without the scan."""
    twice = lambda x: sin(sin(x)) * 2  # noqa: E731
    assert ops_again(SAVES_COS, twice, "sin", "cos") == [1, 0]  # the second call is given the first sine
    assert ops_again(nothing_saveable, twice, "sin", "cos") == [1, 2]
    assert ops_again(dots_saveable, twice, "sin", "cos") == [1, 2]


@pytest.mark.parametrize("policy", [nothing_saveable, dots_saveable, everything_saveable], ids=str)
def test_attention_keeps_its_result_and_log_sum_exp(policy: Any) -> None:
    q, k, v = (leaf(numbers(64, 4, seed=i)) for i in range(3))
    block = remat(lambda q, k, v: attention(q, k, v).sin(), policy=policy)
    kept = [r.shape for r in saved_residuals(block, q, k, v) if r.computed]
    assert sorted(kept) == [(64, 1), (64, 4)]
    with LiveBytes() as meter:
        out = block(q, k, v)
        assert meter.current < 3 * q.nbytes  # the scores are 16 times as large
    with CountOps() as ops:
        out.sum().backward()
    assert (ops["logsumexp"], ops["mm"]) == (0, 1 + 4)  # the scores, and the products of the derivative


def test_elsewhere_the_function_itself_runs() -> None:
    calls: list[str] = []
    fun = custom_remat(lambda x: calls.append("f") or x.sin(), sin_fwd, sin_rem, sin.f_bwd)  # type: ignore[func-returns-value]
    x = leaf(numbers(3))
    fun(x).sum().backward()
    grad(lambda x: fun(x).sum())(numbers(3))
    jvp(remat(fun, policy=SAVES_COS), (numbers(3),), (numbers(3),))
    with torch.no_grad():
        remat(fun, policy=SAVES_COS)(x)
    assert calls == ["f"] * 4
    remat(fun, policy=SAVES_COS)(x)
    assert calls == ["f"] * 4


def test_trees_numbers_and_what_is_given_back() -> None:
    def fwd(policy: Any, pair: Any, n: int, flag: Any) -> Any:
        a, b = pair["a"], pair["b"]
        return {"sum": a * n + b, "a": a}, (a, n)

    def bwd(kept: Any, g: Any) -> Any:
        return {"a": g["sum"] * kept[1] + g["a"], "b": g["sum"]}, None, None

    fun = custom_remat(lambda pair, n, flag: fwd(None, pair, n, flag)[0], fwd, lambda kept, *args: (None, kept), bwd)

    def program(decorate: Any, f: Any) -> Any:
        def total(a: Tensor, b: Tensor) -> Tensor:
            out = decorate(lambda a, b: f({"a": a.sin(), "b": b}, 3, None))(a, b)
            return (out["sum"].exp() * out["a"]).sum()

        return vmap(grad(total, argnums=(0, 1)))(numbers(2, 3), numbers(2, 3, seed=1))

    for policy in (None, dots_saveable):
        assert_same(program(remat(policy=policy), fun), program(plain, fun.f))


def test_the_cotangent_of_an_argument_that_is_given_back() -> None:
    twice = custom_remat(
        lambda x: (x, 2 * x),
        lambda policy, x: ((x, 2 * x), None),
        lambda kept, x: (None, None),
        lambda _, g: (g[0] + 2 * g[1],),
    )
    x = leaf(numbers(3))
    a, b = remat(lambda x: twice(x), policy=nothing_saveable)(x)
    (3 * a + b).sum().backward()
    assert_same(x.grad, torch.full((3,), 5.0, dtype=x.dtype))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((None, sin_fwd, sin_rem, sin.f_bwd), "custom_remat: f must be a function; got NoneType None."),
        ((torch.sin, sin_fwd, 3, sin.f_bwd), "custom_remat: f_rem must be a function; got int 3."),
        (
            (torch.sin, lambda policy, x: x, sin_rem, sin.f_bwd),
            "custom_remat(sin): f_fwd must return a tuple of 2: (out, residuals); got a tensor",
        ),
        (
            (torch.sin, sin_fwd, lambda kept, x: (1, 2, 3), sin.f_bwd),
            "custom_remat(sin): f_rem must return a tuple of 2",
        ),
        (
            (torch.sin, sin_fwd, sin_rem, lambda cos, g: g * cos),
            "custom_remat(sin): f_bwd must return a tuple of 1: gradients; got a tensor",
        ),
        (
            (torch.sin, sin_fwd, sin_rem, lambda cos, g: ([g, g],)),
            "custom_remat(sin): f_bwd must return gradients like the arguments",
        ),
        (
            (torch.sin, sin_fwd, sin_rem, lambda cos, g: (1.0,)),
            "custom_remat(sin): f_bwd must return tensors like the arguments, or None; got float 1.0",
        ),
        (
            (torch.sin, sin_fwd, sin_rem, lambda cos, g: (g[:1],)),
            "f_bwd must return tensors like the arguments, or None; got a tensor of shape [1] and dtype torch.float64",
        ),
    ],
)
def test_rules_that_are_none(rules: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        remat(custom_remat(*rules), policy=nothing_saveable)(leaf(numbers(3))).sum().backward()


def test_arguments_are_positional() -> None:
    with pytest.raises(
        TypeError, match=re.escape("custom_remat(sin): arguments are positional, as the rules take them; got input=.")
    ):
        remat(lambda x: sin(input=x), policy=nothing_saveable)(leaf(numbers(3)))


def product_rules(w: Tensor) -> Any:
    """Rules that read `w` from outside: they give it no gradient."""
    return custom_remat(
        lambda x: x * w,
        lambda policy, x: (x * w, None),
        lambda kept, x: (None, None),
        lambda kept, g: (g * w,),
    )


@pytest.mark.parametrize(
    "nest",
    [
        lambda f, x, w: f(w)(x),
        lambda f, x, w: vmap(f(w))(x),
        lambda f, x, w: grad(lambda x: f(w)(x).sum())(x),
        lambda f, x, w: grad(lambda w: f(w)(x).sum())(w),
        lambda f, x, w: vmap(grad(lambda w: f(w)(x).sum()))(torch.stack([w, w])),
    ],
    ids=["call", "vmap", "grad of x", "grad of w", "vmap(grad)"],
)
def test_the_rules_capture_a_differentiated_tensor(nest: Any) -> None:
    """Its gradient would be lost."""
    x, w = numbers(3, 3), numbers(3, seed=1)
    with pytest.raises(RematError, match=r"f_fwd takes a differentiated tensor from outside: .* of shape \[3\]"):
        nest(lambda w: remat(product_rules(w)), x, leaf(w))
    assert_same(remat(product_rules(w))(x), x * w)


class Scaled(nn.Module):
    """The rules as methods, and as an attribute of the class."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.product = custom_remat(self.f, self.fwd, self.rem, self.bwd)

    def f(self, x: Tensor) -> Tensor:
        return x * self.scale

    def fwd(self, policy: Any, x: Tensor) -> Any:
        return x * self.scale, None

    def rem(self, kept: Any, x: Tensor) -> Any:
        return None, None

    def bwd(self, kept: Any, g: Tensor) -> Any:
        return (g * self.scale,)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    of_class = custom_remat(
        lambda self, x: x * self.scale,
        lambda policy, self, x: (x * self.scale, self.scale),
        lambda kept, self, x: (None, kept),
        lambda scale, g: (None, g * scale),
    )


def test_copies_of_rules() -> None:
    module = copy.deepcopy(Scaled(2.0))
    module.scale = 3.0
    x = leaf(numbers(3))
    for fun in (module, remat(module.forward), remat(lambda x: module.of_class(x))):
        assert_same(fun(x), x * 3)
        assert_same(torch.autograd.grad(fun(x).sum(), x)[0], torch.full_like(x, 3))
    again = pickle.loads(pickle.dumps(attention))
    assert (again.f, again.f_bwd) == (attention_plain, attention_bwd)
