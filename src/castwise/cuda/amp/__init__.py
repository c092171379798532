"""The deprecated names of `torch.cuda.amp`: each warns, then works as in `castwise.amp` with `"cuda"`."""

from castwise.cuda.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from castwise.cuda.amp.common import amp_definitely_not_available
from castwise.cuda.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]
