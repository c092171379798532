"""Run summaries: a few lines to print at the end of training, and a JSON object for programs."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from castwise._number_text import several
from castwise._warnings import warn
from castwise._width import width_of
from castwise.monitor._recorded_run import Run, distinct_mistakes
from castwise.monitor._records import MistakeRecord
from castwise.monitor._run_files import read_runs
from castwise.report._advice import Advice, Measured, Severity, names_origin, order_of
from castwise.report._html_report import labels, write_report
from castwise.report._run_facts import RunFacts
from castwise.report._verdicts import Verdict, judge

Level = Literal["mistake", "warning", "critical"]
"""Values of `castwise run --fail-on`: a mistake in the script, or a finding of at least this severity."""

_MISTAKES_SHOWN = 2
_IN_JSON = ("module", "op", "line", "inputs", "code", "tried", "capsule")
_INVARIANTS_SHOWN = 3
_PREFIX = "castwise: "
_WIDTH = 120


@dataclass(frozen=True)
class Summary:
    """A summary of one or more runs.

    Args:
        runs: The recorded runs.
        verdicts: The verdict for each run.
        mistakes: Mistakes in the script, without duplicates.
        report: The report page; None if there is none.
        notes: Settings that had no effect.
        formats: The format in which each run computed: "fp16", "bf16", or "" if that is not known.
    """

    runs: Sequence[Run] = ()
    verdicts: Sequence[Verdict] = ()
    mistakes: Sequence[MistakeRecord] = ()
    report: Path | None = None
    notes: Sequence[str] = ()
    formats: Sequence[str] = ()

    @classmethod
    def of(cls, runs: Sequence[Run], report: Path | None = None) -> Summary:
        """Judge runs and summarize them."""
        facts = [RunFacts(run) for run in runs]
        formats = [each.computes_in for each in facts]
        return cls(runs, [*map(judge, facts)], distinct_mistakes(runs), report, formats=formats)

    @property
    def first_finding(self) -> Advice | None:
        """The first piece of advice for the runs, by `order_of`; of runs that need nothing, that of the first run."""
        pieces = [piece for verdict in self.verdicts for piece in verdict]
        return min(pieces, key=order_of, default=None)

    @property
    def _names(self) -> list[str]:
        return labels([run.path for run in self.runs]) if self.runs else []

    def lines(self) -> list[str]:
        """Return lines with steps, skips, the first finding, mistakes, notes, and the path of the report.

        Mistakes come before a finding that does not name its origin.

        Lines are wrapped to the width of standard error, less the "castwise: " that is printed before each. Each part
        of a diagnosis begins on a line of its own.
        """
        steps = [step for run in self.runs for step in run.steps]
        causes = Counter(step.why_skipped for step in steps if step.skipped)
        skipped = ", ".join(f"{count:,} {cause}" for cause, count in causes.most_common()) or "none"
        lost = sum(run.lost for run in self.runs)
        taken = sum(step.has_fault and not step.skipped for step in steps)
        of_taken = f", {taken:,} of them taken with inf or NaN" if taken else ""
        of_lost = f"; {several(lost, 'record')} lost, because the disk was full" if lost else ""
        lines = [f"{several(len(steps), 'step')}{of_taken}; skipped: {skipped}{of_lost}"] if self.runs else []
        first, finding = self.first_finding, list[str]()
        if first is not None:
            whose = next(name for name, verdict in zip(self._names, self.verdicts, strict=True) if first in verdict)
            parts = [f"{first.severity}: {f'{whose}: ' if len(self.runs) > 1 else ''}{first.finding}"]
            finding = ["\n".join([*parts, *_diagnosed(first), *filter(None, [first.prevention])])]
        mistakes, broken = self._mistakes(), self._broken_invariants(first)
        leads = first is not None and names_origin(first)
        lines += [*finding, *mistakes, *broken] if leads else [*mistakes, *finding, *broken]
        lines += self._notes_of_invariants(first)
        lines = [_wrapped(_seen_from_here(line)) for line in [*lines, *self.notes]]
        if self.report is not None:
            lines.append(f"report: {self.report}")
        return lines

    def _mistakes(self) -> list[str]:
        """Return a line for each of the first few mistakes."""
        lines = [f"mistake: {mistake.where}{mistake.text}" for mistake in self.mistakes]
        more = len(lines) - _MISTAKES_SHOWN
        return lines[:_MISTAKES_SHOWN] + ([f"more mistakes: {more}"] if more > 0 else [])

    def _broken_invariants(self, shown: Advice | None) -> list[str]:
        """Return a line for each of the first few warnings of invariants but the one that is shown already."""
        lines = [f"warning: {text}" for text in self._of_invariants("warning", shown)]
        more = len(lines) - _INVARIANTS_SHOWN
        return lines[:_INVARIANTS_SHOWN] + ([f"more findings of invariants, in the report: {more}"] if more > 0 else [])

    def _notes_of_invariants(self, shown: Advice | None) -> list[str]:
        """Return a line with the first note of an invariant but the one that is shown already, and their count."""
        texts, where = self._of_invariants("note", shown), " in the report" if self.report is not None else ""
        head = f"{len(texts)} notes{where}, the first" if len(texts) > 1 else "note"
        return [f"{head}: {texts[0]}"] if texts else []

    def _of_invariants(self, severity: Severity, shown: Advice | None) -> list[str]:
        pieces = [piece for verdict in self.verdicts for piece in verdict if "invariant" in piece.evidence]
        return [*dict.fromkeys(each.text for each in pieces if each.severity == severity and each is not shown)]

    def record(self) -> dict[str, Any]:
        """Return the same facts and all findings as JSON-compatible values."""
        return {
            "report": None if self.report is None else str(self.report),
            "mistakes": [mistake.to_json() for mistake in self.mistakes],
            "notes": list(self.notes),
            "runs": [
                {
                    "run": name,
                    "steps": len(run.steps),
                    "format": computes_in or None,
                    "loss": _losses(run),
                    **({"lost": run.lost} if run.lost else {}),
                    **({"alone": [alone.why for alone in run.alone]} if run.alone else {}),
                    "skipped": dict(Counter(step.why_skipped for step in run.steps if step.skipped)),
                    "findings": [
                        {
                            "severity": piece.severity,
                            "text": piece.text,
                            "evidence": {name: _json(value) for name, value in piece.evidence.items()},
                            "diagnoses": [
                                {name: getattr(each, name) for name in _IN_JSON}
                                | {"samples": [{"step": step, "sample": text} for step, text in each.samples]}
                                for each in piece.diagnosed
                            ],
                        }
                        for piece in verdict
                    ],
                }
                for name, run, verdict, computes_in in zip(
                    self._names, self.runs, self.verdicts, self.formats or [""] * len(self.runs), strict=True
                )
            ],
        }

    def fails(self, levels: Iterable[Level]) -> bool:
        """Return True if there is a mistake (level "mistake") or a finding of at least one of the given severities."""
        wanted = set(levels)
        severities = {piece.severity for verdict in self.verdicts for piece in verdict}
        grave = {"critical", "warning"} if "warning" in wanted else {"critical"} if "critical" in wanted else set()
        return bool(severities & grave) or ("mistake" in wanted and bool(self.mistakes))


def _losses(run: Run) -> dict[str, Any] | None:
    """Return the first and the last recorded loss; None if there is none."""
    losses = [float(step.loss) for step in run.steps if step.loss is not None]
    return {"first": _json(losses[0]), "last": _json(losses[-1])} if losses else None


def _json(value: Measured) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _diagnosed(piece: Advice) -> list[str]:
    """Return the parts of the diagnoses of a piece of advice, with the source line and the inputs of the first one."""
    lines = []
    for diagnosed in piece.diagnosed:
        source = [f"    {diagnosed.source}"] if diagnosed.source and diagnosed is piece.diagnosed[0] else []
        if piece.finding.startswith(diagnosed.sentences):
            lines += source
            continue
        summary, *others = diagnosed.parts
        lines += [f"{diagnosed.at}: {summary}", *source, *others]
    inputs = piece.diagnosed[0].inputs if piece.diagnosed else []
    return lines + [f"Input {number}: {text}." for number, text in enumerate(inputs)]


def _seen_from_here(text: str) -> str:
    """Return a text in which paths of files below the current folder begin there."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the folder is gone
        return text
    if here == os.sep:
        return text
    return re.sub(rf"(?<![\w.~{re.escape(os.sep)}-]){re.escape(here)}", "", text)


def _wrapped(text: str) -> str:
    """Wrap each line to the width of standard error, and indent all but the first, which follows "castwise: "."""
    indent = " " * len(_PREFIX)
    width = max(width_of(sys.stderr, _WIDTH), 3 * len(_PREFIX)) - len(_PREFIX)
    lines = [
        textwrap.fill(line, width, subsequent_indent=_indent_of(line), break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    ]
    return textwrap.indent("\n".join(lines), indent).removeprefix(indent)


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def end(records: Sequence[str | os.PathLike[str]], page: Path, shared_script: bool | Path = False) -> Summary | None:
    """Judge finished runs and write their report; a failure is a RuntimeWarning, not an error.

    Args:
        records: Record files, or folders with records: of one model, or of a run.
        page: File to write the report to.
        shared_script: See `write_report`.

    Returns:
        None if a record cannot be read.
    """
    try:
        runs = read_runs(records)
    except (OSError, ValueError) as error:
        warn(f"could not write the report in {page.parent}, because a record cannot be read: {error}", RuntimeWarning)
        return None
    report: Path | None = None
    try:
        report = write_report(runs, page, shared_script=shared_script)
    except (ImportError, OSError, ValueError) as error:
        warn(f"could not write the report in {page.parent} (the record is complete): {error}", RuntimeWarning)
    return Summary.of(runs, report)


def end_and_summarize(records: Sequence[str | os.PathLike[str]], page: Path) -> None:
    """Call `end`, and print the summary to standard error."""
    summary = end(records, page)
    for line in [] if summary is None else summary.lines():
        print(f"{_PREFIX}{line}", file=sys.stderr)
