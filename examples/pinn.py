"""Solve Poisson's equation with a network: second derivatives in a fraction of the memory.

A physics-informed network u(x, y) is trained to satisfy u_xx + u_yy = f at random points of the unit square, with
u = 0 on the boundary. The second derivatives are a `jvp` of a `jvp` at each point under `vmap`, and the loss is
differentiated once more with respect to the parameters. So autograd keeps the activations of the network and of its
derivatives for each point. The loss is a mean over points, so chunks of points, without remat, are the first thing to
try. With each chunk or each layer under remat, the same number of pieces needs less memory.

f is chosen so that the exact solution is known: u = sin(pi x) sin(2 pi y).

    python examples/pinn.py [--fast]
"""

from collections.abc import Callable
from itertools import pairwise

import optree
import torch
from _common import Measured, compare, console, draw_frontier, parser, progress
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from remat import remat

Params = list[tuple[Tensor, Tensor]]
Loss = Callable[[Params, Tensor], Tensor]
Run = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def exact(point: Tensor) -> Tensor:
    x, y = point.unbind(-1)
    return torch.sin(torch.pi * x) * torch.sin(2 * torch.pi * y)


def source(point: Tensor) -> Tensor:
    """The Laplacian of `exact`."""
    return -5 * torch.pi**2 * exact(point)


def start(width: int, depth: int) -> Params:
    sizes = [2, *[width] * depth, 1]
    weights = [torch.randn(i, o) / i**0.5 for i, o in pairwise(sizes)]
    return [(2 * weights[0], torch.zeros(width)), *((w, torch.zeros(w.shape[1])) for w in weights[1:])]


def layer(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ weight + bias)


def solution(run: Run, params: Params, point: Tensor) -> Tensor:
    """The network's u at one point (2,), times a factor that is zero on the boundary."""
    *hidden, (weight, bias) = params
    x = 2 * point - 1
    for w, b in hidden:
        x = run(layer)(w, b, x)
    return (x @ weight + bias)[0] * (16 * point * (1 - point)).prod()


def residuals(run: Run, params: Params, points: Tensor) -> Tensor:
    """The residual of the equation, u_xx + u_yy - f, at each of the points (n, 2)."""

    def second(point: Tensor, direction: Tensor) -> Tensor:
        """The second derivative of u along a direction: forward mode, twice."""

        def first(p: Tensor) -> Tensor:
            return jvp(lambda p: solution(run, params, p), (p,), (direction,))[1]

        return jvp(first, (point,), (direction,))[1]

    def residual(point: Tensor) -> Tensor:
        laplacian = vmap(second, in_dims=(None, 0))(point, torch.eye(2)).sum()
        return laplacian - source(point)

    return vmap(residual)(points)


def plainly(fun: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return fun


def make_loss(run_layer: Run, run_chunk: Run = plainly, chunks: int = 1) -> Loss:
    """The mean square residual. `run_layer` and `run_chunk` say how each layer and each chunk of points is called."""

    def chunk_loss(params: Params, points: Tensor) -> Tensor:
        return residuals(run_layer, params, points).square().sum()

    def loss(params: Params, points: Tensor) -> Tensor:
        return sum(run_chunk(chunk_loss)(params, chunk) for chunk in points.chunk(chunks)) / len(points)

    return loss


def accumulated(loss: Loss, chunks: int) -> Callable[[Params, Tensor], Params]:
    """The gradient, one chunk after the other. The loss is a mean over points, so their gradients add up."""

    def gradient(params: Params, points: Tensor) -> Params:
        total = None
        for chunk in points.chunk(chunks):
            part = grad(loss)(params, chunk)
            total = part if total is None else optree.tree_map(torch.add, total, part)
        return optree.tree_map(lambda g: g / chunks, total)  # the chunks have equal sizes

    return gradient


def train(params: Params, loss: Loss, steps: int, points: int) -> None:
    """Update `params` in place by `steps` steps of Adam, each at new random points."""
    leaves = optree.tree_leaves(params)
    optimizer = torch.optim.Adam(leaves, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = grad_and_value(loss)
    with progress() as bar:
        for _ in bar.track(range(steps), description="training"):
            gradient, value = step(params, torch.rand(points, 2))
            for leaf, g in zip(leaves, optree.tree_leaves(gradient), strict=True):
                leaf.grad = g
            optimizer.step()
            schedule.step()
            bar.update(bar.task_ids[0], description=f"training, square residual {value:.3g}")


def draw(found: Tensor, true: Tensor, measured: dict[str, Measured]) -> None:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 1.4))
    for ax, values, title in zip(axes, (found, found - true), ("the network's solution", "its error"), strict=False):
        image = ax.imshow(values, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu")
        limit = values.abs().max().item()
        image.set_clim(-limit, limit)
        ax.set_title(title)
        figure.colorbar(image, ax=ax, shrink=0.8)
    draw_frontier(axes[2], measured, "one gradient of the loss")
    figure.savefig("pinn.png", dpi=100)


def main() -> None:
    fast = parser("A physics-informed network with second derivatives, with remat.").parse_args().fast
    width, depth, points, steps, times = (8, 2, 64, 3, 1) if fast else (64, 4, 4096, 300, 3)

    torch.manual_seed(0)
    params = start(width, depth)
    train(params, make_loss(remat), steps, points // 16)

    line = torch.linspace(0, 1, 65)
    grid = torch.cartesian_prod(line, line).flip(-1).contiguous()  # rows of the picture are y
    with torch.no_grad():
        found = vmap(lambda p: solution(plainly, params, p))(grid).reshape(65, 65)
    true = exact(grid).reshape(65, 65)
    console.print(f"error of the solution: {(found - true).norm() / true.norm():.2%} of its norm")

    batch = torch.rand(points, 2)
    ways = {"plain": grad(make_loss(plainly)), "remat of layers": grad(make_loss(remat))}
    sizes = (2,) if fast else (2, 4, 8)
    ways |= {f"chunks, no remat: {n}": accumulated(make_loss(plainly), n) for n in sizes}
    ways |= {f"remat of chunks: {n}": grad(make_loss(plainly, remat, n)) for n in sizes}
    ways |= {f"chunks, remat of layers: {n}": accumulated(make_loss(remat), n) for n in sizes}
    measured = compare(
        f"one gradient of the loss at {len(batch):,} points",
        {name: lambda way=way: way(params, batch) for name, way in ways.items()},
        times,
    )
    draw(found, true, measured)
    console.print("picture of the solution, its error, and time against memory: pinn.png")


if __name__ == "__main__":
    main()
