"""The optimizer inside what frameworks make of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer

import castwise
from castwise._wrapped_optimizers import unwrapped
from castwise.monitor import Run
from castwise.monitor._run_files import run_in


@pytest.fixture(autouse=True)
def state_of_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class OfDeepSpeed:
    """As its ZeRO optimizers: no `torch.optim.Optimizer`, and one in `.optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def by_post_local_sgd(optimizer: torch.optim.Optimizer) -> Any:
    """As for local SGD: a `torch.optim.Optimizer` without hooks of its own."""
    return PostLocalSGDOptimizer(optimizer, SimpleNamespace(average_parameters=lambda params: None))  # type: ignore[arg-type]


class Lookahead(torch.optim.Optimizer):
    """An optimizer of its own that makes use of another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def by_fabric(optimizer: torch.optim.Optimizer) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


def by_accelerate(optimizer: torch.optim.Optimizer) -> Any:
    return Accelerator(cpu=True).prepare(optimizer)


def by_accelerate_twice(optimizer: torch.optim.Optimizer) -> Any:
    return OfDeepSpeed(by_accelerate(optimizer))


@pytest.mark.parametrize(
    "wrap", [by_fabric, LightningOptimizer, by_accelerate, OfDeepSpeed, by_accelerate_twice, by_post_local_sgd]
)
@pytest.mark.parametrize("several", [True, False])
def test_a_monitor_sees_the_steps_of_a_wrapped_optimizer(wrap: Any, several: bool) -> None:
    model, records = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, wrapped = castwise.GradScaler("cpu"), wrap(optimizer)
    with castwise.Monitor(model, [wrapped] if several else wrapped, scaler, sinks=[records.append]):
        scaler.scale(model(torch.ones(3, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [record["kind"] for record in records] == ["run", "step", "sample", "end"]
    assert records[0]["settings"]["optimizer"] == "SGD"
    assert [*records[2]["weights"]] == ["weight", "bias"]


@pytest.mark.parametrize("wrap", [by_fabric, by_accelerate, OfDeepSpeed])
def test_steps_and_skips_are_recorded_where_the_scaler_steps_the_wrapper(wrap: Any) -> None:
    model, records = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, wrapped = castwise.GradScaler("cpu"), wrap(optimizer)
    wrapped.param_groups = optimizer.param_groups  # which OfDeepSpeed has not
    with warnings.catch_warnings(), castwise.Monitor(model, [wrapped, optimizer], scaler, sinks=[records.append]):
        warnings.simplefilter("error")
        for factor in [1.0, 1.0, math.nan, 1.0]:
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 2)).sum() * factor).backward()
            scaler.step(wrapped)
            scaler.update()
    steps = [(record["step"], record["skipped"]) for record in records if record["kind"] == "step"]
    samples = {record["step"]: [*record["weights"]] for record in records if record["kind"] == "sample"}
    assert steps == [(1, False), (2, False), (3, True), (4, False)]
    assert samples == {1: ["weight", "bias"], 2: ["weight", "bias"], 3: [], 4: ["weight", "bias"]}


def test_an_unchanged_script_with_local_sgd_is_recorded(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with castwise.installed(out=tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = by_post_local_sgd(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    assert [step.step for step in Run.read(run_in(tmp_path) / "Linear").steps] == [1, 2, 3]


def test_a_wrapper_inside_of_itself_is_no_optimizer() -> None:
    wrapper = OfDeepSpeed(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    wrapper.optimizer = OfDeepSpeed(wrapper)  # type: ignore[assignment, arg-type]
    assert unwrapped(wrapper) is wrapper
    with pytest.raises(TypeError, match=r"got OfDeepSpeed"):
        castwise.Monitor(nn.Linear(2, 1), wrapper)  # type: ignore[arg-type]


def test_an_optimizer_that_is_made_of_another_one_stays_as_it_is() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    outer = Lookahead(optimizer)
    assert unwrapped(optimizer) is optimizer
    assert unwrapped(outer) is outer
    assert unwrapped(LightningOptimizer(outer)) is outer


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer or a sequence of them, got Linear"):
        castwise.Monitor(nn.Linear(2, 1), nn.Linear(2, 1))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"optimizer must be a torch.optim.Optimizer or a sequence of them, got OfDeepSpeed"
    ):
        castwise.Monitor(nn.Linear(2, 1), OfDeepSpeed(None))  # type: ignore[arg-type]
