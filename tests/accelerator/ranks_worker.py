"""One of two ranks that train on an accelerator; run by test_ranks.py with a rank and a folder."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from tests.accelerator.availability import DEVICE
from tests.accelerator.training import KINDS, bits, net

import castwise

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])


def trained(kind: str, norm_type: float | None, schedule: Any) -> list[Any]:
    """Train on batches of each rank's own, of which one has an inf on rank 0 only; return the weights and scales."""
    model = net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **KINDS[kind])
    scaler = castwise.ShardedGradScaler(DEVICE, schedule=schedule)
    scales, norms = [], []
    for step in range(5):
        torch.manual_seed(10 * step)
        batch = torch.randn(4, 8) * (math.inf if step == 2 and RANK == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(batch.to(DEVICE)).square().mean()).backward()
        if norm_type is not None:
            norms.append(scaler.clip_grad_norm_(optimizer, 0.1, norm_type).item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [bits(model.parameters()), scales, norms]


def diverged() -> str:
    """Update once more on rank 0 only; return the error that all ranks get some collectives later."""
    param = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, fused=True), castwise.ShardedGradScaler(DEVICE)
    try:
        for step in range(10):
            param.grad = None
            scaler.scale(param.sum()).backward()
            scaler.step(optimizer)
            if step == 1:
                scaler.update(2.0**10 if RANK == 0 else None)
            else:
                scaler.update()
    except RuntimeError as error:
        return f"{bits([param])[0]} {str(error).partition(':')[0]}"
    return "no error"


def main() -> None:
    store = f"file://{FOLDER / 'store'}"
    backend = "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK % torch.cuda.device_count())
        backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    torch.distributed.init_process_group(backend, init_method=store, rank=RANK, world_size=2)
    schedules = {
        "default": castwise.schedules.Dynamic(2.0**10),
        "hold": castwise.schedules.Dynamic(2.0**10, on_nonfinite_loss="hold"),
        "headroom": castwise.schedules.Headroom(2.0**10),
    }
    results: dict[str, Any] = {
        f"{kind} {norm_type} {name}": trained(kind, norm_type, schedule)
        for kind in KINDS
        for norm_type in (None, 2.0, 5.0, math.inf)
        for name, schedule in schedules.items()
    }
    results["diverged"] = diverged()
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


main()
