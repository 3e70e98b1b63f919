"""Learn to learn: MAML through 100 inner steps, in a fraction of the memory.

A task is to find a sine wave of unknown amplitude and phase from ten points. The learner starts from the same
parameters for every task and takes 100 steps of gradient descent on its ten points. Meta-learning differentiates
*through* those steps to find a start from which they work well (Finn et al., arXiv:1703.03400). So autograd keeps
every inner step, which is itself a `torch.func.grad`, for the outer derivative. Without remat, one would take fewer
tasks at a time: `vmap(chunk_size=)`. With `remat` of segments of the loop, all tasks run at once, and only one segment
at a time is kept.

    python examples/maml.py [--fast]
"""

from collections.abc import Callable

import optree
import torch
from _common import Measured, compare, console, draw_frontier, parser, progress
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from remat import fori_loop, remat

Params = list[tuple[Tensor, Tensor]]
State = tuple[Params, Tensor, Tensor]
Tasks = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y to learn from and x, y to be tested on: each (tasks, points, 1)
Loop = Callable[[Callable[[State], State], int], Callable[[State], State]]
RATE = 0.02  # of the inner steps


def start(width: int = 64) -> Params:
    def weight(i: int, o: int) -> Tensor:
        return torch.randn(i, o) / i**0.5

    first = weight(1, width), torch.empty(width).uniform_(-5, 5)
    return [first, (weight(width, width), torch.zeros(width)), (weight(width, 1), torch.zeros(1))]


def predict(params: Params, x: Tensor) -> Tensor:  # (points, 1), as is the result
    *hidden, (w, b) = params
    for v, c in hidden:
        x = torch.tanh(x @ v + c)
    return x @ w + b


def error(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return (predict(params, x) - y).square().mean()


def sample_tasks(count: int, points: int = 10) -> Tasks:
    amplitude, phase = 0.1 + 4.9 * torch.rand(count, 1, 1), torch.pi * torch.rand(count, 1, 1)
    x, x_test = 10 * torch.rand(2, count, points, 1) - 5
    return x, amplitude * torch.sin(x - phase), x_test, amplitude * torch.sin(x_test - phase)


# ---------------------------------------------------------------- the inner loop, three ways


def descend(state: State) -> State:
    """One inner step of gradient descent."""
    params, x, y = state
    gradient = grad(error)(params, x, y)
    return optree.tree_map(lambda p, g: p - RATE * g, params, gradient), x, y


def plain(step: Callable[[State], State], n: int) -> Callable[[State], State]:
    def loop(state: State) -> State:
        for _ in range(n):
            state = step(state)
        return state

    return loop


def segments(length: int) -> Loop:
    """The loop in segments of `length` steps, each under remat."""
    return lambda step, n: plain(remat(plain(step, length)), n // length)


def few(step: Callable[[State], State], n: int) -> Callable[[State], State]:
    """The loop with 5 checkpoints: none of 100 steps runs more than five times."""
    return lambda state: fori_loop(0, n, lambda i, state: step(state), state, checkpoints=5)


def task_loss(loop: Loop, steps: int) -> Callable[..., Tensor]:
    """The error on the test points of a task after `steps` steps on its training points."""

    def loss(params: Params, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Tensor:
        adapted, _, _ = loop(descend, steps)((params, x, y))
        return error(adapted, x_test, y_test)

    return loss


# ---------------------------------------------------------------- the outer loop


def train(params: Params, inner: int, outer: int, batch: int) -> None:
    """Update `params` in place by `outer` steps of Adam, each on the clipped gradients of `batch` tasks."""
    leaves = optree.tree_leaves(params)
    optimizer = torch.optim.Adam(leaves, lr=0.03)
    per_task = vmap(grad_and_value(task_loss(segments(max(inner // 10, 1)), inner)), in_dims=(None, 0, 0, 0, 0))
    with progress() as bar:
        for _ in bar.track(range(outer), description="meta-training"):
            gradients, losses = per_task(params, *sample_tasks(batch))
            gradients = optree.tree_leaves(gradients)
            norms = sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()  # (tasks,)
            weights = (1 / norms).clamp(max=1) / batch  # long inner loops have wild gradients now and then
            for leaf, g in zip(leaves, gradients, strict=True):
                leaf.grad = torch.einsum("t,t...->...", weights, g)
            optimizer.step()
            bar.update(bar.task_ids[0], description=f"meta-training, error {losses.mean():.3f}")


def test(params: Params, inner: int, tasks: Tasks) -> float:
    """The mean error on new tasks after adaptation. Nothing is differentiated, so remat is not needed."""
    with torch.no_grad():
        return vmap(task_loss(plain, inner), in_dims=(None, 0, 0, 0, 0))(params, *tasks).mean().item()


def draw(untrained: Params, trained: Params, inner: int, tasks: Tasks, measured: dict[str, Measured]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_frontier(left, measured, f"meta-gradients through {inner} steps")
    x, y, _, _ = (t[0] for t in tasks)
    xs = torch.linspace(-5, 5, 200)[:, None]
    for name, params, color in (("untrained start", untrained, "tab:gray"), ("learned start", trained, "tab:green")):
        with torch.no_grad():
            adapted, _, _ = plain(descend, inner)((params, x, y))
            right.plot(xs, predict(adapted, xs), color=color, label=f"{name}, after {inner} steps")
    right.plot(xs, predict(trained, xs), color="tab:green", linestyle=":", label="learned start itself")
    right.scatter(x, y, color="black", zorder=3, label="the ten points")
    right.set(title="a new task", xlabel="x", ylabel="y")
    right.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))  # covers no curve
    figure.savefig("maml.png", dpi=100)


def main() -> None:
    fast = parser("MAML through many inner steps, with remat.").parse_args().fast
    inner, outer, batch, times = (6, 2, 4, 1) if fast else (100, 20, 50, 3)
    lengths, chunk_sizes = ((1, 3), (2,)) if fast else ((50, 25, 10), (25, 13, 7))

    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait
    torch.manual_seed(0)
    untrained = start()
    trained = optree.tree_map(torch.clone, untrained)
    train(trained, inner, outer, batch)
    tasks = sample_tasks(batch)
    before, after = (test(params, inner, tasks) for params in (untrained, trained))
    console.print(f"error on new tasks after {inner} steps: {before:.3f} from an untrained start, {after:.3f} learned")

    def meta_gradient(loop: Loop, chunk_size: int | None = None) -> Callable[[], Params]:
        each = grad(task_loss(loop, inner))
        per_task = vmap(each, in_dims=(None, 0, 0, 0, 0), chunk_size=chunk_size)
        return lambda: per_task(trained, *tasks)

    ways = {"plain": meta_gradient(plain)}
    ways |= {f"tasks in chunks, no remat: {-(-batch // n)}": meta_gradient(plain, n) for n in chunk_sizes}
    ways |= {f"remat of segments: {inner // n}": meta_gradient(segments(n)) for n in lengths}
    ways |= {"fori_loop, checkpoints: 5": meta_gradient(few)}
    measured = compare(f"meta-gradients of {batch} tasks through {inner} steps", ways, times)
    draw(untrained, trained, inner, tasks, measured)
    console.print("picture of time against memory, and of a new task: maml.png")


if __name__ == "__main__":
    main()
