"""Diagnoses of skipped steps, grouped by origin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from castwise.monitor._records import DiagnosisRecord
from castwise.report._ranks import on_ranks

MAX_SAMPLE_LINES = 8


@dataclass(frozen=True)
class Diagnosed:
    """A module and an op that made steps fail.

    Args:
        cause: The cause of the skipped steps.
        steps: Step numbers, in record order.
        module: The module that produced the first inf or NaN; "" for the model itself, the loss or the data.
        op: The op; "" if unknown.
        summary: One sentence.
        advice: The remedy in words; "" if none was found.
        code: The remedy as Python code to copy; "" if there is only `advice`.
        details: Ranges of the op's inputs and outputs, one per line.
        is_due_to_scale: Whether a lower scale would help.
        tried: What the remedy gave on the batch of the first step; "" if it is not known.
        samples: The samples at fault by step, in record order.
        where: " on rank 1" if that rank's batches were replayed; "" in a single process.
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
    tried: str = ""
    samples: Sequence[tuple[int, str]] = ()
    where: str = ""

    @property
    def at(self) -> str:
        """The steps in words, such as "Step 7"."""
        if len(self.steps) == 1:
            return f"Step {self.steps[0]:,}{self.where}"
        return f"{len(self.steps):,} steps from {self.steps[0]:,} to {self.steps[-1]:,}{self.where}"

    @property
    def line(self) -> str:
        """Where the model's code calls the op, such as "model.py:31"; "" if unknown."""
        found = re.search(r"^at (.+?:\d+): ", self.details, re.MULTILINE)
        return "" if found is None else found[1]

    @property
    def capsule(self) -> str:
        """Path of the capsule; "" if there is none."""
        found = re.search(r"^capsule: (.+)$", self.details, re.MULTILINE)
        return "" if found is None else found[1]

    @property
    def inputs(self) -> list[str]:
        """Ranges of the op's inputs."""
        return re.findall(r"^input \d+: (.+)$", self.details, re.MULTILINE)

    @property
    def trial(self) -> str:
        """What came of the remedy, such as "Tried on the batch of step 23: finite"; "" if it is not known."""
        if not self.tried or not self.advice:
            return ""
        on_batch = "" if _is_untried(self.tried) else f"tried on the batch of step {self.steps[0]:,}: "
        return _sentence(f"{on_batch}{self.tried}")

    @property
    def remedy(self) -> str:
        """`advice` without the code that it quotes, if that is in `code`."""
        return self.advice.partition(": castwise.")[0] if self.code else self.advice

    @property
    def source(self) -> str:
        """The text of that line; "" if unknown."""
        found = re.search(r"^at .+?:\d+: (.+)$", self.details, re.MULTILINE)
        return "" if found is None else found[1]

    @property
    def sample_lines(self) -> list[str]:
        """The samples at fault, a line for those of several steps that are described alike, and at most eight."""
        steps_of: dict[str, list[int]] = {}
        for step, text in self.samples:
            steps_of.setdefault(text, []).append(step)
        lines = [
            f"{'Step' if len(steps) == 1 else f'{len(steps):,} steps,'} {_ends(steps)}: {text}"
            for text, steps in steps_of.items()
        ]
        more = len(lines) - MAX_SAMPLE_LINES
        return [*lines[:MAX_SAMPLE_LINES], *([f"and {more:,} more"] if more > 0 else [])]

    @property
    def parts(self) -> list[str]:
        """The summary, the sample at fault, the remedy, and what came of it; a sentence or two each."""
        sample = self.samples[0][1] if self.samples else ""
        more = [_sentence(text) for text in (sample, self.advice, self.trial) if text]
        return [self.summary, *(f"{text}." for text in more)]

    @property
    def sentences(self) -> str:
        """All parts in one line."""
        return " ".join(self.parts)

    def __str__(self) -> str:
        return f"{self.at}: {self.sentences}"

    def without_remedy(self) -> Diagnosed:
        """Return a copy without a remedy, for findings that have another one."""
        return replace(self, advice="", code="", tried="")


def diagnosed(records: Iterable[DiagnosisRecord]) -> list[Diagnosed]:
    """Group diagnosis records by origin, in order of first occurrence."""
    grouped: dict[tuple[object, ...], list[DiagnosisRecord]] = {}
    for record in records:
        key = record.cause, record.phase, record.module, record.op
        grouped.setdefault(key, []).append(record)
    return [_of(same) for same in grouped.values()]


def first_and_last(found: Sequence[Diagnosed]) -> tuple[Diagnosed, ...]:
    """Return the diagnoses of the first and the last diagnosed step, or one if they are the same."""
    if not found:
        return ()
    last = max(found, key=lambda each: each.steps[-1])
    return (found[0],) if last is found[0] else (found[0], last)


def _of(same: Sequence[DiagnosisRecord]) -> Diagnosed:
    record = same[0]
    advice = record.advice.strip().rstrip(".")
    trial = record.tried if _is_untried(record.tried) else f"tried on this batch: {record.tried}"
    shown_apart = {advice, trial, record.sample}
    lines = [line for line in record.text.splitlines() if line.strip().rstrip(".") not in shown_apart]
    summary = record.summary or (lines[0] if lines else "The origin is unknown.")
    return Diagnosed(
        cause=record.cause,
        steps=list(dict.fromkeys(one.step for one in same)),
        module=record.module,
        op=record.op,
        summary=summary,
        advice=advice,
        code=record.code,
        details="\n".join(line.strip() for line in lines[1:]),
        # Records from versions before 0.2 do not name the remedy.
        is_due_to_scale=advice.startswith("lower the scale") if record.remedy is None else record.remedy == "scale",
        tried=record.tried,
        samples=[(one.step, one.sample) for one in same if one.sample],
        where=on_ranks(same),
    )


def _ends(steps: Sequence[int]) -> str:
    return f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"


def _is_untried(tried: str) -> bool:
    return tried.startswith("untried")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
