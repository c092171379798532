"""Precision policies: which module and which op runs in which precision, and how a model is made to follow them."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.policy._bound_policy import BoundPolicy
    from castwise.policy._policy import Policy
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "BoundPolicy": "_bound_policy",
            "Policy": "_policy",
        },
    )

__all__ = [
    "BoundPolicy",
    "Policy",
]
