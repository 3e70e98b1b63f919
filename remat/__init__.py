"""Activation checkpointing as a functional transform: recompute on backward, under every `torch.func` transform."""

from remat import debug as debug
from remat import policies as policies
from remat import random as random
from remat._errors import CheckpointError as CheckpointError
from remat._errors import RematError as RematError
from remat._names import checkpoint_name as checkpoint_name
from remat._remat import remat as remat
