"""Curves and histograms of a record for dashboards. The number of curves does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from castwise.monitor._records import Exponents, SampleRecord, Stats, StepRecord

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


def of_step(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by curve name; at most five."""
    names = ("scale", "loss", "grad_norm", "seconds", "skipped")
    known = {name: getattr(record, name) for name in names}
    return {f"step/{name}": float(number) for name, number in known.items() if number is not None}


def norm_of_sample(record: SampleRecord) -> dict[str, float]:
    """Return the gradient norm of a sampled step by curve name; empty if the step was clipped."""
    return {} if record.grad_norm is None else {"step/grad_norm": record.grad_norm}


def of_sample(record: SampleRecord) -> list[Spread]:
    """Return the statistics of a sample; at most 18."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for group, where, name, value in _numbers(record):
        if math.isfinite(value):
            found.setdefault((group, name), {})[where] = value
    return [_spread(group, name, values) for (group, name), values in found.items()]


def exponents(statistics: Iterable[Stats]) -> Histogram | None:
    """Return the histogram of binary exponents of several modules together; None if there are no numbers."""
    total = Exponents.total(stats.exponents for stats in statistics)
    if not total.counts:
        return None
    return Histogram([float(total.lowest + index) for index in range(len(total.counts) + 1)], list(total.counts))


def _numbers(record: SampleRecord) -> Iterator[tuple[str, str, str, float]]:
    for group, modules in (("gradients", record.modules), ("outputs", record.activations)):
        for module, stats in modules.items():
            for number_format, fit in stats.formats.items():
                yield group, module or "whole model", f"flush {number_format}", fit.flush
                yield group, module or "whole model", f"headroom_bits {number_format}", fit.headroom_bits
    for parameter, update in record.weights.items():
        yield "updates", parameter, "update_to_weight", update.update_to_weight
        yield "updates", parameter, "lost_in_bf16", update.lost_in_bf16


def _spread(group: str, name: str, values: Mapping[str, float]) -> Spread:
    worst = _WORST[name.split()[0]](values, key=lambda where: values[where])
    return Spread(group, name, values, worst)
