"""Heat maps of headroom and underflow by module and sampled step.

The colour bands follow the verdict's thresholds and get steadily darker (brighter on dark pages) towards danger, so
that their order is clear without hue. Cells beyond the last threshold are also marked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from castwise._number_text import headroom, percent
from castwise.monitor._formats import LOW_PRECISION
from castwise.monitor._records import SampleRecord, Stats
from castwise.report._downsampling import in_buckets
from castwise.report._figures import Figure, Trace
from castwise.report._range_advice import FLUSH_IS_CRITICAL
from castwise.report._run_facts import RunFacts, named, shown
from castwise.report._scale_window import FLUSH_MATTERS, GRADIENT_HEADROOM_BITS
from castwise.report._underflow import Underflow

# With more columns, each would be narrower than three pixels on a laptop.
MAX_COLUMNS = 120
TICKS = 7
# The first view shows the most endangered modules that fit on a screen; more rows are shown on request.
ROWS_AT_FIRST = 24
ROW_HEIGHT, MIN_ROWS = 18, 4
KINDS = {"gradients": "modules", "outputs": "activations"}
Judged = tuple[SampleRecord, Underflow]


@dataclass(frozen=True)
class Measure:
    """A quantity that a heat map shows.

    Args:
        key: The name in records.
        title: The displayed name.
        edges: Ascending bounds between bands.
        labels: Labels of the bands, one more than `edges`.
        safe_first: Whether the lowest band is the safe one.
        mark_from: Cells past this bound, towards danger, are marked as well as coloured.
        mark_label: The meaning of a mark.
        hover: plotly's format of a value.
    """

    key: str
    title: str
    edges: tuple[float, ...]
    labels: tuple[str, ...]
    safe_first: bool
    mark_from: float
    mark_label: str
    hover: str

    def bands(self) -> list[tuple[str, str]]:
        """Return CSS variable and label of each band, in ascending order of the quantity."""
        numbers = range(len(self.labels))
        order = numbers if self.safe_first else reversed(numbers)
        return [(f"--band-{band}", label) for band, label in zip(order, self.labels, strict=True)]

    def worse(self, one: float, other: float) -> float:
        """Return the more dangerous of two values."""
        return max(one, other) if self.safe_first else min(one, other)

    def is_marked(self, value: float) -> bool:
        """Return True if a value is past `mark_from`."""
        return value >= self.mark_from if self.safe_first else value < self.mark_from


HEADROOM = Measure(
    "headroom_bits",
    "Headroom to overflow",
    edges=(0.0, 1.0, GRADIENT_HEADROOM_BITS, 4.0, 8.0, 12.0),
    labels=("overflows", "0 to 1 bit", "1 to 2", "2 to 4", "4 to 8", "8 to 12", "over 12 bits"),
    safe_first=False,
    mark_from=0.0,
    mark_label="overflow",
    hover="headroom %{z:.1f} bits",
)
FLUSH = Measure(
    "flush",
    "Underflow to zero",
    edges=(0.0001, 0.001, 0.01, FLUSH_MATTERS, FLUSH_IS_CRITICAL, 0.5),
    labels=("under 0.01%", "to 0.1%", "to 1%", "to 5%", "to 25%", "to 50%", "over 50%"),
    safe_first=True,
    mark_from=FLUSH_IS_CRITICAL,
    mark_label="25% or more lost",
    hover="%{z:.2~%} flush to zero",
)
MEASURES = (HEADROOM, FLUSH)


def heat_map(
    measure: Measure, facts: RunFacts, rows: Mapping[str, Sequence[str]], steps: Sequence[int] | None = None
) -> Figure:
    """Return the heat map of one measure. Its columns are as wide as each other, whatever lies between two samples.

    Args:
        measure: The quantity to show.
        facts: The run's facts.
        rows: Modules from top to bottom, for "gradients" and for "outputs".
        steps: Sampled steps, ascending: those of all runs, so that their columns are the same. None for the run's own.

    Returns:
        A figure with choices such as "gradients/fp16". It holds the names of all rows; the page's script shows some of
        them.
    """
    if steps is None:
        steps = sorted({sample.step for sample in facts.run.samples})
    buckets = in_buckets(steps, MAX_COLUMNS)
    columns = {
        kind: _columns(list(zip(facts.run.samples, facts.underflows[key], strict=True)), buckets)
        for kind, key in KINDS.items()
    }
    sampled = [column[-1][0].step if column else None for column in columns["gradients"]]
    choices: dict[str, dict[str, Any]] = {}
    for kind, key in KINDS.items():
        for name in LOW_PRECISION:
            grid = _grid(measure, columns[kind], rows[kind], key, name)
            choices[f"{kind}/{name}"] = {
                "data": _traces(measure, grid, sampled),
                "kind": kind,
                "caption": _caption(measure, grid, columns[kind], rows[kind], (kind, name)),
            }
    shown_at = range(0, len(buckets), -(-len(buckets) // TICKS) or 1)
    layout = {
        "xaxis": {
            "range": [-0.5, max(len(buckets), 1) - 0.5],
            "title": {"text": "sampled step"},
            "tickvals": list(shown_at),
            "ticktext": [f"{buckets[column][-1]:,}" for column in shown_at],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"showgrid": False, "zeroline": False},
        "hovermode": "closest",
    }
    return {
        "data": _base_traces(measure, next(iter(choices.values()))["data"]),
        "layout": layout,
        "choices": choices,
        "safe": [0.0, measure.edges[0]] if measure.safe_first else [measure.edges[-1], 1e9],
        "names": {kind: [shown(module) for module in rows[kind]] for kind in KINDS},
        "height": 70 + ROW_HEIGHT * max(MIN_ROWS, *(min(len(names), ROWS_AT_FIRST) for names in rows.values())),
    }


def _columns(judged: Sequence[Judged], buckets: Sequence[Sequence[int]]) -> list[list[Judged]]:
    """Return the samples of each column, which may be none."""
    column_of = {step: column for column, bucket in enumerate(buckets) for step in bucket}
    columns: list[list[Judged]] = [[] for _ in buckets]
    for sample, underflow in judged:
        columns[column_of[sample.step]].append((sample, underflow))
    return columns


def _grid(
    measure: Measure, columns: Sequence[Sequence[Judged]], modules: Sequence[str], key: str, name: str
) -> list[list[float | None]]:
    """Return the worst value of each module in each column: None if there is none, NaN if numbers were not finite."""
    judged = [[(getattr(sample, key), underflow) for sample, underflow in column] for column in columns]
    return [[_worst(measure, column, module, name) for column in judged] for module in modules]


def _worst(
    measure: Measure, column: Sequence[tuple[Mapping[str, Stats], Underflow]], module: str, name: str
) -> float | None:
    worst: float | None = None
    for by_module, underflow in column:
        stats = by_module.get(module)
        if stats is None:
            continue
        if stats.nonfinite > 0:
            return math.nan
        value = _of(measure, stats, underflow, module, name)
        worst = value if worst is None else measure.worse(worst, value)
    return worst


def _caption(
    measure: Measure,
    grid: Sequence[Sequence[float | None]],
    columns: Sequence[Sequence[Judged]],
    modules: Sequence[str],
    of: tuple[str, str],
) -> str:
    """Name the most dangerous cell of a map of a kind and a format."""
    kind, name = of
    cells = [
        (value, row, column)
        for row, values in enumerate(grid)
        for column, value in enumerate(values)
        if value is not None and math.isfinite(value)
    ]
    if not cells:
        values = {value for values in grid for value in values if value is not None}
        if math.inf in values:
            return f"All {kind} are zero."
        return f"{kind.capitalize()}: no sample was finite." if values else f"No {kind} were sampled."
    value, row, column = (max if measure.safe_first else min)(cells, key=lambda cell: cell[0])
    module = modules[row]
    step = next(
        sample.step
        for sample, underflow in columns[column]
        if (stats := getattr(sample, KINDS[kind]).get(module)) is not None
        and _of(measure, stats, underflow, module, name) == value
    )
    if measure is FLUSH:
        if not value:
            return f"No {kind[:-1]} in any sample rounds to zero in {name}."
        return f"Highest for {name} {kind}: {percent(value)} in {named(module)} at step {step:,}."
    return f"Lowest for {name} {kind}: {headroom(value)} in {named(module)} at step {step:,}."


def _of(measure: Measure, stats: Stats, underflow: Underflow, module: str, name: str) -> float:
    return underflow.share(module, stats, name) if measure is FLUSH else stats.formats[name].headroom_bits


def _traces(measure: Measure, grid: Sequence[Sequence[float | None]], steps: Sequence[int | None]) -> list[Trace]:
    marked = [
        (column, row, math.isnan(value))
        for row, values in enumerate(grid)
        for column, value in enumerate(values)
        if value is not None and (math.isnan(value) or measure.is_marked(value))
    ]
    return [
        {
            "x": list(range(len(steps))),
            "z": [[_rounded(value) for value in values] for values in grid],
            "customdata": list(steps),
        },
        {
            "x": [column for column, _, _ in marked],
            "y": [row for _, row, _ in marked],
            "customdata": [int(is_nonfinite) for _, _, is_nonfinite in marked],
        },
    ]


def _rounded(value: float | None) -> float | None:
    """Round to three digits, which keeps the file small; infinite headroom (all zero) has no value."""
    return float(f"{value:.3g}") if value is not None and math.isfinite(value) else None


def _base_traces(measure: Measure, first: list[Trace]) -> list[Trace]:
    lowest, highest = (0.0, 1.0) if measure.safe_first else (-4.0, 24.0)
    return [
        {
            "type": "heatmap",
            "zmin": lowest,
            "zmax": highest,
            "colorscale": _stepwise(measure, lowest, highest),
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
            "hoverongaps": False,
            "hovertemplate": f"%{{text}}<br>{measure.hover}<extra></extra>",
            **first[0],
        },
        {
            "type": "scatter",
            "mode": "markers",
            "marker": {"symbol": "x", "size": 5, "color": "--mark", "line": {"color": "--mark-line", "width": 1}},
            "showlegend": False,
            "hoverinfo": "skip",
            **first[1],
        },
    ]


def _stepwise(measure: Measure, lowest: float, highest: float) -> list[list[Any]]:
    """Return a colour scale of flat bands, in which each inner bound appears twice."""
    at = [0.0, *((edge - lowest) / (highest - lowest) for edge in measure.edges), 1.0]
    return [
        [bound, color] for (color, _), bounds in zip(measure.bands(), pairwise(at), strict=True) for bound in bounds
    ]
