"""Divergence: a loss or gradient norm that grows, does not recover, and ends in failed steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from castwise.monitor._records import StepRecord

# Relative to the usual value and to the first one, which is that of an untrained model. Noise and hard batches stay far
# below ten times the loss; gradient norms vary more.
TIMES = {"loss": 10.0, "gradient norm": 100.0}
# A sudden rise is compared with the largest earlier value, so smaller factors are enough.
SUDDEN_TIMES = {"loss": 3.0, "gradient norm": 10.0}
FEW_UPDATES = 5
# The last few values before the judged one may already be part of the growth.
GROWING = 3
# A value within this factor of the usual one is still usual; a run that returns to it has not diverged.
USUAL = 3.0
SUDDENLY_USUAL = 2.0
# Growth alone is no proof: it may be by design. NaN batches and overflows from probing the scale are rare among the
# steps, whereas a diverged run ends in failures or consists mostly of them.
MANY_FAILURES = 5
FAILURES_MATTER = 0.3
# A typical update larger than the weights overwrites them.
LARGE_UPDATE = 1.0

Point = tuple[int, float]


@dataclass(frozen=True)
class Growth:
    """How a number grew before steps failed.

    Args:
        name: "loss", "gradient norm", or "update", which is relative to the weights.
        first: Step and value of the last usual value; for an update the weights', which is 1.
        last: Step and value of the largest value up to the failure that followed the growth.
        since: The first step that failed after `first`.
        failed: Number of failed steps from `since` on.
    """

    name: str
    first: Point
    last: Point
    since: int
    failed: int

    def __str__(self) -> str:
        (first_step, first), (last_step, last) = self.first, self.last
        if self.name == "update":
            return f"the update of step {last_step:,} was {_in_words(last)} times as large as the weights"
        return (
            f"the {self.name} grew from {_in_words(first)} at step {first_step:,} to {_in_words(last)} at step "
            f"{last_step:,}"
        )


def find_divergence(
    steps: Sequence[StepRecord], norms: Sequence[Point], updates: Sequence[Point]
) -> tuple[Growth, ...]:
    """Return the numbers that grew before steps failed, the loss first; empty if the run did not diverge.

    What grows at the first loss from which on none is finite, or later, is a consequence and does not count.

    Args:
        steps: The run's step records. A step failed if it was skipped or its loss is inf or NaN.
        norms: Step and gradient norm, where known.
        updates: Step and typical ratio of the update to the weights, where known.
    """
    failures = _Failures.of(steps)
    if not failures.steps:
        return ()
    last_finite = max(
        (record.step for record in steps if record.loss is not None and not record.has_bad_loss), default=0
    )
    lost = (record.step for record in steps if record.step > last_finite and record.has_bad_loss)
    first_fault = next(lost, math.inf)
    before = [record for record in steps if record.step < first_fault]
    losses = _usable((record.step, record.loss) for record in before if record.loss is not None)
    of_loss = _growth("loss", losses, _largest_by_update(before), failures)
    norms = [point for point in _usable(norms) if point[0] < first_fault]
    of_norm = _growth("gradient norm", norms, norms, failures)
    has_ended = failures.row_at_end >= MANY_FAILURES
    if of_norm and not of_loss and (not has_ended or (losses and not _rises(losses, of_norm.first[0]))):
        of_norm = None  # gradients also grow when a network starts to learn
    elif of_norm and of_loss and of_norm.last[0] > max(of_loss.last[0], of_loss.since):
        of_norm = None  # the norm is known for later steps only
    found = tuple(growth for growth in (of_loss, of_norm) if growth is not None)
    return found or _large_update(updates, failures)


@dataclass(frozen=True)
class _Failures:
    steps: Sequence[int]
    last_step: int
    row_at_end: int

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> _Failures:
        failed = [record.has_fault or record.has_bad_loss for record in steps]
        numbers = [record.step for record, has_failed in zip(steps, failed, strict=True) if has_failed]
        row = next((index for index, has_failed in enumerate(reversed(failed)) if not has_failed), len(failed))
        return cls(numbers, steps[-1].step if steps else 0, row)

    def after(self, step: int) -> list[int]:
        return [failure for failure in self.steps if failure > step]

    def persist_after(self, step: int) -> bool:
        """Return True if the run ended in failures, or many of the steps after `step` failed."""
        after = len(self.after(step))
        if self.row_at_end >= MANY_FAILURES:
            return True
        return after >= (1 if self.row_at_end else MANY_FAILURES) and after > FAILURES_MATTER * (self.last_step - step)


def _growth(name: str, points: Sequence[Point], by_update: Sequence[Point], failures: _Failures) -> Growth | None:
    for begun in (_slow_growth(name, points, by_update), _sudden_growth(name, points, by_update)):
        if begun is None or not failures.persist_after(points[begun][0]):
            continue
        first = points[begun]
        after = failures.after(first[0])
        # After the failure the model is already lost, and its numbers mean nothing.
        grown = (step for step, value in points[begun:] if value >= SUDDEN_TIMES[name] * first[1])
        grown_at = next(grown, failures.last_step)
        end = next((failure for failure in after if failure >= grown_at), failures.last_step)
        largest = max((point for point in points[begun:] if point[0] <= end), key=lambda point: point[1])
        return Growth(name, first, largest, after[0], len(after))
    return None


def _slow_growth(name: str, points: Sequence[Point], by_update: Sequence[Point]) -> int | None:
    """Return the index of the last usual value if later values are far above it and stay there."""
    values, last = [value for _, value in by_update], points[-1][1] if points else 0.0
    times, smallest = TIMES[name], math.inf
    for place, value in enumerate(values):
        smallest = min(smallest, value)
        # Cheap checks first: a median at every step of a long run would take minutes.
        if value < times * values[0] or value < times * smallest or last < USUAL * values[0]:
            continue
        usual = statistics.median(values[: max(1, place - GROWING + 1)])
        if value >= times * usual and last >= USUAL * usual:
            end = by_update[place][0]
            return max(at for at, (step, each) in enumerate(points) if step < end and each <= USUAL * usual)
    return None


def _sudden_growth(name: str, points: Sequence[Point], by_update: Sequence[Point]) -> int | None:
    """Return the same for a number that multiplied within the last few updates."""
    before = len(by_update) - FEW_UPDATES if len(by_update) > FEW_UPDATES else 1
    largest = max((value for _, value in by_update[:before]), default=math.inf)
    end = next((step for step, value in by_update[before:] if value >= SUDDEN_TIMES[name] * largest), None)
    if end is None or points[-1][1] < SUDDENLY_USUAL * largest:
        return None
    return max(at for at, (step, value) in enumerate(points) if step < end and value <= SUDDENLY_USUAL * largest)


def _largest_by_update(steps: Sequence[StepRecord]) -> list[Point]:
    """Return first step and largest loss for each state of the weights; a skipped step leaves the state unchanged."""
    points: list[Point] = []
    is_new = True
    for record in steps:
        loss = record.loss
        if loss is not None and 0.0 < loss < math.inf:
            if is_new:
                points.append((record.step, loss))
            else:
                points[-1] = points[-1][0], max(loss, points[-1][1])
            is_new = False
        is_new = is_new or not record.skipped
    return points


def _large_update(updates: Sequence[Point], failures: _Failures) -> tuple[Growth, ...]:
    """Return the last known update if it was too large and every later step failed."""
    row = failures.steps[-failures.row_at_end :] if failures.row_at_end else ()
    if not row or not updates:
        return ()
    step, ratio = max((point for point in updates if point[0] < row[0]), default=(0, 0.0))
    if step != row[0] - 1 or not LARGE_UPDATE < ratio < math.inf:
        return ()
    return (Growth("update", (step, 1.0), (step, ratio), row[0], len(row)),)


def _usable(points: Iterable[Point]) -> list[Point]:
    return [(step, float(value)) for step, value in points if 0.0 < value < math.inf]


def _rises(losses: Sequence[Point], since: int) -> bool:
    before = [loss for step, loss in losses if step <= since]
    return not before or losses[-1][1] > statistics.median(before)


def _in_words(value: float) -> str:
    return f"{value:,.4g}" if value < 1e4 else f"{value:.3g}"
