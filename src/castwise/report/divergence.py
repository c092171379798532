"""Divergence: a loss, or a norm of the gradients, that grows by orders of magnitude and does not come back."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from castwise.report.record_numbers import Record, number

# Ten times what was usual, and ten times what a model that had learnt nothing began with: a loss that small noise or a
# hard batch makes is far below. Norms of gradients vary more.
TIMES = {"loss": 10.0, "gradient norm": 100.0}
# These many values before the one that is judged may be part of the growth.
GROWING = 3
# What is within this factor of the usual is still usual, and what comes back to it has not diverged.
USUAL = 3.0
# A scale that grows costs 0.05% of steps (see `step_advice`): with fewer failures than this a growing loss is no fault.
FAILURES_MATTER = 0.01

Point = tuple[int, float]


@dataclass(frozen=True)
class Growth:
    """How a number grew.

    Args:
        name: Of the number: "loss" or "gradient norm".
        first: Step and value of the last usual one.
        last: Step and value of the largest since then.
        failed: Number of steps that failed since then.
    """

    name: str
    first: Point
    last: Point
    failed: int

    def __str__(self) -> str:
        (first_step, first), (last_step, last) = self.first, self.last
        return (
            f"the {self.name} grew from {_spelled(first)} at step {first_step:,} to {_spelled(last)} at step "
            f"{last_step:,}"
        )


def find_divergence(steps: Sequence[Record], norms: Sequence[Point]) -> tuple[Growth, ...]:
    """Return what grew before steps failed, the loss first; nothing if the run did not diverge.

    Args:
        steps: The run's step records. One is a failure if it was skipped or its loss is inf or NaN.
        norms: Step and gradient norm of the steps of which it is known.
    """
    failures = [record["step"] for record in steps if record["skipped"] or _is_nonfinite(record.get("loss"))]
    if not failures:
        return ()
    losses = _usable((record["step"], number(record.get("loss"))) for record in steps)
    last_step = steps[-1]["step"]
    of_loss = _growth("loss", losses, failures, last_step)
    of_norm = _growth("gradient norm", _usable(norms), failures, last_step)
    if of_norm and not of_loss and losses and not _rises(losses, of_norm.first[0]):
        of_norm = None  # gradients of a network that begins to learn grow as well
    return tuple(growth for growth in (of_loss, of_norm) if growth is not None)


def _growth(name: str, points: Sequence[Point], failures: Sequence[int], last_step: int) -> Growth | None:
    values = [value for _, value in points]
    times, smallest = TIMES[name], math.inf
    for place, value in enumerate(values):
        smallest = min(smallest, value)
        # Cheap questions first: a median at every step of a long run would take minutes.
        if value < times * values[0] or value < times * smallest or values[-1] < USUAL * values[0]:
            continue
        usual = statistics.median(values[: max(1, place - GROWING + 1)])
        if value < times * usual or values[-1] < USUAL * usual:
            continue
        begun = max(at for at in range(place) if values[at] <= USUAL * usual)
        step = points[begun][0]
        failed = sum(failure > step for failure in failures)
        if failed <= FAILURES_MATTER * (last_step - step):
            return None
        return Growth(name, points[begun], max(points[begun:], key=lambda point: point[1]), failed)
    return None


def _usable(points: Iterable[Point]) -> list[Point]:
    return [(step, value) for step, value in points if 0.0 < value < math.inf]


def _rises(losses: Sequence[Point], since: int) -> bool:
    before = [loss for step, loss in losses if step <= since]
    return not before or losses[-1][1] > statistics.median(before)


def _is_nonfinite(value: object) -> bool:
    return value is not None and not math.isfinite(number(value))


def _spelled(value: float) -> str:
    return f"{value:,.4g}" if value < 1e4 else f"{value:.3g}"
