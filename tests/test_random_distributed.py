"""The recipe of docs/random.md for several processes, in two of them."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import leave

PAGE = Path(__file__).parent.parent / "docs" / "random.md"


def recipe() -> dict[str, torch.Tensor]:
    """What the code on the page computes in this process."""
    scope: dict[str, torch.Tensor] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, scope)
    return scope


def process(rank: int, path: str) -> None:
    os.environ["RANK"] = str(rank)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(rank)  # the global generators differ, which does not matter
    torch.rand(rank + 3)
    scope = recipe()
    for name, same in (("shared", True), ("own", False)):
        everyones = [torch.empty_like(scope[name]) for _ in range(2)]
        dist.all_gather(everyones, scope[name])
        assert torch.equal(*everyones) is same, name
    keys = [torch.empty(2, dtype=torch.int32) for _ in range(2)]
    dist.all_gather(keys, scope["step_key"].view(torch.int32))
    assert torch.equal(*keys)
    leave(store, rank)


def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(process, (str(tmp_path / "store"),), nprocs=2)
