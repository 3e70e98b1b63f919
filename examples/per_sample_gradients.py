"""Train a small language model as private training does, in a fraction of the memory.

Private training (DP-SGD) needs the gradient of every sample. Each gradient is clipped, so that no sample has a large
effect, and noise is added to their sum, so that no sample can be recovered from the model. `torch.func` computes all
gradients at once, `vmap(grad(loss))`, but keeps every activation. With `remat` around each transformer block, only the
inputs of the blocks are kept, and the rest is recomputed.

The steps are those of DP-SGD, but nothing here does the privacy accounting: no epsilon is computed or claimed.

The text is the Python language reference, which comes with every Python (`pydoc_data.topics`). At the end, one step is
measured with and without remat, for four kinds of derivative (`memory.png`). The clipped sum of per-sample gradients is
also measured in chunks of samples: try that first, because chunks recompute nothing (`per_sample_gradients.png`).

    python examples/per_sample_gradients.py [--fast]
"""

from collections.abc import Callable

import torch
from _common import MIB, compare, console, draw_frontier, parser, progress
from _transformer import CharTransformer, Params, Text, make_loss, parameters_of
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from remat import remat

Loss = Callable[[Params, Tensor], Tensor]
Run = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]


def plainly(block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return block


# ---------------------------------------------------------------- private training


def clipped_sum(per_sample: Params, clip: float) -> Params:
    """Clip each sample's gradient to norm `clip`, and sum."""
    squares = [g.flatten(1).square().sum(1) for g in per_sample.values()]
    weights = (clip / torch.stack(squares).sum(0).sqrt()).clamp(max=1)  # (samples,)
    return {name: torch.einsum("s,s...->...", weights, g) for name, g in per_sample.items()}


def private_gradient(per_sample: Params, clip: float, noise: float) -> Params:
    """The clipped sum with Gaussian noise of `noise * clip`, divided by the number of samples."""
    samples = len(next(iter(per_sample.values())))
    sums = clipped_sum(per_sample, clip)
    return {name: (g + noise * clip * torch.randn_like(g)) / samples for name, g in sums.items()}


def train(model: CharTransformer, params: Params, text: Text, batch: int, steps: int) -> None:
    """Update `params` in place by `steps` steps of Adam, each on `batch` random pieces of the text."""
    per_sample = vmap(grad_and_value(make_loss(model, remat)), in_dims=(None, 0))
    optimizer = torch.optim.Adam(params.values(), lr=2e-3)
    with progress() as bar:
        task = bar.add_task("training", total=steps)
        for step in range(1, steps + 1):
            gradients, losses = per_sample(params, text.sample(batch, len(model.position)))
            for name, g in private_gradient(gradients, clip=1.0, noise=0.3).items():
                params[name].grad = g
            optimizer.step()
            loss = losses.mean().item()
            bar.update(task, advance=1, description=f"training, loss {loss:.2f}")
            if step == 1 or step % max(steps // 8, 1) == 0:
                console.print(f"step {step:4d}  loss {loss:.3f}")


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


def draw(model: CharTransformer, params: Params, tokens: Tensor) -> None:
    """Take each kind of step with and without remat; print a table of each and draw `memory.png`."""
    losses = {"plain": make_loss(model, plainly), "remat": make_loss(model, remat)}
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    for (name, step), axes in zip(STEPS.items(), figure.subplots(2, 2).flat, strict=True):
        runs = {way: lambda loss=loss, step=step: step(loss, params, tokens) for way, loss in losses.items()}
        for way, m in compare(name, runs, times=2).items():
            live = [b / MIB for _, b in m.history]
            share = torch.linspace(0, 100, len(live))
            label = f"{way}: peak {m.peak / MIB:.0f} MiB"
            axes.fill_between(share, live, step="post", alpha=0.6, label=label)
            highest = max(m.peak / MIB, axes.get_ylim()[1] / 1.3 if way == "remat" else 0)
            axes.set_ylim(0, 1.3 * highest)  # room for the legend above the curves
        axes.set(title=name, xlabel="% of its ops", ylabel="live MiB", xlim=(0, 100))
        axes.legend(loc="upper center", ncols=2, fontsize="small")
    figure.savefig("memory.png", dpi=100)
    console.print("vmap(grad): most of the remaining memory is the result, a gradient for each sample.")
    console.print("jvp(grad): a Hessian-vector product. Picture of the memory, op by op: memory.png")


def draw_chunks(model: CharTransformer, params: Params, tokens: Tensor, times: int) -> None:
    """The clipped sum, with all samples at once and in chunks; print a table and draw the frontier."""

    def way(run: Run, chunks: int) -> Callable[[], Params]:
        def run_it() -> Params:
            total: Params = {}
            for chunk in tokens.chunk(chunks):
                part = clipped_sum(per_sample_gradients(make_loss(model, run), params, chunk), clip=1.0)
                total = {name: g + total.get(name, 0) for name, g in part.items()}
            return total

        return run_it

    sizes = 2, 4, 8
    ways = {"plain": way(plainly, 1)}
    ways |= {f"chunks, no remat: {n}": way(plainly, n) for n in sizes}
    ways |= {f"chunks, remat: {n}": way(remat, n) for n in (1, *sizes)}
    measured = compare(f"the clipped sum of {len(tokens)} gradients", ways, times)
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    draw_frontier(figure.subplots(), measured, "the clipped sum of per-sample gradients")
    figure.savefig("per_sample_gradients.png", dpi=100)
    console.print("Picture of time against memory, in chunks of samples: per_sample_gradients.png")


def main() -> None:
    fast = parser("Clipped and noisy per-sample gradients for a small transformer, with remat.").parse_args().fast
    length, width, depth, batch, steps, times = (16, 16, 3, 8, 4, 1) if fast else (128, 64, 8, 16, 100, 3)

    torch.manual_seed(0)
    text = Text()
    model = CharTransformer(len(text.characters), length, width, heads=width // 16, depth=depth)
    params = parameters_of(model)
    count = sum(p.numel() for p in params.values())
    console.print(
        f"{len(text.codes):,} characters of text, {len(text.characters)} of them different; {count:,} parameters"
    )

    train(model, params, text, batch, steps)
    tokens = text.sample(batch, length)
    draw(model, params, tokens)
    draw_chunks(model, params, tokens, times)
    console.print("No privacy accounting was done: these steps come with no epsilon.")


if __name__ == "__main__":
    main()
