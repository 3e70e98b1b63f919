"""Random numbers from explicit keys: the functions and bits of `jax.random`, and keys for stateful code."""

from remat.random._continuous import (
    cauchy,
    exponential,
    gumbel,
    laplace,
    logistic,
    pareto,
    rayleigh,
    triangular,
    wald,
    weibull_min,
)
from remat.random._counts import binomial, geometric, multinomial, poisson
from remat.random._discrete import categorical, choice, permutation
from remat.random._dropout import dropout
from remat.random._gamma import ball, beta, chisquare, dirichlet, f, gamma, generalized_normal, loggamma, t
from remat.random._key import PRNGKey, clone, fold_in, key, key_data, split, wrap_key_data
from remat.random._keyed import keyed, next_key
from remat.random._normal import (
    double_sided_maxwell,
    lognormal,
    maxwell,
    multivariate_normal,
    normal,
    orthogonal,
    truncated_normal,
)
from remat.random._uniform import bernoulli, bits, rademacher, randint, uniform

__all__ = [
    "PRNGKey",
    "ball",
    "bernoulli",
    "beta",
    "binomial",
    "bits",
    "categorical",
    "cauchy",
    "chisquare",
    "choice",
    "clone",
    "dirichlet",
    "double_sided_maxwell",
    "dropout",
    "exponential",
    "f",
    "fold_in",
    "gamma",
    "generalized_normal",
    "geometric",
    "gumbel",
    "key",
    "key_data",
    "keyed",
    "laplace",
    "loggamma",
    "logistic",
    "lognormal",
    "maxwell",
    "multinomial",
    "multivariate_normal",
    "next_key",
    "normal",
    "orthogonal",
    "pareto",
    "permutation",
    "poisson",
    "rademacher",
    "randint",
    "rayleigh",
    "split",
    "t",
    "triangular",
    "truncated_normal",
    "uniform",
    "wald",
    "weibull_min",
    "wrap_key_data",
]
