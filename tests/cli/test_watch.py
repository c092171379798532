"""`castwise watch`: what it shows of runs that go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from castwise._cli import app, watch_command
from castwise._cli.watch_view import sparkline
from castwise.monitor import JSONL


def write_run(folder: Path, steps: int, *, ends: bool = True) -> None:
    with JSONL(folder) as sink:
        sink({"kind": "run", "format": 3, "settings": {"model": "Net"}})
        for step in range(1, steps + 1):
            loss = 9.0 if step == 80 else 1.0
            sink(
                {"kind": "step", "step": step, "scale": None, "skipped": False, "cause": None, "loss": loss, "lr": 0.5}
            )
        text, remedy = "the loss rose to 9 at step 80.", "Look at that batch."
        sink({"kind": "invariant", "step": 81, "name": "loss-spike", "text": text, "remedy": remedy})
        if ends:
            sink({"kind": "end", "step": steps})


def test_each_rank_is_shown_with_its_numbers_and_findings(tmp_path: Path) -> None:
    write_run(tmp_path / "Net", 100)
    write_run(tmp_path / "Net-rank1", 90, ends=False)
    result = CliRunner().invoke(app, ["watch", "--once", str(tmp_path)])
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert [line for line in lines if line.startswith("Net")] == [
        "Net  step 100, 0 skipped, ended",
        "Net-rank1  step 90, 0 skipped, running",
    ]
    assert sum(line.startswith("learning rate  0.5") for line in lines) == 2
    assert lines.count("warning: step 81: the loss rose to 9 at step 80.") == 2


def test_json_has_the_last_numbers_and_the_findings(tmp_path: Path) -> None:
    write_run(tmp_path / "Net", 100)
    (run,) = json.loads(CliRunner().invoke(app, ["watch", "--json", str(tmp_path)]).output)
    assert (run["run"], run["ended"]) == ("Net", True)
    assert run["last"] == {"kind": "step", "step": 100, "loss": 1.0, "lr": 0.5}
    assert [finding["name"] for finding in run["findings"]] == ["loss-spike"]


def test_it_looks_again_until_the_run_ends(tmp_path: Path) -> None:
    write_run(tmp_path / "Net", 20, ends=False)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            with JSONL(tmp_path / "Net") as sink:
                sink({"kind": "end", "step": 20})

    watch_command._follow(tmp_path, 2.0, sleep=sleep)
    assert looks[0] >= 2.0
    assert len(looks) == 2


@pytest.mark.parametrize("arguments", [["nothing"], ["--every", "0"]])
def test_wrong_input_is_refused_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["watch", *arguments, *([] if "nothing" in arguments else [str(tmp_path)])])
    assert result.exit_code == 2
    assert result.output.startswith("castwise watch: ")
    assert len(result.output.splitlines()) == 1


def test_bars_show_the_largest_value_of_each_column() -> None:
    assert sparkline([1.0] * 10 + [2.0] + [1.0] * 9, 5) == "\N{LOWER ONE EIGHTH BLOCK}" * 2 + "\N{FULL BLOCK}" + (
        "\N{LOWER ONE EIGHTH BLOCK}" * 2
    )
    assert sparkline([1.0, 10.0, 100.0], 3)[1] == "\N{LOWER FIVE EIGHTHS BLOCK}"  # the middle of the logarithms
    assert sparkline([None, float("inf")], 2) == " !"
    assert sparkline([], 2) == ""
