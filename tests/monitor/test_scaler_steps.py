"""A monitor that was given another optimizer or scaler than the training's says so, once."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch import nn

import castwise
from castwise.amp._observers import OBSERVERS


def step(scaler: Any, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    scaler.scale(model(torch.ones(3, 2)).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def training() -> tuple[nn.Module, torch.optim.Optimizer, castwise.GradScaler]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "saw no step" in str(each.message)]


def test_another_optimizer_is_named_after_three_updates_and_once() -> None:
    model, optimizer, scaler = training()
    made_later = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught, castwise.Monitor(model, optimizer, scaler):
        for updates in range(1, 8):
            step(scaler, model, made_later)
            assert len(texts(caught)) == (updates >= 3)
    assert texts(caught) == [
        "the monitor saw no step in 3 updates of the scale and records nothing: scaler.step() receives a different "
        "optimizer (AdamW) than the monitor (SGD). Pass Monitor the optimizer that scaler.step() receives"
    ]
    assert caught[0].filename == __file__
    assert OBSERVERS == []


def test_another_scaler_is_reported_of() -> None:
    model, optimizer, scaler = training()
    with warnings.catch_warnings(record=True) as caught, castwise.Monitor(model, optimizer, castwise.GradScaler("cpu")):
        for _ in range(5):
            step(scaler, model, optimizer)
    (text,) = texts(caught)
    assert text.endswith("use a different GradScaler than the monitor's. Pass Monitor the scaler that steps")


def test_one_step_that_is_seen_is_enough() -> None:
    model, optimizer, scaler = training()
    other = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught, castwise.Monitor(model, optimizer, scaler):
        step(scaler, model, optimizer, other)
        for _ in range(5):
            step(scaler, model, other)
    assert texts(caught) == []


def test_another_model_may_be_stepped_more_often() -> None:
    model, optimizer, scaler = training()
    critic = nn.Linear(2, 1)
    optimizer_of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught, castwise.Monitor(model, optimizer, scaler):
        for _ in range(5):
            step(scaler, critic, optimizer_of_critic)
    assert texts(caught) == []


def test_a_monitor_without_a_scaler_sees_steps_with_any() -> None:
    model, optimizer, scaler = training()
    with warnings.catch_warnings(record=True) as caught, castwise.Monitor(model, optimizer):
        for _ in range(5):
            step(scaler, model, optimizer)
    assert texts(caught) == []


def test_a_monitor_that_is_gone_observes_no_more() -> None:
    model, optimizer, scaler = training()
    castwise.Monitor(model, optimizer, scaler).attach()
    del optimizer, scaler
    gc.collect()
    assert OBSERVERS == []


def test_where_warnings_are_errors_the_training_goes_on() -> None:
    model, optimizer, scaler = training()
    other = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(), castwise.Monitor(model, optimizer, scaler):
        warnings.simplefilter("error")
        for _ in range(5):
            step(scaler, model, other)
    assert scaler.iteration == 6
