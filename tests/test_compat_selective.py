"""Selective checkpointing: as torch does it, and where it is better."""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import grad as grad_of
from torch.func import grad
from torch.utils.flop_counter import FlopCounterMode

import remat.compat
from remat import CheckpointError, checkpoint_name, policies
from remat.debug import LiveBytes
from tests.helpers import UNIT, CountOps, Seen, activation, assert_same, leaf, numbers
from tests.test_compat_same import MODULES, each_from, plain

TORCH, REMAT = torch.utils.checkpoint, remat.compat
P = REMAT.CheckpointPolicy
mm, sin, add_ = torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.aten.add_.Tensor
each = pytest.mark.parametrize("api", MODULES.values(), ids=MODULES)
each_from_2_13 = each_from(2, 13)  # before, torch asks the policy again in the rerun, where it does not compare the ops


def call(api: Any, policy: Any, fun: Callable[..., Any], *args: Any, **options: Any) -> Any:
    context_fn = functools.partial(api.create_selective_checkpoint_contexts, policy, **options)
    return api.checkpoint(fun, *args, use_reentrant=False, context_fn=context_fn)


def block(x: Tensor) -> Tensor:
    return (torch.tanh((x @ x).sin() @ x) @ x).sin()


def expected(fun: Callable[..., Any]) -> Tensor:
    x = leaf(numbers(3, 3))
    fun(x).sum().backward()
    return x.grad


def by_op(wanted: Any, decision: Any) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: decision if op is wanted else P.PREFER_RECOMPUTE


def reruns(api: Any, policy: Any, fun: Callable[..., Any] = block, **options: Any) -> CountOps:
    """The ops of the backward; its result is right."""
    x = leaf(numbers(3, 3))
    y = call(api, policy, fun, x, **options)
    with CountOps() as ops:
        y.sum().backward()
    assert_same(x.grad, expected(fun))
    return ops


# The same.


@each
@pytest.mark.parametrize(
    ("decision", "kept"),
    [("MUST_SAVE", 1), ("PREFER_SAVE", 1), ("MUST_RECOMPUTE", 0), ("PREFER_RECOMPUTE", 0)],
)
def test_decisions(api: Any, decision: str, kept: bool) -> None:
    fun = lambda x: (x @ x).sin().exp() + 1  # noqa: E731
    ops = reruns(api, by_op(mm, P[decision]), fun)
    assert ops["mm"] == 2 + (not kept)


@each
def test_a_list_of_ops(api: Any) -> None:
    ops = reruns(api, [mm])
    assert ops["mm"] == 6
    assert ops["sin"] >= 1


@each
def test_a_function_may_return_bools(api: Any) -> None:
    assert reruns(api, lambda ctx, op, *args, **kwargs: op is mm)["mm"] == 6


@each_from_2_13
def test_what_a_policy_is_told(api: Any) -> None:
    seen = Seen()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(ctx, api.SelectiveCheckpointContext)
        seen.append((op, ctx.is_recompute, ctx.op_output.shape, args[0].shape))
        return P.PREFER_RECOMPUTE

    x = leaf(numbers(2, 3))
    call(api, policy, lambda x: x.sum(0).sin(), x).sum().backward()
    assert seen == [(torch.ops.aten.sum.dim_IntList, False, (3,), (2, 3)), (sin, False, (3,), (3,))]


@each_from(2, 12)
def test_ignored_ops(api: Any) -> None:
    assert torch.ops.aten.detach.default in api.SAC_IGNORED_OPS
    assert api.SAC_IGNORED_OPS == TORCH.SAC_IGNORED_OPS
    context = api.SelectiveCheckpointContext(is_recompute=False, op_output=3)
    assert (context.is_recompute, context.op_output) == (False, 3)


@each
def test_a_kept_tensor_that_is_changed_is_an_error(api: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x @ x
        z = y.sum(0)
        y.add_(1)
        return y.sin() * z

    x = leaf(numbers(3, 3))
    y = call(api, [mm], fun, x)
    with pytest.raises(RuntimeError, match="cached during selective activation checkpoint has been mutated"):
        y.sum().backward()


def test_a_recurrent_layer_changes_what_is_kept() -> None:
    cell = nn.GRUCell(3, 3).double()
    with pytest.raises(
        RuntimeError, match=r"If the function changes it, .* pass allow_cache_entry_mutation=True to cr"
    ):
        reruns(REMAT, policies.dots_saveable, cell)
    assert reruns(REMAT, policies.dots_saveable, cell, allow_cache_entry_mutation=True)["addmm"] == 1  # of two


@pytest.mark.parametrize("policy", [policies.dots_saveable, policies.everything_saveable], ids=str)
def test_an_op_that_raises_is_not_kept(policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        try:
            root = torch.linalg.cholesky(x)
        except torch.linalg.LinAlgError:
            root = torch.linalg.cholesky(x + 10 * torch.eye(3))
        return root.sin() @ x

    reruns(REMAT, policy, fun)


def test_a_policy_as_the_contexts() -> None:
    with pytest.raises(
        TypeError, match=r"context_fn must .* got .*dots_saveable\. For a policy, write .*_contexts, policy\)"
    ):
        REMAT.checkpoint(torch.sin, leaf(numbers(3)), use_reentrant=False, context_fn=policies.dots_saveable)


@each
def test_a_packet_in_a_list_is_refused(api: Any) -> None:
    with pytest.raises(ValueError, match=r"update the OpOverloadPacket to a specific OpOverload.*aten\.mm\.default"):
        api.create_selective_checkpoint_contexts([torch.ops.aten.mm])
    with pytest.raises(ValueError, match="OpOverload"):
        api.create_selective_checkpoint_contexts(["mm"])
    with pytest.raises(TypeError, match="must be either a function or a"):
        api.create_selective_checkpoint_contexts(3)


@each_from_2_13
def test_an_op_that_the_forward_did_not_run(api: Any) -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(0)
        return (x.sin() if len(runs) == 1 else x.cos()).exp()

    y = call(api, [sin], fun, leaf(numbers(3)))
    with pytest.raises(RuntimeError, match="encountered during backward but not found in storage"):
        y.sum().backward()


@each
def test_views_and_several_results(api: Any) -> None:
    ops = [torch.ops.aten.view.default, torch.ops.aten.t.default, torch.ops.aten.max.dim]
    reruns(api, ops, lambda x: (x.sin().view(9, 1).t() * x.exp().max(0)[0].repeat(3)).sin())


@each
def test_nested_regions(api: Any) -> None:
    def outer(x: Tensor) -> Tensor:
        return call(api, [mm], block, call(api, [sin], block, x)).sin()

    reruns(api, [mm], outer)


@pytest.mark.parametrize("keeps_outside", [False, True])
@pytest.mark.parametrize("is_remat", [False, True])
def test_the_memory_and_work_of_nested_regions(is_remat: bool, keeps_outside: bool) -> None:
    """A rerun of the outer function keeps nothing for the inner ones, whose own values are still there."""

    def inner(x: Tensor) -> Tensor:
        return x.sin().cos().sin()

    def measured(api: Any, checkpointed: Any) -> tuple[int, int]:
        def outer(x: Tensor) -> Tensor:
            for _ in range(8):
                x = checkpointed(x)
            return x

        with LiveBytes() as meter:
            y = call(api, [sin] if keeps_outside else [], outer, leaf(activation()))
            meter.reset_peak()
            with CountOps() as ops:
                y.sum().backward()
        return round(meter.peak / UNIT), ops["sin"]

    most, most_work = measured(TORCH, lambda x: call(TORCH, [sin], inner, x))
    by_remat = remat.remat(inner, policy=policies.save_ops(sin))
    peak, work = measured(REMAT, by_remat if is_remat else lambda x: call(REMAT, [sin], inner, x))
    assert peak <= most
    assert work <= most_work


@each
def test_custom_contexts(api: Any) -> None:
    """A `context_fn` of the user's own."""
    entered = Seen()

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *args: Any) -> None:
            entered.append(f"end of {self.name}")

    x = leaf(numbers(3))
    contexts = lambda: (Context("forward"), Context("rerun"))  # noqa: E731
    y = api.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False, context_fn=contexts)
    assert entered == ["forward", "end of forward"]
    y.sum().backward()
    assert entered == ["forward", "end of forward", "rerun", "end of rerun"]


def test_contexts_of_torch_with_our_checkpoint_and_the_other_way_round() -> None:
    for one, other in ((TORCH, REMAT), (REMAT, TORCH)):
        x = leaf(numbers(3, 3))
        context_fn = functools.partial(one.create_selective_checkpoint_contexts, [mm])
        y = other.checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
        with CountOps() as ops:
            y.sum().backward()
        assert ops["mm"] == 6
        assert_same(x.grad, expected(block))


# Better.


@pytest.mark.parametrize("policy", [[mm], by_op(sin, P.MUST_SAVE), lambda *_, **__: P.PREFER_SAVE])
def test_two_backward_passes_and_double_backward(policy: Any) -> None:
    def run(api: Any) -> Any:
        x = leaf(numbers(3, 3))
        y = block(x) if api is None else call(api, policy, block, x)
        first = grad_of(y.sum(), x, retain_graph=True)
        (g,) = grad_of(y.sum(), x, create_graph=True)
        return first, g, grad_of(g.square().sum(), x)

    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        run(TORCH)
    assert_same(run(REMAT), run(None))


def attention(x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (x @ WEIGHT).chunk(3, -1))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


WEIGHT = numbers(8, 24)


def test_what_was_given_back_is_not_held() -> None:
    """Views of the product are copied: after that it is there no longer than with torch."""

    def run(api: Any) -> tuple[Tensor, int]:
        x = leaf(numbers(2, 16, 8))
        with LiveBytes() as meter:
            y = attention(x) if api is None else call(api, [mm], attention, x)
            y.sum().backward()
        return x.grad, meter.peak

    (actual, peak), (expected, _) = run(REMAT), run(None)
    assert_same(actual, expected)
    assert peak <= run(TORCH)[1]


@torch.library.custom_op("remat_tests::seen", mutates_args=())
def seen_op(x: Tensor) -> Tensor:
    return x.sin()


seen_op.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@each
def test_a_custom_op_that_is_kept_runs_once_even_where_no_backward_reads_its_result(api: Any) -> None:
    for fun in (lambda x: seen_op(x.exp()), lambda x: seen_op(x.exp()) + 1):
        ops = reruns(api, by_op(torch.ops.remat_tests.seen.default, P.MUST_SAVE), fun)
        assert (ops["seen"], ops["exp"]) == (0, 1)


@each_from_2_13
def test_an_op_that_runs_more_often_in_the_rerun(api: Any) -> None:
    runs = Seen()

    def fun(x: Tensor) -> Tensor:
        runs.append(0)
        for _ in runs:
            x.detach().sin()
        return x.sin()

    context_fn = functools.partial(api.create_selective_checkpoint_contexts, [sin])
    y = api.checkpoint(fun, leaf(numbers(3)), use_reentrant=False, context_fn=context_fn, early_stop=False)
    with pytest.raises(RuntimeError, match=r"aten\.sin\.default invocation index 2 .* not found in storage"):
        y.sum().backward()


def test_results_that_each_have_a_backward_of_their_own() -> None:
    """What was given back to the first is computed again for the second, unless the op is not one of torch's."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        first = seen_op(x @ x).sin()
        return first, (torch.bernoulli(torch.full_like(x, 0.5)) * (x @ x.T)).exp()

    def run(api: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(3, 3))
        keeps = lambda ctx, op, *args, **kwargs: P.MUST_SAVE  # noqa: E731
        results = fun(x) if api is None else call(api, keeps, fun, x)
        ops = []
        for result in results:
            with CountOps() as count:
                result.sum().backward()
            ops.append([count[name] for name in ("mm", "bernoulli", "seen")])
        return x.grad, torch.get_rng_state(), ops

    (*actual, ops), (*expected, without) = run(REMAT), run(None)
    assert_same(actual, expected)
    assert (ops[0], without) == (without[0], [[2, 0, 0], [2, 0, 0]])
    assert ops[1] == [4, 1, 0]
    with pytest.raises(RuntimeError, match="extra time"):
        run(TORCH)


@pytest.mark.parametrize("policy", [[add_], lambda ctx, op, *a, **k: P.MUST_SAVE if op is add_ else P.PREFER_RECOMPUTE])
def test_an_in_place_op_whose_result_is_saved(policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        return ((x @ x).add_(x) @ x).sin()

    with pytest.raises(RuntimeError, match="has been mutated"):
        reruns(TORCH, policy, fun)
    assert reruns(REMAT, policy, fun)["add_"] == 0


@pytest.mark.parametrize("save", ["mm", "both", "all"])
@pytest.mark.parametrize("retain", [False, True])
def test_allowed_mutations_of_what_is_kept(save: str, retain: bool) -> None:
    def fun(x: Tensor) -> Tensor:
        y = x @ x
        z = y.sum(0)
        y.add_(1)
        return (y @ x).sin() * z

    policy = {"mm": [mm], "both": [mm, add_], "all": lambda *_, **__: P.MUST_SAVE}[save]

    def run(api: Any) -> Any:
        x = leaf(numbers(3, 3))
        y = call(api, policy, fun, x, allow_cache_entry_mutation=True).sum()
        if retain and api is REMAT:
            y.backward(retain_graph=True)
            x.grad = None
        y.backward()
        return x.grad

    if save == "mm":
        with pytest.raises(AssertionError):
            assert_same(run(TORCH), expected(fun))
    assert_same(run(REMAT), expected(fun))


def test_what_is_kept_may_not_be_changed_outside() -> None:
    def run(api: Any, allow: bool = True) -> Any:
        x, kept = leaf(numbers(3, 3)), []

        def fun(x: Tensor) -> Tensor:
            y = x @ x
            kept.append(y.detach())
            return y.sin() @ x

        y = call(api, [mm], fun, x, allow_cache_entry_mutation=allow)
        kept[0].add_(1)
        y.sum().backward()
        return x.grad

    right = expected(lambda x: (x @ x).sin() @ x)
    with pytest.raises(AssertionError):
        assert_same(run(TORCH), right)
    assert_same(run(REMAT), right)
    for api in (TORCH, REMAT):
        with pytest.raises(RuntimeError, match="has been mutated"):
            run(api, allow=False)


@pytest.mark.parametrize("decision", [P.MUST_CPU_OFFLOAD, P.PREFER_CPU_OFFLOAD])
def test_offloading(decision: Any) -> None:
    policy = by_op(mm, decision)
    assert reruns(REMAT, policy)["mm"] == 6
    assert reruns(TORCH, policy)["mm"] > 6


@pytest.mark.parametrize("result", [None, "MUST_SAVE", 1])
def test_a_policy_that_returns_something_else(result: Any) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return result

    assert reruns(TORCH, policy)["mm"] > 6
    with pytest.raises(TypeError, match=r"must return a bool or a CheckpointPolicy; got .* for aten\.mm"):
        call(REMAT, policy, block, leaf(numbers(3, 3)))


PACKETS = [torch.ops.aten.mm]
aten = torch.ops.aten


def test_a_list_with_an_op_that_is_made_of_others() -> None:
    policy = [torch.ops.aten.matmul.default]
    assert reruns(TORCH, policy)["mm"] > 6
    with pytest.warns(UserWarning, match=r"aten\.matmul\.default is never seen.*aten\.mm") as caught:
        REMAT.create_selective_checkpoint_contexts(policy)
    assert [w.filename for w in caught] == [__file__]


def overloads_in_code(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return op in (torch.ops.aten.mm.default, aten.bmm.default, torch.ops.aten.addmm.default)


def compares_packets(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return op.overloadpacket in PACKETS


@pytest.mark.parametrize("policy", [overloads_in_code, compares_packets, policies.dots_saveable, [mm]])
def test_no_warning_where_nothing_is_wrong(policy: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reruns(REMAT, policy)["mm"] == 6


@pytest.mark.parametrize("kind", [tuple, set, frozenset])
def test_other_collections_of_ops(kind: Any) -> None:
    with pytest.raises(TypeError, match="function or a list"):
        reruns(TORCH, kind([mm]))
    assert reruns(REMAT, kind([mm]))["mm"] == 6


def test_one_pair_of_contexts_for_two_regions() -> None:
    def run(api: Any) -> Any:
        pair = api.create_selective_checkpoint_contexts([mm])
        x = leaf(numbers(3, 3))
        y = api.checkpoint(block, x, use_reentrant=False, context_fn=lambda: pair)
        y = api.checkpoint(block, y + 1, use_reentrant=False, context_fn=lambda: pair)
        y.sum().backward()
        return x.grad

    right = expected(lambda x: block(block(x) + 1))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same(run(TORCH), right)
    assert_same(run(REMAT), right)


def test_what_is_kept_is_found_where_other_tensors_stand_for_those_of_the_forward() -> None:
    """An argument that the region around computes again, a tensor that it has made, a buffer that is written to."""
    norm = nn.BatchNorm1d(3).double()

    def run(checkpoint: Any, selective: Any) -> tuple[Tensor, int]:
        norm.reset_running_stats()

        def outer(x: Tensor) -> Tensor:
            made = x.cos()
            return selective(lambda x: (norm(x @ x) @ made).sin() @ x, x.sin()).exp()

        x = leaf(numbers(3, 3))
        y = checkpoint(outer, x)
        with CountOps() as ops:
            y.sum().backward()
        assert x.grad is not None
        return x.grad, ops["mm"]

    found, count = run(functools.partial(REMAT.checkpoint, use_reentrant=False), functools.partial(call, REMAT, [mm]))
    right, least = run(plain, plain)
    assert_same(found, right)
    assert count == least + 3  # the region around runs again, and the selective one in it


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("by", [TORCH, REMAT], ids=["torch", "remat"])
def test_what_the_rerun_leaves_behind_has_been_computed(by: Any, early_stop: bool) -> None:
    left: list[Tensor] = []

    def fun(x: Tensor) -> Tensor:
        y = x.sin()
        left.append(y.detach() + 1)
        return (y * 2 @ x).cos()

    x = leaf(numbers(3, 3))
    context_fn = functools.partial(REMAT.create_selective_checkpoint_contexts, policies.everything_saveable)
    y = by.checkpoint(fun, x, use_reentrant=False, context_fn=context_fn, early_stop=early_stop)
    y.sum().backward()
    assert_same(x.grad, expected(fun))
    assert_same(left[1], left[0])


def test_policies_of_ours_count_per_region() -> None:
    policy = policies.save_every(2, "mm")
    for _ in range(2):
        assert reruns(REMAT, policy)["mm"] == 6 + 1


def test_a_policy_under_transforms() -> None:
    def loss(x: Tensor) -> Tensor:
        return call(REMAT, [mm], block, x).sum()

    with CountOps() as ops:
        gradient = grad(loss)(numbers(3, 3))
    assert_same(gradient, expected(block))
    assert ops["mm"] == 3 + 6


def test_contexts_under_transforms() -> None:
    entered = Seen()

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *args: Any) -> None:
            pass

    def loss(x: Tensor) -> Tensor:
        contexts = lambda: (Context("forward"), Context("rerun"))  # noqa: E731
        return REMAT.checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum()

    assert_same(grad(loss)(numbers(3, 3)), expected(block))
    assert entered == ["forward", "rerun"]


@pytest.mark.parametrize("policy", [[mm], lambda *_, **__: P.MUST_SAVE], ids=["mm", "all"])
def test_a_backward_inside(policy: Any) -> None:
    """Its ops are no part of what is kept: they are not the same in both runs."""

    def fun(x: Tensor) -> Tensor:
        y = x.clone()
        y[0] = y[1]
        (g,) = grad_of(torch.where(y > 0, y @ y, y.sin()).exp().sum(), y, create_graph=True)
        return (y @ g.t().reshape(3, 3)).sin() * y

    reruns(REMAT, policy, fun, allow_cache_entry_mutation=True)


# Memory.


@each
@pytest.mark.parametrize(("policy", "kept"), [([sin], 2), ([torch.ops.aten.cos.default], 1), ([mm], 0)])
def test_what_is_kept_weighs(api: Any, policy: Any, kept: int) -> None:
    if api is REMAT and kept == 1:  # nothing reads it
        kept = 0
    x = leaf(activation())
    with LiveBytes() as meter:
        y = call(api, policy, lambda x: x.sin().exp().sin().cos().sum(), x)
        assert round(meter.current / UNIT) == kept
        y.backward()
        del y
        assert round(meter.current / UNIT) == 1  # the gradient


@pytest.mark.parametrize("training", [False, True])
def test_statistics_are_updated_once(training: bool) -> None:
    def gradients(api: Any) -> list[Any]:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(3).double().train(training)
        x = leaf(numbers(4, 3))

        def fun(x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(norm(x @ x.mT @ x).sin(), 0.5)

        y = fun(x) if api is None else call(api, [mm], fun, x)
        y.sum().backward()
        return [x.grad, norm.weight.grad, norm.running_mean, norm.running_var, norm.num_batches_tracked, torch.rand(2)]

    assert_same(gradients(REMAT), gradients(None))


def test_changes_that_show_in_no_version() -> None:
    """A GRUCell changes chunks of its products in place, by `unsafe_chunk`."""
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4).double()
    addmm = [torch.ops.aten.addmm.default]

    def gradient(api: Any, allow: bool = False) -> Tensor:
        x = leaf(numbers(2, 3))
        context_fn = functools.partial(api.create_selective_checkpoint_contexts, addmm, allow)
        api.checkpoint(cell, x, use_reentrant=False, context_fn=context_fn).sum().backward()
        assert x.grad is not None
        return x.grad

    x = leaf(numbers(2, 3))
    cell(x).sum().backward()
    with pytest.raises(AssertionError):  # silently wrong
        assert_same(gradient(TORCH), x.grad)
    with pytest.raises(CheckpointError, match="allow_cache_entry_mutation=True"):
        gradient(REMAT)
    assert_same(gradient(REMAT, allow=True), x.grad)


@pytest.mark.parametrize("within", [False, True])
def test_a_weight_that_autocast_casts_once(within: bool) -> None:
    """`within`: the backward, too, is under autocast."""
    torch.manual_seed(0)
    linear, addmm = nn.Linear(4, 4), [torch.ops.aten.addmm.default]

    def run(way: Any) -> Any:
        x = torch.ones(2, 4, requires_grad=True)
        linear.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = way(lambda x: torch.tanh(linear(torch.tanh(linear(x)))), x).float().sum()
            if within:
                y.backward()
        if not within:
            y.backward()
        return x.grad, linear.weight.grad

    expected = run(lambda fun, x: fun(x))
    assert_same(run(functools.partial(call, REMAT, addmm)), expected)
    assert_same(run(functools.partial(call, TORCH, addmm)), expected)


def _selectively(policy: Any, fun: Any) -> Any:
    return functools.partial(call, REMAT, policy, fun)


def _checkpointed(policy: Any, fun: Any) -> Any:
    return functools.partial(REMAT.checkpoint, fun, use_reentrant=False)


def _nested(outer: Any, inner: Any) -> Any:
    return lambda policy, fun: outer(policy, lambda x: fun(inner(policy, fun)(fun(x))))


CASTING: dict[str, Any] = {
    "alone": _selectively,
    "nested": _nested(_selectively, _selectively),
    "in checkpoint": _nested(_checkpointed, _selectively),
    "around checkpoint": _nested(_selectively, _checkpointed),
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("first", [None, contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("policy", [policies.dots_saveable, policies.everything_saveable], ids=str)
@pytest.mark.parametrize("way", CASTING)
def test_a_weight_that_autocast_has_cast_already(way: str, policy: Any, first: Any, caches: bool, within: bool) -> None:
    """`first`: in what. All numbers are small and whole: however gradients are added up, they are the same."""
    torch.manual_seed(0)
    step = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for p in step.parameters():
        p.data.random_(-1, 2)

    def run(fun: Any) -> Any:
        x = torch.ones(2, 4, requires_grad=True)
        step.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches):
            if first is not None:
                with first():
                    step(x)
            for _ in range(2):
                y = step(fun(fun(x))).float().sum()
                if within:
                    y.backward()
        if not within:
            y.backward()
        return x.grad, *(p.grad for p in step.parameters())

    expected = step if way == "alone" else lambda x: step(step(step(x)))
    assert_same(run(CASTING[way](policy, step)), run(expected))


@pytest.mark.parametrize("change", [Tensor.t_, lambda z: z.unsqueeze_(0)])
def test_views_in_place_are_not_kept(change: Any) -> None:
    """What they change is no memory: another tensor over it stays as it is."""

    def fun(x: Tensor) -> Tensor:
        z = (x @ x).clone()
        same = z.detach()
        change(z)
        return z.sin() * same

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return P.MUST_SAVE

    reruns(REMAT, policy, fun, allow_cache_entry_mutation=True)


class Counting(nn.Module):
    """It keeps a number that it computes, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("count", torch.tensor(0))
        self.numbers: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y, z = x.sin(), self.linear(x)
        self.numbers.append(float(y.detach().mean()))
        self.count.add_(1)
        return z * float(self.count) + y * self.numbers[-1]


def test_numbers_that_the_rerun_need_not_compute_count() -> None:
    def run(api: Any) -> Any:
        torch.manual_seed(0)
        module, x = Counting(), leaf(numbers(800, 3))
        keeps = lambda ctx, op, *args, **kwargs: P.MUST_SAVE  # noqa: E731
        y = module(x) if api is None else call(api, keeps, module, x, allow_cache_entry_mutation=True)
        y.sum().backward()
        return x.grad, module.linear.weight.grad, module.count, module.numbers

    assert_same(run(REMAT), run(None))


KEEPING = [policies.save_ops("addmm"), policies.everything_saveable, policies.offload_ops("addmm", "tanh"), None]


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch's own (2.14)
@pytest.mark.parametrize(
    ("around", "inner"),  # torch's own contexts see the copies that are offloaded
    [(a, p) for a in ("remat.compat", "debug", "torch", "remat") for p in KEEPING if (a, p) != ("torch", KEEPING[2])],
    ids=str,
)
def test_what_a_policy_inside_keeps_is_no_op_of_the_function(around: str, inner: Any) -> None:
    linear, ops = nn.Linear(3, 3, dtype=torch.float64), Seen()
    fun = remat.remat(lambda x: torch.tanh(linear(x)[:2] * 2), policy=inner)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        ops.append(op.name())
        return P.MUST_SAVE

    x = leaf(numbers(3, 3))
    if around == "remat":
        y = remat.remat(fun, policy=policy)(x)
    else:
        with REMAT.set_checkpoint_debug_enabled(around == "debug"):
            y = call(TORCH if around == "torch" else REMAT, policy, fun, x)
    found = grad_of(y.sin().sum(), x)
    assert {*ops} == {f"aten::{op}" for op in ("t", "addmm", "slice.Tensor", "mul.Tensor", "tanh")}
    assert_same(found, grad_of(torch.tanh(linear(x)[:2] * 2).sin().sum(), x))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return ((x - self.mean) * 2).sin()


def test_a_kept_buffer_that_the_next_call_changes() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return P.PREFER_RECOMPUTE if op in (sin, torch.ops.aten.mul.Tensor) else P.MUST_SAVE

    def run(api: Any) -> Tensor:
        module, x = Centred(), leaf(numbers(4, 3))
        y: Any = x
        for _ in range(2):
            y = module(y) if api is None else call(api, policy, module, y, allow_cache_entry_mutation=True)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    assert_same(run(REMAT), run(None))


@each
@pytest.mark.parametrize("width", [8, 64, 300])
def test_under_a_counter_of_flops(api: Any, width: int) -> None:
    module, x = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)), torch.randn(10, width)
    with FlopCounterMode(display=False) as meter:
        call(api, [torch.ops.aten.addmm.default], module, x).sum().backward()
    assert meter.get_total_flops() == 5 * 2 * 10 * width * width  # 2 forward; 2 for weights, 1 for an input


NAMED = {"save": policies.save_only_these_names("hidden"), "drop": policies.save_anything_except_these_names("hidden")}


@pytest.mark.parametrize("kind", NAMED)
def test_names(kind: str) -> None:
    w, x = numbers(64, 64).requires_grad_(), leaf(numbers(100, 64))

    def fun(x: Tensor) -> Tensor:
        return checkpoint_name(x @ w, "hidden").sin().exp().cos()

    plainly = grad_of(fun(x).sum(), (x, w))
    with LiveBytes() as meter:
        y = call(REMAT, NAMED[kind], fun, x)
    assert meter.current == (1 + 1) * 100 * 64 * 8  # the result, and `hidden` or what `exp` returns
    with CountOps() as ops:
        found = grad_of(y.sum(), (x, w))
    assert ops["mm"] == 2 + (kind == "drop")
    assert_same(found, plainly)


@pytest.mark.parametrize("respects", [None, False, True])
def test_hooks_of_the_user_and_what_is_kept(respects: bool | None) -> None:
    packed: list[Any] = []
    x = leaf(numbers(3, 3))
    context_fn = functools.partial(REMAT.create_selective_checkpoint_contexts, [mm])
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t)
    warns = pytest.warns(FutureWarning, match="respect_saved_tensors_hooks=True")
    with hooks, warns if respects is None else contextlib.nullcontext():
        y = REMAT.checkpoint(block, x, use_reentrant=False, context_fn=context_fn, respect_saved_tensors_hooks=respects)
    assert len(packed) == (1 + 3 if respects else 1)
    with CountOps() as ops:
        y.sum().backward()
    assert ops["mm"] == 6
    assert_same(x.grad, expected(block))
    with pytest.raises(ValueError, match=r"respect_saved_tensors_hooks` is only supported when use_reentrant=False"):
        REMAT.checkpoint(block, x, use_reentrant=True, respect_saved_tensors_hooks=True)


def keeping(op: Any, fun: Any, respects: bool) -> Any:
    contexts = functools.partial(REMAT.create_selective_checkpoint_contexts, [op])
    return functools.partial(
        REMAT.checkpoint, fun, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=respects
    )


AROUND = {
    "checkpoint": lambda fun: functools.partial(REMAT.checkpoint, fun, use_reentrant=False),
    "selective": lambda fun: keeping(sin, fun, respects=False),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("depth", [1, 2])
def test_hooks_of_the_user_around_a_checkpoint_around_what_is_kept(around: str, depth: int) -> None:
    """Each kept value is packed once: in the forward, not in the reruns of the checkpoint around it."""
    packed: list[Tensor] = []
    inner = keeping(mm, block, respects=True)
    fun = lambda x: inner(x).sin()  # noqa: E731
    for _ in range(depth):
        fun = AROUND[around](fun)
    x = leaf(numbers(3, 3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t * 2, lambda t: t / 2):
        y = fun(x)
    assert len(packed) == 1 + 3
    y.sum().backward()
    assert len(packed) == 1 + 3
    assert_same(x.grad, expected(lambda x: block(x).sin()))


def test_a_function_under_remat_in_a_selective_checkpoint_in_a_checkpoint() -> None:
    """The policy does not see the ops of remat itself."""
    w, x = leaf(numbers(3, 3)), numbers(2, 3, seed=1)

    def layer(w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    def selectively(w: Tensor) -> Tensor:
        return call(REMAT, policies.save_ops("mm"), lambda w: remat.remat(layer)(w).sin(), w)

    expected = grad_of(layer(w).sin().sum(), w)
    assert_same(grad_of(selectively(w).sum(), w), expected)
    assert_same(grad_of(REMAT.checkpoint(selectively, w, use_reentrant=False).sum(), w), expected)


def test_a_nested_tensor_is_asked_for_its_layout() -> None:
    """It is asked in C++, where no error can be raised. The offsets of the rerun are others, as with torch."""
    x = leaf(numbers(5, 3))

    def fun(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 5])).sin().values()

    context_fn = functools.partial(remat.compat.create_selective_checkpoint_contexts, [mm])
    for module in (remat.compat, torch.utils.checkpoint):
        out = module.checkpoint(fun, x, use_reentrant=False, context_fn=context_fn)
        with pytest.raises(torch.utils.checkpoint.CheckpointError, match="different metadata"):
            out.sum().backward()


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.dots_saveable, policies.nothing_saveable])
def test_numpy_reads_what_a_skipped_op_has_read(policy: Any) -> None:
    """The rerun copies that memory, which user code may change now. The copy is no op of the function's."""

    def fun(x: Tensor) -> Tensor:
        _ = x * x
        y = (x * float(x.detach().numpy().mean())).cos()
        # A look watches reruns with calls in them.
        return remat.compat.checkpoint(torch.sin, y, use_reentrant=False).sin()

    assert_same(grad_of(call(remat.compat, policy, fun, x := leaf(numbers(3))).sum(), x), grad_of(fun(x).sum(), x))
