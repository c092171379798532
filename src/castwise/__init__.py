"""castwise: a drop-in replacement for torch.amp that finds the cause of NaNs and skipped steps.

Names and submodules are imported on first use, so that `castwise --help` answers without loading torch, and
`castwise.monitor.sinks` works after `import castwise` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from castwise._lazy_modules import submodules_of
from castwise._version import __version__ as __version__

if TYPE_CHECKING:
    from castwise import amp, cpu, cuda, policies, schedules
    from castwise.amp import GradScaler, autocast, custom_bwd, custom_fwd, is_autocast_available
    from castwise.amp.outcomes import Cause, ScaleExhausted
    from castwise.comparison.precision_drift import compare
    from castwise.diagnosis.diagnosis import diagnose
    from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from castwise.installation import install, installed, uninstall
    from castwise.master_weights.master_weights import MasterWeights
    from castwise.mistakes.watch import MixedPrecisionMistake
    from castwise.monitor.monitor import Monitor
    from castwise.policy.policy import Policy
    from castwise.report.verdicts import verdict
    from castwise.tracing.tracing import trace
    from castwise.tuning.precision_search import tune
    from castwise.weights.weight_cache import WeightCache

__all__ = [
    "Cause",
    "GradScaler",
    "MasterWeights",
    "MixedPrecisionMistake",
    "Monitor",
    "Policy",
    "ScaleExhausted",
    "ShardedGradScaler",
    "WeightCache",
    "amp",
    "autocast",
    "compare",
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
    "tune",
    "uninstall",
    "verdict",
]

# The public names that are not listed here are modules.
_DEFINED_IN = {
    "Cause": "amp.outcomes",
    "GradScaler": "amp",
    "MasterWeights": "master_weights.master_weights",
    "MixedPrecisionMistake": "mistakes.watch",
    "Monitor": "monitor.monitor",
    "Policy": "policy.policy",
    "ScaleExhausted": "amp.outcomes",
    "ShardedGradScaler": "distributed.fsdp.sharded_grad_scaler",
    "WeightCache": "weights.weight_cache",
    "autocast": "amp",
    "compare": "comparison.precision_drift",
    "custom_bwd": "amp",
    "custom_fwd": "amp",
    "diagnose": "diagnosis.diagnosis",
    "install": "installation",
    "installed": "installation",
    "is_autocast_available": "amp",
    "trace": "tracing.tracing",
    "tune": "tuning.precision_search",
    "uninstall": "installation",
    "verdict": "report.verdicts",
}

_submodule = submodules_of(__name__)


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        return _submodule(name)
    found = globals()[name] = getattr(import_module(f"castwise.{_DEFINED_IN[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
