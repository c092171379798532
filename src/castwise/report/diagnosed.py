"""What `diagnose` found out about skipped steps, each place once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from castwise.report.record_numbers import Record, on_ranks


@dataclass(frozen=True)
class Diagnosed:
    """A module and an op that made steps fail.

    Args:
        cause: That of the skipped steps.
        steps: Their numbers, in the order of the record.
        module: What made the first inf or NaN; "" if that is the model itself, the loss or the data.
        op: Its op; "" if that is not known.
        summary: One sentence.
        advice: What would help, in words; "" if nothing was found.
        code: The same as Python to be copied; "" where words have to do.
        details: Ranges of the op's inputs and outputs, one a line.
        is_due_to_scale: Whether a lower scale would help.
        where: " on rank 1" if that is the rank whose batches were replayed; "" if there is no other.
    """

    cause: str
    steps: Sequence[int]
    module: str
    op: str
    summary: str
    advice: str
    code: str
    details: str
    is_due_to_scale: bool
    where: str = ""

    @property
    def at(self) -> str:
        """The steps in words."""
        if len(self.steps) == 1:
            return f"Step {self.steps[0]:,}{self.where}"
        return f"{len(self.steps):,} steps from {self.steps[0]:,} to {self.steps[-1]:,}{self.where}"

    @property
    def line(self) -> str:
        """Where the model's code calls the op, as "model.py:31"; "" if that is not known."""
        found = re.search(r"^at (.+?:\d+): ", self.details, re.MULTILINE)
        return "" if found is None else found[1]

    @property
    def inputs(self) -> list[str]:
        """Ranges of the op's inputs."""
        return re.findall(r"^input \d+: (.+)$", self.details, re.MULTILINE)

    @property
    def told(self) -> str:
        """The cause and its remedy."""
        remedy = f" {self.advice[:1].upper()}{self.advice[1:]}." if self.advice else ""
        return f"{self.summary}{remedy}"

    def __str__(self) -> str:
        return f"{self.at}: {self.told}"

    def without_remedy(self) -> Diagnosed:
        """The same where another remedy comes first."""
        return replace(self, advice="", code="")


def diagnosed(records: Iterable[Record]) -> list[Diagnosed]:
    """Return what records of diagnoses say, in the order in which it was found first."""
    grouped: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        key = tuple(record.get(name) for name in ("cause", "phase", "module", "op"))
        grouped.setdefault(key, []).append(record)
    return [_of(same) for same in grouped.values()]


def first_and_last(found: Sequence[Diagnosed]) -> tuple[Diagnosed, ...]:
    """Return those of the first and of the last diagnosed step: one if they are the same."""
    if not found:
        return ()
    last = max(found, key=lambda each: each.steps[-1])
    return (found[0],) if last is found[0] else (found[0], last)


def _of(same: Sequence[Record]) -> Diagnosed:
    record = same[0]
    advice = record["advice"].strip().rstrip(".")
    lines = [line for line in record["text"].splitlines() if line.strip().rstrip(".") != advice]
    summary = record.get("summary") or (lines[0] if lines else "What made it is not known.")
    return Diagnosed(
        cause=record["cause"],
        steps=list(dict.fromkeys(each["step"] for each in same)),
        module=record["module"],
        op=record["op"],
        summary=summary,
        advice=advice,
        code=record.get("code") or "",
        details="\n".join(line.strip() for line in lines[1:]),
        # Records written before 0.2 do not name the remedy.
        is_due_to_scale=record["remedy"] == "scale" if "remedy" in record else advice.startswith("lower the scale"),
        where=on_ranks(same),
    )
