"""Transformers Trainer: a callback that monitors a training run and writes the report.

Scaling and autocast do not need the callback: call `castwise.install()` before creating the Trainer, or
`castwise.integrations.accelerate.prepare(trainer.accelerator)` before `trainer.train()`.

Requires the extra `castwise[transformers]`.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Literal

from castwise.amp.grad_scaler import GradScaler
from castwise.integrations.accelerate import clip_in_step, unwrapped
from castwise.monitor._monitor import Monitor
from castwise.monitor._sinks import JSONL
from castwise.report._summary import end_and_summarize

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "castwise.integrations.transformers needs Transformers: pip install 'castwise[transformers]'"
    ) from error

__all__ = ["ReportCallback"]

_PAGE = "report.html"


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow Transformers
    """Records the numerics of a training run, and writes `report.html` when it ends.

    Attaches a `Monitor` when training starts, after a checkpoint was loaded, and detaches it when training ends. If
    the Trainer's optimizer is a `MasterWeights`, the Trainer's clipping (`max_grad_norm`) then uses it, in fp32. A
    Trainer does not notify callbacks of a failed run. The record of a failed run is ended and its report written by
    `close()`, by the next `train()`, when the callback is garbage-collected, or when the process ends.

    Args:
        folder: Folder for the records (`monitor.jsonl.gz`) and the report.
        every: Steps between two samples, >= 1.
        on_nonfinite: `"diagnose"` replays the batch of a step with an inf or NaN; see `Monitor`.
        snapshots: Whether to keep weights of earlier steps for that, which in bf16 on an accelerator needs them.

    Raises:
        TypeError: When training starts, if the scaler is torch's.
        ValueError: When training starts, as in `Monitor`.

    Warns:
        RuntimeWarning: The report cannot be written, for example because `castwise[report]` is not installed. The
            records are kept.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[ReportCallback("runs/x")])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

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
        self._end_if_failed: weakref.finalize[Any, ReportCallback] | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start recording.

        Raises:
            TypeError: The Trainer's scaler is not a castwise scaler.
        """
        self.close()
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                f"the Trainer scales with {type(scaler).__module__}.{type(scaler).__name__}, which does not report its "
                "steps: call castwise.install() before creating the Trainer, or "
                "castwise.integrations.accelerate.prepare(trainer.accelerator) before trainer.train()"
            )
        clip_in_step(optimizer)
        sink = JSONL(self.folder)
        monitor = Monitor(
            model,
            unwrapped(optimizer),
            scaler,
            every=self._every,
            sinks=[sink],
            on_nonfinite=self._on_nonfinite,
            snapshots=self._snapshots,
        ).attach()
        record = sink if state.is_world_process_zero else None
        self._end_if_failed = weakref.finalize(self, _end, monitor, record, RuntimeError("training failed"))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the number of the next step to the Trainer's."""
        pending = None if self._end_if_failed is None else self._end_if_failed.peek()
        if pending is not None:
            monitor, _, _ = pending[2]
            monitor.step = state.global_step + 1

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the record and write the report."""
        pending = None if self._end_if_failed is None else self._end_if_failed.detach()
        if pending is not None:
            monitor, record, _ = pending[2]
            _end(monitor, record, None)

    def close(self) -> None:
        """End the record of a failed run and write its report. Does nothing if there is none."""
        if self._end_if_failed is not None:
            self._end_if_failed()


def _end(monitor: Monitor, record: JSONL | None, error: Exception | None) -> None:
    monitor.__exit__(None if error is None else type(error), error, None)
    if record is not None:
        end_and_summarize([record.path], record.path.parent / _PAGE)  # not `folder` if another run records there
