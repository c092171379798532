"""ShardedGradScaler with FSDP on two ranks over gloo, as torch's own test does: both have to take the same steps.

torchrun --nproc-per-node 2 sharded_ranks.py
"""

import itertools

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

dist.init_process_group("gloo")
strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
for strategy, low in itertools.product(strategies, (False, True)):
    torch.manual_seed(0)
    layers = [FullyShardedDataParallel(nn.Linear(8, 8), sharding_strategy=strategy, device_id=torch.device("cpu"))]
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    model = FullyShardedDataParallel(
        nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 2)),
        sharding_strategy=strategy,
        mixed_precision=precision,
        cpu_offload=CPUOffload(False),
        device_id=torch.device("cpu"),
    )
    scaler = ShardedGradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(6):
        x = torch.full((2, 8), 1e30 if step == 2 and dist.get_rank() == 1 else 0.5 + dist.get_rank())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(strategy.name, low, step, loss.item(), norm.item(), scaler.get_scale(), flush=True)
dist.destroy_process_group()
