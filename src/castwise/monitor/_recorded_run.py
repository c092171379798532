"""`Run`: read a recorded run."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from castwise._collector import paused
from castwise._invariants.invariant import EVENTS
from castwise.monitor._formats import FP16
from castwise.monitor._gzip_members import MOST_BYTES, is_packed, members
from castwise.monitor._packed_samples import PackedSamples
from castwise.monitor._record_file import FILE_NAME, FILE_NAME_0_2, path_to_read
from castwise.monitor._records import (
    FORMAT,
    AloneRecord,
    DiagnosisRecord,
    EndRecord,
    InvariantRecord,
    LostRecord,
    MistakeRecord,
    NormsRecord,
    Record,
    RunRecord,
    SampleRecord,
    StepRecord,
    record_from,
)

if TYPE_CHECKING:
    from castwise.amp._simulation import GradientRange

_Stepped = TypeVar("_Stepped", StepRecord, SampleRecord, DiagnosisRecord, InvariantRecord, NormsRecord, AloneRecord)


@dataclass
class Run:
    """The records of a training run, in order of steps.

    The file of a run that was resumed from a checkpoint has several records for some steps. The latest one counts.

    Args:
        path: The file.
        about: The first record: versions, device and time of the run; None if there is none.
        settings: Readable description of the model and the training settings.
        steps: One record per step.
        samples: Records of sampled steps.
        diagnoses: Records of diagnosed skipped steps.
        mistakes: Records of mixed-precision mistakes in the script, each once.
        invariants: Records of invariants that did not hold.
        norms: Norms of gradients around spikes of the loss.
        alone: Records of steps from which on the ranks' results are not combined, each with the reason.
        ended: Whether the monitor was detached; False while the run continues, or if it was killed.
        lost: Number of records that are missing, because the disk was full for too long.
    """

    path: Path
    about: RunRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)
    diagnoses: list[DiagnosisRecord] = field(default_factory=list)
    mistakes: list[MistakeRecord] = field(default_factory=list)
    invariants: list[InvariantRecord] = field(default_factory=list)
    norms: list[NormsRecord] = field(default_factory=list)
    alone: list[AloneRecord] = field(default_factory=list)
    ended: bool = False
    lost: int = 0
    _known_mistakes: set[MistakeRecord] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run, even while it is being written. A broken end, as from a killed process, is ignored.

        Args:
            path: The file or its folder. Files of castwise 0.2 are read too: one beside a file of a later castwise has
                the earlier records of the same run.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: A line before the last is not a valid record, any line is longer than 64 MiB, the only line is
                not the start of a record, or the file was written by a later castwise with another format.
        """
        run = cls(path_to_read(path))
        earlier = run.path.with_name(FILE_NAME_0_2)
        with paused():
            if run.path.name == FILE_NAME and earlier.is_file():
                run._read(earlier)
            run._read(run.path)
        return run

    def _read(self, path: Path) -> None:
        for record in _records(path):
            if isinstance(record, RunRecord) and record.format > FORMAT:
                raise ValueError(
                    f"{path} has format {record.format}, but this castwise reads formats up to {FORMAT}: "
                    "upgrade castwise"
                )
            self._add(record)

    def gradient_ranges(self) -> list[GradientRange]:
        """Return the gradient ranges of the sampled steps, for `castwise.schedules.simulate`.

        These are all steps if `every` was 1. The largest gradient of a step that overflowed is unknown. It is assumed
        to be 2 * 65504 / scale, or the largest finite gradient if that is larger.
        """
        losses = {step.step: step.loss for step in self.steps}
        return [_range_of(sample, losses.get(sample.step)) for sample in self.samples]

    def extend(self, later: Run, offset: int) -> None:
        """Append the records of a later run to this one.

        Args:
            later: The later run.
            offset: Added to its step numbers. Records that this run has of the same steps are dropped.
        """
        if later.steps:
            self._forget_from(later.steps[0].step + offset)
        self.steps += _moved(later.steps, offset)
        self.samples += _moved(later.samples, offset)
        self.diagnoses += _moved(later.diagnoses, offset)
        self.invariants += _moved(later.invariants, offset)
        self.norms += _moved(later.norms, offset)
        self.alone += _moved(later.alone, offset)
        for mistake in later.mistakes:
            self._add(mistake)
        self.lost += later.lost

    def _add(self, record: Record) -> None:
        if isinstance(record, RunRecord):
            self.about, self.settings, self.ended = record, record.settings, False
        elif isinstance(record, StepRecord):
            if self.steps and record.step <= self.steps[-1].step:
                self._forget_from(record.step)
            self.steps.append(record)
        elif isinstance(record, SampleRecord):
            self.samples.append(record)
        elif isinstance(record, DiagnosisRecord):
            self.diagnoses.append(record)
        elif isinstance(record, MistakeRecord):
            if record not in self._known_mistakes:
                self._known_mistakes.add(record)
                self.mistakes.append(record)
        elif isinstance(record, InvariantRecord):
            self.invariants.append(record)
        elif isinstance(record, NormsRecord):
            self.norms.append(record)
        elif isinstance(record, LostRecord):
            self.lost += record.records
        elif isinstance(record, AloneRecord):
            self.alone.append(record)
        elif isinstance(record, EndRecord):
            self.ended = True

    def _forget_from(self, step: int) -> None:
        for records in (self.steps, self.samples, self.diagnoses, self.invariants, self.norms, self.alone):
            while records and records[-1].step >= step:
                records.pop()


def _moved(records: list[_Stepped], offset: int) -> list[_Stepped]:
    return [replace(record, step=record.step + offset) for record in records]


def _range_of(sample: SampleRecord, loss: float | None) -> GradientRange:
    from castwise.amp._simulation import GradientRange  # imports torch, which reading a run does not need

    exponents: Counter[int] = Counter()
    for stats in sample.gradients.values():
        exponents.update(dict(stats.exponents.items()))
    largest = max((stats.largest for stats in sample.gradients.values()), default=0.0)
    if any(stats.nonfinite for stats in sample.gradients.values()):
        largest = max(largest, 2.0 * FP16.largest / sample.scale)
    return GradientRange(largest, dict(sorted(exponents.items())), loss is None or math.isfinite(loss))


def distinct_mistakes(runs: Iterable[Run]) -> list[MistakeRecord]:
    """Return the mistakes of several runs, one for each kind and line."""
    distinct = {(mistake.name, mistake.file, mistake.line): mistake for run in runs for mistake in run.mistakes}
    return list(distinct.values())


def distinct_invariants(runs: Iterable[Run]) -> list[InvariantRecord]:
    """Return the invariants that did not hold in several runs, by step, one for each name and list of parameters.

    Of events, such as spikes of the loss, return all.
    """
    records = sorted((record for run in runs for record in run.invariants), key=lambda record: record.step)
    distinct: dict[tuple[str, str, tuple[str, ...]], InvariantRecord] = {}
    for record in records:
        is_event = record.name in EVENTS and record.severity == "warning"
        distinct.setdefault((record.name, record.text if is_event else "", record.parameters), record)
    return list(distinct.values())


def first_record(path: Path) -> Record | None:
    """Return the first record of a file; None if it has none.

    Raises:
        OSError, ValueError: As for `Run.read`.
    """
    return next(_records(path), None)


def _records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        is_unpacked = not is_packed(file.read(4))
        file.seek(0)
        packed, lines = PackedSamples(os.fstat(file.fileno()).st_size), _lines(file, is_unpacked)
        for number in count(1):
            line = b"\n"
            try:
                line = next(lines, b"")
                if not line:
                    return
                value = packed.plain(json.loads(line))
                record = None if value is None else record_from(value)
            except (ValueError, RecursionError) as error:
                is_unfinished = is_unpacked and not line.endswith(b"\n")
                if is_unfinished and (number > 1 or line.strip(b"\0")[:1] in {b"", b"{"}):
                    return
                raise ValueError(f"{path}, line {number} is not a record of a monitor: {error}") from None
            if record is not None:
                yield record


def _lines(file: BinaryIO, is_unpacked: bool) -> Iterator[bytes]:
    if is_unpacked:
        for line in iter(lambda: file.readline(MOST_BYTES + 1), b""):
            if len(line) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes, the limit for a record")
            yield line
    else:
        for content in members(file):
            yield from content.splitlines(keepends=True)
