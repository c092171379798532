"""Iterations in an order that few scripts have: dropped batches, later losses, ranks with other dtypes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.amp.ranks_in_threads import World
from tests.amp.scalers import Fused, weight

from castwise.amp.grad_scaler import GradScaler


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_dropped_batch_two_losses_on_different_weights_are_both_unscaled(fused: bool) -> None:
    scaler, first, second = GradScaler("cpu"), weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([first, second], lr=1e-3, fused=fused)
    scaler.scale(first.sum() + second.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 100.0)
    optimizer.zero_grad()  # the batch is dropped
    scaler.scale(first.sum()).backward()
    scaler.scale(second.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [first.item(), second.item()] == pytest.approx([0.999, 0.999])


def test_a_backward_that_adds_to_clipped_gradients_is_refused_whatever_losses_follow() -> None:
    scaler, first, second = GradScaler("cpu"), weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([first, second], lr=1e-3)
    scaler.scale(first.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 100.0)
    scaler.scale(first.sum()).backward()
    scaler.scale(second.sum()).backward()
    with pytest.raises(RuntimeError, match="added to gradients that were already clipped"):
        scaler.step(optimizer)


def test_ranks_agree_on_an_fp16_gradient_that_unscaling_makes_infinite_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(rank: int) -> Any:
        scaler = GradScaler("cpu", 0.5, allow_fp16_gradients=True, process_group=torch.distributed.group.WORLD)
        param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = torch.optim.SGD([param], lr=1e-9)
        scaler.scale(param.sum())
        param.grad = torch.full((2,), 60_000.0 if rank == 0 else 1.0, dtype=torch.float16)
        scaler.clip_grad_norm_(optimizer, 1e6)
        scaler.step(optimizer)
        scaler.update()
        return bool(scaler.step_skipped), scaler.get_scale()

    outcomes = World(2, monkeypatch).run(train)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] is True


def test_a_step_whose_clipping_overflowed_is_skipped_even_if_a_later_loss_replaces_a_gradient() -> None:
    scaler, first, second = GradScaler("cpu", 2.0**100), weight(1.0), weight(1.0)
    optimizer = Fused([first, second])
    scaler.scale(torch.ones(()))
    first.grad, second.grad = torch.tensor([2.0**100]), torch.tensor([2.0**100])
    scaler.clip_grad_norm_(optimizer, 1e-12)  # 2**100 / 1e-12 is no number of fp32
    scaler.scale(torch.ones(()))
    second.grad = torch.tensor([2.0**100])
    scaler.step(optimizer)
    assert scaler.step_skipped


@pytest.mark.parametrize("scale", [41.0, 47.0, 55.0])
def test_a_shared_gradient_is_unscaled_once_to_the_last_bit(scale: float) -> None:
    scaler, param = GradScaler("cpu", scale), weight(1.0)
    optimizers = [torch.optim.SGD([param], lr=1.0), torch.optim.SGD([param], lr=1.0)]
    for optimizer in optimizers:  # both are known from the iteration before
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
    scaler.update()
    param.grad = None
    scaler.scale((param * (1 / 3)).sum()).backward()
    scaler.unscale_(optimizers[0])
    once = param.grad.clone()
    scaler.unscale_(optimizers[1])
    assert torch.equal(param.grad, once)


def test_a_disabled_scaler_leaves_no_hooks() -> None:
    scaler, param = GradScaler("cpu", enabled=False), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not getattr(param, "_post_accumulate_grad_hooks", None)
    assert not scaler.step_skipped


def test_a_disabled_scaler_whose_numbers_are_wrong_has_a_schedule() -> None:
    assert GradScaler("cpu", enabled=False, growth_factor=-1.0).schedule == GradScaler("cpu").schedule


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_are_unscaled_are_checked_as_they_are(clips: bool) -> None:
    scaler, param = GradScaler("cpu", 2.0**-10), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1e-38)
    scaler.scale(param.sum())
    param.grad = torch.tensor([1e34])
    scaler.unscale_(optimizer)
    if clips:
        scaler.clip_grad_norm_(optimizer, math.inf)
    assert [found.item() for found in scaler._check_inf_per_device(optimizer).values()] == [0.0]
    scaler.step(optimizer)
    assert not scaler.step_skipped
