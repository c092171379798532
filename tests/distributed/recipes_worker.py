"""Trains linear layers by recipes under DDP and FSDP2, and prints what became of them.

Run by `test_recipes_ranks.py`, once for each rank: `python recipes_worker.py RANK WORLD_SIZE FILE WHAT`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import castwise
from castwise import Policy, WeightCache

RECIPES = ["float8_tensorwise", "float8_rowwise_with_gw_hp", "mxfp8", "nvfp4"]


def train(recipe: str, how: str, rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 4))
    policy = Policy(compute="bfloat16", modules={"0": recipe, "2": recipe}, backend="emulated")
    gathered = []
    if how.startswith("FSDP2"):
        for unit, mp_policy in policy.fsdp(net, ["0", "2"]):
            gathered.append(str(mp_policy.param_dtype))
            fully_shard(unit, mp_policy=mp_policy)
    elif how == "DDP":
        net = DistributedDataParallel(net)
    bound = policy.bind(net)
    cache = WeightCache(net) if how.endswith("cached") else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).chunk(world_size)[rank]
    losses = []
    for _ in range(4):
        with castwise.autocast("cpu", policy=bound, weight_cache=cache):
            loss = net(rows).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return {"losses": losses, "weights": [w.flatten().tolist() for w in whole], "gathered": gathered}


def refused() -> str:
    net = nn.Sequential(nn.Linear(32, 32))
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    try:
        Policy(compute="bfloat16", modules={"0": "mxfp8"}).bind(net)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)
    rank, world_size, _ = join(sys.argv)
    report = {
        recipe: {how: train(recipe, how, rank, world_size) for how in ("DDP", "FSDP2", "FSDP2 cached")}
        for recipe in RECIPES
    }
    error = refused()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"recipes": report, "error": error}), flush=True)


if __name__ == "__main__":
    main()
