"""Processes forked from a server that has imported torch: importing it takes longer than what most of them do.

Tests of how a process begins or ends, of what it prints of an error, or of the environment that Python reads when it
begins start a real one. Here that environment (`PYTHONHASHSEED` and `PYTHONIOENCODING` too) is that of the first call
in a test process, `atexit` functions run before threads are joined, and tracebacks have frames of multiprocessing.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, spawn
from pathlib import Path
from typing import Any

import torch

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])
_ROOT = Path(__file__).parents[1]
server_python = sys.executable  # with pytest-xdist, one that has loaded `tests.preloaded` already: see `warm_python`


def forked(target: Callable[..., object], *args: object, daemon: bool) -> multiprocessing.process.BaseProcess:
    """Start a function in a process; a daemon ends with the tests, should one fail and leave it running."""
    here, python = Path.cwd(), spawn.get_executable()
    os.chdir(_ROOT)  # where the server, if it is not there yet, finds what it loads
    spawn.set_executable(server_python)
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(python)
        os.chdir(here)
    process = _SERVER.Process(target=target, args=args, daemon=daemon)
    process.start()
    return process


class Python:
    """`python ARGUMENTS`, in one thread, to be used as a `subprocess.Popen` of which all that is printed is kept.

    Args:
        arguments: A script or `-m` and a module, and its arguments.
        folder: The folder to run in; None means the current one.
        together: Whether to print what goes to stderr to stdout as well, in order; stderr is then the same text.
        environment: Variables of the environment to set.
    """

    def __init__(
        self, arguments: Sequence[object], folder: Path | None = None, *, together: bool = False, **environment: object
    ) -> None:
        self._printed = tempfile.TemporaryDirectory()
        self._files = [Path(self._printed.name, name) for name in ("stdout", "stdout" if together else "stderr")]
        for file in self._files:
            file.touch()
        variables = os.environ | {name: str(value) for name, value in environment.items()}
        where = str(folder or Path.cwd()), variables, self._files
        self._process = forked(_python, [*map(str, arguments)], *where, daemon=True)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def printed(self) -> tuple[str, str]:
        """Return what is in stdout and stderr by now."""
        stdout, stderr = (file.read_text() for file in self._files)
        return stdout, stderr

    def communicate(self, timeout: float = 600.0) -> tuple[str, str]:
        """Wait for the end; returns stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired("python", timeout, *self.printed())
        return self.printed()

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def become(run: Callable[[], Any], argv: Sequence[str], *printed: Path) -> None:
    """Do in a process that was forked what a program does that is called so and prints to these files."""
    for descriptor, file in enumerate(printed, 1):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = list(argv)
    torch.seed()  # as of a new process, and not that of the server
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
        script = os.path.abspath(arguments[0])
        sys.path.insert(0, os.path.dirname(script))
        become(lambda: runpy.run_path(script, run_name="__main__"), arguments, *files)


def on_ranks(
    count: int,
    arguments: Sequence[object],
    folder: Path | None = None,
    timeout: float = 600.0,
    *,
    together: bool = False,
) -> list[str]:
    """Run `python ARGUMENTS` on so many ranks, without torchrun; returns what each has printed (see `Python`).

    Raises:
        AssertionError: One has failed or takes longer, with what all have printed.
    """
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    of_all = {**meeting, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = [
        Python(arguments, folder, together=together, **of_all, RANK=rank, LOCAL_RANK=rank) for rank in range(count)
    ]
    give_up = time.monotonic() + timeout
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < give_up, [rank.printed() for rank in ranks]
            time.sleep(0.01)
        if any(rank.poll() for rank in ranks):
            give_up = time.monotonic() + 5  # for what the others have to say about it
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < give_up:
                time.sleep(0.01)
            raise AssertionError([rank.printed() for rank in ranks])
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.printed()[0] for rank in ranks]
