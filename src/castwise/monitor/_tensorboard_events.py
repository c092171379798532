"""Write records as curves, histograms and texts for TensorBoard."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from castwise.monitor._curves import Histogram, Spread, exponents, norm_of_sample, of_sample, of_step
from castwise.monitor._records import DiagnosisRecord, Record, RunRecord, SampleRecord, StepRecord

_EACH = {"gradients": "module", "outputs": "module", "updates": "parameter"}


class TensorBoard:
    """Writes records as TensorBoard events. Requires the extra `castwise[tensorboard]`.

    There are at most 23 curves, whatever the size of the model. For each step: `step/scale`, `step/loss`,
    `step/grad_norm` (of clipped and of sampled steps), `step/seconds` and `step/skipped` (0 or 1). For sampled steps:
    the worst of all modules in each format, `gradients/flush <format>` and `gradients/headroom_bits <format>`, and the
    same for `outputs`; the largest of all parameters, `updates/update_to_weight` and `updates/lost_in_bf16`. The text
    `worst` names these modules and parameters. Histograms show the distribution over all of them:
    `gradients of each module/...`, `outputs of each module/...`, `updates of each parameter/...`. The histogram
    `log2 gradient/<module>` shows the exponents of a module's gradients. Diagnoses are texts.

    Args:
        folder: Folder for the event files; created when the first record arrives.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise ModuleNotFoundError("the TensorBoard sink needs tensorboard: pip install 'castwise[tensorboard]'")
        self._folder = Path(folder)
        self._writer: Any = None

    def write_record(self, record: Record) -> None:
        """Write a record.

        Args:
            record: The record.
        """
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        if isinstance(record, RunRecord):
            rows = [f"|{name}|{value}|" for name, value in record.settings.items()]
            self._writer.add_text("settings", "\n".join(["|setting|value|", "|---|---|", *rows]))
        elif isinstance(record, StepRecord):
            self._write_step(record)
        elif isinstance(record, SampleRecord):
            self._write_sample(record)
        elif isinstance(record, DiagnosisRecord):
            self._writer.add_text("diagnosis", record.with_advice, record.step)
        if not isinstance(record, StepRecord):
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file. A later record starts a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_step(self, record: StepRecord) -> None:
        for name, value in of_step(record).items():
            self._writer.add_scalar(name, value, record.step)
        if record.skipped:
            self._writer.add_text("skipped", record.skip_in_words, record.step)

    def _write_sample(self, record: SampleRecord) -> None:
        step, spreads = record.step, of_sample(record)
        for name, value in norm_of_sample(record).items():
            self._writer.add_scalar(name, value, step)
        for spread in spreads:
            self._writer.add_scalar(f"{spread.group}/{spread.name}", spread.worst_value, step)
            name = f"{spread.group} of each {_EACH[spread.group]}/{spread.name}"
            self._write_histogram(name, spread.histogram(), step)
        for module, statistics in record.modules.items():
            self._write_histogram(f"log2 gradient/{module}", exponents([statistics]), step)
        self._writer.add_text("worst", _table(spreads), step)

    def _write_histogram(self, name: str, histogram: Histogram | None, step: int) -> None:
        if histogram is None:
            return
        edges, counts = histogram
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(n * middle for n, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(n * middle**2 for n, middle in zip(counts, middles, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )


def _table(spreads: list[Spread]) -> str:
    rows = [f"|{spread.group}|{spread.name}|{spread.worst}|{spread.worst_value:.3g}|" for spread in spreads]
    return "\n".join(["|of|statistic|worst|value|", "|---|---|---|---|", *rows])
