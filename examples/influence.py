"""Find mislabelled images by influence functions: Hessian-vector products in a fraction of the memory.

Some of scikit-learn's handwritten digits get a wrong label, and a network is trained on them. Which images cause its
mistakes? The influence of a training image z on the loss of clean images is -g_clean H^-1 g_z, with gradients g and
the Hessian H of the training loss (Koh and Liang, arXiv:1703.04730). Conjugate gradients compute H^-1 g_clean. They
need only products with H, `jvp(grad(loss))`, and each product keeps every activation and its tangent. The loss is a
mean over images, so chunks of images, without remat, are the first thing to try. With `remat`, only the activations of
one layer or of one chunk are kept.

    python examples/influence.py [--fast]
"""

from collections.abc import Callable

import optree
import torch
from _common import Measured, compare, console, draw_frontier, parser, progress
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap
from torch.nn import functional as F

from remat import remat

Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor, Tensor], Tensor]
Run = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
DECAY = 1e-3  # weight decay, a part of the loss and so of the Hessian


def plainly(fun: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return fun


def start(width: int, depth: int) -> Params:
    layers = {f"layer{i}": torch.randn(width, width) / width**0.5 for i in range(depth)}
    return {"first": torch.randn(64, width) / 8, **layers, "last": torch.zeros(width, 10)}


def layer(weight: Tensor, x: Tensor) -> Tensor:
    return x + 0.3 * torch.tanh(F.layer_norm(x, x.shape[-1:]) @ weight)


def logits(run: Run, params: Params, x: Tensor) -> Tensor:  # (..., 64) -> (..., 10)
    x = x @ params["first"]
    for name, weight in params.items():
        if name.startswith("layer"):
            x = run(layer)(weight, x)
    return x @ params["last"]


def make_loss(run_layer: Run, run_chunk: Run = plainly, chunks: int = 1) -> Loss:
    """The training loss of images x (images, 64) with labels (images,)."""

    def chunk_loss(params: Params, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits(run_layer, params, x), labels, reduction="sum")

    def loss(params: Params, x: Tensor, labels: Tensor) -> Tensor:
        parts = zip(x.chunk(chunks), labels.chunk(chunks), strict=True)
        total = sum(run_chunk(chunk_loss)(params, *part) for part in parts)
        return total / len(x) + DECAY / 2 * sum(p.square().sum() for p in params.values())

    return loss


def train(params: Params, loss: Loss, x: Tensor, labels: Tensor, steps: int) -> None:
    """Update `params` in place, by `steps` steps of Adam on all images."""
    optimizer = torch.optim.Adam(params.values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = grad_and_value(loss)
    with progress() as bar:
        for _ in bar.track(range(steps), description="training"):
            gradient, value = step(params, x, labels)
            for name, p in params.items():
                p.grad = gradient[name]
            optimizer.step()
            schedule.step()
            bar.update(bar.task_ids[0], description=f"training, loss {value:.3f}")


# ---------------------------------------------------------------- influence


def hessian_vector_product(loss: Loss, params: Params, x: Tensor, labels: Tensor) -> Callable[[Params], Params]:
    def product(vector: Params) -> Params:
        return jvp(lambda p: grad(loss)(p, x, labels), (params,), (vector,))[1]

    return product


def accumulated(loss: Loss, chunks: int) -> Callable[..., Callable[[Params], Params]]:
    """The product, one chunk after the other. The loss is a mean over images, so their products add up."""

    def make(params: Params, x: Tensor, labels: Tensor) -> Callable[[Params], Params]:
        def product(vector: Params) -> Params:
            total = None
            for part in zip(x.chunk(chunks), labels.chunk(chunks), strict=True):
                of_part = hessian_vector_product(loss, params, *part)(vector)
                share = len(part[0]) / len(x)
                of_part = {name: h * share for name, h in of_part.items()}
                total = of_part if total is None else optree.tree_map(torch.add, total, of_part)
            return total

        return product

    return make


def dot(a: Params, b: Params) -> Tensor:
    return sum((a[name] * b[name]).sum() for name in a)


def solve(product: Callable[[Params], Params], b: Params, damping: float, steps: int) -> Params:
    """(H + damping)^-1 b by conjugate gradients."""

    def add(a: Params, scale: Tensor | float, b: Params) -> Params:
        return optree.tree_map(lambda a, b: a + scale * b, a, b)

    solution = optree.tree_map(torch.zeros_like, b)
    residual = direction = b
    size = dot(residual, residual)
    with progress() as bar:
        for _ in bar.track(range(steps), description="conjugate gradients"):
            image = add(product(direction), damping, direction)
            rate = size / dot(direction, image)
            solution, residual = add(solution, rate, direction), add(residual, -rate, image)
            size, before = dot(residual, residual), size
            direction = add(residual, size / before, direction)
            bar.update(bar.task_ids[0], description=f"conjugate gradients, residual {size.sqrt():.1e}")
    return solution


def harm(loss: Loss, params: Params, x: Tensor, labels: Tensor, direction: Params) -> Tensor:
    """How much each training image (images,) raises the loss of clean images, up to a factor: -g_clean H^-1 g_z.

    The product with each image's gradient is a derivative of its loss along `direction`: no gradient is formed.
    """

    def along(image: Tensor, label: Tensor) -> Tensor:
        return jvp(lambda p: loss(p, image[None], label[None]), (params,), (direction,))[1]

    return -vmap(along)(x, labels)


def draw(x: Tensor, labels: Tensor, truth: Tensor, order: Tensor, measured: dict[str, Measured]) -> None:
    figure = Figure(figsize=(6.4, 11), layout="constrained")
    images, curve, frontier = figure.subfigures(3, 1, height_ratios=(1.2, 1, 1))
    images.suptitle("the most harmful images, with their labels")
    for i, ax in zip(order.tolist(), images.subplots(3, 6).flat, strict=False):
        ax.imshow(x[i].reshape(8, 8), cmap="gray_r")
        wrong = labels[i] != truth[i]
        ax.set_title(str(labels[i].item()), color="tab:red" if wrong else "black", fontsize="medium", pad=2)
        ax.set_axis_off()
    ax = curve.subplots()
    found = (labels != truth)[order].cumsum(0) / (labels != truth).sum()
    share = torch.linspace(0, 100, len(order))
    ax.plot(share, 100 * found, label="by influence")
    ax.plot([0, 100], [0, 100], linestyle=":", color="gray", label="by chance")
    ax.set(title="wrong labels found", xlabel="% of images looked at", ylabel="% of wrong labels")
    ax.legend()
    draw_frontier(frontier.subplots(), measured, "one Hessian-vector product")
    figure.savefig("influence.png", dpi=100)


def main() -> None:
    fast = parser("Influence functions on handwritten digits, with remat.").parse_args().fast
    width, depth, steps, solver_steps, times = (16, 2, 3, 2, 1) if fast else (192, 8, 120, 20, 3)

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    truth = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    (x, x_clean), (truth, y_clean) = images[order].split([1347, 450]), truth[order].split([1347, 450])
    wrong = torch.rand(len(x)) < 0.08
    labels = torch.where(wrong, (truth + torch.randint(1, 10, truth.shape)) % 10, truth)
    console.print(f"{len(x)} digits to train on, {wrong.sum()} with a wrong label; {len(x_clean)} clean ones")

    params, loss = start(width, depth), make_loss(remat)
    train(params, make_loss(plainly), x, labels, steps)
    with torch.no_grad():
        right = (logits(plainly, params, x_clean).argmax(1) == y_clean).float().mean()
    console.print(f"{right:.1%} of the clean digits are read right")

    clean_gradient = grad(loss)(params, x_clean, y_clean)
    product = hessian_vector_product(loss, params, x, labels)
    direction = solve(product, clean_gradient, damping=0.3, steps=solver_steps)
    order = harm(loss, params, x, labels, direction).argsort(descending=True)
    looked_at = wrong[order[: int(0.1 * len(x))]]
    console.print(f"among the 10% most harmful images are {looked_at.sum() / wrong.sum():.0%} of the wrong labels")

    def whole(loss: Loss) -> Callable[[Params], Params]:
        return hessian_vector_product(loss, params, x, labels)

    ways = {"plain": whole(make_loss(plainly)), "remat of layers": whole(make_loss(remat))}
    sizes = (2,) if fast else (2, 4, 8)
    ways |= {f"chunks, no remat: {n}": accumulated(make_loss(plainly), n)(params, x, labels) for n in sizes}
    ways |= {f"remat of chunks: {n}": whole(make_loss(plainly, remat, n)) for n in sizes}
    ways |= {f"chunks, remat of layers: {n}": accumulated(make_loss(remat), n)(params, x, labels) for n in sizes}
    measured = compare(
        f"one Hessian-vector product over {len(x)} images",
        {name: lambda product=product: product(direction) for name, product in ways.items()},
        times,
    )
    draw(x, labels, truth, order, measured)
    console.print("the most harmful images, what was found, and the frontier: influence.png")


if __name__ == "__main__":
    main()
