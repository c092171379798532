"""What it costs ranks to agree: castwise's ShardedGradScaler against torch's, over gloo, in random order.

    python benchmarks/scale_out.py [--ranks 2 4] [--rounds 200]

Starts its own processes. Writes benchmarks/results/scale_out-cpu.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import castwise
import recording

STORE = "SCALE_OUT_STORE"
LIBRARIES = {"torch": ShardedGradScaler, "castwise": castwise.ShardedGradScaler}
LAYERS, WIDTH = 16, 64  # small, so that a step is little but its overhead


class Case:
    """A split model with gradients, and one library's way to step it."""

    def __init__(self, library: str, split: str, clip: bool) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model: torch.nn.Module = torch.nn.Sequential(*layers)
        if split == "FSDP2":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, foreach=True)
        self.scaler, self.library, self.clip = LIBRARIES[library]("cpu"), library, clip

    def backward(self) -> None:
        """What comes before a step, and is not timed."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(4, WIDTH)).sum()).backward()

    def step(self) -> None:
        """What is timed."""
        if self.clip and self.library == "castwise":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        elif self.clip:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.get_total_norm([param.grad for param in self.model.parameters()])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def collectives(function: Callable[[], object]) -> int:
    """Count what the backend is asked for, by whomever."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return sum(event.name.startswith("gloo:") for event in profiler.events() or [])


def timed(function: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(rounds: int) -> list[dict[str, Any]]:
    """Let this rank time every case; the order is the same on all ranks."""
    order, rows = random.Random(0), []
    for split in ("DDP", "FSDP2"):
        for clip in (False, True):
            cases = {library: Case(library, split, clip) for library in LIBRARIES}
            counts = {}
            for library, case in cases.items():
                case.backward()
                case.step()
                case.backward()
                counts[library] = collectives(case.step)
            seconds: dict[str, list[float]] = {library: [] for library in cases}
            for _ in range(rounds):
                for library in order.sample(list(cases), len(cases)):
                    cases[library].backward()
                    seconds[library].append(timed(cases[library].step))
            ratio = recording.ratio(seconds["castwise"], seconds["torch"])
            medians = {library: statistics.median(of_library) for library, of_library in seconds.items()}
            rows.append(
                {"split": split, "clip": clip, "seconds": medians, "castwise / torch": ratio, "collectives": counts}
            )
    flag = torch.zeros(2, dtype=torch.float64)
    latency = statistics.median(timed(lambda: dist.all_reduce(flag)) for _ in range(rounds))
    return [*rows, {"all_reduce of 16 bytes": latency}]


def on_ranks(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Start the ranks and return what the first has measured."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, f"--worker={rank}", f"--ranks={ranks}", f"--rounds={rounds}"],
                env={**os.environ, STORE: f"{folder}/store"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    rows: list[dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return rows


def table(record: dict[str, Any]) -> str:
    lines = [
        recording.title(record["machine"]),
        "",
        "| ranks | split | | torch | castwise | castwise / torch (quartiles) | collectives: torch | castwise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    latencies = []
    for ranks, (*rows, latency) in record["ranks"].items():
        for row in rows:
            low, high = row["castwise / torch"]["quartiles"]
            theirs, ours = row["collectives"]["torch"], row["collectives"]["castwise"]
            lines.append(
                f"| {ranks} | {row['split']} | {'scaled + clipped' if row['clip'] else 'scaled'} "
                f"| {row['seconds']['torch'] * 1e6:,.0f} us | {row['seconds']['castwise'] * 1e6:,.0f} us "
                f"| {row['castwise / torch']['median']:.3f} ({low:.3f} - {high:.3f}) | {theirs} | {ours} |"
            )
        latencies.append(f"{latency['all_reduce of 16 bytes'] * 1e6:,.0f} us on {ranks} ranks")
    return "\n".join([*lines, "", f"An all-reduce of 16 bytes alone: {', '.join(latencies)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's class warns of what it does itself
        store = f"file://{os.environ[STORE]}"
        dist.init_process_group("gloo", store, rank=options.worker, world_size=options.ranks[0])
        print(json.dumps(measure(options.rounds)), flush=True)
        return
    record = {
        "machine": recording.machine("cpu"),
        "ranks": {ranks: on_ranks(ranks, options.rounds) for ranks in options.ranks},
    }
    recording.write("scale_out-cpu", record, table(record))


if __name__ == "__main__":
    main()
