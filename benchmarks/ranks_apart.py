"""Train sharded with torch and with castwise while overflows occur in only one rank's shard.

    python -m benchmarks.ranks_apart [--steps 120]

Two processes train a small network with FSDP1 and fused AdamW, with torch's and with castwise's ShardedGradScaler.
Every tenth step, the scaled gradient of one weight on the first rank overflows fp32. Writes
benchmarks/results/ranks_apart-cpu.json, which docs/pictures/ranks.py draws. It contains no times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import castwise
from benchmarks import recording

STORE = "RANKS_APART_STORE"
LIBRARIES = {"torch": ShardedGradScaler, "castwise": castwise.ShardedGradScaler}
RANKS, WIDTH = 2, 32
SPIKE_EVERY, SPIKE = (
    10,
    1e38,
)  # overflows fp32 when multiplied by any scale reached here and the small gradient of the loss


class Net(nn.Module):
    """A network whose first parameter, which FSDP1 puts on the first rank, can get a gradient of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, spike: float) -> torch.Tensor:
        nothing = (self.shift - self.shift.detach())[0] * spike  # 0, and its gradient is `spike`
        return self.layers(x + self.shift) + nothing


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, x[:, :2].prod(1, keepdim=True)


def train(library: str, steps: int) -> list[dict[str, float]]:
    """Return this rank's loss and scale at each step, and whether it skipped the step."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = LIBRARIES[library]("cpu")
    known = []
    for step in range(1, steps + 1):
        x, y = batch(step, dist.get_rank())
        loss = nn.functional.mse_loss(model(x, SPIKE if step % SPIKE_EVERY == 0 else 0.0), y)
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        known.append({"loss": loss.item(), "scale": before, "skipped": scaler.get_scale() < before})
    return known


def on_ranks(steps: int) -> dict[str, list[list[dict[str, float]]]]:
    """Start the ranks, and return each rank's steps by library."""
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks_apart", f"--worker={rank}", f"--steps={steps}"],
                env={**os.environ, STORE: f"{folder}/store"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        outputs = [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]
    return {library: [output[library] for output in outputs] for library in LIBRARIES}


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's class triggers warnings with its own calls
        dist.init_process_group("gloo", f"file://{os.environ[STORE]}", rank=options.worker, world_size=RANKS)
        print(json.dumps({library: train(library, options.steps) for library in LIBRARIES}), flush=True)
        dist.destroy_process_group()
        return
    ranks = on_ranks(options.steps)
    last = {
        library: {
            "scales": [of_rank[-1]["scale"] for of_rank in of_ranks],
            "skipped": [sum(step["skipped"] for step in of_rank) for of_rank in of_ranks],
            "loss": sum(of_rank[-1]["loss"] for of_rank in of_ranks) / RANKS,
        }
        for library, of_ranks in ranks.items()
    }
    found = {"machine": recording.machine(), "spike every": SPIKE_EVERY, "last step": last, "ranks": ranks}
    path = recording.HERE / "results" / "ranks_apart-cpu.json"
    path.write_text(json.dumps(found) + "\n")
    print(json.dumps(last, indent=2))


if __name__ == "__main__":
    main()
