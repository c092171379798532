"""How a precision changes the values of a model, module by module."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.comparison._drift import Drift, ModuleDrift, PolicyDrift, Summary
    from castwise.comparison._errors import Errors
    from castwise.comparison._log_probs import LogProbDrift
    from castwise.comparison._precision_drift import compare
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Drift": "_drift",
            "Errors": "_errors",
            "LogProbDrift": "_log_probs",
            "ModuleDrift": "_drift",
            "PolicyDrift": "_drift",
            "Summary": "_drift",
            "compare": "_precision_drift",
        },
    )

__all__ = [
    "Drift",
    "Errors",
    "LogProbDrift",
    "ModuleDrift",
    "PolicyDrift",
    "Summary",
    "compare",
]
