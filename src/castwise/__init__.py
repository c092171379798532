"""castwise: mixed-precision training for PyTorch that says what happened to the numbers."""

from castwise import amp, cpu, cuda
from castwise.amp import GradScaler, autocast, custom_bwd, custom_fwd, is_autocast_available

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "amp",
    "autocast",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "is_autocast_available",
]
