"""Why a step was skipped, as the ranks see it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castwise.monitor import causes

# What one rank knows for certain outweighs what others have to suppose.
_BY_WEIGHT = (causes.NONFINITE_WEIGHTS, causes.NONFINITE_LOSS, causes.OVERFLOW, causes.UNKNOWN, causes.ANOTHER_RANK)


@dataclass(frozen=True)
class Skip:
    """A skipped step, as one rank knows it or as they know it together.

    Args:
        cause: One of `castwise.monitor.causes`.
        parameters: The names of those whose gradients were not finite.
        diagnoses: The fields of diagnoses; what ranks know together says of each whose batch it is of.
        rank: The one that is at fault, if it is one alone of several.
    """

    cause: str
    parameters: tuple[str, ...]
    diagnoses: tuple[dict[str, Any], ...] = ()
    rank: int | None = None


def agreed(ranks: Mapping[int, Skip], size: int) -> Skip:
    """Return what ranks know together: a rank whose batch is at fault knows more than one that meets its gradients.

    Args:
        ranks: What each knows, by its number.
        size: How many ranks there are; nothing may be known of some.
    """
    cause = min((skip.cause for skip in ranks.values()), key=_place)
    at_fault = [rank for rank, skip in ranks.items() if skip.cause == cause]
    are_all_known = len(ranks) == size
    if cause == causes.ANOTHER_RANK and are_all_known:
        # There is no other one left. All losses and gradients were finite, but what they had to be multiplied with to
        # be unscaled and clipped was not.
        cause = causes.OVERFLOW
    named = dict.fromkeys(name for skip in ranks.values() for name in skip.parameters)
    return Skip(
        cause,
        tuple(named),
        tuple(_diagnoses({rank: ranks[rank] for rank in at_fault}, size)),
        at_fault[0] if are_all_known and len(at_fault) == 1 < size else None,
    )


def _place(cause: str) -> int:
    return _BY_WEIGHT.index(cause if cause in _BY_WEIGHT else causes.UNKNOWN)


def _diagnoses(at_fault: Mapping[int, Skip], size: int) -> list[dict[str, Any]]:
    """Return what was found, each place once; if nothing was, the first replay of all."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, skip in at_fault.items():
        for fields in skip.diagnoses:
            place = tuple(fields[name] for name in ("phase", "module", "op"))
            found.setdefault(place, {**fields, "rank": rank if size > 1 else None})
    return [fields for fields in found.values() if fields["phase"]] or list(found.values())
