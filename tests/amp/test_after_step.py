"""Calls that wait until it is known whether a step was taken."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from torch import nn

from castwise.amp._after_step import AfterSteps, LastStep, scheduler_call
from castwise.amp._readback import Flag


class Unknown:
    """A pending result, which has not reached the host."""

    is_on_host = False

    def __init__(self, skipped: bool) -> None:
        self.skipped = skipped

    def __bool__(self) -> bool:
        return self.skipped


def test_what_the_host_does_not_know_is_decided_two_updates_later() -> None:
    calls: list[str] = []
    waiting = AfterSteps()
    for iteration, skipped in ((1, False), (2, True), (3, False)):
        step = LastStep(iteration, [torch.tensor(0.0)], cast(Flag, Unknown(skipped)))
        waiting.add(step, lambda name=f"of {iteration}": calls.append(name))  # type: ignore[misc]  # bound now
    waiting.run(2)
    assert calls == []
    waiting.run(3)
    assert calls == ["of 1"]
    waiting.run(4)
    assert calls == ["of 1"], "the second step was skipped"
    waiting.run()
    assert calls == ["of 1", "of 3"]


def test_arguments_of_all_kinds_reach_schedules_and_functions() -> None:
    class Schedule:
        def step(self, *args: Any, **kwargs: Any) -> None:
            calls.append(("step", args, kwargs))

    calls: list[Any] = []
    scheduler_call(Schedule(), (1,), {"epoch": 2})()
    scheduler_call(lambda *args, **kwargs: calls.append(("function", args, kwargs)), (3,), {"by": 4})()
    assert calls == [("step", (1,), {"epoch": 2}), ("function", (3,), {"by": 4})]


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        (3, "scheduler must be a function or have a step() method, got int"),
        (
            nn.Identity(),
            "Identity is a module, and a call would run its forward: "
            "pass a function, such as lambda: average.update_parameters(model)",
        ),
    ],
)
def test_what_cannot_be_advanced_is_refused(scheduler: object, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        scheduler_call(scheduler, (), {})
