"""`castwise bench`: what it writes, and what it says when it cannot."""

from __future__ import annotations

import contextlib
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
from typer.testing import CliRunner

from castwise.bench import catalogue
from castwise.bench.benchmark import Benchmark, Record, Table
from castwise.cli import app


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


def run(*options: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, options)])
    return result.exit_code, result.output


def results(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_it_writes_and_prints_each_benchmark_with_machine_versions_and_command(tmp_path: Path) -> None:
    code, printed = run("--device", "cpu", "--out", tmp_path / "new" / "folder")
    assert code == 0
    found = results(tmp_path / "new" / "folder")
    assert sorted(found) == ["one-cpu", "two-cpu"]
    about = found["one-cpu"]["machine"]
    assert about["command"] == "castwise bench --quick --device cpu"
    assert about["torch"] == torch.__version__
    assert found["one-cpu"]["rows"] == [{"verdict": "faster", "plan": "short", "device": "cpu"}]
    assert f"torch {torch.__version__}, Python " in " ".join(printed.split())
    assert "About one: one" in printed
    assert "short" in printed
    assert "| short | cannot tell |" in (tmp_path / "new" / "folder" / "README.md").read_text()


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed == {"one": results(tmp_path)["one-cpu"], "two": results(tmp_path)["two-cpu"]}


def test_it_shows_which_benchmark_is_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    shown = contextlib.nullcontext(lambda *progress: told.append(progress))
    monkeypatch.setattr("castwise.cli.bench.progress_bar", lambda: shown)
    run("--device", "cpu", "--out", tmp_path)
    assert told == [("one", 0, 2), ("two", 1, 2)]


def test_full_and_only(tmp_path: Path) -> None:
    code, _ = run("--full", "--only", "two", "--device", "cpu", "--out", tmp_path)
    found = results(tmp_path)
    assert code == 0
    assert list(found) == ["two-cpu"]
    assert found["two-cpu"]["machine"]["command"] == "castwise bench --full --device cpu --only two"
    assert found["two-cpu"]["rows"][0]["plan"] == "long"


def test_it_warns_where_the_machine_is_too_noisy_to_tell(tmp_path: Path) -> None:
    _, printed = run("--device", "cpu", "--out", tmp_path)
    assert "warning: this machine is too noisy for some comparisons; stop other programs, or use --full" in printed
    assert "two: cannot tell in 1 of 1 comparisons" in printed
    assert "warning" not in run("--only", "one", "--device", "cpu", "--out", tmp_path)[1]


def test_a_name_that_there_is_not(tmp_path: Path) -> None:
    code, printed = run("--only", "onne", "--out", tmp_path / "none")
    assert code == 2
    assert printed == "castwise bench: --only must be one of one, two, got 'onne'; did you mean 'one'?\n"
    assert not (tmp_path / "none").exists()


def test_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--device", "tpu", "--out", tmp_path) == (
        2,
        "castwise bench: --device must be one of cpu, cuda, got 'tpu'\n",
    )
    assert run("--device", "cuda", "--out", tmp_path) == (
        2,
        "castwise bench: --device cuda: torch finds no CUDA device; omit the option or use --device cpu\n",
    )
    assert run("--only", "one", "--out", tmp_path)[0] == 0
    assert sorted(results(tmp_path)) == ["one-cpu"]


def test_a_page_of_somebody_elses_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    assert run("--device", "cpu", "--out", tmp_path) == (
        2,
        f"castwise bench: {tmp_path / 'README.md'} was not written by castwise bench: choose another --out\n",
    )
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, printed = run("--out", tmp_path / "file")
    assert code == 2
    assert printed == f"castwise bench: cannot write {tmp_path / 'file'}: File exists\n"


def test_a_benchmark_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalogue, "BENCHMARKS", (toy("bad", error=RuntimeError("no such kernel")), toy("good")))
    code, printed = run("--device", "cpu", "--out", tmp_path)
    assert code == 1
    assert "castwise bench: bad failed:\nTraceback" in printed
    assert "RuntimeError: no such kernel" in printed
    assert list(results(tmp_path)) == ["good-cpu"]


def test_ctrl_c_keeps_what_was_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalogue, "BENCHMARKS", (toy("one"), toy("two", error=KeyboardInterrupt()), toy("three")))
    before = signal.getsignal(signal.SIGINT)
    try:
        code, printed = run("--device", "cpu", "--out", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert f"castwise bench: stopped; finished results are in {tmp_path}\n" in printed
    assert "Traceback" not in printed
    assert sorted(os.listdir(tmp_path)) == ["README.md", "one-cpu.json"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "castwise", "bench", "--only", "scale_out", "--out", str(tmp_path)]
    # A process that a shell has started in the background does not hear it.
    hear_ctrl_c = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_ctrl_c)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(2):  # until the first benchmark has been announced
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    # Python ends by the signal, which is 130 to a shell too, if it was caught after it had come in `exec("...")`.
    assert process.returncode in {130, -signal.SIGINT}
    assert errors == f"castwise bench: stopped; finished results are in {tmp_path}\n"
    assert os.listdir(tmp_path) == []
