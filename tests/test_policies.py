"""Policies as values: what each decides, the laws they obey, and the mistakes they refuse."""

import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import leaf, numbers
from hypothesis import given, settings
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from remat import RematError, compat, policies, remat
from remat._names import checkpoint_name, current_name
from remat._torch_internals import DisableTorchFunction, TorchDispatchMode
from remat.policies import (
    CheckpointPolicy,
    Policy,
    all_of,
    any_of,
    as_policy,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    first_of,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    offload_ops,
    recompute_ops,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_at_least,
    save_at_most,
    save_every,
    save_from_both_policies,
    save_if,
    save_only_these_names,
    save_ops,
)

aten = torch.ops.aten
Decision = CheckpointPolicy
SAVE = (Decision.MUST_SAVE, Decision.PREFER_SAVE)
OFFLOAD = (Decision.MUST_CPU_OFFLOAD, Decision.PREFER_CPU_OFFLOAD)


def place(decision: Decision) -> str:
    return "saved" if decision in SAVE else "offloaded" if decision in OFFLOAD else "recomputed"


# Before 2.12, torch's has no output.
OF_TORCH = torch.__version__ >= (2, 12)
Context = torch_checkpoint.SelectiveCheckpointContext if OF_TORCH else compat.SelectiveCheckpointContext


def decide(policy: Any, op: Any, output: Any = None) -> Decision:
    """What a policy says of one op in a run."""
    context = Context(is_recompute=False, op_output=output)
    return as_policy(policy).start()(context, op)


def decisions(policy: Any, fun: Callable[[], Any], calls: bool = True) -> list[tuple[str, str]]:
    """(op, what becomes of its result) for each op of a run; a named value's op is its name."""
    decide = as_policy(policy).start()
    call: Any = None
    found: list[tuple[str, str]] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal call
            call = func, args, kwargs or {}
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            context = SimpleNamespace(is_recompute=False, op_output=out, **({"call": call} if calls else {}))
            with DisableTorchFunction():
                decision = decide(context, func, *args, **(kwargs or {}))
            found.append((current_name() or func.overloadpacket.__name__, place(decision)))
            return out

    with Ops(), Calls():
        fun()
    return found


def kept(policy: Any, fun: Callable[[], Any], calls: bool = True) -> list[str]:
    return [op for op, where in decisions(policy, fun, calls) if where != "recomputed"]


x2, x3, x4, w, v = numbers(4, 5), numbers(3, 4, 5), numbers(2, 3, 4, 5), numbers(5, 5), numbers(5)
image, kernel = numbers(2, 3, 6, 6), numbers(4, 3, 3, 3)

# Values.


def is_random(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def always(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return Decision.PREFER_CPU_OFFLOAD


POLICIES = {
    "everything_saveable": everything_saveable,
    "nothing_saveable": nothing_saveable,
    "dots_saveable": dots_saveable,
    "dots_with_no_batch_dims_saveable": dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims()": offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save_only_these_names('a', 'b')": save_only_these_names("b", "a", "b"),
    "save_any_names_but_these('a')": save_any_names_but_these("a"),
    "save_anything_except_these_names('a')": save_anything_except_these_names("a"),
    "save_and_offload_only_these_names(names_which_can_be_saved=['a'], names_which_can_be_offloaded=['b'])": (
        save_and_offload_only_these_names(names_which_can_be_saved=["a"], names_which_can_be_offloaded="b")
    ),
    "save_ops('aten.bmm', 'aten.mm.default')": save_ops(aten.mm.default, aten.bmm),
    "recompute_ops('aten.exp')": recompute_ops("exp"),
    "offload_ops('aten.mm')": offload_ops("aten::mm", device="cpu"),
    "save_every(2, 'aten.addmm', 'aten.mm')": save_every(2, "mm", "addmm"),
    "save_if(is_random)": save_if(is_random),
    "as_policy(always)": as_policy(always),
    "save_at_least(100)": save_at_least(100),
    "save_at_most(100)": save_at_most(100),
    "any_of(dots_saveable, save_at_most(3), save_ops('aten.exp'))": dots_saveable | (save_at_most(3) | ["exp"]),
    "all_of(dots_saveable, save_at_most(3))": dots_saveable & save_at_most(3),
    "first_of(recompute_ops('aten.exp'), dots_saveable)": first_of(recompute_ops("exp"), dots_saveable),
    "~dots_saveable": ~dots_saveable,
    "~~(dots_saveable - save_ops('aten.mm'))": ~~(dots_saveable - ["mm"]),
    "dots_saveable - (~dots_saveable - save_at_most(3))": dots_saveable - (~dots_saveable - save_at_most(3)),
}


@pytest.mark.parametrize("text", POLICIES)
def test_a_policy_is_a_value(text: str) -> None:
    policy = POLICIES[text]
    assert isinstance(policy, Policy)
    assert repr(policy) == text
    scope = {**vars(policies), "is_random": is_random, "always": always}
    for same in (eval(text, scope), pickle.loads(pickle.dumps(policy))):
        assert same == policy
        assert hash(same) == hash(policy)
        assert repr(same) == text
    assert [p for p in POLICIES.values() if p == policy] == [policy]


def test_a_policy_is_frozen() -> None:
    for policy in POLICIES.values():
        with pytest.raises(AttributeError):
            policy.anything = 1  # type: ignore[attr-defined]


def test_jax_has_two_spellings() -> None:
    assert policies.checkpoint_dots is policies.dots_saveable
    assert policies.checkpoint_dots_with_no_batch_dims is policies.dots_with_no_batch_dims_saveable


def test_a_policy_without_a_count_is_its_own_run() -> None:
    for policy in POLICIES.values():
        assert (policy.start() is policy) == ("save_every" not in repr(policy))


# What each decides.

BY_OP = {
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "save_ops('aten.bmm', 'aten.mm.default')",
    "recompute_ops('aten.exp')",
    "offload_ops('aten.mm')",
    "first_of(recompute_ops('aten.exp'), dots_saveable)",
    "~dots_saveable",
    "~~(dots_saveable - save_ops('aten.mm'))",
}


@pytest.mark.parametrize("text", POLICIES)
def test_by_op_is_what_a_policy_says_of_every_call(text: str) -> None:
    policy = POLICIES[text]
    for op, shape in (
        (aten.sin.default, (2, 3)),
        (aten.exp.default, (100, 100)),
        (aten.mm.default, (2, 3)),
        (aten.bmm.default, (5, 2, 3)),
        (aten.view.default, (6,)),
    ):
        decision = policy.by_op(op)
        assert decision in (None, decide(policy, op, torch.ones(shape)))
        assert decision is not None or text not in BY_OP


def test_a_policy_has_no_truth_value() -> None:
    """`p and q` would be `q`."""
    for combine in (lambda p, q: p and q, lambda p, q: p or q, lambda p, q: not p):
        with pytest.raises(TypeError, match=r"write p & q, p \| q, ~p in place of and, or, not"):
            combine(everything_saveable, nothing_saveable)


def test_everything_and_nothing() -> None:
    assert decide(everything_saveable, aten.sin.default) == Decision.MUST_SAVE
    assert decide(nothing_saveable, aten.sin.default) == Decision.MUST_RECOMPUTE
    assert decide(None, aten.sin.default) == Decision.MUST_RECOMPUTE


@pytest.mark.parametrize(
    ("maker", "listed", "other"),
    [
        (save_ops, Decision.MUST_SAVE, Decision.PREFER_RECOMPUTE),
        (recompute_ops, Decision.MUST_RECOMPUTE, Decision.PREFER_SAVE),
        (offload_ops, Decision.MUST_CPU_OFFLOAD, Decision.PREFER_RECOMPUTE),
    ],
)
@pytest.mark.parametrize("op", [aten.add, "aten.add", "aten::add", "add"])
def test_a_packet_is_all_its_overloads(maker: Any, listed: Any, other: Any, op: Any) -> None:
    assert decide(maker(op), aten.add.Tensor) == listed
    assert decide(maker(op), aten.add.out) == listed
    assert decide(maker(op), aten.add_.Tensor) == other
    assert maker(op) == maker(aten.add)


@pytest.mark.parametrize("op", [aten.add.Tensor, "aten.add.Tensor", "aten::add.Tensor", "add.Tensor"])
def test_an_overload_is_itself(op: Any) -> None:
    assert decide(save_ops(op), aten.add.Tensor) == Decision.MUST_SAVE
    assert decide(save_ops(op), aten.add.Scalar) == Decision.PREFER_RECOMPUTE
    assert save_ops(op) == save_ops("aten.add.Tensor")


def test_ops_of_other_libraries() -> None:
    library = torch.library.Library("remat_test", "FRAGMENT")
    library.define("triple(Tensor x) -> Tensor")
    triple = torch.ops.remat_test.triple
    for op in (triple, triple.default, "remat_test::triple", "remat_test.triple", "triple"):
        assert decide(save_ops(op), triple.default) == Decision.MUST_SAVE


def test_names() -> None:
    def f(x: Tensor = v) -> None:
        for name in "abc":
            x = checkpoint_name(x.sin(), name)

    assert kept(save_only_these_names("a", "c"), f) == ["a", "c"]
    assert kept(save_only_these_names(), f) == []
    assert kept(save_any_names_but_these("a", "c"), f) == ["b"]
    assert kept(save_anything_except_these_names("a", "c"), f) == ["sin", "sin", "b", "sin"]
    policy = save_and_offload_only_these_names(names_which_can_be_saved=["a"], names_which_can_be_offloaded=["c"])
    assert [d for d in decisions(policy, f) if d[0] in "abc"] == [
        ("a", "saved"),
        ("b", "recomputed"),
        ("c", "offloaded"),
    ]
    assert kept(policy, f) == ["a", "c"]


def test_save_every() -> None:
    def f(x: Tensor = w) -> None:
        for _ in range(5):
            x = (x @ x).sin()
            x = torch.addmm(x, x, x)

    def marks(policy: Any) -> str:
        found = decisions(policy, f)
        return "".join("x" if where == "saved" else "." for op, where in found if op in ("mm", "addmm"))

    every_third = save_every(3, "mm", "addmm")
    assert marks(every_third) == marks(every_third) == "x..x..x..x"
    assert marks(save_every(2, "mm")) == "x...x...x."
    assert marks(save_every(1, "mm")) == "x.x.x.x.x."
    assert marks(all_of(save_every(2, "mm", "addmm"), dots_saveable)) == "x.x.x.x.x."
    assert marks(any_of(["mm"], every_third)) == "x.xxx.x.xx"  # it counts those that others have saved
    assert marks(dots_saveable - every_third) == ".xx.xx.xx."
    assert marks(~every_third) == ".xx.xx.xx."


def test_save_every_counts_within_a_run() -> None:
    policy = save_every(2, "mm")
    with pytest.raises(RuntimeError, match=re.escape("save_every(2, 'aten.mm') counts the ops of one run")):
        policy(None, aten.mm.default)

    def f(x: Tensor) -> Tensor:
        return x @ x @ x @ x

    def check(x: Tensor) -> Tensor:
        return torch_checkpoint.checkpoint(  # type: ignore[no-any-return]
            f,
            x,
            use_reentrant=False,
            context_fn=lambda: torch_checkpoint.create_selective_checkpoint_contexts(policy.start()),
        )

    x = leaf(numbers(3, 3))
    for _ in range(2):
        (g,) = torch.autograd.grad(check(x).sum(), x)
        torch.testing.assert_close(g, torch.autograd.grad(f(x).sum(), x)[0])


@pytest.mark.parametrize("policy", [save_at_least(80), dots_saveable - save_at_most(80)])
def test_the_size_of_a_result_that_a_rerun_does_not_tell(policy: Policy) -> None:
    """Before 2.13, torch's own selective checkpointing asks in a rerun."""
    asked_again = torch_checkpoint.SelectiveCheckpointContext(is_recompute=True)
    with pytest.raises(RuntimeError, match=r"save_at_.*\(80\) decides by the result of an op"):
        policy(asked_again, aten.mm.default)


def test_save_if() -> None:
    def f() -> None:
        x = torch.rand(3).sin()
        F.dropout(x)

    assert kept(save_if(is_random), f) == ["rand", "bernoulli_"]
    assert kept(save_if(lambda ctx, op, x, *rest, **kw: ctx.op_output is not None), f) != []


@pytest.mark.parametrize(
    ("output", "nbytes"),
    [
        (torch.zeros(3), 12),
        (torch.zeros(3, dtype=torch.float64), 24),
        ((torch.zeros(3), torch.zeros(2, dtype=torch.int8)), 14),
        ([torch.zeros(1), None, 3], 4),
        (True, 0),
        (torch.zeros(1).expand(5), 20),
    ],
)
def test_sizes(output: Any, nbytes: int) -> None:
    for n in (nbytes - 1, nbytes, nbytes + 1):
        if n >= 0:
            assert place(decide(save_at_least(n), aten.sin.default, output)) == (
                "saved" if nbytes >= n else "recomputed"
            )
            assert place(decide(save_at_most(n), aten.sin.default, output)) == (
                "saved" if nbytes <= n else "recomputed"
            )


# Dots.

DOTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], bool]] = {
    # name: function, arguments, has batch dims
    "matrix @ matrix": (lambda x, w: x @ w, (x2, w), False),
    "matrix @ vector": (lambda w, v: w @ v, (w, v), False),
    "vector @ matrix": (lambda v, w: v @ w, (v, w), False),
    "vector @ vector": (lambda v: v @ v, (v,), False),
    "batch @ matrix": (lambda x, w: x @ w, (x3, w), False),
    "batch @ vector": (lambda x, v: x @ v, (x4, v), False),
    "batch @ batch": (lambda x: x @ x.mT, (x3,), True),
    "batch @ batch of one": (lambda x, w: x @ w, (x3, w[None]), False),
    "batches @ batch": (lambda x, y: x @ y.mT, (x4, x3), True),
    "batches @ batches along another dimension": (lambda x, y: x @ y.mT, (x4[:, :1], x4[:1]), False),
    "mm": (torch.mm, (x2, w), False),
    "mm(input=, mat2=)": (lambda x, w: torch.mm(input=x, mat2=w), (x2, w), False),
    "bmm": (lambda x: torch.bmm(x, x.mT), (x3,), True),
    "addmm": (torch.addmm, (v, x2, w), False),
    "baddbmm": (lambda x, y: torch.baddbmm(y, x, x.mT), (x3, numbers(3, 4, 4)), True),
    "mv": (torch.mv, (w, v), False),
    "dot": (torch.dot, (v, v), False),
    "inner": (torch.inner, (x3, x3), False),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([1, 2], [1, 2])), (x3,), False),
    "linear": (F.linear, (x4, w), False),
    "linear with bias": (F.linear, (x3, w, v), False),
    "einsum ij,jk": (lambda x, w: torch.einsum("ij,jk", x, w), (x2, w), False),
    "einsum bij,jk->bik": (lambda x, w: torch.einsum("bij,jk->bik", x, w), (x3, w), False),
    "einsum bij,bkj->bik": (lambda x: torch.einsum("bij, bkj -> bik", x, x), (x3,), True),
    "einsum ...ij,...kj": (lambda x: torch.einsum("...ij,...kj->...ik", x, x), (x4,), True),
    "einsum ...ij,jk": (lambda x, w: torch.einsum("...ij,jk->...ik", [x, w]), (x4, w), False),
    "einsum ...ij,...jk without batch": (lambda x, w: torch.einsum("...ij,...jk", x, w), (x2, w), False),
    "conv2d": (F.conv2d, (image, kernel), False),
    "conv_transpose2d": (F.conv_transpose2d, (image, kernel.movedim(0, 1)), False),
    "attention": (F.scaled_dot_product_attention, (x4, x4, x4), True),
    "attention without batch": (F.scaled_dot_product_attention, (x2, x2, x2), False),
    "multi_dot": (lambda x, w: torch.linalg.multi_dot([x, w, w]), (x2, w), False),
}


def batched(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.stack([a, a + 0.1]) for a in args)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention below vmap
@pytest.mark.parametrize("case", DOTS)
@pytest.mark.parametrize("transform", ["plain", "vmap", "vmap over the first", "vmap(grad)", "vmap(vmap)"])
def test_dots_are_those_of_the_users_function(case: str, transform: str) -> None:
    """A vmap over a function makes no difference to which of its dots are kept."""
    fun, args, has_batch_dims = DOTS[case]

    def run() -> None:
        if transform == "plain":
            fun(*args)
        elif transform == "vmap":
            vmap(fun)(*batched(args))
        elif transform == "vmap over the first":
            vmap(fun, in_dims=(0, *[None] * (len(args) - 1)))(batched(args)[0], *args[1:])
        elif transform == "vmap(vmap)":
            vmap(vmap(fun))(*batched(batched(args)))
        else:
            vmap(grad(fun_and_nothing_after))(*batched(args))

    def fun_and_nothing_after(*args: Tensor) -> Tensor:
        return fun(*args).sum()

    found = decisions(dots_saveable, run)
    assert "saved" in {where for _, where in found}, "no dot was seen"
    if transform == "vmap(grad)":
        return
    without = decisions(dots_with_no_batch_dims_saveable, run)
    offloaded = decisions(offload_dot_with_no_batch_dims("device", "pinned_host"), run)
    if has_batch_dims:
        assert {where for _, where in without} == {where for _, where in offloaded} == {"recomputed"}
    else:
        assert without == found
        assert offloaded == [(op, where.replace("saved", "offloaded")) for op, where in found]


@pytest.mark.parametrize("case", [c for c in DOTS if c != "batches @ batches along another dimension"])
def test_dots_by_the_op_where_the_call_is_not_known(case: str) -> None:
    fun, args, has_batch_dims = DOTS[case]
    found = kept(dots_with_no_batch_dims_saveable, lambda: fun(*args), calls=False)
    assert (found == []) == has_batch_dims


def test_a_composition_is_judged_by_its_ops() -> None:
    attention = torch.nn.MultiheadAttention(4, 2)
    attention.requires_grad_(False)
    x = torch.ones(3, 2, 4)
    assert kept(dots_saveable, lambda: attention(x, x, x)) == ["addmm", "bmm", "bmm", "addmm"]
    assert kept(dots_with_no_batch_dims_saveable, lambda: attention(x, x, x)) == ["addmm", "addmm"]


def test_what_is_no_dot() -> None:
    def f(x: Tensor = w) -> None:
        (x.sin() * x.T).softmax(0).sum().exp()
        torch.outer(x[0], x[0])

    assert kept(dots_saveable, f) == []


def test_the_ops_that_are_dots_exist() -> None:
    from remat.policies import _dots, _ops

    names = {op.overloadpacket.__name__ for op in _ops.overloads(_dots.DOTS)}
    assert {"mm", "addmm", "bmm", "baddbmm", "mv", "linear", "convolution", "_scaled_mm"} <= names
    assert "_scaled_dot_product_flash_attention" in names


# Combinators.

OPS = [aten.sin.default, aten.mm.default, aten.exp.default]
tables = st.tuples(*[st.sampled_from(list(Decision))] * len(OPS))


class Table(Policy):
    """Any decision for each op."""

    def __init__(self, decisions: tuple[Decision, ...]) -> None:
        self.decisions = dict(zip(OPS, decisions, strict=True))

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> Decision:
        return self.decisions[op]

    def __repr__(self) -> str:
        return f"Table({self.decisions})"


some = st.builds(Table, tables)


def says(policy: Policy) -> list[Decision]:
    return [decide(policy, op) for op in OPS]


def places(policy: Policy) -> list[str]:
    return [place(d) for d in says(policy)]


def is_kept(policy: Policy) -> list[bool]:
    return [p != "recomputed" for p in places(policy)]


LAWS: dict[str, Callable[[Policy, Policy, Policy], tuple[Policy, Policy]]] = {
    "| is associative": lambda p, q, r: ((p | q) | r, p | (q | r)),
    "& is associative": lambda p, q, r: ((p & q) & r, p & (q & r)),
    "first_of is associative": lambda p, q, r: (first_of(first_of(p, q), r), first_of(p, first_of(q, r))),
    "| is commutative": lambda p, q, r: (p | q, q | p),
    "& is commutative": lambda p, q, r: (p & q, q & p),
    "| is idempotent": lambda p, q, r: (p | p, p),
    "& is idempotent": lambda p, q, r: (p & p, p),
    "first_of is idempotent": lambda p, q, r: (first_of(p, p), p),
    "| absorbs": lambda p, q, r: (p | (p & q), p),
    "& absorbs": lambda p, q, r: (p & (p | q), p),
    "| distributes": lambda p, q, r: (p | (q & r), (p | q) & (p | r)),
    "& distributes": lambda p, q, r: (p & (q | r), (p & q) | (p & r)),
    "nothing | p": lambda p, q, r: (nothing_saveable | p, p),
    "everything & p": lambda p, q, r: (everything_saveable & p, p),
    "everything | p": lambda p, q, r: (everything_saveable | p, everything_saveable),
    "nothing & p": lambda p, q, r: (nothing_saveable & p, nothing_saveable),
    "De Morgan: |": lambda p, q, r: (~(p | q), ~p & ~q),
    "De Morgan: &": lambda p, q, r: (~(p & q), ~p | ~q),
    "triple negation": lambda p, q, r: (~~~p, ~p),
    "~nothing": lambda p, q, r: (~nothing_saveable, everything_saveable),
    "~everything": lambda p, q, r: (~everything_saveable, nothing_saveable),
    "p - nothing": lambda p, q, r: (p - nothing_saveable, p),
    "p - everything": lambda p, q, r: (p - everything_saveable, nothing_saveable),
    "first_of(everything, p)": lambda p, q, r: (first_of(everything_saveable, p), everything_saveable),
    "save_from_both_policies": lambda p, q, r: (save_from_both_policies(p, q), p | q),
    "~save_ops": lambda p, q, r: (~save_ops("mm"), recompute_ops("mm")),
    "~save_only_these_names": lambda p, q, r: (
        ~save_only_these_names("a"),
        save_anything_except_these_names("a"),
    ),
}


@pytest.mark.parametrize("law", LAWS)
@given(some, some, some)
@settings(max_examples=200, deadline=None)
def test_laws(law: str, p: Policy, q: Policy, r: Policy) -> None:
    left, right = LAWS[law](p, q, r)
    assert says(left) == says(right)


@given(some, some, some)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_boolean_algebra(p: Policy, q: Policy, r: Policy) -> None:
    pairs = list(zip(is_kept(p), is_kept(q), strict=True))
    assert is_kept(p | q) == [a or b for a, b in pairs]
    assert is_kept(p & q) == [a and b for a, b in pairs]
    assert is_kept(p - q) == is_kept(p & ~q) == [a and not b for a, b in pairs]
    assert is_kept(~p) == [not a for a, _ in pairs]
    assert is_kept((p - q) - r) == is_kept(p - (q | r))


@given(some)
@settings(max_examples=200, deadline=None)
def test_double_negation_but_for_the_place(p: Policy) -> None:
    for once, twice in zip(says(p), says(~~p), strict=True):
        assert twice.name == once.name.replace("CPU_OFFLOAD", "SAVE")


@given(some, some)
@settings(max_examples=200, deadline=None)
def test_a_difference_wants_no_less_what_it_does_not_touch(p: Policy, q: Policy) -> None:
    for before, after, dropped in zip(says(p), says(p - q), places(q), strict=True):
        assert place(after) == "recomputed" if dropped != "recomputed" else after == before


# Decisions of p and q, then of p | q, p & q, first_of(p, q) and p - q.
PRECEDENCE = """
    MUST_SAVE        MUST_CPU_OFFLOAD MUST_SAVE        MUST_CPU_OFFLOAD   MUST_SAVE        MUST_RECOMPUTE
    MUST_SAVE        MUST_RECOMPUTE   MUST_SAVE        MUST_RECOMPUTE     MUST_SAVE        MUST_SAVE
    MUST_CPU_OFFLOAD MUST_RECOMPUTE   MUST_CPU_OFFLOAD MUST_RECOMPUTE     MUST_CPU_OFFLOAD MUST_CPU_OFFLOAD
    PREFER_SAVE      MUST_CPU_OFFLOAD MUST_SAVE        PREFER_CPU_OFFLOAD MUST_CPU_OFFLOAD MUST_RECOMPUTE
    PREFER_SAVE      MUST_RECOMPUTE   PREFER_SAVE      MUST_RECOMPUTE     MUST_RECOMPUTE   PREFER_SAVE
    PREFER_RECOMPUTE MUST_RECOMPUTE   PREFER_RECOMPUTE MUST_RECOMPUTE     MUST_RECOMPUTE   PREFER_RECOMPUTE
    PREFER_SAVE      PREFER_RECOMPUTE PREFER_SAVE      PREFER_RECOMPUTE   PREFER_RECOMPUTE PREFER_SAVE
"""


@pytest.mark.parametrize("row", PRECEDENCE.strip().splitlines())
def test_precedence(row: str) -> None:
    p, q, *expected = (Decision[name] for name in row.split())
    a, b = Table((p,) * len(OPS)), Table((q,) * len(OPS))
    assert [says(policy)[0] for policy in (a | b, a & b, first_of(a, b), a - b)] == expected


def test_no_policies() -> None:
    assert any_of() == nothing_saveable
    assert all_of() == everything_saveable
    assert any_of(dots_saveable) == all_of(dots_saveable) == first_of(dots_saveable) == dots_saveable
    with pytest.raises(ValueError, match="first_of: give at least one policy; got none"):
        first_of()


def test_how_policies_were_grouped_makes_no_difference() -> None:
    p, q, r = dots_saveable, save_at_most(3), save_ops("exp")
    assert (p | q) | r == p | (q | r) == any_of(p, q, r)
    assert (p & q) & r == p & (q & r) == all_of(p, q, r)
    assert first_of(first_of(p, q), r) == first_of(p, first_of(q, r)) == first_of(p, q, r)
    assert p | q != p & q


@pytest.mark.parametrize("combine", [any_of, all_of, first_of, lambda p, q: p - q, lambda p, q: p | q])
def test_combinators_take_what_the_policy_argument_takes(combine: Any) -> None:
    assert isinstance(combine(dots_saveable, always), Policy)
    assert combine(dots_saveable, ["mm"]) == combine(dots_saveable, save_ops("mm"))
    with pytest.raises(TypeError, match="policy must be a policy, a function"):
        combine(dots_saveable, 3)


# Functions and collections as policies.


@pytest.mark.parametrize(
    ("result", "decision"),
    [
        (True, Decision.MUST_SAVE),
        (False, Decision.PREFER_RECOMPUTE),
        *[(d, d) for d in Decision],
        *[(d, Decision[d.name]) for d in torch_checkpoint.CheckpointPolicy],
    ],
)
def test_results_of_a_function(result: Any, decision: Decision) -> None:
    assert decide(lambda ctx, op, *args, **kwargs: result, aten.mm.default) == decision


@pytest.mark.parametrize("result", [None, 1, "MUST_SAVE", torch.tensor(True)], ids=repr)
def test_a_function_with_another_result(result: Any) -> None:
    def block_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return result

    with pytest.raises(TypeError, match=r"the policy .*block_policy must return .*got .* for aten.mm.default"):
        decide(block_policy, aten.mm.default)
    with pytest.raises(TypeError, match=r"the predicate .*block_policy must return a bool; got"):
        decide(save_if(block_policy), aten.mm.default)


def test_a_function_may_return_a_bool_of_numpy() -> None:
    for answer in (True, False):
        assert decide(lambda *args: np.bool_(answer), aten.mm.default) == decide(lambda *args: answer, aten.mm.default)


def test_a_function_that_draws_is_an_error() -> None:
    """The rerun asks no policy, so it would draw other numbers."""

    def at_random(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(torch.rand(()) < 0.5)

    with pytest.raises(RematError, match=r"policy .*at_random draws random numbers.* for aten.sin.default.*generator="):
        remat(lambda x: x.sin() * torch.rand(3), policy=at_random)(leaf(numbers(3)))
    own = torch.Generator()
    remat(torch.sin, policy=lambda *args: bool(torch.rand((), generator=own) < 0.5))(leaf(numbers(3))).sum().backward()


def test_a_size_is_that_of_the_memory_that_is_kept() -> None:
    large = torch.empty(1000)
    for view, nbytes in ((large[:1], 4000), (large, 4000)):
        for policy, is_saved in {
            save_at_most(nbytes): True,
            save_at_most(nbytes - 1): False,
            save_at_least(nbytes): True,
            save_at_least(nbytes + 1): False,
        }.items():
            assert (decide(policy, aten.slice.Tensor, view) is Decision.MUST_SAVE) == is_saved


def test_a_result_that_is_a_tensor_is_not_printed() -> None:
    for policy in (lambda *args: numbers(3) > 0, save_if(lambda *args: numbers(3) > 0)):
        with pytest.raises(
            TypeError, match=r"must return a bool.*; got a tensor of shape \[3\] and dtype torch.bool for"
        ):
            decide(policy, aten.mm.default)


@pytest.mark.parametrize("collection", [["mm"], ("mm",), {"mm"}, frozenset(["mm"]), {"mm": 1}.keys()])
def test_a_collection_of_ops(collection: Any) -> None:
    assert as_policy(collection) == save_ops("mm")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"remat: policy must be a policy, a function .* or None; got int 3"),
        ({"mm": True}, r"got dict"),
        (Policy, r"got ABCMeta"),
        ("aten.mm", r"'aten.mm' is one op, not a policy. Write \['aten.mm'\]"),
        (aten.mm.default, r"is one op, not a policy"),
        (aten.mm, r"is one op, not a policy"),
        (save_only_these_names, r"save_only_these_names is a function that makes a policy: call it"),
        (save_ops, r"save_ops is a function that makes a policy: call it"),
        ("dots_saveable", r"'dots_saveable' is the name of a policy. Write policy=remat.policies.dots_saveable\."),
        ("save_ops", r"'save_ops' is the name of a policy. Write policy=remat.policies.save_ops\(\.\.\.\)\."),
        ("dots", r"'dots' is the name of a policy. Write policy=remat.policies.dots_saveable\."),
        ("DOTS_SAVEABLE", r"there is no policy .DOTS_SAVEABLE.\. Did you mean policy=remat.policies.dots_saveable\?"),
        ("dots_savable", r"there is no policy .dots_savable.\. Did you mean policy=remat.policies.dots_saveable\?"),
        (
            ["mm", "dots_saveable"],
            r"'dots_saveable' is a policy, not an op. Write policy=remat.policies.dots_saveable, ",
        ),
        ([dots_saveable], r"dots_saveable is a policy, not an op. Write policy=dots_saveable, and \| for several"),
        (torch.sin, r"the builtin sin is no policy: .* An op goes in a list, by its name: policy=\['sin'\]"),
        (Tensor.sin, r"the builtin sin is no policy"),
    ],
)
def test_what_is_no_policy(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_policy(value)


@pytest.mark.parametrize(
    "policy",
    [everything_saveable, nothing_saveable, dots_saveable, dots_with_no_batch_dims_saveable, save_ops("mm")],
    ids=repr,
)
def test_what_is_a_policy_already(policy: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{re.escape(repr(policy))} is a policy already: leave out the \(\)\.$"):
        policy()


@pytest.mark.parametrize("policy", [lambda op: True, lambda ctx, op: True, save_if(lambda op: True)])
def test_a_function_that_is_no_policy(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"lambda> can't be called as policy\(ctx, op, \*args, .* of aten.sin") as error:
        as_policy(policy)(None, aten.sin.default, numbers(3))
    assert "positional argument" in str(error.value.__cause__)


def test_a_policys_own_errors_are_its_own() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as error:
        as_policy(lambda *args: 3 + "")(None, aten.sin.default)  # type: ignore[operator]
    assert error.value.__cause__ is None


def test_a_policy_written_for_torch_works_here_and_there() -> None:
    def f(x: Tensor) -> Tensor:
        return (x @ x).sin() @ x

    x = leaf(numbers(3, 3))
    expected = torch.autograd.grad(f(x).sum(), x)
    for policy in (as_policy(always), dots_saveable, everything_saveable - ["sin"], nothing_saveable):
        y = torch_checkpoint.checkpoint(
            f,
            x,
            use_reentrant=False,
            context_fn=lambda p=policy: torch_checkpoint.create_selective_checkpoint_contexts(p),
        )
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)


# Mistakes in ops and arguments.


@pytest.mark.parametrize("maker", [save_ops, recompute_ops, offload_ops, lambda *ops: save_every(2, *ops)])
@pytest.mark.parametrize(
    ("op", "error", "message"),
    [
        ("aten.mmm", ValueError, r"_\w+: there is no op 'aten.mmm'. Did you mean .*'aten.mm'"),
        ("bnm", ValueError, r"there is no op 'bnm'. Did you mean .*aten\."),
        ("aten.mm.defualt", ValueError, r"Did you mean .*'aten.mm.default'"),
        ("nothing_like_it", ValueError, r"there is no op 'nothing_like_it'. (Did|Import)"),
        ("zzzzzzzzzzzz", ValueError, r"Import the library that defines it"),
        ("hidden", ValueError, r"If checkpoint_name gives this name, write policy=save_only_these_names\('hidden'\)"),
        ("aten.add.int", ValueError, r"there is no op 'aten.add.int'"),
        ("matmul", ValueError, r"aten.matmul is never seen.* becomes: aten.mm, aten.bmm, aten.mv, aten.dot"),
        (aten.matmul.default, ValueError, r"aten.matmul.default is never seen.* becomes: aten.mm"),
        (aten.linear, ValueError, r"aten.linear is never seen.* becomes: aten.addmm, aten.mm"),
        ("aten.arctan2", ValueError, r"aten.arctan2 is never seen.* Name those"),
        (aten.add.int, ValueError, r"aten.add.int is never seen"),
        ("detach", ValueError, r"never asked about aten.detach"),
        (3, TypeError, r"an op is an overload .* got int 3"),
        (torch.mm, TypeError, r"an op is an overload .*; got builtin_function_or_method .*. Did you mean 'aten.mm'\?"),
        (Tensor.mm, TypeError, r"an op is an overload .*; got method_descriptor .*. Did you mean 'aten.mm'\?"),
        (torch.inner, TypeError, r"an op is an overload .*. Did you mean 'aten.mm' or 'aten.dot'\?"),
        (len, TypeError, r"an op is an overload .*; got builtin_function_or_method <built-in function len>\.$"),
        (torch.ones(2), TypeError, r"; got a tensor of shape \[2\] and dtype torch.float32\.$"),
        (["mm"], TypeError, r"an op is an overload .*; got list \['mm'\]. Unpack it: \*\['mm'\]\.$"),
    ],
    ids=lambda op: getattr(op, "__name__", str(op)),
)
def test_ops_that_can_never_match(maker: Any, op: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        maker(op)


def test_a_name_in_two_libraries() -> None:
    one, two = torch.library.Library("remat_one", "FRAGMENT"), torch.library.Library("remat_two", "FRAGMENT")
    for library in (one, two):
        library.define("twice_there(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match=r"'twice_there' may be remat_one.twice_there, remat_two.twice_there"):
        save_ops("twice_there")
    assert repr(save_ops("remat_one::twice_there")) == "save_ops('remat_one.twice_there')"


q = numbers(1, 2, 4, 8)
COMPOSITES: dict[str, Callable[[], Any]] = {
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(image, 2),
    "batch_norm": lambda: F.batch_norm(image, None, None, training=True),
    "bilinear": lambda: F.bilinear(x2, x2, numbers(3, 5, 5)),
    "contiguous": lambda: x2.T.contiguous(),
    "conv1d": lambda: F.conv1d(image[..., 0], kernel[..., 0]),
    "conv2d": lambda: F.conv2d(image, kernel),
    "conv3d": lambda: F.conv3d(image[..., None], kernel[..., None]),
    "conv_transpose1d": lambda: F.conv_transpose1d(image[..., 0], kernel[..., 0].movedim(0, 1)),
    "conv_transpose2d": lambda: F.conv_transpose2d(image, kernel.movedim(0, 1)),
    "conv_transpose3d": lambda: F.conv_transpose3d(image[..., None], kernel[..., None].movedim(0, 1)),
    "cross_entropy_loss": lambda: F.cross_entropy(x2, torch.zeros(4, dtype=torch.long)),
    "dropout": lambda: F.dropout(x2),
    "einsum": lambda: torch.einsum("ij,kj->ik", x2, x2),
    "flatten": lambda: x3.flatten(),
    "group_norm": lambda: F.group_norm(image, 3),
    "inner": lambda: torch.inner(x2, x2),
    "instance_norm": lambda: F.instance_norm(image),
    "layer_norm": lambda: F.layer_norm(x2, (5,)),
    "linalg_multi_dot": lambda: torch.linalg.multi_dot([w, w, w]),
    "linear": lambda: F.linear(x2, w),
    "log_softmax": lambda: x2.log_softmax(0),
    "matmul": lambda: x2 @ w,
    "max_pool2d": lambda: F.max_pool2d(image, 2),
    "outer": lambda: torch.outer(v, v),
    "reshape": lambda: x2.T.reshape(-1),
    "rms_norm": lambda: F.rms_norm(x2, (5,)),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, q, q),
    "softmax": lambda: x2.softmax(0),
    "square": lambda: x2.square(),
    "tensordot": lambda: torch.tensordot(x2, x2, dims=([1], [1])),
    "to": lambda: x2.to(torch.float32),
}


def test_what_a_composite_op_becomes_is_true() -> None:
    from remat.policies import _ops

    assert _ops._MADE_OF.keys() == COMPOSITES.keys()
    for name, run in COMPOSITES.items():
        seen = {op for op, _ in decisions(None, run)}
        assert name not in seen
        assert seen & set(_ops._MADE_OF[name]), (name, seen)
        with pytest.raises(ValueError, match=f"aten.{name} is never seen"):
            save_ops(name)
        save_ops(*_ops._MADE_OF[name])  # what it says to write can be written


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: save_every(0, "mm"), ValueError, "save_every: n must be at least 1; got 0"),
        (lambda: save_every(2.0, "mm"), TypeError, "save_every: n must be an int; got float 2.0"),
        (lambda: save_every(True, "mm"), TypeError, "save_every: n must be an int; got bool True"),
        (lambda: save_every(2), ValueError, "save_every: name the ops to count"),
        (lambda: save_at_least(-1), ValueError, "save_at_least: nbytes must be at least 0; got -1"),
        (lambda: save_at_most("1MB"), TypeError, "save_at_most: nbytes must be an int; got str '1MB'"),
        (lambda: offload_ops("mm", device="cuda:1"), ValueError, "device must be 'cpu'.* got 'cuda:1'"),
        (lambda: save_if(3), TypeError, "save_if: predicate must be a function"),
        (lambda: save_if(torch.ones(2)), TypeError, r"; got a tensor of shape \[2\] and dtype torch.float32\.$"),
        (lambda: save_at_most(torch.ones(2)), TypeError, r"; got a tensor of shape \[2\] and dtype torch.float32\.$"),
        (lambda: save_if(dots_saveable), TypeError, "save_if: predicate must be a function"),
        (lambda: save_if(aten.mm.default), TypeError, "save_if: predicate must be a function"),
        (
            lambda: save_only_these_names(["a"]),
            TypeError,
            r"save_only_these_names: names are strings; got list \['a'\]. Unpack it: \*\['a'\]\.$",
        ),
        (
            lambda: save_any_names_but_these(1),
            TypeError,
            "save_any_names_but_these: names are strings; got int",
        ),
        (lambda: save_anything_except_these_names(None), TypeError, "names are strings; got NoneType"),
        (lambda: offload_dot_with_no_batch_dims("device", "disk"), ValueError, "got 'device' to 'disk'"),
        (
            lambda: save_and_offload_only_these_names(
                names_which_can_be_saved=["a", "b"], names_which_can_be_offloaded=["b", "c"]
            ),
            ValueError,
            r"a name is either saved or offloaded; got 'b' in both of names_which_can_be_saved=\['a', 'b'\]",
        ),
        (
            lambda: save_and_offload_only_these_names(
                names_which_can_be_saved=[], names_which_can_be_offloaded=[], offload_src="cpu"
            ),
            ValueError,
            r"got 'cpu' to 'pinned_host'",
        ),
    ],
)
def test_mistakes_are_found_when_the_policy_is_made(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# The same decisions as JAX's.


def test_the_same_names_as_jax() -> None:
    jax = pytest.importorskip("jax")
    for name in vars(jax.checkpoint_policies):
        assert name in policies.__all__


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.everything_saveable,
        lambda m: m.nothing_saveable,
        lambda m: m.save_only_these_names("a", "c"),
        lambda m: m.save_any_names_but_these("a"),
        lambda m: m.save_from_both_policies(m.save_only_these_names("a"), m.save_only_these_names("b")),
        lambda m: m.save_from_both_policies(m.dots_saveable, m.save_any_names_but_these("a", "b")),
    ],
)
def test_names_as_in_jax(make: Any) -> None:
    jax = pytest.importorskip("jax")
    jnp, name = jax.numpy, pytest.importorskip("jax.ad_checkpoint").checkpoint_name

    def in_jax(x: Any) -> Any:
        return name(name(jnp.sin(x), "a") @ x, "b") + name(jnp.cos(x), "c")

    def in_torch(x: Tensor) -> Tensor:
        return checkpoint_name(checkpoint_name(x.sin(), "a") @ x, "b") + checkpoint_name(x.cos(), "c")

    policy = make(jax.checkpoint_policies)
    expected = [
        (eqn.params.get("name", eqn.primitive.name), bool(policy(eqn.primitive, **eqn.params)))
        for eqn in jax.make_jaxpr(in_jax)(jnp.ones((2, 2))).eqns
    ]
    found = [(op, where != "recomputed") for op, where in decisions(make(policies), lambda: in_torch(w))]
    assert found == [({"dot_general": "mm"}.get(op, op), keeps) for op, keeps in expected]


@pytest.mark.parametrize("case", [c for c in DOTS if "@" in c or "einsum" in c])
def test_dots_as_in_jax(case: str) -> None:
    jax = pytest.importorskip("jax")
    fun, args, has_batch_dims = DOTS[case]
    equation = re.match(r"einsum ([a-z.,>-]+)", case)
    arrays = [jax.numpy.asarray(a.numpy()) for a in args]
    if equation:
        explicit = {"...ij,...kj": "...ij,...kj->...ik", "...ij,jk": "...ij,jk->...ik"}
        operands = (arrays * 2)[:2]
        jaxpr = jax.make_jaxpr(lambda *xs: jax.numpy.einsum(explicit.get(equation[1], equation[1]), *xs))(*operands)
    else:
        jaxpr = jax.make_jaxpr(fun)(*arrays)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def dots(jaxpr: Any) -> list[bool]:
        inner = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
        here = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
        return [policy(e.primitive, **e.params) for e in here] + [d for j in inner for d in dots(j)]

    assert dots(jaxpr.jaxpr) == [not has_batch_dims]


def test_a_misspelt_policy() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'dots_saveable'"):
        _ = policies.dots_savable
    assert not hasattr(policies, "something_else")
