"""What a monitor has recorded is read back from MLflow's own store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.integrations import mlflow as sink_module
from castwise.integrations.mlflow import MLflow
from castwise.monitor._records import EndRecord, Exponents, FormatFit, RunRecord, SampleRecord, Stats, StepRecord

Record = dict[str, Any]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow with its own store in a folder, which it takes only on request."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    yield mlflow
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


def step(number: int, **fields: Any) -> StepRecord:
    return StepRecord(number, **{"scale": 2.0, "loss": 0.5, "seconds": 0.1, **fields})


def sample(number: int, *modules: str, flush: float = 0.25) -> SampleRecord:
    stats = Stats(1, 1.0, 1.0, 0.0, 0.0, Exponents(0, [1]), {"fp16": FormatFit(flush, 0.5, 3.0)})
    return SampleRecord(number, 1.0, modules=dict.fromkeys(modules, stats))


def curve(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def expected(records: list[Record]) -> dict[str, list[tuple[int, float]]]:
    """What is to be in the store, written down once more from what the records hold."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        number, found = record.get("step", 0), {}
        if record["kind"] == "step":
            found = {f"step/{name}": record[name] for name in ("scale", "loss", "grad_norm", "seconds", "skipped")}
        if record["kind"] == "sample":
            for what, prefix in (("modules", ""), ("activations", "activation ")):
                for module, statistics in record[what].items():
                    for each, fit in statistics["formats"].items():
                        for measure in ("flush", "headroom_bits"):
                            found[f"{prefix}{measure} {each}/{module or 'whole model'}"] = fit[measure]
            for parameter, facts in record["weights"].items():
                found.update({f"{name}/{parameter}": value for name, value in facts.items()})
        for name, value in found.items():
            if value is not None:
                curves.setdefault(name, []).append((number, float(value)))
    return curves


def train(sinks: list[Any], steps: int = 5) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.125), castwise.GradScaler("cpu", init_scale=1024.0)
    with castwise.Monitor(model, optimizer, scaler, every=2, sinks=sinks, on_nonfinite="diagnose"):
        for number in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(3, 4)
            if number == 3:
                inputs[0, 0] = math.nan
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()


def test_the_store_holds_every_number_of_the_records(mlflow: Any) -> None:
    records: list[Record] = []
    train([records.append, MLflow()])
    assert mlflow.active_run() is None
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.status == "FINISHED"
    curves = expected(records)
    assert set(run.data.metrics) == set(curves)
    for name, points in curves.items():
        found = curve(mlflow.MlflowClient(), run.info.run_id, name)
        assert str(found) == str(points), name  # where nan is nan
    assert [value for _, value in curves["step/skipped"]] == [0, 0, 0, 1, 0]
    assert math.isnan(curves["step/loss"][3][1])


def test_settings_are_parameters_and_skips_and_diagnoses_are_texts(mlflow: Any) -> None:
    records: list[Record] = []
    train([records.append, MLflow()])
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    about = next(record for record in records if record["kind"] == "run")
    settings = {**about["settings"], **{name: about[name] for name in ("castwise", "torch", "device")}}
    assert run.data.params == {f"castwise/{name}": str(value) for name, value in settings.items()}
    assert run.data.params["castwise/learning rate"] == "0.125"
    skipped = next(record for record in records if record["kind"] == "step" and record["skipped"])
    text = f"step 4: non-finite loss {' '.join(skipped['parameters'])}"
    assert run.data.tags["castwise.last_skip"] == text
    assert "0.weight" in text
    diagnosis = next(record for record in records if record["kind"] == "diagnosis")
    path = Path(client.download_artifacts(run.info.run_id, "castwise/diagnosis of step 4.txt"))
    assert path.read_text() == f"{diagnosis['text']}\n\n{diagnosis['advice']}"


def test_a_run_that_is_active_is_used_and_goes_on(mlflow: Any) -> None:
    with mlflow.start_run() as mine:
        train([MLflow()])
        mlflow.log_metric("accuracy", 0.5)
        assert mlflow.active_run().info.run_id == mine.info.run_id
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.run_id == mine.info.run_id
    assert {"accuracy", "step/loss"} <= run.data.metrics.keys()


def test_a_run_can_be_named_while_another_is_active(mlflow: Any) -> None:
    client = mlflow.MlflowClient()
    named = client.create_run("0").info.run_id
    with mlflow.start_run() as other:
        train([MLflow(named)])
    assert client.get_run(other.info.run_id).data.metrics == {}
    assert len(curve(client, named, "step/loss")) == 5
    assert client.get_run(named).info.status == "RUNNING"


def test_a_run_that_was_started_ends_also_inside_one_of_the_users(mlflow: Any) -> None:
    sink = MLflow()
    sink.write_record(step(1))
    started = mlflow.active_run().info.run_id
    with mlflow.start_run(nested=True) as inner:
        sink.close()
        assert mlflow.active_run().info.run_id == inner.info.run_id
    assert mlflow.MlflowClient().get_run(started).info.status == "FINISHED"


def test_many_numbers_take_few_requests(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.tracking.file_store import FileStore

    requests: list[tuple[int, int]] = []
    log_batch = FileStore.log_batch

    def counted(self: Any, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        requests.append((len(metrics), len(tags)))
        log_batch(self, run_id, metrics, params, tags)

    monkeypatch.setattr(FileStore, "log_batch", counted)
    sink = MLflow()
    for number in range(1, 301):
        sink.write_record(step(number, skipped=number in (2, 3), cause="overflow"))  # 4 numbers each
    first = [(999, 1), (1, 0)]  # MLflow takes 1000 of all kinds in one
    assert requests == first
    sink.write_record(sample(300, *(f"blocks.{index}" for index in range(100))))
    assert requests == [*first, (400, 0)]
    sink.write_record(EndRecord(300))
    assert requests == [*first, (400, 0)]
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert curve(mlflow.MlflowClient(), run.info.run_id, "step/loss") == [(number, 0.5) for number in range(1, 301)]


def test_what_has_waited_for_long_is_sent_with_the_next_step(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MLflow()
    sink.write_record(step(1))
    client, run_id = mlflow.MlflowClient(), mlflow.active_run().info.run_id
    assert client.get_run(run_id).data.metrics == {}
    monkeypatch.setattr(sink_module, "_SECONDS_BETWEEN_REQUESTS", 0.0)
    sink.write_record(step(2))
    assert curve(client, run_id, "step/loss") == [(1, 0.5), (2, 0.5)]


def test_numbers_that_are_not_finite_are_kept(mlflow: Any) -> None:
    sink = MLflow()
    for number, value in enumerate((math.nan, math.inf, -math.inf), start=1):
        sink.write_record(step(number, loss=value))
    sink.close()
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    found = curve(mlflow.MlflowClient(), run.info.run_id, "step/loss")
    assert str(found) == "[(1, nan), (2, inf), (3, -inf)]"


def test_names_that_mlflow_refuses_are_changed_and_stay_distinct(mlflow: Any) -> None:
    long = "a." * 200
    names = {
        "": "whole model",
        "..": "__",
        "a/b": "a_b",
        "a_b": "a_b 2",
        "é(x)": "__x_",
        "fine-0.weight": "fine-0.weight",
        long: long[:239],
        long + "b": long[:237] + " 2",
    }
    sink = MLflow()
    for number, name in enumerate(names, start=1):
        sink.write_record(sample(number, name, flush=number / 16))
    sink.write_record(sample(20, *names))  # the same names once more
    sink.close()
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    found = {name.removeprefix("flush fp16/") for name in run.data.metrics if name.startswith("flush")}
    assert found == set(names.values())
    for number, name in enumerate(names.values(), start=1):
        points = curve(mlflow.MlflowClient(), run.info.run_id, f"flush fp16/{name}")
        assert points == [(number, number / 16), (20, 0.25)]


def test_many_long_settings_fit(mlflow: Any) -> None:
    settings = {f"setting {number}": "x" * 10_000 for number in range(250)}
    sink = MLflow()
    sink.write_record(RunRecord(3, {**settings, "model": "GPT"}))
    sink.close()
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert Counter(map(len, run.data.params.values())) == {6000: 250, 3: 1}


def test_a_training_that_goes_on_in_the_same_run_changes_none_of_its_parameters(mlflow: Any) -> None:
    client = mlflow.MlflowClient()
    run_id = client.create_run("0").info.run_id
    for number, settings in ((1, {"ranks": 1}), (2, {"ranks": 2, "every": 5})):
        sink = MLflow(run_id)
        sink.write_record(RunRecord(3, settings))
        sink.write_record(step(number))
        sink.write_record(EndRecord(number))
    run = client.get_run(run_id)
    assert run.data.params == {"castwise/ranks": "1", "castwise/every": "5"}
    assert curve(client, run_id, "step/scale") == [(1, 2.0), (2, 2.0)]


def test_a_store_that_fails_ends_the_sink_and_not_the_training(mlflow: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"sink MLflow\('no-such-run'\) failed and was removed"):
        train([MLflow("no-such-run")])


def test_without_mlflow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'castwise\[mlflow\]'"):
        MLflow()
