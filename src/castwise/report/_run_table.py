"""The table of several runs: steps, skips, loss and time of a step, and how each differs from the first run's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from castwise._number_text import loss_text
from castwise.report._figures.losses import LossCurve
from castwise.report._run_facts import RunFacts

Cell = tuple[str, str]
"""A number, and its difference from the first run's; "" if it has none."""


def run_table(runs: Sequence[tuple[RunFacts, LossCurve | None]]) -> dict[str, list[Cell]]:
    """Return a cell for each run by the title of its column; no column of what no run has."""
    finished = [math.nan if curve is None else curve.last for _, curve in runs]
    seconds = [
        statistics.median([step.seconds for step in facts.run.steps if step.seconds is not None] or [math.nan])
        for facts, _ in runs
    ]
    table = {
        "Steps": _counts([len(facts.run.steps) for facts, _ in runs]),
        "Skipped": _counts([facts.skipped for facts, _ in runs]),
    }
    if any(curve is not None for _, curve in runs):
        changes = [f"{loss - finished[0]:+.2g}" for loss in finished]
        texts = ["" if curve is None else loss_text(curve.last) for _, curve in runs]
        table["Loss at the end"] = _cells(texts, changes, finished)
    if any(map(math.isfinite, seconds)):
        changes = [f"{taken / seconds[0] - 1.0:+.0%}" if seconds[0] else "" for taken in seconds]
        table["Seconds a step"] = _cells([f"{taken:.2g}" for taken in seconds], changes, seconds)
    return table


def _counts(counts: Sequence[int]) -> list[Cell]:
    return _cells([f"{count:,}" for count in counts], [f"{count - counts[0]:+,}" for count in counts], counts)


def _cells(texts: Sequence[str], changes: Sequence[str], values: Sequence[float]) -> list[Cell]:
    """Return cells without changes that are zero, or of a number that is not finite."""
    is_known = [math.isfinite(value - values[0]) and value != values[0] for value in values]
    return [(text, change if known else "") for text, change, known in zip(texts, changes, is_known, strict=True)]
