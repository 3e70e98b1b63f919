"""The transformer that several benchmarks measure: in torch, with each block under checkpointing; and in jax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from _common import NOT_INSTALLED, Fun, Jitted, Run
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

from remat import checkpoint_name

Params = dict[str, Tensor]


class Block(nn.Module):
    """Self-attention, then an MLP. `fused`: attention is one op, such as flash attention."""

    def __init__(self, width: int, heads: int, *, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (..., tokens, width), as is the result
        x = x + self.out(checkpoint_name(self.attend(self.norm1(x)), "attention"))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            checkpoint_name(self.qkv(x), "qkv").unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)  # (..., heads, tokens, tokens)
            mixed = weights @ v
        return mixed.transpose(-3, -2).flatten(-2)


class Transformer(nn.Module):
    """Blocks in a row, each called in the same `way`."""

    def __init__(self, depth: int, width: int, heads: int, *, fused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, fused=fused) for _ in range(depth))
        self.way: Callable[[Fun], Fun] = lambda fun: fun

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.way(block)(x)
        return x


def params_of(model: nn.Module) -> Params:
    return {name: p.detach() for name, p in model.named_parameters()}


def loss(model: Transformer, way: Callable[[Fun], Fun]) -> Callable[[Params, Tensor], Tensor]:
    def of(params: Params, x: Tensor) -> Tensor:
        model.way = way
        return functional_call(model, params, (x,)).square().mean()

    return of


def backward(model: Transformer, x: Tensor, way: Callable[[Fun], Fun]) -> Run:
    """All gradients by `.backward()`."""
    x = x.detach().clone().requires_grad_()

    def run() -> None:
        model.way = way
        model(x).square().mean().backward()
        x.grad = None
        model.zero_grad()

    return run


def gradient(model: Transformer, x: Tensor, way: Callable[[Fun], Fun]) -> Run:
    """The same by `torch.func.grad`."""
    return functools.partial(grad(loss(model, way), argnums=(0, 1)), params_of(model), x)


def per_sample_gradients(model: Transformer, x: Tensor, way: Callable[[Fun], Fun]) -> Run:
    return functools.partial(vmap(grad(loss(model, way)), in_dims=(None, 0)), params_of(model), x)


def hessian_vector_product(model: Transformer, x: Tensor, way: Callable[[Fun], Fun]) -> Run:
    params = params_of(model)
    direction = {name: torch.randn_like(p) for name, p in params.items()}
    return lambda: jvp(lambda params: grad(loss(model, way))(params, x), (params,), (direction,))


def in_jax(depth: int, width: int, heads: int, batch: int, tokens: int) -> dict[str, Run | str]:
    """The gradient of the same model in jax, without and with `jax.checkpoint` of each block."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return {"jax, jitted": NOT_INSTALLED, "jax.checkpoint, jitted": NOT_INSTALLED}

    def norm(p: dict[str, Any], x: jax.Array) -> jax.Array:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p["scale"] + p["shift"]

    def linear(p: dict[str, Any], x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"]

    def block(p: dict[str, Any], x: jax.Array) -> jax.Array:
        qkv = linear(p["qkv"], norm(p["norm1"], x)).reshape(batch, tokens, 3, heads, width // heads)
        q, k, v = jnp.moveaxis(qkv, (2, 3), (0, 2))  # each (batch, heads, tokens, width of a head)
        weights = jax.nn.softmax(q @ k.mT / math.sqrt(width // heads))
        x = x + linear(p["out"], jnp.moveaxis(weights @ v, 1, 2).reshape(batch, tokens, width))
        return x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["norm2"], x)), approximate=False))

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape) / math.sqrt(shape[0])

    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: {"w": random(*shape), "b": jnp.zeros(shape[1])} for name, shape in sizes.items()}
    params |= {name: {"scale": jnp.ones(width), "shift": jnp.zeros(width)} for name in ("norm1", "norm2")}
    x = random(batch, tokens, width)

    def gradient(block: Fun) -> Jitted:
        def loss(stack: list[Any], x: jax.Array) -> jax.Array:
            for p in stack:
                x = block(p, x)
            return jnp.square(x).mean()

        return Jitted(jax.grad(loss, argnums=(0, 1)), [params] * depth, x)

    return {"jax, jitted": gradient(block), "jax.checkpoint, jitted": gradient(jax.checkpoint(block))}
