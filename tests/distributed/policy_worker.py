"""Trains a model under policies and FSDP2, and prints what became of it.

Run by `test_policy_fsdp.py`, once for each rank: `python policy_worker.py RANK WORLD_SIZE FILE WHAT`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import castwise
from castwise import Policy, WeightCache


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4))


POLICIES: dict[str, dict[str, Any]] = {
    "one dtype": {},
    "norms and the last layer in fp32": {"modules": {nn.LayerNorm: "float32", "3": "float32"}, "output": "float32"},
    "a block in fp32": {"modules": {"1": "float32"}},
    "ops": {"ops": {"relu": "float32", "layer_norm": "bfloat16"}},
}
STEPS = 4


def train(fields: dict[str, Any], rank: int, world_size: int, how: str) -> dict[str, Any]:
    """Train on a part of the batch that every rank has of its own; without ranks, on the whole batch."""
    net = model()
    policy = Policy(**{"compute": "bfloat16", **fields})
    units: list[Any] = [Block, "type:LayerNorm"]
    if how != "one process":
        for unit, mp_policy in policy.fsdp(net, units):
            fully_shard(unit, mp_policy=mp_policy if how == "sharded" else MixedPrecisionPolicy())
    bound = policy.bind(net)
    cache = WeightCache(net) if how == "cached" else None
    seen: dict[str, str] = {}
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_hook(
                lambda module, _, out, name=name: seen.update({name: f"{module.weight.dtype} to {out.dtype}"})
            )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    rows = batch if how == "one process" else batch.chunk(world_size)[rank]
    losses = []
    for _ in range(STEPS):
        with castwise.autocast("cpu", policy=bound, weight_cache=cache):
            loss = net(rows).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if how != "one process":
            dist.all_reduce(total, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            total /= world_size
        losses.append(total.item())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    report = None if cache is None else {"cached": cache.report().cached, "refused": cache.report().refused}
    return {"losses": losses, "weights": [w.flatten().tolist() for w in whole], "seen": seen, "report": report}


def refused(gathered: torch.dtype, fields: dict[str, Any]) -> str:
    """Bind to a model that is gathered in a dtype of the user's; the error, if any."""
    net = model()
    for block in net[1:3]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=gathered))
    fully_shard(net)
    try:
        Policy(**{"compute": "bfloat16", **fields}).bind(net)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    rank, world_size, _ = join(sys.argv)
    report = {
        name: {
            how: train(fields, rank, world_size, how)
            for how in ("sharded", "gathered in fp32", "cached", "one process")
        }
        for name, fields in POLICIES.items()
    }
    errors = [
        refused(torch.bfloat16, {}),
        refused(torch.bfloat16, {"modules": {nn.LayerNorm: "float32"}}),
        refused(torch.float16, {}),
    ]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"policies": report, "errors": errors}), flush=True)


if __name__ == "__main__":
    main()
