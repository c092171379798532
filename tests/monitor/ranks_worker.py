"""Trains a model on several ranks under a monitor, and prints what the first one has recorded.

Run by `test_ranks.py`, once for each rank: `python ranks_worker.py RANK WORLD_SIZE FILE WHAT`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import castwise
from castwise.monitor import Monitor
from castwise.monitor._activations import Activations
from castwise.monitor._local_shards import is_partial, local_shard
from castwise.monitor._sample import Sample

STEPS = 3
FAULTS = ("none", "data of rank 1", "gradient of rank 1", "scale")


def model() -> nn.Module:
    """Small whole numbers, so that sums are exact in whatever order ranks add them up."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.0)
        parameter.data.copy_(torch.randint(-2, 3, parameter.shape))
    return net


def split(net: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if how == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    if how == "fsdp2":
        for layer in (net[0], net[2]):  # type: ignore[index]
            fully_shard(layer)
        fully_shard(net)
    return net


def train(how: str, fault: str, rank: int, world_size: int, **options: Any) -> list[dict[str, Any]]:
    """Train, each rank on its part of the batch; "alone" on the whole batch. The fault is in the second step.

    Ranks "apart" have models of their own, and scalers that do not agree.
    """
    net = split(model(), how)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    is_by_itself = how in ("alone", "apart")
    scaler = (castwise.GradScaler if is_by_itself else castwise.ShardedGradScaler)("cpu", init_scale=2.0**4)
    records: list[dict[str, Any]] = []
    with Monitor(net, optimizer, scaler, every=2, sinks=[records.append], **options):
        for number in range(1, STEPS + 1):
            batch = torch.randint(-2, 3, (4, 3), generator=torch.Generator().manual_seed(number)).float()
            rows = batch if how == "alone" else batch.chunk(world_size)[rank]
            is_faulty = number == 2
            if is_faulty and fault == "data of rank 1" and rank == 1:
                rows = rows * math.nan
            optimizer.zero_grad()
            loss = net(rows).sum() / len(rows)
            scaler.scale(loss * 1e37 if is_faulty and fault == "scale" else loss).backward()
            if is_faulty and fault == "gradient of rank 1" and rank == 1:
                net[2].weight.grad.to_local().fill_(math.inf)  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    for record in records:
        record.pop("seconds", None)
        record.pop("time", None)
    return records


def refused() -> str:
    net = split(model(), "fsdp1")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    try:
        Monitor(net, optimizer, castwise.ShardedGradScaler("cpu"), on_nonfinite="diagnose").attach()
    except ValueError as error:
        return str(error)
    return ""


class Constant(nn.Module):
    """Returns a tensor, whatever it is given."""

    def __init__(self, weight: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.output = nn.Parameter(weight), output

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.output


def leave_out(sums: torch.Tensor, weight: torch.Tensor) -> None:
    """Measure a gradient and an output that are partial sums."""
    net = Constant(weight, sums)
    net.weight.grad = sums
    activations = Activations(net)
    activations.watch()
    net(torch.ones(1, requires_grad=True))
    sample = Sample(net, activations.stop())
    sample.measure_gradients(torch.optim.SGD(net.parameters()), torch.tensor(1.0))
    measured = sample.measured(1.0, [])
    assert (measured.partial_sums, measured.gradients, measured.activations) == (["weight"], {}, {})


def parts(rank: int) -> dict[str, tuple[list[float], int | None]]:
    """What this rank holds of [0, 1, 2], split and copied; nothing of a sum that is not summed yet."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(3.0)
    tensors = {
        "split": distribute_tensor(whole, mesh, [Shard(0)]),
        "copied": distribute_tensor(whole, mesh, [Replicate()]),
        "a sum": DTensor.from_local(whole * (2 * rank), mesh, [Partial()]),
        "plain": whole,
    }
    sums = tensors.pop("a sum")
    assert is_partial(sums)
    assert not any(map(is_partial, tensors.values()))
    if rank == 0:  # a collective would wait for rank 1
        leave_out(sums, distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None))
    return {
        name: (part.local.tolist(), part.distinct) for name, part in ((n, local_shard(t)) for n, t in tensors.items())
    }


def main() -> None:
    rank, world_size, _ = join(sys.argv)
    runs = {
        f"{how}, {fault}": train(how, fault, rank, world_size)
        for how in ("ddp", "fsdp2")
        for fault in FAULTS
        if (how, fault) != ("ddp", "gradient of rank 1")
    }
    for how in ("ddp", "fsdp2"):
        runs[f"{how}, diagnosed"] = train(how, "data of rank 1", rank, world_size, on_nonfinite="diagnose")
    runs["apart, data of rank 1"] = train("apart", "data of rank 1", rank, world_size)
    runs["apart, diagnosed"] = train("apart", "data of rank 1", rank, world_size, on_nonfinite="diagnose")
    error, held = refused(), parts(rank)
    dist.barrier()
    dist.destroy_process_group()
    runs["alone"] = train("alone", "none", rank, world_size)
    print(json.dumps({"runs": runs, "refused": error, "parts": held}), flush=True)


if __name__ == "__main__":
    main()
