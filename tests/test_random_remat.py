"""Keys and remat together, in either order: the rerun draws what the forward drew."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from helpers import CountOps
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from remat import policies, remat
from remat.compat import checkpoint, create_selective_checkpoint_contexts
from remat.debug import LiveBytes
from remat.random import bernoulli, dropout, fold_in, key, keyed, next_key, normal, split, uniform

W = torch.linspace(-1, 1, 16).view(4, 4)
X = torch.linspace(0, 1, 12).view(3, 4)
KEYS = split(key(1), 3)


@pytest.fixture(autouse=True)
def _global_generators_untouched() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(state, torch.get_rng_state())


def stateful(w: Tensor, x: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w)).sin() * torch.rand(4) + w.sum() * normal(next_key(), (4,))


def with_a_key(k: Tensor, w: Tensor, x: Tensor) -> Tensor:
    a, b = split(k)
    return dropout(a, torch.tanh(x @ w)).sin() * uniform(b, (4,))


def checkpointed(fun: Callable[..., Tensor], **options: Any) -> Callable[..., Any]:
    return functools.partial(checkpoint, fun, **{"use_reentrant": False, **options})


selecting = functools.partial(create_selective_checkpoint_contexts, policies.dots_saveable)
Draws = Callable[[Tensor, Tensor, Tensor], Tensor]
ORDERS: dict[str, tuple[Draws, Draws]] = {
    "remat(keyed)": (remat(keyed(stateful)), keyed(stateful)),
    "keyed(remat)": (keyed(remat(stateful)), keyed(stateful)),
    "remat(keyed(remat))": (remat(keyed(remat(stateful))), keyed(stateful)),
    "keyed, remat twice": (
        keyed(lambda w, x: remat(stateful)(w, remat(stateful)(w, x))),
        keyed(lambda w, x: stateful(w, stateful(w, x))),
    ),
    "keyed, draws around remat": (
        keyed(lambda w, x: F.dropout(remat(stateful)(w, F.dropout(x))) * torch.rand(4)),
        keyed(lambda w, x: F.dropout(stateful(w, F.dropout(x))) * torch.rand(4)),
    ),
    "keyed, remat in vmap": (
        keyed(lambda w, x: vmap(remat(stateful), (None, 0), randomness="different")(w, x)),
        keyed(lambda w, x: vmap(stateful, (None, 0), randomness="different")(w, x)),
    ),
    "keyed(checkpoint)": (keyed(checkpointed(stateful)), keyed(stateful)),
    "keyed(checkpoint), reentrant": (keyed(checkpointed(stateful, use_reentrant=True)), keyed(stateful)),
    "keyed(checkpoint), selective": (keyed(checkpointed(stateful, context_fn=selecting)), keyed(stateful)),
    "keyed(remat(checkpoint))": (keyed(remat(checkpointed(stateful))), keyed(stateful)),
    "checkpoint(keyed)": (checkpointed(keyed(stateful)), keyed(stateful)),
    "a key as an argument": (remat(with_a_key), with_a_key),
    "a captured key": (lambda k, w, x: remat(lambda w, x: with_a_key(k, w, x))(w, x), with_a_key),
}


def backward(f: Draws) -> Any:
    w = W.clone().requires_grad_()
    f(key(0), w, X).square().sum().backward()
    return w.grad


TRANSFORMS: dict[str, Callable[[Draws], Any]] = {
    "backward": backward,
    "grad": lambda f: grad(lambda w: f(key(0), w, X).square().sum())(W),
    "vjp": lambda f: vjp(lambda w: f(key(0), w, X), W)[1](X),
    "jvp": lambda f: jvp(lambda w: f(key(0), w, X), (W,), (W,)),
    "vmap(grad) over keys": lambda f: vmap(grad(lambda w, k: f(k, w, X).square().sum()), (None, 0))(W, KEYS),
    "vmap(grad) over weights": lambda f: vmap(grad(lambda w: f(key(0), w, X).square().sum()))(torch.stack([W, W * 2])),
    "grad(vmap)": lambda f: grad(lambda w: vmap(f, (0, None, None))(KEYS, w, X).square().sum())(W),
    "grad(grad)": lambda f: grad(lambda w: grad(lambda w: (f(key(0), w, X) ** 3).sum())(w).sum())(W),
    "jvp(grad)": lambda f: jvp(grad(lambda w: f(key(0), w, X).square().sum()), (W,), (W,)),
    "jacrev": lambda f: jacrev(lambda w: f(key(0), w, X))(W),
    "jacfwd": lambda f: jacfwd(lambda w: f(key(0), w, X))(W),
    "hessian": lambda f: hessian(lambda w: f(key(0), w, X).square().sum())(W),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("order", ORDERS)
def test_either_order(order: str, transform: str) -> None:
    rerun, plain = ORDERS[order]
    run = TRANSFORMS[transform]
    ours, expected = optree.tree_leaves(run(rerun)), optree.tree_leaves(run(plain))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_stock_layer() -> None:
    with torch.random.fork_rng():
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    params = dict(layer.named_parameters())

    def loss(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda params, k, x: f(k, params, x[None]).square().sum()

    def forward(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, params, (x,))  # type: ignore[no-any-return]

    expected = vmap(grad(loss(keyed(forward))), (None, 0, 0))(params, KEYS[:2], torch.stack([X, X + 1]))
    for f in (remat(keyed(forward)), keyed(remat(forward))):
        ours = vmap(grad(loss(f)), (None, 0, 0))(params, KEYS[:2], torch.stack([X, X + 1]))
        for name in params:
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_draw_is_rerun_as_one_op() -> None:
    def f(w: Tensor) -> Tensor:
        return torch.where(bernoulli(key(0), 0.5, (4,)), w.sin().cos(), 0)

    with CountOps() as ops:
        grad(lambda w: remat(f)(w).sum())(W)
    assert ops["threefry_bernoulli"] == 2


def test_a_rerun_draws_as_its_forward_did_wherever_it_runs() -> None:
    def f(w: Tensor) -> Tensor:
        return F.dropout(w.sin()) * torch.rand(4)

    def gradient(out: Tensor) -> Tensor:
        return torch.autograd.grad(out.sum(), w)[0]

    def gradient_and_key(out: Tensor) -> tuple[Tensor, Tensor]:
        return gradient(out), next_key()

    w = W.clone().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = gradient(f(w))
        torch.manual_seed(0)
        from_global = remat(f)(w)
    ours, following = keyed(gradient_and_key)(key(5), from_global)
    assert torch.equal(ours, expected)
    assert torch.equal(following, fold_in(key(5), 0))  # the rerun takes no subkey
    ours, following = keyed(gradient_and_key)(key(5), keyed(remat(f))(key(3), w))
    assert torch.equal(ours, gradient(keyed(f)(key(3), w)))
    assert torch.equal(following, fold_in(key(5), 0))


def test_an_explicit_generator_is_wound_back_under_keyed() -> None:
    generator = torch.Generator()

    def f(w: Tensor) -> Tensor:
        return F.dropout(w.sin()) * torch.rand(4, generator=generator)

    def gradient(f: Draws) -> Tensor:
        generator.manual_seed(0)
        w = W.clone().requires_grad_()
        return torch.autograd.grad(f(key(0), w).sum(), w)[0]  # type: ignore[call-arg]

    assert torch.equal(gradient(keyed(remat(f))), gradient(keyed(f)))


def test_no_stash_of_the_generators_under_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stashed(device: torch.device) -> Tensor:
        raise AssertionError(device)

    def loss(w: Tensor) -> Tensor:
        return keyed(remat(lambda w: normal(next_key(), (4,)) * w.sin()))(key(0), w).sum()

    expected = grad(loss)(W)
    monkeypatch.setattr("remat._context.global_state", stashed)
    assert torch.equal(grad(loss)(W), expected)
    with pytest.raises(AssertionError):
        remat(torch.rrelu)(W)


def test_no_stash_is_kept_where_nothing_was_drawn() -> None:
    w = W.clone().requires_grad_()
    for fun in (lambda w: w.sin(), lambda w: keyed(F.dropout)(key(0), w)):
        node = remat(fun)(w).grad_fn
        call = node.link.fn.call if hasattr(node, "link") else node.call
        assert call.random is None


def test_memory() -> None:
    """Neither masks nor activations are kept."""
    w = torch.ones(256, 256)

    def block(w: Tensor) -> Tensor:
        return F.dropout(F.dropout(w.sin()).cos(), 0.1)

    def deep(block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def loss(w: Tensor) -> Tensor:
            for _ in range(10):
                w = block(w)
            return w.sum()

        return loss

    peaks = []
    for fun in (keyed(deep(block)), keyed(deep(remat(block)))):
        with LiveBytes() as meter:
            grad(fun, argnums=1)(key(0), w)
        peaks.append(meter.peak / w.nbytes)
    plain, rerun = peaks
    assert plain > 40
    assert rerun < 17


@pytest.mark.parametrize("fun", [keyed(remat(stateful)), remat(keyed(stateful)), keyed(stateful)])
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_leaks(fun: Callable[..., Tensor], backward: bool, no_gc: None) -> None:
    k, w = key(0), W.clone().requires_grad_()
    alive = [weakref.ref(k), weakref.ref(w)]
    out = fun(k, w, X)
    if backward:
        out.sum().backward()
    del out, k, w
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("policy", [policies.dots_saveable, policies.everything_saveable], ids=["dots", "all"])
def test_under_a_policy(policy: Any) -> None:
    for fun in (keyed(remat(stateful, policy=policy)), remat(keyed(stateful), policy=policy)):
        for transform in ("grad", "vmap(grad) over keys", "backward"):
            torch.testing.assert_close(TRANSFORMS[transform](fun), TRANSFORMS[transform](keyed(stateful)))
