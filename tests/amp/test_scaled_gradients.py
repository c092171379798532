"""What a scaler knows of each optimizer's gradients, and tells ranks, tools and users of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.amp.scalers import Fused, agreeing, scaled, weight
from torch import nn

from castwise.amp.grad_scaler import GradScaler
from castwise.schedules import Headroom


def test_optimizers_have_numbers_in_the_order_in_which_they_came() -> None:
    params = [weight(1.0) for _ in range(3)]
    scaler = scaled(*params)
    rank = agreeing(scaler)
    first, second, third = (torch.optim.SGD([param]) for param in params)
    scaler.unscale_(first)
    scaler.clip_grad_norm_(second, 0.5, 1.0)
    scaler.clip_grad_value_(third, 0.25)
    scaler.step(first)
    assert rank.calls == [
        ("unscale_", 0),
        ("clip_grad_norm_", 1, 0.5, 1.0),
        ("clip_grad_value_", 2, 0.25),
        ("step", 0),
    ]


@pytest.mark.parametrize(
    ("calls", "collectives"),
    [
        (["unscale_", "step"], ["step()"]),
        (["unscale_", "_found_inf_per_device", "step"], ["_found_inf_per_device()"]),
        (["clip", "step"], ["clip_grad_norm_(1.0, 2.0)"]),
        (["clip", "unscale_", "step"], ["clip_grad_norm_(1.0, 2.0)"]),
        (["unscale_", "update"], ["update()"]),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_agree_once_on_what_was_found(calls: list[str], collectives: list[str], fused: bool) -> None:
    scaler = scaled(param := weight(1.0))
    rank, optimizer = agreeing(scaler), Fused([param], fused=fused)
    actions = {
        "clip": lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        "update": scaler.update,
    }
    for call in calls:
        actions.get(call, lambda call=call: getattr(scaler, call)(optimizer))()  # type: ignore[misc]  # bound now
    assert rank.collectives == [f"{each} with {scaler.schedule}" for each in collectives]


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_that_finds_an_inf_skips(fused: bool) -> None:
    scaler = scaled(param := weight(1.0))
    agreeing(scaler)
    param.grad.fill_(torch.inf)
    scaler.unscale_(optimizer := Fused([param], fused=fused))
    scaler.step(optimizer)
    assert param.item() == 1.0


@pytest.mark.parametrize("by_hand", [True, False])
def test_gradients_that_change_after_ranks_have_clipped_them_have_to_be_clipped_again(by_hand: bool) -> None:
    scaler = scaled(param := weight(1.0))
    agreeing(scaler)
    scaler.clip_grad_norm_(optimizer := Fused([param]), 1.0)
    param.grad = None
    if by_hand:
        param.grad = torch.ones(1)
    else:
        scaler.scale(param.sum()).backward()
    text = (
        "the gradients have changed since clip_grad_norm_() measured them on all ranks: call it again on all ranks, "
        "when all gradients of the step are accumulated"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scaler.step(optimizer)
    if not by_hand:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        assert abs(param.item()) < 1e-5


def test_the_words_for_a_call_that_comes_too_late() -> None:
    scaler = scaled(param := weight(1.0))
    optimizer = torch.optim.SGD([param])
    scaler.unscale_(optimizer)
    text = (
        "unscale_() has already been called on this optimizer since the last update(). "
        "Call it once per step, and scaler.update() after the step"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaled(param, scaler=scaler)
    text = (
        "step() is being called after a backward has added to gradients that were already clipped: "
        "clip only when all gradients of a step are accumulated"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scaler.step(optimizer)


def test_a_second_batch_of_one_fp16_weight_of_a_fused_optimizer() -> None:
    first, second = weight(1.0, dtype=torch.float16), weight(1.0, dtype=torch.float16)
    scaler, optimizer = scaled(first, second), Fused([first, second])
    scaler.clip_grad_norm_(optimizer, 100.0)
    second.grad = None
    scaled(second, scaler=scaler)
    scaler.step(optimizer)
    assert (first.item(), second.item()) == (0.0, 0.0)


def test_a_schedule_that_wants_the_largest_gradient_gets_it_from_an_unscaling_of_ones_own() -> None:
    class Lets(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    half = weight(1.0, 3.0, dtype=torch.float16)
    scaler = Lets("cpu", schedule=Headroom(init_scale=4.0))
    scaler.scale((half.float() * half.float()).sum()).backward()
    scaler.unscale_(optimizer := torch.optim.SGD([half]))
    assert scaler._iteration.records[id(optimizer)].largest.item() == 6.0


def test_a_sparse_gradient_in_fp32_stays_as_it_is() -> None:
    param = nn.Parameter(torch.zeros(3))
    scaler = GradScaler("cpu", init_scale=4.0, allow_fp16_gradients=True)
    scaler.scale(param.sum())
    param.grad = torch.sparse_coo_tensor([[1, 1]], [4.0, 8.0], (3,))
    scaler.unscale_(torch.optim.SGD([param]))
    assert param.grad._values().tolist() == [1.0, 2.0], "twice the same place"


def test_gradients_are_shown_of_each_optimizer_and_never_before_there_is_a_scale() -> None:
    first, second = weight(1.0), weight(1.0)
    shown = []
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.register_gradients_hook(lambda optimizer, scale: shown.append((optimizer, scale.item())))
    optimizers = [Fused([first]), torch.optim.SGD([second])]
    for optimizer in optimizers:
        with pytest.raises(RuntimeError, match=r"step\(\) needs a scale"):
            scaler.step(optimizer)
    assert not shown
    scaled(first, second, scaler=scaler)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert shown == [(optimizer, 4.0) for optimizer in optimizers]


@pytest.mark.parametrize("fused", [False, True])
def test_the_largest_gradient_is_that_before_any_clipping(fused: bool) -> None:
    param = weight(3.0, 4.0)
    scaler = GradScaler("cpu", schedule=Headroom(init_scale=4.0))
    scaler.scale((param * param).sum()).backward()
    optimizer = Fused([param], fused=fused)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.clip_grad_norm_(optimizer, 0.5)
    assert scaler._iteration.records[id(optimizer)].largest.item() == 8.0


def test_fp64_gradients_beyond_fp32_are_stepped_under_headroom() -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer, scaler = torch.optim.SGD([param], lr=1e-200), GradScaler("cpu", schedule=Headroom(init_scale=4.0))
    scaler.scale(torch.ones((), dtype=torch.float64))
    param.grad = torch.tensor([4e200, 0.0], dtype=torch.float64)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_skipped
    assert param.tolist() == pytest.approx([-1.0, 0.0])
