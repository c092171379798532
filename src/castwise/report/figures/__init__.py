"""The report's pictures as plotly figures: plain dicts, as plotly.js reads them.

Colours are names of CSS variables such as "--accent"; the page's script puts their values in, so that one figure is
right in light and dark. Names of modules are escaped, because plotly takes text for a kind of HTML. A figure may hold
`choices`: what to change in its traces and layout, by the values of the page's controls.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

Figure = dict[str, Any]
Trace = dict[str, Any]


def plain(text: str) -> str:
    """Return text that plotly shows as it is, markup and all."""
    return html.escape(text, quote=False)


def power_label(exponent: float) -> str:
    """Return a power of two in plotly's kind of HTML."""
    return f"2<sup>{exponent:g}</sup>".replace("-", "\N{MINUS SIGN}")


def align(figures: Sequence[Figure]) -> None:
    """Give figures of the same kind the same ranges, so that runs side by side compare by eye."""
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
