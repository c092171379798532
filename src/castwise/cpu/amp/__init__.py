"""The deprecated names of `torch.cpu.amp`: each warns, then works as in `castwise.amp` with `"cpu"`."""

from castwise.cpu.amp.autocast_mode import autocast
from castwise.cpu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
