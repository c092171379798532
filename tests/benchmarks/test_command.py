"""`python -m benchmarks`: what it writes, and what it says when it cannot."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.benchmark import Benchmark, Record, Table

from benchmarks import catalogue

ROOT = Path(__file__).parents[2]


def toy(name: str, verdict: str = "faster", error: BaseException | None = None) -> Benchmark[str]:
    def measure(device: str, plan: str) -> Record:
        if error is not None:
            raise error
        return {"rows": [{"verdict": verdict, "plan": plan, "device": device}]}

    def tables(record: Record) -> list[Table]:
        return [Table(["", "verdict"], [[row["plan"], row["verdict"]] for row in record["rows"]])]

    return Benchmark(name, f"About {name}", "Nothing.", "short", "long", measure, tables)


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "BENCHMARKS", (toy("one"), toy("two", verdict="cannot tell")))


def run(*options: object) -> int:
    return main([str(option) for option in options])


def results(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_it_writes_and_prints_each_benchmark_with_machine_versions_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    assert run("--device", "cpu", "--out", folder) == 0
    found = results(folder)
    assert sorted(found) == ["one-cpu", "two-cpu"]
    about = found["one-cpu"]["machine"]
    assert about["command"] == "python -m benchmarks --device cpu"
    assert about["torch"] == torch.__version__
    assert found["one-cpu"]["rows"] == [{"verdict": "faster", "plan": "short", "device": "cpu"}]
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}, Python " in printed
    assert "## About one: one\n\n| | verdict |\n|---|---|\n| short | faster |\n\nNothing. Took 0 s.\n" in printed
    assert "| short | cannot tell |" in (folder / "README.md").read_text()


def test_full_and_only(tmp_path: Path) -> None:
    assert run("--full", "--only", "two", "--device", "cpu", "--out", tmp_path) == 0
    found = results(tmp_path)
    assert list(found) == ["two-cpu"]
    assert found["two-cpu"]["machine"]["command"] == "python -m benchmarks --full --device cpu --only two"
    assert found["two-cpu"]["rows"][0]["plan"] == "long"


def test_it_warns_if_the_machine_is_too_noisy_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--device", "cpu", "--out", tmp_path)
    warning = capsys.readouterr().err
    assert "this machine is too noisy for some comparisons; stop other programs, or use --full" in warning
    assert "two: cannot tell in 1 of 1 comparisons" in warning
    run("--only", "one", "--device", "cpu", "--out", tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--only", "onne"], "argument --only: invalid choice: 'onne' (choose from "),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device; omit the option or use --device cpu"),
    ],
)
def test_wrong_options_are_explained_before_anything_is_written(
    options: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        run(*options, "--out", tmp_path / "none")
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_without_a_gpu_the_cpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--only", "one", "--out", tmp_path) == 0
    assert sorted(results(tmp_path)) == ["one-cpu"]


def test_another_page_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    assert run("--device", "cpu", "--out", tmp_path) == 2
    reason = "it exists and is not a page of results that castwise has written; move it or give another path"
    assert capsys.readouterr().err == f"cannot write {tmp_path / 'README.md'}: {reason}\n"
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_folder_that_cannot_be_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("--out", tmp_path / "file") == 2
    assert capsys.readouterr().err == f"cannot write {tmp_path / 'file'}: File exists\n"


def test_a_benchmark_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = (toy("bad", error=RuntimeError("no such kernel")), toy("worse", error=OSError("no such file")))
    monkeypatch.setattr(catalogue, "BENCHMARKS", (*bad, toy("good")))
    assert run("--device", "cpu", "--out", tmp_path) == 1
    errors = capsys.readouterr().err
    assert "bad failed:\nTraceback" in errors
    assert "RuntimeError: no such kernel" in errors
    assert "worse failed:\nTraceback" in errors
    assert list(results(tmp_path)) == ["good-cpu"]


def test_ctrl_c_keeps_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "BENCHMARKS", (toy("one"), toy("two", error=KeyboardInterrupt()), toy("three")))
    before = signal.getsignal(signal.SIGINT)
    try:
        code = run("--device", "cpu", "--out", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert capsys.readouterr().err == f"stopped; finished results are in {tmp_path}\n"
    assert sorted(os.listdir(tmp_path)) == ["README.md", "one-cpu.json"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "scale_out", "--out", str(tmp_path)]
    # A process that a shell has started in the background ignores the signal.
    hear_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_ctrl_c)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("## Ranks"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == f"stopped; finished results are in {tmp_path}\n"
    assert os.listdir(tmp_path) == []
