"""Loss, scale, gradient norm and learning rate over the steps, with skips and findings marked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from castwise._number_text import several
from castwise.monitor import _causes as causes
from castwise.monitor._recorded_run import distinct_invariants
from castwise.report._downsampling import changes, extremes, in_buckets
from castwise.report._figures import Figure, Trace, line, plain, power_label, range_of
from castwise.report._figures.losses import LossCurve
from castwise.report._run_facts import RunFacts
from castwise.report._skips import Skips

# Colour and shape of each cause; shapes help readers who cannot tell the colours apart.
MARKERS: dict[str, tuple[str, str]] = {
    causes.OVERFLOW: ("--cause-overflow", "triangle-up"),
    causes.NONFINITE_LOSS: ("--cause-loss", "x"),
    causes.NONFINITE_WEIGHTS: ("--cause-weights", "square"),
    causes.ANOTHER_RANK: ("--cause-rank", "diamond"),
}
OTHER_MARKER = ("--cause-other", "circle")
# With more skips than pixels, neighbours share one mark with their count.
MAX_MARKS = 1500
_MARKED_TEXT = 120  # characters


@dataclass(frozen=True)
class Panel:
    """One of the vertically stacked plots.

    Args:
        axis: The y axis's name in plotly, which is the same in every run so that ranges can be aligned.
        title: The panel's title.
        height: Height relative to other panels.
        traces: The plotted traces.
        layout: Layout of the y axis.
        shapes: Shapes in the plot.
        words: Annotations in the plot.
    """

    axis: str
    title: str
    height: float
    traces: list[Trace]
    layout: dict[str, Any]
    shapes: list[dict[str, Any]] = field(default_factory=list)
    words: list[dict[str, Any]] = field(default_factory=list)


def timeline(facts: RunFacts, *, draws_loss: bool = True) -> Figure | None:
    """Return one run's skips, loss, scale, gradient norm and learning rate as a figure; None if nothing is recorded.

    Args:
        facts: The run's facts.
        draws_loss: Whether the loss has a panel; without it, findings are marked beside the skips.
    """
    steps = facts.run.steps
    panels = []
    strips = [*map(_strip, facts.skips), *(_strip(fault, "taken") for fault in facts.faults)]
    loss = LossCurve.of(facts)
    found = [] if loss is None or draws_loss else [*_findings(facts, dict.fromkeys(dict(loss.points), 0.0))]
    if strips or found:
        titles = {"skips": facts.skips, "taken with inf or NaN": facts.faults, "findings": found}
        title = " and ".join(name for name, marked in titles.items() if marked)
        panels.append(Panel("", title, 0.35, [*strips, *found], {"range": [-1, 1], "visible": False}))
    if loss is not None and draws_loss:
        panels.append(_loss(loss, facts))
    if facts.scales:
        panels.append(Panel("2", "scale", 1.0, [*_scale(facts)], _powers(scale for _, scale in facts.scales)))
    norm = extremes([point for point in facts.grad_norms if point[1] > 0])
    if norm:
        logs = range_of([(step, math.log10(value)) for step, value in norm])
        axis = {"type": "log", "range": logs, **_decades(*logs)}
        panels.append(Panel("4", "gradient norm", 0.8, [line("gradient norm", norm, "--line-2")], axis))
    rates = changes([(record.step, float(record.lr)) for record in steps if record.lr is not None])
    if loss is not None and len({rate for _, rate in rates}) > 1:  # the settings have a constant one
        curve = line("learning rate", rates, "--ink-soft")
        curve["line"]["shape"] = "hv"
        panels.append(Panel("5", "learning rate", 0.5, [curve], {"range": range_of(rates), "nticks": 3}))
    return _stacked(panels, steps[0].step, steps[-1].step) if panels else None


def marks(skips: Skips, limit: int = MAX_MARKS) -> list[tuple[int, str]]:
    """Return step and label of each mark for the skips of one cause; every skip belongs to one mark."""
    return [
        (chunk[0], f"step {chunk[0]:,}")
        if len(chunk) == 1
        else (chunk[0], f"{several(len(chunk), 'skip')} in steps {chunk[0]:,} to {chunk[-1]:,}")
        for chunk in in_buckets(skips.steps, limit)
    ]


def _marker(cause: str, size: int) -> dict[str, Any]:
    color, symbol = MARKERS.get(cause, OTHER_MARKER)
    return {"color": color, "symbol": symbol, "size": size, "line": {"width": 0}}


def _strip(skips: Skips, what: str = "skipped") -> Trace:
    marked = marks(skips)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{'' if what == 'skipped' else f'{what}, '}{plain(skips.cause)} ({len(skips.steps):,})",
        "x": [step for step, _ in marked],
        "y": [0] * len(marked),
        "text": [plain(text) for _, text in marked],
        "marker": _marker(skips.cause, 10),
        "hovertemplate": f"{what}: {plain(skips.cause)}<br>%{{text}}<extra></extra>",
        "legendgroup": f"{what} {skips.cause}",
    }


def _scale(facts: RunFacts) -> Iterable[Trace]:
    curve = line("scale", changes(facts.scales), "--ink-soft")
    curve["line"]["shape"] = "hv"
    curve["y"] = [math.log2(scale) if scale > 0 else None for scale in curve["y"]]
    curve["hovertemplate"] = "step %{x:,}<br>scale 2^%{y:.4~g}<extra></extra>"
    yield curve
    at = dict(facts.scales)
    for skips in facts.skips:
        marked = [(step, text) for step, text in marks(skips) if at.get(step, 0) > 0]
        yield {
            **_strip(skips),
            "x": [step for step, _ in marked],
            "y": [math.log2(at[step]) for step, _ in marked],
            "text": [plain(text) for _, text in marked],
            "marker": _marker(skips.cause, 9),
            "showlegend": False,
        }


def _loss(curve: LossCurve, facts: RunFacts) -> Panel:
    steps = facts.run.steps[-1].step - facts.run.steps[0].step + 1
    traces = [{**trace, "showlegend": bool(curve.average)} for trace in curve.traces("--accent")]
    return Panel(
        axis="3",
        title="loss",
        height=2.2,
        traces=[*traces, *_findings(facts, dict(curve.points))],
        layout={"range": range_of(curve.points), "nticks": 7},
        shapes=curve.gap_shapes("3"),
        words=curve.gap_words("3", steps),
    )


def _findings(facts: RunFacts, losses: dict[int, float]) -> Iterable[Trace]:
    """Yield marks of the invariants that did not hold, on the loss."""
    records = distinct_invariants([facts.run])
    if records and losses:
        steps = sorted(losses)
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": f"findings ({len(records)})",
            "x": [record.step for record in records],
            "y": [losses[min(steps, key=lambda step: abs(step - record.step))] for record in records],
            "text": [plain(f"{record.name}: {record.text[:_MARKED_TEXT]}") for record in records],
            "marker": {"color": "--cause-other", "symbol": "diamond", "size": 9, "line": {"width": 0}},
            "hovertemplate": "step %{x:,}<br>%{text}<extra></extra>",
        }


def _decades(lowest: float, highest: float) -> dict[str, Any]:
    """Return at most four ticks of a logarithmic axis, of one digit each, by its range in powers of ten."""
    exponents = range(max(math.floor(lowest), -307), min(math.ceil(highest), 307) + 1)  # those of fp64
    every = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    ticks = [tick for tick in every if lowest <= math.log10(tick) <= highest]
    if len(ticks) > 4:
        ticks = [10.0**exponent for exponent in exponents if lowest <= exponent <= highest][:: -(-len(exponents) // 4)]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _powers(scales: Iterable[float]) -> dict[str, Any]:
    """Return an axis of exponents with at most seven ticks in the range of the scales."""
    exponents = [math.log2(scale) for scale in scales if scale > 0] or [0.0]
    lowest, highest = math.floor(min(exponents)), math.ceil(max(exponents))
    ticks = range(-130, 131, max(1, -(-(highest - lowest) // 6)))
    return {
        "tickvals": list(ticks),
        "ticktext": [power_label(tick) for tick in ticks],
        "range": [lowest - 0.7, highest + 0.7],
    }


def _stacked(panels: Sequence[Panel], first: int, last: int) -> Figure:
    """Stack panels over a shared step axis."""
    margin = 0.5 + 0.01 * (last - first)
    gap, total = 0.07, sum(panel.height for panel in panels) or 1.0
    free = 1.0 - gap * max(len(panels) - 1, 0)
    data: list[Trace] = []
    layout: dict[str, Any] = {"annotations": [], "shapes": [], "hovermode": "closest"}
    top = 1.0
    for panel in panels:
        bottom = max(0.0, top - free * panel.height / total)
        layout[f"yaxis{panel.axis}"] = {"domain": [bottom, top], "zeroline": False, **panel.layout}
        data += [{**trace, "yaxis": f"y{panel.axis}"} for trace in panel.traces]
        layout["annotations"] += [_title(panel.title, top), *panel.words]
        layout["shapes"] += panel.shapes
        top = bottom - gap
    layout["xaxis"] = {
        "range": [first - margin, last + margin],
        "anchor": f"y{panels[-1].axis if panels else ''}",
        "title": {"text": "step"},
        "tickformat": ",d",
        "nticks": 8,
        "zeroline": False,
    }
    inner = 20 + round(150 * total)
    layout["legend"] = {"orientation": "h", "x": 0, "y": 1 + 24 / inner, "yanchor": "bottom"}  # above the first title
    height = inner + 90  # the page's margins
    return {"data": data, "layout": layout, "height": height}


def _title(text: str, top: float) -> dict[str, Any]:
    return {
        "text": f"<b>{text}</b>",
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
    }
