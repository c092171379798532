"""How a precision changes the values of a model, module by module; and recorded log-probabilities beside a model's."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.comparison._callables import ModuleAlone
    from castwise.comparison._drift import Drift, ModuleDrift, PolicyDrift, Summary
    from castwise.comparison._engine_records import from_sglang, from_transformers, from_vllm
    from castwise.comparison._errors import Errors
    from castwise.comparison._log_probs import LogProbDrift
    from castwise.comparison._precision_drift import compare
    from castwise.comparison._recorded_log_probs import PrecisionShare, RecordedDrift, compare_log_probs
    from castwise.comparison._token_records import TokenRecord
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Drift": "_drift",
            "Errors": "_errors",
            "LogProbDrift": "_log_probs",
            "ModuleAlone": "_callables",
            "ModuleDrift": "_drift",
            "PolicyDrift": "_drift",
            "PrecisionShare": "_recorded_log_probs",
            "RecordedDrift": "_recorded_log_probs",
            "Summary": "_drift",
            "TokenRecord": "_token_records",
            "compare": "_precision_drift",
            "compare_log_probs": "_recorded_log_probs",
            "from_sglang": "_engine_records",
            "from_transformers": "_engine_records",
            "from_vllm": "_engine_records",
        },
    )

__all__ = [
    "Drift",
    "Errors",
    "LogProbDrift",
    "ModuleAlone",
    "ModuleDrift",
    "PolicyDrift",
    "PrecisionShare",
    "RecordedDrift",
    "Summary",
    "TokenRecord",
    "compare",
    "compare_log_probs",
    "from_sglang",
    "from_transformers",
    "from_vllm",
]
