"""Activation checkpointing as a functional transform: recompute on backward, under every `torch.func` transform."""

from remat import compat as compat
from remat import debug as debug
from remat import integrations as integrations
from remat import nn as nn
from remat import policies as policies
from remat import random as random
from remat._context import is_rerunning as is_rerunning
from remat._custom import custom_remat as custom_remat
from remat._errors import CheckpointError as CheckpointError
from remat._errors import RematError as RematError
from remat._inspect import OpCost as OpCost
from remat._inspect import OpCosts as OpCosts
from remat._inspect import Residual as Residual
from remat._inspect import list_ops as list_ops
from remat._inspect import print_saved_residuals as print_saved_residuals
from remat._inspect import saved_residuals as saved_residuals
from remat._names import checkpoint_name as checkpoint_name
from remat._remat import remat as remat
from remat.compat import checkpoint as checkpoint
from remat.compat import checkpoint_sequential as checkpoint_sequential
from remat.loops import fori_loop as fori_loop
from remat.loops import scan as scan
from remat.loops import while_loop as while_loop

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
