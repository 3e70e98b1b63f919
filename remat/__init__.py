"""Activation checkpointing as a functional transform: recompute on backward, under every `torch.func` transform."""

from remat import compat as compat
from remat import debug as debug
from remat import integrations as integrations
from remat import nn as nn
from remat import policies as policies
from remat import random as random
from remat._context import is_rerunning
from remat._custom import custom_remat
from remat._errors import CheckpointError, RematError
from remat._inspect import OpCost, OpCosts, Residual, list_ops, print_saved_residuals, saved_residuals
from remat._names import checkpoint_name
from remat._remat import remat
from remat.compat import checkpoint, checkpoint_sequential
from remat.loops import fori_loop, scan, while_loop

__version__ = "0.1.0"

# Without the modules: `from remat import *` must not put ours in the place of `random` or of `torch.nn`.
__all__ = [
    "CheckpointError",
    "OpCost",
    "OpCosts",
    "RematError",
    "Residual",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_sequential",
    "custom_remat",
    "fori_loop",
    "is_rerunning",
    "list_ops",
    "print_saved_residuals",
    "remat",
    "saved_residuals",
    "scan",
    "while_loop",
]
