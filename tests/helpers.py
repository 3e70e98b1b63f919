"""What the tests share: counting ops, comparing with the plain function, the transforms to compare under."""

import functools
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

from remat import checkpoint, remat
from remat._torch_internals import TorchDispatchMode, is_wrapper

Fun = Callable[[Tensor], Tensor]

KEEPS = pytest.mark.filterwarnings("ignore:remat. .* keeps a tensor that it computed")
"""For a test whose function does so."""

UNIT = 65536  # bytes of one activation: so large that scalars do not matter
SIZE = UNIT // 4


class Seen(deque[Any]):
    """A list that no rerun puts back: it tells of all runs."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return [*self] == other


def plain(fun: Any) -> Any:
    """The decorator to compare `remat` with: none."""
    return fun


CHECKPOINTS: dict[str, Callable[[Any], Any]] = {
    "non-reentrant": lambda fun: functools.partial(checkpoint, fun, use_reentrant=False),
    "reentrant": lambda fun: functools.partial(checkpoint, fun, use_reentrant=True),
}
DECORATORS: dict[str, Callable[[Any], Any]] = {"remat": remat, **CHECKPOINTS}


def at_an_address_of(died: set[int], make: Callable[[], Tensor], is_one: bool = True) -> Tensor:
    """What `make` makes, where one of the tensors was that have died, or elsewhere. Anywhere if there is none."""
    made = [make() for _ in range(200)]
    return next((t for t in made if (id(t) in died) is is_one), made[0])


def in_turn(*steps: Fun) -> Fun:
    """One function after the other."""

    def fun(x: Any) -> Any:
        for step in steps:
            x = step(x)
        return x

    return fun


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """The same doubles every time."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def activation(*batch: int) -> Tensor:
    """A tensor of one unit (for each element of the batch)."""
    return torch.linspace(-1, 1, SIZE).expand(*batch, SIZE).clone()


class CountOps(TorchDispatchMode):
    """Count the ops that run below every transform: `ops["sin"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name: str) -> int:
        return self.counts[name]


def assert_same(actual: Any, expected: Any, rounding: float = 1e-10) -> None:
    """The same structure, values up to a `rounding` of doubles, and the same leaves that require grad."""
    found, spec = optree.tree_flatten(actual, none_is_leaf=True, namespace="torch")
    wanted, expected_spec = optree.tree_flatten(expected, none_is_leaf=True, namespace="torch")
    assert spec == expected_spec
    for a, e in zip(found, wanted, strict=True):
        if isinstance(e, Tensor):
            tolerance = rounding if e.dtype in (torch.float64, torch.complex128) else 1e-5
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert a.requires_grad == e.requires_grad
        else:
            assert a == e


def loss(fun: Fun) -> Fun:
    """A scalar whose gradient differs from element to element."""
    return lambda x: (fun(x).sin() * torch.arange(1, x.numel() + 1, dtype=x.dtype).view(x.shape)).sum()


def pair(x: Tensor) -> Tensor:
    """A batch of two."""
    return torch.stack([x, x.flip(0) + 0.1])


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _vjp(fun: Fun, x: Tensor) -> Any:
    value, pull = vjp(fun, x)
    return value, pull(x.cos()), pull(x.sin())


def _vjp_after_other_transforms(fun: Fun, x: Tensor) -> Any:
    value, pull = vjp(fun, x)

    def later(v: Tensor) -> Tensor:
        return pull(v)[0].square().sum()

    return value, grad(later)(x.cos()), vmap(pull)(pair(x)), jvp(later, (x.cos(),), (x,))


def _linearize(fun: Fun, x: Tensor) -> Any:
    value, push = linearize(fun, x)
    return value, push(x.cos()), push(x.sin())


def _backward(fun: Fun, x: Tensor) -> Any:
    x = leaf(x)
    value = loss(fun)(x)
    value.backward()
    return value.detach(), x.grad


def _double_backward(fun: Fun, x: Tensor) -> Any:
    x = leaf(x)
    (first,) = torch.autograd.grad(loss(fun)(x), x, create_graph=True)
    return first.detach(), torch.autograd.grad(first.cos().sum(), x)


def _third_backward(fun: Fun, x: Tensor) -> Any:
    x = leaf(x)
    (y,) = torch.autograd.grad(loss(fun)(x), x, create_graph=True)
    (y,) = torch.autograd.grad(y.cos().sum(), x, create_graph=True)
    return torch.autograd.grad(y.cos().sum(), x)


def _autograd_inside_grad(fun: Fun, x: Tensor) -> Any:
    def penalty(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(loss(fun)(x), x, create_graph=True)
        return g.square().sum()

    return grad(penalty)(x)


def _forward_ad(fun: Fun, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(fun(forward_ad.make_dual(x, x.cos()))))


def _forward_over_backward(fun: Fun, x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf(x), x.cos())
        (g,) = torch.autograd.grad(loss(fun)(dual), dual)
        return tuple(forward_ad.unpack_dual(g))


def _backward_over_forward(fun: Fun, x: Tensor) -> Any:
    x = leaf(x)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(fun(forward_ad.make_dual(x, x.detach().cos()))).tangent
        return torch.autograd.grad(((0 if tangent is None else tangent) + x).sin().sum(), x)


def _batched_backward(fun: Fun, x: Tensor) -> Any:
    x = leaf(x)
    return torch.autograd.grad(fun(x), x, pair(x.detach()), is_grads_batched=True, allow_unused=True)


def _backward_inside_jvp(fun: Fun, x: Tensor) -> Any:
    return jvp(lambda x: vjp(fun, x)[1](x.cos())[0], (x,), (x.sin(),))


# Each takes a function from tensors to tensors of the same shape and a tensor, and gives the tree to compare.
TRANSFORMS: dict[str, Callable[[Fun, Tensor], Any]] = {
    "call": lambda f, x: f(x),
    "grad": lambda f, x: grad(loss(f))(x),
    "grad_and_value": lambda f, x: grad_and_value(loss(f))(x),
    "vjp": _vjp,
    "vjp never called": lambda f, x: vjp(f, x)[0],
    "vjp after other transforms": _vjp_after_other_transforms,
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "linearize": _linearize,
    "vmap": lambda f, x: vmap(f)(pair(x)),
    "vmap in 2 out 1": lambda f, x: vmap(f, in_dims=2, out_dims=1)(pair(x).movedim(0, 2)),
    "vmap in -2 out -1": lambda f, x: vmap(f, in_dims=-2, out_dims=-1)(pair(x).movedim(0, 1)),
    "vmap in chunks": lambda f, x: vmap(f, chunk_size=1)(pair(x)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacrev in chunks": lambda f, x: jacrev(f, chunk_size=2)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(loss(f))(x),
    "functionalize": lambda f, x: functionalize(f)(x),
    # Nests.
    "grad(grad)": lambda f, x: grad(loss(grad(loss(f))))(x),
    "grad(grad(grad))": lambda f, x: grad(loss(grad(loss(grad(loss(f))))))(x),
    "vmap(grad)": lambda f, x: vmap(grad(loss(f)))(pair(x)),
    "grad(vmap)": lambda f, x: grad(lambda xs: vmap(loss(f))(xs).sin().sum())(pair(x)),
    "vmap(vmap(grad))": lambda f, x: vmap(vmap(grad(loss(f)), in_dims=2, out_dims=-1))(pair(pair(x)).movedim(1, 3)),
    "vmap(grad(vmap))": lambda f, x: vmap(grad(lambda xs: vmap(loss(f))(xs).sin().sum()))(pair(pair(x))),
    "vmap(grad(grad))": lambda f, x: vmap(grad(loss(grad(loss(f)))))(pair(x)),
    "jvp(grad)": lambda f, x: jvp(grad(loss(f)), (x,), (x.cos(),)),
    "grad(jvp)": lambda f, x: grad(lambda x: jvp(loss(f), (x,), (x.cos(),))[1])(x),
    "jvp(jvp)": lambda f, x: jvp(lambda x: jvp(f, (x,), (x.cos(),))[1], (x,), (x.sin(),)),
    "jvp(jvp(grad))": lambda f, x: jvp(lambda x: jvp(grad(loss(f)), (x,), (x.cos(),))[1], (x,), (x.sin(),)),
    "jvp(vjp)": _backward_inside_jvp,
    "vmap(jvp(grad))": lambda f, x: vmap(lambda x: jvp(grad(loss(f)), (x,), (x.cos(),)))(pair(x)),
    "grad(vmap(jvp))": lambda f, x: grad(lambda xs: vmap(lambda x: jvp(loss(f), (x,), (x.cos(),))[1])(xs).sin().sum())(
        pair(x)
    ),
    "jacrev(jacrev)": lambda f, x: jacrev(jacrev(loss(f)))(x),
    "jacrev(jacfwd)": lambda f, x: jacrev(jacfwd(loss(f)))(x),
    "jacfwd(jacfwd)": lambda f, x: jacfwd(jacfwd(loss(f)))(x),
    "vmap(hessian)": lambda f, x: vmap(hessian(loss(f)))(pair(x)),
    "functionalize(grad)": lambda f, x: functionalize(grad(loss(f)))(x),
    "functionalize(vmap(grad))": lambda f, x: functionalize(vmap(grad(loss(f))))(pair(x)),
    "linearize(grad)": lambda f, x: linearize(grad(loss(f)), x)[1](x.cos()),
    # Plain autograd, alone and mixed.
    ".backward()": _backward,
    "double backward": _double_backward,
    "third backward": _third_backward,
    "autograd inside grad": _autograd_inside_grad,
    "forward AD": _forward_ad,
    "forward AD over backward": _forward_over_backward,
    "backward over forward AD": _backward_over_forward,
    "batched backward": _batched_backward,
    ".backward() of vmap": lambda f, x: _backward(lambda x: vmap(f)(pair(x))[0], x),
    ".backward() of grad": lambda f, x: _backward(grad(loss(f)), x),
    ".backward() of jvp": lambda f, x: _backward(lambda x: jvp(f, (x,), (x.cos(),))[1], x),
    "double backward of vmap(grad)": lambda f, x: _double_backward(lambda x: vmap(grad(loss(f)))(pair(x))[1], x),
}

# Enough to meet every rule once.
SOME_TRANSFORMS = [
    "call",
    "grad",
    "vmap",
    "jvp",
    "vmap(grad)",
    "grad(grad)",
    "jvp(grad)",
    "grad(jvp)",
    "jacrev",
    "vjp",
    "functionalize(grad)",
    ".backward()",
    "double backward",
    "forward AD",
    ".backward() of vmap",
]


class Window(nn.Module):
    """Its buffers are the bounds of a slice, which C++ reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begin", torch.tensor(0))
        self.register_buffer("end", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x * x[self.begin : self.end].sin().sum()
        self.begin += 1
        self.end += 1
        return y


def as_memory(x: Tensor) -> Tensor:
    """A tensor over the same memory, below all transforms. No mode sees what it is made from, as in an extension."""
    if is_wrapper(x):
        return x
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach()))


class Times(torch.autograd.Function):
    """No torch function is seen to read its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x


class ReadsTwice(torch.autograd.Function):
    """x, with the gradient g * x: its backward reads twice what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,), (x,) = ctx.saved_tensors, ctx.saved_tensors
        return g * x


def with_constants(net: nn.Module) -> nn.Module:
    """The module, with the same parameters each time."""
    for i, p in enumerate(net.parameters()):
        nn.init.constant_(p, 0.1 + i)
    return net


class Adjoint(torch.autograd.Function):
    """`net(x)`. Its backward calls the module again and differentiates that, as adjoint methods do."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.net = net
        ctx.save_for_backward(x, *parameters)
        return net(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        inputs, create_graph = ctx.saved_tensors, torch.is_grad_enabled()
        with torch.enable_grad():
            y = ctx.net(inputs[0])
        return None, *torch.autograd.grad(y, inputs, g, create_graph=create_graph, allow_unused=True)


class Reversible(torch.autograd.Function):
    """`x + net(x)`. Its backward calls the module again, and accumulates into the parameters itself."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: Tensor) -> Tensor:
        ctx.net, ctx.x = net, x.detach()
        return x + net(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            y = x + ctx.net(x)
        torch.autograd.backward(y, g)
        return None, x.grad


def leave(store: dist.Store, rank: int) -> None:
    """End the process when both are done. Gloo's threads run on, and now and then abort a process that shuts down."""
    store.set(str(rank), "done")
    store.wait(["0", "1"])
    os._exit(0)


_RUN_SCRIPTS = """
import contextlib, pathlib, runpy, sys, traceback
where, options, files = pathlib.Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]
for file in files:
    sys.argv = [file, *options]
    with (where / f"{pathlib.Path(file).stem}.out").open("w") as out:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                runpy.run_path(file, run_name="__main__")
            except BaseException:
                traceback.print_exc()
"""


def run_scripts(files: Iterable[Path], options: str, where: Path) -> dict[str, str]:
    """What each script prints. They run in this folder, all in one process: most of the time of one is its imports.

    The warnings that users see are errors.
    """
    files = [*files]
    paths = Path(__file__).parent.parent, files[0].parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _RUN_SCRIPTS, str(where), options, *map(str, files)]
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.stem: (where / f"{file.stem}.out").read_text() for file in files}
