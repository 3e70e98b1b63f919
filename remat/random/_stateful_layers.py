"""Rules for functions that layers call: initialization, dropout, attention, recurrence, pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.random._dropout import dropout
from remat.random._rules import DRAWS, NextKey, key_on, rule_for, write
from remat.random._uniform import bernoulli, uniform

# Initialization.


@rule_for("torch.nn.init.uniform_")
def _init_uniform_(
    next_key: NextKey, func: Any, tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: None = None
) -> Tensor:
    with torch.no_grad():
        return DRAWS[torch.Tensor.uniform_](next_key, func, tensor, a, b)


@rule_for("torch.nn.init.normal_")
def _init_normal_(
    next_key: NextKey, func: Any, tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: None = None
) -> Tensor:
    with torch.no_grad():
        return DRAWS[torch.Tensor.normal_](next_key, func, tensor, mean, std)


@rule_for("torch.nn.init.kaiming_uniform_")
def _init_kaiming_uniform_(
    next_key: NextKey,
    func: Any,
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: None = None,
) -> Tensor:
    if tensor.numel() == 0:
        return tensor
    fan = tensor[0].numel() if mode == "fan_in" else tensor[:, 0].numel()
    bound = torch.nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
    return _init_uniform_(next_key, func, tensor, -bound, bound)


# Dropout.


def _whole(x: Tensor) -> tuple[int, ...]:
    return ()


def _channels(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _dropout_rule(
    sample: Callable[..., Tensor], dims: Callable[[Tensor], tuple[int, ...]], in_place: bool
) -> Callable[..., Tensor]:
    def rule(next_key: NextKey, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return input
        dropped = sample(key_on(input.device, next_key), input, p, broadcast_dims=dims(input))
        return write(input, dropped) if in_place else dropped

    return rule


def _alpha_dropout(key: Tensor, x: Tensor, rate: float, *, broadcast_dims: Sequence[int] = ()) -> Tensor:
    """Klambauer et al., "Self-normalizing neural networks", NeurIPS 2017, arXiv:1706.02515."""
    dropped_to = -1.7580993408473766  # minus scale times alpha of SELU
    if rate == 1:
        return x * 0
    a = ((1 - rate) * (1 + rate * dropped_to**2)) ** -0.5
    kept = dropout(key, torch.ones_like(x), rate, broadcast_dims=broadcast_dims) > 0
    return torch.where(kept, x, dropped_to) * a - a * rate * dropped_to


for _name, _sample, _shared in (
    ("dropout", dropout, _whole),
    ("feature_dropout", dropout, _channels),
    ("alpha_dropout", _alpha_dropout, _whole),
    ("feature_alpha_dropout", _alpha_dropout, _channels),
):
    for _suffix in ("", "_"):
        rule_for(f"torch.{_name}{_suffix}")(_dropout_rule(_sample, _shared, in_place=bool(_suffix)))


@rule_for("torch.native_dropout")
def _native_dropout(next_key: NextKey, func: Any, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input, torch.ones_like(input, dtype=torch.bool)
    kept = bernoulli(key_on(input.device, next_key), 1 - p, input.shape)
    return torch.where(kept, input * (1 / (1 - p) if p < 1 else 0.0), 0), kept


@rule_for("torch.rrelu", "torch.nn.functional.rrelu_")
def _rrelu(
    next_key: NextKey,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> Tensor:
    if not training:
        return func(input, lower, upper, training)
    slope = uniform(key_on(input.device, next_key), input.shape, input.dtype, lower, upper)
    result = torch.where(input > 0, input, input * slope)
    return write(input, result) if func.__name__.endswith("_") else result


def _fractional_max_pool(dims: int) -> Callable[..., Any]:
    def rule(
        next_key: NextKey, func: Any, input: Tensor, *args: Any, _random_samples: Any = None, **kwargs: Any
    ) -> Any:
        if _random_samples is None:
            shape = (1 if input.ndim == dims + 1 else input.shape[0], input.shape[-dims - 1], dims)
            _random_samples = uniform(key_on(input.device, next_key), shape, input.dtype)
        return func(input, *args, _random_samples=_random_samples, **kwargs)

    return rule


for _dims in (2, 3):
    for _suffix in ("", "_with_indices"):
        rule_for(f"torch.nn.functional.fractional_max_pool{_dims}d{_suffix}")(_fractional_max_pool(_dims))


@rule_for("torch.nn.functional.scaled_dot_product_attention")
def _attention(
    next_key: NextKey,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    logits = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    return dropout(key_on(query.device, next_key), logits.softmax(-1), dropout_p) @ value


@rule_for("torch.lstm", "torch.gru", "torch.rnn_tanh", "torch.rnn_relu")
def _recurrent(next_key: NextKey, func: Any, data: Tensor, *args: Any) -> Any:
    """The layers one by one, with dropout between them."""
    packed = not isinstance(args[2], bool)
    sizes, args = (args[:1], args[1:]) if packed else ((), args)
    hidden, weights, biased, layers, rate, train, *rest = args
    if not train or rate == 0 or layers == 1:
        return func(data, *sizes, hidden, weights, biased, layers, rate, train, *rest)
    last: list[Sequence[Tensor]] = []
    states = zip(*(h.chunk(layers) for h in hidden), strict=True) if func.__name__ == "lstm" else hidden.chunk(layers)
    per_layer = len(weights) // layers
    for layer, state in enumerate(states):
        if layer:
            data = dropout(key_on(data.device, next_key), data, rate)
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        data, *final = func(data, *sizes, state, own, biased, 1, 0.0, train, *rest)
        last.append(final)
    return data, *(torch.cat(parts) for parts in zip(*last, strict=True))
