"""Find a force from long trajectories: backpropagation through 10,000 steps of a neural ODE.

Pendulums swing, and are seen with noise. A small network is to become the force, a = F(q), such that trajectories of
10,000 steps under it pass through what was seen. The longer a trajectory, the more it tells, as a small error of the
force adds up to a large one of the phase. But autograd keeps every step. With `remat` it keeps

- the states between segments of 100 steps, and one segment at a time;
- or, with the segments halved and halved again, a number of states that grows as the logarithm of the steps.

    python examples/long_sequence.py [--fast]
"""

from collections.abc import Callable

import torch
from _common import MIB, compare, console, parser, progress, repeat
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad, grad_and_value

from remat import remat

Params = tuple[Tensor, Tensor, Tensor]
Kick = Callable[[Tensor, Tensor], Tensor]  # q, v -> v one step later
DT = 0.01  # seconds per step
SEGMENT = 100  # steps from one observation to the next
ANGLES = torch.linspace(0.3, 2.4, 8)[:, None]  # where the pendulums start, at rest


def pendulum(q: Tensor, v: Tensor) -> Tensor:
    return v - DT * torch.sin(q)


def start(width: int = 16) -> Params:
    return torch.randn(1, width), torch.empty(width).uniform_(-2, 2), torch.zeros(width, 1)


def network(params: Params, q: Tensor, v: Tensor) -> Tensor:
    weight, bias, out = params
    return torch.addmm(v, torch.addmm(bias, q, weight).tanh(), out, alpha=DT)


def leapfrog(kick: Kick, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Angles and velocities (pendulums, 1) one segment later."""
    for _ in range(SEGMENT):
        v = kick(q, v)
        q = torch.add(q, v, alpha=DT)
    return q, v


def observe(segments: int, noise: float) -> Tensor:
    """Angles (segments, pendulums, 1) of real pendulums, each at the end of a segment."""
    q, v, seen = ANGLES, torch.zeros_like(ANGLES), []
    for _ in range(segments):
        q, v = leapfrog(pendulum, q, v)
        seen.append(q + noise * torch.randn_like(q))
    return torch.stack(seen)


# ---------------------------------------------------------------- the loss, three ways

State = tuple[Params, Tensor, Tensor, Tensor, int]  # parameters, q, v, the error so far, the number of the segment
Segment = Callable[[State], State]


def plain(segment: Segment, n: int) -> Segment:
    def run(state: State) -> State:
        for _ in range(n):
            state = segment(state)
        return state

    return run


def segments(segment: Segment, n: int) -> Segment:
    return plain(remat(segment), n)


LOOPS: dict[str, Callable[[Segment, int], Segment]] = {
    "plain": plain,
    "remat of segments": segments,
    "remat, halved": lambda segment, n: repeat(segments(segment, 4), n // 4),
}


def make_loss(loop: Callable[[Segment, int], Segment], seen: Tensor) -> Callable[[Params], Tensor]:
    """The mean square of (angle - seen angle)."""

    def segment(state: State) -> State:
        params, q, v, error, k = state
        q, v = leapfrog(lambda q, v: network(params, q, v), q, v)
        return params, q, v, error + (q - seen[k]).square().mean() / len(seen), k + 1

    def loss(params: Params) -> Tensor:
        begin = params, ANGLES, torch.zeros_like(ANGLES), torch.zeros(()), 0
        return loop(segment, len(seen))(begin)[3]

    return loss


# ---------------------------------------------------------------- the fit


def fit(params: Params, seen: Tensor, evaluations: int) -> Params:
    """Improve the parameters by L-BFGS."""
    leaves = [p.clone() for p in params]
    step = grad_and_value(make_loss(segments if len(seen) > 10 else plain, seen))  # short ones need no remat
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
            total = max(evaluations, bar.tasks[task].completed + 1)  # its last line search may go on a little
            bar.update(task, advance=1, total=total, description=f"{len(seen) * SEGMENT} steps, error {value:.2g}")
            return value

        optimizer.step(evaluate)
    return tuple(leaves)


def draw(forces: dict[str, Params], histories: dict[str, list[tuple[float, int]]]) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    q = torch.linspace(-2.4, 2.4, 100)[:, None]
    rest = torch.zeros_like(q)
    left.plot(q, pendulum(q, rest) / DT, color="black", label="the pendulum")
    for name, params in forces.items():
        left.plot(q, network(params, q, rest) / DT, linestyle="--", label=name)
    left.set(title="the force", xlabel="angle", ylabel="angular acceleration")
    left.legend()
    for name, history in histories.items():
        _, live = zip(*history, strict=True)
        share = torch.linspace(0, 100, len(live))
        right.plot(share, [max(b, 1) / MIB for b in live], label=name)
    right.set(title="memory over one gradient", xlabel="% of its ops", ylabel="live MiB", xlim=(0, 100))
    right.set(yscale="log", ylim=1e-3)
    right.legend()
    figure.savefig("long_sequence.png", dpi=100)


def main() -> None:
    fast = parser("A neural ODE over 10,000 steps, with remat.").parse_args().fast
    stages = {1: 2, 4: 2} if fast else {3: 60, 10: 40, 100: 4}  # segments, and evaluations of the gradient
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

    measured = compare(
        f"the gradient of {long * SEGMENT:,} steps",
        {name: lambda loop=loop: grad(make_loss(loop, seen))(params) for name, loop in LOOPS.items()},
        times=0,
    )
    draw(forces, {name: m.history for name, m in measured.items()})
    console.print("the force and the memory: long_sequence.png")


if __name__ == "__main__":
    main()
