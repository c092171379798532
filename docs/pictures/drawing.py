"""Shared code for the manual's pictures: SVG drawings that are inlined in a page and use its colours.

Text and lines use `currentColor`, which is dark on a light page and light on a dark one. Data uses the palette of Okabe
and Ito ("Color Universal Design", 2008): its medium lightness works on both, and people with a colour vision deficiency
can tell the colours apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
BLUE, ORANGE, GREEN, PINK, GREY = "#2b87c7", "#d9730d", "#0a9b72", "#c2679a", "#8a8f98"
FONT = "system-ui, sans-serif"
READABLE = 620
"""Pixels below which wide drawings scroll instead of shrinking, so that their text can be read on a phone."""


def result(name: str) -> Any:
    """Read a committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def number(value: float) -> str:
    """Format a coordinate identically on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def power_of_two(exponent: int) -> str:
    """Format a power of two with superscript digits."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


class Picture:
    """A drawing to which shapes are added in order.

    Args:
        width: Width of the coordinate system, in pixels if the page is wide enough.
        height: Height of the coordinate system.
        says: Description for screen readers.
    """

    def __init__(self, width: int, height: int, says: str) -> None:
        self.width, self.height, self.says = width, height, says
        self.shapes: list[str] = []

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> None:
        """Draw a filled rectangle with the given upper left corner."""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.shapes.append(f'<rect {place} fill="{colour}" fill-opacity="{number(opacity)}"/>')

    def line(
        self,
        points: list[tuple[float, float]],
        colour: str = "currentColor",
        width: float = 1.0,
        opacity: float = 1.0,
        dashes: str = "",
    ) -> None:
        """Draw a line through points."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{number(width)}" '
            f'stroke-opacity="{number(opacity)}" stroke-linejoin="round"{dashed}/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """Draw a point."""
        self.shapes.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{colour}"/>')

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: float = 13, colour: str = "currentColor"
    ) -> None:
        """Draw a line of text; `x` is its start, middle or end."""
        self.shapes.append(
            f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{number(size)}" '
            f'fill="{colour}">{escape(words)}</text>'
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
                f"aria-label={quoteattr(self.says)} "
                f'style="width: 100%; min-width: {min(self.width, READABLE)}px; max-width: {self.width}px; '
                f'height: auto; font-family: {FONT}">',
                *self.shapes,
                "</svg>",
                "",
            ]
        )

    def write(self, name: str) -> None:
        """Write the drawing to the scripts' folder."""
        (HERE / f"{name}.svg").write_text(str(self), encoding="utf-8")
