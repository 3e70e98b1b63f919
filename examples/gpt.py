"""Train a small GPT on real text under a policy of your choice, and see what each policy costs.

The text is the Python language reference, which comes with every Python. `--policy` says which results of each
transformer block remat keeps: none, all matrix multiplications, those without batch dimensions, or those with a name.
At the end, one gradient is measured under every policy, and without remat. It is also measured in chunks of the batch
whose gradients are added up: try that first, because chunks recompute nothing.

    python examples/gpt.py [--policy attention] [--fast]
"""

from collections.abc import Callable
from typing import Any

import torch
from _common import Measured, compare, console, draw_frontier, parser, progress
from _transformer import CharTransformer, Params, Text, make_loss, parameters_of
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, grad_and_value

from remat import policies, remat

Run = Callable[..., Callable[[Tensor], Tensor]]
POLICIES = {
    "nothing": policies.nothing_saveable,
    "attention": policies.save_only_these_names("attention"),
    "no-batch-dots": policies.dots_with_no_batch_dims_saveable,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
}


def plainly(block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return block


def under(policy: Any) -> Run:
    return lambda block: remat(block, policy=policy)


RUNS: dict[str, Run] = {"no-remat": plainly, **{name: under(policy) for name, policy in POLICIES.items()}}


def train(loss: Callable[..., Tensor], params: Params, text: Text, batch: int, length: int, steps: int) -> list[float]:
    """Update `params` in place by `steps` steps of Adam. Returns the loss of each step."""
    optimizer = torch.optim.Adam(params.values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    step, losses = grad_and_value(loss), []
    with progress() as bar:
        for _ in bar.track(range(steps), description="training"):
            gradients, value = step(params, text.sample(batch, length))
            for name, p in params.items():
                p.grad = gradients[name]
            optimizer.step()
            schedule.step()
            losses.append(value.item())
            bar.update(bar.task_ids[0], description=f"training, loss {value:.2f}")
    return losses


def accumulated(loss: Callable[..., Tensor], chunks: int) -> Callable[[Params, Tensor], Params]:
    """The gradient, one chunk after the other. The loss is a mean over the batch, so their gradients add up."""

    def gradient(params: Params, tokens: Tensor) -> Params:
        total: Params = {}
        for chunk in tokens.chunk(chunks):
            part = grad(loss)(params, chunk)
            share = len(chunk) / len(tokens)
            total = {name: g * share + total.get(name, 0) for name, g in part.items()}
        return total

    return gradient


def draw(losses: list[float], policy: str, measured: dict[str, Measured]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses)
    left.set(title=f"training with --policy {policy}", xlabel="step", ylabel="loss per character", xlim=0)
    draw_frontier(right, measured, "one gradient under each policy")
    figure.savefig("gpt.png", dpi=100)


def main() -> None:
    options = parser("A small GPT, trained under a policy.")
    options.add_argument(
        "--policy", choices=RUNS, default="attention", help="results of each block to keep (default: attention)"
    )
    arguments = options.parse_args()
    fast = arguments.fast
    length, width, depth, batch, steps, times = (16, 16, 2, 4, 3, 1) if fast else (64, 64, 6, 16, 250, 3)

    torch.manual_seed(0)
    text = Text()
    model = CharTransformer(len(text.characters), length, width, heads=width // 16, depth=depth)
    params = parameters_of(model)
    console.print(f"{len(text.codes):,} characters of text; {sum(p.numel() for p in params.values()):,} parameters")

    losses = train(make_loss(model, RUNS[arguments.policy]), params, text, batch, length, steps)
    last = losses[-20:]
    console.print(f"loss {losses[0]:.2f} at the start, {sum(last) / len(last):.2f} at the end")

    tokens = text.sample(4 * batch, length)  # in a larger step, bookkeeping takes a smaller share
    plain = make_loss(model, plainly)
    ways = {"no remat": grad(plain)}
    ways |= {f"chunks, no remat: {n}": accumulated(plain, n) for n in (2, 4, 8)}
    ways |= {f"remat, policy: {name}": grad(make_loss(model, under(p))) for name, p in POLICIES.items()}
    measured = compare(
        f"the gradient at {len(tokens)} pieces of text",
        {name: lambda way=way: way(params, tokens) for name, way in ways.items()},
        times,
    )
    draw(losses, arguments.policy, measured)
    console.print("picture of the loss, and of time against memory: gpt.png")


if __name__ == "__main__":
    main()
