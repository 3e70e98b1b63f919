"""Being written again."""

from torch.utils.checkpoint import *  # noqa: F403
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts  # noqa: F401
