"""Casts of weights that outlive a region."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.weights._weight_cache import WeightCache, WeightCacheReport
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "WeightCache": "_weight_cache",
            "WeightCacheReport": "_weight_cache",
        },
    )

__all__ = [
    "WeightCache",
    "WeightCacheReport",
]
