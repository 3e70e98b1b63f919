"""Random numbers from explicit keys: the functions and bits of `jax.random`, and keys for stateful code."""

from remat.random._continuous import cauchy as cauchy
from remat.random._continuous import exponential as exponential
from remat.random._continuous import gumbel as gumbel
from remat.random._continuous import laplace as laplace
from remat.random._continuous import logistic as logistic
from remat.random._continuous import pareto as pareto
from remat.random._continuous import rayleigh as rayleigh
from remat.random._continuous import triangular as triangular
from remat.random._continuous import wald as wald
from remat.random._continuous import weibull_min as weibull_min
from remat.random._counts import binomial as binomial
from remat.random._counts import geometric as geometric
from remat.random._counts import multinomial as multinomial
from remat.random._counts import poisson as poisson
from remat.random._discrete import categorical as categorical
from remat.random._discrete import choice as choice
from remat.random._discrete import permutation as permutation
from remat.random._dropout import dropout as dropout
from remat.random._gamma import ball as ball
from remat.random._gamma import beta as beta
from remat.random._gamma import chisquare as chisquare
from remat.random._gamma import dirichlet as dirichlet
from remat.random._gamma import f as f
from remat.random._gamma import gamma as gamma
from remat.random._gamma import generalized_normal as generalized_normal
from remat.random._gamma import loggamma as loggamma
from remat.random._gamma import t as t
from remat.random._key import PRNGKey as PRNGKey
from remat.random._key import clone as clone
from remat.random._key import fold_in as fold_in
from remat.random._key import key as key
from remat.random._key import key_data as key_data
from remat.random._key import split as split
from remat.random._key import wrap_key_data as wrap_key_data
from remat.random._keyed import keyed as keyed
from remat.random._keyed import next_key as next_key
from remat.random._normal import double_sided_maxwell as double_sided_maxwell
from remat.random._normal import lognormal as lognormal
from remat.random._normal import maxwell as maxwell
from remat.random._normal import multivariate_normal as multivariate_normal
from remat.random._normal import normal as normal
from remat.random._normal import orthogonal as orthogonal
from remat.random._normal import truncated_normal as truncated_normal
from remat.random._uniform import bernoulli as bernoulli
from remat.random._uniform import bits as bits
from remat.random._uniform import rademacher as rademacher
from remat.random._uniform import randint as randint
from remat.random._uniform import uniform as uniform

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
