"""Histograms of gradient exponents, before and after scaling, over the range of each format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castwise._number_text import percent, power_of_two
from castwise.monitor._formats import FP16, LOW_PRECISION
from castwise.monitor._records import SampleRecord, nearest_exponent
from castwise.report._figures import Figure, Trace, power_label

ALL_MODULES = "*"
MOMENTS = {"whole": "whole run", "first": "first sample", "last": "last sample"}


# Below and above all fp32 exponents; the figure shows part of this range.
_FAR = 160


@dataclass(frozen=True)
class Histogram:
    """Number of a module's gradients by exponent, summed over samples.

    Args:
        plain: Unscaled elements v with 2^e <= |v| < 2^(e + 1), by e.
        scaled: The same for scaled gradients, each sample at its own scale.
        elements: Number of elements, including zeros.
        scales: Exponents of the samples' scales, without duplicates.
    """

    plain: Counter[int]
    scaled: Counter[int]
    elements: int
    scales: tuple[float, ...]

    def share(self, low: float, high: float) -> float:
        """Return the share of all elements whose scaled exponent is in [low, high)."""
        inside = sum(count for exponent, count in self.scaled.items() if low <= exponent < high)
        return inside / self.elements if self.elements else 0.0

    def caption(self, in_fp16: bool) -> str:
        """Describe the histogram in words; `in_fp16` is whether the run computed in fp16."""
        if not self.elements:
            return "No finite gradients of this module in this sample."
        lost = self.share(-math.inf, FP16.smallest_subnormal_exponent - 1)
        coarse = self.share(FP16.smallest_subnormal_exponent - 1, FP16.smallest_normal_exponent)
        if not self.scaled:
            return "All gradients are zero."
        top = max(self.scaled)
        lowest, highest = power_of_two(min(self.scales)), power_of_two(max(self.scales))
        at = f"scale {lowest}" if lowest == highest else f"scales {lowest} to {highest}"
        zero = max(0.0, 1.0 - sum(self.plain.values()) / self.elements)
        return (
            f"At {at}, {percent(lost)} of the elements {'round' if in_fp16 else 'would round'} to zero in fp16, "
            f"{percent(coarse)} {'are' if in_fp16 else 'would be'} subnormal, and {percent(zero)} are zero and not "
            "drawn. "
            f"The largest are below 2^{top + 1}; fp16 ends at 2^{FP16.bias + 1}."
        )


def _histograms(samples: Iterable[SampleRecord]) -> dict[str, Histogram]:
    """Sum the finite samples of each module, and of all modules together."""
    counts: dict[str, dict[int, dict[int, int]]] = {ALL_MODULES: {}}
    elements: Counter[str] = Counter()
    for sample in samples:
        shift = nearest_exponent(sample.scale)
        for module, stats in sample.modules.items():
            if stats.nonfinite > 0:
                continue
            elements[module] += stats.numel
            elements[ALL_MODULES] += stats.numel
            mine = counts.setdefault(module, {}).setdefault(shift, {})
            whole = counts[ALL_MODULES].setdefault(shift, {})
            for exponent, count in stats.exponents.items():
                mine[exponent] = mine.get(exponent, 0) + count
                whole[exponent] = whole.get(exponent, 0) + count
    return {module: _histogram(by_shift, elements[module]) for module, by_shift in counts.items()}


def _histogram(by_shift: Mapping[int, Mapping[int, int]], elements: int) -> Histogram:
    plain: Counter[int] = Counter()
    scaled: Counter[int] = Counter()
    for shift, counts in by_shift.items():
        plain.update(counts)
        scaled.update({exponent + shift: count for exponent, count in counts.items()})
    return Histogram(plain, scaled, elements, tuple(2.0 ** min(shift, 1023) for shift in by_shift))


def histogram(samples: Sequence[SampleRecord], modules: Sequence[str], *, in_fp16: bool) -> Figure:
    """Return the histogram of one run; its choices are moments and modules, such as "last/blocks.0.attn".

    Args:
        samples: The run's samples.
        modules: Names of the modules.
        in_fp16: Whether the run computed in fp16. Otherwise its limits are drawn as those of another format.
    """
    nothing = _histogram({}, 0)
    found = {
        f"{moment}/{module}": of_modules.get(module, nothing)
        for moment, of_modules in zip(MOMENTS, map(_histograms, (samples, samples[:1], samples[-1:])), strict=True)
        for module in [ALL_MODULES, *modules]
    }
    whole = found[f"whole/{ALL_MODULES}"]
    lowest = min([-28, *whole.plain, *whole.scaled]) - 2
    highest = max([18, *whole.plain, *whole.scaled]) + 2
    first = _choice(whole, in_fp16)
    is_scaled = set(whole.scales) != {1.0}
    styles: list[Trace] = [
        {"name": "unscaled", "marker": {"color": "--muted-bar", "line": {"width": 0}}, "showlegend": is_scaled},
        {
            "name": "scaled" if is_scaled else "gradients",
            "marker": {"color": "--accent", "line": {"width": 0}},
            "opacity": 0.85 if is_scaled else 1.0,
        },
    ]
    bars = [
        {
            "type": "bar",
            "width": 1,
            "hovertemplate": "2^%{x:.0f}: %{y:.3~g}%<extra>%{fullData.name}</extra>",
            **style,
            **patch,
        }
        for style, patch in zip(styles, first["data"], strict=True)
    ]
    return {
        "data": [*bars, *_formats()],
        "layout": {**_layout(lowest, highest, in_fp16), **first["layout"]},
        "choices": {key: _choice(each, in_fp16) for key, each in found.items()},
        "height": 460,
    }


def _choice(histogram: Histogram, in_fp16: bool) -> dict[str, Any]:
    return {
        "data": [_bins(histogram.plain, histogram.elements), _bins(histogram.scaled, histogram.elements)],
        "layout": {"annotations": _annotations(histogram, in_fp16)},
        "caption": histogram.caption(in_fp16),
    }


def _bins(counts: Counter[int], elements: int) -> Trace:
    """Return bars at the middle of each power of two, in percent of all elements."""
    if not counts or not elements:
        return {"x0": 0, "dx": 1, "y": []}
    exponents = range(min(counts), max(counts) + 1)
    heights = [float(f"{100 * counts[exponent] / elements:.3g}") for exponent in exponents]
    return {"x0": exponents[0] + 0.5, "dx": 1, "y": heights}


def _annotations(histogram: Histogram, in_fp16: bool) -> list[dict[str, Any]]:
    """Label the regions, and draw an arrow from the unscaled to the scaled gradients."""
    color = "--danger" if in_fp16 else "--ink-soft"
    notes: list[dict[str, Any]] = [
        _note("lost in fp16", FP16.smallest_subnormal_exponent - 1, color),
        _note("overflow \N{RIGHTWARDS ARROW}" if in_fp16 else "overflow in fp16", FP16.bias + 1, color),
    ]
    if histogram.plain and set(histogram.scales) != {1.0}:
        start, end = _median(histogram.plain), _median(histogram.scaled)
        exponent = round(end - start)
        common = {"xref": "x", "yref": "paper", "y": 0.985, "yanchor": "middle"}
        arrow = {"axref": "x", "ax": start, "x": end, "ay": 0, "showarrow": True, "arrowhead": 2, "text": ""}
        middle = {"x": (start + end) / 2, "showarrow": False, "bgcolor": "--panel", "borderpad": 2}
        notes += [
            {**common, **arrow, "arrowcolor": "--ink", "arrowwidth": 2},
            {**common, **middle, "text": f"<b>\N{MULTIPLICATION SIGN} {power_label(exponent)}</b>"},
        ]
    return notes


def _median(counts: Counter[int]) -> float:
    left = sum(counts.values()) / 2
    for exponent in sorted(counts):
        left -= counts[exponent]
        if left <= 0:
            return exponent + 0.5
    return 0.0


def _note(text: str, edge: float, color: str) -> dict[str, Any]:
    return {
        "text": text,
        "x": edge,
        "xanchor": "right",
        "xshift": -4,
        "y": 0.9,
        "yref": "paper",
        "yanchor": "top",
        "showarrow": False,
        "font": {"color": color},
    }


def _formats() -> Iterable[Trace]:
    """Return a bar for each format: hatched for the subnormal range, plain for the normal range."""
    names = list(LOW_PRECISION)
    ends = [
        (each.smallest_subnormal_exponent - 1, each.smallest_normal_exponent, math.log2(each.largest))
        for each in LOW_PRECISION.values()
    ]
    parts = (
        ("subnormal", [(lost, normal) for lost, normal, _ in ends], {"shape": "/", "size": 6, "solidity": 0.35}),
        ("normal", [(normal, largest) for _, normal, largest in ends], {"shape": ""}),
    )
    for part, spans, pattern in parts:
        yield {
            "type": "bar",
            "orientation": "h",
            "name": f"{part} range",
            "y": names,
            "base": [low for low, _ in spans],
            "x": [high - low for low, high in spans],
            "text": [f"2^{low:.0f} to 2^{high:.0f}" for low, high in spans],
            "textposition": "none",
            "hovertemplate": f"%{{y}} {part}: %{{text}}<extra></extra>",
            "marker": {"color": "--format", "pattern": pattern, "line": {"width": 1, "color": "--format"}},
            "width": 0.62,
            "yaxis": "y2",
        }


def _layout(lowest: int, highest: int, in_fp16: bool) -> dict[str, Any]:
    lost, over = FP16.smallest_subnormal_exponent - 1, FP16.bias + 1
    color, wash = ("--danger", "--danger-wash") if in_fp16 else ("--ink-soft", "rgba(0,0,0,0)")
    region = {"type": "rect", "yref": "paper", "y0": 0, "y1": 0.92, "layer": "below", "line": {"width": 0}}
    edge = {"type": "line", "yref": "paper", "y0": 0, "y1": 0.92, "line": {"color": color, "dash": "dot"}}
    ticks = list(range(-_FAR, _FAR, 8))
    return {
        "barmode": "overlay",
        "bargap": 0,
        "shapes": [
            {**region, "x0": -_FAR, "x1": lost, "fillcolor": wash},
            {**region, "x0": over, "x1": _FAR, "fillcolor": wash},
            {**edge, "x0": lost, "x1": lost},
            {**edge, "x0": over, "x1": over},
        ],
        "xaxis": {
            "range": [lowest, highest],
            "tickvals": ticks,
            "ticktext": [power_label(tick) for tick in ticks],
            "title": {"text": "magnitude"},
            "anchor": "y2",
            "zeroline": False,
        },
        "yaxis": {"domain": [0.36, 0.83], "ticksuffix": "%", "rangemode": "tozero", "nticks": 5, "zeroline": False},
        "yaxis2": {"domain": [0.0, 0.3], "autorange": "reversed", "fixedrange": True, "showgrid": False},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
