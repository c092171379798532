"""Trains small models that are split over ranks in every way, under both libraries, and prints what became of them.

Run by `test_sharded_grad_scaler.py`, once for each rank: `python worker.py RANK WORLD_SIZE FILE`.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import castwise

# torch's foreach and fused optimizers refuse DTensors beside plain tensors.
ONLY_FOR_LOOP = "replicated, sharded and plain"
KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
STEPS, BAD_STEP, MAX_NORM = 4, 2, 0.05


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def ddp(_: int) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model())


def fsdp1(use_orig_params: bool) -> Callable[[int], torch.nn.Module]:
    return lambda _: FullyShardedDataParallel(model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp2(world_size: int) -> torch.nn.Module:
    split = model()
    fully_shard(split, mesh=init_device_mesh("cpu", (world_size,)))
    return split


def tensor_parallel(world_size: int) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (world_size,))
    return parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def by_hand(*placements: Any) -> Callable[[int], torch.nn.Module]:
    """Parameters that are each placed by hand, None for a plain one; gathered whole for the forward."""

    def split_model(world_size: int) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (world_size,))
        split = model()
        names = [name for name, _ in split.named_parameters()]
        for name, placement in zip(names, placements, strict=True):
            if placement is not None:
                layer, kind = name.split(".")
                whole = getattr(split[int(layer)], kind).detach()
                setattr(split[int(layer)], kind, torch.nn.Parameter(distribute_tensor(whole, mesh, [placement])))

        def forward(x: torch.Tensor) -> torch.Tensor:
            params = [param.full_tensor() if isinstance(param, DTensor) else param for param in split.parameters()]
            return torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(x, *params[:2])), *params[2:])

        split.forward = forward
        return split

    return split_model


SPLITS: dict[str, Callable[[int], torch.nn.Module]] = {
    "DDP": ddp,
    "FSDP1": fsdp1(False),
    "FSDP1 with original parameters": fsdp1(True),
    "FSDP2": fsdp2,
    "TP": tensor_parallel,
    "replicated and sharded": by_hand(Replicate(), Shard(0), Shard(1), Replicate()),
    "replicated, sharded and plain": by_hand(Replicate(), Shard(0), None, None),
}
FAULTS = ["none", "NaN loss of rank 0", "inf in a gradient of rank 0", "inf in a gradient of the last rank"]


def spoil(split: torch.nn.Module) -> None:
    """Put an inf into one element of a gradient that this rank holds."""
    for param in split.parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if grad is not None and grad.numel() and not isinstance_replicated(param):
            grad.view(-1)[0] = math.inf
            return


def isinstance_replicated(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and all(placement.is_replicate() for placement in param.placements)


def whole(split: torch.nn.Module) -> list[float]:
    """All weights of a model, the same numbers however it is split."""
    if isinstance(split, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(split):
            return torch.cat([param.detach().flatten().clone() for param in split.parameters()]).tolist()
    params = [param.full_tensor() if isinstance(param, DTensor) else param for param in split.parameters()]
    return torch.cat([param.detach().flatten() for param in params]).tolist()


def train(split: torch.nn.Module, scaler: Any, kind: str, clip: bool, fault: str, rank: int, world_size: int) -> Any:
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1, **KINDS[kind])
    draw = torch.Generator().manual_seed(1)
    scales, norms = [], []
    for step in range(STEPS):
        x = torch.randn(5, 6, generator=draw)
        optimizer.zero_grad()
        loss = split(x).pow(2).mean()
        bad = step == BAD_STEP
        if bad and fault == "NaN loss of rank 0" and rank == 0:
            loss = loss * math.nan
        scaler.scale(loss).backward()
        if bad and fault == "inf in a gradient of rank 0" and rank == 0:
            spoil(split)
        if bad and fault == "inf in a gradient of the last rank" and rank == world_size - 1:
            spoil(split)
        if clip:
            norms.append(clipped(split, scaler, optimizer))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "norms": norms, "weights": whole(split), "tracker": scaler._get_growth_tracker()}


def clipped(split: torch.nn.Module, scaler: Any, optimizer: torch.optim.Optimizer) -> float:
    if isinstance(scaler, castwise.GradScaler):
        return float(scaler.clip_grad_norm_(optimizer, MAX_NORM))
    scaler.unscale_(optimizer)
    if isinstance(split, FullyShardedDataParallel):
        return float(split.clip_grad_norm_(MAX_NORM))
    norm = torch.nn.utils.clip_grad_norm_(split.parameters(), MAX_NORM)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def main(rank: int, world_size: int, file: str, libraries: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    results = {}
    for library, split, kind, clip, fault in itertools.product(libraries, SPLITS, KINDS, [False, True], FAULTS):
        if split == ONLY_FOR_LOOP and kind != "for-loop":
            continue
        make = {"castwise": castwise.ShardedGradScaler, "torch": Torchs}[library]

        def run(split: str = split, kind: str = kind, clip: bool = clip, fault: str = fault, make: Any = make) -> Any:
            scaler = make("cpu", init_scale=1024.0, growth_interval=2, process_group=dist.group.WORLD)
            return train(SPLITS[split](world_size), scaler, kind, clip, fault, rank, world_size)

        results[" | ".join([library, split, kind, "clip" if clip else "no clip", fault])] = outcome(run)
        dist.barrier()
    for kind, clip, fault in itertools.product(KINDS, [False, True], FAULTS):
        alone = castwise.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        results[" | ".join(["alone", kind, "clip" if clip else "no clip", fault])] = train(
            copy.deepcopy(model()), alone, kind, clip, fault, 0, 1
        )
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
