"""Remat'd functions under torch.compile, make_fx and torch.export."""

import contextlib
import functools
import gc
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from helpers import DECORATORS, TRANSFORMS, Seen, assert_same, leaf, numbers, plain
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from remat import CheckpointError, RematError, checkpoint, checkpoint_name, is_rerunning, policies, random, remat
from remat import _torch_internals as internals
from remat import compat as remat_compat
from remat._context import uncompiled
from remat._traced import Traced
from remat.compat import create_selective_checkpoint_contexts
from remat.debug import LiveBytes
from remat.nn import remat_module

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """AOTAutograd with the partitioner that inductor uses. The graphs run op by op, and their memory is weighed."""

    def __init__(self) -> None:
        self.graphs: dict[str, torch.fx.GraphModule] = {}
        self.meter = LiveBytes()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)

    def _compiler(self, kind: str) -> Any:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.graphs[kind] = graph

            def run(*args: Any) -> Any:
                with self.meter:
                    return graph(*args)

            return make_boxed_func(run)

        return compiler

    def ops(self, kind: str) -> Counter[str]:
        nodes = self.graphs[kind].graph.nodes
        return Counter(n.target.__name__.split(".")[0] for n in nodes if n.op == "call_function")

    @property
    def saved(self) -> int:
        """How many tensors go from the forward graph to the backward graph, besides the result."""
        (output,) = (n for n in self.graphs["forward"].graph.nodes if n.op == "output")
        return len(output.args[0]) - 1


def compiled(fun: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(fun, backend=backend, fullgraph=True, **options)


def block(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.sin(x @ w).exp().cos()
    return x


def loss_of(decorate: Any) -> Callable[..., Tensor]:
    def loss(ws: Any, x: Tensor) -> Tensor:
        for w in ws:
            x = decorate(block)(w, x)
        return x.sum()

    return loss


WS = tuple(numbers(32, 32, seed=i) / 8 for i in range(4))
X = numbers(64, 32, seed=9)
UNIT = X.numel() * 8


def backward(loss: Any) -> Any:
    """The gradients at `WS` by `.backward()`."""

    def run(ws: Any, x: Tensor) -> Any:
        leaves = tuple(w.clone().requires_grad_() for w in ws)
        loss(leaves, x).backward()
        return tuple(w.grad for w in leaves)

    return run


def _per_sample(loss: Any) -> Any:
    return lambda ws, x: vmap(grad(loss), in_dims=(None, 0))(ws, x.view(8, 8, 32))


# What is compiled, with a remat'd loss in it.
COMPILED: dict[str, Callable[..., Any]] = {
    ".backward()": lambda loss, compiled: backward(compiled(loss)),
    ".backward() of vmap": lambda loss, compiled: backward(
        compiled(lambda ws, x: vmap(loss, in_dims=(None, 0))(ws, x.view(8, 8, 32)).sum())
    ),
    ".backward() of grad": lambda loss, compiled: backward(
        compiled(lambda ws, x: sum(g.sin().sum() for g in grad(loss)(ws, x)))
    ),
    "grad": lambda loss, compiled: compiled(grad(loss)),
    "vmap(grad)": lambda loss, compiled: compiled(_per_sample(loss)),
}
UNCOMPILED = functools.partial(lambda f: f)


@pytest.mark.parametrize("what", COMPILED)
def test_the_recompute_is_there(what: str) -> None:
    """Right gradients, and less memory than without remat."""
    expected = COMPILED[what](loss_of(plain), UNCOMPILED)(WS, X)
    peaks = {}
    for decorate in (plain, remat):
        backend = Backend()
        result = COMPILED[what](loss_of(decorate), lambda f, b=backend: compiled(f, b))(WS, X)
        assert_same(result, expected, 1e-8)
        peaks[decorate] = backend.meter.peak / UNIT
    assert peaks[remat] < 0.7 * peaks[plain]


def _peak_of_inductor(fun: Any, ws: Any, x: Tensor, folder: Path) -> float:
    """The peak of a step beyond its gradients. Inductor's code allocates without an op, so the allocator is asked."""
    step = compiled(fun, "inductor")
    step(ws, x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        gradients = step(ws, x)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    live = itertools.accumulate(e["args"]["Bytes"] for e in events)
    return max(live) - sum(g.nbytes for g in gradients)


def _hessian_vector_product(loss: Any) -> Any:
    return lambda ws, x: jvp(grad(lambda ws: loss(ws, x)), (ws,), (ws,))[1]


@pytest.mark.parametrize(
    ("transform", "inputs"),
    [(grad, 1), (lambda loss: vmap(grad(loss), in_dims=(None, 0)), 1), (_hessian_vector_product, 2)],
    ids=["grad", "vmap(grad)", "jvp(grad)"],
)
def test_inductor_does_not_begin_reruns_early(transform: Any, inputs: int, tmp_path: Path) -> None:
    """A block more is its input more, and the tangent of that, though all that its rerun reads is there before."""
    x = numbers(8, 64, 32)
    few, many = (
        _peak_of_inductor(transform(loss_of(remat)), tuple(numbers(32, 32, seed=i) for i in range(n)), x, tmp_path)
        for n in (3, 6)
    )
    assert many - few <= 1.1 * inputs * 3 * x.nbytes


def _without_grad(fun: Any) -> Any:
    def run(x: Tensor) -> Any:
        with torch.no_grad():
            return fun(x)

    return run


@pytest.mark.parametrize("what", ["vmap", "jvp", "vjp", "jacrev", "hessian", "grad(grad)", "no grad", "call"])
def test_other_transforms(what: str) -> None:
    transform: Any = {
        "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x.cos()])),
        "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
        "vjp": lambda f: lambda x: vjp(f, x)[1](x.cos()),
        "jacrev": jacrev,
        "hessian": lambda f: hessian(lambda x: f(x).sum()),
        "grad(grad)": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sin().sum()),
        "no grad": _without_grad,
        "call": lambda f: f,
    }[what]
    w = numbers(4, 4)

    def fun(x: Tensor) -> Tensor:
        return (x @ w).sin() * x

    x = numbers(4, seed=1)
    assert_same(compiled(transform(remat(fun)))(x), transform(fun)(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["jvp", "grad(jvp)", "jvp(grad)", "jvp(jvp)", "hessian", "vmap(jvp)"])
def test_forward_mode_of_what_autograd_differentiates(what: str, backend: str) -> None:
    """Dynamo does not tell Python that it has entered a level of forward mode."""

    def jvp_of(f: Any) -> Any:
        return lambda x: jvp(f, (x,), (x.cos(),))[1]

    transform: Any = {
        "jvp": jvp_of,
        "grad(jvp)": lambda f: grad(lambda x: jvp_of(f)(x).sum()),
        "jvp(grad)": lambda f: jvp_of(grad(lambda x: f(x).sum())),
        "jvp(jvp)": lambda f: jvp_of(jvp_of(f)),
        "hessian": lambda f: hessian(lambda x: f(x).sum()),
        "vmap(jvp)": lambda f: lambda x: vmap(jvp_of(f))(torch.stack([x, x.sin()])),
    }[what]

    def gradient(decorate: Any, compiler: Any) -> Tensor:
        w = numbers(4, 4).requires_grad_()
        fun = decorate(lambda x: (x @ w).sin() * x)
        result = compiler(transform(lambda x: fun(fun(x))))(numbers(4, seed=1))
        return torch.autograd.grad(result.sum(), w)[0]

    assert_same(gradient(remat, functools.partial(compiled, backend=backend)), gradient(plain, UNCOMPILED), 1e-8)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("what", [".backward()", "grad", "vmap(grad)"])
def test_backends(backend: str, what: str) -> None:
    def loss(decorate: Any) -> Any:
        return lambda ws, x: decorate(lambda x: (x @ ws[0]).sin().exp())(x).sum()

    run = COMPILED[what](loss(remat), functools.partial(compiled, backend=backend))
    assert_same(run(WS[:1], X), COMPILED[what](loss(plain), UNCOMPILED)(WS[:1], X), 1e-8)


# Policies.

POLICIES = {
    "policy": policies.dots_saveable,
    "function": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default,
    "ops": ["aten.mm"],
}


@pytest.mark.parametrize("inside", [False, True], ids=["decorated outside", "decorated inside"])
@pytest.mark.parametrize("kind", POLICIES)
def test_policies_are_honoured(kind: str, inside: bool) -> None:
    policy = POLICIES[kind]
    saving, nothing = Backend(), Backend()
    outside = remat(block, policy=policy)

    def loss(ws: Any, x: Tensor) -> Tensor:
        for w in ws:
            x = remat(block, policy=policy)(w, x) if inside else outside(w, x)
        return x.sum()

    expected = backward(loss_of(plain))(WS[:2], X)
    assert_same(backward(compiled(loss, saving))(WS[:2], X), expected)
    assert_same(backward(compiled(loss_of(remat), nothing))(WS[:2], X), expected)
    assert saving.ops("forward")["mm"] == 6
    assert saving.ops("backward")["mm"] == 11  # the derivatives alone
    assert nothing.ops("backward")["mm"] > 11 + 2
    assert saving.saved > nothing.saved


@pytest.mark.parametrize("what", ["grad", "vmap(grad)"])
def test_policies_are_honoured_under_transforms(what: str) -> None:
    products = {}
    ways = {"no remat": plain, "remat": remat} | {kind: remat(policy=policy) for kind, policy in POLICIES.items()}
    expected = COMPILED[what](loss_of(plain), UNCOMPILED)(WS[:2], X)
    for name, way in ways.items():
        backend = Backend()
        run = COMPILED[what](loss_of(way), lambda f, b=backend: compiled(f, b))
        assert_same(run(WS[:2], X), expected, 1e-8)
        products[name] = backend.ops("inference")["mm"]
    assert {products[kind] for kind in POLICIES} == {products["no remat"]} == {products["remat"] - 2 * 3}


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.dots_saveable], ids=str)
def test_a_policy_in_forward_over_reverse(policy: Any) -> None:
    """One operand has no tangent: the rerun has other ops than the forward."""

    def product(way: Any) -> Any:
        fun = way(lambda x: (x @ WS[1] + WS[0]).sin())
        return lambda x: jvp(grad(lambda x: fun(x).sum()), (x,), (x.cos(),))[1]

    assert_same(compiled(product(remat(policy=policy)), Backend())(WS[2]), product(plain)(WS[2]), 1e-8)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "grad(grad)": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum()),
    "jvp(grad)": lambda f: lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (x.cos(),)),
}


@pytest.mark.parametrize("transform", GRADIENTS)
def test_traced_policies_keep_values(transform: str) -> None:
    """A kept value is as the op has returned it, though it is changed in place later."""

    def fun(x: Tensor) -> Tensor:
        y = (x * 1.5).sin()
        z = y.cos() * 2
        z.mul_(y)
        return (z * F.dropout(y, 0.5)).tanh()

    results = []
    for f in (fun, *(remat(fun, policy=policies.save_ops(op)) for op in ("sin", "cos", "mul", "mul_"))):
        torch.manual_seed(0)
        results.append(compiled(GRADIENTS[transform](f))(numbers(4, 3)))
    for result in results[1:]:
        assert_same(result, results[0])


def test_a_traced_rerun_calls_kept_ops_as_often() -> None:
    """Else a kept result would be another call's."""
    x = numbers(3)
    with Traced(policies.save_ops("sin"), draws=False) as traced:
        expected = [x.sin(), x.cos().sin()]
    with traced.replayed():
        assert_same([x.sin(), x.sin()], expected)

    def again(*given: Tensor) -> None:
        with traced.replayed():
            for t in given:
                t.sin()

    for given in ([x], [x, x, x], [x, x[:2]]):
        with pytest.raises(CheckpointError, match=r"calls aten.sin.default more or less often than the forward run"):
            again(*given)


@pytest.mark.parametrize("cast", ["float", "double", "half", "bfloat16", "long"])
@pytest.mark.parametrize("ck", [remat, lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)])
def test_casts_beside_a_captured_weight(ck: Any, cast: str) -> None:
    """The tensors of the compiler call `Tensor.to` for each of these."""
    w = WS[0].clone().requires_grad_()

    def loss(x: Tensor, ck: Any = ck) -> Tensor:
        return ck(lambda x: (torch.tanh(x @ w) + getattr(x @ w, cast)()).sin())(x).double().sum()

    assert_same(compiled(grad(loss))(X).detach(), grad(functools.partial(loss, ck=plain))(X).detach(), 1e-8)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch ends in an internal assert, an error of its own")
def test_a_policy_beside_a_captured_weight_by_which_torch_multiplies_in_other_steps() -> None:
    w, x = WS[0][:5, :5].clone().requires_grad_(), numbers(4, 3, 5)

    def loss(x: Tensor, w: Tensor = w) -> Tensor:
        return remat(lambda x: (w @ x.mT).sin(), policy=policies.dots_saveable)(x).sum()

    with pytest.raises(BackendCompilerFailed, match=r"weight from outside that requires grad, detach that"):
        compiled(grad(loss))(x)
    internals.allow_saved_tensors_hooks()  # dynamo does not, after an error in `grad` (2.13)
    detached = functools.partial(loss, w=w.detach())
    assert_same(compiled(grad(detached))(x), grad(detached)(x), 1e-8)


def test_another_policy_is_another_graph() -> None:
    recomputed = []
    for policy in (policies.save_ops("mm"), None):
        backend = Backend()
        fun = remat(block, policy=policy)
        assert_same(backward(compiled(lambda ws, x, f=fun: f(ws[0], x).sum(), backend))(WS[:1], X),
                    backward(loss_of(plain))(WS[:1], X))  # fmt: skip
        recomputed.append(backend.ops("backward")["mm"])
    assert recomputed == [5, 8]


@pytest.mark.parametrize("kept", [True, False])
def test_policies_by_name(kept: bool) -> None:
    def fun(w: Tensor, x: Tensor) -> Tensor:
        named = checkpoint_name({"y": x @ w}, "a")
        return (named["y"].sin() @ w).sin() @ w

    names = policies.save_only_these_names("a" if kept else "b")
    saving = remat(fun, policy=names | policies.save_ops("bmm"))
    backend = Backend()
    assert_same(backward(compiled(lambda ws, x: saving(ws[0], x).sum(), backend))(WS[:1], X),
                backward(lambda ws, x: fun(ws[0], x).sum())(WS[:1], X))  # fmt: skip
    assert backend.ops("forward")["mm"] == 3
    assert backend.ops("backward")["mm"] == (6 if kept else 7)  # of which 5 are the derivatives alone
    assert_same(compiled(grad(lambda w: saving(w, X).sum()))(WS[0]), grad(lambda w: fun(w, X).sum())(WS[0]))


@pytest.mark.parametrize("policy", [None, policies.save_only_these_names("a")])
def test_a_name_of_an_argument(policy: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        with torch.no_grad():
            named = checkpoint_name(x, "a")
        return (named.tanh() * x).sum()

    decorated = remat(fun, policy=policy)
    assert_same(
        backward(compiled(lambda ws, x: decorated(ws[0])))(WS[:1], X), backward(lambda ws, x: fun(ws[0]))(WS[:1], X)
    )


@pytest.mark.parametrize("name", ["native_layer_norm", "topk"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_name_of_one_of_several_results(kept: bool, name: str) -> None:
    def fun(w: Tensor, x: Tensor) -> Tensor:
        y = (w * x).exp()
        named = F.layer_norm(y, (8,)) if name == "native_layer_norm" else y.topk(8, -1)[0]
        return checkpoint_name(named, "a").sin().exp()

    names = policies.save_only_these_names("a")
    saving = remat(fun, policy=names if kept else policies.everything_saveable - names)
    backend, ws, x = Backend(), (numbers(8),), numbers(6, 8)
    ours = backward(compiled(lambda ws, x: saving(ws[0], x).sum(), backend))(ws, x)
    assert_same(ours, backward(lambda ws, x: fun(ws[0], x).sum())(ws, x))
    assert backend.ops("backward")[name] == (0 if kept else 1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_key_that_is_computed_in_compiled_code(backend: str) -> None:
    def loss(w: Tensor, k: Tensor, ck: Any = remat) -> Tensor:
        first, second = random.split(k, 2)
        layer = ck(lambda k, x: random.dropout(k, torch.sin(x @ w), 0.5))
        return layer(second, layer(first, X)).sum()

    w = WS[0].clone()
    ours = compiled(grad(loss), backend)(w, random.key(3))
    assert_same(ours, grad(functools.partial(loss, ck=plain))(w, random.key(3)), 1e-8)


def test_a_policy_is_made_outside() -> None:
    with pytest.raises(Exception, match="make a policy outside the function that is compiled"):
        compiled(lambda x: remat(torch.sin, policy=policies.save_at_most(4))(x))(X)


def test_a_counting_policy_starts_anew() -> None:
    backend = Backend()
    fun = remat(block, policy=policies.save_every(3, "mm"))
    leaf = WS[0].clone().requires_grad_()
    compiled(lambda w: fun(w, fun(w, X)).sum(), backend)(leaf).backward()
    assert_same(leaf.grad, grad(lambda w: block(w, block(w, X)).sum())(WS[0]))


# What the function reads, and returns.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def block(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).sin())


class RematNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return remat(self.block)(x).sum()


class PlainNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.block(x) * 1).sum()


class MethodNet(Net):
    @remat
    def step(self, x: Tensor) -> Tensor:
        return self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x).sum()


class DecoratedNet(Net):
    @remat
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).sum()


class ChildNet(DecoratedNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1


class PatchedNet(PlainNet):
    pass


PatchedNet.forward = remat(PlainNet.forward)


class WrappedNet(PlainNet):
    """With a block that `remat_module` has wrapped, and that takes keywords."""

    class Block(nn.Module):
        def forward(self, x: Tensor, *, net: Net) -> Tensor:
            return Net.block(net, x)

    def __init__(self) -> None:
        super().__init__()
        self.inner = remat_module(self.Block())

    def block(self, x: Tensor) -> Tensor:
        return self.inner(x, net=self)


class CalledByClassNet(PatchedNet):
    def forward(self, x: Tensor) -> Tensor:
        return PatchedNet.forward(self, x) * 1


NETS = [RematNet, MethodNet, DecoratedNet, ChildNet, PatchedNet, WrappedNet, CalledByClassNet]


@pytest.mark.parametrize("net", NETS)
def test_modules(net: Any) -> None:
    """Parameters get their gradients, and statistics are changed once."""
    x = numbers(5, 8)
    model, expected = net(), PlainNet()
    for m in (compiled(model), expected):
        m(x).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same(p.grad, q.grad, 1e-8)
    assert_same(dict(model.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("patched", [False, True])
def test_each_method_is_compiled_for_itself(patched: bool) -> None:
    """No class counts against the limit that another one has."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for factor in (2, 3):

            class Scaled(Net):
                @(plain if patched else remat)
                def forward(self, x: Tensor, factor: int = factor) -> Tensor:
                    return self.linear(x).sin() * factor

            if patched:
                Scaled.forward = remat(Scaled.forward)
            model = Scaled()
            x = numbers(5, 8)
            assert_same(compiled(model)(x), model.linear(x).sin() * factor)


@pytest.mark.parametrize("net", NETS)
def test_modules_under_transforms(net: Any) -> None:
    x = numbers(5, 8)
    model, expected = net().eval(), PlainNet().eval()
    params = {k: v.detach() for k, v in model.named_parameters()}

    def gradient(module: nn.Module) -> Any:
        return lambda params, x: grad(lambda p: functional_call(module, p, (x,)).sin())(params)

    result = compiled(gradient(model))(params, x)
    assert_same(
        {k: v.detach() for k, v in result.items()}, gradient(expected)({k: v.detach() for k, v in params.items()}, x)
    )


@pytest.mark.parametrize("what", [".backward()", "grad"])
def test_captured_tensors(what: str) -> None:
    def loss(decorate: Any) -> Any:
        def run(ws: Any, x: Tensor) -> Tensor:
            scale = ws[0].sum().sin()
            for w in ws:
                x = decorate(lambda x: torch.tanh(x @ w) * scale)(x)
            return x.sum()

        return run

    run = COMPILED[what](loss(remat), compiled)
    assert_same(run(WS, X), COMPILED[what](loss(plain), UNCOMPILED)(WS, X))


def test_structures() -> None:
    @remat(static_argnums=0)
    def fun(n: int, tree: dict[str, Tensor], *, scale: float) -> Any:
        return {"out": (tree["a"] * scale + tree["b"] ** n,), "n": n, "none": None}

    def loss(a: Tensor, b: Tensor) -> Any:
        result = fun(3, {"a": a, "b": b}, scale=2.0)
        assert result["n"] == 3
        assert result["none"] is None
        return result["out"][0].sum()

    a, b = numbers(3), numbers(3, seed=1)
    assert_same(compiled(grad(loss, argnums=(0, 1)))(a, b), grad(loss, argnums=(0, 1))(a, b))


def test_nested() -> None:
    def loss(decorate: Any) -> Any:
        inner = decorate(lambda w, x: torch.sin(x @ w))
        outer = decorate(lambda ws, x: inner(ws[1], inner(ws[0], x).exp()).cos())
        return lambda ws, x: outer(ws, x).sum()

    for what in (".backward()", "grad"):
        run = COMPILED[what](loss(remat), compiled)
        assert_same(run(WS[:2], X), COMPILED[what](loss(plain), UNCOMPILED)(WS[:2], X))
    one = X.new_ones(())
    pulled = lambda way: lambda ws: vjp(lambda ws: loss(way)(ws, X), ws)[1](one)  # noqa: E731
    assert_same(compiled(pulled(remat))(WS[:2]), pulled(plain)(WS[:2]))  # the rerun comes when the level is over


def test_changes_in_place_inside() -> None:
    def fun(w: Tensor, x: Tensor) -> Tensor:
        y = x @ w
        return y.sin_().mul(2).exp_()

    for policy in (None, policies.save_ops("exp"), policies.everything_saveable):
        for what in (".backward()", "grad"):
            run = COMPILED[what](lambda ws, x, p=policy: remat(fun, policy=p)(ws[0], x).sum(), compiled)
            assert_same(run(WS[:1], X), COMPILED[what](lambda ws, x: fun(ws[0], x).sum(), UNCOMPILED)(WS[:1], X))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "way",
    [remat, remat(policy=policies.dots_saveable), lambda fun: functools.partial(checkpoint, fun, use_reentrant=False)],
    ids=["remat", "policy", "checkpoint"],
)
def test_the_backward_computes_with_what_the_forward_found(way: Any, backend: str) -> None:
    """Not with the state that the forward leaves, as `torch.utils.checkpoint` does in compiled code."""
    found = []
    for decorate in (plain, way):
        count, ready = numbers(32), torch.zeros(32, dtype=torch.bool)

        def fun(w: Tensor, x: Tensor, count: Tensor = count, ready: Tensor = ready) -> Tensor:
            y = x * ready
            with torch.no_grad():
                count[1:].add_(1)
                ready.logical_not_()
            return (x * count + y) @ w

        run = decorate(fun) if decorate is plain else compiled(decorate(fun), backend)
        w = leaf(WS[0])
        for _ in range(3):
            run(w, X).sum().backward()
        found.append((w.grad, count, ready))
    assert_same(found[1], found[0])


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch ends in an internal assert, an error of its own")
def test_transforms_inside() -> None:
    """`torch.utils.checkpoint` can't do that."""

    def fun(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda x: torch.sin(x @ w).exp().sum())(x)

    def loss(ws: Any, x: Tensor) -> Tensor:
        return remat(fun)(ws[0], x).sum()

    expected = backward(lambda ws, x: fun(ws[0], x).sum())(WS[:1], X)
    assert_same(backward(compiled(loss))(WS[:1], X), expected)
    for run in (compiled(grad(loss)), compiled(loss, "eager")):
        with pytest.raises(Exception, match=r"uses torch\.func itself can't be compiled"):
            run(WS[:1], X)
        with torch.autograd.graph.save_on_cpu():  # torch.func refuses hooks, and no longer than it runs
            assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
            WS[0].clone().requires_grad_().sin().sum().backward()


@pytest.mark.parametrize(
    "decorated",
    [
        lambda x: remat(torch.sin)(x),
        lambda x: remat(functools.partial(torch.mul, other=2.0))(x).sin(),
        lambda x: remat(lambda x, n: x.sin() ** n, static_argnums=1)(x, 2),
        lambda x: remat(lambda x, n: x.sin() ** n, static_argnames="n")(x, n=2),
    ],
    ids=["a builtin", "a partial", "static_argnums", "static_argnames"],
)
def test_what_is_decorated_in_the_compiled_code(decorated: Any) -> None:
    def fun(x: Tensor) -> Tensor:
        return decorated(x).sum()

    x = leaf(numbers(3, 3))
    assert_same(torch.autograd.grad(compiled(fun)(x), x), torch.autograd.grad(fun(x), x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_module_that_is_decorated_in_the_compiled_code(policy: Any, backend: str) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(2))
    assert isinstance(remat(layers[0]), nn.Linear)  # a class that dynamo must not meet

    def loss(ws: Any, x: Tensor, decorate: Any) -> Tensor:
        for layer, w in zip(layers, ws, strict=True):
            if not is_rerunning():
                x = x + w
            x = decorate(layer)(x).sin()
        return x.sum()

    x, ws = numbers(3, 4), (numbers(4), numbers(4, seed=1))
    for derivative in (".backward()", "grad"):
        run, found = COMPILED[derivative], functools.partial(loss, decorate=remat(policy=policy))
        expected = run(functools.partial(loss, decorate=plain), UNCOMPILED)(ws, x)
        assert_same(run(found, functools.partial(compiled, backend=backend))(ws, x), expected, 1e-8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_two_tensors_over_memory_that_changes(backend: str) -> None:
    def results(compiles: Any) -> list[Tensor]:
        cache, x = numbers(4, 4), leaf(numbers(4, 4))

        def fun(x: Tensor) -> Tensor:
            cache.T.mul_(0.5)
            return x.sin() * cache.clone()

        y = compiles(fun)(x)
        y.sum().backward()
        return [y, x.grad, cache]

    if torch.__version__ >= (2, 14):  # dynamo takes the view inside
        assert_same(results(lambda fun: compiled(remat(fun), backend)), results(plain))
        return
    with pytest.raises(Exception, match=r"share memory|over the same memory"):
        results(lambda fun: compiled(remat(fun), backend))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_tensor_that_a_function_changes_and_returns(policy: Any, backend: str) -> None:
    def layer(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() @ x, cache.add_(x.detach().mean())

    def results(compiles: Any, ck: Any) -> list[Tensor]:
        x, cache = leaf(numbers(4, 4)), numbers(4)

        def fun(x: Tensor, cache: Tensor) -> Tensor:
            x, cache = ck(layer)(*ck(layer)(x, cache))
            return x * cache

        y = compiles(fun)(x, cache)
        y.sum().backward()
        return [y, x.grad, cache]

    ours = results(functools.partial(compiled, backend=backend), remat(policy=policy))
    assert_same(ours, results(plain, plain), 1e-8)


def compiled_for_any_shape(fun: Any, *args: Any) -> Any:
    return compiled(fun, dynamic=True)(*args)


def make_fx_for_any_shape(fun: Any, *args: Any) -> Any:
    return make_fx(fun, tracing_mode="symbolic")(*args)(*args)


def test_dynamic_shapes() -> None:
    for what in (".backward()", "grad"):
        run = COMPILED[what](loss_of(remat), functools.partial(compiled, dynamic=True))
        for n in (5, 7):
            assert_same(run(WS[:1], X[:n]), COMPILED[what](loss_of(plain), UNCOMPILED)(WS[:1], X[:n]), 1e-8)


@pytest.mark.parametrize("around", [compiled_for_any_shape, make_fx_for_any_shape])
def test_a_symbolic_length_becomes_a_number(around: Any) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x[:, :1])
        zeros.add_(1)
        return ((torch.tanh(x @ w) + zeros).view(len(X), 1, -1) * zeros[None]).sum()

    assert_same(around(grad(remat(loss)), WS[0], X), grad(loss)(WS[0], X), 1e-8)


@pytest.mark.parametrize(
    ("break_graph", "policy"),
    [(torch._dynamo.graph_break, None), (lambda: print(end=""), policies.save_ops("mm"))],
    ids=["explicit", "print, under a policy"],
)
@pytest.mark.parametrize("what", COMPILED)
def test_a_graph_break_inside(what: str, break_graph: Any, policy: Any) -> None:
    """Without fullgraph, the function then runs uncompiled, and remat'd."""
    graphs: list[torch.fx.GraphModule] = []
    runs = Seen()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def fun(w: Tensor, x: Tensor) -> Tensor:
        y = torch.tanh(x @ w)
        break_graph()
        runs.append(None)
        return y.exp()

    def loss(decorate: Any) -> Any:
        return lambda ws, x: decorate(fun)(ws[0], x).sum()

    expected = COMPILED[what](loss(plain), UNCOMPILED)(WS[:1], X)
    runs.clear()
    decorate = functools.partial(remat, policy=policy)
    run = COMPILED[what](loss(decorate), functools.partial(torch.compile, backend=backend))
    assert_same(run(WS[:1], X), expected)
    assert len(runs) == (3 if what == ".backward() of grad" else 2)
    called = {str(n.target) for g in graphs for n in g.graph.nodes}
    assert not [name for name in called if "tanh" in name or "mm" in name]


def test_a_class_method() -> None:
    """Dynamo does not look into it: a graph break."""

    class Net:
        @classmethod
        @remat
        def block(cls, w: Tensor) -> Tensor:
            return torch.sin(X @ w).exp()

    result = torch.compile(grad(lambda w: Net.block(w).sum()), backend="aot_eager")(WS[0])
    assert_same(result, grad(lambda w: torch.sin(X @ w).exp().sum())(WS[0]))


# Draws.


def _of_torch(fun: Any) -> Any:
    return functools.partial(torch.utils.checkpoint.checkpoint, fun, use_reentrant=False)


def test_no_elements() -> None:
    fun = grad(lambda x: remat(torch.sin)(x).sum())
    assert compiled(fun)(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("what", [".backward()", "grad", "vmap(grad)"])
def test_draws(what: str, backend: str) -> None:
    """The derivative belongs to the draws of the forward."""

    def loss(x: Tensor, decorate: Any = remat) -> Tensor:
        y = decorate(lambda x: F.dropout(x * 1.0))(x)
        return (y * y.detach()).sum()

    x = torch.ones(100)
    if what == ".backward()":
        x.requires_grad_()
        try:
            compiled(functools.partial(loss, decorate=_of_torch), backend)(x)
        except BackendCompilerFailed:  # a bug of inductor in torch 2.14
            with pytest.raises(BackendCompilerFailed, match="was invalid, but is output"):
                compiled(loss, backend)(x)
            return
        compiled(loss, backend)(x).backward()
        gradient = x.grad
    elif what == "grad":
        gradient = compiled(grad(loss), backend)(x)
    else:
        gradient = compiled(vmap(grad(loss), randomness="different"), backend)(x.expand(3, 100))
        assert (gradient[0] != gradient[1]).any()
    assert gradient is not None
    assert set(gradient.unique().tolist()) == {0.0, 4.0}  # (1/p)² where it was kept


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_draws_without_a_derivative(mapped: bool, captured: bool) -> None:
    """`torch.utils.checkpoint` can't do that: torch refuses draws that are marked where there is no backward graph."""
    for decorate in (
        remat,
        remat(policy=policies.dots_saveable),
        lambda fun: functools.partial(checkpoint, fun, use_reentrant=False),
    ):

        def fun(x: Tensor, decorate: Any = decorate) -> Tensor:
            return decorate(lambda *xs: F.dropout((*xs, x)[0] * 1.0))(*(() if captured else (x,)))

        run = compiled(vmap(fun, randomness="different") if mapped else fun)
        assert set(run(torch.ones(3, 100)).unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("what", [".backward()", "grad", "vmap(grad)"])
def test_draws_from_keys(what: str) -> None:
    def loss(decorate: Any) -> Any:
        def run(ws: Any, x: Tensor) -> Tensor:
            fun = decorate(lambda w, x: torch.sin(x @ w) * random.normal(random.key(3), x.shape).to(x))
            return fun(ws[0], x).exp().sum()

        return run

    run = COMPILED[what](loss(remat), compiled)
    assert_same(run(WS[:1], X), COMPILED[what](loss(plain), UNCOMPILED)(WS[:1], X), 1e-6)


# `checkpoint`.


def _ops(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default


CONTEXTS: dict[str, Any] = {
    "policy": functools.partial(create_selective_checkpoint_contexts, policies.dots_saveable),
    "function": functools.partial(create_selective_checkpoint_contexts, _ops),
    "ops": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    "lambda": lambda: create_selective_checkpoint_contexts(policies.dots_saveable),
    "torch's": functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, _ops),
}


@pytest.mark.parametrize("what", [".backward()", "grad", "vmap(grad)"])
def test_checkpoint(what: str) -> None:
    def loss(ws: Any, x: Tensor) -> Tensor:
        for w in ws:
            x = checkpoint(block, w, x, use_reentrant=False)
        return x.sum()

    backend, without = Backend(), Backend()
    result = COMPILED[what](loss, functools.partial(compiled, backend=backend))(WS, X)
    assert_same(result, COMPILED[what](loss_of(plain), functools.partial(compiled, backend=without))(WS, X), 1e-8)
    assert backend.meter.peak < 0.7 * without.meter.peak


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(), nn.BatchNorm1d(16), nn.Linear(16, 8)).double()


def compiled_in_place(backend: str) -> nn.Module:
    module = mlp()
    module.compile(backend=backend)
    return module


INSIDE: dict[str, Callable[[str], Any]] = {
    "a function": lambda backend: torch.compile(lambda x: torch.tanh(x * x).exp(), backend=backend),
    "a module": lambda backend: torch.compile(mlp(), backend=backend),
    "a module in place": compiled_in_place,
    "in a function": lambda backend: (lambda module: lambda x: module(x).sin())(torch.compile(mlp(), backend=backend)),
}


@pytest.mark.parametrize(
    ("around", "use_reentrant"),
    [(plain, False), (plain, True), (remat, False)],
    ids=["non-reentrant", "reentrant", "in remat"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", INSIDE)
def test_checkpoint_of_what_was_compiled(around: Any, what: str, backend: str, use_reentrant: bool) -> None:
    def gradients(ck: Any) -> list[Any]:
        fun, found = INSIDE[what](backend), []
        x = numbers(4, 8).requires_grad_()
        torch.manual_seed(1)
        for _ in range(2):
            ck(around(lambda x: fun(x)), x).sin().sum().backward()
            assert x.grad is not None
            found.append(x.grad.clone())
        return [*found, *(p.grad for p in fun.parameters())] if isinstance(fun, nn.Module) else found

    expected = gradients(lambda fun, x: fun(x))
    assert_same(gradients(functools.partial(checkpoint, use_reentrant=use_reentrant)), expected)


@pytest.mark.parametrize("kind", ["remat", "policy"])
def test_a_policy_around_what_was_compiled(kind: str) -> None:
    """What a policy looks on with is not compiled along."""

    def loss(ws: Any, x: Tensor) -> Tensor:
        fun = torch.compile(block, backend="eager")
        if kind == "remat":
            return remat(fun, policy=policies.dots_saveable)(ws[0], x).sum()
        return checkpoint(fun, ws[0], x, use_reentrant=False, context_fn=CONTEXTS[kind]).sum()

    counters.clear()
    assert_same(backward(loss)(WS[:1], X), backward(lambda ws, x: block(ws[0], x).sum())(WS[:1], X))
    assert not counters["frames"]


@pytest.mark.parametrize("kind", ["remat", "policy"])
def test_what_runs_under_a_policy_is_compiled_elsewhere(kind: str) -> None:
    inner = torch.compile(lambda x: x.sin().cos(), backend="aot_eager", fullgraph=True)

    def under_a_policy(x: Tensor) -> Tensor:
        if kind == "remat":
            return remat(lambda x: inner(x @ x), policy=policies.dots_saveable)(x)
        return checkpoint(lambda x: inner(x @ x), x, use_reentrant=False, context_fn=CONTEXTS[kind])

    x = WS[0].clone().requires_grad_()
    (actual,) = torch.autograd.grad(under_a_policy(x).sum(), x)
    assert_same(actual, torch.autograd.grad((x @ x).sin().cos().sum(), x)[0])
    counters.clear()
    inner(x)
    assert counters["stats"]["unique_graphs"] == 1


def test_threads_that_leave_a_policy_in_the_order_in_which_they_came() -> None:
    first, second = nn.Module(), nn.Module()  # in the place of modes
    inner = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    counters.clear()
    uncompiled.enter(first)
    uncompiled.enter(second)
    uncompiled.leave(id(first))
    inner(X)
    assert not counters["stats"]["unique_graphs"]
    del second  # its end was lost by Ctrl-C
    gc.collect()
    inner(X)
    assert counters["stats"]["unique_graphs"] == 1


def test_what_is_compiled_inside_does_not_hold_how_remat_looks_on() -> None:
    inner = torch.compile(lambda x: x.sin().cos(), backend="aot_eager", fullgraph=True)

    def gradient(ck: Any, fun: Any) -> Any:
        x = X.clone().requires_grad_()
        ck(lambda x: ck(lambda x: fun(x).exp())(x).sin())(x).sum().backward()
        return x.grad

    counters.clear()
    assert_same(gradient(remat, inner), gradient(plain, lambda x: x.sin().cos()))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_rerun_runs_the_compiled_code_of_the_forward(backend: str) -> None:
    """Compiled anew, it would have other constants."""
    inner = torch.compile(lambda x: x.sin() * torch.tensor(2.0, dtype=x.dtype), backend=backend)
    counters.clear()
    for x in (leaf(X), leaf(X) * 1):
        actual, expected = (torch.autograd.grad(ck(lambda x: inner(x))(x).sum(), x) for ck in (remat, plain))
        assert_same(actual, expected, 1e-8)
    assert counters["stats"]["unique_graphs"] <= 2  # with remat and without


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(WS[0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.w)

    def in_place(self) -> nn.Module:
        self.compile(backend="aot_eager")
        return self

    @functools.partial(torch.compile, backend="aot_eager")
    def method(self, x: Tensor) -> Tensor:
        return self.forward(x)


aot_eager = functools.partial(torch.compile, backend="aot_eager")
READERS: dict[str, Callable[[Reader], Any]] = {
    "a function": lambda reader: aot_eager(lambda x: reader(x)),
    "fullgraph": lambda reader: compiled(lambda x: reader(x)),
    "a closure": lambda reader: (lambda w: aot_eager(lambda x: torch.sin(x @ w)))(reader.w),
    "a partial": lambda reader: functools.partial(aot_eager(Reader.forward), reader),
    "a bound method": lambda reader: aot_eager(reader.forward),
    "a method": lambda reader: reader.method,
    "a module": aot_eager,
    "a module in place": Reader.in_place,
    "both": lambda reader: aot_eager(reader.in_place()),
}


@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=str)
@pytest.mark.parametrize("what", READERS)
def test_what_was_compiled_runs_op_by_op(what: str, policy: Any) -> None:
    reader, x = Reader(), leaf(X)
    reader(x).cos().sum().backward()
    expected = x.grad, reader.w.grad
    inner = remat(READERS[what](reader), policy=policy)
    counters.clear()
    for fun in (inner, remat(lambda x: inner(x))):
        x.grad = reader.w.grad = None
        fun(x).cos().sum().backward()
        assert_same((x.grad, reader.w.grad), expected)
        for transform in (grad, lambda f: vmap(grad(f))):
            assert_same(transform(lambda x, f=fun: f(x).cos().sum())(X).detach(), expected[0])
    assert not counters["frames"]


@pytest.mark.parametrize("transform", [".backward()", "grad"])
@pytest.mark.parametrize("what", ["a closure", "a module"])
def test_what_compiled_code_inside_reads_is_right_or_an_error(what: str, transform: str) -> None:
    """No torch function is seen to read it. The graph tells of leaves."""
    results = []
    for ck in (plain, remat):
        reader = Reader()
        fun = READERS[what](reader)
        try:
            results.append(TRANSFORMS[transform](ck(lambda x, fun=fun: fun(x).sin()), X))
        except RematError as error:
            with pytest.raises(RematError, match="Pass it as an argument"):
                raise error from None
            return
        results.append(reader.w.grad)
    assert_same(results[2:], results[:2], 1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("around", [lambda fun: fun, lambda fun: lambda x: fun(x)], ids=["compiled", "calls compiled"])
@pytest.mark.parametrize("which", ["constant", "leaf", "intermediate"])
@pytest.mark.parametrize("ck", DECORATORS)
def test_a_compiled_function_closes_over_a_loop_variable(ck: str, which: str, around: Any, backend: str) -> None:
    def gradients(ck: Any) -> Any:
        x, y = (x := leaf(X)), x
        ws = [w.detach().clone().requires_grad_(which != "constant") for w in WS[:2]]
        for w in ws:
            m = w * 1 if which == "intermediate" else w
            y = ck(around(torch.compile(lambda y: torch.tanh(y @ m), backend=backend)))(y)
        y.sum().backward()
        return [t.grad for t in (x, *ws) if t.requires_grad]

    assert_same(gradients(DECORATORS[ck]), gradients(plain), 1e-8)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("ck", DECORATORS)
def test_a_compiled_function_that_calls_one_is_made_anew(ck: str, backend: str, fullgraph: bool) -> None:
    """With its attributes: dynamo inlines the inner function by one."""

    def gradient(ck: Any) -> Any:
        s = 2.0
        inner = torch.compile(lambda x: (x * s).sin(), backend=backend, fullgraph=fullgraph)
        outer = torch.compile(lambda x: inner(x).cos() * s, backend=backend, fullgraph=fullgraph)
        outer.scale = 3.0
        x = leaf(X)
        y = ck(lambda x: outer(x) * x * outer.scale)(x)
        s = 5.0
        y.sum().backward()
        return x.grad

    assert_same(gradient(DECORATORS[ck]), gradient(plain), 1e-8)


def test_hooks_of_a_compiled_module_are_called() -> None:
    """It has hooks of its own."""
    reader = Reader()
    fun = aot_eager(reader)
    fun.register_forward_hook(lambda module, args, out: out * 3)
    remat(lambda x: fun(x), policy=policies.dots_saveable)(X).sum().backward()
    assert_same(reader.w.grad, grad(lambda w: torch.sin(X @ w).sum() * 3)(WS[0]))
    with pytest.raises(TypeError, match=r"is a compiled module: wrap the module before torch\.compile"):
        remat(fun)


@pytest.mark.parametrize("kind", CONTEXTS)
def test_selective_checkpoint(kind: str) -> None:
    def loss(ws: Any, x: Tensor) -> Tensor:
        for w in ws:
            x = checkpoint(block, w, x, use_reentrant=False, context_fn=CONTEXTS[kind])
        return x.sum()

    backend, ws = Backend(), WS[:2]
    assert_same(backward(compiled(loss, backend))(ws, X), backward(loss_of(plain))(ws, X), 1e-8)
    assert backend.ops("backward")["mm"] == 11
    assert_same(compiled(grad(loss))(ws, X), grad(loss_of(plain))(ws, X), 1e-8)


APIS = pytest.mark.parametrize("api", [torch.utils.checkpoint, remat_compat], ids=["torch", "remat"])


@APIS
def test_the_rerun_uses_the_compiled_code_of_the_forward(api: Any) -> None:
    graphs = Seen()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    fun = torch.compile(functools.partial(block, WS[0]), backend=backend, fullgraph=True)
    for _ in range(2):
        api.checkpoint(fun, leaf(X), use_reentrant=False).sum().backward()
    assert len(graphs) == 1


@APIS
def test_use_reentrant_is_not_said(api: Any) -> None:
    """The warning of it breaks no graph."""
    loss = lambda checkpoint: lambda ws, x: checkpoint(block, ws[0], x).sum()  # noqa: E731
    assert_same(backward(compiled(loss(api.checkpoint)))(WS[:1], X), backward(loss_of(plain))(WS[:1], X), 1e-8)


def test_contexts_without_a_policy() -> None:
    def contexts() -> Any:
        return torch.no_grad(), torch.no_grad()

    with pytest.raises(Exception, match="context_fn must generate a tuple of two `TorchDispatchMode`s"):
        compiled(lambda x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts))(X)


# make_fx and torch.export.


@pytest.mark.parametrize("transform", [lambda f: f, grad, lambda f: vmap(grad(f), in_dims=(None, 0))])
def test_make_fx(transform: Any) -> None:
    ws, x = WS[:2], X
    fun = transform(loss_of(remat))
    traced = make_fx(fun)(ws, x)
    assert_same(traced(ws, x.cos()), transform(loss_of(plain))(ws, x.cos()))
    without = make_fx(transform(loss_of(plain)))(ws, x)
    sines = [sum(n.target is torch.ops.aten.sin.default for n in g.graph.nodes) for g in (traced, without)]
    assert sines[0] - sines[1] == (0 if transform(plain) is plain else 6)


def test_what_make_fx_wrote_can_be_differentiated() -> None:
    leaf = WS[0].clone().requires_grad_()
    traced = make_fx(lambda w: remat(block)(w, X).sum())(leaf)
    traced(leaf).backward()
    assert_same(leaf.grad, grad(lambda w: block(w, X).sum())(WS[0]))


@pytest.mark.parametrize(
    "transform",
    [
        grad,
        lambda f: grad(lambda x: grad(f)(x).sin().sum()),
        lambda f: lambda x: jvp(grad(f), (x,), (x.cos(),)),
        lambda f: lambda x: vmap(grad(f), randomness="different")(torch.stack([x, x.cos()])),
    ],
    ids=["grad", "grad(grad)", "jvp(grad)", "vmap(grad)"],
)
def test_make_fx_of_draws(transform: Any) -> None:
    """The graph draws anew, and its derivative belongs to what it drew."""

    def fun(x: Tensor) -> Tensor:
        y = F.dropout(x.sin()) * torch.rand_like(x) * torch.empty_like(x).uniform_()
        return (F.dropout(y, inplace=True) * torch.normal(x.detach(), 1.0)).sum()

    x = numbers(20)
    results = []
    for decorate in (plain, remat):
        traced = make_fx(transform(decorate(fun)))(x)
        torch.manual_seed(0)
        results.append(traced(x))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("trace", [lambda f: compiled(f), lambda f: make_fx(f)(numbers(6))], ids=["compile", "make_fx"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_traced_draw_that_writes_to_another_tensor_than_its_result(inplace: bool, trace: Any) -> None:
    """`rrelu` returns its result, and writes its slopes to a tensor that its derivative reads."""

    def fun(x: Tensor) -> Tensor:
        return F.rrelu(x.sin() - 0.1, training=True, inplace=inplace).exp().sum()

    results = []
    for decorate in (plain, remat, remat(policy=policies.everything_saveable)):
        run = trace(grad(decorate(fun)))
        torch.manual_seed(0)
        results.append(run(numbers(6)))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, net: Any) -> None:
    x = numbers(5, 8)
    model = net().eval()
    exported = torch.export.export(model, (x,), strict=strict).module()
    for m in (exported, model):
        m(x.cos()).backward()
    gradients = dict(exported.named_parameters())
    for name, p in model.named_parameters():
        assert_same(gradients[name].grad, p.grad)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_vmap(strict: bool) -> None:
    class Mapped(nn.Module):
        def forward(self, w: Tensor, x: Tensor) -> Tensor:
            return vmap(remat(block), in_dims=(None, 0))(w, x)

    program = torch.export.export(Mapped(), (WS[0], X), strict=strict)
    assert_same(program.module()(WS[1], X), block(WS[1], X))


def test_compiled_autograd() -> None:
    def sines(x: Tensor) -> Tensor:
        return (x.sin() * x).cos()

    def run(fun: Any, compiled: bool) -> Tensor:
        x = leaf(numbers(3))
        y = fun(x).sum()
        with (
            torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
            if compiled
            else contextlib.nullcontext()
        ):
            y.backward()
        assert x.grad is not None
        return x.grad

    assert_same(run(torch.compile(remat(sines), backend="aot_eager"), True), run(sines, False))
    assert_same(run(lambda x: checkpoint(sines, x, use_reentrant=False), True), run(sines, False))
    assert_same(run(remat(sines), True), run(sines, False))


@pytest.mark.parametrize("model", [DecoratedNet, lambda: nn.Sequential(PatchedNet())], ids=["decorated", "patched"])
def test_symbolic_trace(model: Any) -> None:
    """The graph is that of the function alone."""
    traced = torch.fx.symbolic_trace(model().eval())
    assert_same(traced(X[:5, :8]), PlainNet().eval()(X[:5, :8]))
    assert [str(n.target) for n in traced.graph.nodes if n.op == "call_method"] == ["sin", "sum"]


@pytest.mark.parametrize("way", ["remat", "checkpoint"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_draws_of_a_function_under_remat_in_a_keyed_one(backend: str, way: str) -> None:
    """They depend on the key alone, and are the same in the rerun."""

    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, True).sin()

    wrapped = remat(drop) if way == "remat" else lambda x: checkpoint(drop, x, use_reentrant=False)
    fun = compiled(lambda key, x: random.keyed(wrapped)(key, x), backend)
    state, x = torch.get_rng_state(), torch.ones(64, requires_grad=True)
    first, again, other = (fun(random.key(seed), x) for seed in (0, 0, 1))
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(again, first)
    assert not torch.equal(other, first)
    assert_same(gradient != 0, first != 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_in_one_under_remat_and_grad(backend: str) -> None:
    product = torch.compile(lambda w, x: (x @ w).sin(), backend=backend)
    w, x = numbers(8, 8), numbers(4, 8)

    def gradient(ck: Any) -> Tensor:
        return grad(lambda w: ck(lambda w: product(w, x).cos())(w).sum())(w)

    assert_same(gradient(remat), gradient(plain))


class DoublesSines(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sin else out


@pytest.mark.parametrize("way", ["remat", "checkpoint"])
def test_a_mode_of_the_user_around(way: str) -> None:
    def fun(x: Tensor) -> Tensor:
        return torch.sin(x).square()

    wrapped = remat(fun) if way == "remat" else lambda x: checkpoint(fun, x, use_reentrant=False)
    with DoublesSines():
        expected = grad(lambda x: fun(x).sum())(numbers(3))
        assert_same(compiled(grad(lambda x: wrapped(x).sum()))(numbers(3)), expected)


def test_next_key_in_a_compiled_keyed_function() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + random.normal(random.next_key(), (3,))

    key, x = random.key(0), torch.ones(3)
    assert_same(compiled(lambda key, x: random.keyed(noisy)(key, x))(key, x), random.keyed(noisy)(key, x))
