"""The curvature of a language model's loss by a stock library, in a fraction of the memory.

curvlinops (https://curvlinops.readthedocs.io) represents the Hessian of a loss as a linear operator that computes its
products with `torch.func`. Lanczos iterations on it find the largest eigenvalue, which says how sharp the minimum is,
and so how large a learning rate may be. `remat.nn.apply_remat` wraps the blocks of the model in place, and each product
keeps only the inputs of the blocks. The library's calls do not change. Without remat, one would use smaller batches:
the library adds up the products of all batches.

    python examples/curvature.py [--fast]
"""

from collections.abc import Callable

import torch
from _common import Measured, compare, console, draw_frontier, parser, progress
from _transformer import Block, CharTransformer, Text
from curvlinops import GGNLinearOperator, HessianLinearOperator
from matplotlib.figure import Figure
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.nn import functional as F

from remat import policies
from remat.nn import apply_remat

Operator = HessianLinearOperator | GGNLinearOperator


class Model(CharTransformer):
    """Returns the logits of every next character as rows, as the library's loss expects."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens, run=lambda block: block).flatten(0, -2)


def train(model: Model, text: Text, batch: int, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with progress() as bar:
        for _ in bar.track(range(steps), description="training"):
            tokens = text.sample(batch, len(model.position))
            loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.update(bar.task_ids[0], description=f"training, loss {loss:.2f}")


def operator(kind: type[Operator], model: Model, tokens: Tensor, batches: int = 1) -> Operator:
    """The library's own call. Tokens (samples, length + 1): the inputs, and the targets one character later."""
    data = [(part[:, :-1], part[:, 1:].flatten()) for part in tokens.chunk(batches)]
    # its check of determinism would compute a few more products
    return kind(model, nn.CrossEntropyLoss(), list(model.parameters()), data, check_deterministic=False)


def draw(measured: dict[str, dict[str, Measured]]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (name, ways) in zip(figure.subplots(1, 2), measured.items(), strict=True):
        draw_frontier(axes, ways, f"one product with the {name}")
    figure.savefig("curvature.png", dpi=100)


def main() -> None:
    fast = parser("The curvature of a small language model by curvlinops, with remat.").parse_args().fast
    length, width, depth, batch, steps, times = (16, 16, 2, 4, 2, 1) if fast else (128, 64, 6, 16, 60, 2)

    torch.manual_seed(0)
    text = Text()
    model = Model(len(text.characters), length, width, heads=width // 16, depth=depth)
    train(model, text, batch, steps)
    plain, wrapped, saving = (Model(len(text.characters), length, width, width // 16, depth) for _ in range(3))
    for copy in (plain, wrapped, saving):
        copy.load_state_dict(model.state_dict())
    console.print(str(apply_remat(wrapped, Block)))
    apply_remat(saving, Block, policy=policies.dots_with_no_batch_dims_saveable)

    tokens = text.sample(batch, length)
    vector = torch.randn(sum(p.numel() for p in model.parameters()))
    sizes = (2, 4) if fast else (2, 4, 8)
    measured = {}
    for name, kind in {"Hessian": HessianLinearOperator, "Gauss-Newton matrix": GGNLinearOperator}.items():

        def product(model: Model, batches: int = 1, kind: type[Operator] = kind) -> Callable[[], Tensor]:
            return lambda: operator(kind, model, tokens, batches) @ vector

        ways = {"plain": product(plain)}
        ways |= {f"batches, no remat: {n}": product(plain, n) for n in sizes}
        ways |= {f"batches, remat of blocks: {n}": product(wrapped, n) for n in (1, *sizes)}
        ways |= {"remat keeping linear layers": product(saving)}
        measured[name] = compare(f"one product with the {name}", ways, times)
    draw(measured)

    hessian = operator(HessianLinearOperator, wrapped, tokens).to_scipy()
    largest = eigsh(hessian, k=1, which="LA", tol=0.05, maxiter=20, ncv=3, return_eigenvectors=False)[0]
    console.print(f"the largest eigenvalue of the Hessian is about {largest:.3g}")
    console.print("picture of time against memory: curvature.png")


if __name__ == "__main__":
    main()
