"""The report's figures as plain dicts in plotly.js format.

Colours are names of CSS variables such as "--accent"; the page's script substitutes their values, so that one figure
works in light and dark themes. Module names are escaped because plotly interprets some HTML in text. A figure may have
`choices`: changes to its traces and layout, keyed by the values of the page's controls.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

Figure = dict[str, Any]
Trace = dict[str, Any]


def plain(text: str) -> str:
    """Escape text for plotly, so that markup is shown literally."""
    return html.escape(text, quote=False)


def power_label(exponent: float) -> str:
    """Format a power of two as plotly HTML."""
    return f"2<sup>{exponent:g}</sup>".replace("-", "\N{MINUS SIGN}")


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
