"""What each library's checkpointing can do, tried: torch.utils.checkpoint, jax.checkpoint, torch-remat and remat.

Each row is a small program. "yes": the derivative is the plain function's, and memory is saved. "saves nothing": the
peak of live bytes is as without. Otherwise the error. Of JAX, the derivatives alone are compared. Libraries that
are not installed are left out: `pip install jax torch-remat` adds them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import remat
from remat.debug import LiveBytes

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
X = torch.linspace(0.1, 1, 4096)


def block(x: Tensor) -> Tensor:
    for _ in range(10):
        x = torch.sin(x)
    return x


def of_blocks(wrap: Wrap, fun: Callable[[Tensor], Tensor] = block) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        for _ in range(8):
            x = wrap(fun)(x)
        return x.sum()

    return loss


def backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    f(x).backward()
    assert x.grad is not None
    return x.grad


def slope(x: Tensor) -> Tensor:
    """A function that uses torch.func itself, as the residual of a PDE does."""
    return grad(lambda x: block(x).sum())(x)


def late_binding(wrap: Wrap) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        for k in (1.0, 2.0, 3.0):
            x = wrap(lambda x: torch.sin(k * x))(x)  # noqa: B023
        return x.sum()

    return backward(loss, X)


def dropped(wrap: Wrap) -> Tensor:
    torch.manual_seed(0)
    return backward(of_blocks(wrap, lambda x: torch.dropout(torch.sin(x), 0.5, True)), X)


def running_average(wrap: Wrap) -> Tensor:
    state = {"mean": torch.zeros(())}

    def centered(x: Tensor) -> Tensor:
        state["mean"] = 0.9 * state["mean"] + 0.1 * x.detach().mean()
        return torch.sin(x - state["mean"])

    return backward(of_blocks(wrap, centered), X)


PROGRAMS: dict[str, Callable[[Wrap], Any]] = {
    ".backward()": lambda wrap: backward(of_blocks(wrap), X),
    "grad": lambda wrap: grad(of_blocks(wrap))(X),
    "vmap(grad)": lambda wrap: vmap(grad(of_blocks(wrap)))(X.expand(3, -1).clone()),
    "jvp(grad)": lambda wrap: jvp(grad(of_blocks(wrap)), (X,), (X,))[1],
    "grad(grad)": lambda wrap: grad(lambda x: grad(of_blocks(wrap))(x).sum())(X),
    "jacrev": lambda wrap: jacrev(lambda x: wrap(block)(x)[:3])(X[:64]),
    "torch.func inside, .backward()": lambda wrap: backward(of_blocks(wrap, slope), X),
    "a loop variable in a closure": late_binding,
    "a running average in a dict": running_average,
    "dropout drawn again": dropped,
}
MEMORY = {".backward()", "grad", "vmap(grad)", "jvp(grad)", "grad(grad)"}  # where there is some to be saved


def wrappers() -> dict[str, Wrap]:
    found: dict[str, Wrap] = {"torch": lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False)}
    if importlib.util.find_spec("torch_remat"):
        torch_remat = importlib.import_module("torch_remat")
        found["torch-remat"] = lambda f: torch_remat.checkpoint(region_name="block")(f)
    found["remat"] = remat.remat
    return found


def measured(program: Callable[[Wrap], Any], wrap: Wrap) -> tuple[Any, int]:
    with LiveBytes() as meter:
        result = program(wrap)
    return result, meter.peak


def attempt(name: str, wrap: Wrap) -> str:
    program = PROGRAMS[name]
    expected, plain_peak = measured(program, lambda f: f)
    try:
        result, peak = measured(program, wrap)
    except Exception as error:
        return type(error).__name__
    if not torch.allclose(result, expected):
        return "silently wrong"
    return "saves nothing" if name in MEMORY and peak > 0.8 * plain_peak else "yes"


def in_jax() -> dict[str, str]:
    """The same programs for JAX, as far as they mean something there."""
    jax = importlib.import_module("jax")
    jnp, x = jax.numpy, jax.numpy.linspace(0.1, 1, 64)

    def block(x: Any) -> Any:
        for _ in range(10):
            x = jnp.sin(x)
        return x

    def of_blocks(wrap: Wrap) -> Callable[[Any], Any]:
        def loss(x: Any) -> Any:
            for _ in range(8):
                x = wrap(block)(x)
            return x.sum()

        return loss

    def late(wrap: Wrap) -> Any:
        def loss(x: Any) -> Any:
            for k in (1.0, 2.0, 3.0):
                x = wrap(lambda x: jnp.sin(k * x))(x)  # noqa: B023
            return x.sum()

        return jax.grad(loss)(x)

    programs: dict[str, Callable[[Wrap], Any]] = {
        "grad": lambda wrap: jax.grad(of_blocks(wrap))(x),
        "vmap(grad)": lambda wrap: jax.vmap(jax.grad(of_blocks(wrap)))(jnp.stack([x, x, x])),
        "jvp(grad)": lambda wrap: jax.jvp(jax.grad(of_blocks(wrap)), (x,), (x,))[1],
        "grad(grad)": lambda wrap: jax.grad(lambda x: jax.grad(of_blocks(wrap))(x).sum())(x),
        "jacrev": lambda wrap: jax.jacrev(lambda x: wrap(block)(x)[:3])(x),
        "a loop variable in a closure": late,
    }
    right = {n: bool(jnp.allclose(p(jax.checkpoint), p(lambda f: f), atol=1e-5)) for n, p in programs.items()}
    return {name: "yes" if ok else "wrong" for name, ok in right.items()}


def main() -> None:
    columns: dict[str, dict[str, str]] = {
        library: {name: attempt(name, wrap) for name in PROGRAMS} for library, wrap in wrappers().items()
    }
    if importlib.util.find_spec("jax"):
        columns["JAX"] = in_jax()
    table = Table("", *columns, title="checkpointing of eight blocks, tried")
    for name in PROGRAMS:
        table.add_row(name, *(column.get(name, "-") for column in columns.values()))
    console = Console(width=110)
    console.print(table)
    versions = [f"torch {torch.__version__}"]
    versions += [
        f"{p} {importlib.metadata.version(p)}"
        for p in ("jax", "torch-remat")
        if importlib.util.find_spec(p.replace("-", "_"))
    ]
    console.print(", ".join(versions), platform.machine())


if __name__ == "__main__":
    main()
