"""What a monitor has recorded is read back from the file that Weights & Biases writes offline."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.recorded import sample, step
from torch import nn

import castwise
from castwise.integrations import wandb as sink_module
from castwise.integrations.wandb import WandB
from castwise.monitor._curves import of_sample, of_step
from castwise.monitor._records import SampleRecord, StepRecord

Record = dict[str, Any]
STEP = "castwise/number of step"


@pytest.fixture(autouse=True)
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Weights & Biases without a network, in its own folder."""
    settings = {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false", "CONSOLE": "off", "DIR": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    import wandb

    yield wandb
    wandb.teardown()  # the settings are read once


def written(folder: Path) -> list[Any]:
    """The records in the file of the only run: blocks of a LevelDB log, each record in one part or more."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record as Message

    wandb.teardown()  # `finish` does not wait for the file
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15  # a part does not begin in the last bytes of a block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # the only part, or the last one
            found.append(Message.FromString(whole))
            whole = b""
    return found


def items(entries: Any) -> Record:
    return {".".join([each.key] if each.key else each.nested_key): json.loads(each.value_json) for each in entries}


def history(folder: Path) -> list[Record]:
    return [items(each.history.item) for each in written(folder) if each.WhichOneof("record_type") == "history"]


def latest(folder: Path, what: str) -> Record:
    """The config or the summary that the run ended with."""
    found: Record = {}
    for each in written(folder):
        if each.WhichOneof("record_type") in (what, "run"):
            part = each.run.config if each.WhichOneof("record_type") == "run" else getattr(each, what)
            found |= items(part.update)
    return found


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(each[STEP], each[f"castwise/{name}"]) for each in history(folder) if f"castwise/{name}" in each]


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


def test_the_file_holds_every_number_of_the_records(tmp_path: Path, wandb: Any) -> None:
    records: list[Record] = []
    train([records.append, WandB()])
    assert wandb.run is None  # finished
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        numbers = of_step(StepRecord.from_json(record)) if record["kind"] == "step" else {}
        if record["kind"] == "sample":
            spreads = of_sample(SampleRecord.from_json(record))
            numbers = {f"{each.group}/{each.name}": each.worst_value for each in spreads}
        for name, value in numbers.items():
            expected.setdefault(name, []).append((record["step"], value))
    assert {
        "step/loss",
        "gradients/flush fp16",
        "outputs/headroom_bits e5m2",
        "updates/lost_in_bf16",
    } <= expected.keys()
    for name, points in expected.items():
        found = [(number, float(value)) for number, value in curve(tmp_path, name)]
        assert [number for number, _ in found] == [number for number, _ in points], name
        assert [value for _, value in found] == pytest.approx([value for _, value in points], nan_ok=True), name
    assert [value for _, value in curve(tmp_path, "step/skipped")] == [0, 0, 0, 1, 0]


def test_curves_are_drawn_over_the_number_of_the_step(tmp_path: Path) -> None:
    train([WandB()])
    metrics = [each.metric for each in written(tmp_path) if each.WhichOneof("record_type") == "metric"]
    assert [each.step_metric for each in metrics if each.glob_name == "castwise/*"] == [STEP]


def test_settings_are_config_and_skips_and_diagnoses_are_in_the_summary(tmp_path: Path) -> None:
    records: list[Record] = []
    train([records.append, WandB()])
    about = next(record for record in records if record["kind"] == "run")
    settings = latest(tmp_path, "config")["castwise"]
    assert settings == {**about["settings"], **{name: about[name] for name in ("castwise", "torch", "device")}}
    summary = latest(tmp_path, "summary")
    assert summary["castwise/last skip"].startswith("step 4: non-finite loss 0.weight")
    diagnosis = next(record for record in records if record["kind"] == "diagnosis")
    text = f"step 4: {diagnosis['text']}\n\n{diagnosis['advice']}"
    assert summary["castwise/last diagnosis"] == text
    assert summary["castwise/worst"]["gradients flush e4m3"] in {"0", "2"}


def test_a_large_model_has_few_numbers_and_histograms_of_the_rest(tmp_path: Path) -> None:
    sink = WandB()
    names = [f"blocks.{index}" for index in range(300)]
    gradients = {name: -20 - index / 30 for index, name in enumerate(names)}
    sink.write_record(StepRecord.from_json(step(1, 1024.0)))
    record = sample(1, 1024.0, gradients, dict.fromkeys(names, 1.0))
    sink.write_record(SampleRecord.from_json(record))
    sink.close()
    keys = {key for row in history(tmp_path) for key in row if key.startswith("castwise/") and key != STEP}
    histograms = {key.removesuffix("._type") for key in keys if key.endswith("._type")}
    assert len([key for key in keys if not key.startswith(tuple(histograms))]) == 23
    assert len(histograms) == 19
    (row,) = [row for row in history(tmp_path) if "castwise/gradients/flush fp16" in row]
    assert sum(row["castwise/gradients/all flush fp16.values"]) == 300
    assert row["castwise/gradients/log2.bins"][0] == record["modules"]["blocks.299"]["exponents"]["lowest"]
    assert latest(tmp_path, "summary")["castwise/worst"]["gradients flush fp16"] == "blocks.299"


def test_the_run_that_is_active_is_used_and_goes_on(tmp_path: Path, wandb: Any) -> None:
    run = wandb.init()
    train([WandB()])
    assert wandb.run is run
    run.log({"accuracy": 0.5})
    run.finish()
    assert len(curve(tmp_path, "step/scale")) == 5
    assert [row["accuracy"] for row in history(tmp_path) if "accuracy" in row] == [0.5]


@pytest.mark.parametrize(("every", "numbered"), [(1, True), (1, False), (3, True)])
def test_what_the_script_logs_is_kept_with_its_numbers(tmp_path: Path, wandb: Any, every: int, numbered: bool) -> None:
    """W&B drops what is logged with a step below its counter."""
    run, sink = wandb.init(), WandB()
    ranges = sample(0, 1024.0, {"a": -20.0}, {"a": 1.0})
    for number in range(1, 10):
        sink.write_record(SampleRecord.from_json({**ranges, "step": number}))
        sink.write_record(StepRecord.from_json(step(number, 1024.0)))
        if number % every == 0:
            run.log({"mine": number}, step=number if numbered else None)
    sink.close()
    run.finish()
    rows = history(tmp_path)
    mine = [(row["mine"], row["_step"]) for row in rows if "mine" in row]
    assert [value for value, _ in mine] == list(range(every, 10, every))
    assert not numbered or all(value == at for value, at in mine)
    assert [number for number, _ in curve(tmp_path, "step/scale")] == list(range(1, 10))
    assert [number for number, _ in curve(tmp_path, "gradients/flush fp16")] == list(range(1, 10))


def test_a_run_that_is_finished_ends_the_sink_and_not_the_training(wandb: Any) -> None:
    run = wandb.init(id="over")
    run.finish()
    with pytest.warns(RuntimeWarning, match=r"sink WandB\(run over\) failed and was removed"):
        train([WandB(run)])


def test_what_is_no_run_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        TypeError, match=r"run must be a run from wandb.init.* got 'gpt': pass WandB\(wandb.init\(\.\.\.\)\)$"
    ):
        WandB("gpt")  # type: ignore[arg-type]


def test_without_wandb_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'castwise\[wandb\]'"):
        WandB()
