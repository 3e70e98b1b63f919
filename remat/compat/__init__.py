"""The public names of torch.utils.checkpoint, in code of our own: change one import. Small helpers are torch's own."""

from torch.utils.checkpoint import SAC_IGNORED_OPS as SAC_IGNORED_OPS
from torch.utils.checkpoint import DefaultDeviceType as DefaultDeviceType
from torch.utils.checkpoint import check_backward_validity as check_backward_validity
from torch.utils.checkpoint import detach_variable as detach_variable
from torch.utils.checkpoint import get_device_states as get_device_states
from torch.utils.checkpoint import noop_context_fn as noop_context_fn
from torch.utils.checkpoint import set_device_states as set_device_states

from remat._errors import CheckpointError as CheckpointError
from remat._recorder import SelectiveCheckpointContext as SelectiveCheckpointContext
from remat.compat._checkpoint import checkpoint as checkpoint
from remat.compat._checkpoint import checkpoint_sequential as checkpoint_sequential
from remat.compat._reentrant import CheckpointFunction as CheckpointFunction
from remat.compat._selective import create_selective_checkpoint_contexts as create_selective_checkpoint_contexts
from remat.compat._settings import GraphExecGroup as GraphExecGroup
from remat.compat._settings import set_checkpoint_debug_enabled as set_checkpoint_debug_enabled
from remat.compat._settings import set_checkpoint_early_stop as set_checkpoint_early_stop
from remat.policies import CheckpointPolicy as CheckpointPolicy

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
