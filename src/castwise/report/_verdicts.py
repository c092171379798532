"""`castwise.verdict`: judge a run's precision by its recorded numbers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from castwise._frames import new_frame
from castwise._number_text import several
from castwise._shown import Block, Shown, Table
from castwise.monitor._recorded_run import Run
from castwise.monitor._run_files import read_runs
from castwise.report import _fault_advice as fault_advice
from castwise.report import _invariant_advice as invariant_advice
from castwise.report import _range_advice as range_advice
from castwise.report import _step_advice as step_advice
from castwise.report._advice import SEVERITIES, Advice, Severity, numbers_of, order_of
from castwise.report._run_facts import RunFacts

if TYPE_CHECKING:
    import pandas

__all__ = ["Advice", "Severity", "Verdict", "verdict"]

_OF_STEPS = (
    step_advice.divergence,
    fault_advice.nothing_learned,  # of which spikes of the loss are a consequence
    invariant_advice.broken_invariants,
    step_advice.lost_weights,
    step_advice.poisoned_weights,
    fault_advice.taken_steps,
    fault_advice.skipped_gradients,
    step_advice.collapse,
    step_advice.bad_losses,
    step_advice.overflows,
    step_advice.other_skips,
    step_advice.other_diagnoses,
)
_OF_RANGES = (
    range_advice.underflow,
    range_advice.outputs,
    range_advice.too_little,
)


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """The advice for a run, most severe first, as a sequence; prints as one line per piece of advice.

    Args:
        advice: In order of severity; of the same severity, what names the line or module at fault comes first. If
            nothing is to be fixed, that comes first.
    """

    advice: tuple[Advice, ...]

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.advice)

    def __len__(self) -> int:
        return len(self.advice)

    @overload
    def __getitem__(self, index: int) -> Advice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Advice, ...]: ...
    def __getitem__(self, index: int | slice) -> Advice | tuple[Advice, ...]:
        return self.advice[index]

    def __repr__(self) -> str:
        counts = Counter(piece.severity for piece in self)
        several_of = [
            several(count, name) if name in ("warning", "note") else f"{count} {name}" for name, count in counts.items()
        ]
        return f"Verdict({', '.join(several_of)})"

    def __str__(self) -> str:
        return "\n".join(map(str, self.advice))

    def _blocks(self) -> Iterator[Block]:
        rows = [(piece.severity, f"{piece.text}\n{numbers_of(piece)}") for piece in self]
        yield Table([("severity", "advice"), *rows])

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each piece of advice: `severity`, `finding` and `evidence`.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        rows = [(piece.severity, piece.finding, dict(piece.evidence)) for piece in self]
        return new_frame(("severity", "finding", "evidence"), rows)


def verdict(run: str | os.PathLike[str] | Run) -> Verdict:
    """Turn a run recorded by `castwise.Monitor` into advice, each piece with the numbers behind it.

    If too little was recorded to judge the run, the verdict says so.

    Args:
        run: A folder with a `monitor.jsonl.gz`, that file, or a `castwise.monitor.Run`. The run may still be in
            progress. Of the folder of `castwise run` or `castwise.install`, the latest run, if it has one model.

    Raises:
        OSError: There is no readable record.
        ValueError: The file is not a run record, or the run has several models.
    """
    runs = read_runs([run])
    if len(runs) > 1:
        raise ValueError(f"{run} has several records: give one of {', '.join(str(each.path.parent) for each in runs)}")
    return judge(RunFacts(runs[0]))


def judge(facts: RunFacts) -> Verdict:
    """Return the verdict for a run's facts."""
    advice = [piece for rule in _OF_STEPS for piece in rule(facts)]
    is_lost = any(piece.severity == "critical" for piece in advice)
    if not facts.divergence:  # no format can hold numbers that keep growing
        advice += [piece for rule in _OF_RANGES for piece in rule(facts)]
    if not is_lost:  # otherwise the run learned nothing, and its samples mean nothing
        in_trouble = any(piece.severity in ("critical", "warning") for piece in advice)
        advice += range_advice.bf16_weights(facts)
        advice += range_advice.scale_fit(facts, in_trouble)
    advice.sort(key=lambda piece: (SEVERITIES.index(piece.severity), order_of(piece)))
    if all(piece.severity in ("note", "good") for piece in advice):
        advice = [*fault_advice.nothing_to_fix(facts), *advice]
    return Verdict(tuple(advice))
