"""castwise: mixed-precision training for PyTorch that says what happened to the numbers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from castwise import amp, cpu, cuda, policies, schedules
from castwise._version import __version__ as __version__
from castwise.amp import GradScaler, autocast, custom_bwd, custom_fwd, is_autocast_available
from castwise.amp.outcomes import Cause, ScaleExhausted
from castwise.policy.policy import Policy
from castwise.tracing.tracing import trace
from castwise.weights.weight_cache import WeightCache

if TYPE_CHECKING:
    from castwise.diagnosis.diagnosis import diagnose
    from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from castwise.installation import install, installed, uninstall
    from castwise.mistakes.watch import MixedPrecisionMistake
    from castwise.monitor.monitor import Monitor
    from castwise.report.verdicts import verdict

__all__ = [
    "Cause",
    "GradScaler",
    "MixedPrecisionMistake",
    "Monitor",
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
    "diagnose",
    "install",
    "installed",
    "is_autocast_available",
    "policies",
    "schedules",
    "trace",
    "uninstall",
    "verdict",
]

# Loaded when they are asked for. Of the first, torch's class, of which it is an instance, loads all of FSDP.
_LATER = {
    "ShardedGradScaler": "castwise.distributed.fsdp.sharded_grad_scaler",
    "MixedPrecisionMistake": "castwise.mistakes.watch",
    "Monitor": "castwise.monitor.monitor",
    "diagnose": "castwise.diagnosis.diagnosis",
    "install": "castwise.installation",
    "installed": "castwise.installation",
    "uninstall": "castwise.installation",
    "verdict": "castwise.report.verdicts",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
