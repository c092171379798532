"""Is a training script still the same computation, and as accurate? The functions of `castwise check`."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.checking._checking import NotReproducibleError, check, compare_ops, record
    from castwise.checking._golden import Golden
    from castwise.checking._measuring import ProgramError
    from castwise.checking._ops import OpDifference, OpDifferences
    from castwise.checking._result import Accuracy, CheckResult
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Accuracy": "_result",
            "CheckResult": "_result",
            "Golden": "_golden",
            "NotReproducibleError": "_checking",
            "OpDifference": "_ops",
            "OpDifferences": "_ops",
            "ProgramError": "_measuring",
            "check": "_checking",
            "compare_ops": "_checking",
            "record": "_checking",
        },
    )

__all__ = [
    "Accuracy",
    "CheckResult",
    "Golden",
    "NotReproducibleError",
    "OpDifference",
    "OpDifferences",
    "ProgramError",
    "check",
    "compare_ops",
    "record",
]
