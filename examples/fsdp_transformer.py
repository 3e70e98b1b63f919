"""Train a language model whose parameters are sharded by FSDP2, with activation checkpointing: none, full or selective.

Each process has a share of every parameter and of the batch. `fully_shard` gathers the parameters of a block before it
runs. After its backward, it averages their gradients and leaves each process its share. Then activations take most of
the memory. `apply_remat` wraps the blocks, so that they run again in the backward pass:

- `none`: all activations are kept, without remat;
- `full`: only the inputs of the blocks are kept;
- `selective`: the inputs and the results of linear layers are kept, and the rest is recomputed.

The text is the Python language reference that comes with every Python (`pydoc_data.topics`). The losses of all modes
are the same; the table at the end shows memory and time.

    torchrun --nproc-per-node 2 examples/fsdp_transformer.py [--mode none full selective] [--fast]
"""

import argparse
import os
import sys
import time
from pydoc_data.topics import topics
from typing import Any

import _transformer
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from remat import policies
from remat.debug import LiveBytes
from remat.nn import apply_remat

MIB = 2**20
POLICIES = {"full": None, "selective": policies.dots_with_no_batch_dims_saveable}
MODES = ["none", *POLICIES]

# ---------------------------------------------------------------- the model


class Block(_transformer.Block):
    """The block of the other examples, with attention in one op."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(-3, -2).flatten(-2))


class Transformer(nn.Module):
    """Predicts each next character of a text; the result is the loss."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads=width // 16) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time + 1) -> ()
        x = self.embedding(tokens[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def parallelize(model: Transformer, mesh: DeviceMesh, mode: str) -> None:
    """Checkpoint the blocks, then shard each of them, and the rest of the model."""
    if mode != "none":
        report = apply_remat(model, Block, policy=POLICIES[mode])
        if mesh.get_rank() == 0:
            print(report)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


# ---------------------------------------------------------------- training


def train(mode: str, mesh: DeviceMesh, text: Tensor, vocabulary: int, sizes: dict[str, int]) -> tuple[list[float], Any]:
    """The losses, and peak and time of the last step: bytes in this process, seconds."""
    torch.manual_seed(0)
    model = Transformer(vocabulary, sizes["length"], sizes["width"], sizes["depth"]).to(mesh.device_type)
    parallelize(model, mesh, mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1 + mesh.get_rank())  # each process has its own samples
    losses: list[float] = []

    def step() -> None:
        starts = torch.randint(len(text) - sizes["length"], (sizes["batch"], 1), generator=generator)
        tokens = text[starts + torch.arange(sizes["length"] + 1)].to(mesh.device_type)
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(mean.item() / mesh.size())

    for _ in range(sizes["steps"]):
        step()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    with LiveBytes() as meter:
        step()
    return losses, (meter.peak, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Activation checkpointing with FSDP2.")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES, help="all three, by default")
    parser.add_argument("--fast", action="store_true", help="a few steps of a tiny model")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    if args.fast:
        sizes = {"length": 16, "width": 16, "depth": 3, "batch": 4, "steps": 2}
    else:
        sizes = {"length": 128, "width": 128, "depth": 8, "batch": 16, "steps": 10}

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    characters = "\n".join(topics.values())
    code = {c: i for i, c in enumerate(sorted(set(characters)))}
    text = torch.tensor([code[c] for c in characters])

    table = Table(
        "mode", "first loss", "last loss", "peak of a step", "time of a step", title=f"{mesh.size()} processes"
    )
    all_losses = []
    for mode in args.mode:
        losses, (peak, seconds) = train(mode, mesh, text, len(code), sizes)
        all_losses.append(losses)
        table.add_row(mode, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{peak / MIB:.2f} MiB", f"{seconds:.2f} s")
    if mesh.get_rank() == 0:
        Console().print(table)
    torch.testing.assert_close(all_losses, [all_losses[0]] * len(all_losses), rtol=1e-3, atol=1e-3)
    dist.barrier()  # no process leaves while another still works
    sys.stdout.flush()
    os._exit(0)  # gloo's threads run on, and now and then abort a process that shuts down


if __name__ == "__main__":
    main()
