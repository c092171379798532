"""The deprecated spellings of `torch.cpu.amp`: each warns and does what `castwise.amp` does for `"cpu"`."""

from castwise.cpu.amp.autocast_mode import autocast
from castwise.cpu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
