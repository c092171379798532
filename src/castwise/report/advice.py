"""A piece of advice, and how its numbers are formatted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from castwise._number_text import bits, percent, power_of_two
from castwise.report.diagnosed import Diagnosed

Severity = Literal["critical", "warning", "note", "good"]
"""How serious a piece of advice is, most severe first."""
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note", "good")
Measured = float | str | tuple[str, ...]
Evidence = Mapping[str, Measured]


@dataclass(frozen=True)
class Advice:
    """A finding, its remedy, and the numbers behind it.

    Args:
        finding: A few sentences.
        evidence: Measured values by name. The end of a name is its unit: `..._share` (0 to 1), `..._bits`,
            `..._scale`, `..._step` (from 1), `..._steps` and `..._samples` (counts); other values are text.
        severity: "critical" if training is or will be lost, "warning" if numbers are being lost, "note" for
            information, "good" for a check that passed.
        diagnosed: Results of replaying the steps that the advice is about.
    """

    finding: str
    evidence: Evidence
    severity: Severity
    diagnosed: tuple[Diagnosed, ...] = ()

    @property
    def text(self) -> str:
        """The finding, then each diagnosis with its remedy, unless the finding starts with it."""
        more = [str(each) for each in self.diagnosed if not self.finding.startswith(each.told)]
        return " ".join([self.finding, *more])

    def shown_evidence(self) -> list[tuple[str, str]]:
        """Return evidence names and values formatted for display."""
        return [
            (name.removesuffix("_share").replace("_", " "), _written(name, value))
            for name, value in self.evidence.items()
        ]

    def __str__(self) -> str:
        numbers = "; ".join(f"{name} {value}" for name, value in self.shown_evidence())
        return f"{self.severity}: {self.text} ({numbers})"


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
