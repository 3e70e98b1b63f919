"""Where remat.compat is better than torch.utils.checkpoint: each test shows both, to notice what torch mends."""

import contextlib
import contextvars
import functools
import logging
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import grad as grad_of
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import remat.compat
from remat import CheckpointError, RematError, is_rerunning
from remat.debug import LiveBytes
from tests.helpers import SIZE, UNIT, CountOps, ReadsTwice, Seen, Times, Window, activation, assert_same, leaf, numbers
from tests.test_compat_same import Calls, debugs, mismatch, plain

TORCH, REMAT = torch.utils.checkpoint, remat.compat
of_torch = functools.partial(TORCH.checkpoint, use_reentrant=False)
ours = functools.partial(REMAT.checkpoint, use_reentrant=False)
VARIANTS = {
    name: (functools.partial(TORCH.checkpoint, use_reentrant=r), functools.partial(REMAT.checkpoint, use_reentrant=r))
    for name, r in (("reentrant", True), ("non-reentrant", False))
}
both_variants = pytest.mark.parametrize("variant", VARIANTS)


def wrong(run: Callable[[Any], Any], checkpoint: Any = of_torch) -> None:
    """Torch's result differs from that of a plain call, without a word."""
    with pytest.raises(AssertionError):
        assert_same(run(checkpoint), run(plain))


def right(run: Callable[[Any], Any], checkpoint: Any = ours) -> None:
    assert_same(run(checkpoint), run(plain))


def fails(run: Callable[[Any], Any], match: str, checkpoint: Any = of_torch) -> None:
    with pytest.raises(RuntimeError, match=match):
        run(checkpoint)


# torch.func.

W = numbers(3, 3, seed=5)


def block(x: Tensor) -> Tensor:
    return torch.tanh(W @ x).exp()


TRANSFORMS: dict[str, Any] = {
    "grad": lambda ck: grad(lambda x: ck(block, x).sum())(numbers(3)),
    "vjp": lambda ck: vjp(lambda x: ck(block, x), numbers(3))[1](numbers(3)),
    "vmap(grad)": lambda ck: vmap(grad(lambda x: ck(block, x).sum()))(numbers(2, 3)),
    "jacrev": lambda ck: jacrev(lambda x: ck(block, x))(numbers(3)),
    "hessian": lambda ck: hessian(lambda x: ck(block, x).sum())(numbers(3)),
}


# Before 2.12, torch's checkpoint saves its arguments in a node.
REFUSED_BY_TORCH = "saved tensor hooks"
if torch.__version__ < (2, 12):
    REFUSED_BY_TORCH += "|does not have vmap support"


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_transforms(transform: str) -> None:
    run = TRANSFORMS[transform]
    fails(run, REFUSED_BY_TORCH)
    right(run)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_reentrant_under_transforms(transform: str) -> None:
    torchs, own = VARIANTS["reentrant"]
    fails(TRANSFORMS[transform], "setup_context", torchs)
    right(TRANSFORMS[transform], own)


def backward_through(transform: Callable[..., Tensor], ck: Any) -> Any:
    x = leaf(numbers(3))
    transform(lambda x: ck(block, x), x).sum().backward()
    return x.grad


def test_backward_through_vmap_and_jvp() -> None:
    def through_vmap(ck: Any) -> Any:
        return backward_through(lambda f, x: vmap(f)(torch.stack([x, x.sin()])), ck)

    def through_jvp(ck: Any) -> Any:
        return backward_through(lambda f, x: jvp(f, (x,), (x.cos(),))[1], ck)

    with pytest.raises(RuntimeError):
        through_vmap(of_torch)
    right(through_vmap)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same(through_jvp(of_torch), through_jvp(plain))
    right(through_jvp)


@both_variants
@pytest.mark.parametrize("transform", [grad, lambda f: lambda x: vjp(f, x)[1](x.sum())[0], lambda f: hessian(f)])
def test_transforms_inside(variant: str, transform: Any) -> None:
    torchs, own = VARIANTS[variant]

    def fun(x: Tensor, w: Tensor) -> Tensor:
        return (transform(lambda x: torch.tanh(w @ x).sum())(x) * x).sin()

    def run(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, 3))
        for _ in range(2):
            ck(fun, x, w).sum().backward()
        return x.grad, w.grad

    if variant == "non-reentrant":
        fails(run, "saved tensor hooks", torchs)
        fails(run, r"fun calls torch.func.grad or the like.* Call remat.remat\(function\)", own)
        right(run, lambda fun, *args: remat.remat(fun)(*args))
    else:
        right(run, own)


SCALE = torch.full((3,), 2.0, dtype=torch.float64)


@both_variants
def test_a_tensor_that_is_changed_and_found_inside_of_a_transform(variant: str) -> None:
    def fun(x: Tensor) -> Tensor:
        SCALE.add_(1)
        return vmap(lambda x, scale: (x * scale).sin())(x, SCALE)

    x = leaf(numbers(3))
    y = VARIANTS[variant][1](fun, x)
    with pytest.raises(
        CheckpointError, match=r"hands a tensor of shape \[3\] to a transform .* Pass it as an argument"
    ):
        y.sum().backward()


@both_variants
def test_an_argument_of_inference_mode(variant: str) -> None:
    torchs, own = VARIANTS[variant]
    with torch.inference_mode():
        table = numbers(3, seed=1)

    def run(ck: Any) -> Any:
        x = leaf(numbers(3))
        ck(lambda x, table: x.sin() + table, x, table).sum().backward()
        return x.grad

    fails(run, "Inference tensors cannot be saved", torchs)
    right(run, own)


def test_no_mode_sees_the_copy_of_a_tensor_of_inference_mode() -> None:
    """A policy around would keep it for the rerun, where the function's own come."""
    with torch.inference_mode():
        table = numbers(3, seed=1)
    context_fn = functools.partial(REMAT.create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: True)

    def run(ck: Any) -> Any:
        x = leaf(numbers(3))
        selective = plain if ck is plain else functools.partial(ck, context_fn=context_fn)
        selective(lambda x: ck(lambda x: x.sin() + table, x).clone().sin(), x).sum().backward()
        return x.grad

    right(run)


def test_a_result_that_is_used_inside_keeps_its_gradient() -> None:
    def call(block: Any, x: Tensor) -> Any:
        return block(x)

    def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        return h, h.sin()

    def run(ck: Any) -> Any:
        x = leaf(numbers(2, 3))
        found = []
        for _ in range(2):
            h, y = ck(call, doubled, x)
            h.retain_grad()
            y.sum().backward()
            found += [h.grad, x.grad.clone()]
        return found

    right(run)


# The reentrant variant.


def test_reentrant_under_autograd_grad() -> None:
    torchs, own = VARIANTS["reentrant"]

    def run(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, 3))
        return grad_of(ck(lambda x: torch.tanh(w @ x), ck(lambda x: torch.tanh(w @ x), x)).sum(), [w, x])

    fails(run, "incompatible with .grad", torchs)
    right(run, own)


def test_reentrant_with_inputs_of_backward() -> None:
    torchs, own = VARIANTS["reentrant"]

    def run(ck: Any) -> Any:
        x, w, h = leaf(numbers(3)), leaf(numbers(3, 3)), leaf(numbers(3, seed=1))
        k = h.sin()
        ck(lambda x: torch.tanh(w @ x) * k, x).sum().backward(inputs=[x, h])
        assert w.grad is None
        return x.grad, h.grad

    fails(run, "incompatible with .grad", torchs)
    right(run, own)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("how", ["grad", "create_graph", "inputs", "plain"])
def test_reentrant_with_an_argument_that_is_captured_too(how: str, is_leaf: bool) -> None:
    def run(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        held = types.SimpleNamespace(v=w if is_leaf else w.exp())
        out = ck(lambda x, a: (x * a).sin() * held.v.cos(), x, held.v).sum()
        if how == "grad":
            return grad_of(out, [x, w])
        if how == "create_graph":
            return grad_of(sum((g**2).sum() for g in torch.autograd.grad(out, [x, w], create_graph=True)), [x, w])
        out.backward(inputs=[w] if how == "inputs" else None)
        return x.grad, w.grad

    right(run, VARIANTS["reentrant"][1])


class Point(NamedTuple):
    a: Tensor
    b: Tensor


NAMED: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: (x.sin() * 2).topk(2),
    "max": lambda x: torch.max(x * 2, 0),
    "a named tuple": lambda x: Point(x.sin(), x.cos()),
}


@pytest.mark.parametrize("fun", NAMED.values(), ids=NAMED)
def test_reentrant_results_with_names(fun: Any) -> None:
    torchs, own = VARIANTS["reentrant"]

    def run(ck: Any) -> Any:
        x = leaf(numbers(4))
        out = ck(fun, x)
        (out[0].square().sum() + (out[1] * x[: len(out[1]) if out[1].ndim else 1]).sum() + x.square().sum()).backward()
        return x.grad, *out

    right(run, torchs)
    right(run, own)
    assert type(own(fun, leaf(numbers(4)))) is type(fun(numbers(4)))


SCRIPTED: dict[str, Callable[[nn.Module], Any]] = {
    "traced": lambda layer: torch.jit.trace(layer, numbers(2, 3)),
    "scripted": torch.jit.script,
}


@both_variants
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("make", SCRIPTED.values(), ids=SCRIPTED)
@pytest.mark.parametrize("use", [lambda layer: lambda x: layer(x).sin(), lambda layer: nn.Sequential(layer, nn.Tanh())])
def test_script_modules(use: Any, make: Any, variant: str) -> None:
    torchs, own = VARIANTS[variant]

    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 3, dtype=torch.float64), leaf(numbers(2, 3))
        ck(use(make(layer)), x).sum().backward()
        return x.grad, layer.weight.grad, layer.bias.grad

    right(run, torchs)
    right(run, own)


RESULTS: dict[str, Callable[[nn.Module], Callable[[Tensor], Any]]] = {
    "a parameter": lambda layer: lambda x: layer.weight,
    "a parameter and more": lambda layer: lambda x: (layer.weight, layer(x)),
    "an argument": lambda layer: lambda x: x,
    "an argument and more": lambda layer: lambda x: (layer(x), x),
    "a view of an argument": lambda layer: lambda x: x.t(),
    "the same twice": lambda layer: lambda x: (lambda y: (y, y))(layer(x)),
    "nothing that is differentiated": lambda layer: lambda x: (x, None, 3, x.argmax()),
}


@pytest.mark.parametrize("results", RESULTS)
def test_reentrant_results_that_are_not_new(results: str) -> None:
    def run(checkpoint: Any) -> Any:
        layer = nn.Linear(3, 3, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.3), nn.init.zeros_(layer.bias)
        x = leaf(numbers(3, 3))
        out = checkpoint(RESULTS[results](layer), x * 2)
        out = out if isinstance(out, tuple) else (out,)
        sum((o.sin() * numbers(3, 3)).sum() for o in out if isinstance(o, Tensor) and o.requires_grad).backward()
        return x.grad, layer.weight.grad, [o for o in out if isinstance(o, Tensor)]

    right(run, VARIANTS["reentrant"][1])


def test_reentrant_under_a_counter_of_flops() -> None:
    torchs, own = VARIANTS["reentrant"]

    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 3, dtype=torch.float64), leaf(numbers(2, 3))
        with FlopCounterMode(display=False):
            ck(layer, x).sum().backward()
        return x.grad, layer.weight.grad

    right(run, torchs)
    right(run, own)


def test_reentrant_with_a_parameter_that_was_frozen_in_the_forward() -> None:
    def run(ck: Any) -> Any:
        w, x = numbers(3), leaf(numbers(3))
        y = ck(lambda x: (x * w).sin(), x).sum()
        w.requires_grad_()
        y.backward()
        return x.grad, w.grad

    torchs, own = VARIANTS["reentrant"]
    wrong(run, torchs)
    right(run, own)


def test_reentrant_with_batched_cotangents() -> None:
    torchs, own = VARIANTS["reentrant"]

    def run(ck: Any) -> Any:
        w = leaf(numbers(3, 3))
        return torch.autograd.functional.jacobian(
            lambda x: ck(lambda x: torch.tanh(w @ x), x), numbers(3), vectorize=True
        )

    fails(run, "incompatible with .grad", torchs)
    right(run, own)


def test_reentrant_calls_hooks_of_the_stand_in_of_an_argument() -> None:
    def run(ck: Any) -> Any:
        seen = Seen()

        def fun(x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
            return x.sin()

        x = leaf(numbers(3))
        ck(fun, x).sum().backward()
        return [*seen]

    torchs, own = VARIANTS["reentrant"]
    right(run, torchs)
    right(run, own)


def test_reentrant_double_backward() -> None:
    torchs, own = VARIANTS["reentrant"]

    def run(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, 3))
        (g,) = grad_of(ck(lambda x: torch.tanh(w @ x), x).sum(), x, create_graph=True)
        return g, grad_of(g.square().sum(), [x, w])

    fails(run, "incompatible with .grad", torchs)
    right(run, own)


def test_reentrant_calls_hooks_of_captured_tensors_once() -> None:
    def run(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, 3))
        calls = Seen()
        w.register_hook(lambda g: calls.append(1) or g * 2)
        ck(lambda x: torch.tanh(w @ x), x).sum().backward()
        return x.grad, w.grad, len(calls)

    right(run, VARIANTS["reentrant"][1])


def test_reentrant_respects_the_device_context() -> None:
    torchs, own = VARIANTS["reentrant"]
    for ck, same in ((torchs, False), (own, True)):
        seen = Seen()
        x = leaf(numbers(3))
        with torch.device("meta"):
            y = ck(lambda x, seen=seen: seen.append(torch.ones(1).device.type) or x.sin(), x).sum()
        y.backward()
        assert (seen[0] == seen[1]) == same


def test_reentrant_with_a_function_that_changes_its_input() -> None:
    torchs, own = VARIANTS["reentrant"]

    def hidden(ck: Any) -> Any:
        x = leaf(numbers(3))
        ck(lambda x: x.detach().mul_(3) + x.sin(), x * 1).sum().backward()
        return x.grad

    def constant(ck: Any) -> Any:
        x, k = leaf(numbers(3)), torch.ones(3)
        ck(lambda x, k: (x * k.mul_(3)).sin(), x, k).sum().backward()
        return x.grad, k

    wrong(hidden, torchs)
    fails(hidden, "changes a tensor .* in place", own)
    wrong(constant, torchs)
    right(constant, own)


def test_reentrant_with_a_tensor_that_only_an_autograd_function_sees() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return torch.from_numpy(x.detach().numpy() * w.detach().numpy())

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g * w, g * x

    def run(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        ck(lambda x: Scale.apply(x.sin(), w), x).sum().backward()
        return x.grad, w.grad

    def argument_too(ck: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        held = types.SimpleNamespace(w=w)
        return grad_of(ck(lambda x, a: Scale.apply(x.sin(), held.w) * a, x, w).sum(), [x, w])

    right(run, VARIANTS["reentrant"][1])
    right(argument_too, VARIANTS["reentrant"][1])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # in the forward
def test_reentrant_with_that_of_torch_inside() -> None:
    """As a library calls it."""

    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        layer, x, k = nn.Linear(3, 3).double(), leaf(numbers(3)), leaf(numbers(3, seed=1))

        def block(x: Tensor) -> Tensor:
            return TORCH.checkpoint(lambda x: layer(x).tanh() * k, layer(x).sin(), use_reentrant=True).cos() * k

        ck(block, ck(block, x)).sum().backward()
        return x.grad, k.grad, layer.weight.grad, layer.bias.grad

    torchs, own = VARIANTS["reentrant"]
    right(run, torchs)
    right(run, own)


def gathering(ck: Any, kind: str) -> Any:
    """Hooks give parameters their memory when they are used, as those of DeepSpeed's ZeRO-3."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).double() for _ in range(2)]
    for layer in layers:
        shards = {p: p.data for p in layer.parameters()}

        def gather(layer: Any, *_: Any, shards: Any = shards) -> None:
            for p, shard in shards.items():
                p.data = shard
            if kind == "changed":
                layer.weight.data.mul_(0.5)

        def release(*_: Any, shards: Any = shards) -> None:
            for p in shards:
                p.data = numbers(0)

        release()
        layer.register_forward_pre_hook(gather)
        if kind != "kept":
            layer.register_forward_hook(release)
        layer.register_full_backward_pre_hook(gather)
        for p in shards:
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "data", numbers(0)))
    layers[1].weight.requires_grad_(kind != "frozen")
    net, x = nn.Sequential(layers[0], nn.Tanh(), layers[1]), leaf(numbers(2, 3))
    if kind == "taken":
        for p in layers[0].parameters():
            p.data = numbers(3)
    for _ in range(2):
        y = ck(net, ck(lambda x: net(net(x)), x)).square().sum()
        if kind == "autograd.grad":
            grad_of(y, x)
        else:
            y.backward()
    return x.grad, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("kind", ["", "frozen", "kept"])
def test_reentrant_with_parameters_that_hooks_gather(kind: str) -> None:
    torchs, own = VARIANTS["reentrant"]
    right(functools.partial(gathering, kind=kind), torchs)
    right(functools.partial(gathering, kind=kind), own)


GATHERED_OTHERWISE = {
    "changed": "changes a tensor of shape",
    "taken": "changes a tensor of shape",
    "autograd.grad": "from .backward.. without inputs alone",
}


@pytest.mark.parametrize(("kind", "match"), GATHERED_OTHERWISE.items())
def test_reentrant_with_parameters_that_are_not_as_before(kind: str, match: str) -> None:
    with pytest.raises(RematError, match=f"{match}.* use_reentrant=False"):
        gathering(VARIANTS["reentrant"][1], kind=kind)


# Values that are not there yet, and values that are not the same any more.


def test_rrelu() -> None:
    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(1000))
        ck(lambda x: F.rrelu(x, training=True), x).sum().backward()
        return x.grad

    def functional(ck: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(2000))
        y = ck(lambda x: torch.rrelu(x, training=True), x)
        y.register_hook(leaves_garbage)
        y.sum().backward()
        return x.grad

    def inside(ck: Any) -> Any:
        def fun(x: Tensor) -> Tensor:
            z = x.detach().requires_grad_()
            (g,) = grad_of(F.rrelu(z, training=True).sum(), z)
            return x * g

        torch.manual_seed(0)
        y = ck(fun, leaf(numbers(1000)))
        y.sum().backward()
        return y

    for case in (run, functional, inside):
        right(case)  # torch reads memory that nothing has written, and is right by luck at times


def leaves_garbage(g: Tensor) -> None:
    torch.full_like(g, 7.0)


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


def changed(kind: str, ck: Any) -> Any:
    """The function reads a tensor that is changed in place before the backward."""
    x, k = leaf(numbers(3)), numbers(3, seed=1)
    if kind == "keyword":
        y = ck(lambda x, k: (x + k).sin(), x, k=k)
    elif kind == "list":
        y = ck(lambda x, ks: (x + ks[0]).sin(), x, [k])
    elif kind == "dict":
        y = ck(lambda x, ks: (x + ks["k"]).sin(), x, {"k": k})
    elif kind == "cell":
        y = ck(lambda x: (x + k).sin(), x)
    else:
        held = Held(k)
        y = ck(lambda x: (x + held.value).sin(), x)
    k.add_(1)
    (gradient,) = grad_of(y.sum(), x)
    return gradient - (x.detach() + k - 1).cos()


@pytest.mark.parametrize("kind", ["keyword", "list", "dict", "cell", "attribute"])
def test_changed_in_place_between_forward_and_backward(kind: str) -> None:
    assert changed(kind, of_torch).abs().max() > 0.1
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*DoubleTensor \[3\].*expected version 0"):
        changed(kind, ours)


def test_optimizer_step_between_forward_and_backward() -> None:
    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 3).double(), leaf(numbers(3))
        y = ck(lambda x: layer(x).sin(), x).sum()
        with torch.no_grad():
            layer.bias.add_(1)
        y.backward()
        return x.grad

    wrong(run)
    fails(run, "modified by an inplace operation", ours)


def test_saved_and_changed_in_place_inside() -> None:
    def run(ck: Any) -> Any:
        x = leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            y = x.exp()
            y.mul_(2)
            return y.sin()

        ck(fun, x).sum().backward()
        return x.grad

    fails(run, "modified by an inplace operation", plain)
    assert run(of_torch) is not None  # whatever it is
    fails(run, "modified by an inplace operation", ours)


# Late binding.


@both_variants
def test_a_loop_variable(variant: str) -> None:
    torchs, own = VARIANTS[variant]

    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        layers = [nn.Linear(3, 3).double() for _ in range(3)]
        x = y = leaf(numbers(3))
        for l in layers:  # noqa: E741
            y = ck(lambda y: torch.tanh(l(y)), y)
        y.sum().backward()
        return x.grad, [l.weight.grad for l in layers]  # noqa: E741

    wrong(run, torchs)
    right(run, own)


@both_variants
def test_loop_variables_of_other_kinds(variant: str) -> None:
    torchs, own = VARIANTS[variant]

    def run(ck: Any) -> Any:
        x = y = leaf(numbers(3))
        ws = [leaf(numbers(3, seed=i)) for i in range(3)]
        for i, w in enumerate(ws):
            scale = lambda y, i=i: y * (i + 1)  # noqa: E731

            def inner(y: Tensor) -> Tensor:
                return scale(y * w).sin() * (i + 1)

            y = ck(lambda y: inner(y) + y, y)
        y.sum().backward()
        return x.grad, [w.grad for w in ws]

    wrong(run, torchs)
    right(run, own)


def test_parameters_of_functional_call() -> None:
    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        layer, x, scale = nn.Linear(3, 3).double(), leaf(numbers(3)), leaf(numbers(1))

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                return ck(lambda x: torch.tanh(self.layer(x)), x)

        parameters = {"layer.weight": layer.weight.detach() * scale, "layer.bias": layer.bias.detach().sin()}
        functional_call(Net(), parameters, (x,)).sum().backward()
        return x.grad, scale.grad

    wrong(run)
    right(run)


def test_cells_are_as_they_were_after_the_backward() -> None:
    x, seen = leaf(numbers(3)), 0

    def fun(x: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        return x.sin()

    y = ours(fun, x).sum()
    seen = 10
    y.backward()
    assert seen == 10


# Random draws.


def draws_from(kind: str, ck: Any) -> Any:
    x = leaf(numbers(100))
    generator = torch.Generator().manual_seed(0)
    random.seed(0)
    np.random.seed(0)

    def fun(x: Tensor) -> Tensor:
        if kind == "generator":
            k = torch.rand(100, generator=generator)
        elif kind == "python":
            k = torch.tensor([random.random() for _ in range(100)])
        elif kind == "gauss":
            k = torch.tensor([random.gauss(0, 1) for _ in range(101)][1:])
        elif kind == "numpy normal":
            k = torch.from_numpy(np.random.randn(99, 100)[-1])
        else:
            if kind == "numpy seeded":
                np.random.seed(3)
            k = torch.from_numpy(np.random.rand(100))
            if kind == "numpy seeded at the end":
                np.random.seed(4)
        return (x * k).sin()

    y = ck(fun, x)
    after = generator.get_state(), random.random(), np.random.rand()
    random.seed(1)
    np.random.randn()
    y.sum().backward()
    return y.detach(), x.grad, after, generator.get_state(), random.random(), np.random.randn(3).tolist()


@pytest.mark.parametrize("kind", ["generator"])
def test_draws_are_replayed(kind: str) -> None:
    if kind != "numpy seeded":
        wrong(lambda ck: draws_from(kind, ck)[:2])
    right(lambda ck: draws_from(kind, ck))


def test_draws_inside_of_a_forked_generator() -> None:
    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(100))

        def fun(x: Tensor) -> Tensor:
            with torch.random.fork_rng():
                return F.dropout(x).sin()

        y = ck(fun, x)
        torch.manual_seed(1)
        y.sum().backward()
        return x.grad

    right(run)


# Selective checkpointing is in test_compat_selective.py.


# Memory.


def units(meter: LiveBytes, before: int = 0) -> float:
    return (meter.current - before) / UNIT


@pytest.mark.parametrize(("checkpoint", "left"), [(of_torch, 1), (ours, 0)])
def test_partial_backward_with_retained_graph(checkpoint: Any, left: int) -> None:
    """What the rerun computed for the other half goes when the backward ends."""
    x = leaf(activation())
    with LiveBytes() as meter:
        y, z = checkpoint(lambda x: (x.sin().exp().sum(), x.cos().exp().sum()), x)
        before = meter.current
        grad_of(y, x, retain_graph=True)
        assert round(units(meter, before)) == left
        grad_of(z, x)


@pytest.mark.parametrize(("checkpoint", "left"), [(of_torch, 1), (ours, 0)])
def test_reads_of_saved_tensors(checkpoint: Any, left: int) -> None:
    x = leaf(activation())
    with LiveBytes() as meter:
        y = checkpoint(lambda x: x.sin().exp().cos(), x)
        before = meter.current
        for _ in range(3):
            y.grad_fn._saved_self  # noqa: B018
        assert (round(units(meter, before)) >= left) if left else (meter.current == before)


@pytest.mark.parametrize("how", ["keyword", "list", "cell"])
@pytest.mark.parametrize(("checkpoint", "held"), [(of_torch, 1), (ours, 0)])
def test_inputs_of_inner_regions(checkpoint: Any, held: int, how: str) -> None:
    """The outer region computes them again, however the inner one is given them."""

    def inner(x: Tensor, k: Any) -> Tensor:
        return x * (k[0] if isinstance(k, list) else k)

    def outer(x: Tensor) -> Tensor:
        k = x.detach().sin()
        if how == "keyword":
            return checkpoint(inner, x, k=k).sum()
        if how == "list":
            return checkpoint(inner, x, [k]).sum()
        return checkpoint(lambda x: x * k, x).sum()

    x = leaf(activation())
    with LiveBytes() as meter:
        y = checkpoint(outer, x)
        assert round(units(meter)) == held
        y.backward()
    assert_same(x.grad, x.detach().sin())


def test_after_an_error_of_the_backward_nothing_is_left() -> None:
    class OwnError(Exception):
        pass

    def refuse(g: Tensor) -> Tensor:
        raise OwnError

    x = leaf(activation())
    with LiveBytes() as meter:

        def fun(x: Tensor) -> Tensor:
            y = x.sin()
            z = y.cos()
            if y.requires_grad:
                y.register_hook(refuse)
            return z.exp().sum()

        y = ours(fun, x)
        before = meter.current
        with pytest.raises(OwnError):
            y.backward(retain_graph=True)
        assert meter.current == before


@both_variants
def test_nothing_is_kept(variant: str) -> None:
    _, checkpoint = VARIANTS[variant]
    x = leaf(activation())
    with LiveBytes() as meter:
        y = checkpoint(lambda x: x.sin().exp().cos().exp(), x)
        assert round(units(meter)) == 1
        y.backward(torch.ones_like(y))
        assert meter.peak <= 8 * UNIT


@both_variants
def test_a_weight_that_a_hook_computes_holds_no_gradient(variant: str) -> None:
    """The module holds that weight, with its graph, until the next forward."""

    def peak(checkpoint: Any) -> int:
        layers = [prune.identity(nn.Linear(SIZE // 32, 32, bias=False), "weight") for _ in range(4)]
        x = leaf(torch.ones(SIZE // 32))
        with LiveBytes() as meter:
            sum(checkpoint(layer, x).sum() for layer in layers).backward()
        return meter.peak

    by_torch, by_remat = map(peak, VARIANTS[variant])
    assert by_remat <= by_torch


@both_variants
@pytest.mark.parametrize("backward", [True, False])
def test_a_region_is_freed_without_the_garbage_collector(variant: str, backward: bool, no_gc: None) -> None:
    _, checkpoint = VARIANTS[variant]
    x, big = leaf(numbers(3)), numbers(3)
    ref = weakref.ref(big)

    def fun(x: Tensor, k: Tensor) -> Tensor:
        return (x * k).sin().exp()

    y = checkpoint(fun, x, big).sum()
    del big
    assert ref() is not None
    if backward:
        y.backward()
    del y
    assert ref() is None


# Groups.


def test_a_group_after_a_rerun_that_raised() -> None:
    class OwnError(Exception):
        pass

    def run(api: Any) -> Any:
        x = leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            y = x.sin()
            if calls.count == 2:
                raise OwnError
            return y.exp().cos()

        calls = Calls(fun)
        y = api.checkpoint(calls, x, use_reentrant=False).sum()
        with api.GraphExecGroup():
            with pytest.raises(OwnError):
                y.backward(retain_graph=True)
            y.backward()
        return x.grad

    z = leaf(numbers(3))
    z.sin().exp().cos().sum().backward()
    assert_same(run(REMAT), z.grad)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same(run(TORCH), z.grad)


# The stop signal.


def test_the_stop_signal_is_no_exception() -> None:
    """What catches all exceptions, and goes on, does not catch it."""

    def run(ck: Any) -> tuple[Any, list[Any]]:
        seen = []

        def fun(x: Tensor) -> Tensor:
            try:
                return (x.sin().exp() @ x) * x
            except Exception as error:
                seen.append(error)
                return x

        x = leaf(numbers(50, 50))
        ck(fun, x).sum().backward()
        return x.grad, seen

    assert len(run(of_torch)[1]) == 1
    assert run(ours)[1] == []
    assert_same(run(ours)[0], run(plain)[0])


def test_what_catches_the_stop_signal_may_go_on() -> None:
    def fun(x: Tensor) -> Tensor:
        try:
            return (x @ x).sin() @ x
        except BaseException:
            return x.exp().exp()

    def run(ck: Any) -> Any:
        x = leaf(numbers(50, 50))
        ck(fun, x).sum().backward()
        return x.grad

    right(run)


def test_a_function_that_swallows_exceptions() -> None:
    def fun(x: Tensor) -> Tensor:
        try:
            return (x @ x).sin() @ x
        except Exception:
            return x

    def run(ck: Any) -> Any:
        x = leaf(numbers(50, 50))
        ck(lambda x: fun(x) + 1, x).sum().backward()
        return x.grad

    right(run)


# Settings.


def test_settings_belong_to_a_thread() -> None:
    def early_in_another_thread(api: Any) -> bool:
        x = leaf(numbers(64, 64))
        results: list[Tensor] = []
        with api.set_checkpoint_early_stop(False):
            thread = threading.Thread(
                target=lambda: results.append(api.checkpoint(lambda x: x.sin() @ W64, x, use_reentrant=False))
            )
            thread.start()
            thread.join()
        with CountOps() as ops:
            results[0].sum().backward()
        return ops["mm"] == 1

    assert not early_in_another_thread(TORCH)
    assert early_in_another_thread(REMAT)


W64 = numbers(64, 64)


def test_settings_belong_to_a_context() -> None:
    from remat.compat import _settings

    def enabled() -> Any:
        return _settings.debug_enabled.get()

    with REMAT.set_checkpoint_debug_enabled(True):
        inside = contextvars.copy_context()
        assert enabled() is True
    assert enabled() is None
    assert inside.run(enabled) is True


# Debugging.


@debugs
def test_debug_with_contexts() -> None:
    def contexts(api: Any) -> Any:
        return lambda: api.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    x = leaf(numbers(3))
    with pytest.raises(ValueError, match="incompatible with non-default context_fn"):
        of_torch(torch.sin, x, debug=True, context_fn=contexts(TORCH))
    ours(lambda x: x.sin().exp(), x, debug=True, context_fn=contexts(REMAT)).sum().backward()
    assert_same(x.grad, x.detach().sin().exp() * x.detach().cos())


@debugs
def test_a_double_unpack_is_named_under_debug() -> None:
    messages = []
    for ck in (of_torch, ours):
        y = ck(lambda x: ReadsTwice.apply(x.sin()), leaf(numbers(3)), debug=True).sum()
        with pytest.raises(TORCH.CheckpointError) as caught:
            y.backward()
        messages.append(str(caught.value))
    assert "tensors to be saved during the original forward and differ" in messages[0]
    assert "already unpacked once" in messages[1]
    assert "differs" not in messages[1]


def different(ck: Any, before: Any = torch.sin, **options: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        return before(x).cos().exp()

    def rerun(x: Tensor) -> Tensor:
        return before(x)[:2].cos().exp()

    calls = Calls(lambda x: (forward if calls.count == 1 else rerun)(x))
    with pytest.raises(TORCH.CheckpointError) as caught:
        ck(calls, leaf(numbers(3)), debug=True, **options).sum().backward()
    return caught.value


@debugs
def test_debug_output_is_short() -> None:
    error = different(ours)
    lines = str(error).splitlines()
    assert len(lines) <= 20
    assert "The first op that differs is number 2" in str(error)
    assert [f"{__file__}:{different.__code__.co_firstlineno + k}" in str(error) for k in (2, 5)] == [True, True]
    assert "aten.cos.default(float64[3])" in str(error)
    assert "aten.slice" in str(error)
    lists = different(ours, before=lambda x: torch.cat([x, x]))
    assert "aten.cat.default([float64[3], float64[3]])" in str(lists)
    assert len(str(different(of_torch)).splitlines()) > 100


@debugs
def test_debug_leaves_nothing_behind() -> None:
    def state() -> Any:
        logger = logging.getLogger("LoggingTensor")
        return logger.propagate, len(logger.filters), len(logger.handlers), logger.level

    before = state()
    different(ours)
    assert state() == before
    different(of_torch)
    assert state() != before


# Sequences.


@pytest.mark.parametrize("segments", [0, -1, 4, 100])
def test_segments_out_of_range(segments: int) -> None:
    x, steps = leaf(numbers(3)), [torch.sin, torch.cos, torch.exp]
    try:
        TORCH.checkpoint_sequential(steps, segments, x, use_reentrant=False)
        failure = None
    except (ZeroDivisionError, ValueError) as error:
        failure = str(error)
    assert failure is None or "zero" in failure
    with pytest.raises(ValueError, match=rf"segments must be from 1 to 3.* got int {segments}"):
        REMAT.checkpoint_sequential(steps, segments, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("setting", "what"), [("set_checkpoint_early_stop", "enable"), ("set_checkpoint_debug_enabled", "enabled")]
)
def test_settings_that_are_no_bools(setting: str, what: str) -> None:
    with pytest.raises(TypeError, match=f"^{setting}: {what} must be a bool or None; got str 'no'"):
        getattr(REMAT, setting)("no").__enter__()


def needs(x: Tensor) -> Tensor:
    return x.sin()


def generator(x: Tensor) -> Any:
    yield x.sin()


async def coroutine(x: Tensor) -> Tensor:
    return x.sin()


async def both(x: Tensor) -> Any:
    yield x.sin()


MISTAKES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a result": (
        lambda ck, x: ck(x.sin()),
        r"function must be callable; got a tensor of shape \[3\] and dtype torch.float64. Write checkpoint\(layer, x\)",
    ),
    "a result and an argument": (lambda ck, x: ck(x.sin(), x), "function must be callable; got a tensor"),
    "a number": (lambda ck, x: ck(3, x), r"function must be callable; got int 3\.$"),
    "nothing to call": (lambda ck, x: ck(None, x), "function must be callable; got NoneType None"),
    "a generator": (lambda ck, x: ck(generator, x), "generator is a generator or async function: its body runs after"),
    "a coroutine": (lambda ck, x: ck(coroutine, x), "coroutine is a generator or async function"),
    "both": (lambda ck, x: ck(both, x), "both is a generator or async function"),
    "a method": (lambda ck, x: ck(type("A", (), {"f": generator})().f), "generator or async function"),
    "a partial": (lambda ck, x: ck(functools.partial(generator, x)), "generator or async function"),
    "use_reentrant": (lambda ck, x: ck(needs, x, use_reentrant="no"), "use_reentrant must be a bool; got str 'no'"),
    "preserve_rng_state": (
        lambda ck, x: ck(needs, x, preserve_rng_state="no"),
        "preserve_rng_state must be a bool; got str 'no'",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@both_variants
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_call(mistake: str, variant: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(TypeError, match=message):
        call(VARIANTS[variant][1], leaf(numbers(3)))
    with pytest.raises(TypeError, match=message), torch.no_grad():
        call(VARIANTS[variant][1], leaf(numbers(3)))


def test_mistakes_in_a_decorator() -> None:
    decorate = REMAT.checkpoint(use_reentrant=False)
    with pytest.raises(TypeError, match="function must be callable; got a tensor of shape"):
        decorate(leaf(numbers(3)))
    with pytest.raises(TypeError, match="generator is a generator or async function"):
        decorate(generator)


@pytest.mark.parametrize(("function", "args"), [(needs, ()), (lambda: 3 + "", ()), (lambda x: x + "", (1,))])  # type: ignore[operator]
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@both_variants
def test_what_the_function_raises_itself_is_left_alone(function: Any, args: Any, variant: str) -> None:
    """It takes its arguments, and what fails is something in it."""

    def fun(*given: Any) -> Any:
        return function(*given)

    with pytest.raises(TypeError, match=r"^(?!checkpoint)"):
        VARIANTS[variant][1](fun, *args)


@pytest.mark.parametrize("flag", [np.bool_(False), 0])
def test_flags_that_are_as_good_as_a_bool(flag: Any) -> None:
    REMAT.checkpoint(needs, leaf(numbers(3)), use_reentrant=flag, preserve_rng_state=flag).sum().backward()


@pytest.mark.parametrize(
    ("functions", "segments", "error", "message"),
    [
        (
            nn.Sequential(nn.Tanh()),
            torch.ones(2),
            ValueError,
            r"segments must be from 1 to 1.* a tensor of shape \[2\]",
        ),
        (nn.Sequential(nn.ReLU()), 1.5, ValueError, "segments must be from 1 to 1.* got float 1.5"),
        (nn.Sequential(), 1, TypeError, "functions must be .* one at least; got a module, Sequential"),
        (nn.ModuleDict({"a": nn.ReLU()}), 1, TypeError, "functions must be a Sequential or an iterable of callables"),
        (torch.sin, 1, TypeError, "functions must be a Sequential or an iterable of callables, one at least"),
        (torch.ones(2), 1, TypeError, r"functions must be .* iterable of callables, .*; got a tensor of shape \[2\]"),
    ],
)
def test_mistakes_in_a_sequence(functions: Any, segments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^checkpoint_sequential: {message}"):
        REMAT.checkpoint_sequential(functions, segments, leaf(numbers(3)), use_reentrant=False)


def test_a_context_fn_that_is_no_function() -> None:
    with pytest.raises(TypeError, match="context_fn must be a function that returns two context managers; got int 3"):
        ours(needs, leaf(numbers(3)), context_fn=3)
    with pytest.raises(
        TypeError, match=r"context_fn must be .* that returns two .*; got a tensor of shape \[3\] and dtype"
    ):
        ours(needs, leaf(numbers(3)), context_fn=lambda: numbers(3))


def test_an_iterator_is_used_up_by_the_forward() -> None:
    x = leaf(numbers(3))
    y = ours(lambda ts: sum(t.sin() for t in ts), iter([x, x]))
    with pytest.raises(CheckpointError, match="Pass a list for an iterator, which the forward has used up"):
        y.sum().backward()


# Statistics.


@both_variants
def test_batch_norm_statistics(variant: str) -> None:
    torchs, own = VARIANTS[variant]

    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
        x = leaf(numbers(5, 3))
        for _ in range(2):
            ck(net, x).square().sum().backward()
        return x.grad, dict(net.named_buffers()), [p.grad for p in net.parameters()]

    wrong(run, torchs)
    right(run, own)


@both_variants
def test_a_buffer_that_is_a_bound_of_a_slice(variant: str) -> None:
    """C++ reads it: no torch call is seen to do so."""
    torchs, own = VARIANTS[variant]

    def run(ck: Any) -> Any:
        x = leaf(numbers(4))
        ck(Window(), x).square().sum().backward()
        return x.grad

    wrong(run, torchs)
    right(run, own)


@both_variants
@pytest.mark.parametrize("how", ["in place", "foreach", "read"])
def test_other_buffers(variant: str, how: str) -> None:
    torchs, own = VARIANTS[variant]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = x * (self.mean + 1)
            with torch.no_grad():
                if how == "in place":
                    self.mean.mul_(0.9).add_(x.detach())
                elif how == "foreach":
                    torch._foreach_add_([self.mean], [x.detach()])
                else:
                    self.mean += x.detach()
            if how == "read":
                y = y * (self.mean + 1)
            return y.sin().exp()

    def run(ck: Any) -> Any:
        net, x = Net(), leaf(numbers(3))
        for _ in range(2):
            ck(net, x).sum().backward()
        return x.grad, net.mean

    wrong(run, torchs)
    right(run, own)


# Warnings.


@pytest.mark.parametrize("use", ["checkpoint", "sequential"])
def test_the_warning_points_at_the_caller(use: str) -> None:
    for api, here in ((TORCH, use == "sequential"), (REMAT, True)):
        x = leaf(numbers(3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if use == "checkpoint":
                api.checkpoint(torch.sin, x)
            else:
                api.checkpoint_sequential([torch.sin, torch.cos], 2, x)
        assert (caught[0].filename == __file__) == here


WITHOUT_GRADIENTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "call": lambda api, x: api.checkpoint(torch.sin, x, use_reentrant=True),
    "decorator": lambda api, x: api.checkpoint(use_reentrant=True)(torch.sin)(x),
    "sequential": lambda api, x: api.checkpoint_sequential([torch.sin, torch.cos], 2, x, use_reentrant=True),
    "function": lambda api, x: api.CheckpointFunction.apply(torch.sin, True, x),
    "validity": lambda api, x: api.check_backward_validity([x]),
}


@pytest.mark.parametrize("use", WITHOUT_GRADIENTS.values(), ids=WITHOUT_GRADIENTS)
def test_the_warning_without_gradients_points_at_the_caller(use: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(REMAT, numbers(3))
    assert [w.filename for w in caught if "requires_grad=True" in str(w.message)] == [__file__]


def test_a_context_that_swallows_the_exception_of_the_function() -> None:
    def fun(x: Tensor) -> Tensor:
        raise ValueError("no result")

    def run(ck: Any) -> Any:
        return ck(fun, leaf(numbers(3)), context_fn=lambda: (contextlib.suppress(ValueError), contextlib.nullcontext()))

    # torch before 2.13 raises the ValueError and leaves its hooks behind
    fails(run, "the forward context provided by context_fn suppressed an exception", ours)


@pytest.mark.parametrize("contexts", [1, (contextlib.nullcontext(),), None])
def test_contexts_that_are_no_pair(contexts: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        of_torch(torch.sin, leaf(numbers(3)), context_fn=lambda: contexts)
    with pytest.raises(TypeError, match=r"context_fn must .* returns two context managers; got (int|tuple|NoneType)"):
        ours(torch.sin, leaf(numbers(3)), context_fn=lambda: contexts)


# Also as a decorator.


def test_decorator() -> None:
    @REMAT.checkpoint(use_reentrant=False)
    def fun(x: Tensor, *, k: float = 2.0) -> Tensor:
        """Says what it does."""
        return (x * k).sin().exp()

    assert (fun.__name__, fun.__doc__) == ("fun", "Says what it does.")
    x, z = leaf(numbers(3)), leaf(numbers(3))
    with CountOps() as ops:
        fun(x, k=3.0).sum().backward()
    assert ops["sin"] == 2
    (z * 3).sin().exp().sum().backward()
    assert_same(x.grad, z.grad)
    with pytest.raises(TypeError, match="must be callable"):
        REMAT.checkpoint(use_reentrant=False)(3)


def test_all_keywords_of_a_call_reach_a_decorated_function() -> None:
    @REMAT.checkpoint(use_reentrant=False)
    def fun(x: Tensor, debug: bool = False, function: float = 1.0, preserve_rng_state: int = 0) -> Tensor:
        return x.cos() * function if debug else x.sin() + preserve_rng_state

    class Net(nn.Module):
        @REMAT.checkpoint(use_reentrant=False)
        def forward(self, x: Tensor, early_stop: float = 0.0) -> Tensor:
            return x.sin() + early_stop

    x = leaf(numbers(3))
    assert_same(fun(x, debug=True, function=2.0).detach(), x.detach().cos() * 2)
    assert_same(fun(x, preserve_rng_state=3).detach(), x.detach().sin() + 3)
    assert_same(Net()(x, early_stop=1.0).detach(), x.detach().sin() + 1)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: debug"):
        REMAT.checkpoint(use_reentrant=True)(torch.sin)(x, debug=True)


@both_variants
def test_a_rerun_can_be_told_from_the_forward(variant: str) -> None:
    seen = []

    def fun(x: Tensor) -> Tensor:
        seen.append(is_rerunning())
        return x.sin().exp()

    VARIANTS[variant][1](fun, leaf(numbers(3))).sum().backward()
    assert seen == [False, True]
    assert not is_rerunning()


# After the last tensor that the backward needs.


def add(h: Tensor, r: Tensor) -> Tensor:
    h += r
    return h


def change_a_view(h: Tensor, r: Tensor) -> Tensor:
    h.view(-1).mul_(2.0)
    return h - r


def read_before_and_after(h: Tensor, r: Tensor) -> Tensor:
    z = h + 1.0
    h -= r
    return z - h.div_(3.0)


def change_a_part(h: Tensor, r: Tensor) -> Tensor:
    h += r
    h[0] /= 2.0
    return h


def negate(h: Tensor, r: Tensor) -> Tensor:
    return h.neg_() - r


class Order(TorchDispatchMode):
    """Notes the ops of a run in order, without those that autograd adds."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += [str(func)] if func is not torch.ops.aten.detach.default else []
        return func(*args, **(kwargs or {}))


ENDS = [add, change_a_view, read_before_and_after, change_a_part, negate]
MATRICES = [(64, 64), (2, 32, 64)]


@pytest.mark.parametrize("size", MATRICES, ids=str)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kept", [None, (), ("mm",), ("sin",), "order"], ids=str)
def test_what_follows_the_last_product_in_place(kept: Any, end: Any, size: tuple[int, ...]) -> None:
    orders = Order(), Order()

    def fun(x: Tensor) -> Tensor:
        return end(x.sin() @ W64, x + 1.0)

    contexts: dict[str, Any] = {}
    if kept == "order":
        contexts = {"context_fn": lambda: orders}
    elif kept is not None:
        ops = [getattr(torch.ops.aten, name).default for name in kept]
        make = functools.partial(REMAT.create_selective_checkpoint_contexts, ops, allow_cache_entry_mutation=True)
        contexts = {"context_fn": make}
    x, z = leaf(numbers(*size)), leaf(numbers(*size))
    ours(fun, x, **contexts).square().sum().backward()
    expected = end(z.sin() @ W64, z + 1.0)
    expected.square().sum().backward()
    assert_same(x.grad, z.grad)
    if kept == "order":
        assert orders[1].ops == orders[0].ops[: len(orders[1].ops)]


@pytest.mark.parametrize("size", MATRICES, ids=str)
@pytest.mark.parametrize("end", [add, change_a_view, read_before_and_after])
def test_arithmetic_in_place_does_not_need_the_last_product(end: Any, size: tuple[int, ...]) -> None:
    x = leaf(numbers(*size))
    y = ours(lambda x: end(x.sin() @ W64, x + 1.0), x)
    with CountOps() as ops:
        y.sum().backward()
    assert ops["mm"] == 1


def test_what_a_policy_has_kept_and_the_function_changes_at_its_end() -> None:
    """Nobody needs it in the rerun, as in torch's."""
    for api in (TORCH, REMAT):
        context_fn = functools.partial(api.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        x, z = leaf(numbers(2, 32, 64)), leaf(numbers(2, 32, 64))
        y = api.checkpoint(lambda x: add(x.sin() @ W64, x), x, use_reentrant=False, context_fn=context_fn)
        y.square().sum().backward()
        add(z.sin() @ W64, z).square().sum().backward()
        assert_same(x.grad, z.grad)


@both_variants
def test_packets_of_ops(variant: str) -> None:
    """That an op can be told where to write does not mean that it writes there."""
    aten = torch.ops.aten
    _, checkpoint = VARIANTS[variant]
    x, z = leaf(numbers(3, 3)), leaf(numbers(3, 3))
    checkpoint(lambda x: aten.mm(aten.sin(x), x), x).sum().backward()
    aten.mm(aten.sin(z), z).sum().backward()
    assert_same(x.grad, z.grad)


# Silently wrong, or nobody's business: more that must be right.


def test_caches_that_are_filled_on_first_use() -> None:
    class Net(nn.Module):
        table: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(3, dtype=x.dtype).cos()
            return (x * self.table).sin().exp()

    def run(ck: Any) -> Any:
        x = leaf(numbers(3))
        ck(Net(), x).sum().backward()
        return x.grad

    right(run)


@pytest.mark.parametrize("give", ["a dict", "a closure", "a module"])
def test_caches_that_are_filled_on_first_use_in_an_inner_region(give: str) -> None:
    """The rerun of the outer region finds the table, and saves as much as the forward."""

    class Net(nn.Module):
        @functools.cached_property
        def table(self) -> Tensor:
            return torch.arange(3).double().cos()

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.table).sin().exp()

    def run(ck: Any) -> Any:
        x, made, net = leaf(numbers(3)), {}, Net()

        def table() -> Tensor:
            if not made:
                made["t"] = torch.arange(3).double().cos()
            return made["t"]

        def outer(x: Tensor) -> Tensor:
            if give == "a module":
                return ck(net, ck(net, x))
            if give == "a dict":
                fun = lambda x: (x * table()).sin().exp()  # noqa: E731
            else:
                t = table()
                fun = lambda x: (x * t).sin().exp()  # noqa: E731
            return ck(fun, ck(fun, x))

        (ck(outer, x) + ck(outer, x.cos())).sum().backward()
        return x.grad

    right(run)


def test_a_module_that_keeps_the_table_of_its_last_key() -> None:
    """A rerun that makes the table of another key leaves the module with that table, as it leaves the key."""

    class Net(nn.Module):
        key: Any = None

        def forward(self, x: Tensor, key: float) -> Tensor:
            if self.key != key:
                self.key, self.table = key, torch.arange(3).double() * key
            return (x * self.table).sin().exp()

    def run(ck: Any, keys: Sequence[float]) -> Any:
        x, net = leaf(numbers(3)), Net()
        sum(ck(net, x, key).square() for key in keys).sum().backward()
        return x.grad, net(x.detach(), keys[0]), net(x.detach(), 2.0)

    right(lambda ck: run(ck, (1.0, 1.0, 2.0)))
    right(lambda ck: run(ck, (2.0, 1.0)))
    assert_same(
        run(lambda net, x, key: remat.remat(net)(x, key), (2.0, 1.0)), run(lambda net, *args: net(*args), (2.0, 1.0))
    )


@both_variants
def test_inner_regions_read_what_the_outer_one_was_given(variant: str) -> None:
    """By another way than the arguments: the outer rerun is given other objects."""
    _, own = VARIANTS[variant]

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w.sum()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g * w.sum(), (g * x).sum().expand_as(w)

    def run(ck: Any) -> Any:
        x, held = leaf(numbers(40, 40)), Held(leaf(numbers(40, 40, seed=1)))

        def inner(x: Tensor, w: Tensor) -> Tensor:
            return Scale.apply(Scale.apply((x * held.value).tanh(), held.value), w) + w

        def outer(x: Tensor, w: Tensor) -> Tensor:
            y = ck(inner, ck(inner, x, w), held.value) if ck is plain else ours(inner, ck(inner, x, w), held.value)
            return (y * w).sin() + held.value

        ck(outer, ck(outer, x, held.value), held.value).sum().backward()
        return x.grad, held.value.grad

    right(run, own)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_weight_that_a_function_of_autograd_reads_too(create_graph: bool) -> None:
    """With create_graph, the reentrant variant would count the other reads twice."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return w * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g * ctx.saved_tensors[0]

    x, held = leaf(numbers(3)), Held(leaf(numbers(3, seed=1)))

    def gradient(ck: Any) -> Any:
        y = ck(lambda x: x * held.value + Square.apply(held.value), x)
        return grad_of(y.sum(), held.value, create_graph=create_graph)

    expected = gradient(lambda f, x: f(x))
    assert_same(gradient(functools.partial(ours, use_reentrant=False)), expected)
    if create_graph:
        with pytest.raises(RematError, match=r"no torch function was seen to read it.* and create_graph"):
            gradient(functools.partial(ours, use_reentrant=True))
    else:
        assert_same(gradient(functools.partial(ours, use_reentrant=True)), expected)


def test_inner_regions_with_buffers() -> None:
    def run(ck: Any) -> Any:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3).double()
        x = leaf(numbers(5, 3))

        def outer(x: Tensor) -> Tensor:
            return ck(lambda x: norm(x.tanh()), norm(x).sin()).sin() + norm(x)

        ck(outer, x).square().sum().backward()
        return x.grad, dict(norm.named_buffers())

    right(run)


def test_in_place_changes_before_a_backward_inside() -> None:
    """They are recorded in an outer rerun, although that has all it needs."""

    def inner(x: Tensor) -> Tensor:
        y = (x * 2).requires_grad_() if x.is_leaf else x * 2
        y[0] = y[1]
        y = torch.where(y > 0, y, 0.1 * y)
        (g,) = grad_of(y.sin().sum(), y)
        return x + g

    def run(ck: Any) -> Any:
        x = leaf(numbers(40, 40))
        ck(lambda x: ck(inner, x.sin()), x).sum().backward()
        return x.grad

    right(run)


def test_backward_of_an_unrelated_region_in_between() -> None:
    def run(ck: Any) -> Any:
        x, z = leaf(numbers(3)), leaf(numbers(3, seed=1))
        a = ck(lambda x: x.sin().exp(), x)

        def fun(z: Tensor) -> Tensor:
            (g,) = grad_of(a.sum(), x, retain_graph=True)
            return (z * g).sin().exp()

        b = ck(fun, z)
        return grad_of(a.sum() + b.sum(), [x, z])

    right(run)


def test_under_forward_ad() -> None:
    from torch.autograd import forward_ad

    def run(ck: Any) -> Any:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(leaf(numbers(3)), numbers(3, seed=1))
            y = ck(lambda x: x.sin().exp(), x)
            return forward_ad.unpack_dual(y).tangent.detach()

    right(run)


def test_compiled() -> None:
    @torch.compile(backend="aot_eager")
    def fun(x: Tensor) -> Tensor:
        return REMAT.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)

    x = leaf(numbers(3))
    fun(x).sum().backward()
    assert_same(x.grad, x.detach().sin().exp() * x.detach().cos())


def test_errors_are_torchs_too() -> None:
    y = mismatch(REMAT, lambda x: x.sin().cos(), lambda x: x.sin())
    with pytest.raises(TORCH.CheckpointError) as caught:
        y.backward()
    assert isinstance(caught.value, CheckpointError)
    assert SIZE


@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, contextlib.nullcontext])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["remat", "non-reentrant", "reentrant"])
def test_a_hook_of_a_leaf_is_called_once(use_reentrant: bool | None, around: Any) -> None:
    """Hooks on saved tensors give another object for the leaf, which does not tell of its hooks."""
    w, calls = leaf(numbers(3)), []
    w.register_hook(lambda g: calls.append(1) or g * 0.5)
    f = remat.remat(lambda x: x * w)
    with around():
        x = leaf(numbers(3, seed=1))
        y = f(x) if use_reentrant is None else remat.checkpoint(f, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert len(calls) == 1
    assert_same(w.grad, x.detach() / 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_batch_norm_in_remat_in_checkpoint(use_reentrant: bool) -> None:
    def run(make: Any, checkpoint: Any) -> Any:
        norm = nn.BatchNorm1d(3).double()
        f = make(lambda x: norm(x).sin())
        x = leaf(numbers(4, 3))
        for _ in range(2):
            checkpoint(lambda x: f(x), x).sum().backward()
        return x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked

    found = run(remat.remat, functools.partial(remat.checkpoint, use_reentrant=use_reentrant))
    assert_same(found, run(lambda f: f, lambda f, x: f(x)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_another_thread_uses_the_module_during_the_backward(use_reentrant: bool) -> None:
    layer, x = nn.Linear(3, 3, dtype=torch.float64), leaf(numbers(1, 3))

    def in_another_thread(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward())
        thread.start()
        thread.join()

    def fun(x: Tensor) -> Tensor:
        y = layer(x).tanh()
        if y.requires_grad:
            y.register_hook(in_another_thread)
        return y * 1

    y = REMAT.checkpoint(fun, x, use_reentrant=use_reentrant)
    found = grad_of(y.sum(), [x, layer.weight])
    assert_same(layer.weight.grad, torch.ones(3, 3, dtype=torch.float64))
    assert_same(found, grad_of(layer(x).tanh().sum(), [x, layer.weight]))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("more", [False, True])
def test_buffers_are_written_once_where_a_backward_runs_inside(more: bool, depth: int, early_stop: bool) -> None:
    """It runs the function again before its forward is over. In the rerun of an outer function, too."""

    def run(depth: int, api: Any) -> list[Any]:
        torch.manual_seed(0)
        mean, later, norm = torch.zeros(()), torch.zeros(()), nn.BatchNorm1d(4)
        x = torch.randn(6, 4, requires_grad=True)

        def fun(x: Tensor) -> Tensor:
            with torch.no_grad():
                mean.mul_(0.9).add_(x.mean())
            y = norm(x)
            z = x.detach().requires_grad_()
            (force,) = torch.autograd.grad((z.sin() * z).sum(), z)
            later.add_(1)
            return y * force + later

        def under(fun: Any) -> Any:
            def outer(x: Tensor) -> Tensor:
                y = api.checkpoint(fun, x, use_reentrant=False, early_stop=early_stop)
                return y.sin() if more else y

            return outer if api else lambda x: fun(x).sin() if more else fun(x)

        for _ in range(depth):
            fun = under(fun)
        fun(x).square().sum().backward()
        return [mean, later, *norm.buffers(), x.grad]

    expected = run(depth, None)
    assert_same(run(depth, remat.compat), expected)
    assert run(depth, torch.utils.checkpoint)[4] > 1  # torch writes again


def test_reentrant_around_a_function_under_remat_with_a_transform_of_a_captured_tensor() -> None:
    v, x = torch.randn(4, requires_grad=True), torch.ones((), requires_grad=True)

    def fun(x: Tensor) -> Tensor:
        torch.func.jacrev(torch.sin)(v)
        remat.remat(lambda: torch.func.jacfwd(lambda q: q * v)(v))()
        return (v * v).sum() + x

    remat.checkpoint(fun, x, use_reentrant=True).backward()
    assert_same([x.grad, v.grad], [torch.ones(()), 2 * v.detach()])


def test_reentrant_around_a_function_under_remat_with_an_autograd_function() -> None:
    def gradients(fun: Any) -> Any:
        x, w = leaf(numbers(3)), leaf(numbers(3, seed=1))
        remat.checkpoint(lambda x: fun(x, w), x, use_reentrant=True).sum().backward()
        return x.grad, w.grad

    with pytest.raises(RematError, match=r"rerun of a checkpoint around reads another tensor.* Pass it as an argument"):
        gradients(lambda x, w: remat.remat(lambda x: Times.apply(x, w))(x))
    assert_same(gradients(lambda x, w: remat.remat(Times.apply)(x, w)), gradients(Times.apply))


@pytest.mark.parametrize("reversed_", [False, True])
def test_reentrant_gradients_over_the_same_memory_are_accumulated_apart(reversed_: bool) -> None:
    patches = numbers(3, 3)

    def accumulated(ck: Any) -> list[Tensor | None]:
        position, extra, scale = leaf(numbers(4, 3)), leaf(numbers(1, 3)), leaf(numbers(1))

        def embed(scale: Tensor) -> Tensor:  # the gradient of `extra` is a part of that of `position`
            return (position + torch.cat([patches, extra])).sin() * scale

        inputs = [extra, position, scale] if reversed_ else [position, extra, scale]
        for _ in range(2):
            ck(embed, scale).sum().backward(inputs=inputs)
        return [t.grad for t in inputs]

    ours = accumulated(functools.partial(remat.checkpoint, use_reentrant=True))
    assert_same(ours, accumulated(lambda fun, *args: fun(*args)))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_backward_inside_of_nested_calls_reads_what_the_call_found(depth: int) -> None:
    def results(ck: Any) -> list[Tensor | None]:
        held, x = [numbers(3).abs()], leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            z = held[0] * 4
            _, y = torch.autograd.functional.jvp(lambda q: q * z, z, x, create_graph=True)
            held[0].lerp_(y.detach(), 0.2)
            return y

        for _ in range(depth):
            fun = ck(lambda x, fun=fun: fun(x).tanh())
        fun(x).square().sum().backward()
        return [*held, x.grad]

    assert_same(results(remat.checkpoint(use_reentrant=False)), results(lambda fun: fun))
