"""Log a monitor's records as metrics, parameters and texts of an MLflow run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import count
from typing import Any

from castwise.monitor._curves import norm_of_sample, of_step
from castwise.monitor._records import DiagnosisRecord, EndRecord, Record, RunRecord, SampleRecord, StepRecord

__all__ = ["MLflow"]

# Numbers are sent at this interval, or earlier if a request is full.
_SECONDS_BETWEEN_REQUESTS = 10.0
_REFUSED = re.compile(r"[^0-9A-Za-z_. -]")
_WHOLE_MODEL = "whole model"


class MLflow:
    """A sink of `Monitor` that logs to MLflow. Requires the extra `castwise[mlflow]`.

    The metrics of each step are `step/scale`, `step/loss`, `step/grad_norm` (of clipped and of sampled steps),
    `step/seconds` and `step/skipped` (0 or 1). Sampled steps have `flush <format>/<module>` and
    `headroom_bits <format>/<module>` for each module's gradients, `activation flush <format>/<module>` and
    `activation headroom_bits <format>/<module>` for its outputs, and `update_to_weight/<parameter>` and
    `lost_in_bf16/<parameter>` for each parameter. The training settings become parameters of the MLflow run,
    `castwise/<setting>`; existing ones are not changed. The tag `castwise.last_skip` has the last skipped step and its
    cause. Each diagnosis is a text artifact in `castwise`.

    Characters that MLflow does not allow in names become `_`, names that are then equal are numbered, and the model
    itself is called `whole model`. Non-finite numbers are passed on unchanged.

    Numbers are sent in batches: when MLflow's limit for a batch is reached, every ten seconds, with each sample, and at
    the end. A killed process loses numbers that were not sent yet. MLflow can also write without a server: to a folder
    (`MLFLOW_TRACKING_URI=file:...` and `MLFLOW_ALLOW_FILE_STORE=true`), or to SQLite if the full `mlflow` package is
    installed, which the extra does not include.

    Args:
        run_id: The MLflow run to log to. By default, the run that is active when the first record arrives
            (`mlflow.start_run()`). If there is none, a run is started then, and ended with the monitor.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None) -> None:
        if find_spec("mlflow") is None:
            raise ModuleNotFoundError("the MLflow sink needs mlflow: pip install 'castwise[mlflow]'")
        self._given = run_id
        self._run: _Run | None = None

    def write_record(self, record: Record) -> None:
        """Log a record, and send the pending numbers if it is time.

        Args:
            record: The record.
        """
        if self._run is None:
            self._run = _Run(self._given)
        self._run.take(record)
        if isinstance(record, EndRecord):
            self.close()

    def close(self) -> None:
        """Send the pending numbers, and end the run if this sink started it. A later record starts another run."""
        if self._run is not None:
            self._run.send()
            self._run.end()
            self._run = None

    def __repr__(self) -> str:
        return f"MLflow({self._given!r})" if self._given else "MLflow()"


class _Run:
    """An MLflow run, and the numbers that were not sent to it yet."""

    def __init__(self, run_id: str | None) -> None:
        import mlflow

        active = mlflow.active_run()
        self._is_ours = run_id is None and active is None
        self._id = run_id or (active or mlflow.start_run()).info.run_id
        self._client = mlflow.MlflowClient()
        self._names = _Names()
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}
        self._sent_at = time.monotonic()

    def take(self, record: Record) -> None:
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        is_sample = isinstance(record, SampleRecord)
        if isinstance(record, RunRecord):
            self._log_settings(record)
        elif isinstance(record, StepRecord):
            self._add(of_step(record).items(), record.step)
            if record.skipped:
                self._tags["castwise.last_skip"] = f"step {record.step}: {record.skip_in_words}"
        elif isinstance(record, SampleRecord):
            self._add(_of_sample(record), record.step)
        elif isinstance(record, DiagnosisRecord):
            self._client.log_text(self._id, record.with_advice, f"castwise/diagnosis of step {record.step}.txt")
        is_time = time.monotonic() - self._sent_at > _SECONDS_BETWEEN_REQUESTS
        if is_sample or is_time or len(self._metrics) >= MAX_METRICS_PER_BATCH:
            self.send()

    def _add(self, curves: Iterable[tuple[str, float]], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(self._names.of(name), value, now, step) for name, value in curves]

    def _log_settings(self, record: RunRecord) -> None:
        """Log the training settings that the MLflow run lacks. MLflow does not allow parameters to change."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        known = self._client.get_run(self._id).data.params
        values = {
            self._names.of(f"castwise/{name}"): value for name, value in {**record.versions, **record.settings}.items()
        }
        params = [Param(name, str(value)[:MAX_PARAM_VAL_LENGTH]) for name, value in values.items() if name not in known]
        self._client.log_batch(self._id, params=params)

    def send(self) -> None:
        from mlflow.entities import RunTag
        from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

        tags = [RunTag(name, text[:MAX_TAG_VAL_LENGTH]) for name, text in self._tags.items()]
        metrics, self._metrics, self._tags, self._sent_at = self._metrics, [], {}, time.monotonic()
        self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def end(self) -> None:
        if not self._is_ours:
            return
        import mlflow

        active = mlflow.active_run()
        if active is not None and active.info.run_id == self._id:
            mlflow.end_run()
        else:
            self._client.set_terminated(self._id)


class _Names:
    """Maps names to unique names that MLflow accepts, always the same for each name."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._of:
            self._of[name] = taken = next(each for each in _candidates(name) if each not in self._taken)
            self._taken.add(taken)
        return self._of[name]


def _candidates(name: str) -> Iterator[str]:
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH

    group, _, rest = name.partition("/")
    rest = _REFUSED.sub("_", rest) or _WHOLE_MODEL
    if not rest.strip("."):
        rest = rest.replace(".", "_")  # "." and ".." would be folders
    for number in count(1):
        suffix = f" {number}" if number > 1 else ""
        yield f"{group}/{rest}"[: MAX_ENTITY_KEY_LENGTH - len(suffix)] + suffix


def _of_sample(record: SampleRecord) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each metric, separately for each module, because MLflow has no histograms."""
    yield from norm_of_sample(record).items()
    for prefix, modules in (("", record.modules), ("activation ", record.activations)):
        for module, stats in modules.items():
            for number_format, fit in stats.formats.items():
                yield f"{prefix}flush {number_format}/{module}", fit.flush
                yield f"{prefix}headroom_bits {number_format}/{module}", fit.headroom_bits
    for parameter, update in record.weights.items():
        yield f"update_to_weight/{parameter}", update.update_to_weight
        yield f"lost_in_bf16/{parameter}", update.lost_in_bf16
