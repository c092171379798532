"""Curves and histograms of a record for dashboards. The number of curves does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_BINS = 30
_WORST = {"flush": max, "headroom_bits": min, "update_to_weight": max, "lost_in_bf16": max}


class Histogram(NamedTuple):
    """Counts of the numbers between neighbouring edges; there is one more edge than counts."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Spread:
    """One statistic of all modules, or of all parameters, in a sampled step.

    Args:
        group: `"gradients"`, `"outputs"` or `"updates"`.
        name: Name of the statistic, such as `"flush fp16"`.
        values: Finite values by module or parameter; at least one.
        worst: The module or parameter with the worst value.
    """

    group: str
    name: str
    values: Mapping[str, float]
    worst: str

    @property
    def worst_value(self) -> float:
        """The largest value; for `headroom_bits` the smallest."""
        return self.values[self.worst]

    def histogram(self) -> Histogram:
        """Return a histogram of the values with bins of equal width."""
        lowest, highest = min(self.values.values()), max(self.values.values())
        width = (highest - lowest) / _BINS or 1.0
        counts = [0] * _BINS
        for value in self.values.values():
            counts[min(int((value - lowest) / width), _BINS - 1)] += 1
        return Histogram([lowest + width * index for index in range(_BINS + 1)], counts)


def of_step(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a step by curve name; at most five."""
    names = ("scale", "loss", "grad_norm", "seconds", "skipped")
    return {f"step/{name}": float(record[name]) for name in names if record[name] is not None}


def norm_of_sample(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the gradient norm of a sampled step by curve name; empty if the step was clipped."""
    norm = record.get("grad_norm")
    return {} if norm is None else {"step/grad_norm": norm}


def of_sample(record: Mapping[str, Any]) -> list[Spread]:
    """Return the statistics of a sample; at most 18."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for group, where, name, value in _numbers(record):
        if value is not None and math.isfinite(value):
            found.setdefault((group, name), {})[where] = value
    return [_spread(group, name, values) for (group, name), values in found.items()]


def exponents(statistics: Iterable[Mapping[str, Any]]) -> Histogram | None:
    """Return the histogram of binary exponents of several modules together; None if there are no numbers."""
    lowest, counts = added_up((each["exponents"]["lowest"], each["exponents"]["counts"]) for each in statistics)
    if not counts:
        return None
    return Histogram([float(lowest + index) for index in range(len(counts) + 1)], counts)


def added_up(histograms: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, list[int]]:
    """Return the sum of histograms, each given as its lowest exponent and the counts from there on."""
    found = [(low, counts) for low, counts in histograms if counts]
    lowest = min((low for low, _ in found), default=0)
    total = [0] * (max((low + len(counts) for low, counts in found), default=0) - lowest)
    for low, counts in found:
        for place, count in enumerate(counts, low - lowest):
            total[place] += count
    return lowest, total


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float | None]]:
    for group, kind in (("gradients", "modules"), ("outputs", "activations")):
        for module, statistics in record[kind].items():
            for number_format, fit in statistics["formats"].items():
                for name in ("flush", "headroom_bits"):
                    yield group, module or "whole model", f"{name} {number_format}", fit[name]
    for parameter, facts in record["weights"].items():
        for name, value in facts.items():
            yield "updates", parameter, name, value


def _spread(group: str, name: str, values: Mapping[str, float]) -> Spread:
    worst = _WORST[name.split()[0]](values, key=lambda where: values[where])
    return Spread(group, name, values, worst)
