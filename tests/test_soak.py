"""Training steps leave nothing behind, and exceptions leave torch as it was. `make soak` takes 1,000 and more."""

import gc
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import assert_same, leaf, numbers, plain
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import remat
from remat import checkpoint, is_rerunning, policies
from remat._torch_internals import TorchDispatchMode
from remat.compat import create_selective_checkpoint_contexts
from remat.debug import LiveBytes

STEPS = int(os.environ.get("REMAT_SOAK_STEPS", "12"))
EXCEPTIONS = max(STEPS // 20, 4)  # for each program and source: there are 36
WARM_UP = 4  # steps, in which torch imports, and caches fill

Gradients = dict[str, Tensor]
Way = Callable[[Any], Any]


class Ticks:
    """Raises an error when it has been called so many times."""

    def __init__(self) -> None:
        self.left = -1
        self.count = 0
        self.error: BaseException = ValueError("mine")

    def __call__(self) -> None:
        self.count += 1
        self.left -= 1
        if self.left == 0:
            raise self.error


IN_BLOCKS = Ticks()


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), norm

    def forward(self, x: Tensor) -> Tensor:
        IN_BLOCKS()
        y = torch.tanh(self.linear(x))
        IN_BLOCKS()
        y = self.norm(F.dropout(y, 0.2))
        IN_BLOCKS()
        return x + y


class Model(nn.Module):
    """Two blocks, each in the same `way`."""

    def __init__(self, way: Way, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(norm(6)) for _ in range(2)).double()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.way(block)(x)
        return x.square().sum()


def of_model(model: Model) -> Callable[[Gradients, Tensor], Tensor]:
    return lambda params, x: functional_call(model, params, (x,))


def by_backward(model: Model) -> Gradients:
    model.zero_grad()
    model(numbers(4, 6)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def detached(model: Model) -> Gradients:
    return {name: p.detach() for name, p in model.named_parameters()}


def by_grad(model: Model) -> Gradients:
    return grad(of_model(model))(detached(model), numbers(4, 6))


def per_sample(model: Model) -> Gradients:
    samples = vmap(grad(of_model(model)), (None, 0), randomness="different")(detached(model), numbers(3, 4, 6))
    return {name: g.sum(0) for name, g in samples.items()}


def forward_over_reverse(model: Model) -> Gradients:
    params = detached(model)
    return jvp(lambda params: grad(of_model(model))(params, numbers(4, 6)), (params,), (params,))[1]


def reverse_over_reverse(model: Model) -> Gradients:
    def penalty(params: Gradients) -> Tensor:
        gradients = grad(of_model(model))(params, numbers(4, 6))
        return torch.stack([g.square().sum() for g in gradients.values()]).sum()

    return grad(penalty)(detached(model))


def looped(f: Any, carry: Any, xs: Tensor, **_: Any) -> Any:
    for x in xs:
        carry, _ = f(carry, x)
    return carry, None


def scanned(model: Model) -> Gradients:
    scan = looped if model.way is plain else partial(remat.scan, checkpoints=2)
    model.zero_grad()
    carry, _ = scan(lambda c, x: (model.blocks[1](model.blocks[0](c)) * x, None), numbers(4, 6), numbers(7, 1))
    carry.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


dots = policies.dots_saveable
selective = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def reentrant(fun: Any) -> Any:
    return lambda x: checkpoint(fun, x if x.requires_grad else leaf(x), use_reentrant=True)


# Each step of training, and how its blocks are checkpointed.
PROGRAMS: dict[str, tuple[Callable[[Model], Gradients], Way, type[nn.Module]]] = {
    ".backward()": (by_backward, remat.remat, nn.BatchNorm1d),
    "grad": (by_grad, remat.remat, nn.LayerNorm),
    "vmap(grad)": (per_sample, remat.remat, nn.LayerNorm),
    "jvp(grad)": (forward_over_reverse, remat.remat, nn.Identity),  # torch does that of norms in TorchScript
    "grad(grad)": (reverse_over_reverse, remat.remat, nn.LayerNorm),
    "a policy": (by_backward, remat.remat(policy=dots), nn.BatchNorm1d),
    "a policy, vmap(grad)": (per_sample, remat.remat(policy=dots), nn.LayerNorm),
    "scan": (scanned, remat.remat, nn.LayerNorm),
    "checkpoint": (by_backward, lambda f: partial(checkpoint, f, use_reentrant=False), nn.BatchNorm1d),
    "checkpoint, grad": (by_grad, lambda f: partial(checkpoint, f, use_reentrant=False), nn.LayerNorm),
    "checkpoint, reentrant": (by_backward, reentrant, nn.BatchNorm1d),
    "checkpoint, selective": (
        by_backward,
        lambda f: partial(checkpoint, f, use_reentrant=False, context_fn=selective),
        nn.BatchNorm1d,
    ),
}
EACH = pytest.mark.parametrize("program", PROGRAMS)


@pytest.mark.usefixtures("no_gc")
@EACH
def test_training_leaves_nothing(program: str) -> None:
    """No storage and no Python object, with gc off."""
    step, way, norm = PROGRAMS[program]
    model = Model(way, norm)

    def train(steps: int) -> None:
        for _ in range(steps):
            gradients = step(model)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p -= 1e-3 * gradients[name]

    def count() -> int:
        train(STEPS)
        model.zero_grad()
        return len(gc.get_objects())

    def objects() -> int:
        """How many more there are after some steps. A leak is in each window; what else runs here (xdist) is not."""
        counts = [count() for _ in range(4)]
        return min(after - before for before, after in pairwise(counts))

    train(WARM_UP)
    ours = objects()
    with LiveBytes() as meter:
        train(STEPS)
        model.zero_grad()
        assert meter.current == 0
    model = Model(plain, norm)
    train(WARM_UP)
    assert ours <= objects()  # torch's own transforms leave some


class Stop(BaseException):
    """As KeyboardInterrupt: no Exception."""


class AtDispatch(TorchDispatchMode):
    """Calls `tick` before each op."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self.tick = tick

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tick()
        return func(*args, **(kwargs or {}))


class AtFunction(TorchFunctionMode):
    """Calls `tick` before each torch call, but not where `no_grad` ends: an error there leaves it on, torch's too."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self.tick = tick

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._C._set_grad_enabled:
            self.tick()
        return func(*args, **(kwargs or {}))


def surroundings(model: Model) -> tuple[Any, ...]:
    """What an exception must not change."""
    return (
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_all_disabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.autograd.forward_ad._current_level,
        torch._C._is_fwd_grad_enabled(),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        is_rerunning(),
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        [(name, id(b)) for name, b in model.named_buffers()],
    )


def state(model: Model) -> tuple[bytes, ...]:
    """What a forward changes, and a rerun must not."""
    return (
        torch.get_rng_state().numpy().tobytes(),
        *(b.detach().numpy().tobytes() for b in model.buffers()),
    )


@pytest.mark.parametrize("source", ["op", "torch call", "own code"])
@EACH
def test_exceptions_leave_torch_as_it_was(program: str, source: str) -> None:
    """At random ops of the forward, the backward and the reruns."""
    step, way, norm = PROGRAMS[program]
    model, without = Model(way, norm), Model(plain, norm)
    beginning = {name: b.clone() for name, b in model.named_buffers()}
    ticks = IN_BLOCKS if source == "own code" else Ticks()
    ticks.left = -1

    def run(model: Model, tick: Callable[[], None] | None = None) -> Gradients:
        torch.manual_seed(1)
        model.load_state_dict(beginning, strict=False)
        if tick is None or source == "own code":
            return step(model)
        with (AtDispatch if source == "op" else AtFunction)(tick):
            return step(model)

    reached = set()  # the states that the plain forward goes through
    torch.manual_seed(1)
    with AtDispatch(lambda: reached.add(state(without))):
        expected = step(without)
    reached.add(state(without))
    assert_same(run(model), expected)
    before, ticks.count = surroundings(model), 0
    run(model, ticks)
    choices = random.Random(0)
    for _ in range(EXCEPTIONS):
        ticks.left = choices.randint(1, ticks.count)
        ticks.error = choices.choice([ValueError, KeyboardInterrupt, Stop])("mine")
        at, ticks.count = ticks.left, 0
        with pytest.raises(type(ticks.error), match="mine"):
            run(model, ticks)
        assert surroundings(model) == before, f"{at} of {ticks.count}"
        assert state(model) in reached, at
        ticks.left, ticks.count = -1, 0
        assert_same(run(model, ticks), expected)


@pytest.mark.parametrize("in_rerun", [False, True], ids=["forward", "rerun"])
def test_ctrl_c_while_torch_has_put_the_mode_aside(in_rerun: bool) -> None:
    """Torch takes a mode off its stack for each torch call, and Ctrl-C can come before it has put it back."""

    def fun(x: Tensor) -> Tensor:
        if is_rerunning() is in_rerun:
            torch.overrides._pop_mode()
            raise KeyboardInterrupt("mine")
        return x.sin()

    x = leaf(numbers(3))
    with AtFunction(lambda: None), pytest.raises(KeyboardInterrupt, match="mine"):
        remat.remat(fun)(x).sum().backward()
    assert torch._C._len_torch_function_stack() == 0
    remat.remat(torch.sin)(x).sum().backward()
    assert_same(x.grad, x.detach().cos())


def test_ctrl_c_while_torch_puts_the_mode_back() -> None:
    """Then torch puts it back when the error is gone, after the call is over."""
    w = leaf(numbers(3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    fun = remat.remat(lambda x: torch.nn.functional.dropout(x * w, 0.0))

    puts_back = torch.overrides.handle_torch_function.__code__

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__exit__" and frame.f_back.f_code is puts_back:
            sys.setprofile(None)
            raise KeyboardInterrupt("mine")

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt, match="mine"):
            fun(numbers(3))
    finally:
        sys.setprofile(None)
    optimizer.step()  # it writes to a parameter, outside of the function
    fun(numbers(3)).sum().backward()
    assert torch._C._len_torch_function_stack() == 0
    assert_same(w.grad, numbers(3))
