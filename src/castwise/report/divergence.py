"""Divergence: a loss, or a norm of the gradients, that grows, does not come back, and ends in steps that fail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from castwise.report.record_numbers import Record, number

# Ten times what was usual, and ten times what a model that had learnt nothing began with: a loss that small noise or a
# hard batch makes is far below. Norms of gradients vary more.
TIMES = {"loss": 10.0, "gradient norm": 100.0}
# Within a few updates less says as much, as it is measured against the largest value before them.
SUDDEN_TIMES = {"loss": 3.0, "gradient norm": 10.0}
FEW_UPDATES = 5
# These many values before the one that is judged may be part of the growth.
GROWING = 3
# What is within this factor of the usual is still usual, and what comes back to it has not diverged.
USUAL = 3.0
SUDDENLY_USUAL = 2.0
# Numbers may grow by design, and NaN batches and overflows of a scale that is probed are few among the steps that are
# taken: a run that diverged ends in failures, or has little else.
MANY_FAILURES = 5
FAILURES_MATTER = 0.3
# A typical update that is larger than the weights leaves nothing of what they were.
LARGE_UPDATE = 1.0

Point = tuple[int, float]


@dataclass(frozen=True)
class Growth:
    """How a number grew before steps failed.

    Args:
        name: Of the number: "loss", "gradient norm", or "update", which is relative to the weights.
        first: Step and value of the last usual one; of an update that of the weights, 1.
        last: Step and value of the largest up to the failure that came with the growth.
        since: The first step that failed after `first`.
        failed: Number of steps that failed from there on.
    """

    name: str
    first: Point
    last: Point
    since: int
    failed: int

    def __str__(self) -> str:
        (first_step, first), (last_step, last) = self.first, self.last
        if self.name == "update":
            return f"the update of step {last_step:,} was {_spelled(last)} times as large as the weights"
        return (
            f"the {self.name} grew from {_spelled(first)} at step {first_step:,} to {_spelled(last)} at step "
            f"{last_step:,}"
        )


def find_divergence(steps: Sequence[Record], norms: Sequence[Point], updates: Sequence[Point]) -> tuple[Growth, ...]:
    """Return what grew before steps failed, the loss first; nothing if the run did not diverge.

    Args:
        steps: The run's step records. One is a failure if it was skipped or its loss is inf or NaN.
        norms: Step and gradient norm of the steps of which it is known.
        updates: Step and typical ratio of the update to the weights of the steps of which it is known.
    """
    failures = _Failures.of(steps)
    if not failures.steps:
        return ()
    losses = _usable((record["step"], number(record.get("loss"))) for record in steps)
    of_loss = _growth("loss", losses, _largest_by_update(steps), failures)
    norms = _usable(norms)
    of_norm = _growth("gradient norm", norms, norms, failures)
    has_ended = failures.row_at_end >= MANY_FAILURES
    if of_norm and not of_loss and (not has_ended or (losses and not _rises(losses, of_norm.first[0]))):
        of_norm = None  # gradients of a network that begins to learn grow as well
    elif of_norm and of_loss and of_norm.last[0] > max(of_loss.last[0], of_loss.since):
        of_norm = None  # it is known of later steps only
    found = tuple(growth for growth in (of_loss, of_norm) if growth is not None)
    return found or _large_update(updates, failures)


@dataclass(frozen=True)
class _Failures:
    steps: Sequence[int]
    last_step: int
    row_at_end: int

    @classmethod
    def of(cls, steps: Sequence[Record]) -> _Failures:
        failed = [bool(record["skipped"] or _is_nonfinite(record.get("loss"))) for record in steps]
        found = [record["step"] for record, has_failed in zip(steps, failed, strict=True) if has_failed]
        row = next((place for place, has_failed in enumerate(reversed(failed)) if not has_failed), len(failed))
        return cls(found, steps[-1]["step"] if steps else 0, row)

    def after(self, step: int) -> list[int]:
        return [failure for failure in self.steps if failure > step]

    def go_on(self, step: int) -> bool:
        """Return True if there is no training left after a step."""
        after = len(self.after(step))
        if self.row_at_end >= MANY_FAILURES:
            return True
        return after >= (1 if self.row_at_end else MANY_FAILURES) and after > FAILURES_MATTER * (self.last_step - step)


def _growth(name: str, points: Sequence[Point], by_update: Sequence[Point], failures: _Failures) -> Growth | None:
    for begun in (_slow_growth(name, points, by_update), _sudden_growth(name, points, by_update)):
        if begun is None or not failures.go_on(points[begun][0]):
            continue
        first = points[begun]
        after = failures.after(first[0])
        # Once steps fail, the numbers are those of a model that is lost already.
        grown = (step for step, value in points[begun:] if value >= SUDDEN_TIMES[name] * first[1])
        grown_at = next(grown, failures.last_step)
        end = next((failure for failure in after if failure >= grown_at), failures.last_step)
        largest = max((point for point in points[begun:] if point[0] <= end), key=lambda point: point[1])
        return Growth(name, first, largest, after[0], len(after))
    return None


def _slow_growth(name: str, points: Sequence[Point], by_update: Sequence[Point]) -> int | None:
    """Return the place of the last usual value, if those after it are far above and do not come back."""
    values, last = [value for _, value in by_update], points[-1][1] if points else 0.0
    times, smallest = TIMES[name], math.inf
    for place, value in enumerate(values):
        smallest = min(smallest, value)
        # Cheap questions first: a median at every step of a long run would take minutes.
        if value < times * values[0] or value < times * smallest or last < USUAL * values[0]:
            continue
        usual = statistics.median(values[: max(1, place - GROWING + 1)])
        if value >= times * usual and last >= USUAL * usual:
            end = by_update[place][0]
            return max(at for at, (step, each) in enumerate(points) if step < end and each <= USUAL * usual)
    return None


def _sudden_growth(name: str, points: Sequence[Point], by_update: Sequence[Point]) -> int | None:
    """The same for a number that multiplied within the last few updates."""
    before = len(by_update) - FEW_UPDATES if len(by_update) > FEW_UPDATES else 1
    largest = max((value for _, value in by_update[:before]), default=math.inf)
    end = next((step for step, value in by_update[before:] if value >= SUDDEN_TIMES[name] * largest), None)
    if end is None or points[-1][1] < SUDDENLY_USUAL * largest:
        return None
    return max(at for at, (step, value) in enumerate(points) if step < end and value <= SUDDENLY_USUAL * largest)


def _largest_by_update(steps: Sequence[Record]) -> list[Point]:
    """First step and largest loss of each state of the weights: skipped steps repeat it with other batches."""
    found: list[Point] = []
    is_new = True
    for record in steps:
        loss = number(record.get("loss"))
        if 0.0 < loss < math.inf:
            if is_new:
                found.append((record["step"], loss))
            else:
                found[-1] = found[-1][0], max(loss, found[-1][1])
            is_new = False
        is_new = is_new or not record["skipped"]
    return found


def _large_update(updates: Sequence[Point], failures: _Failures) -> tuple[Growth, ...]:
    """The last update that is known, if it was too large and all steps from the next on failed."""
    row = failures.steps[-failures.row_at_end :] if failures.row_at_end else ()
    if not row or not updates:
        return ()
    step, ratio = max((point for point in updates if point[0] < row[0]), default=(0, 0.0))
    if step != row[0] - 1 or not LARGE_UPDATE < ratio < math.inf:
        return ()
    return (Growth("update", (step, 1.0), (step, ratio), row[0], len(row)),)


def _usable(points: Iterable[Point]) -> list[Point]:
    return [(step, value) for step, value in points if 0.0 < value < math.inf]


def _rises(losses: Sequence[Point], since: int) -> bool:
    before = [loss for step, loss in losses if step <= since]
    return not before or losses[-1][1] > statistics.median(before)


def _is_nonfinite(value: object) -> bool:
    return value is not None and not math.isfinite(number(value))


def _spelled(value: float) -> str:
    return f"{value:,.4g}" if value < 1e4 else f"{value:.3g}"
