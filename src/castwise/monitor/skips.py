"""Why a step was skipped, as several ranks see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from castwise.amp.outcomes import Cause

# What one rank knows for certain outweighs what others have to suppose.
_BY_WEIGHT = (Cause.NONFINITE_WEIGHTS, Cause.NONFINITE_LOSS, Cause.OVERFLOW, Cause.UNKNOWN, Cause.ANOTHER_RANK)


@dataclass(frozen=True)
class Skip:
    """A skipped step.

    Args:
        cause: A value of `Cause`.
        parameters: The names of those whose gradients were not finite.
        diagnosis: The fields of a diagnosis, if there is one.
        is_found: Whether that names a module.
    """

    cause: str
    parameters: tuple[str, ...]
    diagnosis: dict[str, Any] | None = None
    is_found: bool = False


def agreed(ranks: Sequence[Skip]) -> Skip:
    """Return what ranks know together: a rank whose batch is at fault knows more than one that meets its gradients."""
    cause = next(cause for cause in _BY_WEIGHT if any(rank.cause == cause.value for rank in ranks))
    if cause is Cause.ANOTHER_RANK:
        cause = Cause.OVERFLOW  # there is no other one left, and the losses of all were finite
    named = dict.fromkeys(name for rank in ranks for name in rank.parameters)
    diagnosed = [rank for rank in ranks if rank.is_found] or [rank for rank in ranks if rank.diagnosis] or list(ranks)
    return Skip(cause.value, tuple(named), diagnosed[0].diagnosis, diagnosed[0].is_found)
