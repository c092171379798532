"""SIGTERM, with which clusters preempt a run: `castwise run` writes its report and the process ends by the signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked import Python
from tests.monitor.recorded import records_in

from castwise.monitor import Run

AS_USERS_START_THEM = {"workers"}  # the others are forked, which is faster, and may have no workers
Ended = tuple[int, str, str, Path]

TRAINING = """
import os, signal, sys, time, torch
from pathlib import Path

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps=3, data=None):
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(3, 4) if data is None else next(data)).square().mean()
        loss.backward()
        optimizer.step()

def ready():
    Path(f"ready{os.environ.get('RANK', '')}").touch()
"""
SCRIPTS = {
    "training": """
        for step in range(10**9):
            train(1)
            time.sleep(0.01)
            if step == 3:
                ready()
    """,
    "forks": """
        exit_codes = set()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                time.sleep(600)
            os.kill(child, signal.SIGTERM)  # perhaps before it has run anything
            exit_codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        Path("exit-codes").write_text(str(exit_codes))
        train()
        ready()
        time.sleep(600)
    """,
    "collective": """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        train()
        ready()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # which rank 1 never joins
        time.sleep(600)
    """,
    "own-handler": """
        def save(*_):
            print("saved", flush=True)
            sys.exit(7)
        previous = signal.signal(signal.SIGTERM, save)
        train()
        ready()
        time.sleep(600)
    """,
    "chained-handler": """
        import threading
        previous, asked = signal.getsignal(signal.SIGTERM), threading.Event()
        def save(*given):
            asked.set()
            if callable(previous):
                previous(*given)
        signal.signal(signal.SIGTERM, save)
        train()
        ready()
        while not asked.is_set():
            time.sleep(0.01)
        time.sleep(1)
        print("saved", flush=True)
    """,
    "asyncio": """
        import asyncio
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)  # sets a wakeup descriptor
            train()
            ready()
            await asyncio.sleep(600)
        asyncio.run(main())
    """,
    "workers": """
        from torch.utils.data import DataLoader
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.randn(4)
        batches = iter(DataLoader(Endless(), 3, num_workers=2))
        train(data=batches)
        workers = batches._workers
        del batches  # which ends them
        Path("exit-codes").write_text(str({worker.exitcode for worker in workers}))
        ready()
        time.sleep(600)
    """,
}


Process = Python | subprocess.Popen[str]


def start(name: str, folder: Path, **environment: str) -> Process:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAINING + textwrap.dedent(SCRIPTS[name]))
    arguments = ["-m", "castwise", "run", "--out", f"out{environment.get('RANK', '')}", "train.py"]
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "2000"}
    if name not in AS_USERS_START_THEM:
        return Python(arguments, folder, **environment)
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def wait_for(file: Path, process: Process) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, f"{file} does not exist"
        time.sleep(0.05)


def free_port() -> str:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return str(opened.getsockname()[1])


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """All scripts after SIGTERM: exit code, output, errors, and folder. They run at the same time."""
    folder = tmp_path_factory.mktemp("termination")
    names = [name for name in SCRIPTS if name != "collective"]
    processes = {name: start(name, folder / name) for name in names}
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    for rank in "01":
        processes[f"rank {rank}"] = start("collective", folder / "collective", RANK=rank, **ranks)
    try:
        for name, process in processes.items():
            at = folder / ("collective" if name.startswith("rank") else name)
            wait_for(at / f"ready{name[5:] if name.startswith('rank') else ''}", process)
        time.sleep(0.5)  # until rank 0 waits in the collective
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        results = {}
        for name, process in processes.items():
            output, errors = process.communicate(timeout=60)
            at = folder / ("collective" if name.startswith("rank") else name)
            results[name] = process.returncode, output, errors, at
        yield results
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("name", ["training", "asyncio", "forks", "workers"])
def test_sigterm_writes_the_report_and_ends_the_process(name: str, ended: dict[str, Ended]) -> None:
    code, _, errors, folder = ended[name]
    assert code == -signal.SIGTERM, errors
    (report,) = folder.rglob("report.html")
    assert f"castwise: report: {report}" in errors
    assert "Traceback" not in errors
    (record,) = folder.rglob("monitor.jsonl.gz")
    run = Run.read(record)
    assert len(run.steps) >= 3
    assert not run.ended  # steps may have followed


def test_a_rank_that_is_blocked_in_a_collective_writes_the_report(
    ended: dict[str, Ended],
) -> None:
    codes = [ended[f"rank {rank}"][0] for rank in "01"]
    assert codes == [-signal.SIGTERM, -signal.SIGTERM], ended["rank 0"][2]
    folder = ended["rank 0"][3]
    assert [path.relative_to(folder).parts[0] for path in folder.rglob("report.html")] == ["out0"]
    assert sorted(len(Run.read(path).steps) for path in folder.rglob("monitor.jsonl.gz")) == [3, 3]


SLOW = """
import os, signal, time
from castwise._cli import termination
assert termination.SECONDS == 10.0
termination.SECONDS = 0.2
termination.Termination(lambda: time.sleep(600)).watch()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""


def test_a_report_that_takes_longer_than_ten_seconds_does_not_hold_up_the_end(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = Python(["slow.py"], tmp_path)
    _, errors = process.communicate(60)
    assert process.returncode == -signal.SIGTERM, errors


def test_a_script_keeps_its_own_handler(ended: dict[str, Ended]) -> None:
    for name, exit_code in {"own-handler": 7, "chained-handler": 0}.items():
        code, output, errors, folder = ended[name]
        assert (code, output) == (exit_code, "saved\n"), errors
        (record,) = folder.rglob("monitor.jsonl.gz")
        assert records_in(record)[-1]["kind"] == "end"


def test_forked_processes_end_as_without_castwise(ended: dict[str, Ended]) -> None:
    assert (ended["forks"][3] / "exit-codes").read_text() == "{-15}"
    assert (ended["workers"][3] / "exit-codes").read_text() == "{0}"
