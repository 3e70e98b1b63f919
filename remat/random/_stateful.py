"""Rules for torch's samplers: factories, draws with tensors as parameters, draws into a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.random._continuous import cauchy, exponential
from remat.random._counts import binomial, geometric, poisson
from remat.random._discrete import categorical, permutation
from remat.random._gamma import dirichlet, gamma
from remat.random._normal import normal
from remat.random._rules import NextKey, key_on, require, rule_for, write
from remat.random._uniform import bernoulli, randint, uniform


def _sizes(args: Sequence[Any], size: Any) -> tuple[int, ...]:
    """The shape that a factory was given as `f(2, 3)`, `f((2, 3))` or `f(size=(2, 3))`."""
    if size is None:
        size = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    return tuple(size)


def _finish(
    sample: Tensor,
    out: Tensor | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    layout: torch.layout = torch.strided,
    memory_format: torch.memory_format | None = None,
    generator: None = None,
    **unknown: Any,
) -> Tensor:
    """Apply the other arguments of a factory to its result."""
    if unknown or layout != torch.strided:
        raise NotImplementedError(
            f"remat.random.keyed: a random factory function was given layout={layout} and {unknown}, for which there "
            "is no rule. Make a plain strided tensor first."
        )
    if memory_format not in (None, torch.preserve_format):
        sample = sample.contiguous(memory_format=memory_format)
    if pin_memory:
        sample = sample.pin_memory()
    if out is not None:
        return out.resize_(sample.shape).copy_(sample)
    return sample.requires_grad_() if requires_grad else sample


# Factories.


def _floats(
    sampler: Callable[..., Tensor], next_key: NextKey, shape: Sequence[int], dtype: torch.dtype, device: Any
) -> Tensor:
    key = key_on(device, next_key)
    if dtype.is_complex:  # a normal's variance is the sum of those of both parts
        parts = sampler(key, (*shape, 2), dtype.to_real())
        return torch.view_as_complex(parts * math.sqrt(0.5) if sampler is normal else parts)
    return sampler(key, shape, dtype)


def _factory(sampler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(
        next_key: NextKey, func: Any, *args: Any, size: Any = None, dtype: Any = None, device: Any = None, **rest: Any
    ) -> Tensor:
        out = rest.get("out")
        if out is not None:
            dtype, device = out.dtype, out.device
        dtype = dtype or torch.get_default_dtype()
        return _finish(_floats(sampler, next_key, _sizes(args, size), dtype, device), **rest)

    return rule


def _factory_like(sampler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rule(
        next_key: NextKey, func: Any, input: Tensor, *, dtype: Any = None, device: Any = None, **rest: Any
    ) -> Tensor:
        return _finish(_floats(sampler, next_key, input.shape, dtype or input.dtype, device or input.device), **rest)

    return rule


rule_for("torch.rand")(_factory(uniform))
rule_for("torch.randn")(_factory(normal))
rule_for("torch.rand_like")(_factory_like(uniform))
rule_for("torch.randn_like")(_factory_like(normal))


def _bounds(args: Sequence[Any], low: int | None, high: int | None) -> tuple[int, int, Sequence[Any]]:
    """The bounds given as `f(high, ...)`, `f(low, high, ...)` or by name, and the other arguments."""
    numbers = [arg for arg in args if isinstance(arg, int)]
    rest = args[len(numbers) :]
    if high is None:
        high = numbers.pop()
    if low is None:
        low = numbers.pop() if numbers else 0
    return low, high, rest


@rule_for("torch.randint")
def _randint(
    next_key: NextKey,
    func: Any,
    *args: Any,
    low: int | None = None,
    high: int | None = None,
    size: Any = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **rest: Any,
) -> Tensor:
    low, high, rest_of_args = _bounds(args, low, high)
    out = rest.get("out")
    if out is not None:
        dtype, device = out.dtype, out.device
    sample = _integers(key_on(device, next_key), _sizes(rest_of_args, size), low, high)
    return _finish(sample.to(dtype or torch.int64), **rest)


@rule_for("torch.randint_like")
def _randint_like(
    next_key: NextKey,
    func: Any,
    input: Tensor,
    *args: Any,
    low: int | None = None,
    high: int | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **rest: Any,
) -> Tensor:
    low, high, _ = _bounds(args, low, high)
    sample = _integers(key_on(device or input.device, next_key), input.shape, low, high)
    return _finish(sample.to(dtype or input.dtype), **rest)


def _integers(key: Tensor, shape: Sequence[int], low: int, high: int) -> Tensor:
    require("randint", f"low < high; got {low} and {high}", low < high)
    return randint(key, shape, low, high, torch.int64)


@rule_for("torch.randperm")
def _randperm(
    next_key: NextKey, func: Any, n: int, *, dtype: torch.dtype = torch.int64, device: Any = None, **rest: Any
) -> Tensor:
    return _finish(permutation(key_on(device, next_key), n).to(dtype), **rest)


# Draws with tensors as parameters.


@rule_for("torch.normal")
def _normal(
    next_key: NextKey,
    func: Any,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **rest: Any,
) -> Tensor:
    require("normal", "std >= 0", std >= 0)
    tensors = [p for p in (mean, std) if isinstance(p, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors)) if size is None else size
    device = tensors[0].device if tensors else device
    dtype = dtype or (torch.result_type(*(tensors * 2)[:2]) if tensors else torch.get_default_dtype())
    return _finish(_floats(normal, next_key, shape, dtype, device) * std + mean, **rest)


@rule_for("torch.bernoulli", "torch.Tensor.bernoulli")
def _bernoulli(next_key: NextKey, func: Any, input: Tensor, p: float | None = None, **rest: Any) -> Tensor:
    chance = input.detach() if p is None else p
    require("bernoulli", "probabilities in [0, 1]", (chance >= 0) & (chance <= 1))
    sample = bernoulli(key_on(input.device, next_key), chance, input.shape)
    return _finish(sample.to(input.dtype), **rest)


@rule_for("torch.multinomial", "torch.Tensor.multinomial")
def _multinomial(
    next_key: NextKey, func: Any, input: Tensor, num_samples: int, replacement: bool = False, **rest: Any
) -> Tensor:
    weights = (input >= 0).all(-1) & input.isfinite().all(-1) & (input > 0).any(-1)
    require("multinomial", "weights that are finite, >= 0 and not all zero", weights)
    logits, shape = input.detach().log(), (num_samples, *input.shape[:-1])
    sample = categorical(key_on(input.device, next_key), logits, shape=shape, replace=replacement, mode="high")
    return _finish(sample.movedim(0, -1), **rest)


@rule_for("torch.poisson")
def _poisson(next_key: NextKey, func: Any, input: Tensor, **rest: Any) -> Tensor:
    require("poisson", "rates >= 0", input >= 0)
    return _finish(poisson(key_on(input.device, next_key), input, dtype=torch.int64).to(input.dtype), **rest)


@rule_for("torch.binomial")
def _binomial(next_key: NextKey, func: Any, count: Tensor, prob: Tensor, **rest: Any) -> Tensor:
    return _finish(binomial(key_on(count.device, next_key), count, prob, dtype=count.dtype), **rest)


@rule_for("torch._standard_gamma")
def _gamma(next_key: NextKey, func: Any, input: Tensor, **rest: Any) -> Tensor:
    return gamma(key_on(input.device, next_key), input, dtype=input.dtype)


@rule_for("torch._sample_dirichlet")
def _dirichlet(next_key: NextKey, func: Any, input: Tensor, **rest: Any) -> Tensor:
    return dirichlet(key_on(input.device, next_key), input, dtype=input.dtype)


# Draws into a tensor.


def _in_place(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule that fills a tensor with `sample(key, tensor, *arguments)`."""

    def rule(next_key: NextKey, func: Any, self: Tensor, *args: Any, generator: None = None, **kwargs: Any) -> Tensor:
        return write(self, sample(key_on(self.device, next_key), self, *args, **kwargs))

    return rule


@rule_for("torch.Tensor.uniform_")
@_in_place
def _uniform_(key: Tensor, like: Tensor, from_: float = 0.0, to: float = 1.0, **from_by_name: float) -> Tensor:
    from_ = from_by_name.get("from", from_)
    require("uniform_", f"from <= to; got {from_} and {to}", from_ <= to)
    return uniform(key, like.shape, like.dtype, from_, to)


@rule_for("torch.Tensor.normal_")
@_in_place
def _normal_(key: Tensor, like: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    require("normal_", f"std >= 0; got {std}", std >= 0)
    return _floats(normal, lambda: key, like.shape, like.dtype, like.device) * std + mean


@rule_for("torch.Tensor.exponential_")
@_in_place
def _exponential_(key: Tensor, like: Tensor, lambd: float = 1.0) -> Tensor:
    require("exponential_", f"lambd > 0; got {lambd}", lambd > 0)
    # like torch's, never 0, because code takes the logarithm
    return exponential(key, like.shape, like.dtype).clamp(min=torch.finfo(like.dtype).eps / 2) / lambd


@rule_for("torch.Tensor.cauchy_")
@_in_place
def _cauchy_(key: Tensor, like: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    require("cauchy_", f"sigma > 0; got {sigma}", sigma > 0)
    return cauchy(key, like.shape, like.dtype) * sigma + median


@rule_for("torch.Tensor.log_normal_")
@_in_place
def _log_normal_(key: Tensor, like: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    require("log_normal_", f"std > 0; got {std}", std > 0)
    return (normal(key, like.shape, like.dtype) * std + mean).exp()


@rule_for("torch.Tensor.geometric_")
@_in_place
def _geometric_(key: Tensor, like: Tensor, p: float) -> Tensor:
    require("geometric_", f"p in (0, 1); got {p}", 0 < p < 1)
    return geometric(key, p, like.shape, torch.int64)


@rule_for("torch.Tensor.bernoulli_")
@_in_place
def _bernoulli_(key: Tensor, like: Tensor, p: float | Tensor = 0.5) -> Tensor:
    p = p.detach() if isinstance(p, Tensor) else p
    require("bernoulli_", "probabilities in [0, 1]", (p >= 0) & (p <= 1))
    return bernoulli(key, p, like.shape)


@rule_for("torch.Tensor.random_")
@_in_place
def _random_(key: Tensor, like: Tensor, *args: int | None, **by_name: int | None) -> Tensor:
    numbers = [arg for arg in (*args, by_name.get("from"), by_name.get("to")) if arg is not None]
    if numbers:
        low, high, _ = _bounds(numbers, None, None)
    elif like.dtype.is_floating_point:  # up to the largest range in which each integer is a float
        low, high = 0, 2 ** round(1 - math.log2(torch.finfo(like.dtype).eps)) + 1
    else:
        low, high = 0, 2 if like.dtype == torch.bool else min(torch.iinfo(like.dtype).max + 1, 2**63 - 1)
    return _integers(key, like.shape, low, high)
