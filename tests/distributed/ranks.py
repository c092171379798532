"""Starts a worker script once for each rank of a gloo group of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any


def run(worker: Path, world_size: int, store: Path, what: str) -> list[Any]:
    """Let every rank do something; what each of them has to say, None for one that died."""
    workers = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(world_size), str(store), what],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker_ in workers:
            worker_.kill()
    return [json.loads(output.splitlines()[-1]) if output else None for output in outputs]


def join(argv: list[str], seconds: int = 60) -> tuple[int, int, str]:
    """Become the rank that `run` has started; returns the rank, the number of ranks and what to do."""
    import torch

    rank, world_size, store, what = int(argv[1]), int(argv[2]), argv[3], argv[4]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
    )
    return rank, world_size, what
