"""castwise: mixed-precision training for PyTorch that says what happened to the numbers."""

from typing import Any

from castwise import amp, cpu, cuda, policies, schedules
from castwise.amp import GradScaler, autocast, custom_bwd, custom_fwd, is_autocast_available
from castwise.amp.outcomes import Cause, ScaleExhausted
from castwise.amp.policy import Policy
from castwise.amp.tracing import trace
from castwise.amp.weight_cache import WeightCache

__version__ = "0.1.0"

__all__ = [
    "Cause",
    "GradScaler",
    "Policy",
    "ScaleExhausted",
    "ShardedGradScaler",
    "WeightCache",
    "amp",
    "autocast",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "is_autocast_available",
    "policies",
    "schedules",
    "trace",
]


def __getattr__(name: str) -> Any:
    # Torch's class, of which ours is an instance, loads all of FSDP: whoever does not ask for it shall not wait for it.
    if name == "ShardedGradScaler":
        from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
