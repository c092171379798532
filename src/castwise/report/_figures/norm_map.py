"""Norms of gradients by parameter in the steps around spikes of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from castwise.monitor._records import NormsRecord
from castwise.report._figures import Figure, plain

MAX_SPIKES, MAX_ROWS = 3, 24
"""More spikes and parameters could not be distinguished."""
BANDS = 8
_ROW_HEIGHT = 18


def norm_map(records: Sequence[NormsRecord]) -> Figure | None:
    """Return a map of parameters and steps, in which colour is how far a norm is above its median before the spike.

    Args:
        records: The run's records of norms.
    """
    shown = records[:MAX_SPIKES]
    by_rise = zip_longest(*(record.norms for record in shown))  # the first of each spike before the second of any
    rows = list(dict.fromkeys(name for names in by_rise for name in names if name is not None))[:MAX_ROWS]
    if not rows:
        return None
    columns: list[str] = []
    grid: list[list[float | None]] = [[] for _ in rows]
    shapes: list[dict[str, Any]] = []
    for number, record in enumerate(shown):
        if number:
            columns.append(" " * number)  # a gap between two spikes
            for cells in grid:
                cells.append(None)
        shapes.append(_line(len(columns) + sum(step < 0 for step in record.steps)))
        columns += [f"{record.step + step:,}" for step in record.steps]
        for cells, name in zip(grid, rows, strict=True):
            cells += _above(record, name)
    return {
        "data": [
            {
                "type": "heatmap",
                "x": list(range(len(columns))),
                "y": [plain(name) for name in rows],
                "z": grid,
                "text": [columns] * len(rows),
                "zmin": 0,
                "zmax": BANDS,
                "colorscale": [
                    [bound / BANDS, f"--heat-{band + 1}"] for band in range(BANDS) for bound in (band, band + 1)
                ],
                "showscale": False,
                "xgap": 1,
                "ygap": 1,
                "hoverongaps": False,
                "hovertemplate": "%{y}<br>step %{text}<br>2^%{z} times its median before<extra></extra>",
            }
        ],
        "layout": _layout(shapes, [f"{record.step:,}" for record in shown]),
        "rows": rows,
        "height": 70 + _ROW_HEIGHT * max(len(rows), 4),
    }


def _layout(shapes: list[dict[str, Any]], spikes: list[str]) -> dict[str, Any]:
    ticks = {"tickvals": [shape["x0"] + 0.5 for shape in shapes], "ticktext": spikes}
    return {
        "xaxis": {"title": {"text": "step"}, **ticks, "showgrid": False, "zeroline": False},
        "yaxis": {"showgrid": False, "zeroline": False},
        "shapes": shapes,
        "hovermode": "closest",
    }


def norm_caption(records: Sequence[NormsRecord]) -> str:
    """Describe the map in words."""
    first = records[0]
    name = next(iter(first.norms))
    values = [value for value in _above(first, name) if value is not None]
    rose = f"rose most: to 2^{max(values):g} times its median" if values else "was not finite"
    more = f" The first {MAX_SPIKES} of {len(records)} spikes are shown." if len(records) > MAX_SPIKES else ""
    return f"Around the spike at step {first.step:,}, the gradient of {name} {rose} in the steps before.{more}"


def _above(record: NormsRecord, name: str) -> list[float | None]:
    """Return log2 of the norms of a parameter over their median before the spike; None where it is not known."""
    norms = record.norms.get(name)
    before = [norm for norm, step in zip(norms or (), record.steps, strict=False) if step < 0 and math.isfinite(norm)]
    usual = median(before) if before else 0.0
    if norms is None or usual <= 0.0:
        return [None] * len(record.steps)
    return [
        round(math.log2(norm / usual), 1) if math.isfinite(norm) and norm > 0.0 else None
        for norm, _ in zip(norms, record.steps, strict=False)
    ]


def _line(column: int) -> dict[str, Any]:
    at = {"x0": column - 0.5, "x1": column - 0.5, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "line", **at, "line": {"color": "--danger", "width": 1.5}}
