"""The examples run, and print what the README says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from castwise import schedules
from castwise.monitor.run import Run

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


def on_ranks(count: int, example: str, *arguments: str) -> str:
    """What the first of several ranks prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [*torchrun, str(ROOT / "examples" / example), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment).stdout


def test_a_training_goes_on_from_a_distributed_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    whole = on_ranks(2, "dcp.py", str(tmp_path))
    assert re.match(r"scale \d+ skipped [1-9]\d*\nweights [0-9a-f]{64}\n$", whole)
    assert on_ranks(2, "dcp.py", str(tmp_path), "--resume") == whole


def on_two_hosts(example: str) -> list[str]:
    """What the launchers of two hosts print, both of them this one: as docs/tutorials/fsdp2.md starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    command = [*launcher, *meeting, str(ROOT / "examples" / example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    hosts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        outputs = [host.communicate(timeout=300)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0]
    return outputs


def test_a_bad_batch_of_one_host_is_skipped_by_all() -> None:
    steps = "".join(on_two_hosts("fsdp2.py")).splitlines()
    assert [step.split()[1] for step in steps if step.endswith("skipped")] == ["11"]
    assert len(steps) == 20
    assert all(re.search(r"loss \d+\.\d+ norm \d+\.\d+$", step) for step in steps if not step.endswith("skipped"))


def test_a_loop_in_the_manner_of_torchtitan_trains_and_is_recorded(tmp_path: Path) -> None:
    losses = [float(step.split()[3]) for step in on_ranks(4, "titan_style.py", str(tmp_path)).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    run = Run.read(tmp_path)
    assert [step["step"] for step in run.steps] == list(range(1, 11))
    assert [sample["step"] for sample in run.samples] == [1, 6]
    assert run.settings["ranks"] == 4
    assert run.mistakes == []
