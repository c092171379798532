"""Exponents of gradients over the steps: how the distribution of magnitudes moves, and what it moves out of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from castwise.monitor._formats import FP16
from castwise.monitor._records import SampleRecord, Stats, nearest_exponent
from castwise.report._downsampling import in_buckets
from castwise.report._figures import Figure, power_label
from castwise.report._figures.histogram import ALL_MODULES

# More columns and modules would be seen in the size of the page.
MAX_COLUMNS, MAX_MODULES = 60, 24
BANDS = 8
# Each band of colour is two powers of two: from under 2^-14 to over a quarter of the elements.
_BITS = 2
_LEAST = -_BITS * BANDS
_TICK = 8


def exponent_map(samples: Sequence[SampleRecord], modules: Sequence[str], *, in_fp16: bool) -> Figure | None:
    """Return a map of steps and exponents, in which colour is the share of the elements; None of a single sample.

    Its choices are "*" for all modules and the names of some. Gradients are scaled, as they are in the backward.

    Args:
        samples: The run's samples.
        modules: Names of modules, those that matter most first.
        in_fp16: Whether the run computed in fp16. Otherwise its limits are drawn as those of another format.
    """
    finite = [sample for sample in samples if any(not stats.nonfinite for stats in sample.modules.values())]
    columns = [bucket[-1] for bucket in in_buckets(finite, MAX_COLUMNS)]
    if len(columns) < 2:
        return None
    shares = {module: [_shares(sample, [module]) for sample in columns] for module in modules[:MAX_MODULES]}
    shares[ALL_MODULES] = [_shares(sample, list(sample.modules)) for sample in columns]
    drawn = [exponent for of in shares.values() for column in of for exponent in column]
    if not drawn:
        return None
    lost, over = FP16.smallest_subnormal_exponent - 1, FP16.bias + 1
    lowest, highest = min([lost, *drawn]) - 3, max([over, *drawn]) + 3
    choices = {module: {"data": [{"z": _grid(of, lowest, highest)}]} for module, of in shares.items()}
    return {
        "data": [
            {
                "type": "heatmap",
                "x": [f"{sample.step:,}" for sample in columns],
                "y0": lowest + 0.5,
                "dy": 1,
                "zmin": _LEAST,
                "zmax": 0,
                "colorscale": [
                    [bound / BANDS, f"--heat-{band + 1}"] for band in range(BANDS) for bound in (band, band + 1)
                ],
                "showscale": False,
                "hoverongaps": False,
                "hovertemplate": "step %{x}<br>from 2^%{y:.0f}: about 2^%{z} of the elements<extra></extra>",
                **choices[ALL_MODULES]["data"][0],
            }
        ],
        "layout": _layout(lowest, highest, (lost, over), "--danger" if in_fp16 else "--ink-soft"),
        "choices": choices,
        "keys": ["module"],
        "missing": f"Over the steps, only the {len(shares) - 1} modules most at risk are drawn.",
        "height": 360,
    }


def _layout(lowest: int, highest: int, limits: tuple[int, int], color: str) -> dict[str, Any]:
    ticks = range(_TICK * math.ceil(lowest / _TICK), highest + 1, _TICK)
    lost, over = limits
    return {
        "xaxis": {"type": "category", "title": {"text": "sampled step"}, "nticks": 8, "showgrid": False},
        "yaxis": {
            "range": [lowest, highest],
            "tickvals": list(ticks),
            "ticktext": [power_label(tick) for tick in ticks],
            "zeroline": False,
        },
        "shapes": [_limit(edge, color) for edge in limits],
        "annotations": [
            _label("lost in fp16", lost, "top", color),
            _label("overflow in fp16", over, "bottom", color),
        ],
        "hovermode": "closest",
    }


def _shares(sample: SampleRecord, modules: Sequence[str]) -> Mapping[int, float]:
    """Return the share of the elements of modules by scaled exponent; nothing for those that are not finite."""
    found: list[Stats] = [sample.modules[name] for name in modules if name in sample.modules]
    finite = [stats for stats in found if not stats.nonfinite]
    elements = sum(stats.numel for stats in finite)
    counts: Counter[int] = Counter()
    shift = nearest_exponent(sample.scale)
    for stats in finite:
        for exponent, count in stats.exponents.items():
            counts[exponent + shift] += count
    return {exponent: count / elements for exponent, count in counts.items()} if elements else {}


def _grid(columns: Sequence[Mapping[int, float]], lowest: int, highest: int) -> list[list[int | None]]:
    """Return log2 of the shares, rounded, row by row from the lowest exponent."""
    rows = range(lowest, highest)
    return [
        [max(round(math.log2(column[row])), _LEAST) if column.get(row) else None for column in columns] for row in rows
    ]


def _limit(edge: int, color: str) -> dict[str, Any]:
    line = {"color": color, "dash": "dot", "width": 1.5}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": edge, "y1": edge, "line": line}


def _label(text: str, edge: int, anchor: str, color: str) -> dict[str, Any]:
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": edge, "yanchor": anchor}
    return {**place, "text": text, "showarrow": False, "font": {"color": color}, "bgcolor": "--panel", "borderpad": 1}
