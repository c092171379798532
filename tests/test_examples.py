"""The examples run, and print what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from castwise import schedules

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "examples" / "traces"
ROWS = re.findall(
    r"^\| `((?:Dynamic|Headroom|Static|Guard)\(.*?\))` \| (.*) \|$", (ROOT / "README.md").read_text(), re.M
)


def test_the_comparison_of_schedules_runs() -> None:
    example = ROOT / "examples" / "compare_schedules.py"
    printed = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^(\w+): 600 steps$", printed, re.M) == ["bad_batches", "spiking", "steady"]
    assert re.findall(r"^Headroom +\d+ +(\d+) +\d+ ", printed, re.M) == ["0", "0", "0"]


@pytest.mark.parametrize(("schedule", "cells"), ROWS, ids=[row[0] for row in ROWS])
def test_the_readmes_table_of_schedules_is_right(schedule: str, cells: str) -> None:
    runs = [
        schedules.simulate(
            schedules.read_trace(TRACES / f"{name}.jsonl"),
            eval(schedule, vars(schedules)),
        )
        for name in ("steady", "spiking", "bad_batches")
    ]
    expected = [str(run.wasted_steps) for run in runs] + [f"{runs[place].flushed:.3%}" for place in (0, 2)]
    assert cells.split(" | ") == expected


def test_the_readme_has_such_a_table() -> None:
    assert len(ROWS) == 6
