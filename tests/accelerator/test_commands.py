"""The commands, with models and scripts on an accelerator."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.accelerator.availability import DEVICE, IS_SIMULATED, simulated
from tests.accelerator.training import castwise_command
from typer.testing import CliRunner

from castwise._cli import app
from castwise._doctor import checkup

MODELS = """
import torch
from tests.accelerator.training import DEVICE, batches, net


def make():
    return net().to(DEVICE)


def with_batch():
    return make(), batches(1)[0]


def task():
    zeros = torch.zeros(4, 4, device=DEVICE)
    return make(), [(x, zeros) for x in batches(3)], lambda out, target: (out - target).square().mean()
"""
SCRIPT = """
import torch
from tests.accelerator.training import DEVICE, net

model = net().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
torch.manual_seed(1)
for step in range(6):
    x = torch.randn(4, 8).to(DEVICE)
    if step == 3:
        x = x * 5e4
    with torch.autocast(DEVICE, dtype=torch.float16):
        loss = model(x).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print("scale", scaler.get_scale())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def output_of(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def test_doctor_measures_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "BUDGET_S", 0.2)
    found = json.loads(output_of("doctor", "--json"))
    names = [device["device"] for device in found["devices"]]
    assert names == ["cpu", *(f"{DEVICE}:{index}" for index in range(torch.accelerator.device_count()))]
    speeds = [{row["format"]: row["gflops"] for row in device["formats"]} for device in found["devices"]]
    assert all(of_device["fp32"]["median"] > 0.0 for of_device in speeds)
    text = output_of("doctor")
    assert all(name in text for name in names)


@pytest.mark.usefixtures("folder")
def test_trace_compare_and_tune_run_a_model_where_it_is() -> None:
    trace = json.loads(output_of("trace", "--model", "models.py:with_batch", "--policy", "fp16", "--json"))
    assert "float16" in str(trace["ops"])
    drift = json.loads(output_of("compare", "--model", "models.py:task", "--policy", "bf16", "--json"))
    assert "bf16" in str(drift)
    output_of("tune", "--model", "models.py:task", "-o", "policy.toml", "--tolerance", "0.5")
    assert "16" in Path("policy.toml").read_text()


@pytest.mark.usefixtures("folder")
def test_a_run_of_an_unchanged_script_is_diagnosed_shown_and_replayed() -> None:
    run = castwise_command("run", "--every", "1", "train.py", cwd=Path.cwd())
    assert (run.returncode, run.stdout) == (0, "scale 512.0\n"), run.stderr
    assert "skipped: 1" in run.stderr
    assert 'castwise.autocast("sim", ' in run.stderr or not IS_SIMULATED
    assert "Tried on the batch of step 4: finite." in run.stderr
    (capsule,) = Path.cwd().glob("castwise-run/*/*/capsule-4.safetensors")
    replayed = output_of("diagnose", str(capsule), "--model", "models.py:make")
    assert "forward: 0: aten.to gives inf" in replayed
    assert "gave the bits of the run" in replayed
    assert f'castwise.autocast("{DEVICE}", policy=' in output_of("fix", exit_code=1)  # an edit to be made by hand
    assert "step 6, 1 skipped, ended" in output_of("watch", "--once")
    if find_spec("plotly"):  # which a machine with a GPU may lack
        assert "report.html" in output_of("report")


@simulated
def test_the_demo_names_the_devices_that_it_has() -> None:
    assert "--device must be cpu or cuda" in output_of("demo", "--device", DEVICE, exit_code=2)
