"""Find where a non-finite value comes from: `castwise.diagnose`, and replays of recorded steps."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.diagnosis._capsule import Capsule
    from castwise.diagnosis._diagnosis import Diagnosis, NonFinite, diagnose
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Capsule": "_capsule",
            "Diagnosis": "_diagnosis",
            "NonFinite": "_diagnosis",
            "diagnose": "_diagnosis",
        },
    )

__all__ = [
    "Capsule",
    "Diagnosis",
    "NonFinite",
    "diagnose",
]
