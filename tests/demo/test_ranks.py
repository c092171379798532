"""`castwise demo --strategy`, on several ranks: the same losses as in one process, however the model is split."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import forked

from castwise.cli import app
from castwise.demo.ranks import STRATEGIES

if TYPE_CHECKING:
    from tests.demo.conftest import Demo

# Sums are taken in another order; in bf16 and fp16 that may round the other way.
TOLERANCE = 1e-3
SHORT = ["--steps", 3, "--device", "cpu"]


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
    """Kill torchrun and its workers, each of which has its own session."""
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, workers)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def in_one_process(demo_in: type[Demo], tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, list[float]]:
    demo = demo_in(tmp_path_factory.mktemp("alone"))
    demo.run("--data", demo.text, "--out", demo.out, *SHORT)
    (folder,) = demo.out.iterdir()
    return demo, [result["loss"] for result in summary(folder)["results"]]


@pytest.fixture(scope="module")
def split_by(in_one_process: tuple[Demo, list[float]]) -> Callable[[str], tuple[str, Path]]:
    """What two processes have printed and where they have put it, by strategy."""
    demo, _ = in_one_process

    @functools.cache
    def trained(strategy: str) -> tuple[str, Path]:
        out = demo.out.parent / strategy
        arguments = ["--strategy", strategy, "--data", demo.text, "--out", out, *SHORT]
        printed = forked.on_ranks(2, ["-m", "castwise", "demo", *arguments])
        (folder,) = out.iterdir()
        return "".join(printed), folder

    return trained


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_train_to_the_losses_of_one(
    in_one_process: tuple[Demo, list[float]], split_by: Callable[[str], tuple[str, Path]], strategy: str
) -> None:
    _, alone = in_one_process
    stdout, folder = split_by(strategy)
    assert stdout.count("castwise and torch.amp ended with bit-identical weights.") == 1
    assert [result["loss"] for result in summary(folder)["results"]] == pytest.approx(alone, rel=TOLERANCE)
    assert summary(folder)["settings"]["processes"] == 2
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 18


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_a_split_run_that_was_killed_resumes_to_the_same_bits(
    demo: Demo, split_by: Callable[[str], tuple[str, Path]]
) -> None:
    _, undisturbed = split_by("fsdp2")
    arguments = ["--strategy", "fsdp2", "--data", demo.text, "--checkpoint-every", 1, *SHORT]
    process = start(2, *arguments, "--out", demo.out)
    demo.wait_until(lambda: list(demo.out.glob("*/checkpoint.pt")), process)
    kill(process)
    (folder,) = demo.out.glob("[0-9]*")
    resume = ["-m", "castwise", "demo", "--resume", folder]
    with pytest.raises(AssertionError) as refused:
        forked.on_ranks(3, resume)
    assert str(refused.value).count("the run was started with 2 processes: resume it with the same number") == 1
    forked.on_ranks(2, resume)
    assert demo.digests(folder) == demo.digests(undisturbed)


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
            "2 processes were started: choose with --strategy how to split the model",
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
