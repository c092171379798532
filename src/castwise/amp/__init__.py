"""Autocasting and gradient scaling: the counterpart of `torch.amp`."""

from castwise.amp.autocast_mode import autocast, custom_bwd, custom_fwd, is_autocast_available
from castwise.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
