"""The decisions of a policy: torch's enum, with offloading also for versions of torch without it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint

if TYPE_CHECKING or hasattr(torch.utils.checkpoint.CheckpointPolicy, "MUST_CPU_OFFLOAD"):
    from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy
else:

    class CheckpointPolicy(enum.Enum):
        """Like torch's enum of this name, and equal to its members."""

        MUST_SAVE = 0
        PREFER_SAVE = 1
        MUST_RECOMPUTE = 2
        PREFER_RECOMPUTE = 3
        MUST_CPU_OFFLOAD = 4
        PREFER_CPU_OFFLOAD = 5

        def __eq__(self, other: Any) -> bool:
            kinds = (CheckpointPolicy, torch.utils.checkpoint.CheckpointPolicy)
            return isinstance(other, kinds) and self.name == other.name

        def __hash__(self) -> int:
            return hash(self.name)  # as torch's members are hashed
