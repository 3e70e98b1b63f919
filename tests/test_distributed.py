"""Two processes on gloo: gradients as of one process, and the blocks run twice, under every way to distribute a model.

The processes run all programs once; each test looks at one of them.
"""

import datetime
import faulthandler
import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import Seen, leave
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from remat import RematError, checkpoint, policies, remat
from remat._dispatch_mode import DispatchMode
from remat.compat import create_selective_checkpoint_contexts
from remat.debug import LiveBytes
from remat.nn import remat_module

WIDTH, DEPTH, STEPS = 32, 3, 3
SAMPLES = 80  # so large that reruns spare ops that nobody needs
Train = Callable[[nn.Module], Any]
Parts = Callable[[nn.Module], list[nn.Module]]


class Mlp(nn.Module):
    """Counts how often it runs."""

    runs = Seen()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Mlp.runs.append(0)
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.mlp(self.norm(x))


class DecoratedBlock(Block):
    @remat
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale)


class CheckpointedBlock(Block):
    """Each part is called through `checkpoint`, with its hooks."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * checkpoint(self.mlp, self.norm(x), use_reentrant=False)


class NestedBlock(CheckpointedBlock):
    """The same, in a region of its own."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return checkpoint(super().forward, x, scale, use_reentrant=False)


class ReentrantBlock(Block):
    """Is called through the reentrant variant, which needs an input that requires grad."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        return checkpoint(super().forward, x, scale, use_reentrant=True)


class ReentrantPartBlock(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * checkpoint(self.mlp, self.norm(x), use_reentrant=True)


class BatchNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class ReentrantBatchNormBlock(BatchNormBlock, ReentrantBlock):
    pass


class ClampingBlock(ReentrantBlock):
    """Changes a parameter within the region."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp.register_forward_pre_hook(self.clamp)

    def clamp(self, mlp: Mlp, args: Any) -> None:
        mlp.up.weight.data.clamp_(-1, 1)


class TwiceBlock(Block):
    """Calls a part twice."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(super().forward(x, scale / 2), scale)


class TwiceReentrantBlock(ReentrantPartBlock):
    """Calls a part in two regions."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(super().forward(x, scale / 2), scale)


class SelectiveBlock(Block):
    """Keeps products, with `checkpoint` and `contexts`."""

    checkpoint, contexts = staticmethod(checkpoint), staticmethod(create_selective_checkpoint_contexts)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        context_fn = functools.partial(self.contexts, policies.dots_with_no_batch_dims_saveable)
        return self.checkpoint(super().forward, x, scale, use_reentrant=False, context_fn=context_fn)


class TorchBlock(SelectiveBlock):
    checkpoint = staticmethod(torch.utils.checkpoint.checkpoint)
    contexts = staticmethod(torch.utils.checkpoint.create_selective_checkpoint_contexts)


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.spare = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, spare: int | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        if spare is not None:
            x = self.spare[spare](x)
        return self.head(x)


def net(block: type[Block] = Block, wrap: Callable[[nn.Module], Any] = lambda block: None) -> Net:
    torch.manual_seed(0)
    model = Net(block).double()
    for b in model.blocks:
        wrap(b)
    return model


def full(block: nn.Module) -> None:
    remat_module(block)


def selective(block: nn.Module) -> None:
    remat_module(block, policy=policies.dots_with_no_batch_dims_saveable)


def batches(part: slice) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)[part] for _ in range(STEPS)]


def whole(tensor: Tensor | None) -> Tensor | None:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return None if tensor is None else tensor.detach().clone()


def train(model: nn.Module, part: slice, *args: Any) -> dict[str, Any]:
    """A few steps: the parameters, the last gradients, and how many times a block ran."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    Mlp.runs.clear()
    for x in batches(part):
        optimizer.zero_grad()
        model(x, *args).square().sum(1).mean().backward()
        optimizer.step()
    named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return {
        "parameters": {n: whole(p) for n, p in named.items()},
        "gradients": {n: whole(p.grad) for n, p in named.items()},
        "runs": len(Mlp.runs),
    }


# The programs. Each takes the rank and the mesh.

PROGRAMS: dict[str, Callable[[int, DeviceMesh], Any]] = {}


def program(function: Callable[..., Any], name: str = "", **options: Any) -> None:
    PROGRAMS[name] = lambda rank, mesh: function(rank, mesh, **options)


def mine(rank: int) -> slice:
    return slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)


def ddp(rank: int, mesh: DeviceMesh, model: Callable[[], Net], *args: Any, **options: Any) -> Any:
    spare = options.pop("spare", False)
    network = model()
    if not spare:
        del network.spare
    return train(DistributedDataParallel(network, **options), mine(rank), *([rank] if spare else []))


def no_sync(rank: int, mesh: DeviceMesh, model: Callable[[], Net]) -> Any:
    """Gradients of two backward passes, synchronised with the second one."""
    network = model()
    del network.spare
    distributed = DistributedDataParallel(network)
    first, second, _ = batches(mine(rank))
    with distributed.no_sync():
        distributed(first).square().sum(1).mean().backward()
    distributed(second).square().sum(1).mean().backward()
    return {n.removeprefix("module."): whole(p.grad) for n, p in distributed.named_parameters()}


def itself(block: nn.Module) -> list[nn.Module]:
    return [block]


def inner(block: nn.Module) -> list[nn.Module]:
    return [block.norm, block.mlp]


def layers(block: nn.Module) -> list[nn.Module]:
    return [block.norm, block.mlp.up, block.mlp.down]


def shard(
    rank: int,
    mesh: DeviceMesh,
    model: Callable[[], Net],
    parts: Parts = itself,
    then: Callable[[nn.Module], Any] = lambda block: None,
    **options: Any,
) -> Any:
    network = model()
    del network.spare
    for block in network.blocks:
        for part in parts(block):
            fully_shard(part, mesh=mesh, **options)
        then(block)
    fully_shard(network, mesh=mesh, **options)
    return train(network, mine(rank))


class Products(DispatchMode):
    looks_inside = True
    count = 0

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **kwargs)


def cost(distribute: Callable[[Net], Any], model: Callable[[], Net]) -> tuple[int, int]:
    """The bytes that a forward leaves, and how many products a step computes.

    A thread of gloo may hold the buffer of a collective a little longer: the least of several steps counts.
    """
    network = model()
    del network.spare
    distribute(network)
    x, *_ = batches(slice(SAMPLES))
    network(x).square().mean().backward()
    held = []
    for _ in range(5):
        with LiveBytes() as meter, Products() as products:
            loss = network(x).square().mean()
            held.append(meter.current)
            loss.backward()
    return min(held), products.count


def costs(rank: int, mesh: DeviceMesh, distribute: Callable[..., Any]) -> Any:
    ways = {
        "plain": net,
        "torch": lambda: net(TorchBlock),
        "checkpoint": lambda: net(SelectiveBlock),
        "remat": lambda: net(wrap=selective),
    }
    return {way: cost(functools.partial(distribute, mesh=mesh), model) for way, model in ways.items()}


def reentrant_and_plain(rank: int, mesh: DeviceMesh, parts: Parts, **options: Any) -> list[dict[str, Any]]:
    """Gradients of two backward passes, the second through two forwards, and buffers; some parameters are frozen."""
    found = []
    for block in (ReentrantBatchNormBlock, BatchNormBlock):
        network = net(block)
        del network.spare
        network.blocks[1].mlp.up.requires_grad_(False)
        network.blocks[2].requires_grad_(False)
        for b in network.blocks:
            for part in parts(b):
                fully_shard(part, mesh=mesh, **options)
        fully_shard(network, mesh=mesh, **options)
        first, *others = batches(mine(rank))
        for inputs in ([first], others):
            torch.stack([network(x).square().sum(1).mean() for x in inputs]).sum().backward()
        found.append({n: whole(p.grad) for n, p in network.named_parameters()} | dict(network.named_buffers()))
    return found


def twin_of_a_sharded_module(rank: int, mesh: DeviceMesh) -> str:
    layer = fully_shard(nn.Linear(3, 3), mesh=mesh)
    with pytest.raises(ValueError, match="remat: ") as raised:
        remat(layer)
    return str(raised.value)


def gradient_of_input(rank: int, mesh: DeviceMesh) -> None:
    network = net(ReentrantBlock)
    del network.spare
    for block in network.blocks:
        for part in inner(block):
            fully_shard(part, mesh=mesh)
    fully_shard(network, mesh=mesh)
    x = batches(mine(rank))[0].requires_grad_()
    torch.autograd.grad(network(x).sum(), x)


def parallelize(block: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(block, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})


def tensor_parallel(rank: int, mesh: DeviceMesh, model: Callable[[], Net]) -> Any:
    network = model()
    del network.spare
    for block in network.blocks:
        parallelize(block, mesh)
    return train(network, slice(SAMPLES))


def dtensors(rank: int, mesh: DeviceMesh, policy: Any = None) -> Any:
    """The gradients of a remat'd function of DTensors, and those of the plain one."""

    def fun(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w) @ w.T)

    def gradients(fun: Callable[..., Tensor]) -> list[Tensor | None]:
        x, *_ = batches(slice(SAMPLES))
        w = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
        leaves = [distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in (x, w)]
        fun(*leaves).square().sum().backward()
        return [whole(t.grad) for t in leaves]

    return gradients(remat(fun, policy=policy)), gradients(fun)


def peak_of_forward(rank: int, mesh: DeviceMesh) -> Any:
    """The peak of a chain of DTensors and local tensors, in a forward of torch's checkpoint and of remat's."""

    def fun(x: Tensor) -> Tensor:
        for _ in range(8):
            x = DTensor.from_local(x, mesh, [Shard(0)]).sin().to_local()
        return x

    def peak(checkpoint: Any) -> int:
        x = torch.ones(SAMPLES, WIDTH, requires_grad=True)
        checkpoint(fun, x, use_reentrant=False)
        with LiveBytes() as meter:
            checkpoint(fun, x, use_reentrant=False)
        return meter.peak

    return peak(torch.utils.checkpoint.checkpoint), peak(checkpoint)


def first_and_second(rank: int, mesh: DeviceMesh) -> Any:
    """What a policy and a meter see of two equal steps. In the first, DTensor finds out the shapes, with ops."""
    asked = Seen()
    w = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Shard(1)]).requires_grad_()
    x = distribute_tensor(torch.ones(SAMPLES + 3, WIDTH), mesh, [Shard(0)])

    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(op)
        return True

    policy = policies.save_if(keep)
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    found = []
    for _ in range(2):
        asked.clear()
        with FlopCounterMode(display=False) as meter:
            checkpoint(lambda: ((x @ w).sin() @ w.T).sin(), use_reentrant=False, context_fn=context_fn).sum().backward()
        found.append((len(asked), meter.get_total_flops()))
    return found


def on_fake_tensors(rank: int, mesh: DeviceMesh) -> list[int]:
    """The FLOPs that a meter sees of fake tensors, without a policy and with one, which keeps nothing of them."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, policies.dots_saveable)
    found = []
    for options in ({}, {"context_fn": context_fn}):
        with FakeTensorMode(), FlopCounterMode(display=False) as meter:
            w = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Replicate()]).requires_grad_()
            x = distribute_tensor(torch.ones(SAMPLES, WIDTH), mesh, [Replicate()])
            y = checkpoint(lambda: ((x @ w).sin() @ w.T).sin(), use_reentrant=False, **options)
            y.sum().backward()
        found.append(meter.get_total_flops())
    return found


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_reduce": lambda y, x: dist.all_reduce(y),
    "all_reduce, async": lambda y, x: dist.all_reduce(y, async_op=True).wait(),  # type: ignore[union-attr]
    "all_gather": lambda y, x: dist.all_gather([*y.unbind()], x[0]),
    "all_gather_into_tensor": lambda y, x: dist.all_gather_into_tensor(y, x[:1]),
    "all_to_all_single": lambda y, x: dist.all_to_all_single(y, x),
    "broadcast": lambda y, x: dist.broadcast(y, 0),
    "gather": lambda y, x: dist.gather(x[0], [*y.unbind()] if dist.get_rank() == 0 else None),
    "reduce": lambda y, x: dist.reduce(y, 0),
    "reduce_scatter": lambda y, x: dist.reduce_scatter(y[0], [*x.unbind()]),
    "reduce_scatter_tensor": lambda y, x: dist.reduce_scatter_tensor(y[:1], x),
    "scatter": lambda y, x: dist.scatter(y[0], [*x.unbind()] if dist.get_rank() == 0 else None),
}
"""What they write to comes first."""
if torch.__version__ < (2, 12):  # torch shows these to no mode: docs/distributed.md
    for unseen in ("broadcast", "gather", "reduce", "reduce_scatter", "scatter"):
        del COLLECTIVES[unseen]
KEEPS = {
    "no policy": remat,
    "dots": remat(policy=policies.dots_saveable),
    "some ops": remat(policy=policies.save_ops("cos", "clone", "exp")),
    "everything": remat(policy=policies.everything_saveable),
    "non-reentrant": lambda fun: checkpoint(use_reentrant=False)(fun),
    "reentrant": lambda fun: checkpoint(use_reentrant=True)(fun),
}


def collectives(rank: int, mesh: DeviceMesh, collective: Callable[[Tensor, Tensor], Any], inside: bool) -> Any:
    """For each way to keep results: the gradient, and the tensor that the collective wrote to. The plain ones first.

    `inside`: whether the function has made that tensor.
    """

    def gradients(make: Any) -> tuple[Tensor | None, Tensor]:
        state = torch.ones(2, 3, dtype=torch.float64)

        def fun(w: Tensor) -> Tensor:
            y = (x @ w).cos()
            written = y.detach().clone() if inside else state
            collective(written, y.detach())
            return (written.exp() * y).sin() * written

        x = torch.arange(6, dtype=torch.float64).view(2, 3) / 5 - rank
        w = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_()
        make(fun)(w).sum().backward()
        return w.grad, state

    return [gradients(make) for make in (lambda fun: fun, *KEEPS.values())]


def error_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            function(*args, **kwargs)
        except RematError as error:
            return str(error)

    return run


WAYS = {
    "full": lambda: net(wrap=full),
    "selective": lambda: net(wrap=selective),
    "decorated": lambda: net(DecoratedBlock),
}
for way, make in WAYS.items():
    program(ddp, f"ddp {way}", model=make)
    program(ddp, f"ddp static_graph {way}", model=make, static_graph=True)
    program(ddp, f"ddp find_unused_parameters {way}", model=make, find_unused_parameters=True, spare=True)
    program(no_sync, f"no_sync {way}", model=make)
    program(shard, f"remat, then fully_shard {way}", model=make)
    program(shard, f"kept gathered {way}", model=make, reshard_after_forward=False)
for way, wrap in (("full", full), ("selective", selective)):
    program(shard, f"fully_shard, then remat {way}", model=net, then=wrap)
    program(shard, f"shards inside {way}", model=WAYS[way], parts=inner)
    program(shard, f"shards inside, kept gathered {way}", model=WAYS[way], parts=inner, reshard_after_forward=False)
    program(
        shard,
        f"shards inside, by column {way}",
        model=WAYS[way],
        parts=lambda block: [block.mlp],
        shard_placement_fn=lambda p: Shard(p.ndim - 1),
    )
    program(tensor_parallel, f"tensor parallel {way}", model=WAYS[way])
    program(shard, f"each layer a shard inside {way}", model=WAYS[way], parts=layers)
program(shard, "shards inside of checkpoint", model=lambda: net(CheckpointedBlock), parts=inner)
program(shard, "shards inside, called twice", model=lambda: net(TwiceBlock, full), parts=inner)
NESTED = [
    (f"nested{', kept gathered' * kept} {name}", parts, {"reshard_after_forward": not kept})
    for kept in (False, True)
    for name, parts in (("block", itself), ("parts", inner), ("layers", layers))
]
for name, parts, options in NESTED:
    program(shard, name, model=lambda: net(NestedBlock), parts=parts, **options)
REENTRANT = [
    (f"reentrant{', kept gathered' * kept} {name}", parts, {"reshard_after_forward": not kept})
    for kept in (False, True)
    for name, parts in (("block", itself), ("parts", inner), ("layers", layers), ("root", lambda block: []))
]
for name, parts, options in REENTRANT:
    program(shard, name, model=lambda: net(ReentrantBlock), parts=parts, **options)
    program(reentrant_and_plain, f"compared: {name}", parts=parts, **options)
program(shard, "shards inside, called twice, reentrant", model=lambda: net(TwiceReentrantBlock), parts=inner)
program(error_of(gradient_of_input), "error: reentrant, gradient of input")
program(error_of(shard), "error: reentrant, clamping", model=lambda: net(ClampingBlock))
program(error_of(shard), "error: shards inside", model=WAYS["decorated"], parts=inner)
program(error_of(tensor_parallel), "error: tensor parallel", model=WAYS["decorated"])
program(twin_of_a_sharded_module, "error: a module of its own")
for name, collective in COLLECTIVES.items():
    for inside in (True, False):
        program(collectives, f"collective {name}, {inside}", collective=collective, inside=inside)
program(dtensors, "dtensors")
program(first_and_second, "costs of the first step")
program(on_fake_tensors, "costs of fake tensors")
program(peak_of_forward, "costs of local tensors")
program(dtensors, "dtensors, with a policy", policy=policies.dots_saveable)


def parts(network: Net, **options: Any) -> None:
    for block in network.blocks:
        fully_shard(block.mlp, **options)


def parts_and_root(network: Net, **options: Any) -> None:
    for block in network.blocks:
        for part in (block.mlp.up, block.mlp.down, block):
            fully_shard(part, **options)
    fully_shard(network, **options)


COSTS = {
    "tensor parallel": lambda network, mesh: [parallelize(block, mesh) for block in network.blocks],
    "shards inside": parts,
    "shards inside, kept gathered": functools.partial(parts, reshard_after_forward=False),
    "shards inside, root too": parts_and_root,
}
for name, distribute in COSTS.items():
    program(costs, f"costs: {name}", distribute=distribute)


def process(rank: int, folder: str) -> None:
    faulthandler.enable()  # an abort in a thread of gloo says where
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (2,))
    results: dict[str, Any] = {}
    for name, run in PROGRAMS.items():
        try:
            results[name] = run(rank, mesh)
        except Exception:
            results[name] = traceback.format_exc()
        faulthandler.dump_traceback_later(100)  # before the other process gives up
        dist.barrier()
    torch.save(results, f"{folder}/{rank}")
    leave(store, rank)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has found."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(process, (str(folder),), nprocs=2)
    return [torch.load(folder / str(rank)) for rank in range(2)]


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


OTHERS = ("collective", "costs", "compared", "no_sync", "error", "dtensors", "ddp find", "shards inside, called")
TRAINED = [name for name in PROGRAMS if not name.startswith(OTHERS)]


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    model = net()
    del model.spare
    expected = train(model, slice(SAMPLES))
    for result in (r[name] for r in results):
        assert isinstance(result, dict), result
        assert_close(result["gradients"], expected["gradients"])
        assert_close(result["parameters"], expected["parameters"])
        assert result["runs"] == 2 * STEPS * DEPTH  # the rerun around another region ends where that begins


@pytest.mark.parametrize("name", ["shards inside, called twice", "shards inside, called twice, reentrant"])
def test_a_sharded_part_that_is_called_twice(results: list[dict[str, Any]], name: str) -> None:
    model = net(TwiceBlock)
    del model.spare
    expected = train(model, slice(SAMPLES))
    for result in (r[name] for r in results):
        assert isinstance(result, dict), result
        assert_close(result["gradients"], expected["gradients"])
        assert result["runs"] == 2 * expected["runs"]


@pytest.mark.parametrize("name", [name for name, *_ in REENTRANT])
def test_the_reentrant_variant_accumulates_as_without_it(results: list[dict[str, Any]], name: str) -> None:
    for result in (r[f"compared: {name}"] for r in results):
        assert isinstance(result, list), result
        assert_close(*result)


@pytest.mark.parametrize("way", WAYS)
def test_ddp_finds_unused_parameters(results: list[dict[str, Any]], way: str) -> None:
    """Each process uses a part that the other one does not use."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches(slice(SAMPLES)):
        optimizer.zero_grad()
        (sum(model(x[mine(rank)], rank).square().sum(1).mean() for rank in range(2)) / 2).backward()
        optimizer.step()
    for result in (r[f"ddp find_unused_parameters {way}"] for r in results):
        assert isinstance(result, dict), result
        assert_close(result["gradients"], {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_accumulated_without_sync(results: list[dict[str, Any]], way: str) -> None:
    model = net()
    del model.spare
    for x in batches(slice(SAMPLES))[:2]:
        model(x).square().sum(1).mean().backward()
    for result in (r[f"no_sync {way}"] for r in results):
        assert isinstance(result, dict), result
        assert_close(result, {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("name", ["dtensors", "dtensors, with a policy"])
def test_a_function_of_dtensors(results: list[dict[str, Any]], name: str) -> None:
    for result in (r[name] for r in results):
        assert isinstance(result, tuple), result
        torch.testing.assert_close(*result, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", COSTS)
def test_a_policy_keeps_products_of_this_process(results: list[dict[str, Any]], name: str) -> None:
    for found in (r[f"costs: {name}"] for r in results):
        assert isinstance(found, dict), found
        products = {way: count for way, (_, count) in found.items()}
        assert products == dict.fromkeys(found, products["plain"])
        by_torch, _ = found["torch"]
        assert all(held <= by_torch for held, _ in (found["checkpoint"], found["remat"])), found


def test_a_meter_sees_fake_tensors(results: list[dict[str, Any]]) -> None:
    for found in (r["costs of fake tensors"] for r in results):
        assert isinstance(found, list), found
        without_policy, with_policy = found
        assert without_policy == with_policy > 0


def test_local_tensors_are_freed(results: list[dict[str, Any]]) -> None:
    for found in (r["costs of local tensors"] for r in results):
        assert isinstance(found, tuple), found
        by_torch, by_remat = found
        assert by_remat <= by_torch


def test_a_policy_is_not_asked_about_the_shapes_of_dtensors(results: list[dict[str, Any]]) -> None:
    for found in (r["costs of the first step"] for r in results):
        assert isinstance(found, list), found
        first, second = found
        assert first == second


@pytest.mark.parametrize("inside", [True, False], ids=["a result", "state from outside"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_a_collective_writes_to(results: list[dict[str, Any]], name: str, inside: bool) -> None:
    """Its op does not say that it writes, and no version counts it."""
    for result in (r[f"collective {name}, {inside}"] for r in results):
        assert isinstance(result, list), result
        expected, *found = result
        for way, gradients in zip(KEEPS, found, strict=True):
            for a, b in zip(gradients, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, way=way: f"{way}: {m}")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shards inside", "that fully_shard has sharded"),
        ("tensor parallel", "takes a DTensor apart"),
        ("a module of its own", "would not know its twin"),
    ],
)
def test_what_a_decorated_function_can_not_do_is_an_error(
    results: list[dict[str, Any]], name: str, reason: str
) -> None:
    for result in results:
        assert reason in result[f"error: {name}"]
        assert "remat_module" in result[f"error: {name}"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gradient of input", r"\.backward\(\) without inputs alone"), ("clamping", r"in place that is differentiated")],
)
def test_what_the_reentrant_variant_can_not_do_is_an_error(
    results: list[dict[str, Any]], name: str, reason: str
) -> None:
    for result in results:
        error = result[f"error: reentrant, {name}"]
        assert re.search(reason, error)
        assert "use_reentrant=False" in error
