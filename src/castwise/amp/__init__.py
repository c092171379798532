"""Autocasting and gradient scaling: the counterpart of `torch.amp`."""

from castwise.amp._outcomes import Cause, ScaleExhausted, StepFacts
from castwise.amp._readback import DELAY
from castwise.amp.autocast_mode import (
    _enter_autocast,  # noqa: F401  # torch has it here
    _exit_autocast,  # noqa: F401  # torch has it here
    autocast,
    custom_bwd,
    custom_fwd,
    is_autocast_available,
)
from castwise.amp.grad_scaler import GradScaler

__all__ = [
    "DELAY",
    "Cause",
    "GradScaler",
    "ScaleExhausted",
    "StepFacts",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "is_autocast_available",
]


def __dir__() -> list[str]:
    return __all__
