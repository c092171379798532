"""A monitor's records as metrics, parameters and texts of an MLflow run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import count
from typing import Any

from castwise.monitor.curves import norm_of_sample, of_step

# The server is asked as often, or when a request is full, and not once for each number.
_SECONDS_BETWEEN_REQUESTS = 10.0
_REFUSED = re.compile(r"[^0-9A-Za-z_. -]")
_WHOLE_MODEL = "whole model"


class MLflow:
    """A sink of `Monitor` that logs to MLflow: needs the extra `castwise[mlflow]`.

    Metrics of each step are `step/scale`, `step/loss`, `step/grad_norm` (of clipped and of sampled steps),
    `step/seconds` and `step/skipped` (0 or 1). Of sampled steps, for each module: `flush <format>/<module>` and
    `headroom_bits <format>/<module>` of its gradients, `activation flush <format>/<module>` and
    `activation headroom_bits <format>/<module>` of its outputs, and for each parameter `update_to_weight/<parameter>`
    and `lost_in_bf16/<parameter>`. The settings of the training are parameters of the MLflow run, `castwise/<setting>`;
    one that it has already stays as it is. The tag `castwise.last_skip` says which step was skipped last, and why. Each
    diagnosis is a text among the artifacts, in `castwise`.

    What MLflow does not take in a name becomes `_`, names that are equal then are numbered, and the model itself is
    `whole model`. Numbers that are not finite are handed over as they are.

    Numbers are sent in batches: when there are as many as MLflow takes in one, ten seconds after the last ones, with
    each sample, and at the end. A process that is killed loses those that were not sent yet. Without a server MLflow
    itself can write to a folder (`MLFLOW_TRACKING_URI=file:...` and `MLFLOW_ALLOW_FILE_STORE=true`), or with more than
    the extra installs (all of `mlflow`) to SQLite.

    Args:
        run_id: The MLflow run to log to. By default it is the one that is active when the first record comes
            (`mlflow.start_run()`); if there is none, one is started then, and ended at the monitor's end.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None) -> None:
        if find_spec("mlflow") is None:
            raise ModuleNotFoundError("the MLflow sink needs mlflow: pip install 'castwise[mlflow]'")
        self._given = run_id
        self._run: _Run | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record, and send what is there if it is time to."""
        if self._run is None:
            self._run = _Run(self._given)
        self._run.take(record)
        if record["kind"] == "end":
            self.close()

    def close(self) -> None:
        """Send what is left, and end the run if this sink has started it; a later record begins another one."""
        if self._run is not None:
            self._run.send()
            self._run.end()
            self._run = None

    def __repr__(self) -> str:
        return f"MLflow({self._given!r})" if self._given else "MLflow()"


class _Run:
    """An MLflow run, and what has not been sent to it yet."""

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

    def take(self, record: Mapping[str, Any]) -> None:
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        kind, step = record["kind"], record.get("step", 0)
        if kind == "run":
            self._log_settings(record)
        elif kind == "step":
            self._add(of_step(record).items(), step)
            if record["skipped"]:
                self._tags["castwise.last_skip"] = f"step {step}: {record['cause']} {' '.join(record['parameters'])}"
        elif kind == "sample":
            self._add(_of_sample(record), step)
        elif kind == "diagnosis":
            text = f"{record['text']}\n\n{record['advice']}"
            self._client.log_text(self._id, text, f"castwise/diagnosis of step {step}.txt")
        is_time = time.monotonic() - self._sent_at > _SECONDS_BETWEEN_REQUESTS
        if kind == "sample" or is_time or len(self._metrics) >= MAX_METRICS_PER_BATCH:
            self.send()

    def _add(self, curves: Iterable[tuple[str, float]], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(self._names.of(name), value, now, step) for name, value in curves]

    def _log_settings(self, record: Mapping[str, Any]) -> None:
        """Log the settings of the training run that MLflow does not have yet: it lets no parameter change."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        known = self._client.get_run(self._id).data.params
        settings = {name: record[name] for name in ("castwise", "torch", "device") if name in record}
        values = {
            self._names.of(f"castwise/{name}"): value for name, value in {**settings, **record["settings"]}.items()
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
    """Names as MLflow takes them: each of its own, and the same every time."""

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
        rest = rest.replace(".", "_")  # it would be a folder
    for number in count(1):
        suffix = f" {number}" if number > 1 else ""
        yield f"{group}/{rest}"[: MAX_ENTITY_KEY_LENGTH - len(suffix)] + suffix


def _of_sample(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each metric: MLflow has no histograms, so each module has its own."""
    yield from norm_of_sample(record).items()
    for prefix, kind in (("", "modules"), ("activation ", "activations")):
        for module, statistics in record[kind].items():
            for number_format, fit in statistics["formats"].items():
                for name in ("flush", "headroom_bits"):
                    yield f"{prefix}{name} {number_format}/{module}", fit[name]
    for parameter, facts in record["weights"].items():
        for name, value in facts.items():
            yield f"{name}/{parameter}", value
