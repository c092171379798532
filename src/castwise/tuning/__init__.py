"""The cheapest policy that keeps the loss within a tolerance: `castwise.tune`."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.tuning._precision_search import tune
    from castwise.tuning._tuned import Frontier, Point, Tuned
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Frontier": "_tuned",
            "Point": "_tuned",
            "Tuned": "_tuned",
            "tune": "_precision_search",
        },
    )

__all__ = [
    "Frontier",
    "Point",
    "Tuned",
    "tune",
]
