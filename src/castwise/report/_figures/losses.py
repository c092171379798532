"""Curves of the loss: each step and an average, with gaps where it was not finite; and those of several runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from castwise.report._downsampling import Point, extremes
from castwise.report._figures import Figure, Trace, line, plain, range_of, rounded
from castwise.report._run_facts import RunFacts

# A moving average over this share of the run has few wiggles left and lags by no more than is seen.
_AVERAGED_SHARE, _LEAST_AVERAGED = 0.02, 8
# Averages of fewer losses would hide the curve rather than show it.
_ENOUGH_TO_AVERAGE = 3 * _LEAST_AVERAGED
_SMOOTH_BUCKETS = 300
_MOST_GAPS = 60
# A gap as wide as this share of the run has room for a word.
_WORD_SHARE = 0.12
# With more runs than colours, lines are dashed.
RUN_COLORS = [f"--run-{number}" for number in range(1, 8)]
_DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Gap:
    """Consecutive steps whose loss was not finite.

    Args:
        first: The first of them.
        last: The last of them.
        word: "NaN", "inf", or "inf or NaN".
    """

    first: int
    last: int
    word: str

    @property
    def text(self) -> str:
        """The gap in words, such as "NaN in steps 120 to 240"."""
        is_one = self.first == self.last
        return f"{self.word} {f'at step {self.first:,}' if is_one else f'in steps {self.first:,} to {self.last:,}'}"


@dataclass(frozen=True)
class LossCurve:
    """The losses of a run.

    Args:
        points: Step and loss of the steps whose loss was finite, downsampled.
        average: The same of their exponential moving average; none if there are too few losses.
        averaged: Number of losses that the average is over.
        gaps: Where the loss was not finite: at most 60, that at the end and the longest.
        last: The last loss, or its average; NaN or inf if the run ended with that.
    """

    points: Sequence[Point]
    average: Sequence[Point]
    averaged: int
    gaps: Sequence[Gap]
    last: float

    @classmethod
    def of(cls, facts: RunFacts) -> LossCurve | None:
        """Return the curve of a run; None if no finite loss was recorded."""
        losses = [(record.step, float(record.loss)) for record in facts.run.steps if record.loss is not None]
        finite = [point for point in losses if math.isfinite(point[1])]
        if not finite:
            return None
        averaged = max(_LEAST_AVERAGED, int(_AVERAGED_SHARE * len(finite)))
        averages = moving_average(finite, averaged) if len(finite) >= _ENOUGH_TO_AVERAGE else []
        end, last = losses[-1]
        gaps = sorted(gaps_in(losses), key=lambda gap: (gap.last != end, gap.first - gap.last))[:_MOST_GAPS]
        return cls(
            points=extremes(finite),
            average=extremes(averages, _SMOOTH_BUCKETS),
            averaged=averaged,
            gaps=sorted(gaps, key=lambda gap: gap.first),
            last=(averages or finite)[-1][1] if math.isfinite(last) else last,
        )

    def traces(self, color: str, name: str = "loss", **shared: Any) -> list[Trace]:
        """Return a faint line of the losses and a strong one of their average, or a line of the losses alone.

        Args:
            color: Name of the CSS variable.
            name: Name in the legend and in hover texts.
            shared: More properties of both.
        """
        if not self.average:
            return [{**line(name, self._broken(self.points), color, 1.5), **shared}]
        return [
            {**line(f"{name}, each step", self._broken(self.points), color, 1.0), "opacity": 0.6, **shared},
            {**line(f"{name}, average", self._broken(self.average), color, 2.5), **shared},
        ]

    def gap_shapes(self, axis: str) -> list[dict[str, Any]]:
        """Return a shaded area for each gap."""
        edge = {"color": "--danger", "width": 1.5, "dash": "dot"}
        common = {"type": "rect", "yref": f"y{axis} domain", "y0": 0, "y1": 1, "fillcolor": "--danger-wash"}
        return [{**common, "x0": gap.first - 0.5, "x1": gap.last + 0.5, "line": edge} for gap in self.gaps]

    def gap_words(self, axis: str, steps: int) -> list[dict[str, Any]]:
        """Return a word in each gap that is wide enough.

        Args:
            axis: The y axis.
            steps: Number of steps of the run.
        """
        common = {"yref": f"y{axis} domain", "y": 0.5, "showarrow": False, "font": {"color": "--danger"}}
        wide = [gap for gap in self.gaps if gap.last - gap.first >= _WORD_SHARE * steps]
        return [{**common, "x": (gap.first + gap.last) / 2, "text": f"<b>{gap.word}</b>"} for gap in wide]

    def _broken(self, points: Sequence[Point]) -> list[tuple[int, float | None]]:
        """Return points with a hole at each gap, which plotly does not draw across."""
        return sorted([*points, *((gap.first, None) for gap in self.gaps)], key=lambda point: point[0])


def gaps_in(losses: Sequence[Point]) -> list[Gap]:
    """Return the gaps among losses, in order."""
    groups: list[list[Point]] = []
    was_finite = True
    for point in losses:
        is_finite = math.isfinite(point[1])
        if not is_finite:
            if was_finite:
                groups.append([])
            groups[-1].append(point)
        was_finite = is_finite
    return [Gap(group[0][0], group[-1][0], _word(loss for _, loss in group)) for group in groups]


def moving_average(points: Iterable[Point], over: int) -> list[Point]:
    """Return exponential moving averages, each over about the last `over` points; the first is over one point."""
    kept, average, weights, averages = 1.0 - 1.0 / over, 0.0, 0.0, []
    for step, value in points:
        weights = kept * weights + 1.0
        average = (1.0 - 1.0 / weights) * average + value / weights  # a quotient of sums may overflow
        averages.append((step, average))
    return averages


def overlaid(runs: Sequence[tuple[str, LossCurve | None]]) -> Figure | None:
    """Return the losses of several runs in one plot; None if fewer than two have losses.

    Args:
        runs: Label and curve of each run.
    """
    known = [(number, label, curve) for number, (label, curve) in enumerate(runs) if curve is not None]
    if len(known) < 2:
        return None
    data: list[Trace] = []
    for number, label, curve in known:
        color, name = RUN_COLORS[number % len(RUN_COLORS)], plain(label)
        *faint, strong = curve.traces(color, name, legendgroup=f"run {number}")
        strong["line"]["dash"] = _DASHES[number // len(RUN_COLORS) % len(_DASHES)]
        data += [*faint, {**strong, "name": name, "showlegend": True}, *_last_finite(curve, name, color, number)]
    steps = [step for _, _, curve in known for step, _ in curve.points]
    margin = 0.5 + 0.01 * (max(steps) - min(steps))
    layout = {
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {
            "range": [min(steps) - margin, max(steps) + margin],
            "title": {"text": "step"},
            "tickformat": ",d",
            "nticks": 8,
            "zeroline": False,
        },
        "yaxis": {"range": range_of([point for *_, curve in known for point in curve.points]), "zeroline": False},
    }
    ends = "; ".join(f"{label} {_end(curve)}" for _, label, curve in known)
    caption = f"At the end: {ends}. {drawn_how([curve for *_, curve in known])}"
    return {"data": data, "layout": layout, "height": 460, "caption": caption}


def drawn_how(curves: Iterable[LossCurve]) -> str:
    """Explain the two lines of curves; "" if there is only one."""
    averaged = sorted({curve.averaged for curve in curves if curve.average})
    if not averaged:
        return ""
    steps = " to ".join(f"{count:,}" for count in dict.fromkeys((averaged[0], averaged[-1])))
    return (
        f"Faint lines are the losses of single steps, strong ones exponential moving averages over about {steps} steps."
    )


def _last_finite(curve: LossCurve, name: str, color: str, number: int) -> Iterable[Trace]:
    """Yield a cross at the last finite loss before each gap."""
    before = [max((point for point in curve.points if point[0] < gap.first), default=None) for gap in curve.gaps]
    marked = [(point, gap) for point, gap in zip(before, curve.gaps, strict=True) if point is not None]
    if marked:
        yield {
            "type": "scatter",
            "mode": "markers",
            "name": f"{name}, then inf or NaN",
            "x": [point[0] for point, _ in marked],
            "y": [rounded(point[1]) for point, _ in marked],
            "text": [gap.text for _, gap in marked],
            "marker": {"color": color, "symbol": "x", "size": 11, "line": {"color": "--panel", "width": 1}},
            "hovertemplate": f"{name}: %{{text}}<extra></extra>",
            "legendgroup": f"run {number}",
            "showlegend": False,
        }


def _end(curve: LossCurve) -> str:
    if not math.isfinite(curve.last):
        last = curve.gaps[-1]
        return f"{last.word} from step {last.first:,} on"
    return f"{curve.last:.4g}"


def _word(losses: Iterable[float]) -> str:
    kinds = {"NaN" if math.isnan(loss) else "inf" for loss in losses}
    return " or ".join(sorted(kinds, key=("inf", "NaN").index))
