"""Processes forked from a server that has imported torch: importing it takes longer than what most of them do.

How a process begins, and how Python ends one, is not seen here; tests of that start a process of their own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch._dynamo",  # which torch imports when the first optimizer is made
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp.sharded_grad_scaler",
        "torch.distributed.tensor.parallel",
        "castwise.cli",
        "castwise.monitor.monitor",
    ]
)


class Python:
    """`python ARGUMENTS`, in one thread, to be used as a `subprocess.Popen` of which all that is printed is kept."""

    def __init__(self, arguments: Sequence[object], folder: Path | None = None, **environment: object) -> None:
        self._printed = tempfile.TemporaryDirectory()
        self._files = [Path(self._printed.name, name) for name in ("stdout", "stderr")]
        for file in self._files:
            file.touch()
        variables = os.environ | {name: str(value) for name, value in environment.items()}
        where = str(folder or Path.cwd()), variables, self._files
        self._process = SERVER.Process(target=_python, args=([*map(str, arguments)], *where))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Wait for the end; returns stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired("python", timeout)
        stdout, stderr = (file.read_text() for file in self._files)
        return stdout, stderr

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def become(run: Callable[[], Any], argv: Sequence[str], *printed: Path) -> None:
    """Do in a process that was forked what a program does that is called so and prints to these files."""
    for descriptor, file in enumerate(printed, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.argv = list(argv)
    atexit._clear()  # of the server
    try:
        run()
    finally:
        atexit._run_exitfuncs()


def _python(arguments: list[str], folder: str, environment: dict[str, str], files: list[Path]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if arguments[0] == "-m":
        sys.path.insert(0, folder)
        become(lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True), arguments[1:], *files)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        become(lambda: runpy.run_path(arguments[0], run_name="__main__"), arguments, *files)


def torchrun(count: int, arguments: Sequence[object], folder: Path | None = None) -> list[str]:
    """Run `python ARGUMENTS` on each of so many ranks; returns what they print, and raises if one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": free.getsockname()[1]}
    of_all = {**meeting, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = [Python(arguments, folder, **of_all, RANK=rank, LOCAL_RANK=rank) for rank in range(count)]
    try:
        printed = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, printed
    return [stdout for stdout, _ in printed]
