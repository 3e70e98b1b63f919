"""Key threading: torch's stateful code as a pure function of a key."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from remat._errors import RematError
from remat.random import bernoulli, dropout, fold_in, key, keyed, next_key, normal, split, uniform
from remat.random._keyed import resumed, running

X = torch.linspace(-1, 1, 24).view(2, 3, 4)
IMAGE = torch.linspace(0, 1, 2 * 3 * 64).view(2, 3, 8, 8)


@pytest.fixture(autouse=True)
def _global_generators_untouched() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    assert torch.equal(state, torch.get_rng_state())


def modules() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    with torch.random.fork_rng():
        return {
            "Dropout": (nn.Dropout(), (X,)),
            "Dropout1d": (nn.Dropout1d(), (X,)),
            "Dropout2d": (nn.Dropout2d(), (IMAGE,)),
            "Dropout3d": (nn.Dropout3d(), (IMAGE[:, :, None],)),
            "AlphaDropout": (nn.AlphaDropout(), (X,)),
            "FeatureAlphaDropout": (nn.FeatureAlphaDropout(), (X,)),
            "RReLU": (nn.RReLU(), (X,)),
            "MultiheadAttention": (nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), (X, X, X)),
            "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (X,)),
            "TransformerDecoderLayer": (nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), (X, X)),
            "LSTM": (nn.LSTM(4, 5, 3, dropout=0.5, batch_first=True), (X,)),
            "LSTM bidirectional": (nn.LSTM(4, 5, 2, dropout=0.5, bidirectional=True), (X,)),
            "GRU": (nn.GRU(4, 5, 2, dropout=0.5), (X,)),
            "RNN": (nn.RNN(4, 5, 2, dropout=0.5), (X,)),
            "FractionalMaxPool2d": (nn.FractionalMaxPool2d(2, output_ratio=(0.7, 0.7)), (IMAGE,)),
        }


CALLS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "rand sizes": lambda: torch.rand(2, 3),
    "rand tuple": lambda: torch.rand((2, 3)),
    "rand size=": lambda: torch.rand(size=(2, 3), dtype=torch.float64),
    "rand complex": lambda: torch.rand(3, dtype=torch.complex64),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
    "randn": lambda: torch.randn(2, 3, dtype=torch.bfloat16),
    "randn complex": lambda: torch.randn(3, dtype=torch.complex128),
    "randint": lambda: torch.randint(10**6, (5,)),
    "randint low": lambda: torch.randint(-5, 10**6, (5,)),
    "randint names": lambda: torch.randint(low=3, high=10**6, size=(5,), dtype=torch.int32),
    "randint out": lambda: torch.randint(10**6, (3,), out=torch.empty(3, dtype=torch.int64)),
    "randperm": lambda: torch.randperm(20),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X, dtype=torch.float64),
    "randint_like": lambda: torch.randint_like(X, 10**6),
    "randint_like low": lambda: torch.randint_like(X, 2, 10**6),
    "bernoulli": lambda: torch.bernoulli(X.abs()),
    "bernoulli p": lambda: torch.bernoulli(X, 0.5),
    "Tensor.bernoulli": lambda: X.abs().bernoulli(),
    "multinomial": lambda: torch.multinomial(torch.ones(99), 4),
    "multinomial rows": lambda: torch.multinomial(torch.ones(2, 99), 4, replacement=True),
    "Tensor.multinomial": lambda: torch.ones(99).multinomial(3),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal tensors": lambda: torch.normal(X, X.abs()),
    "normal mean": lambda: torch.normal(X),
    "normal std": lambda: torch.normal(0.0, X.abs()),
    "poisson": lambda: torch.poisson(X.abs() * 90),
    "binomial": lambda: torch.binomial(torch.full((3,), 900.0), torch.tensor([0.1, 0.5, 0.9])),
    "uniform_": lambda: torch.empty(3).uniform_(2, 3),
    "uniform_ from": lambda: torch.empty(3).uniform_(**{"from": 1, "to": 2}),
    "normal_": lambda: torch.zeros(3).normal_(mean=1, std=2),
    "exponential_": lambda: torch.empty_like(X).exponential_(lambd=3.0),
    "cauchy_": lambda: X.new_empty(3).cauchy_(1.0),
    "log_normal_": lambda: X.new(3).log_normal_(),
    "geometric_": lambda: torch.zeros_like(X).geometric_(0.01),
    "bernoulli_": lambda: torch.full((30,), 0.0).bernoulli_(),
    "bernoulli_ tensor": lambda: torch.ones(30).bernoulli_(torch.full((30,), 0.5)),
    "random_": lambda: torch.empty(30).random_(),
    "random_ int": lambda: torch.empty(30, dtype=torch.int64).random_(),
    "random_ bool": lambda: torch.empty(30, dtype=torch.bool).random_(),
    "random_ to": lambda: torch.empty(30, dtype=torch.uint8).random_(9),
    "random_ from to": lambda: torch.empty(30, dtype=torch.int32).random_(-9, 9),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "gumbel_softmax hard": lambda: F.gumbel_softmax(X, hard=True),
    "rrelu": lambda: F.rrelu(X, training=True),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "attention causal": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5, is_causal=True),
    "attention mask": lambda: F.scaled_dot_product_attention(X, X, X, X @ X.mT, 0.5),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True),
    "svd_lowrank": lambda: torch.svd_lowrank(torch.arange(36.0).view(6, 6).sqrt(), 2, niter=0)[1],
    "init": lambda: nn.init.xavier_normal_(torch.empty(3, 3)),
    "init uniform": lambda: nn.init.uniform_(torch.empty(3), 1, 2),
    "init kaiming": lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "autograd.grad": lambda: torch.autograd.grad(
        F.dropout(X.clone().requires_grad_() * 2).sum() * 0 + _Noisy.apply(A).sum(), A
    ),
}
A = torch.ones(9, requires_grad=True)


class _Noisy(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * torch.rand_like(g)


D = torch.distributions
DISTRIBUTIONS: dict[str, Callable[[], D.Distribution]] = {
    "Bernoulli": lambda: D.Bernoulli(torch.full((40,), 0.5)),
    "Beta": lambda: D.Beta(torch.ones(2), 1.0),
    "Binomial": lambda: D.Binomial(900, torch.full((3,), 0.5)),
    "Categorical": lambda: D.Categorical(torch.ones(99)),
    "Cauchy": lambda: D.Cauchy(torch.zeros(2), 1.0),
    "ContinuousBernoulli": lambda: D.ContinuousBernoulli(torch.full((2,), 0.3)),
    "Dirichlet": lambda: D.Dirichlet(torch.ones(2)),
    "Exponential": lambda: D.Exponential(torch.ones(2)),
    "FisherSnedecor": lambda: D.FisherSnedecor(torch.ones(2), 3.0),
    "Gamma": lambda: D.Gamma(torch.ones(2), 1.0),
    "Geometric": lambda: D.Geometric(torch.full((2,), 0.01)),
    "Gumbel": lambda: D.Gumbel(torch.zeros(2), 1.0),
    "HalfNormal": lambda: D.HalfNormal(torch.ones(2)),
    "Kumaraswamy": lambda: D.Kumaraswamy(torch.ones(2), 1.0),
    "LKJCholesky": lambda: D.LKJCholesky(3),
    "Laplace": lambda: D.Laplace(torch.zeros(2), 1.0),
    "LowRankMultivariateNormal": lambda: D.LowRankMultivariateNormal(torch.zeros(2), torch.ones(2, 1), torch.ones(2)),
    "Multinomial": lambda: D.Multinomial(300, torch.ones(3)),
    "MultivariateNormal": lambda: D.MultivariateNormal(torch.zeros(2), torch.eye(2)),
    "NegativeBinomial": lambda: D.NegativeBinomial(300, torch.full((2,), 0.5)),
    "Normal": lambda: D.Normal(torch.zeros(2), 1.0),
    "OneHotCategorical": lambda: D.OneHotCategorical(torch.ones(99)),
    "Pareto": lambda: D.Pareto(torch.ones(2), 1.0),
    "Poisson": lambda: D.Poisson(torch.full((2,), 900.0)),
    "RelaxedBernoulli": lambda: D.RelaxedBernoulli(torch.ones(2), probs=torch.full((2,), 0.5)),
    "StudentT": lambda: D.StudentT(torch.full((2,), 3.0)),
    "Uniform": lambda: D.Uniform(torch.zeros(2), 1.0),
    "VonMises": lambda: D.VonMises(torch.zeros(2), torch.ones(2)),
    "Weibull": lambda: D.Weibull(torch.ones(2), 1.0),
}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def check_pure(fun: Callable[..., Any], *args: Any) -> None:
    pure = keyed(fun)
    first = pure(key(0), *args)
    torch.rand(3, generator=torch.Generator())  # the state of other generators is no input either
    assert same(pure(key(0), *args), first)
    assert not same(pure(key(1), *args), first)


def check_vmap(fun: Callable[..., Any], *args: Any) -> None:
    pure, keys = keyed(fun), split(key(2), 3)
    mapped = tensors(vmap(pure, in_dims=(0, *[None] * len(args)))(keys, *args))
    loop = [tensors(pure(k, *args)) for k in keys]
    for i, together in enumerate(mapped):
        torch.testing.assert_close(together, torch.stack([out[i] for out in loop]))


@pytest.mark.parametrize("name", modules())
def test_modules(name: str) -> None:
    module, args = modules()[name]
    check_pure(module, *args)
    if not isinstance(module, nn.RNNBase | nn.FractionalMaxPool2d):  # torch has no batching rule for these
        check_vmap(module, *args)
    module.eval()
    if name not in ("FractionalMaxPool2d",):
        assert same(keyed(module)(key(0), *args), keyed(module)(key(1), *args))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    with warnings.catch_warnings():
        check_pure(CALLS[name])
        if "autograd" not in name:
            warnings.filterwarnings("ignore", "There is a performance drop")  # torch's own code, under vmap
            check_vmap(CALLS[name])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_distributions(name: str) -> None:
    distribution = DISTRIBUTIONS[name]()
    check_pure(lambda: distribution.sample((3,)))
    if distribution.has_rsample:
        check_pure(lambda: distribution.rsample((3,)))
    if name not in ("Beta", "Dirichlet", "LKJCholesky", "VonMises"):  # not written for vmap
        check_vmap(distribution.sample)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_like_those_of_torch(name: str) -> None:
    with torch.random.fork_rng():
        stateful = tensors(CALLS[name]())
    for ours, torchs in zip(tensors(keyed(CALLS[name])(key(0))), stateful, strict=True):
        assert (ours.dtype, ours.shape, ours.requires_grad) == (torchs.dtype, torchs.shape, torchs.requires_grad)


def test_moments_are_those_of_torch() -> None:
    big = torch.zeros(40_000)
    for fill in (
        lambda: big.clone().uniform_(2, 5),
        lambda: big.clone().normal_(3, 2),
        lambda: big.clone().exponential_(2.0),
        lambda: big.clone().log_normal_(0.1, 0.3),
        lambda: big.clone().geometric_(0.4),
        lambda: big.clone().bernoulli_(0.3),
        lambda: big.clone().random_(3, 9),
        lambda: F.dropout(big + 1, 0.3),
        lambda: F.alpha_dropout(big + 1, 0.3, training=True),
        lambda: F.feature_alpha_dropout((big + 1).view(-1, 1, 1), 0.3, training=True),
        lambda: F.rrelu(big - 1, training=True),
        lambda: torch.poisson(big + 4),
        lambda: torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), 40_000, replacement=True).float(),
        lambda: torch.randn(40_000, dtype=torch.complex64).abs(),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            theirs = fill()
        ours = keyed(fill)(key(0))
        error = 6 * theirs.std() / 200
        assert (ours.mean() - theirs.mean()).abs() < error
        assert (ours.std() - theirs.std()).abs() < error


def test_without_randomness_nothing_changes() -> None:
    layer = modules()["TransformerEncoderLayer"][0]
    for part in layer.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    layer.self_attn.dropout = 0.0  # type: ignore[union-attr, assignment]
    torch.testing.assert_close(keyed(layer)(key(0), X), layer(X))
    lstm = nn.LSTM.__new__(nn.LSTM)
    with torch.random.fork_rng():
        lstm = nn.LSTM(4, 5, 3, dropout=1e-30, batch_first=True)
    out, (h, c) = keyed(lstm)(key(0), X)
    lstm.dropout = 0.0
    expected, (h0, c0) = lstm(X)
    for a, b in ((out, expected), (h, h0), (c, c0)):
        torch.testing.assert_close(a, b)
    packed = nn.utils.rnn.pack_padded_sequence(X, torch.tensor([3, 2]), batch_first=True)
    lstm.dropout = 1e-30
    torch.testing.assert_close(keyed(lstm)(key(0), packed)[0].data, lstm.eval()(packed)[0].data)
    mask = torch.tensor([[True, False, True]])
    plain = F.scaled_dot_product_attention(X, X, X, mask, scale=0.3)
    torch.testing.assert_close(
        keyed(lambda: F.scaled_dot_product_attention(X, X, X, mask, 1e-30, scale=0.3))(key(0)), plain
    )
    heads = torch.stack([X, X + 1], 1)
    grouped = F.scaled_dot_product_attention(heads, heads[:, :1], heads[:, :1], enable_gqa=True)
    torch.testing.assert_close(
        keyed(lambda: F.scaled_dot_product_attention(heads, heads[:, :1], heads[:, :1], None, 1e-30, enable_gqa=True))(
            key(0)
        ),
        grouped,
    )


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_draws_of_nothing() -> None:
    x = torch.ones(2, 3, 1, 1)
    for fun in (
        lambda: F.alpha_dropout(x, 1.0, training=True),
        lambda: F.rrelu(-x, training=False),
        lambda: torch.native_dropout(x, 0.5, False),
        lambda: nn.init.kaiming_uniform_(torch.empty(0, 3)),
    ):
        assert same(keyed(fun)(key(0)), fun())


def test_the_memory_format_of_a_draw() -> None:
    drawn = keyed(lambda: torch.randn_like(torch.ones(2, 3, 4, 5), memory_format=torch.channels_last))(key(0))
    assert drawn.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match=r"layout=torch\.sparse_coo.*Make a plain strided tensor"):
        keyed(lambda: torch.randn(3, layout=torch.sparse_coo))(key(0))


def test_each_draw_has_its_own_subkey() -> None:
    a, b, c = keyed(lambda: (F.dropout(torch.ones(9)), next_key(), torch.rand(2)))(key(0))
    assert torch.equal(a, dropout(fold_in(key(0), 0), torch.ones(9)))
    assert torch.equal(b, fold_in(key(0), 1))
    assert torch.equal(c, uniform(fold_in(key(0), 2), (2,)))
    inner = keyed(lambda: (keyed(torch.rand)(key(5), 2), torch.rand(2)))(key(0))
    assert torch.equal(inner[0], keyed(torch.rand)(key(5), 2))
    assert torch.equal(inner[1], keyed(torch.rand)(key(0), 2))  # an inner keyed function takes none of the outer's


def test_explicit_generators_are_left_alone() -> None:
    def draw() -> list[Tensor]:
        g = torch.Generator().manual_seed(0)
        return [torch.rand(3, generator=g), torch.empty(3).normal_(generator=g), torch.randperm(9, generator=g)]

    assert same(keyed(draw)(key(0)), draw())

    def fill() -> Tensor:
        return nn.init.normal_(torch.empty(3), 0.0, 1.0, torch.Generator().manual_seed(0))

    assert torch.equal(keyed(fill)(key(0)), fill())


def test_the_global_generator_is_no_explicit_one() -> None:
    check_pure(lambda: torch.rand(3, generator=torch.default_generator))
    check_pure(lambda: torch.empty(3).normal_(generator=torch.default_generator))
    check_pure(lambda: torch.randperm(99, generator=torch.default_generator))  # the default of random_split


def test_module_constructors() -> None:
    def make() -> list[Tensor]:
        return [p.detach() for p in nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 3), nn.Embedding(5, 4)).parameters()]

    check_pure(make)
    weight = keyed(make)(key(0))[0]
    assert weight.abs().max() <= 3**-0.5
    assert weight.std() > 0.2 * 3**-0.5


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: grad(lambda x: f(x).sum())(X),
    "vjp": lambda f: vjp(f, X)[1](X)[0],
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "jacrev": lambda f: jacrev(f)(X[0, 0]),
    "jacfwd": lambda f: jacfwd(f)(X[0, 0]),
    "hessian": lambda f: hessian(lambda x: (f(x) ** 2).sum())(X[0, 0]),
    "linearize": lambda f: linearize(f, X)[1](X),
    "functionalize": lambda f: functionalize(f)(X),
    "grad(grad)": lambda f: grad(lambda x: grad(lambda x: (f(x) ** 3).sum())(x).sum())(X),
    "vmap": lambda f: vmap(f)(X),
    "vmap(grad)": lambda f: vmap(grad(lambda x: (f(x) ** 2).sum()))(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_transforms(transform: str) -> None:
    """`keyed(f)` with its key is the function that multiplies by a mask fixed beforehand."""

    def by_mask(x: Tensor) -> Tensor:
        mask = bernoulli(fold_in(key(3), 0), 0.5, x.shape)
        return torch.where(mask, x.sin() * 2, 0)

    run = TRANSFORMS[transform]
    torch.testing.assert_close(run(lambda x: keyed(lambda x: F.dropout(x.sin()))(key(3), x)), run(by_mask))


def test_per_sample_gradients_of_a_stock_layer() -> None:
    layer = modules()["TransformerEncoderLayer"][0]
    params = dict(layer.named_parameters())

    def loss(k: Tensor, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (keyed(functional_call)(k, layer, params, (x[None],)) ** 2).sum()

    keys = split(key(0), 2)
    together = vmap(grad(loss, argnums=1), in_dims=(0, None, 0))(keys, params, X)
    for i in range(2):
        alone = grad(loss, argnums=1)(keys[i], params, X[i])
        for name in params:
            torch.testing.assert_close(together[name][i], alone[name], rtol=1e-4, atol=1e-5)


def test_ensembles() -> None:
    with torch.random.fork_rng():
        models = [nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(3)]
    params, buffers = stack_module_state(models)  # type: ignore[arg-type]

    def run(k: Tensor, params: Any, buffers: Any) -> Tensor:
        return keyed(functional_call)(k, models[0], (params, buffers), (X,))

    keys = split(key(0), 3)
    out = vmap(run)(keys, params, buffers)
    torch.testing.assert_close(out, torch.stack([keyed(m)(k, X) for m, k in zip(models, keys, strict=True)]))


def test_a_vmap_outside_does_not_touch_the_draws() -> None:
    f = keyed(lambda x: F.dropout(x))
    xs, keys = torch.ones(3, 8), split(key(0), 3)
    for randomness in ("error", "different", "same"):
        assert torch.equal(
            vmap(f, (None, 0), randomness=randomness)(key(1), xs), torch.stack([f(key(1), x) for x in xs])
        )
        assert torch.equal(vmap(f, (0, 0), randomness=randomness)(keys, xs), torch.stack([f(k, xs[0]) for k in keys]))


def test_a_vmap_inside_says_how_to_draw() -> None:
    xs = torch.ones(4, 64)
    same_ = keyed(lambda: vmap(F.dropout, randomness="same")(xs))(key(0))
    assert (same_ == same_[0]).all()
    assert torch.equal(same_[0], keyed(lambda: F.dropout(xs[0]))(key(0)))
    different = keyed(lambda: vmap(F.dropout, randomness="different")(xs))
    rows = different(key(0))
    assert len({tuple(row.tolist()) for row in rows}) == 4
    keys = split(key(0), 3)
    assert torch.equal(vmap(different)(keys), torch.stack([different(k) for k in keys]))
    nested = keyed(lambda: vmap(vmap(F.dropout, randomness="same"), randomness="different")(torch.ones(2, 3, 64)))(
        key(0)
    )
    assert (nested == nested[:, :1]).all()
    assert not torch.equal(nested[0], nested[1])
    chunks = keyed(lambda: vmap(F.dropout, randomness="different", chunk_size=2)(xs))(key(0))
    assert len({tuple(row.tolist()) for row in chunks}) == 4
    with pytest.raises(RematError, match=r"dropout draws under a vmap that does not allow it.*randomness='different'"):
        keyed(lambda: vmap(F.dropout)(xs))(key(0))


def test_next_key() -> None:
    assert torch.equal(keyed(lambda: normal(next_key(), (2,)))(key(0)), normal(fold_in(key(0), 0), (2,)))
    with torch.device("cpu"):  # another mode in between
        assert torch.equal(keyed(next_key)(key(0)), fold_in(key(0), 0))
    with pytest.raises(RematError, match="next_key: there is no next key"):
        next_key()
    with pytest.raises(RematError, match="no keyed function is running"), torch.device("cpu"):
        next_key()
    keys = split(key(0), 3)
    assert torch.equal(vmap(keyed(next_key))(keys), torch.stack([keyed(next_key)(k) for k in keys]))


def test_what_has_no_rule_is_an_error() -> None:
    for call, name in (
        (lambda: torch.ops.aten.rand.default([3]), r"aten\.rand\.default"),
        (lambda: torch.ops.aten.uniform_.default(torch.ones(3)), r"aten\.uniform_\.default"),
        (lambda: grad(lambda x: _DropsInForward.apply(x).sum())(torch.ones(3)), r"aten\.(bernoulli_|native_dropout)"),
    ):
        with pytest.raises(RematError, match=rf"keyed: {name}.*drew from the global generator of cpu.*next_key"):
            keyed(call)(key(0))
    assert keyed(lambda: torch.ops.aten.dropout.default(X, 0.5, False))(key(0)).shape == X.shape  # draws nothing


@torch.library.custom_op("tests::noisy", mutates_args=())
def _noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def test_what_draws_inside_of_an_op_is_an_error() -> None:
    """No mode sees what a custom op or a higher-order op runs."""
    with pytest.raises(RematError, match=r"keyed: tests\.noisy\.default drew from the global generator"):
        keyed(_noisy)(key(0), X)
    with pytest.raises(RematError, match="drew from the global generator"):
        keyed(lambda x: torch.cond(x.sum() < 9, torch.rand_like, torch.sin, (x,)))(key(0), X)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_higher_order_ops_run() -> None:
    assert torch.equal(keyed(lambda x: torch.cond(x.sum() < 9, torch.cos, torch.sin, (x,)))(key(0), X), X.cos())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_rerun_that_knows_nothing_of_keys_is_an_error(reentrant: bool) -> None:
    def drop(x: Tensor) -> Any:
        return checkpoint(F.dropout, x, use_reentrant=reentrant)

    x = X.clone().requires_grad_()
    with pytest.raises(RematError, match=r"dropout draws in a function under torch.utils.checkpoint.*Use remat\.remat"):
        keyed(drop)(key(0), x)
    out = checkpoint(keyed(F.dropout), key(0), x, use_reentrant=reentrant)  # this rerun begins from the key
    out.sum().backward()
    assert torch.equal(x.grad * x, out)


REFUSED: dict[str, Callable[[], object]] = {
    "uniform_": lambda: torch.empty(3).uniform_(3, 1),
    "normal_": lambda: torch.empty(3).normal_(0, -1),
    "exponential_": lambda: torch.empty(3).exponential_(0.0),
    "cauchy_": lambda: torch.empty(3).cauchy_(0, -1.0),
    "log_normal_": lambda: torch.empty(3).log_normal_(0, 0.0),
    "geometric_": lambda: torch.empty(3).geometric_(1.0),
    "bernoulli_": lambda: torch.empty(3).bernoulli_(1.5),
    "bernoulli": lambda: torch.bernoulli(torch.full((3,), 1.5)),
    "normal": lambda: torch.normal(X, -X.abs()),
    "poisson": lambda: torch.poisson(-torch.ones(3)),
    "multinomial": lambda: torch.multinomial(torch.tensor([1.0, float("nan")]), 1),
    "randint": lambda: torch.randint(5, 5, (3,)),
    "dropout": lambda: F.dropout(torch.ones(3, dtype=torch.int64)),
}


def test_what_can_not_be_called() -> None:
    with pytest.raises(TypeError, match=r"keyed: fun must be callable.*keyed\(fun\)\(key, x\); got 3 of type"):
        keyed(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    with torch.random.fork_rng(), pytest.raises(Exception):  # noqa: B017, PT011  # torch's own errors are of many kinds
        REFUSED[name]()
    with pytest.raises((ValueError, TypeError), match=rf"^remat\.random\.[a-z.: ]*{name}"):
        keyed(REFUSED[name])(key(0))


class _DropsInForward(torch.autograd.Function):
    """Where torch's functions are not offered to modes: under a transform."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.dropout(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_custom_functions_draw_from_the_key_outside_of_transforms() -> None:
    check_pure(_DropsInForward.apply, torch.ones(30))


def test_a_draw_in_place_into_what_all_keys_share() -> None:
    shared = torch.ones(8)
    with pytest.raises(RematError, match=r"in place.*the same for all keys.*out of place"):
        vmap(keyed(lambda: shared.uniform_()))(split(key(0), 3))
    keyed(lambda: shared.uniform_())(key(0))
    assert torch.equal(shared, uniform(fold_in(key(0), 0), (8,)))


def test_arguments() -> None:
    with pytest.raises(TypeError, match=r"keyed: a key is a uint32 tensor.*got a float32 tensor of shape \(2, 3, 4\)"):
        keyed(F.dropout)(X)
    with pytest.raises(TypeError, match=r"takes a single key.*torch.vmap\(keyed\(fun\)\).*\(3, 2\)"):
        keyed(F.dropout)(split(key(0), 3), X)
    assert keyed(lambda *a, **k: (a, k))(key(0), 1, b=2) == ((1,), {"b": 2})


def test_it_looks_like_the_function() -> None:
    def f(x: Tensor, *, p: float = 0.5) -> Tensor:
        """Drop."""
        return F.dropout(x, p)

    assert (keyed(f).__name__, keyed(f).__doc__) == ("f", "Drop.")
    assert list(inspect.signature(keyed(f)).parameters) == ["key", "x", "p"]
    assert next(iter(inspect.signature(keyed(nn.Dropout())).parameters)) == "key"
    assert next(iter(inspect.signature(keyed(uniform)).parameters)) == "key"


def test_errors_and_threads_leave_nothing_behind() -> None:
    def fail() -> None:
        torch.rand(2)
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        keyed(fail)(key(0))
    assert running() is None
    with torch.random.fork_rng():
        assert not torch.equal(torch.rand(3), torch.rand(3))

    import threading

    seen: list[Any] = []

    def other() -> None:
        seen.append(running())

    def run() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    keyed(run)(key(0))
    assert seen == [None]


def test_a_position_can_be_taken_down_and_resumed() -> None:
    def f() -> tuple[Any, Tensor]:
        torch.rand(3)
        return running().position(), torch.rand(3)

    position, drawn = keyed(f)(key(0))
    with resumed(key(0), position):
        assert torch.equal(torch.rand(3), drawn)
    assert running() is None

    positions = []

    def inner(x: Tensor) -> Tensor:
        positions.append(running().position())
        return F.dropout(x)

    drawn = keyed(lambda: vmap(inner, randomness="different")(torch.ones(3, 9)))(key(0))

    def again(x: Tensor) -> Tensor:
        with resumed(key(0), positions[0]):
            return F.dropout(x)

    assert torch.equal(vmap(again, randomness="different")(torch.ones(3, 9)), drawn)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled() -> None:
    torch._dynamo.reset()

    def f(k: Tensor, x: Tensor) -> Tensor:
        # Before 2.12, dynamo does not show modes that a tensor is made.
        noise = torch.rand if torch.__version__ >= (2, 12) else lambda n: torch.bernoulli(x[0] / n)
        return keyed(lambda x: F.dropout(x.sin()) + noise(3))(k, x)

    x = torch.ones(5, 3)
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(key(0), x), f(key(0), x))
    inside = torch.compile(lambda x: F.dropout(x))  # compiled code is run as it is written
    assert torch.equal(keyed(inside)(key(0), x), keyed(F.dropout)(key(0), x))
