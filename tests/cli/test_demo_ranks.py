"""`castwise demo --strategy`, started by torchrun: the same losses as in one process, however the model is split."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from castwise.cli import app
from castwise.cli.demo.ranks import STRATEGIES

if TYPE_CHECKING:
    from tests.cli.conftest import Demo

# Sums are taken in another order; in bf16 and fp16 that may round the other way.
TOLERANCE = 1e-3


def start(processes: int, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    return subprocess.Popen(
        [*command, "-m", "castwise", "demo", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill torchrun and its workers, each of which has a session of its own."""
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, workers)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def run(processes: int, *arguments: object) -> tuple[int, str, str]:
    process = start(processes, *arguments)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def in_one_process(demo_in: type[Demo], tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, list[float]]:
    demo = demo_in(tmp_path_factory.mktemp("alone"))
    demo.run("--data", demo.text, "--out", demo.out, "--steps", 3, "--device", "cpu")
    (folder,) = demo.out.iterdir()
    return demo, [result["loss"] for result in summary(folder)["results"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_train_to_the_losses_of_one(
    in_one_process: tuple[Demo, list[float]], strategy: str, tmp_path: Path
) -> None:
    demo, alone = in_one_process
    arguments = ["--strategy", strategy, "--data", demo.text, "--out", tmp_path, "--steps", 3, "--device", "cpu"]
    code, stdout, stderr = run(2, *arguments)
    assert code == 0, stderr
    assert stdout.count("castwise and torch.amp ended with bit-identical weights.") == 1
    (folder,) = tmp_path.iterdir()
    assert [result["loss"] for result in summary(folder)["results"]] == pytest.approx(alone, rel=TOLERANCE)
    assert summary(folder)["settings"]["processes"] == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 18


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_a_split_run_that_was_killed_resumes_to_the_same_bits(demo: Demo) -> None:
    arguments = ["--strategy", "fsdp2", "--device", "cpu", "--data", demo.text, "--steps", 4, "--checkpoint-every", 1]
    undisturbed, killed = demo.out / "undisturbed", demo.out / "killed"
    assert run(2, *arguments, "--out", undisturbed)[0] == 0
    process = start(2, *arguments, "--out", killed)
    demo.wait_until(lambda: list(killed.glob("*/checkpoint.pt")), process)
    kill(process)
    (folder,), (whole,) = killed.glob("[0-9]*"), undisturbed.iterdir()
    code, _, stderr = run(3, "--resume", folder)
    assert code != 0
    assert stderr.count("the run was started with 2 processes, and goes on with as many") == 1
    code, _, stderr = run(2, "--resume", folder)
    if "SIGSEGV" in stderr or "SIGABRT" in stderr:  # gloo when it ends, now and then: one more run that was killed
        code, _, stderr = run(2, "--resume", folder)
    assert code == 0, stderr
    assert demo.digests(folder) == demo.digests(whole)


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({}, ["--strategy", "zero"], "--strategy must be one of ddp, fsdp, fsdp2, tp, got 'zero'"),
        (
            {},
            ["--strategy", "ddp"],
            "--strategy ddp needs several processes: torchrun --nproc-per-node 2 -m castwise demo --strategy ddp",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            [],
            "2 processes were started: say by --strategy how to split the model between them",
        ),
    ],
)
def test_processes_and_strategies_that_do_not_fit(
    environment: dict[str, str],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        app(["demo", "--device", "cpu", *arguments])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"castwise demo: {message}\n"
