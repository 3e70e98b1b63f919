"""The public names of torch.utils.checkpoint, in code of our own: change one import. Small helpers are torch's own."""

from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    DefaultDeviceType,
    check_backward_validity,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_device_states,
)

from remat._errors import CheckpointError
from remat._recorder import SelectiveCheckpointContext
from remat.compat._checkpoint import checkpoint, checkpoint_sequential
from remat.compat._reentrant import CheckpointFunction
from remat.compat._selective import create_selective_checkpoint_contexts
from remat.compat._settings import GraphExecGroup, set_checkpoint_debug_enabled, set_checkpoint_early_stop
from remat.policies import CheckpointPolicy

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]
