"""Learn a force from long trajectories: backpropagation through 10,000 steps of a neural ODE.

Pendulums swing, and are observed with noise. A small network learns the force, a = F(q), such that trajectories of
10,000 steps match the observations. A long trajectory tells more than a short one, because a small error of the force
adds up to a large error of the phase. But autograd keeps every step. With `remat.fori_loop` you choose how many states
are kept. With fewer states, each step runs more often.

    python examples/long_sequence.py [--fast]
"""

from collections.abc import Callable
from math import comb

import torch
from _common import Measured, compare, console, parser, progress
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, grad_and_value

import remat

Params = tuple[Tensor, Tensor, Tensor]
Kick = Callable[[Tensor, Tensor], Tensor]  # q, v -> v one step later
DT = 0.01  # seconds per step
SEGMENT = 100  # steps from one observation to the next
KNOB = [140, 38, 14, 8]  # checkpoints: states that are kept, of 10,000
ANGLES = torch.linspace(0.3, 2.4, 8)[:, None]  # where the pendulums start, at rest


def pendulum(q: Tensor, v: Tensor) -> Tensor:
    return v - DT * torch.sin(q)


def start(width: int = 16) -> Params:
    return torch.randn(1, width), torch.empty(width).uniform_(-2, 2), torch.zeros(width, 1)


def network(params: Params, q: Tensor, v: Tensor) -> Tensor:
    weight, bias, out = params
    return torch.addmm(v, torch.addmm(bias, q, weight).tanh(), out, alpha=DT)


def leapfrog(kick: Kick, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Angles and velocities (pendulums, 1) one step later."""
    v = kick(q, v)
    return torch.add(q, v, alpha=DT), v


def observe(segments: int, noise: float) -> Tensor:
    """Angles (segments, pendulums, 1) of real pendulums, each at the end of a segment."""
    q, v, seen = ANGLES, torch.zeros_like(ANGLES), []
    for _ in range(segments):
        for _ in range(SEGMENT):
            q, v = leapfrog(pendulum, q, v)
        seen.append(q + noise * torch.randn_like(q))
    return torch.stack(seen)


# ---------------------------------------------------------------- the loss

State = tuple[Tensor, Tensor, Tensor]  # q, v, the error so far
Step = Callable[[int, State], State]
Loop = Callable[[int, Step, State], State]


def plain(n: int, step: Step, state: State) -> State:
    for i in range(n):
        state = step(i, state)
    return state


def with_checkpoints(k: int | None = None) -> Loop:
    return lambda n, step, state: remat.fori_loop(0, n, step, state, checkpoints=k)


def make_loss(loop: Loop, seen: Tensor) -> Callable[[Params], Tensor]:
    """The mean square of (angle - observed angle)."""

    def loss(params: Params) -> Tensor:
        def step(i: int, state: State) -> State:
            q, v, error = state
            q, v = leapfrog(lambda q, v: network(params, q, v), q, v)
            if (i + 1) % SEGMENT == 0:
                error = error + (q - seen[i // SEGMENT]).square().mean() / len(seen)
            return q, v, error

        begin = ANGLES, torch.zeros_like(ANGLES), torch.zeros(())
        return loop(len(seen) * SEGMENT, step, begin)[2]

    return loss


# ---------------------------------------------------------------- the fit


def fit(params: Params, seen: Tensor, evaluations: int) -> Params:
    """Improve the parameters by L-BFGS."""
    leaves = [p.clone() for p in params]
    step = grad_and_value(make_loss(with_checkpoints() if len(seen) > 10 else plain, seen))  # short: no remat
    optimizer = torch.optim.LBFGS(
        leaves,
        max_iter=evaluations,
        max_eval=evaluations,
        history_size=40,
        line_search_fn="strong_wolfe",
        tolerance_change=0,
    )

    with progress() as bar:
        task = bar.add_task("", total=evaluations)

        def evaluate() -> Tensor:
            gradient, value = step(tuple(leaves))
            for leaf, g in zip(leaves, gradient, strict=True):
                leaf.grad = g
            total = max(evaluations, bar.tasks[task].completed + 1)  # the last line search may take more
            bar.update(task, advance=1, total=total, description=f"{len(seen) * SEGMENT} steps, error {value:.2g}")
            return value

        optimizer.step(evaluate)
    return tuple(leaves)


def runs(n: int, k: int) -> float:
    """How often each of n steps runs with k checkpoints, forward and backward together, by revolve's schedule."""
    r = next(r for r in range(n) if n <= comb(k + r, k))
    return 1 + r - comb(k + r, k + 1) / n


def draw(forces: dict[str, Params], plain: Measured, measured: dict[int, Measured], n: int) -> None:
    figure = Figure(figsize=(15, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    q = torch.linspace(-2.4, 2.4, 100)[:, None]
    rest = torch.zeros_like(q)
    left.plot(q, pendulum(q, rest) / DT, color="black", label="the pendulum")
    for name, params in forces.items():
        left.plot(q, network(params, q, rest) / DT, linestyle="--", label=name)
    left.set(title="the force", xlabel="angle", ylabel="angular acceleration")
    left.legend()

    for name, m in {"plain": plain, **{f"{k} checkpoints": m for k, m in measured.items()}}.items():
        _, live = zip(*m.history, strict=True)
        share = torch.linspace(0, 100, len(live))
        middle.plot(share, [max(b, 1) / 1024 for b in live], label=name)
    middle.set(title="memory over one gradient", xlabel="% of its ops", ylabel="live KiB", xlim=(0, 100))
    middle.set(yscale="log", ylim=1)
    middle.legend()

    ks = range(min(measured), max(measured) + 1)
    right.plot(ks, [runs(n, k) for k in ks], "k--", label="runs of each step, in theory")
    right.plot(measured.keys(), [m.seconds / plain.seconds for m in measured.values()], "o-", label="CPU time / plain")
    right.set(title=f"{n:,} steps", xlabel="checkpoints", xscale="log", ylim=0)
    right.set_xticks(list(measured), [str(k) for k in measured])
    right.minorticks_off()
    right.legend()
    figure.savefig("long_sequence.png", dpi=100)


def main() -> None:
    fast = parser("A neural ODE over 10,000 steps, with remat.").parse_args().fast
    stages = {1: 1, 2: 1} if fast else {3: 60, 10: 40, 100: 4}  # segments, and evaluations of the gradient
    long = max(stages)

    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait
    torch.manual_seed(0)
    seen = observe(long, noise=0.05)
    forces, params = {}, start()
    for count, evaluations in stages.items():
        params = forces[f"from {count * SEGMENT:,} steps"] = fit(params, seen[:count], evaluations)
    for name, params in forces.items():
        with torch.no_grad():
            error = make_loss(plain, seen)(params)
        console.print(f"the force {name}: mean square error {error:.4f} over all {long * SEGMENT:,} steps")

    knob = [20, 9, 5] if fast else KNOB
    loops = {"plain": plain} | {f"remat, {k} checkpoints": with_checkpoints(k) for k in knob}
    first, *others = compare(
        f"the gradient of {long * SEGMENT:,} steps",
        {name: lambda loop=loop: grad(make_loss(loop, seen))(params) for name, loop in loops.items()},
        times=0,
    ).values()
    draw(forces, first, dict(zip(knob, others, strict=True)), long * SEGMENT)
    console.print("picture of the force, the memory, and time against checkpoints: long_sequence.png")


if __name__ == "__main__":
    main()
