"""What remat raises."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


class CheckpointError(_TorchCheckpointError):
    """The rerun of a function was not a repetition of its forward run.

    `except torch.utils.checkpoint.CheckpointError` catches it too.
    """


class RematError(RuntimeError):
    """A function does something that can't be undone and run again; the message says what to write instead."""
