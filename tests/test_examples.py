"""The examples run, and print what the manual says."""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch.distributed.checkpoint
from tests import forked

from castwise import schedules
from castwise.monitor import Run

pytestmark = pytest.mark.usefixtures("warm_python")

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "examples" / "traces"


@pytest.fixture(scope="module")
def example() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "compare_schedules.py"))


def test_the_comparison_of_schedules_runs(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example["main"]([])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+): 600 steps$", printed, re.M) == ["bad_batches", "spiking", "steady"]
    assert re.findall(r"^Headroom\(\) +\d+ +(\d+) +\d+ ", printed, re.M) == ["0", "0", "0"]


def test_the_result_of_the_comparison_is_what_it_finds_now(example: Any) -> None:
    written = json.loads((ROOT / "benchmarks" / "results" / "schedules.json").read_text())
    compared = {path.stem: example["compare"](path) for path in sorted(TRACES.glob("*.jsonl"))}
    assert written["traces"] == compared
    assert all(eval(name, vars(schedules)) == schedule for name, schedule in example["SCHEDULES"].items())


def test_the_manuals_table_of_schedules_is_the_result(example: Any) -> None:
    written = json.loads((ROOT / "benchmarks" / "results" / "schedules.json").read_text())
    table = example["table"](written)
    assert (
        f"<!-- schedules begins -->\n{table}\n<!-- schedules ends -->\n"
        in (ROOT / "docs/reference/schedules.md").read_text()
    )
    assert len(table.splitlines()) == 2 + len(example["SCHEDULES"])


def words_of(output: Any) -> list[str]:
    """The words that an output shows: without numbers, and without notes on this machine."""
    text = output["data"].get("text/html", "") if "data" in output else output["text"]
    on_machine = r"note: [\w ]+: this CPU has no units for \w+, which is emulated"
    text = re.sub(rf"<style.*?</style>|<[^>]+>|{on_machine}", " ", text, flags=re.S)
    return sorted(re.findall(r"[a-z_.]{2,}", text))


def test_the_notebook_shows_what_is_stored_in_it() -> None:
    stored = nbformat.read(ROOT / "examples" / "bf16_in_a_notebook.ipynb", as_version=4)
    cells = runpy.run_path(str(ROOT / "examples" / "run_notebook.py"))["executed"]().cells
    assert [cell.source for cell in cells] == [cell.source for cell in stored.cells]
    expected = [list(map(words_of, cell.get("outputs", ()))) for cell in stored.cells]
    assert [list(map(words_of, cell.get("outputs", ()))) for cell in cells] == expected
    pages = [output["data"]["text/html"] for cell in cells for output in cell.get("outputs", ()) if "data" in output]
    assert len(pages) == 7
    assert "at In[1]:24. Sample 63 of the batch, dataset[1574]." in pages[0]
    assert "In[1]:24: x = x / x.norm(dim=-1, keepdim=True)</pre>" in pages[1]


def on_ranks(count: int, example: str, *arguments: object) -> str:
    """What the first of several ranks prints."""
    first, *others = forked.on_ranks(count, [ROOT / "examples" / example, *arguments])
    assert not any(others)
    return first


def test_a_training_goes_on_from_a_distributed_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    whole = on_ranks(2, "dcp.py", tmp_path)
    assert re.match(r"scale \d+ skipped [1-9]\d*\nweights [0-9a-f]{64}\n$", whole)
    assert on_ranks(2, "dcp.py", tmp_path, "--resume") == whole


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
    page = (ROOT / "docs" / "tutorials" / "fsdp2.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.S)
    for line, step in zip(shown.splitlines(), steps[9:], strict=False):
        assert re.sub(r"\d+\.\d+", "", line) == re.sub(r"\d+\.\d+", "", step)
        numbers = [list(map(float, re.findall(r"\d+\.\d+", each))) for each in (line, step)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.01)


def test_bf16_weights_learn_under_fsdp2_and_are_saved_in_fp32(tmp_path: Path) -> None:
    *steps, stored = on_ranks(2, "fsdp2_master_weights.py", tmp_path).splitlines()
    losses = [float(step.split()[3]) for step in steps]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert 14.0 <= float(stored.split()[0]) <= 14.2
    saved = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert saved["model.0.up.weight"].properties.dtype is torch.float32
    assert saved["model.0.up.weight"].size == (128, 32)


def test_a_loop_in_the_manner_of_torchtitan_trains_and_is_recorded(tmp_path: Path) -> None:
    losses = [float(step.split()[3]) for step in on_ranks(4, "titan_style.py", tmp_path).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    run = Run.read(tmp_path)
    assert [step.step for step in run.steps] == list(range(1, 11))
    assert [sample.step for sample in run.samples] == [1, 2, 4, 5, 10]
    assert run.settings["ranks"] == 4
    assert run.mistakes == []
