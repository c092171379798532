"""A step that is captured in a CUDA graph neither waits nor copies from or to the host.

On a GPU it is captured. On the simulated accelerator castwise only thinks so.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.accelerator.availability import DEVICE, IS_SIMULATED, simulated
from tests.accelerator.test_master_weights import OPTIONS
from tests.accelerator.test_master_weights import Training as LowTraining
from tests.accelerator.training import CLIPPING, Counted, Training, batches
from torch import nn

import castwise
from castwise._recipes.quantized_linear import linear
from castwise._recipes.recipe import RECIPES
from castwise.amp import _agreement as agreement
from castwise.amp import _outcomes as outcomes
from castwise.amp import _readback as readback
from castwise.amp import grad_scaler
from castwise.schedules import Dynamic, Guard, Headroom, Schedule, Static


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (agreement, grad_scaler, outcomes, readback) if IS_SIMULATED else ():
        monkeypatch.setattr(module, "is_capturing", lambda tensor: True)


def work_of(step: Any, warm: int = 3) -> dict[str, int]:
    """Return the waits and copies between host and device; on a GPU, raise unless a graph can capture the step."""
    *first, last = batches(warm + 1)
    if not IS_SIMULATED:
        from tests.accelerator.gpu import captured

        captured(step, last, warm)
        return {}
    for batch in first:
        step(batch)
    with Counted() as counted:
        step(last)
    copies = {name: count for name, (count, _, _) in counted.ops.items() if name.startswith("copy to the ")}
    return {**counted.waits, **copies}


def capturable(training: Any) -> Any:
    """Let the optimizer of a run be captured: torch wants to be asked."""
    for group in training.optimizer.param_groups:
        group["capturable"] = not IS_SIMULATED
    return training


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize(
    "schedule", [Dynamic(), Dynamic(on_nonfinite_loss="hold", hysteresis=2), Headroom(), Static(8.0), Guard()]
)
def test_a_fused_step_under_autocast(schedule: Schedule, clipping: str) -> None:
    assert work_of(capturable(Training(castwise, "fused", clipping, schedule=schedule)).step) == {}


@simulated
def test_a_step_that_is_not_fused_waits_so_it_cannot_be_captured() -> None:
    assert work_of(Training(castwise, "foreach").step)["event"] == 1


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_master_weights_with_a_fused_optimizer(options: str, scaled: bool) -> None:
    assert work_of(capturable(LowTraining("fused", OPTIONS[options], scaled=scaled)).step) == {}


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("schedule", [Dynamic(), Dynamic(on_nonfinite_loss="hold"), Headroom()])
def test_ranks_that_reduce_on_the_device(schedule: Schedule, clipping: str) -> None:
    training = capturable(Training(castwise, "fused", clipping))
    training.scaler = castwise.ShardedGradScaler(DEVICE, schedule=schedule)
    assert work_of(training.step) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    layer = nn.Linear(128, 128).to(DEVICE)
    x = torch.randn(128, 128).to(DEVICE).requires_grad_()

    def step(_: torch.Tensor) -> None:
        out = linear(x, layer.weight, layer.bias, RECIPES[recipe], False)
        out.backward(torch.ones_like(out))

    assert work_of(step, warm=1) == {}
