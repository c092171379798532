"""Results: JSON that can be read again, and a page that is made from it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.benchmark import Benchmark, Record, Table
from benchmarks.catalogue import BENCHMARKS

from benchmarks import machine, recording

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Plan:
    rounds: int


TOY = Benchmark(
    name="toy",
    title="Toys",
    about="What a toy costs.",
    quick=Plan(1),
    full=Plan(2),
    measure=lambda device, plan: {"rows": {"a": plan.rounds}},
    tables=lambda record: [Table(["", "rounds"], [[name, str(n)] for name, n in record["rows"].items()], above="Of:")],
)


def toy_record(**more: object) -> Record:
    return {"machine": machine.machine("cpu", "python -m benchmarks"), **TOY.measure("cpu", TOY.quick), **more}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = toy_record(floats=[0.1, 1e-300, 1 / 3], nothing=None)
    recording.write_result(tmp_path, "toy-cpu.json", record, [TOY])
    assert json.loads((tmp_path / "toy-cpu.json").read_text()) == record
    assert sorted(os.listdir(tmp_path)) == ["README.md", "toy-cpu.json"]


def test_the_page_has_a_section_for_each_result_in_the_folder(tmp_path: Path) -> None:
    record = toy_record()
    recording.write_result(tmp_path, "toy-cpu.json", record, [TOY, *BENCHMARKS])
    text = (tmp_path / "README.md").read_text()
    assert text.endswith(
        "\n## Toys: `toy`\n\nWhat a toy costs.\n\n"
        f"{recording.headline(record['machine'])}\n\nOf:\n\n| | rounds |\n|---|---|\n| a | 1 |\n"
    )
    assert text.count("## ") == 1


def test_the_machine_is_recorded_with_versions_date_and_command() -> None:
    about = machine.machine("cpu", "python -m benchmarks")
    assert list(about) == ["device", "cores", "threads", "python", "torch", "castwise", "date", "command"]
    assert all(about.values())
    assert recording.headline(about).endswith(f"{about['date']}, `python -m benchmarks`:")


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        (SimpleNamespace(name="benchmarks.tune"), "python -m benchmarks.tune --seeds 2"),
        (None, "python x/tune.py --seeds 2"),
    ],
)
def test_the_command_of_a_script_repeats_it(spec: object, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["x/tune.py", "--seeds", "2"])
    assert recording.machine()["command"] == command


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": {}}', '{"machine": 1, "rows": 2}', '"text"', "\x00"])
def test_a_file_of_another_kind_is_named_and_the_rest_is_shown(tmp_path: Path, content: str) -> None:
    (tmp_path / "toy-cuda.json").write_text(content)
    recording.write_result(tmp_path, "toy-cpu.json", toy_record(), [TOY])
    text = (tmp_path / "README.md").read_text()
    assert "toy-cuda.json was not written by this version: run `python -m benchmarks --only toy` again." in text
    assert "| a | 1 |" in text


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording.write_result(tmp_path, "toy-cpu.json", toy_record(), [TOY])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        recording.write_result(tmp_path, "toy-cpu.json", toy_record(more=1), [TOY])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_with_other_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "toy-cpu.json").write_text("mine")
    with pytest.raises(FileExistsError, match="it exists and is not a result that castwise has written"):
        recording.write_result(tmp_path, "toy-cpu.json", toy_record(), [TOY])
    assert (tmp_path / "toy-cpu.json").read_text() == "mine"


def test_what_needs_more_memory_than_there_is_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda device: 3 * 2**30)
    assert machine.why_it_does_not_fit(2**40, "cpu") == "left out: needs 1024.0 GiB of memory, 3.0 GiB are free"
    assert machine.why_it_does_not_fit(2**20, "cpu") is None
    monkeypatch.setattr(machine, "free_bytes", lambda device: None)
    assert machine.why_it_does_not_fit(2**40, "cpu") is None


def test_the_least_of_all_limits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, limit, taken = (tmp_path / name for name in ("meminfo", "limit", "taken"))
    monkeypatch.setattr(machine.gc, "collect", lambda: None)  # of all tests' garbage
    memory.write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    monkeypatch.setattr(machine, "_MEMORY", memory)
    monkeypatch.setattr(machine, "_GROUPS", [(str(limit), str(taken))])
    assert machine.free_bytes("cpu") == 2048 * 1024
    limit.write_text("max\n")
    taken.write_text("1000\n")
    assert machine.free_bytes("cpu") == 2048 * 1024
    limit.write_text("5000\n")
    assert machine.free_bytes("cpu") == 4000


def test_doubts_are_counted_wherever_they_are() -> None:
    unclear, clear = {"verdict": "cannot tell", "null": {"median": 1.0}}, {"verdict": "faster"}
    assert recording.doubt({"rows": [{"a": unclear}, {"b": clear}]}) == "cannot tell in 1 of 2 comparisons"
    assert recording.doubt({"rows": [{"b": clear}]}) is None


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    page = recording.page(COMMITTED, BENCHMARKS)
    assert (COMMITTED / "README.md").read_text() == page
    assert page.count("\n## ") == len(BENCHMARKS)
    assert "was not written by this version" not in page
    assert page.count("`python -m benchmarks --full") == page.count(", torch ") == len(BENCHMARKS)
