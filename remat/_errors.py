"""What remat raises, and how it warns."""

from __future__ import annotations

import sys
import warnings

from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


class CheckpointError(_TorchCheckpointError):
    """The rerun of a function was not a repetition of its forward run.

    `except torch.utils.checkpoint.CheckpointError` catches it too.
    """


class RematError(RuntimeError):
    """A function does something that can't be undone and run again; the message says what to write instead."""


def warn(message: str) -> None:
    """A warning that points at the line of the user's that called remat."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "remat":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
