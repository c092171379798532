"""The callback that monitors a training run and writes its report, without the Lightning class it derives from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from castwise.integrations._lightning.scaling import Scaling
from castwise.monitor._monitor import Monitor
from castwise.monitor._sinks import JSONL
from castwise.report._summary import end_and_summarize

_PAGE = "report.html"


class Report:
    """Monitors a run from its first to its last step, however it ends, and writes the report."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int = 100,
        *,
        on_nonfinite: Literal["diagnose"] | None = None,
        snapshots: bool = False,
    ) -> None:
        self.folder, self._every = Path(folder), every
        self._on_nonfinite, self._snapshots = on_nonfinite, snapshots
        self._monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording, after a checkpoint was loaded."""
        self._sink = JSONL(self.folder)
        self._monitor = Monitor(
            pl_module,
            trainer.optimizers,
            trainer.scaler,
            every=self._every,
            sinks=[self._sink],
            on_nonfinite=self._on_nonfinite,
            snapshots=self._snapshots,
        ).attach()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the number of the next step to the Trainer's."""
        if self._monitor is not None:
            self._monitor.step = trainer.global_step + 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the record and write the report."""
        self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the record of a run that was interrupted or failed, and write its report."""
        self._end(trainer, exception)

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        if self._monitor is None:
            return
        monitor, self._monitor = self._monitor, None
        if error is None and isinstance(trainer.precision_plugin, Scaling):
            trainer.precision_plugin.update_if_due()
        monitor.__exit__(None if error is None else type(error), error, None)
        if trainer.is_global_zero:
            record = self._sink.path  # beside the folder if another run is recording there
            end_and_summarize([record], record.parent / _PAGE)
