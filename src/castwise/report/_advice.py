"""A piece of advice, and how its numbers are formatted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

from castwise._number_text import bits, percent, power_of_two
from castwise._shown import Block, Shown, Table
from castwise.report._diagnosed import Diagnosed

Severity = Literal["critical", "warning", "note", "good"]
"""How serious a piece of advice is, most severe first."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note", "good")
Measured = float | str | tuple[str, ...]
Evidence = Mapping[str, Measured]
# Labels of evidence whose name alone would not be clear to a reader.
_LABELS = {
    "broken_for": "parameters",
    "first_module_not_finite": "first non-finite module",
    "flushed_there_share": "flushed at highest safe scale",
    "growth_steps": "steps of growth",
    "largest_gradient_in": "module with largest gradient",
    "largest_gradient_step": "step of largest gradient",
    "largest_output_step": "step of largest output",
    "longest_row_of_skipped_steps": "longest run of skipped steps",
    "lost_there_share": "lost in worst parameter",
    "lowest_scale_step": "step of lowest scale",
    "modules_like_it": "more such modules",
    "most_flushed_in": "module with most flushed",
    "nonfinite_samples": "non-finite samples",
    "parameters": "measured parameters",
    "parameters_named_most": "non-finite most often",
    "row_begins_at_step": "first step of the run of skips",
    "taken_samples": "samples",
    "vanished_samples": "samples with only zeros",
    "worst_step": "step with most flushed",
}


@dataclass(frozen=True, repr=False)
class Advice(Shown):
    """A finding, its remedy, and the numbers behind it.

    Args:
        finding: A few sentences.
        evidence: Measured values by name. The end of a name is its unit: `..._share` (0 to 1), `..._bits`,
            `..._scale`, `..._step` (from 1), `..._steps` and `..._samples` (counts); other values are text.
        severity: "critical" if training is or will be lost, "warning" if numbers are being lost, "note" for
            information, "good" for a check that passed.
        diagnosed: Results of replaying the steps that the advice is about.
        prevention: What keeps it from happening again; "" if that is the remedy.
    """

    finding: str
    evidence: Evidence
    severity: Severity
    diagnosed: tuple[Diagnosed, ...] = ()
    prevention: str = ""

    @property
    def text(self) -> str:
        """The finding, each diagnosis with its remedy unless the finding starts with it, and the prevention."""
        more = [str(each) for each in self.diagnosed if not self.finding.startswith(each.sentences)]
        return " ".join([self.finding, *more, *filter(None, [self.prevention])])

    @property
    def _own_finding(self) -> str:
        """The finding without the diagnosis that it may begin with, for pages that show that apart."""
        begins = [each.sentences for each in self.diagnosed if self.finding.startswith(each.sentences)]
        return self.finding[len(begins[0]) :].lstrip() if begins else self.finding

    def shown_evidence(self) -> list[tuple[str, str]]:
        """Return labels and values of the evidence, formatted for display."""
        return [
            (_LABELS.get(name, name.removesuffix("_share").replace("_", " ")), _written(name, value))
            for name, value in self.evidence.items()
        ]

    def __repr__(self) -> str:
        return f"Advice({self.severity}: {shorten(self.finding, 80, placeholder=' ...')})"

    def __str__(self) -> str:
        return f"{self.severity}: {self.text} ({numbers_of(self)})"

    def _blocks(self) -> Iterator[Block]:
        yield f"{self.severity}: {self.text}"
        yield Table([("measured", ""), *self.shown_evidence()])


def names_origin(advice: Advice) -> bool:
    """Return True if a replay has found where it begins, and has a remedy for that."""
    return any(each.advice and (each.line or each.module) for each in advice.diagnosed)


def order_of(advice: Advice) -> tuple[int, bool]:
    """Return the key by which advice is sorted: by severity, and what names its origin before what does not.

    Pieces with the same key stay in the order of the rules that found them, as all notes do.
    """
    note = SEVERITIES.index("note")
    severity = min(SEVERITIES.index(advice.severity), note)
    return severity, severity < note and not names_origin(advice)


def numbers_of(advice: Advice) -> str:
    """Return the evidence of a piece of advice in one line."""
    return "; ".join(f"{label}: {value}" for label, value in advice.shown_evidence())


def _written(name: str, value: Measured) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, (int, float)):
        return ", ".join(value)
    unit = name.rpartition("_")[2]
    if unit == "share":
        return percent(value)
    if unit == "bits":
        return bits(value)
    if unit == "scale":
        return power_of_two(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
