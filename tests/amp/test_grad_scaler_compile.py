"""The scaler in code that `torch.compile` compiles: `scale` is traced, the rest is left alone, the bits stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import castwise


def train(compiled: bool, fused: bool, folded: bool = False) -> tuple[Any, ...]:
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
        if folded:
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif not fused:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    run = torch.compile(step, backend="aot_eager") if compiled else step
    for index in range(6):
        # The second batch size makes Dynamo compile again.
        run(torch.ones(3 if index < 4 else 5, 4) * (torch.inf if index == 3 else 1.0))
    return [parameter.tolist() for parameter in model.parameters()], scaler.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("fused", "folded"), [(False, False), (True, False), (True, True)])
def test_a_compiled_step_trains_as_an_eager_one(fused: bool, folded: bool) -> None:
    assert train(True, fused, folded) == train(False, fused, folded)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_breaks_no_more_graphs_than_the_optimizer_does(fused: bool) -> None:
    def breaks(scaler: castwise.GradScaler | None) -> int:
        """Count the breaks of a step that are not the backward's."""
        torch.compiler.reset()
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        if scaler is not None:
            scaler.scale(torch.ones(()))

        @torch.compile(backend="aot_eager")
        def step(x: torch.Tensor) -> None:
            loss = (param * x).sum()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

        counters.clear()
        for _ in range(3):
            step(torch.ones(3))
        return sum(count for reason, count in counters["graph_break"].items() if "backward()" not in reason)

    without = breaks(None)
    assert without >= 2
    assert breaks(castwise.GradScaler("cpu")) <= without


@pytest.mark.parametrize("clip", [False, True])
def test_a_backward_of_a_compiled_loss_makes_shared_gradients_scaled_again(clip: bool) -> None:
    def train(compiled: bool) -> list[Any]:
        torch.compiler.reset()
        scaler = castwise.GradScaler("cpu", init_scale=4.0)
        shared, own = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0))
        first, second = torch.optim.SGD([shared], lr=0.5), torch.optim.SGD([shared, own], lr=0.25)

        def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return scaler.scale((x * y).sum())

        run = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
        for _ in range(3):
            second.zero_grad()
            run(shared, own).backward()
            if clip:
                scaler.clip_grad_norm_(first, 1e9)
            else:
                scaler.unscale_(first)
            run(own, own).backward()
            scaler.step(first)
            second.zero_grad(set_to_none=False)
            run(shared, own).backward()
            scaler.step(second)
            scaler.update()
        return [shared.tolist(), own.tolist()]

    assert train(compiled=True) == train(compiled=False)


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
