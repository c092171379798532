"""Observers are notified of all uses of scalers and regions, in order, and change nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import castwise
from castwise.amp._observers import OBSERVERS, Observer, add_hook


@pytest.fixture
def events() -> Iterator[list[str]]:
    """The events that an observer has received, while it is there."""
    seen: list[str] = []

    class Everything(Observer):
        def __getattribute__(self, name: str) -> Any:
            return lambda *_, **facts: seen.append(
                " ".join([name, *(f"{key}={value}" for key, value in facts.items())])
            )

    observer = Everything()
    OBSERVERS.append(observer)
    yield seen
    OBSERVERS[:] = [other for other in OBSERVERS if other is not observer]


def train(**options: Any) -> tuple[castwise.GradScaler, torch.Tensor]:
    scaler = castwise.GradScaler("cpu", 8.0, **options)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        loss = weight.sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler, weight.detach()


def test_a_step_is_distinguished_from_its_scaler_to_its_update(events: list[str]) -> None:
    train()
    made, entered, left, scaled, stepping, *inside, stepped, updating = events
    assert [made, entered, left, scaled] == ["scaler_created wanted=True", "entered", "left", "scaled"]
    assert (stepping, inside, stepped, updating) == ("stepping", ["unscaling"], "stepped", "updating is_set=False")


def test_clipping_saving_loading_and_asking_are_reported(events: list[str]) -> None:
    scaler, _ = train()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)
    for call in (
        lambda: scaler.scale(weight.sum()).backward(),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: scaler.clip_grad_value_(optimizer, 1.0),
        lambda: scaler.update(4.0),
        lambda: scaler.load_state_dict(scaler.state_dict()),
        scaler.get_scale,
    ):
        events.append("--")
        call()  # type: ignore[no-untyped-call]
    calls = " ".join(events).split(" -- ")[1:]
    assert calls[:4] == ["scaled", "unscaling", "unscaling", "updating is_set=True"]
    assert set(calls[4].split()) == {"reading_scale", "saving", "loaded"}
    assert calls[5] == "reading_scale"


def test_the_end_of_a_step_that_fails_is_reported(events: list[str]) -> None:
    scaler = castwise.GradScaler("cpu")
    events.clear()
    with pytest.raises(RuntimeError, match="needs a scale"):
        scaler.step(torch.optim.SGD([torch.zeros(1)]))
    assert events == ["stepping", "stepped"]


def test_of_a_disabled_scaler_steps_are_reported(events: list[str]) -> None:
    train(enabled=False)
    assert events == ["scaler_created wanted=False", "entered", "left", "stepping", "stepped"]


def test_nothing_changes_for_being_observed(events: list[str]) -> None:
    _, observed = train()
    OBSERVERS.clear()
    _, alone = train()
    assert torch.equal(observed, alone)
    assert events


def test_an_observer_may_leave_out_what_it_does_not_want_to_know() -> None:
    class Saves(Observer):
        def saving(self, scaler: Any) -> None:
            saved.append(scaler)

    saved: list[Any] = []
    OBSERVERS.append(observer := Saves())
    try:
        scaler, _ = train()
        scaler.load_state_dict(scaler.state_dict())
        scaler.clip_grad_norm_(torch.optim.SGD([torch.zeros(1)]), 1.0)
    finally:
        OBSERVERS.remove(observer)
    assert saved == [scaler]


def test_a_hook_is_there_until_its_handle_removes_it() -> None:
    hooks: OrderedDict[int, Any] = OrderedDict()
    first, second = add_hook(hooks, "first"), add_hook(hooks, "second")
    assert list(hooks.values()) == ["first", "second"]
    first.remove()
    assert list(hooks.values()) == ["second"]
    second.remove()
    assert not hooks


def test_they_are_given_the_scaler_and_the_optimizer() -> None:
    given: dict[str, tuple[Any, ...]] = {}

    class Remembers(Observer):
        def __getattribute__(self, name: str) -> Any:
            return lambda *objects, **_: given.update({name: objects})

    OBSERVERS.append(observer := Remembers())
    try:
        for call in ("unscale_", "clip_grad_norm_", "clip_grad_value_", "step"):
            given.clear()
            scaler, weight = castwise.GradScaler("cpu"), torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([weight], 0.5)
            scaler.scale(loss := weight.sum())
            weight.grad = torch.ones(2)
            getattr(scaler, call)(optimizer, *([] if call in ("unscale_", "step") else [1.0]))
            assert given["scaler_created"] == (scaler,)
            assert given["scaled"][0] is scaler
            assert given["scaled"][1] is loss
            assert given["unscaling"] == (scaler, optimizer)
        scaler.update()
        scaler.load_state_dict(scaler.state_dict())
        with castwise.autocast("cpu", dtype=torch.bfloat16) as region:
            pass
        scaler.get_scale()
        saved = given.pop("saving")
        copy.deepcopy(scaler)
    finally:
        OBSERVERS[:] = [other for other in OBSERVERS if other is not observer]
    assert given["entered"] == given["left"] == (region,)
    assert given["stepping"] == given["stepped"] == (scaler, optimizer)
    assert given["updating"] == saved == given["saving"] == given["loaded"] == given["reading_scale"] == (scaler,)
