"""Samplers: their distributions, batches of keys, derivatives, and what they refuse."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import remat.random as rr
from remat.random import key, split

N = 20_000
ndtr, gammainc = torch.special.ndtr, torch.special.gammainc


def half_gamma(a: float) -> Callable[[Tensor], Tensor]:
    return lambda x: gammainc(torch.tensor(a, dtype=x.dtype), x)


def of_square(cdf_of_size: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The distribution function of a symmetric number from that of its size."""
    return lambda x: (1 + x.sign() * cdf_of_size(x.abs())) / 2


def wald(mu: float) -> Callable[[Tensor], Tensor]:
    def cdf(x: Tensor) -> Tensor:
        return ndtr((x / mu - 1) / x.sqrt()) + math.exp(2 / mu) * ndtr(-(x / mu + 1) / x.sqrt())

    return cdf


CONTINUOUS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "uniform": (lambda k: rr.uniform(k, N, minval=-1.0, maxval=3.0), lambda x: (x + 1) / 4),
    "uniform float16": (lambda k: rr.uniform(k, N, torch.float16), lambda x: x + 2**-11),
    "normal": (lambda k: rr.normal(k, N), ndtr),
    "normal float64": (lambda k: rr.normal(k, N, torch.float64), ndtr),
    "truncated_normal": (
        lambda k: rr.truncated_normal(k, -1.0, 2.0, (N,)),
        lambda x: (ndtr(x) - ndtr(x.new_tensor(-1))) / (ndtr(x.new_tensor(2)) - ndtr(x.new_tensor(-1))),
    ),
    "multivariate_normal": (
        lambda k: rr.multivariate_normal(k, torch.ones(2), torch.tensor([[4.0, 1], [1, 3]]), (N,)).sum(-1),
        lambda x: ndtr((x - 2) / 3),
    ),
    "lognormal": (lambda k: rr.lognormal(k, 0.5, (N,)), lambda x: ndtr(x.log() / 0.5)),
    "maxwell": (lambda k: rr.maxwell(k, N), lambda x: half_gamma(1.5)(x**2 / 2)),
    "double_sided_maxwell": (
        lambda k: rr.double_sided_maxwell(k, 1.0, 2.0, (N,)),
        lambda x: of_square(lambda y: half_gamma(1.5)(y**2 / 2))((x - 1) / 2),
    ),
    "orthogonal": (lambda k: rr.orthogonal(k, 3, (N,))[:, 0, 0], lambda x: (x + 1) / 2),  # Archimedes
    "exponential": (lambda k: rr.exponential(k, N), lambda x: 1 - (-x).exp()),
    "gumbel": (lambda k: rr.gumbel(k, N), lambda x: (-(-x).exp()).exp()),
    "gumbel high": (lambda k: rr.gumbel(k, N, mode="high"), lambda x: (-(-x).exp()).exp()),
    "laplace": (lambda k: rr.laplace(k, N), of_square(lambda x: 1 - (-x).exp())),
    "logistic": (lambda k: rr.logistic(k, N), torch.sigmoid),
    "cauchy": (lambda k: rr.cauchy(k, N), lambda x: 0.5 + x.atan() / math.pi),
    "pareto": (lambda k: rr.pareto(k, 3.0, (N,)), lambda x: 1 - x**-3),
    "rayleigh": (lambda k: rr.rayleigh(k, 2.0, (N,)), lambda x: 1 - (-(x**2) / 8).exp()),
    "weibull_min": (lambda k: rr.weibull_min(k, 2.0, 1.5, (N,)), lambda x: 1 - (-((x / 2) ** 1.5)).exp()),
    "triangular": (
        lambda k: rr.triangular(k, 0.0, 1.0, 3.0, (N,)),
        lambda x: torch.where(x < 1, x**2 / 3, 1 - (3 - x) ** 2 / 6),
    ),
    "wald": (lambda k: rr.wald(k, 1.5, (N,)), wald(1.5)),
    "gamma 0.3": (lambda k: rr.gamma(k, 0.3, (N,)), half_gamma(0.3)),
    "gamma 1": (lambda k: rr.gamma(k, 1.0, (N,)), half_gamma(1.0)),
    "gamma 9": (lambda k: rr.gamma(k, 9.0, (N,)), half_gamma(9.0)),
    "gamma bfloat16": (
        lambda k: rr.gamma(k, 900.0, (N,), torch.bfloat16) + rr.uniform(k, N) * 4 - 2,
        half_gamma(900.0),
    ),
    "loggamma": (lambda k: rr.loggamma(k, 0.01, (N,)), lambda x: half_gamma(0.01)(x.exp())),
    "chisquare": (lambda k: rr.chisquare(k, 5.0, (N,)), lambda x: half_gamma(2.5)(x / 2)),
    "beta": (lambda k: rr.beta(k, 3.0, 1.0, (N,)), lambda x: x**3),
    "beta small": (lambda k: rr.beta(k, 1.0, 0.2, (N,), torch.float64), lambda x: 1 - (1 - x) ** 0.2),
    "dirichlet": (lambda k: rr.dirichlet(k, torch.tensor([1.0, 0.5, 1.5]), (N,))[:, 0], lambda x: 1 - (1 - x) ** 2),
    "f": (lambda k: rr.f(k, 2.0, 2.0, (N,)), lambda x: x / (1 + x)),
    "t 1": (lambda k: rr.t(k, 1.0, (N,)), lambda x: 0.5 + x.atan() / math.pi),
    "t 2": (lambda k: rr.t(k, 2.0, (N,)), lambda x: 0.5 + x / (2 * (2 + x**2).sqrt())),
    "generalized_normal": (lambda k: rr.generalized_normal(k, 3.0, (N,)), of_square(lambda x: half_gamma(1 / 3)(x**3))),
    "ball": (lambda k: rr.ball(k, 3, shape=(N,)).norm(dim=-1), lambda x: x**3),
    "ball 1": (lambda k: rr.ball(k, 2, 1, (N,)).abs().sum(-1), lambda x: x**2),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_kolmogorov_smirnov(name: str) -> None:
    sample, cdf = CONTINUOUS[name]
    for seed in (1, 2):
        x = sample(key(seed)).double().sort().values
        p = cdf(x)
        steps = torch.arange(N + 1, dtype=torch.float64) / N
        distance = max(float((p - steps[:-1]).max()), float((steps[1:] - p).max()))
        assert distance * N**0.5 < 1.95  # exceeded once in a thousand


def poisson(lam: float) -> Callable[[Tensor], Tensor]:
    return lambda k: (k * math.log(lam) - lam - torch.lgamma(k + 1)).exp()


def binomial(n: float, p: float) -> Callable[[Tensor], Tensor]:
    def pmf(k: Tensor) -> Tensor:
        ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        return (ways + k * math.log(p) + (n - k) * math.log1p(-p)).exp()

    return pmf


P = torch.tensor([0.1, 0.2, 0.3, 0.4])
DISCRETE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bernoulli": (lambda k: rr.bernoulli(k, 0.3, (N,)), lambda x: torch.where(x == 1, 0.3, 0.7)),
    "bernoulli high": (lambda k: rr.bernoulli(k, 0.3, (N,), "high"), lambda x: torch.where(x == 1, 0.3, 0.7)),
    "rademacher": (lambda k: rr.rademacher(k, N), lambda x: x * 0 + 0.5),
    "randint": (lambda k: rr.randint(k, N, -3, 4), lambda x: x * 0 + 1 / 7),
    "randint 64": (lambda k: rr.randint(k, N, -3, 4, torch.int64), lambda x: x * 0 + 1 / 7),
    "randint wide": (
        lambda k: rr.randint(k, N, -(2**63), 2**63 - 1, torch.int64) // 2**61,
        lambda x: x * 0 + 1 / 8,
    ),
    "choice": (lambda k: rr.choice(k, 5, (N,)), lambda x: x * 0 + 1 / 5),
    "choice p": (lambda k: rr.choice(k, 4, (N,), p=P), lambda x: P.double()[x.long()]),
    "choice without": (
        lambda k: vmap(lambda k: rr.choice(k, 4, (2,), replace=False, p=P))(split(k, N))[:, 0],
        lambda x: P.double()[x.long()],
    ),
    "permutation": (lambda k: vmap(lambda k: rr.permutation(k, 5))(split(k, N))[:, 2], lambda x: x * 0 + 1 / 5),
    "categorical": (lambda k: rr.categorical(k, P.log(), shape=(N,)), lambda x: P.double()[x.long()]),
    "categorical without": (
        lambda k: vmap(lambda k: rr.categorical(k, P.log(), shape=(2,), replace=False))(split(k, N))[:, 0],
        lambda x: P.double()[x.long()],
    ),
    "geometric": (lambda k: rr.geometric(k, 0.3, (N,)), lambda x: 0.3 * 0.7 ** (x - 1)),
    **{f"poisson {m}": (lambda k, m=m: rr.poisson(k, m, (N,)), poisson(m)) for m in (0.3, 4.0, 11.0, 200.0)},
    **{
        f"binomial {n} {p}": (lambda k, n=n, p=p: rr.binomial(k, n, p, (N,)), binomial(n, p))
        for n, p in ((5, 0.2), (5, 0.9), (100, 0.3), (1000, 0.7))
    },
    "multinomial": (
        lambda k: vmap(lambda k: rr.multinomial(k, 9, P))(split(k, N))[:, 2],
        binomial(9, float(P[2])),
    ),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_chi_square(name: str) -> None:
    sample, pmf = DISCRETE[name]
    values, counts = sample(key(3)).double().unique(return_counts=True)
    expected = pmf(values).double() * N
    common = expected > 10
    statistic = ((counts - expected) ** 2 / expected)[common].sum()
    freedom = common.sum() - 1
    assert 1 - gammainc(freedom / 2, statistic / 2) > 1e-3
    assert abs(float(expected.sum()) / N - 1) < 0.01  # nothing impossible was drawn, nothing likely is missing


PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": lambda k: rr.bits(k, (5,)).to(torch.int64),
    "uniform range": lambda k: rr.uniform(k, (2, 3), minval=torch.zeros(3), maxval=torch.ones(2, 1)),
    "bernoulli tensor": lambda k: rr.bernoulli(k, torch.tensor([0.2, 0.7]), (5, 2)),
    "randint tensor": lambda k: rr.randint(k, (3, 2), torch.tensor([0, 5]), 9),
    "permutation": lambda k: rr.permutation(k, 100),
    "permutation rows": lambda k: rr.permutation(k, torch.arange(12).view(4, 3)),
    "permutation independent": lambda k: rr.permutation(k, torch.arange(12).view(4, 3), axis=1, independent=True),
    "choice rows": lambda k: rr.choice(k, torch.arange(12).view(4, 3), (2,), axis=1),
    "categorical rows": lambda k: rr.categorical(k, torch.eye(4)[:, :3], axis=0, shape=(5, 3)),
    "multivariate svd": lambda k: rr.multivariate_normal(k, torch.ones(2), torch.ones(2, 2), (3,), method="svd"),
    "multivariate eigh": lambda k: rr.multivariate_normal(k, torch.ones(2), torch.eye(2), method="eigh"),
    "gamma tensor": lambda k: rr.gamma(k, torch.tensor([0.2, 5.0]), (3, 2)),
    "poisson tensor": lambda k: rr.poisson(k, torch.tensor([0.2, 5.0, 50.0]), (3, 3)),
    "binomial tensor": lambda k: rr.binomial(k, torch.tensor([5.0, 500.0]), torch.tensor([[0.2], [0.7]])),
    "dropout": lambda k: rr.dropout(k, torch.ones(5, 4), 0.5, broadcast_dims=(1,)),
}


@pytest.mark.parametrize("name", [*CONTINUOUS, *DISCRETE, *PARAMETERS])
def test_a_batch_of_keys_is_the_loop_over_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "N", 40)
    sample = PARAMETERS.get(name) or (CONTINUOUS.get(name) or DISCRETE[name])[0]
    keys = split(key(4), 3)
    loop = torch.stack([sample(k) for k in keys])
    mapped = vmap(sample)(keys)
    if loop.is_floating_point() and name not in ("dropout", "uniform range"):
        # The same draws; how a vectorized function rounds may depend on where in memory a number stands.
        torch.testing.assert_close(mapped, loop, rtol=2e-3 if "16" in name else 1e-5, atol=1e-6)
    else:
        assert torch.equal(mapped, loop)
    if name not in ("orthogonal", "dirichlet", "multinomial") and "split" not in sample.__code__.co_names:
        torch.testing.assert_close(sample(keys), mapped, rtol=2e-3 if "16" in name else 1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize
@pytest.mark.parametrize("name", [*CONTINUOUS, *DISCRETE, *PARAMETERS])
def test_the_result_of_linearize_draws_the_same_each_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`linearize` keeps what does not depend on its argument, and calls the rest each time."""
    monkeypatch.setitem(globals(), "N", 40)
    sample = PARAMETERS.get(name) or (CONTINUOUS.get(name) or DISCRETE[name])[0]
    drawn, k = sample(key(4)), key(4)
    x = torch.ones(drawn.shape, dtype=torch.float64)
    _, push = torch.func.linearize(lambda x: x.sin() * sample(k), x)
    for _ in range(3):
        torch.testing.assert_close(push(x), x.cos() * drawn)


@pytest.mark.parametrize("name", ["normal", "uniform", "exponential", "gamma", "t", "gumbel", "cauchy", "wald"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    arguments = {"gamma": (2.0,), "t": (3.0,), "wald": (1.0,)}.get(name, ())
    out = getattr(rr, name)(key(0), *arguments, (50,), dtype)
    assert out.dtype == dtype
    assert out.isfinite().all()
    torch.set_default_dtype(torch.float64)
    try:
        assert getattr(rr, name)(key(0), *arguments, (5,)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_shapes() -> None:
    assert rr.normal(key(0)).shape == ()
    assert rr.normal(key(0), 3).shape == (3,)
    assert rr.normal(key(0), torch.Size([2, 0])).shape == (2, 0)
    assert rr.gamma(key(0), torch.ones(2), (0, 2)).shape == (0, 2)
    assert rr.poisson(key(0), 3.0, (0,)).shape == (0,)
    assert rr.permutation(key(0), 0).shape == (0,)
    assert rr.choice(key(0), 3, (0,)).shape == (0,)


def test_a_number_as_a_tensor() -> None:
    n = torch.tensor(5)
    assert torch.equal(rr.permutation(key(0), n), rr.permutation(key(0), 5))
    assert torch.equal(rr.choice(key(0), n, (9,)), rr.choice(key(0), 5, (9,)))
    assert torch.equal(rr.choice(key(0), n, (3,), replace=False), rr.choice(key(0), 5, (3,), replace=False))


def test_bounds_of_all_that_a_dtype_holds() -> None:
    def extremes(low: int, high: int, dtype: torch.dtype) -> tuple[int, int]:
        drawn = rr.randint(key(0), N, low, high, dtype).to(torch.int64)
        return int(drawn.min()), int(drawn.max())

    assert extremes(2**31 - 3, 2**31, torch.int32) == (2**31 - 3, 2**31 - 1)
    assert extremes(2**32 - 3, 2**32, torch.uint32) == (2**32 - 3, 2**32 - 1)
    assert extremes(-5, 3, torch.uint32) == (0, 2)


def test_a_chance_as_a_tensor_may_leave_the_unit_interval() -> None:
    p = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    assert rr.bernoulli(key(0), p, (50, 4)).all(0).tolist() == [False, False, True, True]
    assert rr.bernoulli(key(0), p, (50, 4)).any(0).tolist() == [False, False, True, True]


def test_derivatives_by_arithmetic() -> None:
    k = key(1)
    z = rr.normal(k, (3,))
    loc, scale = torch.tensor(2.0), torch.tensor(3.0)
    assert torch.equal(grad(lambda s: (loc + s * rr.normal(k, (3,))).sum())(scale), z.sum())
    low = torch.tensor([0.0, 1.0])
    u = rr.uniform(k, (2,))
    torch.testing.assert_close(grad(lambda a: rr.uniform(k, (2,), minval=a, maxval=3.0).sum())(low), 1 - u)
    for f in (
        lambda p: rr.pareto(k, p, (3,), torch.float64),
        lambda p: rr.rayleigh(k, p, (3,), torch.float64),
        lambda p: rr.lognormal(k, p, (3,), torch.float64),
        lambda p: rr.wald(k, p, (3,), torch.float64),
        lambda p: rr.truncated_normal(k, -p, p, (3,), torch.float64),
        lambda p: rr.triangular(k, 0.0, p, 3.0, (3,), torch.float64),
        lambda p: rr.multivariate_normal(k, p * torch.ones(2).double(), p * torch.eye(2).double(), (3,)),
    ):
        p = torch.tensor(1.5, dtype=torch.float64)
        by_hand = (f(p + 1e-6) - f(p - 1e-6)) / 2e-6
        torch.testing.assert_close(jacfwd(f)(p), by_hand, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(jacrev(f)(p), by_hand, rtol=1e-5, atol=1e-6)


def test_truncated_normal_is_differentiable_in_float32() -> None:
    def f(p: Tensor) -> Tensor:
        return rr.truncated_normal(key(1), -p, p, (3,))

    p = torch.tensor(1.5)
    by_hand = (f(p + 0.01) - f(p - 0.01)) / 0.02
    # torch 2.14 makes a float64 of it, as of jacfwd(lambda p: 0.5 * p)(p)
    torch.testing.assert_close(jacfwd(f)(p), by_hand, rtol=1e-3, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(jacrev(f)(p), by_hand, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("log", [False, True], ids=["gamma", "loggamma"])
def test_gamma_is_differentiable(log: bool) -> None:
    """The derivative of the sample that keeps its quantile, in every mode, against differences of the quantile."""
    sampler = rr.loggamma if log else rr.gamma
    a = torch.tensor([0.1, 0.7, 3.0, 50.0], dtype=torch.float64)

    def f(a: Tensor) -> Tensor:
        return sampler(key(5), a, dtype=torch.float64)

    x = f(a).exp() if log else f(a)
    h = 1e-6 * a
    slope = -(gammainc(a + h, x) - gammainc(a - h, x)) / (2 * h)
    slope = slope / ((a - 1) * x.log() - x - torch.lgamma(a)).exp()
    expected = slope / x if log else slope
    close = {"rtol": 1e-4, "atol": 1e-8}
    torch.testing.assert_close(grad(lambda a: f(a).sum())(a), expected, **close)
    torch.testing.assert_close(jvp(f, (a,), (torch.ones_like(a),))[1], expected, **close)
    torch.testing.assert_close(jacrev(f)(a), expected.diag(), **close)
    torch.testing.assert_close(jacfwd(f)(a), expected.diag(), **close)
    leaf = a.clone().requires_grad_()
    f(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, expected, **close)
    keys = split(key(5), 3)
    per_key = vmap(grad(lambda a, k: sampler(k, a, dtype=torch.float64).sum()), in_dims=(None, 0))(a, keys)
    alone = [grad(lambda a, k=k: sampler(k, a, dtype=torch.float64).sum())(a) for k in keys]
    torch.testing.assert_close(per_key, torch.stack(alone))
    for second in (lambda a: grad(lambda a: grad(lambda a: f(a).sum())(a).sum())(a), lambda a: jacfwd(jacrev(f))(a)):
        with pytest.raises(NotImplementedError, match="can be taken once"):  # never a silent zero
            second(a)


def test_what_is_made_of_gamma_is_differentiable() -> None:
    p = torch.tensor(1.5, dtype=torch.float64)
    for f in (
        lambda p: rr.beta(key(0), p, 2.0, (3,), torch.float64),
        lambda p: rr.dirichlet(key(0), p.expand(4), dtype=torch.float64),
        lambda p: rr.t(key(0), p, (3,), torch.float64),
        lambda p: rr.chisquare(key(0), p, (3,), torch.float64),
        lambda p: rr.generalized_normal(key(0), p, (3,), torch.float64),
    ):
        torch.testing.assert_close(jacrev(f)(p), jacfwd(f)(p))
        assert jacrev(f)(p).isfinite().all()


def test_dropout() -> None:
    x = torch.linspace(1, 2, 10_000)
    out = rr.dropout(key(0), x, 0.3)
    kept = out != 0
    assert abs(float(kept.float().mean()) - 0.7) < 0.02
    torch.testing.assert_close(out[kept], x[kept] / 0.7)
    assert torch.equal(rr.dropout(key(0), x, 0.0), x)
    strange = torch.tensor([1.0, math.inf, math.nan])
    assert torch.equal(rr.dropout(key(0), strange, 1.0), torch.zeros(3))
    assert torch.equal(grad(lambda x: rr.dropout(key(0), x, 1.0).sum())(strange), torch.zeros(3))
    assert torch.equal(
        grad(lambda x: rr.dropout(key(0), x, 0.5).sum())(torch.ones(9)), rr.dropout(key(0), torch.ones(9), 0.5)
    )
    maps = rr.dropout(key(0), torch.ones(4, 8, 5, 5), 0.5, broadcast_dims=(-2, -1))
    assert ((maps == 0).all((-2, -1)) | (maps == 2).all((-2, -1))).all()
    assert rr.dropout(key(0), x.bfloat16(), 0.5).dtype == torch.bfloat16
    keys = split(key(0), 3)
    each = torch.stack([rr.dropout(k, x, 0.5) for k in keys])
    assert torch.equal(vmap(rr.dropout, in_dims=(0, None))(keys, x), each)


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: rr.uniform(key(0), (-1,)),
        ValueError,
        r"uniform: shape must be an int >= 0, or a sequence of them; got \(-1,\)",
    ),
    (lambda: rr.uniform(key(0), 1.5), ValueError, "uniform: shape must be"),
    (
        lambda: rr.normal(key(0), (2,), torch.int32),
        ValueError,
        r"normal: dtype must be one of torch.float16.*got torch.int32",
    ),
    (lambda: rr.randint(key(0), (2,), 0, 3, torch.float32), ValueError, "randint: dtype must be one of torch.uint8"),
    (
        lambda: rr.randint(key(0), (2,), 0, 2**40),
        ValueError,
        r"randint: maxval must be in \[-2147483648, 2147483648\] for torch.int32; got 1099511627776",
    ),
    (lambda: rr.randint(key(0), (2,), -(2**40), 0), ValueError, "randint: minval must be in .*got -1099511627776"),
    (
        lambda: rr.randint(key(0), (2,), 0, 2**40, torch.int8),
        ValueError,
        "randint: maxval must be in .* for torch.int8",
    ),
    (lambda: rr.randint(key(0), (2,), 0, 2**63, torch.int64), ValueError, "randint: maxval must be in .*got 92233720"),
    (lambda: rr.randint(key(0), (2,), 0, 9, torch.uint64), ValueError, "randint: dtype must be one of"),
    (
        lambda: rr.randint(key(0), (2,), "a", 9),
        TypeError,
        "randint: minval must be an int or an integer tensor; got 'a' of type str",
    ),
    (
        lambda: rr.randint(key(0), 0, 10, (3,)),  # the order of torch
        TypeError,
        r"randint: maxval must be an int or .* tensor; got \(3,\) of type tuple. The order is randint\(key, shape",
    ),
    (lambda: rr.randint(key(0), (2,), 0.5, 9), TypeError, "minval must be an int .*got 0.5 of type float"),
    (lambda: rr.randint(key(0), (2,), 0, torch.tensor(9.5)), TypeError, r"maxval must be .*got a float32 tensor"),
    (
        lambda: rr.uniform(key(0), (2,), minval=(0, 1)),
        TypeError,
        r"uniform: the p.*got \(0, 1\) of type tuple, 1.0",
    ),
    (
        lambda: rr.poisson(key(0), (3,), 4.0),
        TypeError,
        r"poisson: the parameters must be numbers or .*; got \(3,\) of type tuple. Pass a shape by name: shape=\(...\)",
    ),
    (lambda: rr.bits(key(0), (2,), torch.int32), ValueError, "bits: dtype must be one of torch.uint8.*got torch.int32"),
    (lambda: rr.bernoulli(key(0), 1.5), ValueError, r"bernoulli: p must be a probability, in \[0, 1\]; got 1.5"),
    (lambda: rr.bernoulli(key(0), math.nan), ValueError, "bernoulli: p must be a probability"),
    (lambda: rr.bernoulli(key(0), torch.tensor(1)), TypeError, "bernoulli: p must be a floating tensor or a number"),
    (
        lambda: rr.bernoulli(key(0), 0.5, mode="medium"),
        ValueError,
        "bernoulli: mode must be 'low' or 'high'; got 'medium'",
    ),
    (lambda: rr.gumbel(key(0), mode="highest"), ValueError, "gumbel: mode must be"),
    (
        lambda: rr.gamma(key(0), torch.ones(3), (2,)),
        ValueError,
        r"gamma: the parameters must broadcast.*\(3,\).*shape=\(2,\)",
    ),
    (
        lambda: rr.beta(key(0), torch.ones(3), torch.ones(2)),
        ValueError,
        r"beta: the parameters must broadcast.*\(3,\), \(2,\)",
    ),
    (lambda: rr.poisson(key(0), torch.ones(3), ()), ValueError, "poisson: the parameters must broadcast"),
    (lambda: rr.dirichlet(key(0), torch.tensor(1.0)), ValueError, "dirichlet: alpha must be a tensor of shape"),
    (lambda: rr.permutation(key(0), 5, axis=1), ValueError, r"permutation: axis must be in \[-1, 1\).*got 1"),
    (
        lambda: rr.choice(key(0), torch.ones(3, 3), (2,), axis=2),
        ValueError,
        r"choice: axis must be in \[-2, 2\)",
    ),
    (lambda: rr.choice(key(0), 3, (4,), replace=False), ValueError, "choice: can't choose 4 of 3 without replacement"),
    (lambda: rr.choice(key(0), 0, (1,)), ValueError, "choice: can't choose 1 of 0"),
    (
        lambda: rr.choice(key(0), 3, p=torch.ones(4)),
        ValueError,
        r"choice: p must be a floating tensor of shape \(3,\).*got a float32 tensor of shape \(4,\)",
    ),
    (lambda: rr.choice(key(0), 2, p=[0.5, 0.5]), ValueError, r"choice: p must be.*got \[0.5, 0.5\] of type list"),
    (
        lambda: rr.choice(key(0), 2, p=torch.ones(2, dtype=torch.int64)),
        ValueError,
        "choice: p must.*got an int64 tensor",
    ),
    (
        lambda: rr.choice(key(0), [5, 6]),
        ValueError,
        r"choice: a must be a tensor.*int n >= 0.*got \[5, 6\] of type list",
    ),
    (lambda: rr.choice(key(0), -1, (2,)), ValueError, "choice: a must be .*got -1"),
    (lambda: rr.permutation(key(0), [5, 6]), ValueError, r"permutation: x must be a tensor.*got \[5, 6\] of type list"),
    (lambda: rr.permutation(key(0), 3.5), ValueError, "permutation: x must be .*got 3.5 of type float"),
    (lambda: rr.permutation(key(0), torch.tensor(2.0)), ValueError, "permutation: x must be .*got a float32 tensor"),
    (
        lambda: vmap(rr.permutation, in_dims=(None, 0))(key(0), torch.tensor([3, 3])),
        ValueError,
        "permutation: x must be .*not one that vmap maps over.*got an int64 tensor",
    ),
    (lambda: rr.categorical(key(0), [0.0, 1.0]), ValueError, "categorical: logits must be a floating tensor of shape"),
    (
        lambda: rr.categorical(key(0), torch.tensor(1.0)),
        ValueError,
        r"logits must be.*got a float32 tensor of shape \(\)",
    ),
    (
        lambda: rr.dirichlet(key(0), [1.0, 1.0]),
        ValueError,
        r"dirichlet: alpha must be a tensor.*got \[1.0, 1.0\] of type",
    ),
    (lambda: rr.gamma(key(0), "a"), TypeError, "gamma: the parameters must be numbers or tensors; got 'a' of type str"),
    (lambda: rr.uniform(key(0), maxval=None), TypeError, "uniform: the parameters must be numbers or tensors; got 0.0"),
    (
        lambda: rr.bernoulli(key(0), [0.5]),
        TypeError,
        r"bernoulli: p must be a floating tensor or a number; got \[0.5\]",
    ),
    (lambda: rr.ball(key(0), 2.5), ValueError, "ball: d must be an int >= 0; got 2.5 of type float"),
    (lambda: rr.ball(key(0), (2, 3)), ValueError, "ball: d must be an int >= 0"),
    (lambda: rr.orthogonal(key(0), 2.5), ValueError, "orthogonal: n must be an int >= 0; got 2.5 of type float"),
    (lambda: rr.orthogonal(key(0), 2, m=-1), ValueError, "orthogonal: m must be an int >= 0; got -1 of type int"),
    (lambda: rr.dropout(key(0), [1.0]), TypeError, r"dropout: x must be a floating tensor; got \[1.0\] of type list"),
    (
        lambda: rr.multivariate_normal(key(0), [0.0], torch.eye(1)),
        ValueError,
        r"multivariate_normal: mean must be a tensor of shape.*got \[0.0\] of type list and a float32 tensor of",
    ),
    (lambda: rr.categorical(key(0), torch.ones(3), axis=1), ValueError, "categorical: axis must be in"),
    (
        lambda: rr.categorical(key(0), torch.ones(3), shape=(4,), replace=False),
        ValueError,
        "categorical: can't draw 4 of 3 categories without replacement",
    ),
    (
        lambda: rr.multivariate_normal(key(0), torch.ones(2), torch.eye(3)),
        ValueError,
        "multivariate_normal: mean must be a tensor of shape",
    ),
    (
        lambda: rr.multivariate_normal(key(0), torch.ones(2).half(), torch.eye(2).half()),
        ValueError,
        "multivariate_normal: dtype must be one of torch.float32, torch.float64; got torch.float16",
    ),
    (
        lambda: rr.multivariate_normal(key(0), torch.ones(2), torch.eye(2), method="lu"),
        ValueError,
        "method must be one of cholesky, eigh, svd; got 'lu'",
    ),
    (
        lambda: rr.dropout(key(0), torch.ones(2), 1.5),
        ValueError,
        r"dropout: rate must be a probability, in \[0, 1\]; got 1.5",
    ),
    (lambda: rr.dropout(key(0), torch.ones(2), -0.1), ValueError, "dropout: rate must be"),
    (
        lambda: rr.dropout(key(0), torch.ones(2), broadcast_dims=(1,)),
        ValueError,
        r"broadcast_dims must be in \[-1, 1\)",
    ),
    (lambda: rr.split(key(0), -1), ValueError, "split: num must be an int >= 0, or a sequence of them; got -1"),
    (lambda: rr.split(key(0), 2.5), ValueError, "split: num must be .*got 2.5"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert str(caught.value).startswith("remat.random.")
