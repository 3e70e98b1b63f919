"""What a checkpointed function changes, assigns and reads besides its arguments: gradients, memory, messages."""

import copy
import functools
import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import remat.compat
from remat import CheckpointError, _context
from remat.debug import LiveBytes
from tests.helpers import UNIT, Seen, activation, assert_same, at_an_address_of, leaf, numbers
from tests.test_compat_better import VARIANTS, both_variants, fails, of_torch, ours, right, wrong
from tests.test_compat_same import plain

# In-place changes.


def of_add(buffer: Tensor, x: Tensor) -> Tensor:
    return torch.add(buffer, x, out=buffer)


def of_max(buffer: Tensor, x: Tensor) -> Tensor:
    return torch.max(x + buffer[:1], 0, keepdim=True, out=(buffer[:1], torch.empty(1, dtype=torch.int64))).values


@pytest.mark.filterwarnings("ignore:None of the inputs")  # in the forward of a reentrant one around
@pytest.mark.parametrize("write", [of_add, of_max, Tensor.add_])
@pytest.mark.parametrize("nest", [*itertools.product(("non-reentrant", "reentrant", "remat"), repeat=3)], ids="/".join)
def test_functions_go_on_with_what_a_call_that_writes_returns(nest: tuple[str, ...], write: Any) -> None:
    def wrapped(fun: Any, by: str) -> Any:
        return remat.remat(fun) if by == "remat" else functools.partial(VARIANTS[by][1], fun)

    def run(wrap: Any) -> Any:
        buffer, x = torch.zeros(3, dtype=torch.float64), leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            before = x * buffer.clone()
            return before.sin() + x * write(buffer, x.detach()).clone().cos() + buffer.clone()

        for by in nest:
            fun = wrap((lambda fun: lambda x: fun(x.sin()) * x + fun(x * 2).cos())(fun), by)
        fun(x).sum().backward()
        return x.grad, buffer

    assert_same(run(wrapped), run(lambda fun, _: fun))


@both_variants
def test_a_tensor_that_is_given_twice_is_one_tensor(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        h, w = numbers(4, 4), leaf(numbers(4, 4, seed=1))

        def fun(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
            a.mul_(2)
            return (b.clone() * w).sin()

        checkpoint(fun, h, h, w).sum().backward()
        return w.grad, h

    right(run, VARIANTS[variant][1])


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), lambda x: x[0].mul_(2)._base])
def test_an_argument_that_is_differentiated_may_be_changed_in_place(first: Any) -> None:
    def run(checkpoint: Any) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(3, 4))
        checkpoint(lambda h: first(h).sin().cos(), x * 1).sum().backward()
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(of_torch)
    right(run)


def test_arguments_that_are_changed_in_place_leave_nothing_behind() -> None:
    for backward in (True, False):
        x = leaf(activation())
        with LiveBytes() as meter:
            h = x * 1
            y = ours(lambda h: torch.relu_(h).sin().cos(), h)
            if backward:
                y.sum().backward()
            x.grad = None
            del h, y
        assert meter.current == 0


EMA: dict[str, Callable[[Tensor], Tensor]] = {"data": lambda t: t.data, "detach": lambda t: t.detach()}


@both_variants
@pytest.mark.parametrize("how", EMA)
def test_changes_of_a_buffer_out_of_sight_of_autograd(variant: str, how: str) -> None:
    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Tensor
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            EMA[how](self.mean).mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return (x * self.mean.clone()).sin()

    def run(checkpoint: Any) -> Any:
        module, x = Codebook(), leaf(numbers(4, 3))
        checkpoint(module, x).sum().backward()
        return x.grad, module.mean

    wrong(run, VARIANTS[variant][0])
    right(run, VARIANTS[variant][1])


def test_data_that_is_replaced() -> None:
    def run(checkpoint: Any) -> Any:
        w, x = leaf(numbers(3, 3)), leaf(numbers(2, 3))

        def fun(x: Tensor) -> Tensor:
            w.data = w.data * 0.5
            return (x @ w).sin()

        checkpoint(fun, x).sum().backward()
        return x.grad, w.grad, w.detach()

    wrong(run)
    right(run)


@both_variants
def test_an_embedding_that_is_renormalized(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        torch.manual_seed(0)
        embedding, indices, x = nn.Embedding(10, 4, max_norm=0.5), torch.arange(5), leaf(numbers(5, 4))
        checkpoint(lambda i, x: torch.tanh(embedding(i) * x), indices, x).sum().backward()
        return x.grad, embedding.weight.grad, embedding.weight.detach()

    for checkpoint in VARIANTS[variant]:
        right(run, checkpoint)


def test_reentrant_with_a_view_that_is_changed_in_place() -> None:
    def run(checkpoint: Any) -> Any:
        view, w = numbers(4, 4)[1:], leaf(numbers(3, 4, seed=1))

        def fun(view: Tensor, w: Tensor) -> Tensor:
            view[0].mul_(2)
            return (view.clone() * w).sin()

        checkpoint(fun, view, w).sum().backward()
        return w.grad

    wrong(run, VARIANTS["reentrant"][0])
    right(run, VARIANTS["reentrant"][1])


# What is assigned.


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.probs = torch.tanh(x)
        out = self.probs.sin().cos()
        self.out = out * 2
        return out


def test_a_second_backward_from_an_attribute() -> None:
    def run(checkpoint: Any) -> Any:
        module, x = Attention(), leaf(activation())
        checkpoint(module, x).sum().backward(retain_graph=True)
        module.out.sum().backward()
        return x.grad

    right(run, of_torch)
    right(run)


def test_what_outlives_the_rerun_has_a_graph() -> None:
    outs = Seen()
    x = leaf(activation())

    def fun(x: Tensor) -> Tensor:
        h = x.sin().cos()
        outs.append((h * 2).view(-1))
        return h

    ours(fun, x, early_stop=False).sum().backward()
    torch.testing.assert_close(outs[1].detach(), (x.sin().cos() * 2).view(-1).detach())
    outs[1].sum().backward()
    assert_same(x.grad, (3 * -x.sin().sin() * x.cos()).detach())


def test_memory_that_is_not_computed_is_not_held() -> None:
    def inner(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.sin().cos()
        return x

    def peak(checkpoint: Any) -> int:
        def two(x: Tensor) -> Tensor:
            return checkpoint(inner, checkpoint(inner, x))

        x = leaf(activation())
        with LiveBytes() as meter:
            y = checkpoint(lambda x: checkpoint(two, checkpoint(two, x)), x)
            meter.reset_peak()
            y.sum().backward()
        return round(meter.peak / UNIT)

    assert peak(ours) <= peak(of_torch)


# What is read.


@both_variants
@pytest.mark.parametrize("of", ["outside", "argument"])
def test_calls_that_fill_a_cache_are_not_taken_for_others(variant: str, of: str) -> None:
    def run(checkpoint: Any) -> Any:
        space, x = (
            SimpleNamespace(two=torch.full((3,), 2.0), a=numbers(3, seed=1), b=numbers(3, seed=2)),
            leaf(numbers(3)),
        )
        made = numbers(3, seed=3)

        def fun(x: Tensor, k: Tensor) -> Tensor:
            if not hasattr(space, "cache"):
                space.cache = (k if of == "argument" else made) * space.two
            return ((x * space.a) * space.b * space.cache).sin()

        checkpoint(fun, x, numbers(3, seed=5)).sum().backward()
        return x.grad

    for checkpoint in VARIANTS[variant]:
        right(run, checkpoint)


def test_changed_values_are_seen_where_the_calls_are_not_the_same() -> None:
    space, x = SimpleNamespace(k=numbers(3)), leaf(numbers(3, seed=1))

    def fun(x: Tensor) -> Tensor:
        if not hasattr(space, "mask"):
            space.mask = torch.ones(3)
        return torch.tanh(x * space.mask + space.k)

    y = ours(fun, x)
    space.k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Callables, and policies.


def test_callables_that_have_no_hash() -> None:
    @dataclass
    class Scale:
        k: float

        def __call__(self, x: Tensor) -> Tensor:
            return (x * self.k).sin()

    x = leaf(numbers(3))
    assert_same(ours(Scale(2.0), x), (x * 2).sin())


def test_a_random_op_whose_result_is_kept_leaves_the_generator_as_it_did() -> None:
    def run(checkpoint: Any, api: Any = remat.compat) -> Any:
        torch.manual_seed(0)
        x = leaf(numbers(5))
        options: Any = {}
        if checkpoint is not plain:
            ops = [torch.ops.aten.rand_like.default]
            options["context_fn"] = functools.partial(api.create_selective_checkpoint_contexts, ops)
        y = checkpoint(lambda x: (x.sin() * torch.rand_like(x) * torch.randn_like(x)).cos(), x, **options)
        y.sum().backward()
        return x.grad

    wrong(functools.partial(run, api=torch.utils.checkpoint))
    right(run)


def test_a_random_op_whose_result_is_kept_leaves_the_generator_of_python_alone() -> None:
    random.seed(0)
    x = leaf(numbers(3))
    context_fn = functools.partial(
        remat.compat.create_selective_checkpoint_contexts, [torch.ops.aten.rand_like.default]
    )
    y = ours(lambda x: (x.sin() * torch.rand_like(x)).cos(), x, context_fn=context_fn)
    random.random()
    before = random.getstate()
    y.sum().backward()
    assert random.getstate() == before


def test_a_policy_that_keeps_all_with_a_sparse_tensor() -> None:
    a, w = numbers(3, 3).to_sparse(), leaf(numbers(3, 3, seed=1))
    context_fn = functools.partial(remat.compat.create_selective_checkpoint_contexts, lambda *args, **kwargs: True)
    y = ours(lambda w: torch.sparse.mm(a * 2, w).sin(), w, context_fn=context_fn)
    y.sum().backward()
    expected = leaf(w)
    torch.sparse.mm(a * 2, expected).sin().sum().backward()
    assert_same(w.grad, expected.grad)


# What the first call sets up.


@pytest.mark.parametrize("how", EMA)
def test_a_parameter_that_the_reentrant_function_changes_each_time(how: str) -> None:
    norm, w, x = nn.LayerNorm(3, dtype=torch.float64), leaf(numbers(3)), leaf(numbers(4, 3))

    def fun(x: Tensor, w: Tensor) -> Tensor:
        EMA[how](w).mul_(0.5)
        return (x * w).sin()

    call = functools.partial(VARIANTS["reentrant"][1], fun)
    with pytest.raises(remat.RematError, match=r"changes a tensor of shape \[3\].*Change a copy"):
        call(x, w)
    with pytest.raises(remat.RematError, match=r"changes a tensor of shape \[3\].*Change a copy"):
        VARIANTS["reentrant"][1](lambda x: fun(x, norm.weight), x)


# Memory that is shared.


def changes_a_part(whole: Tensor, part: Tensor, x: Tensor) -> Tensor:
    part.mul_(2)
    return (whole * x * whole).sin()


@both_variants
def test_a_view_whose_base_is_written_to_before_and_after_the_call(variant: str) -> None:
    """Torch makes the node of the view anew when it is read."""

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(4))
        base = x.clone()
        held = [base[:]]
        base.add_(x)
        y = checkpoint(lambda x: held[0].sin() * x, x)
        base.detach().mul_(2)
        y.sum().backward()

    fails(run, "modified by an inplace operation", plain)
    fails(run, "modified by an inplace operation", VARIANTS[variant][1])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {"slice": lambda t: t[:2], "view": lambda t: t.view(2, 2)}


@both_variants
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_change_through_a_view_of_another_argument(view: Any, variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        whole, x = numbers(4), leaf(numbers(4, seed=1))
        checkpoint(changes_a_part, whole, view(whole), x).sum().backward()
        return x.grad

    run(plain)
    fails(run, "changes two tensors in place that lie in the same memory", VARIANTS[variant][1])
    if variant == "reentrant":
        wrong(run, VARIANTS[variant][0])
    else:
        fails(run, "modified by an inplace operation")


@both_variants
def test_arguments_that_lie_side_by_side_may_be_changed(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        cache, x = numbers(2, 3), leaf(numbers(3, seed=1))

        def fun(k: Tensor, v: Tensor, x: Tensor) -> Tensor:
            k.add_(1)
            v.mul_(2)
            return (k.clone() * x * v.clone()).sin()

        checkpoint(fun, *cache.unbind(), x).sum().backward()
        return x.grad, cache

    right(run, VARIANTS[variant][1])


@both_variants
def test_memory_that_is_made_out_of_sight_and_written_to_in_sight(variant: str) -> None:
    def fun(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # as an extension does it
            memory = torch.empty(3, dtype=torch.float64)
        torch.mul(x.detach(), 2, out=memory)
        with torch._C.DisableTorchFunction():
            scale = memory + 1
        return (x * scale).sin()

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3))
        checkpoint(fun, x).sum().backward()
        return x.grad

    right(run, VARIANTS[variant][1])


# Identities of tensors that have died, which others have got.

MEMORY = numbers(3).numpy()


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("addresses", [(True, False), (False, True), (True, True)], ids=["forward", "rerun", "both"])
def test_a_tensor_where_one_was_that_the_region_around_made(addresses: tuple[bool, bool], early_stop: bool) -> None:
    def run(checkpoint: Any) -> Any:
        of_each_run = iter(addresses)
        x = leaf(numbers(3))

        def fun(x: Tensor) -> Tensor:
            died = {id(t) for t in [x * 1 for _ in range(50)]}
            held = [at_an_address_of(died, lambda: torch.from_numpy(MEMORY), next(of_each_run))]
            return checkpoint(lambda x: (x * held[0]).sin(), x).exp()

        checkpoint(fun, x).sum().backward()
        return x.grad

    right(run, functools.partial(ours, early_stop=early_stop))


# Devices of several types. The machine of the tests has a CPU alone, so the others are stand-ins that only count.


class Counter:
    """A device module whose generator counts."""

    def __init__(self) -> None:
        self.state = torch.zeros(1, dtype=torch.uint8)

    def draw(self) -> int:
        self.state = self.state + 1
        return int(self.state)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.state = state.clone()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter]:
    found = {"cuda": Counter(), "xpu": Counter()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: found[torch.device(device).type])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(_context, "has_accelerator", lambda: True)
    return found


def on(kind: str) -> Any:
    """What is asked of a tensor on a device."""
    return SimpleNamespace(is_cpu=False, is_meta=False, device=torch.device(kind, 0))


def test_the_generators_of_all_devices_repeat_what_they_drew(devices: dict[str, Counter]) -> None:
    state = _context.RandomState([on("cuda"), on("xpu")])
    forward = [d.draw() for d in devices.values()], torch.rand(2)
    drawn = state.drawn_since()
    assert drawn is not None
    devices["xpu"].draw()
    after = [d.get_rng_state() for d in devices.values()]
    with drawn.replayed():
        assert_same([d.draw() for d in devices.values()], forward[0])
        assert_same(torch.rand(2), forward[1])
    assert_same([d.get_rng_state() for d in devices.values()], after)


# Small programs with state: right in both variants, unless it says which.


class Stateful(nn.Module):
    def __init__(self, fun: Callable[..., Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.fun, self.calls = fun, 0
        self.bufs: list[Tensor] = []
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.fun(self, x)


@both_variants
def test_parameters_that_change_places(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        p, x, calls = nn.ParameterDict({"a": numbers(3), "b": numbers(3, seed=1)}), leaf(numbers(4, 3)), Seen()

        def fun(x: Tensor) -> Tensor:
            calls.append(1)
            return (x * p["a"]).sin() * p["b"]

        a, b = p["a"], p["b"]
        y = checkpoint(fun, x).sum()
        p["a"], p["b"] = b, a
        y.backward()
        return x.grad, a.grad, b.grad

    wrong(run, VARIANTS[variant][0])
    right(run, VARIANTS[variant][1])


CALLS, SCALE = 0, numbers(3)


@both_variants
@pytest.mark.parametrize("keeper", [lambda m: m, lambda m: m.weight])
def test_a_hook_behind_a_flag_is_registered_once(variant: str, keeper: Any) -> None:
    class Hooked(nn.Linear):
        is_hooked = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_hooked:
                if isinstance(kept := keeper(self), Tensor):
                    kept.register_hook(lambda grad: grad * 2)
                else:
                    kept.register_forward_hook(lambda m, args, out: None)
                self.is_hooked = True
            return super().forward(x).sin()

    def run(checkpoint: Any) -> Any:
        torch.manual_seed(0)
        module, x = Hooked(3, 3).double(), leaf(numbers(2, 3))
        for _ in range(2):
            checkpoint(nn.Sequential(module), x * 1).sum().backward()
        return x.grad, len(keeper(module)._backward_hooks or ()), len(module._forward_hooks)

    right(run, VARIANTS[variant][1])


@both_variants
@pytest.mark.parametrize("of", ["an argument", "a parameter"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_hook_of_what_the_function_is_given_or_finds_is_registered_once(variant: str, of: str, count: int) -> None:
    def run(checkpoint: Any) -> Any:
        w, x = leaf(numbers(3, 3)), leaf(numbers(2, 3))

        def fun(x: Tensor) -> Tensor:
            for _ in range(count):
                (x if of == "an argument" else w).register_hook(lambda grad: grad * 2)
            return (x @ w).sin()

        for _ in range(2):
            checkpoint(fun, x * 1).sum().backward()
        return x.grad, w.grad, len(w._backward_hooks or ())

    wrong(run, VARIANTS[variant][0])
    right(run, VARIANTS[variant][1])


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = (x * self.calls).sin()
        self.kept.append(y)
        return y


@both_variants
@pytest.mark.parametrize("retain", [False, True])
def test_what_a_module_has_kept_in_a_list_is_free_after_the_backward(variant: str, retain: bool, no_gc: None) -> None:
    module, x = Keeps(), leaf(activation())
    with LiveBytes() as meter:
        for _ in range(3):
            module.kept = []
            y = VARIANTS[variant][1](module, x * 1).sum()
            if retain:
                y.backward(retain_graph=True)
            y.backward()
            with pytest.raises(RuntimeError, match="second time"):
                y.backward()
            del y
        module.kept, x.grad = [], None
        assert meter.current == 0


# A module's attribute, what it is before the call and after it, and what the function computes with it.
@pytest.mark.parametrize(
    ("error", "reads_state"),
    [(torch.OutOfMemoryError, True), (torch.OutOfMemoryError, False), (MemoryError, False), (ValueError, True)],
)
@both_variants
def test_what_goes_wrong_in_one_rerun_alone_is_told(variant: str, error: type[Exception], reads_state: bool) -> None:
    """Another rerun, that begins with the state as it is now, would hide it, and read that."""
    once = Seen()

    def fun(m: Any, x: Tensor) -> Tensor:
        y = x.sin()
        m.mean = m.mean / 2 + y.detach().mean(0) / 2
        if once and once.pop():
            raise error("once")
        return (y - (m.mean if reads_state else 1)).sin()

    x = leaf(numbers(4, 3))
    y = VARIANTS[variant][1](Stateful(fun, mean=torch.zeros(3, dtype=torch.float64)), x)
    once.append(True)
    with pytest.raises((error, CheckpointError), match=r"once|which of the two"):
        y.sum().backward()


@both_variants
def test_a_second_rerun_does_not_hold_what_the_first_has_saved(variant: str) -> None:
    def peak(checkpoint: Any) -> int:
        x = leaf(activation())
        ready: list[int] = []
        space = SimpleNamespace(scale=torch.ones(()))

        def fun(x: Tensor) -> Tensor:
            if not ready:
                space.scale.copy_(x.detach().abs().max())
                ready.append(1)
            for _ in range(8):
                x = (x / space.scale).sin()
            return x

        with LiveBytes() as meter:
            checkpoint(fun, x).sum().backward()
        return meter.peak

    assert peak(VARIANTS[variant][1]) <= peak(VARIANTS[variant][0]) + UNIT / 4


def test_buffers_that_are_not_read_are_not_held() -> None:
    module = Stateful(lambda m, x: (m.calls, x.sin())[1], mean=torch.zeros(3), unread=torch.zeros(4096))
    x, made, calls = leaf(numbers(3)), [], Seen()
    for _ in range(4):
        made.append(ours(lambda x: (calls.append(0), module(x))[1], x))
        module.unread = torch.zeros(4096)
    alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (4096,)]
    assert len(alive) == 1


@pytest.mark.parametrize("way", [*(ours for _, ours in VARIANTS.values()), lambda f, x: remat.remat(f)(x)])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, functools.partial(nn.InstanceNorm1d, track_running_stats=True)])
def test_statistics_that_are_only_read_are_not_copied(kind: Any, way: Any) -> None:
    norm = kind(4097).eval()
    y = way(lambda x: norm(x).sin(), leaf(torch.ones(2, 4097, 1)))
    alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (4097,)]
    assert len(alive) == 2
    y.sum().backward()


def test_attributes_that_are_not_read_are_not_held() -> None:
    class Shows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.shown, self.calls = (x.detach() * 2).sin(), getattr(self, "calls", 0) + 1
            return x.sin().cos()

    module, x = Shows(), leaf(numbers(4096))
    made = [ours(module, x) for _ in range(4)]
    assert module.calls == len(made)
    alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (4096,)]
    assert len(alive) <= len(made) + 2  # the results, x and what is shown


# What a module builds when it is first called.


def keeps_a_window(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    """Attention with a cache of keys, of which it reads as many each time."""
    keys = torch.cat([kept.value, x @ w]) if hasattr(kept, "value") else x @ w
    kept.value = keys[-2:]
    return (x @ keys[:3].mT).tanh() @ x


def keeps_a_state(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    kept.value = (getattr(kept, "value", 0.0) + x @ w).tanh()
    return kept.value.sin()


def keeps_two_states(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    """An addition to what was kept is no error by itself. To save the value of the sum is."""
    before = getattr(kept, "value", torch.zeros(()))
    kept.value = before + (x @ w).sum()
    return (kept.value + x).sin()


def keeps_a_state_and_copies_it(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    y, before = x @ w, torch.zeros(3, 3)
    with torch.no_grad():
        before.copy_(getattr(kept, "value", x))
    kept.value = y
    return (y * before).sin()


def keeps_a_state_that_a_call_inside_reads(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    before, kept.value = getattr(kept, "value", torch.ones(3, 3)), (x @ w).tanh()
    return remat.remat(lambda x: (x * before).sin())(kept.value)


def keeps_a_state_that_a_checkpoint_inside_reads(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    before, kept.value = getattr(kept, "value", torch.ones(3, 3)), (x @ w).tanh()
    return remat.checkpoint(lambda x: (x * before).sin(), kept.value, use_reentrant=False)


def keeps_a_state_that_vmap_maps(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    before, kept.value = getattr(kept, "value", torch.ones(3, 3)), (x @ w).tanh()
    with torch.no_grad():
        before = vmap(torch.mul)(before, before)
    return kept.value * before


KEEPS_A_STATE = [
    keeps_a_window,
    keeps_a_state,
    keeps_two_states,
    keeps_a_state_and_copies_it,
    keeps_a_state_that_a_call_inside_reads,
    keeps_a_state_that_a_checkpoint_inside_reads,
    keeps_a_state_that_vmap_maps,
]


def casts_a_weight_once(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    """The gradient would be right. But nothing tells a cast that is kept from a state that is replaced."""
    if not hasattr(kept, "value"):
        kept.value = w.float()
    return (x.float() @ kept.value).tanh().double()


def logs_a_loss(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    """What it computes from the total is not needed for the backward."""
    kept.value = getattr(kept, "value", torch.zeros(())) + (x @ w).square().mean()
    kept.log = kept.value.detach(), kept.value.item(), str(kept.value), kept.value.cpu() * 0.5
    assert not kept.value.isnan().any()
    return (x @ w).tanh()


def averages_metrics(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    kept.metrics = [*getattr(kept, "metrics", []), (x @ w).sigmoid().mean()]
    kept.value = torch.stack(kept.metrics).mean().add_(0.5)
    return (x @ w).tanh()


def collects_a_loss(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).tanh()
    kept.value = getattr(kept, "value", torch.zeros(())) + y.square().mean()
    return y


def keeps_what_it_reads_itself(kept: Any, x: Tensor, w: Tensor) -> Tensor:
    kept.value = (x @ w).softmax(-1)
    return kept.value @ x.mT


@pytest.mark.parametrize("in_another", [False, True], ids=["alone", "in another"])
@pytest.mark.parametrize("fun", [*KEEPS_A_STATE, casts_a_weight_once])
def test_a_rerun_that_reads_what_its_forward_has_kept_is_an_error(fun: Any, in_another: bool) -> None:
    def run(checkpoint: Any) -> Any:
        kept, x, w = SimpleNamespace(), leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))

        def called(x: Tensor) -> Tensor:
            return checkpoint(lambda x: fun(kept, x, w), x) if in_another else fun(kept, x, w)

        for _ in range(2):
            x = checkpoint(called, x)
        return torch.autograd.grad(x.sum(), w)

    assert_same(run(lambda f, x: f(x)), run(lambda f, x: f(x)))
    with pytest.raises(CheckpointError, match=r"kept\. If it is a cache .*use_cache.* on first use"):
        run(VARIANTS["non-reentrant"][1])


@pytest.mark.parametrize("fun", KEEPS_A_STATE)
def test_a_rerun_that_reads_what_another_call_has_kept_is_an_error(fun: Any) -> None:
    """The first of two calls runs again: it finds what the second has kept."""

    def run(checkpoint: Any) -> Any:
        kept, x, w = SimpleNamespace(), leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        first, second = (checkpoint(lambda x: fun(kept, x, w), x * n) for n in (1, 2))
        return torch.autograd.grad(first.sum() + 0 * second.detach().sum(), w)

    run(lambda f, x: f(x))
    with pytest.raises(CheckpointError, match="another run has computed and kept"):
        run(VARIANTS["non-reentrant"][1])


@pytest.mark.parametrize("reverse", [False, True])
def test_reruns_that_find_what_the_rerun_of_another_call_has_kept(reverse: bool) -> None:
    """Blocks share what the first has kept. Two steps run forward, and then both backward."""

    def run(checkpoint: Any) -> Any:
        kept, x, w = SimpleNamespace(), leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))

        def block(x: Tensor, is_first: bool) -> Tensor:
            h = x @ w
            if is_first:
                kept.value = h
            return (h * 0.5 + kept.value * 0.5).tanh()

        def step(x: Tensor) -> Tensor:
            for i in range(3):
                x = checkpoint(lambda x, i=i: block(x, i == 0), x)
            return x.sum()

        losses = step(x), step(x * 2)
        for loss in reversed(losses) if reverse else losses:
            loss.backward(retain_graph=True)
        return w.grad

    run(lambda f, x: f(x))
    with pytest.raises(CheckpointError, match="another run has computed and kept"):
        run(VARIANTS["non-reentrant"][1])


def test_an_inner_call_reads_what_the_outer_function_has_kept() -> None:
    """The rerun of the outer function has kept another by then, with the same value."""

    def run(checkpoint: Any) -> Any:
        kept, x, w = SimpleNamespace(), leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))

        def outer(x: Tensor) -> Tensor:
            kept.value = (x @ w).tanh()
            for _ in range(2):
                x = checkpoint(lambda x: (x * kept.value).sin(), x)
            return x

        return torch.autograd.grad(checkpoint(outer, checkpoint(outer, x)).sum(), w)

    assert_same(run(VARIANTS["non-reentrant"][1]), run(lambda f, x: f(x)))


@pytest.mark.parametrize("fun", [collects_a_loss, logs_a_loss, averages_metrics, keeps_what_it_reads_itself])
def test_a_rerun_may_read_what_its_forward_has_kept_if_no_gradient_needs_it(fun: Any) -> None:
    def run(checkpoint: Any) -> Any:
        kept, x, w = SimpleNamespace(), leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1))
        for _ in range(3):
            x = checkpoint(lambda x: fun(kept, x, w), x)
        return torch.autograd.grad(x.sum() + kept.value.sum(), w)

    assert_same(run(VARIANTS["non-reentrant"][1]), run(lambda f, x: f(x)))


@both_variants
def test_a_given_tensor_that_is_written_to_beside_a_cache(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        cache: dict[str, Tensor] = {}
        x, w, steps = leaf(numbers(3, 3)), leaf(numbers(3, 3, seed=1)), numbers(3)

        def fun(x: Tensor, steps: Tensor) -> Tensor:
            if not cache:
                cache["table"] = torch.arange(3.0).double().cos()
            steps.add_(1)
            return torch.tanh(x @ w * cache["table"])

        checkpoint(fun, x, steps).sum().backward()
        return x.grad, w.grad, steps

    right(run, VARIANTS[variant][1])


@both_variants
def test_a_lazy_layer(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Tanh())
        x = leaf(numbers(2, 3))
        checkpoint(module, x).sum().backward()
        return x.grad, module[0].weight.grad

    right(run, VARIANTS[variant][1])


def of_a_copy(layer: nn.Linear) -> nn.Linear:
    layer = copy.deepcopy(layer)
    nn.init.normal_(layer.weight)
    return layer


def of_zeros_that_change(layer: nn.Linear) -> nn.Linear:
    layer = nn.Linear(3, 3, dtype=torch.float64)
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    layer.weight.data += 0.5
    return layer


FIRST_USE: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "a new layer": lambda _: nn.Linear(3, 3, dtype=torch.float64),
    "a copy of a layer": of_a_copy,
    "zeros that change": of_zeros_that_change,
}


FIRST_USE |= {
    "memory that no call makes": lambda _: initialised(torch.Tensor(3, 3).double()),
    "an array": lambda _: initialised(torch.from_numpy(np.zeros((3, 3)))),
    "memory of a result": lambda layer: initialised(layer.weight * 2),
    "data of another shape": lambda _: initialised(torch.zeros(1, dtype=torch.float64), torch.ones(3, 3).double()),
}


def initialised(memory: Tensor, data: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(3, 3, dtype=torch.float64)
    layer.weight = nn.Parameter(memory)
    if data is not None:
        layer.weight.data = data
    nn.init.uniform_(layer.weight)
    return layer


class Late(nn.Module):
    """Makes a layer on first use."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "layer"):
            self.layer = self.make(nn.Linear(3, 3, dtype=torch.float64))
        x = x.to(self.layer.weight.dtype)
        return ((x @ self.layer.weight.T) * self.layer(x)).tanh()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("make", FIRST_USE.values(), ids=FIRST_USE)
def test_a_layer_that_is_made_on_first_use(make: Any, depth: int) -> None:
    """Its rerun reads the weights as they are. The memory before the initialisation holds anything."""

    def run(checkpoint: Any) -> Any:
        torch.manual_seed(0)
        module, x = Late(make), leaf(numbers(2, 3))
        call = functools.partial(checkpoint, module)
        for _ in range(depth - 1):
            call = functools.partial(checkpoint, call)
        call(x).sum().backward()
        return x.grad, module.layer.weight.grad

    right(run, of_torch)
    right(run, ours)
    with pytest.raises(remat.RematError, match="use use_reentrant=False"):
        run(functools.partial(remat.checkpoint, use_reentrant=True))


@both_variants
@pytest.mark.parametrize("each_time", [False, True])
@pytest.mark.parametrize("alias", [lambda t: t, lambda t: t.data, lambda t: t.view(-1)], ids=["itself", "data", "view"])
def test_a_buffer_that_is_set_up_behind_a_flag(alias: Any, each_time: bool, variant: str) -> None:
    """As ActNorm does. The forward writes to it before it reads it, and the rerun does so too or does not."""

    def run(checkpoint: Any) -> Any:
        state = SimpleNamespace(scale=torch.ones(3, dtype=torch.float64), ready=False)

        def fun(x: Tensor) -> Tensor:
            if each_time or not state.ready:
                alias(state.scale).add_(x.detach())
                state.ready = True
            return (x * state.scale).sin()

        x = leaf(numbers(3))
        checkpoint(fun, x).sum().backward()
        return x.grad, state.scale

    right(run, VARIANTS[variant][1])


def reads_up_to_a_position(state: Any, x: Tensor) -> Tensor:
    y = x[: state.at].sum() * x + state.buffer[: state.at, 1:].sum()
    state.at.add_(1)
    return y.sin()


def writes_at_a_position(state: Any, x: Tensor) -> Tensor:
    state.buffer[state.at : state.at + 1] = x.detach()
    state.at.add_(1)
    return (x * state.buffer.clone()).sin()


def resizes(state: Any, x: Tensor) -> Tensor:
    state.buffer.resize_(state.buffer.numel() + 1).fill_(0.5)
    return (x * state.buffer.sum()).sin()


def adds_a_dimension(state: Any, x: Tensor) -> Tensor:
    n = state.buffer.dim()
    state.buffer.unsqueeze_(0)
    return (x * n).sin()


def grows(state: Any, x: Tensor) -> Tensor:
    state.buffer.data = torch.cat([state.buffer, x.detach()[None]])
    return (x * state.buffer.sum(0)).sin()


def writes_to_sparse_values(state: Any, x: Tensor) -> Tensor:
    state.sparse.values().mul_(0.5)
    return torch.sparse.mm(state.sparse, x[:, None]).sin()


def writes_to_compressed_values(state: Any, x: Tensor) -> Tensor:
    state.compressed.values().mul_(0.5)
    return (state.compressed @ x).sin()


def sets_a_hook_while_it_is_recorded(state: Any, x: Tensor) -> Tensor:
    y = x * state.weight
    if y.requires_grad:
        state.weight.register_hook(lambda g: g * 2)
    return y.sin()


def doubles_the_gradient(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(2)


def sets_a_hook_after_the_gradient(state: Any, x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        state.weight.register_post_accumulate_grad_hook(doubles_the_gradient)
    return (x * state.weight).sin()


STATEFUL = [
    *(reads_up_to_a_position, writes_at_a_position, resizes, adds_a_dimension, grows, writes_to_sparse_values),
    *(writes_to_compressed_values, sets_a_hook_while_it_is_recorded, sets_a_hook_after_the_gradient),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("way", [*(ours for _, ours in VARIANTS.values()), lambda f, x: remat.remat(f)(x)])
@pytest.mark.parametrize("fun", STATEFUL)
def test_a_state_that_the_function_changes_each_time(fun: Any, way: Any) -> None:
    def run(checkpoint: Any) -> Any:
        eye = torch.eye(3, dtype=torch.float64)
        state = SimpleNamespace(
            at=torch.tensor(1),
            buffer=numbers(4, 3, seed=1),
            sparse=eye.to_sparse_coo().coalesce(),
            compressed=eye.to_sparse_csr(),
            weight=leaf(numbers(3, seed=2)),
        )
        x = leaf(numbers(3))
        checkpoint(functools.partial(fun, state), x).sum().backward()
        return x.grad, state.weight.grad, state.buffer, state.at, state.sparse.to_dense(), state.compressed.to_dense()

    right(run, way)


@both_variants
@pytest.mark.parametrize("inner", [plain, lambda f, x: remat.remat(f)(x)], ids=["plain", "remat"])
@pytest.mark.parametrize("dead", range(6))
def test_identities_of_dead_tensors_are_not_taken_for_others(dead: int, inner: Any, variant: str) -> None:
    """A transform inside wraps the buffer unseen, and the wrapper may lie where a tensor was that has died."""
    state = SimpleNamespace(buffer=torch.ones(2, 3, dtype=torch.float64))

    def fun(x: Tensor) -> Tensor:
        for _ in range(dead):
            x.detach() * 2
        return torch.vmap(lambda row, part: row * part.mul_(0.5).clone())(x, state.buffer).sin()

    x = leaf(numbers(2, 3))
    y = VARIANTS[variant][1](functools.partial(inner, fun), x)
    with pytest.raises((CheckpointError, remat.RematError), match=r"hands (a tensor|straight)"):
        y.sum().backward()


def test_autocast_casts_a_weight_that_is_changed_once() -> None:
    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(3, 3).float())
        state = SimpleNamespace(weight=leaf(numbers(3, 3, seed=1).float()))

        def fun(x: Tensor) -> Tensor:
            y = x @ state.weight
            with torch.no_grad():
                state.weight.mul_(2)
            return (y @ state.weight).sin()

        with torch.autocast("cpu", torch.bfloat16):
            checkpoint(fun, x).sum().backward()
        return x.grad

    right(run)


HOLDS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda b: lambda x, setup: (setup(b), (x * b).sin())[1],
    "default": lambda b: lambda x, setup, b=b: (setup(b), (x * b).sin())[1],
    "partial": lambda b: functools.partial(lambda b, x, setup: (setup(b), (x * b).sin())[1], b),
    "nested remat": lambda b: lambda x, setup: (setup(b), remat.remat(lambda x: (x * b).sin())(x))[1],
    "jvp": lambda b: lambda x, setup: (setup(b), x * torch.func.jvp(torch.sin, (b,), (b,))[1].detach())[1],
}


@pytest.mark.parametrize("holder", HOLDS)
def test_a_buffer_that_the_function_holds_is_set_up_behind_a_flag(holder: str) -> None:
    def run(checkpoint: Any) -> Any:
        ready = SimpleNamespace(ready=False)
        held = HOLDS[holder](torch.ones(3, dtype=torch.float64))

        def setup(buffer: Tensor) -> None:
            if not ready.ready:
                buffer.add_(2)
                ready.ready = True

        x = leaf(numbers(3))
        checkpoint(lambda x: held(x, setup) * x, x).sum().backward()
        return x.grad

    right(run)


@both_variants
def test_a_state_that_is_set_up_and_then_changed_is_an_error(variant: str) -> None:
    state = SimpleNamespace(buffer=torch.ones(3), ready=False)

    def fun(x: Tensor) -> Tensor:
        if not state.ready:
            state.buffer.fill_(2)
            state.ready = True
        state.buffer[:2].add_(1)
        return (x * state.buffer.clone()).sin()

    y = VARIANTS[variant][1](fun, leaf(torch.ones(3)))
    with pytest.raises(CheckpointError, match="Its rerun finds it set up"):
        y.sum().backward()
    assert state.buffer.tolist() == [3, 3, 2]


@both_variants
@pytest.mark.parametrize("inner", [lambda x, b: x * b, lambda x, b: (x * b).sin()])
def test_a_remat_inside_reads_what_the_checkpoint_has_written(inner: Any, variant: str) -> None:
    """The inner call saves the tensor in both runs, or the hooks would take one saved tensor for another."""

    def run(checkpoint: Any) -> Any:
        state = SimpleNamespace(buffer=torch.zeros(3, dtype=torch.float64))

        def fun(x: Tensor) -> Tensor:
            state.buffer.add_(2)
            return remat.remat(lambda x: inner(x, state.buffer))(x) * x

        x = leaf(numbers(3))
        checkpoint(fun, x).sum().backward()
        return x.grad, state.buffer

    right(run, VARIANTS[variant][1])


@both_variants
def test_a_buffer_that_is_read_and_changed_in_the_forward_only(variant: str) -> None:
    def run(checkpoint: Any) -> Any:
        state = SimpleNamespace(scale=torch.ones(3, dtype=torch.float64))

        def fun(x: Tensor) -> Tensor:
            y = (x * state.scale.clone()).sin()
            if not remat.is_rerunning():
                state.scale.mul_(0.5)
            return y

        x = leaf(numbers(3))
        checkpoint(fun, x).sum().backward()
        return x.grad, state.scale

    right(run, VARIANTS[variant][1])


# What is called or read out of sight of the calls that are noted.


@both_variants
def test_attributes_of_tensors_can_be_set(variant: str) -> None:
    weights = [numbers(4)]

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(4))

        def fun(x: Tensor) -> Tensor:
            bias = torch.zeros(4, dtype=x.dtype)
            bias.requires_grad = True  # as T5 of Transformers does
            return (x * weights[0] + bias).sin().cos()

        checkpoint(fun, x).sum().backward()
        return x.grad

    right(run, VARIANTS[variant][0])
    right(run, VARIANTS[variant][1])


class Marks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


def double_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x * 2)


MAKERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "marks its input": lambda: lambda x: Marks.apply(x.clone()),
    "returns its input": lambda: lambda x: Reverses.apply(x * 2),
    "scripted": lambda: torch.jit.script(double_tanh),
}
may_script = pytest.mark.filterwarnings("ignore:.*torch.jit")


@may_script
@both_variants
@pytest.mark.parametrize("how", ["returned", "kept", "kept detached", "dropped"])
@pytest.mark.parametrize("maker", MAKERS)
def test_results_that_are_made_out_of_sight(maker: str, how: str, variant: str) -> None:
    make = MAKERS[maker]()
    kept = Seen()

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        h = make(x)
        if how.startswith("kept"):
            kept.append(h.detach() if how == "kept detached" else h)
        return h if how == "returned" else x * 1, (h * h + x).sin()

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(4))
        a, b = checkpoint(fun, x)
        (a.sum() + b.sum()).backward()
        return x.grad

    right(run, VARIANTS[variant][1])


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.div(self.linear.weight @ self.mean, 2, out=self.mean)
        return x @ (self.linear.weight * self.mean.clone())


checkpointed: Any = remat.compat.checkpoint(use_reentrant=False)
NESTS: dict[str, Callable[[Any], Any]] = {
    "twice": lambda fun: checkpointed(checkpointed(fun)),
    "remat around two": lambda fun: remat.remat(checkpointed(checkpointed(fun))),
    "remat between": lambda fun: checkpointed(remat.remat(checkpointed(fun))),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize(
    "make", [Averages, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3, dtype=torch.float64))]
)
def test_grad_mode_is_set_after_the_last_saved_tensor_too(make: Any, nest: str) -> None:
    def run(wrap: Any) -> Any:
        torch.manual_seed(0)
        module, x = make(), leaf(numbers(4, 3))
        wrap(module)(x).sum().backward()
        assert torch.is_grad_enabled()
        return x.grad, [p.grad for p in module.parameters() if p.grad is not None], [*module.buffers()]

    assert_same(run(NESTS[nest]), run(lambda module: module))


@may_script
def test_what_is_read_out_of_sight_after_the_last_saved_tensor() -> None:
    """Memory that was in use before must not be taken for indices."""
    table = torch.zeros(64)
    look_up = torch.jit.script(entry_of)

    def fun(x: Tensor) -> Tensor:
        y = torch.tanh(x * 2)
        with torch.no_grad():
            look_up(table, y.argmax(1))
        return y

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(2000, 64))
        y = checkpoint(fun, x)
        y.register_hook(leaves_garbage)
        y.sum().backward()
        return x.grad

    right(run)


def leaves_garbage(g: Tensor) -> None:
    torch.full((2000,), 10**12)


def entry_of(table: Tensor, i: Tensor) -> Tensor:
    return table[i]


class CallsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fun: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fun = fun
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.fun(g), None


@both_variants
@pytest.mark.parametrize("how", ["hook", "function", "torch's checkpoint"])
def test_closures_that_are_called_in_the_backward(how: str, variant: str) -> None:
    scale, act = 0.5, lambda h: torch.tanh(h)

    def fun(x: Tensor) -> Tensor:
        h = act(x * 2)
        if how == "hook" and h.requires_grad:
            h.register_hook(lambda g: g * scale)
        elif how == "function":
            h = CallsBack.apply(h, lambda g: g * scale)
        elif how == "torch's checkpoint":
            h = of_torch(lambda h: act(h).sin(), h)
        return h.sin()

    def run(checkpoint: Any) -> Any:
        x = leaf(numbers(4))
        checkpoint(fun, x).sum().backward()
        return x.grad

    right(run, VARIANTS[variant][0])
    right(run, VARIANTS[variant][1])


def test_a_closure_that_the_function_leaves_behind() -> None:
    space, act, scale = SimpleNamespace(penalty=None), lambda h: torch.tanh(h), 2.0

    def fun(x: Tensor) -> Tensor:
        space.penalty = lambda: scale
        return act(x).sin()

    ours(fun, leaf(numbers(4))).sum().backward()
    assert space.penalty() == scale


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


@pytest.mark.parametrize("read", [lambda y: y.detach().numpy().sum(), lambda y: y.mul_(2).tolist()])
def test_values_of_a_function_of_which_the_kernel_was_spared(read: Any) -> None:
    def run(checkpoint: Any) -> Any:
        x, seen = leaf(numbers(1000, 3)), Seen()

        def fun(x: Tensor) -> Tensor:
            y = Rounded.apply(x.sin() * 2)
            seen.append(read(y))
            return y

        checkpoint(fun, x).square().sum().backward()
        return x.grad

    right(run)


class MeanThenRemat(nn.Module):
    """Updates a buffer, which a function under remat reads before a parameter of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3, seed=1))
        self.register_buffer("mean", numbers(3, seed=2))

    @remat.remat
    def body(self, x: Tensor) -> Tensor:
        return (x - self.mean).tanh() * self.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.body(x)


@both_variants
def test_a_function_under_remat_saves_its_operands_in_the_same_order_in_a_rerun(variant: Any) -> None:
    def run(checkpoint: Any) -> Any:
        module, x = MeanThenRemat(), leaf(numbers(4, 3))
        checkpoint(module, x).sum().backward()
        return x.grad, module.weight.grad, module.mean

    right(run, VARIANTS[variant][1])


class CountsItsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return torch.tanh(x * self.count)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_buffer_that_is_written_first_and_was_in_the_module_only_then(reentrant: bool) -> None:
    """`functional_call` holds the buffer, which the module does not have when the rerun comes."""

    def run(call: Any) -> Any:
        module, passed, x = CountsItsCalls(), torch.full((3,), 2.0, dtype=torch.float64), leaf(numbers(3))
        held = {"count": passed}
        out = functional_call(_Around(module, call), {"module.count": passed}, (x,))
        out.sum().backward()
        return x.grad, module.count, held

    assert_same(run(lambda m, x: remat.compat.checkpoint(m, x, use_reentrant=reentrant)), run(lambda m, x: m(x)))


class _Around(nn.Module):
    def __init__(self, module: nn.Module, call: Any) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)  # type: ignore[no-any-return]
