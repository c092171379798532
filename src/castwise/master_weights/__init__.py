"""16-bit weights that train like fp32 weights, with any optimizer: `castwise.MasterWeights`."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.master_weights._master_weights import MasterWeights
    from castwise.master_weights._narrowing_report import NarrowingDifference, NarrowingReport
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "MasterWeights": "_master_weights",
            "NarrowingDifference": "_narrowing_report",
            "NarrowingReport": "_narrowing_report",
        },
    )

__all__ = [
    "MasterWeights",
    "NarrowingDifference",
    "NarrowingReport",
]
