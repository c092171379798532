"""What `castwise watch` shows of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from castwise.monitor._recorded_run import Run, distinct_invariants
from castwise.monitor._records import StepRecord
from castwise.report._html_report import labels

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS, _DECADE = 60, 10.0
_FINDINGS = 4
_STYLES = {"warning": "yellow", "note": "cyan"}


def view(runs: Sequence[Run]) -> RenderableType:
    """Return a block for each run: its loss, gradient norm and learning rate over the steps, and its findings."""
    blocks = [_block(label, run) for label, run in zip(labels([run.path for run in runs]), runs, strict=True)]
    return Group(*blocks)


def facts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the last numbers of each run and its findings, as JSON-compatible values."""
    return [
        {
            "run": label,
            "ended": run.ended,
            "last": run.steps[-1].in_file() if run.steps else None,
            "findings": [record.in_file() for record in distinct_invariants([run])],
            "mistakes": [mistake.in_file() for mistake in run.mistakes],
        }
        for label, run in zip(labels([run.path for run in runs]), runs, strict=True)
    ]


def _block(label: str, run: Run) -> RenderableType:
    skipped = sum(step.skipped for step in run.steps)
    last = run.steps[-1].step if run.steps else 0
    state = "ended" if run.ended else "running"
    title = Text(label, style="bold").append(f"  step {last:,}, {skipped:,} skipped, {state}", style="default")
    table = Table.grid(padding=(0, 2))
    for name, values in _curves(run.steps).items():
        known = [value for value in values if value is not None]
        if known:
            table.add_row(
                name, f"{known[-1]:.4g}", sparkline(values, _COLUMNS), f"{min(known):.3g} to {max(known):.3g}"
            )
    findings = distinct_invariants([run])
    lines = [_finding(record.severity, f"step {record.step:,}: {record.text}") for record in findings[-_FINDINGS:]]
    lines += [_finding("warning", f"mistake: {mistake.where}{mistake.text}") for mistake in run.mistakes[-_FINDINGS:]]
    return Group(title, table, *lines)


def _finding(severity: str, text: str) -> Text:
    return Text(f"{severity}: ", style=_STYLES.get(severity, "default")).append(text, style="default")


def _curves(steps: Sequence[StepRecord]) -> dict[str, list[float | None]]:
    return {
        "loss": [step.loss for step in steps],
        "gradient norm": [step.grad_norm for step in steps],
        "learning rate": [step.lr for step in steps],
        "scale": [step.scale for step in steps],
    }


def sparkline(values: Sequence[float | None], columns: int) -> str:
    """Return values as bars of eight heights: in each column the largest, so that spikes are seen.

    The scale is logarithmic if they are far apart. A column with an inf or NaN is `!`, one without values is empty.

    Example:
        >>> sparkline([1.0, 2.0, None, 8.0, float("nan")], 5)
        '▁▂ █!'
    """
    width = max(1, math.ceil(len(values) / columns))
    parts = [values[begin : begin + width] for begin in range(0, len(values), width)]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    lowest, highest = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scaled = math.log if lowest > 0.0 and highest > _DECADE * lowest else float
    limits = scaled(lowest), scaled(highest)
    return "".join(
        "!" if not all(map(math.isfinite, known)) else _bar([*map(scaled, known)], *limits)
        for known in ([value for value in part if value is not None] for part in parts)
    )


def _bar(values: Sequence[float], lowest: float, highest: float) -> str:
    if not values:
        return " "
    share = (max(values) - lowest) / (highest - lowest) if highest > lowest else 0.0
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
