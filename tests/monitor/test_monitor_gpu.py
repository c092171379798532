"""On a real GPU: the host does not wait for it, and what is recorded is what a CPU finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.monitor import Monitor
from castwise.monitor._exponents import count, tally

pytestmark = pytest.mark.gpu


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_exponents_are_those_that_a_cpu_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(3000, 2000) * torch.exp2(torch.randint(-140, 120, (3000, 2000)).float())).to(dtype)
    assert tally(count(values.cuda()).cpu()) == tally(count(values))


def test_a_sampled_step_does_not_wait_for_the_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler, records = castwise.GradScaler("cuda"), list[dict[str, Any]]()
    x = torch.ones(4, 8, device="cuda")
    monitor = Monitor(model, optimizer, scaler, every=1, sinks=[records.append]).attach()
    with no_sync():
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    kinds = [record["kind"] for record in records]
    assert kinds == ["run", *["step", "sample"] * 3]
    monitor.detach()
    assert [record["step"] for record in records if record["kind"] == "sample"] == [1, 2, 3, 4, 5]
    assert all(record["weights"] for record in records if record["kind"] == "sample")
