"""Skipped steps, grouped by cause, and the one finding of the verdict that each of them belongs to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from castwise.monitor import _causes as causes
from castwise.monitor._records import StepRecord
from castwise.report._ranks import on_ranks

# The number of consecutive skips after which a scaler warns by default (`Schedule.patience`): 20 halvings divide the
# scale by a million.
STREAK_MATTERS = 20
# A scale below 1 shrinks gradients, so an overflow there cannot be due to the scale.
COLLAPSED_BELOW = 1.0


@dataclass(frozen=True)
class Skips:
    """The steps of one cause that were skipped, or taken with an inf or NaN.

    Args:
        cause: The recorded cause: one of `castwise.monitor._causes`, or one from a later version of castwise.
        steps: Step numbers, ascending.
        parameters: Parameters with non-finite gradients and their number of such steps, most frequent first.
        where: " on rank 1" if every one of the records names a rank; else "".
    """

    cause: str
    steps: Sequence[int]
    parameters: Sequence[tuple[str, int]]
    where: str = ""


def by_cause(records: Iterable[StepRecord]) -> list[Skips]:
    """Group the skipped ones among records by cause, most frequent first."""
    return grouped(record for record in records if record.skipped)


def grouped(records: Iterable[StepRecord]) -> list[Skips]:
    """Group records of steps with a fault by cause, most frequent first."""
    groups: dict[str, list[StepRecord]] = {}
    for record in records:
        groups.setdefault(record.why_skipped, []).append(record)
    skips = []
    for cause, skipped in groups.items():
        named = Counter(name for record in skipped for name in record.parameters)
        skips.append(Skips(cause, sorted(record.step for record in skipped), named.most_common(), on_ranks(skipped)))
    return sorted(skips, key=lambda one: -len(one.steps))


class Finding(Enum):
    """What the verdict says of a skipped step."""

    LOST_WEIGHTS = auto()
    DIVERGENCE = auto()
    ENDLESS_ROW = auto()
    BAD_LOSSES = auto()
    BAD_GRADIENTS = auto()
    OVERFLOWS = auto()
    OTHER = auto()


_BY_CAUSE = {
    causes.NONFINITE_LOSS: Finding.BAD_LOSSES,
    causes.NONFINITE_GRADIENTS: Finding.BAD_GRADIENTS,
    causes.OVERFLOW: Finding.OVERFLOWS,
}


def assign(steps: Sequence[StepRecord], diverged_at: int | None) -> Mapping[Finding, list[Skips]]:
    """Assign each skipped step to exactly one finding, and group those of a finding by cause.

    Weights that are inf or NaN outweigh all else. Steps from a divergence on are due to it, whatever their cause. An
    endless row of skips at the end of the run is reported as a whole. All others are reported by their cause.

    Args:
        steps: The step records of a run.
        diverged_at: The first step that failed because training diverged; None if it did not.
    """
    endless = {record.step for record in skips_at_end(steps)} if diverged_at is None and is_endless(steps) else set()
    groups: dict[Finding, list[StepRecord]] = {finding: [] for finding in Finding}
    for record in steps:
        if not record.skipped:
            continue
        if record.cause == causes.NONFINITE_WEIGHTS:
            finding = Finding.LOST_WEIGHTS
        elif diverged_at is not None and record.step >= diverged_at:
            finding = Finding.DIVERGENCE
        elif record.step in endless:
            finding = Finding.ENDLESS_ROW
        else:
            finding = _BY_CAUSE.get(record.why_skipped, Finding.OTHER)
        groups[finding].append(record)
    return {finding: by_cause(records) for finding, records in groups.items()}


def skips_at_end(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the records of the skips after the last step that was taken."""
    taken = max((index for index, record in enumerate(steps) if not record.skipped), default=-1)
    return steps[taken + 1 :]


def is_endless(steps: Sequence[StepRecord]) -> bool:
    """Return True if skips at the end of the run are so many, or the scale so low, that waiting is pointless."""
    skips = skips_at_end(steps)
    scales = [record.scale for record in steps if record.scale is not None and math.isfinite(record.scale)]
    lowest = min([COLLAPSED_BELOW, *scales[:1]])
    return len(skips) >= STREAK_MATTERS or any(record.scale is not None and record.scale < lowest for record in skips)
