"""`Run`: read a recorded run."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise._collector import paused
from castwise.monitor._formats import FP16
from castwise.monitor._packing import MOST_BYTES, NO_NAMES, Names, Unpacker, in_full
from castwise.monitor._record_file import file_in
from castwise.monitor._record_shape import checked

if TYPE_CHECKING:
    from castwise.amp._simulation import GradientRange

Record = dict[str, Any]

FORMAT = 2


@dataclass
class Run:
    """The records of a training run, in order of steps.

    The file of a run that was resumed from a checkpoint has several records for some steps. The latest one counts.

    Args:
        path: The file.
        about: The first record: `castwise`, `torch`, `device` and `time` (seconds since 1970) of the run.
        settings: Readable description of the model and the training settings.
        steps: One record per step.
        samples: Records of sampled steps.
        diagnoses: Records of diagnosed skipped steps.
        mistakes: Records of mixed-precision mistakes in the script, each once.
        alone: Records of steps from which on the ranks' results are not combined, each with the reason.
        ended: Whether the monitor was detached; False while the run continues, or if it was killed.
        lost: Number of records that are missing, because the disk was full for too long.
    """

    path: Path
    about: Record = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    diagnoses: list[Record] = field(default_factory=list)
    mistakes: list[Record] = field(default_factory=list)
    alone: list[Record] = field(default_factory=list)
    ended: bool = False
    lost: int = 0
    _known_mistakes: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run, even while it is being written. A broken last line, as from a killed process, is ignored.

        Args:
            path: The file or its folder.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: A line before the last is not a valid record, any line is longer than 64 MiB, the only line is
                not the start of a record, or the file was written by a later castwise with another format.
        """
        run = cls(file_in(path))
        with paused():
            for record in _records(run.path):
                run._add(record)
        return run

    def gradient_ranges(self) -> list[GradientRange]:
        """Return the gradient ranges of the sampled steps, for `castwise.schedules.simulate`.

        These are all steps if `every` was 1. The largest gradient of a step that overflowed is unknown. It is assumed
        to be 2 * 65504 / scale, or the largest finite gradient if that is larger.
        """
        losses = {step["step"]: step.get("loss") for step in self.steps}
        return [_range_of(sample, losses.get(sample["step"])) for sample in self.samples]

    def extend(self, later: Run, offset: int) -> None:
        """Append the records of a later run to this one.

        Args:
            later: The later run.
            offset: Added to its step numbers. Records that this run has of the same steps are dropped.
        """
        if later.steps:
            self._forget_from(later.steps[0]["step"] + offset)
        for mine, theirs in (
            (self.steps, later.steps),
            (self.samples, later.samples),
            (self.diagnoses, later.diagnoses),
            (self.alone, later.alone),
        ):
            mine += [{**record, "step": record["step"] + offset} for record in theirs]
        for mistake in later.mistakes:
            self._add(mistake)
        self.lost += later.lost

    def _add(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "run":
            if record["format"] > FORMAT:
                raise ValueError(
                    f"{self.path} has format {record['format']}, but this castwise reads formats up to {FORMAT}: "
                    "upgrade castwise"
                )
            self.about, self.settings, self.ended = record, record["settings"], False
        elif kind == "step":
            if self.steps and record["step"] <= self.steps[-1]["step"]:
                self._forget_from(record["step"])
            self.steps.append(in_full(record))
        elif kind == "sample":
            self.samples.append(record)
        elif kind == "diagnosis":
            self.diagnoses.append(record)
        elif kind == "mistake":
            known = json.dumps(record, sort_keys=True)
            if known not in self._known_mistakes:
                self._known_mistakes.add(known)
                self.mistakes.append(record)
        elif kind == "lost":
            self.lost += record["records"]
        elif kind == "alone":
            self.alone.append(record)
        elif kind == "end":
            self.ended = True

    def _forget_from(self, step: int) -> None:
        for records in (self.steps, self.samples, self.diagnoses, self.alone):
            while records and records[-1]["step"] >= step:
                records.pop()


def _range_of(sample: Record, loss: float | None) -> GradientRange:
    from castwise.amp._simulation import GradientRange  # imports torch, which reading a run does not need

    exponents: Counter[int] = Counter()
    gradients = sample.get("gradients", {})
    for stats in gradients.values():
        lowest, counts = stats["exponents"]["lowest"], stats["exponents"]["counts"]
        exponents.update({lowest + place: count for place, count in enumerate(counts) if count})
    largest = max((stats["largest"] for stats in gradients.values()), default=0.0)
    overflowed = any(stats["nonfinite"] for stats in gradients.values())
    if overflowed:
        largest = max(largest, 2.0 * FP16.largest / sample["scale"])
    return GradientRange(largest, dict(sorted(exponents.items())), loss is None or math.isfinite(loss))


def _records(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        names, unpacker = Names(NO_NAMES), Unpacker(os.fstat(file.fileno()).st_size)
        for number in count(1):
            line = file.readline(MOST_BYTES + 1)
            if len(line) > MOST_BYTES:
                raise ValueError(f"{path}, line {number} has more than {MOST_BYTES:,} bytes, the limit for a record")
            if not line:
                return
            try:
                record = checked(json.loads(line))
                if record["kind"] == "names":
                    names = Names(record)
                    continue
                if "packed" in record:
                    record = unpacker.unpack(record, names)
            except (ValueError, RecursionError) as error:
                is_unfinished = not line.endswith(b"\n")
                if is_unfinished and (number > 1 or line.strip(b"\0")[:1] in {b"", b"{"}):
                    return
                raise ValueError(f"{path}, line {number} is not a record of a monitor: {error}") from None
            yield record
