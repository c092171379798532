"""The scaler in code that `torch.compile` compiles: `scale` is traced, the rest is left alone, the bits stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import castwise


def train(compiled: bool, fused: bool) -> tuple[Any, ...]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = castwise.GradScaler("cpu", growth_interval=2)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    run = torch.compile(step, backend="aot_eager") if compiled else step
    for index in range(6):
        run(torch.ones(3, 4) * (torch.inf if index == 3 else 1.0))
    return [parameter.tolist() for parameter in model.parameters()], scaler.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_trains_as_an_eager_one(fused: bool) -> None:
    assert train(compiled=True, fused=fused) == train(compiled=False, fused=fused)


def test_scaling_breaks_no_graph() -> None:
    torch.compiler.reset()
    scaler = castwise.GradScaler("cpu", init_scale=4.0)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return scaler.scale(x.sin().sum())

    x = torch.ones(3, requires_grad=True)
    for scale in (4.0, 8.0):
        loss = forward(x)
        assert torch.equal(loss, x.sin().sum() * scale)
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, x.cos() * scale)
        scaler.update(8.0)
