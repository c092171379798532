"""Log a monitor's records as metrics, histograms and texts of a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from castwise.monitor._curves import Histogram, exponents, norm_of_sample, of_sample, of_step
from castwise.monitor._records import DiagnosisRecord, EndRecord, Record, RunRecord, SampleRecord, StepRecord

__all__ = ["WandB"]

if TYPE_CHECKING:
    import wandb

_STEP = "castwise/number of step"


class WandB:
    """A sink of `Monitor` that logs to Weights & Biases. Requires the extra `castwise[wandb]`.

    Metrics start with `castwise/` and are plotted over the training step. There are at most 23 metrics, named like the
    curves of the `TensorBoard` sink: `castwise/step/loss` and so on for each step, and the worst of all modules for
    sampled steps, such as `castwise/gradients/flush fp16`. Histograms show the distribution over all modules,
    `castwise/gradients/all flush fp16`, and the exponents of the gradients, `castwise/gradients/log2`. The training
    settings are in the run's config under `castwise`. The run's summary has the last skipped step and its cause
    (`castwise/last skip`), the last diagnosis (`castwise/last diagnosis`), and the modules with the worst numbers
    (`castwise/worst`).

    Metrics join the rows that the script logs. The run's own step counter goes on by itself only where the script logs
    less often than once per training step, and then by one for each. So a script may number its rows by training steps
    (`run.log(..., step=...)`), but not by epochs: W&B drops a row whose number is below the counter.

    With `WANDB_MODE=offline` nothing is sent until `wandb sync`.

    Args:
        run: A run returned by `wandb.init`. By default, the run that is active when the first record arrives. If there
            is none, a run is started then, and finished with the monitor.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        TypeError: `run` is not a run.

    Example:
        >>> sink = WandB(wandb.init(project="gpt"))  # doctest: +SKIP
        >>> monitor = castwise.Monitor(model, optimizer, scaler, sinks=["runs/x", sink])  # doctest: +SKIP
    """

    def __init__(self, run: wandb.Run | None = None) -> None:
        if not (run is None or hasattr(run, "define_metric")):
            raise TypeError(f"run must be a run from wandb.init(...), got {run!r}: pass WandB(wandb.init(...))")
        if find_spec("wandb") is None:
            raise ModuleNotFoundError("the WandB sink needs wandb: pip install 'castwise[wandb]'")
        self._given = run
        self._run: Any = None
        self._is_ours = False
        self._row: tuple[int, int] | None = None  # the run's counter and the training step that were logged last

    def write_record(self, record: Record) -> None:
        """Log a record.

        Args:
            record: The record.
        """
        if self._run is None:
            self._begin()
        summary = self._run.summary
        if isinstance(record, RunRecord):
            self._run.config.update({"castwise": {**record.versions, **record.settings}}, allow_val_change=True)
        elif isinstance(record, StepRecord):
            self._log(of_step(record), record.step)
            if record.skipped:
                summary["castwise/last skip"] = f"step {record.step}: {record.skip_in_words}"
        elif isinstance(record, SampleRecord):
            self._log_sample(record)
        elif isinstance(record, DiagnosisRecord):
            summary["castwise/last diagnosis"] = f"step {record.step}: {record.with_advice}"
        elif isinstance(record, EndRecord):
            self.close()

    def close(self) -> None:
        """Finish the run if this sink started it. A later record starts another run."""
        if self._run is not None and self._is_ours:
            self._run.finish()
        self._run = self._row = None

    def __repr__(self) -> str:
        return "WandB()" if self._given is None else f"WandB(run {self._given.id})"

    def _begin(self) -> None:
        import wandb

        active = self._given or wandb.run
        self._is_ours = active is None
        self._run = active or wandb.init()
        self._run.define_metric(_STEP, hidden=True)
        self._run.define_metric("castwise/*", step_metric=_STEP)

    def _log_sample(self, record: SampleRecord) -> None:
        spreads = of_sample(record)
        values: dict[str, Any] = {**norm_of_sample(record)}
        values |= {f"{each.group}/{each.name}": each.worst_value for each in spreads}
        values |= {f"{each.group}/all {each.name}": _drawn(each.histogram()) for each in spreads}
        of_gradients = exponents(record.modules.values())
        if of_gradients is not None:
            values["gradients/log2"] = _drawn(of_gradients)
        self._log(values, record.step)
        self._run.summary["castwise/worst"] = {f"{each.group} {each.name}": each.worst for each in spreads}

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        """Add values to the run's current row, which the script's next log or that of the next step completes."""
        if self._row is not None and self._row[0] == self._run.step and self._row[1] != step:
            self._run.log({}, commit=True)
        self._run.log({_STEP: step, **{f"castwise/{name}": value for name, value in values.items()}}, commit=False)
        self._row = self._run.step, step


def _drawn(histogram: Histogram) -> Any:
    import numpy as np
    import wandb

    return wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges)))
