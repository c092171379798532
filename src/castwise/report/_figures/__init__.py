"""The report's figures as plain dicts in plotly.js format.

Colours are names of CSS variables such as "--accent"; the page's script substitutes their values, so that one figure
works in light and dark themes. Module names are escaped because plotly interprets some HTML in text. A figure may have
`choices`: changes to its traces and layout, keyed by the values of the page's controls.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from typing import Any

from castwise.report._downsampling import Point

Figure = dict[str, Any]
Trace = dict[str, Any]


def plain(text: str) -> str:
    """Escape text for plotly, so that markup is shown literally."""
    return html.escape(text, quote=False)


def power_label(exponent: float) -> str:
    """Format a power of two as plotly HTML."""
    return f"2<sup>{exponent:g}</sup>".replace("-", "\N{MINUS SIGN}")


def line(name: str, points: Sequence[tuple[int, float | None]], color: str, width: float = 1.5) -> Trace:
    """Return a line over the steps, which has a hole at each None."""
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": name,
        "x": [step for step, _ in points],
        "y": [None if value is None else rounded(value) for _, value in points],
        "line": {"color": color, "width": width},
        "marker": {"color": color},
        "hovertemplate": f"step %{{x:,}}<br>{name} %{{y:.4~g}}<extra></extra>",
        "showlegend": False,
    }


def rounded(value: float) -> float:
    """Round to six digits, which keeps the page small."""
    return float(f"{value:.6g}")


def range_of(points: Sequence[Point]) -> list[float]:
    """Return the range of an axis that has some room above and below points."""
    lowest, highest = min(value for _, value in points), max(value for _, value in points)
    margin = 0.06 * highest - 0.06 * lowest or 0.1 * abs(highest) or 1.0
    most = sys.float_info.max
    return [max(lowest - margin, -most), min(highest + margin, most)]


def align(figures: Sequence[Figure]) -> None:
    """Give figures of the same kind the same axis ranges, so that runs can be compared by eye."""
    axes = {
        name
        for figure in figures
        for name, axis in figure["layout"].items()
        if name[1:].startswith("axis") and "range" in axis
    }
    for name in axes:
        same = [figure["layout"][name] for figure in figures if name in figure["layout"]]
        widest = max(same, key=lambda axis: abs(axis["range"][1] - axis["range"][0]))
        common = [min(axis["range"][0] for axis in same), max(axis["range"][1] for axis in same)]
        ticks = {key: widest[key] for key in ("tickvals", "ticktext") if key in widest}
        for axis in same:
            axis.update(ticks, range=common)
