"""castwise: a drop-in replacement for torch.amp that finds the cause of NaNs and skipped steps.

Names and submodules are imported on first use, so that `castwise --help` answers without loading torch, and
`castwise.monitor.TensorBoard` works after `import castwise` alone.
"""

from typing import TYPE_CHECKING

from castwise._faces import face
from castwise._version import __version__ as __version__

if TYPE_CHECKING:
    from castwise import amp, cpu, cuda, policies, schedules
    from castwise._doctor.checkup import doctor
    from castwise._installation import install, installed, uninstall
    from castwise._mistakes.watch import MixedPrecisionMistake
    from castwise.amp import (
        Cause,
        GradScaler,
        ScaleExhausted,
        autocast,
        custom_bwd,
        custom_fwd,
        is_autocast_available,
    )
    from castwise.comparison import compare, compare_log_probs
    from castwise.diagnosis import diagnose
    from castwise.distributed.fsdp import ShardedGradScaler
    from castwise.master_weights import MasterWeights
    from castwise.monitor import Monitor
    from castwise.policy import Policy
    from castwise.report import verdict
    from castwise.tracing import trace
    from castwise.tuning import tune
    from castwise.weights import WeightCache
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Cause": "amp",
            "GradScaler": "amp",
            "MasterWeights": "master_weights",
            "MixedPrecisionMistake": "_mistakes.watch",
            "Monitor": "monitor",
            "Policy": "policy",
            "ScaleExhausted": "amp",
            "ShardedGradScaler": "distributed.fsdp",
            "WeightCache": "weights",
            "autocast": "amp",
            "compare": "comparison",
            "compare_log_probs": "comparison",
            "custom_bwd": "amp",
            "custom_fwd": "amp",
            "diagnose": "diagnosis",
            "doctor": "_doctor.checkup",
            "install": "_installation",
            "installed": "_installation",
            "is_autocast_available": "amp",
            "trace": "tracing",
            "tune": "tuning",
            "uninstall": "_installation",
            "verdict": "report",
        },
        [
            "amp",
            "checking",
            "comparison",
            "cpu",
            "cuda",
            "diagnosis",
            "distributed",
            "integrations",
            "master_weights",
            "monitor",
            "policies",
            "policy",
            "report",
            "schedules",
            "tracing",
            "tuning",
            "weights",
        ],
    )

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
    "compare_log_probs",
    "cpu",
    "cuda",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "doctor",
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
