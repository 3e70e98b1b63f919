"""Keys and remat together, in either order: the rerun draws what the forward drew."""

from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from helpers import CountOps
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from remat import remat
from remat.random import bernoulli, dropout, key, keyed, next_key, normal, split, uniform

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
