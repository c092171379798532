"""Combine what the ranks know about a skipped step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from castwise.monitor import _causes as causes
from castwise.monitor._records import DiagnosisRecord

PARAMETERS_NAMED = 8
"""The number of parameters that a record names; the first of all ranks are among the first of each."""
# The most specific cause first: the one with evidence on a rank wins.
_MOST_SPECIFIC_FIRST = (
    *(causes.NONFINITE_WEIGHTS, causes.NONFINITE_LOSS, causes.OVERFLOW, causes.NONFINITE_GRADIENTS),
    *(causes.UNKNOWN, causes.ANOTHER_RANK),
)


@dataclass(frozen=True)
class StepFault:
    """A step that was skipped, or was taken with an inf or NaN, as known to one rank or to all ranks together.

    Args:
        cause: One of `castwise.monitor._causes`.
        parameters: Names of the parameters with non-finite gradients.
        diagnoses: Records of diagnoses; combined ones have the rank of their batch.
        rank: The rank at fault, if there are several ranks and only one is at fault.
    """

    cause: str
    parameters: tuple[str, ...]
    diagnoses: tuple[DiagnosisRecord, ...] = ()
    rank: int | None = None

    def to_numbers(self) -> tuple[int, bytes]:
        """Return the cause as a number, and the rest as JSON for another rank; empty if there is no rest."""
        rest = [self.parameters[:PARAMETERS_NAMED], [record.to_json() for record in self.diagnoses]]
        return _place(self.cause), json.dumps(rest).encode() if any(rest) else b""

    @classmethod
    def from_numbers(cls, cause: int, rest: bytes) -> StepFault:
        """Return the skip that a rank has sent."""
        parameters, diagnoses = json.loads(rest) if rest else ((), ())
        return cls(_MOST_SPECIFIC_FIRST[cause], tuple(parameters), tuple(map(DiagnosisRecord.from_json, diagnoses)))


def agreed(ranks: Mapping[int, StepFault], size: int) -> StepFault:
    """Combine the skips of all ranks. The rank whose batch is at fault knows more than those that got its gradients.

    Args:
        ranks: Skips by rank.
        size: Number of ranks, of which some may be missing in `ranks`.
    """
    cause = min((skip.cause for skip in ranks.values()), key=_place)
    at_fault = [rank for rank, skip in ranks.items() if skip.cause == cause]
    are_all_known = len(ranks) == size
    if cause == causes.ANOTHER_RANK and are_all_known:
        # No other rank is left. All losses and gradients were finite, but the factor to unscale and clip them was not.
        cause = causes.OVERFLOW
    named = dict.fromkeys(name for skip in ranks.values() for name in skip.parameters)
    return StepFault(
        cause,
        tuple(named),
        tuple(_diagnoses({rank: ranks[rank] for rank in at_fault}, size, cause)),
        at_fault[0] if are_all_known and len(at_fault) == 1 < size else None,
    )


def _place(cause: str) -> int:
    return _MOST_SPECIFIC_FIRST.index(cause if cause in _MOST_SPECIFIC_FIRST else causes.UNKNOWN)


def _diagnoses(at_fault: Mapping[int, StepFault], size: int, cause: str) -> list[DiagnosisRecord]:
    """Return the diagnoses with a fault, one per place; without any, one clean diagnosis."""
    by_place: dict[tuple[str, ...], DiagnosisRecord] = {}
    for rank, skip in at_fault.items():
        for record in skip.diagnoses:
            place = record.phase, record.module, record.op
            by_place.setdefault(place, replace(record, cause=cause, rank=rank if size > 1 else None))
    return [record for record in by_place.values() if record.phase] or list(by_place.values())
