"""`write_report`: write runs as one HTML file that needs no network, no server and, unless asked for, no other files.

The page's Content-Security-Policy blocks all loading and allows only its two scripts. Module names and settings
therefore appear as text, whatever they contain.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from castwise._collector import paused
from castwise._number_text import headroom, loss_text, percent, power_of_two, several
from castwise.monitor._formats import LOW_PRECISION
from castwise.monitor._recorded_run import Run, distinct_mistakes
from castwise.monitor._records import MistakeRecord
from castwise.monitor._run_files import read_runs
from castwise.report._diagnosed import Diagnosed
from castwise.report._figures import Figure, align
from castwise.report._figures.exponent_map import BANDS, exponent_map
from castwise.report._figures.histogram import ALL_MODULES, MOMENTS, histogram
from castwise.report._figures.losses import LossCurve, drawn_how, overlaid
from castwise.report._figures.maps import KINDS, MEASURES, heat_map
from castwise.report._figures.norm_map import norm_caption, norm_map
from castwise.report._figures.timeline import timeline
from castwise.report._page import (
    MAX_NAME,
    as_json,
    environment,
    load_plotly,
    own_script,
    plotly_for,
    shortened,
    template,
    write_page,
)
from castwise.report._plotly_script import PlotlyScript, packed, script_hash
from castwise.report._quantized_operands import QuantizedOperand, quantized_operands
from castwise.report._range_advice import kind_of
from castwise.report._run_facts import WHOLE_MODEL, RunFacts, shown
from castwise.report._run_table import run_table
from castwise.report._verdicts import Verdict, judge
from castwise.report._worst_modules import WorstModule, worst_modules

if TYPE_CHECKING:
    from jinja2 import Environment

_DIFFERING_SHOWN = 3


@dataclass(frozen=True)
class RunView:
    """One run as the page shows it.

    Args:
        label: A name that is unique among the runs.
        number: The run's position, from 1; part of the ids in the page.
        facts: Facts computed from the records.
        verdict: The advice for the run.
        worst: The run's modules, the most endangered first.
        figures: Plotly figures by name.
        quantized: Quantization errors of the operands of layers with an 8- or 4-bit recipe.
        loss: The curve of the loss; None if no finite loss was recorded.
        has_shared_loss: Whether the loss is in one plot with those of other runs, not in the run's own.
    """

    label: str
    number: int
    facts: RunFacts
    verdict: Verdict
    worst: list[WorstModule]
    figures: Mapping[str, Figure]
    quantized: list[QuantizedOperand]
    loss: LossCurve | None
    has_shared_loss: bool

    @classmethod
    def of(cls, label: str, number: int, run: Run, steps: Sequence[int], *, shares_losses: bool = False) -> RunView:
        """Collect everything the page shows about a run.

        Args:
            label: See the class.
            number: See the class.
            run: The run.
            steps: The sampled steps of all runs, ascending.
            shares_losses: Whether the losses of all runs are in one plot.
        """
        facts = RunFacts(run)
        worst = worst_modules(facts)
        rows = {"gradients": list(facts.gradients), "outputs": list(facts.activations)}
        figures: dict[str, Figure] = {}
        if drawn := timeline(facts, draws_loss=not shares_losses):
            figures["timeline"] = drawn
        if norms := norm_map(run.norms):
            figures["norms"] = norms
        if run.samples and not facts.nothing_finite:
            first = {
                "worst": [shown(module.name) for module in worst],
                "diagnosed": [shown(module.name) for module in worst if module.is_diagnosed],
            }
            figures.update({measure.key: {**heat_map(measure, facts, rows, steps), **first} for measure in MEASURES})
            if any(ranges.samples for ranges in facts.gradients.values()):
                in_fp16 = facts.computes_in == "fp16"
                figures["histogram"] = histogram(run.samples, rows["gradients"], in_fp16=in_fp16)
                by_risk = [module.name for module in worst if module.name in facts.gradients]
                if over_steps := exponent_map(run.samples, by_risk, in_fp16=in_fp16):
                    figures["exponent_map"] = over_steps
        quantized = quantized_operands(run.samples)
        loss = LossCurve.of(facts)
        shared = shares_losses and loss is not None
        return cls(label, number, facts, judge(facts), worst, figures, quantized, loss, shared)

    @property
    def diagnosed(self) -> list[Diagnosed]:
        """Diagnoses that the verdict shows."""
        return [found for piece in self.verdict for found in piece.diagnosed]

    @property
    def headline(self) -> str:
        """The verdict in a few words, such as "Training is lost from step 87 on: aten.div in train.py:22"."""
        first = next(iter(self.verdict), None)
        mistakes = len(self.facts.run.mistakes)
        if mistakes and (first is None or first.severity in ("note", "good")):
            return f"{several(mistakes, 'mistake')} in the script"
        if first is None:
            return "Too little was recorded for a verdict"
        words = re.split(r"[:;.](?= |$)|, and so do ", first.finding, maxsplit=1)[0]
        found = next(iter(first.diagnosed), None)
        if found is None or not found.line or not found.op or found.op in words:
            return words
        return f"{words}: {found.op} in {PurePath(found.line).name}"

    def about(self) -> str:
        """Return the model, the optimizer, when the run began, and the number of steps, as far as they are known."""
        run = self.facts.run
        known = [str(run.settings[name]) for name in ("model", "optimizer") if name in run.settings]
        known = [text for text in known if text != self.label]  # `castwise run` calls a record's folder like the model
        return ", ".join([*known, *self._begun(), several(len(run.steps), "step")])

    def _begun(self) -> list[str]:
        about = self.facts.run.about
        if about is None or about.time is None:
            return []
        return [time.strftime("%Y-%m-%d %H:%M", time.localtime(about.time))]

    @property
    def has_nonfinite(self) -> bool:
        """Whether a sample of a module had an inf or NaN."""
        return any(module.nonfinite for module in self.worst)

    @property
    def has_blamed(self) -> bool:
        """Whether an overflow names a module."""
        return any(module.blamed for module in self.worst)

    def settings(self) -> list[tuple[str, object]]:
        """Return the run's settings by name."""
        about = self.facts.run.about
        known: list[tuple[str, object]] = [("begun", begun) for begun in self._begun()]
        known += [] if about is None else about.versions.items()
        alone = [(f"ranks alone from step {record.step:,}", record.why) for record in self.facts.run.alone]
        return [*known, *self.facts.run.settings.items(), *alone, ("record", str(self.facts.run.path))]

    def differs_in(self, differing: Mapping[str, Sequence[str]]) -> str:
        """Return the first of the settings in which runs differ, such as "learning rate 0.001"; see `_differing`."""
        known = {name for name, _ in self.settings()} - {"model", "optimizer"}  # `about` has these
        some = [
            f"{name} {shortened(texts[self.number - 1], 2 * MAX_NAME)}"
            for name, texts in differing.items()
            if name in known
        ]
        return ", ".join(some[:_DIFFERING_SHOWN])

    def key_numbers(self) -> list[tuple[str, str, str]]:
        """Return name, number and context of each tile at the top."""
        facts, steps = self.facts, self.facts.run.steps
        lost = f", {facts.run.lost:,} records lost (full disk)" if facts.run.lost else ""
        tiles = [("Steps", f"{len(steps):,}", f"{len(facts.run.samples):,} sampled{lost}")]
        share = facts.skipped / len(steps) if steps else 0.0
        causes = ", ".join(f"{len(skips.steps):,} {skips.cause}" for skips in facts.skips)
        tiles.append(("Skipped", f"{facts.skipped:,}", f"{percent(share)}: {causes}" if causes else "none"))
        if taken := sorted(step for faults in facts.faults for step in faults.steps):
            tiles.append(("Taken with inf or NaN", f"{len(taken):,}", f"first step {taken[0]:,}"))
        if facts.scales:
            scales = [scale for _, scale in facts.scales]
            span = f"{power_of_two(min(scales))} to {power_of_two(max(scales))}"
            tiles.append(("Last scale", power_of_two(scales[-1]), span))
        if facts.losses:
            tiles.append(("Last loss", loss_text(facts.losses[-1]), f"first {loss_text(facts.losses[0])}"))
        return [*tiles, *self._range_tiles()]

    def _range_tiles(self) -> list[tuple[str, str, str]]:
        """Return tiles of headroom and underflow in the 16-bit format of the run; without one, a tile that says so."""
        name = self.facts.computes_in
        finite = [ranges for ranges in self.facts.gradients.values() if ranges.samples]
        if not finite:
            return []
        if not name:
            largest = max(finite, key=lambda ranges: ranges.largest)
            of_outputs = ("not known", "not recorded; no scaled loss")
            if returned := self.facts.returned:
                dtype, modules = returned.most_common(1)[0]
                of_outputs = (dtype, f"outputs of {modules:,} of {several(returned.total(), 'module')}")
            return [
                ("Format", *of_outputs),
                ("Largest gradient", f"{largest.largest:.2g}", _tile(largest.module)),
            ]
        tightest = min(finite, key=lambda ranges: ranges.headroom_bits)
        leaking = max(finite, key=lambda ranges: ranges.flush_in(name))
        lost = leaking.flush_in(name)
        underflow = (percent(lost), _tile(leaking.module)) if lost else ("none", "")
        return [
            (f"Least headroom, {name}", headroom(tightest.headroom_in(name)), _tile(tightest.module)),
            (f"Most underflow, {name}", *underflow),
        ]

    def format_note(self) -> str:
        """Say in which format the run computed, if that is not fp16."""
        if self.facts.computes_in == "fp16" or not self.facts.run.samples:
            return ""
        if self.facts.computes_in:
            return "This run computed in bf16; other formats show what would be."
        if self.facts.returned:
            return (
                f"Most modules returned {self.facts.returned.most_common(1)[0][0]}: other formats show what would be."
            )
        return "The record does not show in which format this run computed: choose the one that it did."

    @property
    def opens_with(self) -> tuple[str, str] | None:
        """Kind of numbers and format that the verdict warns of; None if it warns of none."""
        name = self.facts.computes_in or "fp16"
        for piece in self.verdict:
            if piece.severity in ("critical", "warning") and (kind := kind_of(piece, self.facts.activations)):
                return kind, name
        return None

    def timeline_caption(self) -> str:
        """Describe the curve of the loss and the skipped steps in words."""
        parts = [
            f"{len(skips.steps):,} of {skips.cause}, first at step {skips.steps[0]:,}" for skips in self.facts.skips
        ]
        taken = sorted(step for skips in self.facts.faults for step in skips.steps)
        sentences = [f"Skipped: {'; '.join(parts)}." if parts else "No step was skipped."]
        if taken:
            were = "was" if len(taken) == 1 else "were"
            sentences.insert(
                0, f"{several(len(taken), 'step')} with inf or NaN {were} taken, first at step {taken[0]:,}."
            )
        if (curve := self.loss) is not None:
            gaps = f"The loss is {curve.gaps[0].text}: a gap in the curve." if len(curve.gaps) == 1 else ""
            if len(curve.gaps) > 1:
                gaps = f"The loss has {len(curve.gaps)} gaps; in the first, it is {curve.gaps[0].text}."
            sentences += filter(None, [gaps, "" if self.has_shared_loss else drawn_how([curve])])
        return " ".join(sentences)

    def norms_caption(self) -> str:
        """Describe the map of norms in words."""
        return norm_caption(self.facts.run.norms)

    def nothing_drawn(self, gradients: bool = False) -> str:
        """Say in a line why there are no maps, or with `gradients` no histogram; "" if there are."""
        samples = self.facts.run.samples
        if not samples:
            return "No ranges were sampled in this run: train longer, or give Monitor a smaller every."
        if not self.facts.nothing_finite and not (gradients and "histogram" not in self.figures):
            return ""
        at = f"steps {samples[0].step:,} to {samples[-1].step:,}" if len(samples) > 1 else f"step {samples[0].step:,}"
        return f"No sample was finite ({several(len(samples), 'sample')}, {at}): there is nothing to draw."

    def histogram_caption(self) -> str:
        """Describe the initial histogram in words."""
        choices = self.figures["histogram"]["choices"] if "histogram" in self.figures else {}
        return next((str(choice["caption"]) for choice in choices.values()), "")


def write_report(
    runs: Iterable[str | os.PathLike[str] | Run],
    path: str | os.PathLike[str],
    *,
    shared_script: bool | str | os.PathLike[str] = False,
) -> Path:
    """Write one HTML page about one or more runs, side by side; see `read_runs` for ranks and attempts.

    The page's size does not grow with the length of the runs: 0.5 MB of packed plotly.js, plus under 1 MB for a run
    of 300 modules.

    Args:
        runs: Folders, of a record, a run or several (then the latest), `monitor.jsonl.gz` files, or
            `castwise.monitor.Run` objects; at least one.
        path: File to write; an existing page of castwise is replaced.
        shared_script: Instead of holding plotly.js, load it from `castwise-plotly-<version>.js` in the page's folder,
            or in the given one. The file is written if it is not there. The page without it has no figures.

    Returns:
        `path`.

    Raises:
        FileExistsError: There is a file that castwise has not written.
        ImportError: plotly or jinja2 is not installed; `castwise[report]` installs both.
        OSError: A record cannot be read, or the page cannot be written.
        ValueError: No run is given, or a file is not a run record.
    """
    given = list(runs)
    if not given:
        raise ValueError("write_report needs at least one run, got none")
    templates, plotly_js = environment(), load_plotly()
    read = read_runs(given)
    labelled = zip(short_names(labels([run.path for run in read])), read, strict=True)
    with paused():
        steps = sorted({sample.step for run in read for sample in run.samples})
        shares = sum(any(math.isfinite(loss) for loss in _losses(run)) for run in read) > 1
        views = [
            RunView.of(label, place, run, steps, shares_losses=shares) for place, (label, run) in enumerate(labelled, 1)
        ]
    for name in {name for view in views for name in view.figures}:
        align([view.figures[name] for view in views if name in view.figures])
    target = Path(path)
    script = plotly_for(target, plotly_js, shared_script)
    write_page(target, _page(templates, script, views))
    return target


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: as many trailing folders as make it unique; a number is added if none do."""
    folders = [path.resolve().parent.parts[1:] for path in paths]
    depth = 1
    while depth < max(map(len, folders)) and len({parts[-depth:] for parts in folders}) < len(folders):
        depth += 1
    names = ["/".join(parts[-depth:]) for parts in folders]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:place].count(name) + 1})"
        for place, name in enumerate(names)
    ]


def short_names(names: Sequence[str]) -> list[str]:
    """Return different names without the words that all have in front or at the end, and without a run's random digits.

    A word before a number is kept: it says of what.
    """
    dated = [re.sub(r"(\d{8}-\d{6})-[0-9a-f]{4}\b", r"\1", name) for name in names]
    words = [re.findall(r"[^-_/]+[-_/]*|[-_/]+", name) for name in (dated if len({*dated}) == len(dated) else names)]
    while min(map(len, words)) > 1 and len({of[0] for of in words}) == 1:
        if words[0][0][0].isalpha() and any(of[1][0].isdigit() for of in words):
            break
        words = [of[1:] for of in words]
    while min(map(len, words)) > 1 and len({of[-1] for of in words}) == 1:
        words = [of[:-1] for of in words]
    short = ["".join(of).strip("-_/") for of in words]
    return short if 1 < len(names) == len({*filter(None, short)}) else [*names]


def _page(templates: Environment, plotly: PlotlyScript, views: Sequence[RunView]) -> str:
    script = own_script("report.js")
    of_verdicts = (view.opens_with for view in views)
    opened = next(filter(None, of_verdicts), ("gradients", views[0].facts.computes_in or "fp16"))
    figures = {f"{name}-{view.number}": figure for view in views for name, figure in view.figures.items()}
    losses = overlaid([(shortened(view.label, MAX_NAME), view.loss) for view in views])
    mistakes = distinct_mistakes(view.facts.run for view in views)
    in_trouble = any(piece.severity in ("critical", "warning") for view in views for piece in view.verdict)
    return templates.get_template("report.html.j2").render(
        views=views,
        mistakes=mistakes,
        same_edits=_same_edits(mistakes),
        mistakes_lead=bool(mistakes) and not in_trouble,
        measures=MEASURES,
        losses=losses,
        run_table=run_table([(view.facts, view.loss) for view in views]) if len(views) > 1 else {},
        drawn={name for view in views for name in view.figures},
        kinds=list(KINDS),
        formats=list(LOW_PRECISION),
        moments=MOMENTS,
        exponent_bands=range(1, BANDS + 1),
        opened=opened,
        differing=_differing(views),
        all_modules=ALL_MODULES,
        max_name=MAX_NAME,
        modules=list(dict.fromkeys(name for view in views for name in view.facts.gradients)),
        figures=packed(as_json({**figures, **({} if losses is None else {"losses": losses})})),
        css=template("report.css"),
        dark=template("dark.css"),
        plotly=plotly,
        script=script,
        script_sources=[plotly.source, script_hash(script)],
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _same_edits(mistakes: Sequence[MistakeRecord]) -> dict[int, int]:
    """Return for each mistake whose edit is that of an earlier one, by index, the line of that one."""
    lines: dict[tuple[str, ...], int] = {}
    same = {}
    for index, mistake in enumerate(mistakes):
        code = [line for line in mistake.corrected.splitlines() if not line.startswith("# or ")]
        if code and re.match(r"# (moved|before|after|instead) ", code[0]):  # other code is for the mistake's own line
            line = lines.setdefault((mistake.file, *code), mistake.line)
            same.update({index: line} if line != mistake.line else {})
    return same


def _differing(views: Sequence[RunView]) -> dict[str, list[str]]:
    """Return the settings in which runs differ by name, each with a text for each run of what differs."""
    settings = [dict(view.settings()) for view in views]
    names = dict.fromkeys(name for of_run in settings for name in of_run if name not in ("begun", "record"))
    texts = {name: [str(of_run.get(name)) for of_run in settings] for name in names}
    return {name: _without_common(of_runs) for name, of_runs in texts.items() if len(set(of_runs)) > 1}


def _without_common(texts: Sequence[str]) -> list[str]:
    """Return texts, those such as "Dynamic(init_scale=1.0, patience=20)" without arguments that do not differ."""
    calls = {text: call for text in texts if (call := re.fullmatch(r"(\w+)\(([^()]*)\)", text))}
    given = [dict(part.partition("=")[::2] for part in call[2].split(", ")) for call in calls.values()]
    differ = [name for name in given[0] if len({of.get(name) for of in given}) > 1] if given else []
    short = {}
    for (text, call), of in zip(calls.items(), given, strict=True):
        kept = ", ".join(f"{name}={of[name]}" for name in differ if all(name in other for other in given))
        short[text] = f"{call[1]}({kept})" if kept else call[1]
    return [short.get(text, text) for text in texts] if len({*short.values()}) == len(short) else [*texts]


def _losses(run: Run) -> Iterable[float]:
    return (float(step.loss) for step in run.steps if step.loss is not None)


def _tile(module: str) -> str:
    return f"module {module}" if module else WHOLE_MODEL
