"""`write_report`: runs as one HTML file that needs nothing else - no network, no server, no other file.

The page forbids itself to load anything (Content-Security-Policy), and runs only the two scripts whose hashes it
names: names of modules and settings end in it as text, whatever they hold.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise import _files
from castwise._collector import paused
from castwise._number_text import headroom, percent, power_of_two
from castwise.monitor.formats import LOW_PRECISION
from castwise.monitor.merged_ranks import merge_ranks
from castwise.monitor.run import Run
from castwise.report.diagnosed import Diagnosed
from castwise.report.figures import Figure, align
from castwise.report.figures.histogram import ALL_MODULES, MOMENTS, histogram
from castwise.report.figures.maps import KINDS, MEASURES, heat_map
from castwise.report.figures.timeline import timeline
from castwise.report.quantized_operands import QuantizedOperand, quantized_operands
from castwise.report.record_numbers import number
from castwise.report.run_facts import RunFacts, shown
from castwise.report.verdicts import Verdict, judge
from castwise.report.worst_modules import WorstModule, worst_modules

if TYPE_CHECKING:
    from jinja2 import Environment

# Names of modules and texts of settings may be as long as they like, but not in a page that is to stay small. Findings
# and remedies stand whole; only a forged record has longer ones.
MAX_TEXT = 300
MAX_FINDING = 10_000
# So many characters of a module's name fit beside columns of numbers; the whole name shows on hover.
MAX_NAME = 44


NO_FINITE = "no sample was finite"


@dataclass(frozen=True)
class RunView:
    """One run as the page shows it.

    Args:
        label: Its name among the runs.
        number: Its place, from 1: part of the ids in the page.
        facts: What its records add up to.
        verdict: The advice for it.
        worst: Its modules, those nearest to trouble first.
        figures: Plotly figures by name.
        quantized: What recipes of 8 and 4 bits made of operands.
    """

    label: str
    number: int
    facts: RunFacts
    verdict: Verdict
    worst: list[WorstModule]
    figures: Mapping[str, Figure]
    quantized: list[QuantizedOperand]

    @classmethod
    def of(cls, label: str, number: int, run: Run) -> RunView:
        """Gather all that is shown of a run."""
        facts = RunFacts(run)
        worst = worst_modules(facts)
        rows = {"gradients": list(facts.gradients), "outputs": list(facts.activations)}
        figures: dict[str, Figure] = {}
        if drawn := timeline(facts):
            figures["timeline"] = drawn
        if run.samples:
            first = {
                "worst": [shown(module.name) for module in worst],
                "diagnosed": [shown(module.name) for module in worst if module.is_diagnosed],
            }
            figures.update({measure.key: {**heat_map(measure, facts, rows), **first} for measure in MEASURES})
            figures["histogram"] = histogram(run.samples, rows["gradients"])
        return cls(label, number, facts, judge(facts), worst, figures, quantized_operands(run.samples))

    @property
    def diagnosed(self) -> list[Diagnosed]:
        """What the verdict shows of diagnoses."""
        return [found for piece in self.verdict for found in piece.diagnosed]

    def settings(self) -> list[tuple[str, object]]:
        """What the run was, by name."""
        about = self.facts.run.about
        known: list[tuple[str, object]] = [
            (name, about[name]) for name in ("castwise", "torch", "device") if name in about
        ]
        if "time" in about:
            known.insert(0, ("begun", time.strftime("%Y-%m-%d %H:%M", time.localtime(about["time"]))))
        return [*known, *self.facts.run.settings.items(), ("record", str(self.facts.run.path))]

    def key_numbers(self) -> list[tuple[str, str, str]]:
        """Name, number and what it refers to, for the tiles at the top."""
        facts, steps = self.facts, self.facts.run.steps
        tiles = [("Steps", f"{len(steps):,}", f"{len(facts.run.samples):,} sampled")]
        share = facts.skipped / len(steps) if steps else 0.0
        causes = ", ".join(f"{len(skips.steps):,} {skips.cause}" for skips in facts.skips)
        tiles.append(("Skipped", f"{facts.skipped:,}", f"{percent(share)}: {causes}" if causes else "none"))
        if facts.scales:
            scales = [scale for _, scale in facts.scales]
            span = f"{power_of_two(min(scales))} to {power_of_two(max(scales))}"
            tiles.append(("Last scale", power_of_two(scales[-1]), span))
        finite = [ranges for ranges in facts.gradients.values() if ranges.samples]
        if facts.gradients and not finite:
            tiles += [(name, "unknown", NO_FINITE) for name in ("Least headroom, fp16", "Most underflow, fp16")]
        if finite:
            tightest = min(finite, key=lambda ranges: ranges.headroom_bits)
            leaking = max(finite, key=lambda ranges: ranges.mean_flush)
            tiles.append(("Least headroom, fp16", headroom(tightest.headroom_bits), shown(tightest.module)))
            tiles.append(("Most underflow, fp16", percent(leaking.mean_flush), shown(leaking.module)))
        losses = [number(record["loss"]) for record in steps if record.get("loss") is not None]
        if losses:
            tiles.append(("Last loss", f"{losses[-1]:.4g}", f"first {losses[0]:.4g}"))
        return tiles

    def timeline_caption(self) -> str:
        """The steps in words."""
        told = [
            f"{len(skips.steps):,} of {skips.cause}, first at step {skips.steps[0]:,}" for skips in self.facts.skips
        ]
        return f"Skipped: {'; '.join(told)}." if told else "No step was skipped."

    def histogram_caption(self) -> str:
        """The histogram in words, as it is shown first."""
        choices = self.figures["histogram"]["choices"] if "histogram" in self.figures else {}
        return next((str(choice["caption"]) for choice in choices.values()), "")

    def map_captions(self) -> dict[str, str]:
        """The two maps in words, by the key of the measure."""
        if not self.facts.gradients:
            return {}
        gradients = [ranges for ranges in self.facts.gradients.values() if ranges.samples]
        if not gradients:
            return dict.fromkeys(("headroom_bits", "flush"), f"Gradients: {NO_FINITE}.")
        tightest = min(gradients, key=lambda ranges: ranges.headroom_bits)
        leaking = max(gradients, key=lambda ranges: ranges.flush)
        return {
            "headroom_bits": (
                f"Least for gradients in fp16: {headroom(tightest.headroom_bits)} in {shown(tightest.module)} "
                f"at step {tightest.headroom_step:,}."
                if tightest.headroom_step
                else "All gradients are zero."
            ),
            "flush": (
                f"Most of gradients in fp16: {percent(leaking.flush)} in {shown(leaking.module)} "
                f"at step {leaking.flush_step:,}."
                if leaking.flush
                else "No gradient rounds to zero in fp16 in any sample."
            ),
        }


def write_report(runs: Iterable[str | os.PathLike[str] | Run], path: str | os.PathLike[str]) -> Path:
    """Write one self-contained HTML page about runs, side by side if they are several; see `merge_ranks` for ranks.

    Its size is bounded however long the runs are: about 5 MB of plotly.js, and under 1 MB for a run of 300 modules.

    Args:
        runs: Folders of runs, their `monitor.jsonl`, or `castwise.monitor.run.Run`; at least one.
        path: Where to write; an older file there is replaced.

    Returns:
        `path`.

    Raises:
        ImportError: plotly or jinja2 is not installed; they come with `castwise[report]`.
        OSError: A record cannot be read, or the page not be written.
        ValueError: There are no runs, or a file is not a record of a run.
    """
    given = list(runs)
    if not given:
        raise ValueError("write_report needs at least one run, got none")
    environment, plotly_js = _environment(), _plotly_js()
    read = merge_ranks(run if isinstance(run, Run) else Run.read(run) for run in given)
    named = zip(labels([run.path for run in read]), read, strict=True)
    with paused():
        views = [RunView.of(label, place, run) for place, (label, run) in enumerate(named, 1)]
    for name in {name for view in views for name in view.figures}:
        align([view.figures[name] for view in views if name in view.figures])
    target = Path(path)
    # A path may hold what no encoding knows.
    _files.replace(target, _page(environment, plotly_js, views).encode(errors="backslashreplace"))
    return target


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: as many last folders of its path as tell them apart, or numbers if none do."""
    folders = [path.resolve().parent.parts[1:] for path in paths]
    depth = 1
    while depth < max(map(len, folders)) and len({parts[-depth:] for parts in folders}) < len(folders):
        depth += 1
    names = ["/".join(parts[-depth:]) for parts in folders]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:place].count(name) + 1})"
        for place, name in enumerate(names)
    ]


def _environment() -> Environment:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise _missing("jinja2") from error
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FunctionLoader(_template),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        headroom=headroom, percent=percent, shown=shown, powers=_powers, short=_short, name=_name, sortable=_sortable
    )
    return environment


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # plotly ships no types
    except ModuleNotFoundError as error:
        raise _missing("plotly") from error
    return str(get_plotlyjs())


def _missing(name: str) -> ImportError:
    return ImportError(f"a report needs {name}: pip install 'castwise[report]'")


def _template(name: str) -> str:
    return (resources.files("castwise.report") / "templates" / name).read_text(encoding="utf-8")


def _page(environment: Environment, plotly_js: str, views: Sequence[RunView]) -> str:
    script = _template("report.js")
    figures = {f"{name}-{view.number}": figure for view in views for name, figure in view.figures.items()}
    return environment.get_template("report.html.j2").render(
        views=views,
        mistakes=_mistakes(views),
        measures=MEASURES,
        kinds=list(KINDS),
        formats=list(LOW_PRECISION),
        moments=MOMENTS,
        all_modules=ALL_MODULES,
        max_name=MAX_NAME,
        modules=list(dict.fromkeys(name for view in views for name in view.facts.gradients)),
        figures=_packed(figures),
        css=_template("report.css"),
        dark=_template("dark.css"),
        plotly_js=plotly_js,
        script=script,
        script_hashes=[_hash(plotly_js), _hash(script)],
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _mistakes(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """What the script does wrong, each once: it is one script, whatever it trains."""
    found = {(each["name"], each["file"], each["line"]): each for view in views for each in view.facts.run.mistakes}
    return list(found.values())


def _packed(value: object) -> str:
    """JSON, compressed to a tenth, in letters that end no script. It knows no NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(errors="backslashreplace"), compresslevel=6, mtime=0)).decode()


def _hash(script: str) -> str:
    """The source of a script as Content-Security-Policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _powers(text: str) -> Any:
    """Set the exponents of powers of two in text as exponents."""
    from markupsafe import Markup, escape

    def set_(match: re.Match[str]) -> str:
        return f"2<sup>{match[1].replace('-', '&minus;')}</sup>"  # a line may end at a hyphen, not at a minus

    return Markup(re.sub(r"\b2\^(-?[\d.]*\d)", set_, str(escape(_short(text, MAX_FINDING)))))


def _short(text: object, most: int = MAX_TEXT) -> str:
    spelled = f"{text:,}" if isinstance(text, int) and not isinstance(text, bool) else str(text)
    return spelled if len(spelled) <= most else f"{spelled[:most]}…"


def _name(text: str) -> str:
    """A module's name without its middle; the end tells more than the beginning, such as the number of the layer."""
    first = MAX_NAME // 4
    return text if len(text) <= MAX_NAME else f"{text[:first]}…{text[first + 1 - MAX_NAME :]}"


def _sortable(value: float) -> float:
    """A number that the page can subtract from another one; all that is zero has headroom without end."""
    return value if math.isfinite(value) else math.copysign(1e9, value)
