"""One rank of `scale_out`: python -m benchmarks.scale_out_worker STORE RANKS LAYERS WIDTH ROUNDS RANK."""

from __future__ import annotations

import json
import statistics
import sys
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
from benchmarks.benchmark import Record
from benchmarks.pairing import AGAIN, CASTWISE, TORCH, Rounds, compare, race, ratio
from benchmarks.scale_out import LATENCY

SCALERS: dict[str, Any] = {TORCH: ShardedGradScaler, AGAIN: ShardedGradScaler, CASTWISE: castwise.ShardedGradScaler}


class Case:
    """A split model with gradients, and one library's way to step it."""

    def __init__(self, library: str, split: str, clip: bool, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.given = torch.ones(4, width)
        self.model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        if split == "FSDP2":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, foreach=True)
        self.scaler, self.library, self.clip = SCALERS[library]("cpu"), library, clip

    def seconds(self) -> float:
        """Run an untimed backward, then return the seconds of a step."""
        self.backward()
        return timed(self.step)

    def backward(self) -> None:
        """Compute scaled gradients for the next step."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(self.given).sum()).backward()

    def step(self) -> None:
        """Clip, if asked to, step and update."""
        if self.clip and self.library == CASTWISE:
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        elif self.clip:
            self.scaler.unscale_(self.optimizer)
            gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def collectives(function: Callable[[], object]) -> int:
    """Count the collectives that a function issues."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return sum(event.name.startswith("gloo:") for event in profiler.events() or [])


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks start at the same time."""
    dist.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(layers: int, width: int, rounds: int) -> list[Record]:
    """Time every case on this rank, in the same order as on all ranks."""
    rows: list[Record] = []
    for split in ("DDP", "FSDP2"):
        for clip in (False, True):
            cases = {library: Case(library, split, clip, layers, width) for library in SCALERS}
            counts = {}
            for library, case in cases.items():
                case.seconds()
                case.backward()
                counts[library] = collectives(case.step)
            times = race({library: case.seconds for library, case in cases.items()}, Rounds(rounds))
            rows.append(
                {
                    "split": split,
                    "clip": clip,
                    "seconds": {library: statistics.median(of_library) for library, of_library in times.items()},
                    "castwise / torch": compare(times[CASTWISE], times[TORCH], ratio(times[AGAIN], times[TORCH])),
                    "collectives": counts,
                }
            )
    flag = torch.zeros(2, dtype=torch.float64)
    latency = statistics.median(timed(lambda: dist.all_reduce(flag)) for _ in range(rounds))
    return [*rows, {LATENCY: latency}]


def main(store: str, ranks: str, layers: str, width: str, rounds: str, rank: str) -> None:
    """Join the process group, measure, and print the results."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's class triggers warnings with its own calls
    dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=int(ranks))
    print(json.dumps(measure(int(layers), int(width), int(rounds))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
