"""DDP and FSDP2 over NCCL, with one GPU: tests/accelerator/test_ranks.py needs two for agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import castwise

pytestmark = pytest.mark.gpu

DEVICE, BACKEND = torch.device("cuda", 0), "nccl"


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    torch.distributed.init_process_group(BACKEND, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def trained(wrap: Callable[[nn.Module], Any], scaler: Any, **kind: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Train on six batches, of which the third has an inf; return the weights and the scales."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(DEVICE))
    optimizer, scales = torch.optim.AdamW(model.parameters(), lr=0.01, **kind), []
    for seed in range(6):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        optimizer.zero_grad()
        with castwise.autocast(DEVICE.type, dtype=torch.float16):
            loss = model(batch * (math.inf if seed == 2 else 1.0)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    weights = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return [weight.detach() for weight in weights], scales


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0])
    fully_shard(model)
    return model


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("wrap", [in_ddp, sharded])
def test_a_model_on_one_rank_over_nccl_trains_as_without_a_group(wrap: Any, kind: dict[str, bool]) -> None:
    expected, scales = trained(lambda model: model, castwise.GradScaler(DEVICE.type, init_scale=2.0**10), **kind)
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    weights, seen = trained(wrap, castwise.ShardedGradScaler(DEVICE.type, init_scale=2.0**10), **kind)
    assert seen == scales
    for ours, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
