"""A small transformer that predicts the next character of a text, and the text: Python's own language reference."""

import math
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from remat import checkpoint_name

Params = dict[str, Tensor]


class Block(nn.Module):
    """A transformer block: causal self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (..., time, width), as is the result
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        future = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (..., heads, time, time)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = checkpoint_name((weights @ v).transpose(-3, -2).flatten(-2), "attention")
        return self.out(attended)


class CharTransformer(nn.Module):
    """Predicts each next character of a text. `run(block)` returns the function that runs in place of the block."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor, run: Callable[..., Callable[[Tensor], Tensor]]) -> Tensor:
        x = self.embedding(tokens) + self.position  # (..., time) -> (..., time, width)
        for block in self.blocks:
            x = run(block)(x)
        return self.head(x)  # (..., time, vocabulary)


def make_loss(model: CharTransformer, run: Callable[..., Callable[[Tensor], Tensor]]) -> Callable[..., Tensor]:
    """The loss as a function of the parameters and of tokens: one sequence, or a batch of them."""

    def loss(params: Params, tokens: Tensor) -> Tensor:
        logits = functional_call(model, params, (tokens[..., :-1], run))
        return F.cross_entropy(logits.flatten(0, -2), tokens[..., 1:].flatten())

    return loss


class Text:
    """The text as codes, one for each character."""

    def __init__(self) -> None:
        text = "\n".join(topics.values())
        self.characters = sorted(set(text))
        code = {c: i for i, c in enumerate(self.characters)}
        self.codes = torch.tensor([code[c] for c in text])

    def sample(self, batch: int, length: int) -> Tensor:
        """`batch` random pieces of `length + 1` characters: the inputs, and the targets one character later."""
        starts = torch.randint(len(self.codes) - length, (batch, 1))
        return self.codes[starts + torch.arange(length + 1)]


def parameters_of(model: nn.Module) -> Params:
    return {name: p.detach() for name, p in model.named_parameters()}
