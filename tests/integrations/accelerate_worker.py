"""Trains on several ranks with Accelerate, and prints what each of them has come to.

Run by `test_accelerate.py`, once for each rank: `python accelerate_worker.py RANK WORLD_SIZE FILE WHAT`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradScalerKwargs
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import castwise
from castwise.integrations.accelerate import prepare

STEPS, BAD_STEP, BAD_RANK = 3, 1, 1


def accelerator(strategy: str, is_ours: bool, is_scaled: bool) -> Accelerator:
    """One as in fp16 on GPUs; FSDP, which Accelerate has on accelerators alone, is put into its state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    handler = GradScalerKwargs(enabled=is_scaled)
    made = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[handler])
    assert made.distributed_type == DistributedType.MULTI_CPU
    made.native_amp = True
    made.scaler = torch.amp.GradScaler("cpu", enabled=is_scaled)
    if strategy != "ddp":
        of_fsdp = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1 if strategy == "fsdp" else 2)
        PartialState._shared_state.update(of_fsdp)
        AcceleratorState._shared_state.update(of_fsdp, fsdp_plugin=plugin)
    if strategy == "fsdp":
        made.scaler = ShardedGradScaler("cpu", enabled=is_scaled)
    return prepare(made) if is_ours else made


def train(
    rank: int,
    strategy: str,
    *,
    is_ours: bool,
    is_scaled: bool = True,
    is_fused: bool = False,
    max_norm: float | None = None,
) -> dict[str, Any]:
    """Train; in one step one rank has data, or with FSDP a part of the gradients, that is not finite."""
    run = accelerator(strategy, is_ours, is_scaled)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if strategy == "fsdp":
        model = run.prepare(model)  # which makes other parameters
    make = torch.optim.AdamW if is_fused else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.1, fused=is_fused)
    model, optimizer = (model, run.prepare(optimizer)) if strategy == "fsdp" else run.prepare(model, optimizer)
    norms, skipped = [], []
    for step in range(STEPS):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        is_bad = step == BAD_STEP and rank == BAD_RANK and is_scaled
        run.backward(model(rows * math.inf if is_bad and strategy == "ddp" else rows).square().mean())
        if is_bad and strategy != "ddp":
            local(next(param.grad for param in model.parameters() if param.grad is not None)).view(-1)[0] = math.inf
        if max_norm is not None:
            norms.append(str(float(run.clip_grad_norm_(model.parameters(), max_norm))))
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    return {
        "is sharded": isinstance(run.scaler, castwise.ShardedGradScaler if is_ours else ShardedGradScaler),
        "agrees": not is_ours or run.scaler.agrees,
        "weights": [local(param.detach()).flatten().tolist() for param in model.parameters()],
        "skipped": skipped,
        "scale": run.scaler.get_scale(),
        "norms": norms,
    }


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    rank, world_size, _ = join(sys.argv)
    size = str(world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    warnings.simplefilter("ignore")  # of fp16 on a CPU, and of FSDP over gloo
    results = {}
    for name, is_ours in (("ours", True), ("theirs", False)):
        results[f"ddp {name}"] = train(rank, "ddp", is_ours=is_ours)
        results[f"fsdp {name}"] = train(rank, "fsdp", is_ours=is_ours)
        results[f"fsdp clipped {name}"] = train(rank, "fsdp", is_ours=is_ours, max_norm=0.1)
        results[f"fsdp unscaled {name}"] = train(rank, "fsdp", is_ours=is_ours, is_scaled=False, max_norm=0.1)
        results[f"fsdp2 {name}"] = train(rank, "fsdp2", is_ours=is_ours)
    results["fsdp2 fused ours"] = train(rank, "fsdp2", is_ours=True, is_fused=True, max_norm=0.1)
    results["fsdp fused ours"] = train(rank, "fsdp", is_ours=True, is_fused=True, max_norm=0.1)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
