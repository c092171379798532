"""What a scaler multiplies losses by: how it is made, asked for and set."""

from __future__ import annotations

import re

import pytest
import torch
from tests.amp.scalers import agreeing, scaled, weight

from castwise.amp.grad_scaler import GradScaler
from castwise.schedules import Static


def test_the_scale_is_fp32_and_with_its_tracker_where_the_loss_is_whatever_the_defaults_are() -> None:
    loss, before = torch.ones(()), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            scaler = GradScaler("cpu")
            scaler.scale(loss)
    finally:
        torch.set_default_dtype(before)
    scale, tracker = scaler._check_scale_growth_tracker("test")
    assert (scale.dtype, scale.device.type) == (torch.float32, "cpu")
    assert (tracker.dtype, tracker.device.type) == (torch.int32, "cpu")


def test_a_tracker_without_a_scale_is_refused() -> None:
    scaler = GradScaler("cpu")
    scaler._growth_tracker = torch.zeros((), dtype=torch.int32)
    text = "the growth tracker is set but the scale is not: set both or neither"
    with pytest.raises(RuntimeError, match=f"{text}$"):
        scaler.scale(torch.ones(()))


def test_the_words_before_there_is_a_scale() -> None:
    text = (
        "update() needs a scale, which the first scale() creates: call scaler.scale(loss).backward() earlier in the "
        "iteration"
    )
    with pytest.raises(RuntimeError, match=f"{re.escape(text)}$"):
        GradScaler("cpu").update()


def test_a_stage_of_a_pipeline_may_have_no_loss_to_scale() -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), weight(1.0)
    agreeing(scaler, stages=2)
    param.grad = torch.tensor([4.0])
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert param.item() == 0.0


def test_whether_all_ranks_agree_and_which_iteration_it_is() -> None:
    scaler = scaled(param := weight(1.0))
    assert scaler.agrees is False
    agreeing(scaler)
    assert scaler.agrees is True
    assert scaler.iteration == 1
    scaler.step(torch.optim.SGD([param]))
    scaler.update()
    assert scaler.iteration == 2


def test_the_schedule_has_the_numbers_that_were_set() -> None:
    scaler = GradScaler("cpu")
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(3)
    rule = scaler.schedule
    assert (rule.growth_factor, rule.backoff_factor, rule.growth_interval) == (4.0, 0.25, 3)  # type: ignore[attr-defined]  # of Dynamic


@pytest.mark.parametrize(
    ("setter", "name"),
    [
        ("set_growth_factor", "growth_factor"),
        ("set_backoff_factor", "backoff_factor"),
        ("set_growth_interval", "growth_interval"),
    ],
)
def test_what_a_schedule_does_not_have_cannot_be_set(setter: str, name: str) -> None:
    scaler = GradScaler("cpu", schedule=Static(4.0))
    text = f"{Static(4.0)} has no {name}, so it cannot be set"
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        getattr(scaler, setter)(2)
