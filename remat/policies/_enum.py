"""The decisions of a policy: torch's enum, and those of its members that policies name."""

from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

MUST_SAVE = CheckpointPolicy.MUST_SAVE
PREFER_SAVE = CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = CheckpointPolicy.PREFER_RECOMPUTE
MUST_CPU_OFFLOAD = CheckpointPolicy.MUST_CPU_OFFLOAD
