"""`write_drift_report`: write results of `compare` or `tune` as one self-contained HTML file, built like a run's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise._number_text import joined, percent
from castwise._shown import as_html
from castwise.comparison._closest import closest, gradient_error
from castwise.comparison._drift_map import STEPS, abbreviated, heat_map, returns_other, shift_of_a_batch
from castwise.comparison._errors import FP32_EPS
from castwise.report import _page as pages
from castwise.report._plotly_script import packed, script_hash

if TYPE_CHECKING:
    from castwise.comparison._drift import Drift, ModuleDrift, PolicyDrift
    from castwise.comparison._errors import Errors

# Number of bars, and of rows of the heat map, drawn at first: the largest.
AT_FIRST, HEAT_AT_FIRST = 40, 24
_COLUMNS = ("Loss shift", "Introduced", "Carried", "Gradients", "Gradients, introduced", "Gradients, carried")
# Errors that differ by less are equally large.
_NO_GROWTH = 1.2
_UNKNOWN = "\N{EN DASH}"


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
    templates, target = pages.environment(), Path(path)
    from markupsafe import Markup

    templates.filters["format_name"] = abbreviated
    plotly = pages.plotly_for(target, pages.load_plotly(), shared_script)
    script = pages.own_script("drift.js")
    shown = [*drift, *([drift.noise] if drift.noise is not None else [])]
    drawn = [policy_drift for policy_drift in shown if policy_drift.modules]
    compiled = [block for policy_drift in drift for block in policy_drift._blocks_alone()]
    title, reason = _title(drift) if tuned is None else (tuned._title(), "")
    html = templates.get_template("drift.html.j2").render(
        drift=drift,
        tuned=tuned,
        frontier=() if tuned is None else tuned.frontier.rows(),
        not_tried=() if tuned is None else tuned.not_tried,
        not_called=(drift if tuned is None else tuned).not_called,
        summary=drift.summary_rows(),
        title=title,
        reason=reason,
        no_columns=_without_columns(drift),
        results=[_result(policy_drift, drift.batches) for policy_drift in drift if not policy_drift.failure],
        heat=heat_map(shown, {} if tuned is None else tuned.formats, drift.batches),
        heat_steps=range(1, STEPS + 1),
        failures=[policy_drift for policy_drift in shown if policy_drift.failure],
        policies=[_effects(policy_drift, drift.batches) for policy_drift in drawn],
        selected=next((policy_drift.name for policy_drift in drawn if _has_errors(policy_drift)), None),
        alone=Markup(as_html(compiled)) if compiled else "",
        max_name=pages.MAX_NAME,
        at_first=AT_FIRST,
        heat_at_first=HEAT_AT_FIRST,
        figures=packed(
            pages.as_json({"bars": {each.name: _bars(each, drift.batches) for each in drawn}, "frontier": frontier})
        ),
        css=pages.template("report.css"),
        dark=pages.template("dark.css"),
        plotly=plotly,
        script=script,
        script_sources=[plotly.source, script_hash(script)],
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    pages.write_page(target, html)
    return target


def _title(drift: Drift) -> tuple[str, str]:
    """Return the page's title, which is the result, and its reason if there are several policies or none is finite."""
    title, reason = closest(drift)
    results = [_result(policy_drift, drift.batches) for policy_drift in drift if not policy_drift.failure]
    failed = [policy_drift for policy_drift in drift if policy_drift.failure]
    fails = f"{joined([each.name for each in failed])} fail{'s' if len(failed) == 1 else ''}" if failed else ""
    if title:
        return title, f"{reason[0].upper()}{reason[1:]}"
    if len(results) == 1:
        loss = f"{next(iter(drift)).summary.reference_loss:.4g}"
        return "; ".join(filter(None, [f"{results[0][0]} changes the loss by {results[0][1]} of {loss}", fails])), ""
    if not failed:
        return "What precision does to the model", ""
    why = failed[0].failure
    return fails, f"{failed[0].name}: {why}." if len(failed) > 1 else f"{why[0].upper()}{why[1:]}."


def _result(drift: PolicyDrift, batches: int) -> tuple[str, str, str]:
    """Return a policy's name, how much it changes the loss, and the rest of its result in words."""
    words = [f"{percent(drift.summary.relative_loss_error)} of the loss"]
    gradients = gradient_error(drift)
    words += [] if gradients is None else [f"gradients off by {percent(gradients)}"]
    outputs = drift.summary.output_errors
    words += [] if outputs is None or drift.modules else [f"outputs off by {percent(outputs.relative_rms)}"]
    worst = _by_shift(drift, batches)[:1]
    if worst and shift_of_a_batch(worst[0], batches):
        words.append(f"worst module: {worst[0].name or '(root)'}")
    if worst_alone := _worst_alone(drift):
        words.append(worst_alone)
    return drift.name, f"{drift.summary.loss_error:.2g}", ", ".join(words)


def _without_columns(drift: Drift) -> str:
    """Say of which callables the heat map has no column; "" if there are none."""
    names = [policy_drift.name for policy_drift in drift if policy_drift.policy is None and not policy_drift.modules]
    if not names:
        return ""
    one = len(names) == 1
    run, them = ("runs", "it") if one else ("run", "them")
    return f"{joined(names)} {run} without hooks inside, so there is no column for {them}"


def _worst_alone(drift: PolicyDrift) -> str:
    """Return in words which module's error grows most when it is compiled by itself; "" if none is known to."""
    known = [
        (each.compiled.relative_rms / each.eager.relative_rms, each.name)
        for each in drift.alone
        if each.compiled is not None and each.eager is not None and each.eager.relative_rms
    ]
    if not known:
        return ""
    growth, name = max(known)
    if growth <= _NO_GROWTH or all(each.compiled.relative_rms < FP32_EPS for each in drift.alone if each.compiled):
        return "modules compiled by themselves are as close as eager"
    return f"worst compiled by itself: {name}, {growth:.3g} times the error of eager"


def _by_shift(drift: PolicyDrift, batches: int) -> list[ModuleDrift]:
    """Return a policy's modules, those that shift the loss most first."""
    shifts = {module.name: shift_of_a_batch(module, batches) for module in drift.modules}
    return sorted(drift.modules, key=lambda module: -_known(shifts[module.name]))


def _known(shift: float | None) -> float:
    return -1.0 if shift is None or math.isnan(shift) else shift


def _has_errors(drift: PolicyDrift) -> bool:
    """Return True if a bar would not be 0."""
    both = [errors for module in drift.modules for errors in (module.introduced, module.carried)]
    return any(errors is not None and errors.relative_rms != 0 for errors in both)


def _bars(drift: PolicyDrift, batches: int) -> dict[str, Any]:
    """Return a policy's bars, module by module in model order: None if not known, "inf" if not finite."""
    modules = sorted(drift.modules, key=lambda module: module.place)
    by_shift = {module.name: rank for rank, module in enumerate(_by_shift(drift, batches))}
    return {
        "names": [pages.shortened(module.name or "(root)") for module in modules],
        "introduced": [_drawn(module.introduced) for module in modules],
        "carried": [_drawn(module.carried) for module in modules],
        "captions": [_caption(module, batches) for module in modules],
        "rank": [by_shift[module.name] for module in modules],
    }


def _drawn(errors: Errors | None) -> float | str | None:
    if errors is None:
        return None
    if errors.nonfinite:
        return "inf"
    return errors.relative_rms if math.isfinite(errors.relative_rms) else None


def _caption(module: ModuleDrift, batches: int) -> str:
    if module.problem:
        return module.problem
    lost = module.total.nonfinite if module.total is not None else 0.0
    shift = shift_of_a_batch(module, batches)
    parts = ["" if shift is None else f"loss shift {_number(shift)}", module.computes_in, returns_other(module)]
    parts.append(f"{percent(lost)} not finite" if lost else "")
    return ", ".join(filter(None, parts))


def _effects(drift: PolicyDrift, batches: int) -> dict[str, Any]:
    """Return a policy's table of modules, without columns in which nothing is known."""
    rows = [_row(module, batches) for module in _by_shift(drift, batches)]
    shown = [column for column in range(len(_COLUMNS)) if any(row["numbers"][column] != _UNKNOWN for row in rows)]
    for row in rows:
        row["numbers"] = [row["numbers"][column] for column in shown]
    return {
        "name": drift.name,
        "failure": drift.failure,
        "rows": rows,
        "columns": [_COLUMNS[column] for column in shown],
        "has_unknown": any(text == _UNKNOWN for row in rows for text in row["numbers"]),
    }


def _row(module: ModuleDrift, batches: int) -> dict[str, Any]:
    gradient_errors = module.gradients, module.introduced_gradients, module.carried_gradients
    errors = module.introduced, module.carried, *gradient_errors
    shift = shift_of_a_batch(module, batches)
    return {
        "name": module.name or "(root)",
        "type": module.type,
        "format": module.computes_in,
        "returns": returns_other(module),
        "numbers": [_number(shift), *map(_relative, errors)],
        "problem": module.problem,
    }


def _relative(errors: Errors | None) -> str:
    if errors is None:
        return _UNKNOWN
    return f"{percent(errors.nonfinite)} not finite" if errors.nonfinite else _number(errors.relative_rms)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return _UNKNOWN
    return f"{value:.2e}" if value and math.isfinite(value) else f"{value:g}"
