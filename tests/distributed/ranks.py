"""Starts a worker script once for each rank of a gloo group of real processes.

They are forked from a server that has imported torch: importing it takes longer than what most of them do. Their
environment is that of the first call in this process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp.sharded_grad_scaler",
        "torch.distributed.tensor.parallel",
        "castwise.monitor.monitor",
    ]
)


def run(worker: Path, world_size: int, store: Path, what: str) -> list[Any]:
    """Let every rank do something; what each of them has to say, None for one that died."""
    said = [store.with_name(f"{store.name} {rank}") for rank in range(world_size)]
    processes = [
        _SERVER.Process(target=_become, args=(str(worker), [str(rank), str(world_size), str(store), what], said[rank]))
        for rank in range(world_size)
    ]
    give_up = time.monotonic() + 300
    started = []
    try:
        for file, process in zip(said, processes, strict=True):
            file.write_text("")
            process.start()
            started.append(process)
        for process in processes:
            process.join(give_up - time.monotonic())
            assert process.exitcode is not None, f"{worker.name} {what} takes longer than 300 s"
    finally:
        for process in started:
            process.kill()
    return [json.loads(text.splitlines()[-1]) if (text := file.read_text()) else None for file in said]


def _become(worker: str, arguments: list[str], out: Path) -> None:
    descriptor = os.open(out, os.O_WRONLY)
    os.dup2(descriptor, 1)
    sys.argv = [worker, *arguments]
    runpy.run_path(worker, run_name="__main__")


def join(argv: list[str], seconds: int = 60) -> tuple[int, int, str]:
    """Become the rank that `run` has started; returns the rank, the number of ranks and what to do."""
    import torch

    rank, world_size, store, what = int(argv[1]), int(argv[2]), argv[3], argv[4]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
    )
    return rank, world_size, what
