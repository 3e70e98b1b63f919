"""Train a small language model with differential privacy, in a fraction of the memory.

Private training (DP-SGD) needs the gradient of every sample by itself: each one is clipped, so that no sample
can weigh more than any other, and noise is added to their sum, so that none can be read out of the model.
`torch.func` computes all of them at once, `vmap(grad(loss))`, but keeps every activation alive to do so. With
`remat` around each transformer block, only the inputs of the blocks are kept, and the rest is recomputed.

The text is the Python language reference that comes with every Python (`pydoc_data.topics`). At the end, the
memory of one step is measured with and without remat, in four kinds of derivative: see `memory.png`.

    python examples/per_sample_gradients.py [--fast]
"""

import argparse
import math
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from torch.nn import functional as F

from remat import remat
from remat.debug import LiveBytes

Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor], Tensor]
MIB = 2**20
console = Console()

# ---------------------------------------------------------------- the model


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
        return self.out((weights @ v).transpose(-3, -2).flatten(-2))


class CharTransformer(nn.Module):
    """Predicts each next character of a text."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        self.use_remat = True

    def forward(self, tokens: Tensor) -> Tensor:  # (..., time) -> (..., time, vocabulary)
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            run = remat(block) if self.use_remat else block
            x = run(x)
        return self.head(x)


def make_loss(model: CharTransformer) -> Loss:
    """The loss as a function of the parameters and of tokens: one sequence, or a batch of them."""

    def loss(params: Params, tokens: Tensor) -> Tensor:
        logits = functional_call(model, params, (tokens[..., :-1],))
        return F.cross_entropy(logits.flatten(0, -2), tokens[..., 1:].flatten())

    return loss


# ---------------------------------------------------------------- private training


def private_gradient(per_sample: Params, clip: float, noise: float) -> Params:
    """Clip each sample's gradient to norm `clip`, sum, add Gaussian noise of `noise * clip`, average."""
    squares = [g.flatten(1).square().sum(1) for g in per_sample.values()]
    norms = torch.stack(squares).sum(0).sqrt()  # (samples,)
    weights = (clip / norms).clamp(max=1)
    sums = {name: torch.einsum("s,s...->...", weights, g) for name, g in per_sample.items()}
    return {name: (g + noise * clip * torch.randn_like(g)) / len(norms) for name, g in sums.items()}


def train(model: CharTransformer, params: Params, text: Tensor, batch: int, steps: int) -> None:
    """Update `params` in place by `steps` steps of Adam, each on `batch` random pieces of the text."""
    per_sample = vmap(grad_and_value(make_loss(model)), in_dims=(None, 0))
    optimizer = torch.optim.Adam(params.values(), lr=2e-3)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps)
        for step in range(1, steps + 1):
            gradients, losses = per_sample(params, sample(text, batch, len(model.position)))
            for name, g in private_gradient(gradients, clip=1.0, noise=0.3).items():
                params[name].grad = g
            optimizer.step()
            loss = losses.mean().item()
            progress.update(task, advance=1, description=f"training, loss {loss:.2f}")
            if step == 1 or step % max(steps // 8, 1) == 0:
                console.print(f"step {step:4d}  loss {loss:.3f}")


def sample(text: Tensor, batch: int, length: int) -> Tensor:
    """`batch` random pieces of `length + 1` characters: the inputs and, one further on, the targets."""
    starts = torch.randint(len(text) - length, (batch, 1))
    return text[starts + torch.arange(length + 1)]


# ---------------------------------------------------------------- the memory of one step


def backward(loss: Loss, params: Params, tokens: Tensor) -> Params:
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    loss(leaves, tokens).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def gradient(loss: Loss, params: Params, tokens: Tensor) -> Params:
    return grad(loss)(params, tokens)


def per_sample_gradients(loss: Loss, params: Params, tokens: Tensor) -> Params:
    return vmap(grad(loss), in_dims=(None, 0))(params, tokens)


def hessian_vector_product(loss: Loss, params: Params, tokens: Tensor) -> Params:
    return jvp(lambda params: grad(loss)(params, tokens), (params,), (params,))[1]


STEPS = {
    ".backward()": backward,
    "grad": gradient,
    "vmap(grad)": per_sample_gradients,
    "jvp(grad)": hessian_vector_product,
}


def compare(model: CharTransformer, params: Params, tokens: Tensor) -> None:
    """Take each kind of step with and without remat; print a table and draw `memory.png`."""
    loss = make_loss(model)
    table = Table("", "peak", "with remat", "time", "with remat", "differs by", title="one step")
    figure = Figure(figsize=(11, 7), layout="constrained")
    for (name, step), axes in zip(STEPS.items(), figure.subplots(2, 2).flat, strict=True):
        results, peaks, times = [], [], []
        for model.use_remat in (False, True):
            results.append(step(loss, params, tokens))  # the first run also warms up
            start = time.perf_counter()
            step(loss, params, tokens)
            times.append(f"{time.perf_counter() - start:.2f} s")
            with LiveBytes() as meter:
                step(loss, params, tokens)
            peaks.append(f"{meter.peak / MIB:.0f} MiB")
            seconds, live = zip(*meter.history, strict=True)
            label = f"{'remat' if model.use_remat else 'plain'}: peak {peaks[-1]}"
            axes.fill_between(seconds, [b / MIB for b in live], step="post", alpha=0.6, label=label)
        plain, rematted = results
        difference = max((plain[key] - rematted[key]).abs().max().item() for key in plain)
        table.add_row(name, *peaks, *times, f"{difference:.1g}")
        axes.set(title=name, xlabel="seconds, with the meter on", ylabel="live MiB", xlim=0, ylim=0)
        axes.legend()
    console.print(table)
    figure.savefig("memory.png", dpi=120)
    console.print("vmap(grad): most of what is left is its result, a gradient for each sample.")
    console.print("jvp(grad): a Hessian-vector product. The memory over time: memory.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Private training of a small transformer, with remat.")
    parser.add_argument("--fast", action="store_true", help="a few steps of a tiny model")
    fast = parser.parse_args().fast
    length, width, depth, batch, steps = (16, 16, 3, 8, 4) if fast else (64, 64, 8, 32, 200)

    torch.manual_seed(0)
    characters = "\n".join(topics.values())
    code = {c: i for i, c in enumerate(sorted(set(characters)))}
    text = torch.tensor([code[c] for c in characters])
    model = CharTransformer(len(code), length, width, heads=width // 16, depth=depth)
    params = {name: p.detach() for name, p in model.named_parameters()}
    count = sum(p.numel() for p in params.values())
    console.print(f"{len(text):,} characters of text, {len(code)} of them different; {count:,} parameters")

    train(model, params, text, batch, steps)
    compare(model, params, sample(text, batch, length))


if __name__ == "__main__":
    main()
