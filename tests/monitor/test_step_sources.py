"""Steps that no scaler tells of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from castwise.amp import StepFacts
from castwise.monitor._step_sources import OptimizerSource


def optimizer_on(device: str) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    weight.grad = torch.ones_like(weight)
    return torch.optim.SGD([weight], lr=0.1)


# Any device but a CPU will do for one that must not be waited for.
@pytest.mark.parametrize(("device", "reported"), [("cpu", [1, 2, 3, 4]), ("meta", [1, 2])])
def test_facts_come_as_late_as_those_of_a_scaler(device: str, reported: list[int]) -> None:
    optimizer, facts = optimizer_on(device), list[StepFacts]()
    steps = OptimizerSource([optimizer])
    handle = steps.register_step_hook(facts.append)
    for _ in range(4):
        optimizer.step()
    assert [fact.number for fact in facts] == reported
    steps.synchronize()
    assert [fact.number for fact in facts] == [1, 2, 3, 4]
    handle.remove()
    optimizer.step()
    assert len(facts) == 4
    assert facts[0] == StepFacts(1, optimizer, scale=1.0, skipped=False, iteration=1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_facts_of_a_step_have_the_number_that_was_known_before_it(device: str) -> None:
    optimizers, facts = [optimizer_on(device), optimizer_on(device)], list[StepFacts]()
    steps = OptimizerSource(optimizers)
    steps.register_step_hook(facts.append)
    before = []
    for optimizer in optimizers * 2:
        before.append((optimizer, steps.iteration))
        optimizer.step()
    steps.synchronize()
    assert [(fact.optimizer, fact.iteration) for fact in facts] == before


def test_gradients_are_shown_before_the_step_with_a_scale_of_1() -> None:
    optimizer, seen = optimizer_on("cpu"), list[Any]()
    weight = optimizer.param_groups[0]["params"][0]

    def look(of: torch.optim.Optimizer, scale: torch.Tensor) -> None:
        seen.append((of, scale.item(), weight.tolist()))

    handle = OptimizerSource([optimizer]).register_gradients_hook(look)
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == [(optimizer, 1.0, [1.0, 1.0])]
