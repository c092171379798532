"""`castwise doctor`."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from typer.testing import CliRunner

import castwise
from castwise._cli import app
from castwise._doctor import checkup
from castwise.amp._emulation import is_native_here


def run(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *options])
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def _in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "BUDGET_S", 0.2)


def test_it_prints_what_each_device_computes_and_what_to_train_with() -> None:
    code, printed = run()
    assert code == 0
    assert printed.startswith(f"castwise {castwise.__version__}, torch {torch.__version__}")
    assert f" {torch.get_num_threads()} thread" in f" {printed}".replace("\n", " ")
    computed = {True: "in hardware", False: "emulated", None: "unknown"}
    lines = printed.partition("cpu: ")[2].partition("policy")[0].splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  ") and line.split()}
    assert "in hardware" in rows["fp32"]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert computed[is_native_here(dtype)] in rows[name]
        assert any(word in rows[name] for word in ("faster", "as fast", "slower", "too noisy to tell"))
    assert "policy    castwise.policies." in printed or "policy    none: stay in fp32" in printed
    assert "schedule  castwise.schedules." in printed or "schedule  none: no scaler" in printed
    source = "tests/doctor/test_notes.py]" if torch.__version__ >= (2, 13) else "castwise/_torch_private.py;"
    assert f"[{source}" in printed


def test_it_shows_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[str] = []
    shown = contextlib.nullcontext(lambda what, done, total: progress.append(what))
    monkeypatch.setattr("castwise._cli.doctor_command.progress_bar", lambda: shown)
    run()
    assert progress[0].startswith("cpu: fp32")


def test_as_json_it_is_the_same_facts_and_nothing_else() -> None:
    code, printed = run("--json")
    assert code == 0
    found = json.loads(printed)
    assert list(found) == ["castwise", "torch", "python", "platform", "devices", "notes"]
    assert found["castwise"] == castwise.__version__
    assert found["torch"] == torch.__version__


def test_what_cannot_be_asked_exits_with_2() -> None:
    code, printed = run("--fast")
    assert code == 2
    assert "no such option: --fast" in printed
