"""`write_drift_report`: write results of `compare` or `tune` as one self-contained HTML file, built like a run's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise import _files
from castwise._number_text import percent
from castwise.report import _html_report as report
from castwise.report._plotly_script import packed, script_hash

if TYPE_CHECKING:
    from castwise.comparison._drift import Drift, ModuleDrift, PolicyDrift
    from castwise.comparison._errors import Errors

# Number of rows drawn at first: those with the largest effects.
AT_FIRST = 40


def write_drift_report(
    drift: Drift,
    path: str | os.PathLike[str],
    tuned: Any = None,
    frontier: Mapping[str, Any] | None = None,
    *,
    shared_script: bool | str | os.PathLike[str] = False,
) -> Path:
    """Write one HTML page about a comparison to `path`; see `Drift.report`.

    Args:
        drift: The comparison.
        path: The page.
        tuned: The `castwise.tuning.Tuned` that the comparison is part of.
        frontier: What to draw of its policies, as lists of the same length.
        shared_script: See `castwise.report.write_report`.
    """
    environment, target = report._environment(), Path(path)
    plotly = report._plotly_for(target, report._plotly_js(), shared_script)
    script = report._script("drift.js")
    shown = [*drift, *([drift.noise] if drift.noise is not None else [])]
    page = environment.get_template("drift.html.j2").render(
        drift=drift,
        tuned=tuned,
        not_tried=() if tuned is None else tuned.not_tried,
        not_called=(drift if tuned is None else tuned).not_called,
        summary=drift.summary_rows(),
        policies=[
            {
                "name": policy_drift.name,
                "failure": policy_drift.failure,
                "rows": [_row(module) for module in policy_drift.modules],
            }
            for policy_drift in shown
        ],
        max_name=report.MAX_NAME,
        at_first=AT_FIRST,
        figures=packed(
            report._json(
                {"bars": {policy_drift.name: _bars(policy_drift) for policy_drift in shown}, "frontier": frontier}
            )
        ),
        css=report._template("report.css"),
        dark=report._template("dark.css"),
        plotly=plotly,
        script=script,
        script_sources=[plotly.source, script_hash(script)],
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    _files.replace(target, page.encode(errors="backslashreplace"), "a page", report.is_page)
    return target


def _bars(drift: PolicyDrift) -> dict[str, Any]:
    """Return a policy's bars, module by module in model order; values that cannot be drawn are None."""
    modules = sorted(drift.modules, key=lambda module: module.place)
    by_effect = {module.name: rank for rank, module in enumerate(drift.modules)}
    return {
        "names": [report._short(module.name or "(root)") for module in modules],
        "introduced": [_drawn(module.introduced) for module in modules],
        "carried": [_drawn(module.carried) for module in modules],
        "captions": [_caption(module) for module in modules],
        "rank": [by_effect[module.name] for module in modules],
        "failure": "" if modules else drift.failure,  # there is nothing to draw
    }


def _drawn(errors: Errors | None) -> float | None:
    value = math.nan if errors is None else errors.relative_rms
    return value if math.isfinite(value) and value > 0 else None


def _caption(module: ModuleDrift) -> str:
    if module.problem:
        return module.problem
    lost = module.total.nonfinite if module.total is not None else 0.0
    return f"effect {_number(module.effect)}, in {module.computes_in}" + (
        f", {percent(lost)} not finite" if lost else ""
    )


def _row(module: ModuleDrift) -> dict[str, Any]:
    gradient_errors = module.gradients, module.introduced_gradients, module.carried_gradients
    errors = module.introduced, module.carried, *gradient_errors
    return {
        "name": module.name or "(root)",
        "type": module.type,
        "computes_in": module.computes_in,
        "numbers": [
            (_number(value), "" if value is None or math.isnan(value) else report._sortable(value))
            for value in (module.effect, *(None if error is None else error.relative_rms for error in errors))
        ],
        "problem": module.problem,
    }


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "not known"
    return f"{value:.2e}" if value and math.isfinite(value) else f"{value:g}"
