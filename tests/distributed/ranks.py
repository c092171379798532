"""Starts a worker script once for each rank of a gloo group of real processes.

They are forked; their environment is that of the first call in this process.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.forked import become, forked

LIMIT = 900
"""Seconds until `run` fails. A rank that waits for another ends by itself after a minute (`join`), so this is far above
what a busy machine takes."""


def run(worker: Path, world_size: int, store: Path, what: str, *, frameworks: bool = False) -> list[Any]:
    """Let every rank do something; what each of them has to say, None for one that died.

    Args:
        worker: The script.
        world_size: The number of ranks.
        store: The file in which they find each other.
        what: What they do.
        frameworks: Whether to fork them with Lightning, Transformers and Accelerate imported.
    """
    said = [store.with_name(f"{store.name} {rank}") for rank in range(world_size)]
    give_up = time.monotonic() + LIMIT
    started: list[Any] = []
    try:
        for rank, file in enumerate(said):
            file.write_text("")
            arguments = [str(rank), str(world_size), str(store), what]
            if frameworks:
                started.append(_WithFrameworks([str(worker), *arguments], file))
            else:
                started.append(forked(_become, str(worker), arguments, file, daemon=False))
        for process in started:
            process.join(give_up - time.monotonic())
            assert process.exitcode is not None, f"{worker.name} {what} takes longer than {LIMIT} s"
    finally:
        for process in started:
            process.kill()
    return [json.loads(text.splitlines()[-1]) if (text := file.read_text()) else None for file in said]


def _become(worker: str, arguments: list[str], out: Path) -> None:
    become(lambda: runpy.run_path(worker, run_name="__main__"), [worker, *arguments], out)


class _WithFrameworks(subprocess.Popen[bytes]):
    """A script in a process forked from `with_frameworks`, to be used as those of multiprocessing."""

    def __init__(self, arguments: list[str], out: Path) -> None:
        from tests.warm_python import with_frameworks  # and pytest, which ranks do not need

        with out.open("a") as file:
            super().__init__([with_frameworks(), *arguments], stdout=file)

    def join(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def kill(self) -> None:
        self.terminate()  # which is passed on


def join(argv: list[str], seconds: int = 60) -> tuple[int, int, str]:
    """Become the rank that `run` has started; returns the rank, the number of ranks and what to do."""
    import torch

    rank, world_size, store, what = int(argv[1]), int(argv[2]), argv[3], argv[4]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
    )
    return rank, world_size, what
