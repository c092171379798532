"""How a scaler steps optimizers: what reaches them, what is said of them, and what is left behind."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.amp.scalers import Fused, agreeing, scaled, weight
from torch import nn

from castwise.amp import Cause, StepFacts
from castwise.amp._observers import OBSERVERS, Observer
from castwise.amp._readback import Readback
from castwise.amp.grad_scaler import GradScaler
from castwise.schedules import Dynamic, Headroom


class TakesScaler(Fused):
    """The deprecated contract: the optimizer is given the scaler."""

    def step(self, closure: Any = None, *args: Any, grad_scaler: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        grad_scaler._check_inf_per_device(self)
        self.called_with = closure, args, kwargs


@pytest.fixture
def notified() -> Iterator[list[Any]]:
    """What the observers were notified of."""
    seen: list[Any] = []

    class Steps(Observer):
        def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
            seen.append((scaler, optimizer))

    OBSERVERS.append(observer := Steps())
    yield seen
    OBSERVERS.remove(observer)


@pytest.mark.parametrize(("cls", "enabled"), [(Fused, True), (Fused, False), (TakesScaler, True)])
def test_arguments_reach_the_step_also_when_observed(cls: Any, enabled: bool, notified: list[Any]) -> None:
    param = weight(1.0)
    scaler = scaled(param, enabled=enabled)
    optimizer = cls([param])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer, None, 3, by=5)
    assert optimizer.called_with == (None, (3,), {"by": 5})
    assert notified == [(scaler, optimizer)]


def test_an_optimizer_that_takes_the_scaler_gets_a_warning_with_what_to_do_instead() -> None:
    scaler = scaled(param := weight(1.0))
    text = (
        "step(grad_scaler=...) is deprecated: read the tensors grad_scale and found_inf that GradScaler "
        "sets on the optimizer instead"
    )
    with pytest.warns(FutureWarning, match=f"{re.escape(text)}$"):
        scaler.step(TakesScaler([param]))
    with pytest.raises(RuntimeError, match=r"step\(\) needs a scale"):
        GradScaler("cpu").step(TakesScaler([param]))
    with pytest.raises(RuntimeError, match=r"_check_inf_per_device\(\) needs a scale"):
        GradScaler("cpu")._check_inf_per_device(Fused([param]))


def test_a_closure_has_to_scale_its_loss() -> None:
    with pytest.raises(RuntimeError, match=r"step\(\) needs a scale"):
        GradScaler("cpu").step(Fused([weight(1.0)]), lambda: None)


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_ranks_that_are_no_stages_have_to_scale_their_losses(call: str) -> None:
    param, alone = weight(1.0), cast(Any, SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    param.grad = torch.full_like(param, 2.0)
    scaler = GradScaler("cpu", process_group=alone)
    with pytest.raises(RuntimeError, match=rf"{call}\(\) needs a scale.* or pass pipeline_stages= if other ranks"):
        getattr(scaler, call)(torch.optim.SGD([param]))
    assert (param.item(), param.grad.item()) == (1.0, 2.0)


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_record_each_call_and_with_what_they_go_together(fused: bool) -> None:
    scaler = scaled(param := weight(1.0), weight(1.0))
    ranks = agreeing(scaler)
    optimizer, other = Fused([param], fused=fused), Fused([weight(1.0)], fused=fused)
    scaler.step(optimizer)
    scaler.skip(other)
    known = "with Dynamic("
    assert [call for call in ranks.calls if call[0] != "unscale_"] == [("step", 0), ("skip", 1)]
    assert [call.split("Dynamic(")[0] + "Dynamic(" for call in ranks.collectives] == [f"step() {known}"]
    scaler.update()
    scaler.scale(param.sum()).backward()

    def evaluate() -> torch.Tensor:
        scaler.clip_grad_norm_(optimizer, 1.0)
        return torch.zeros(())

    del ranks.collectives[:]
    before = param.detach().clone()
    scaler.step(optimizer, evaluate)
    assert [call.partition(" with")[0] for call in ranks.collectives] == ["clip_grad_norm_(1.0, 2.0)", "step()"]
    assert not torch.equal(param, before)


def test_after_a_step_nothing_keeps_its_gradients() -> None:
    scaler = scaled(param := weight(1.0))
    optimizer = Fused([param])
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    gradient = weakref.ref(param.grad)
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


def test_a_gradient_that_only_unscaling_makes_infinite_is_named() -> None:
    param = weight(1.0)
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**-10), Fused([param])
    notified: list[StepFacts] = []
    scaler.register_step_hook(notified.append)
    scaler.scale(param.sum()).backward()
    param.grad = torch.full_like(param, 3e38)
    scaler.step(optimizer)
    scaler.update()
    assert [len(facts.parameters) for facts in notified] == [1]


def test_fp16_gradients_of_a_fused_optimizer_some_of_which_are_unscaled_already() -> None:
    shared, half = weight(1.0), weight(1.0, dtype=torch.float16)
    scaler = scaled(shared, half)
    scaler.unscale_(torch.optim.SGD([shared]))
    scaler.step(Fused([shared, half]))
    assert (shared.item(), half.item()) == (0.0, 0.0)


@pytest.mark.parametrize("first", ["unscale_", "step"])
def test_what_a_skipped_fused_step_has_left_is_known_to_the_optimizer_that_shares_it(first: str) -> None:
    shared, bad = weight(1.0), weight(1.0)
    scaler = scaled(shared, bad)
    bad.grad.fill_(torch.inf)
    fused, other = (torch.optim.SGD([*params], lr=1.0, fused=len(params) > 1) for params in ([shared, bad], [shared]))
    if first == "unscale_":
        scaler.unscale_(fused)
    scaler.step(fused)
    scaler.step(other)
    assert shared.item() == 0.0, "its gradient of 1 is unscaled once, before the step or in it"


def test_fp16_gradients_of_a_fused_optimizer_are_looked_at_whatever_they_are() -> None:
    first, second = weight(1.0, 1.0, dtype=torch.float16), weight(1.0, 1.0, dtype=torch.float16)
    scaler = scaled(first, second)
    second.grad = first.grad
    scaler.step(Fused([first, second]))
    assert first.tolist() == second.tolist() == [0.0, 0.0], "one gradient for both"

    matrix = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    scaler = scaled(matrix)
    matrix.grad = matrix.grad.t()
    scaler.step(Fused([matrix]))
    assert torch.equal(matrix, torch.zeros(2, 2)), "a gradient of another layout"

    half = weight(1.0, dtype=torch.float16)
    scaler = GradScaler("cpu", schedule=Headroom(init_scale=4.0))
    scaler.scale(half.float().sum()).backward()
    scaler.step(Fused([half]))
    assert half.item() == 0.0, "under a schedule that wants the largest one"


def test_an_unscale_grads_of_ones_own_is_asked_about_fp16_gradients_of_a_fused_step() -> None:
    allowed = []

    class Asked(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            allowed.append(allow_fp16)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    scaler, param = Asked("cpu"), weight(1.0)
    scaler.scale(param.sum()).backward()
    scaler.step(Fused([param]))
    assert allowed == [True]


@pytest.mark.parametrize(("fused", "options"), [(True, {}), (False, {"allow_fp16_gradients": True})])
def test_a_closure_may_make_fp16_gradients_where_a_step_may_have_them(fused: bool, options: dict[str, bool]) -> None:
    half = weight(1.0, dtype=torch.float16)
    scaler, optimizer = GradScaler("cpu", init_scale=4.0, **options), Fused([half], fused=fused)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        scaler.scale(loss := half.float().sum()).backward()
        return loss

    scaler.step(optimizer, evaluate)
    assert half.item() == 0.0


def test_an_error_of_a_closure_that_has_ended_the_iteration_is_the_one_that_is_raised() -> None:
    scaler = scaled(param := weight(1.0))

    def evaluate() -> None:
        scaler.update(8.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scaler.step(Fused([param]), evaluate)


def test_a_skip_after_a_step_is_refused_by_its_name() -> None:
    scaler = scaled(param := weight(1.0))
    scaler.step(optimizer := Fused([param]))
    with pytest.raises(RuntimeError, match=r"^skip\(\) is being called after step\(\)"):
        scaler.skip(optimizer)


def test_step_skipped_is_one_element_where_the_scale_is() -> None:
    param = weight(1.0)
    scaler = scaled(param)
    with torch.device("meta"):
        assert scaler.step_skipped.device.type == "cpu"
        assert GradScaler("cpu").step_skipped.device.type == "meta", "not known better yet"
    scaler.unscale_(optimizer := torch.optim.SGD([param]))
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {torch.device("cpu"): torch.ones(1)}
    scaler.step(optimizer)
    assert scaler.step_skipped.shape == ()
    assert scaler.step_skipped.item() is True


def test_each_of_several_schedules_of_an_optimizer_is_advanced_once_and_nobody_is_warned() -> None:
    scaler = scaled(param := weight(1.0))
    optimizer = torch.optim.SGD([param], lr=1.0)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
    stranger = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight(1.0)], lr=1.0), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step_scheduler(stranger)  # no step of it is known
        scaler.step(optimizer)
        for _ in range(2):
            for schedule in schedules:
                scaler.step_scheduler(schedule)
    assert [schedule.last_epoch for schedule in schedules] == [1, 1]
    with pytest.warns(UserWarning, match="the optimizer of this StepLR was never stepped") as caught:
        scaler.step_scheduler(stranger)
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step_scheduler(stranger)


def test_a_warning_that_waited_for_the_device_names_the_line_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readback, "is_on_host", property(lambda self: False))
    param = weight(1.0)
    scaler, optimizer = GradScaler("cpu", schedule=Dynamic(patience=1)), Fused([param])
    scaler.scale(param.sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.warns(UserWarning, match="Cause: ") as caught:
        scaler.synchronize()
    assert [each.filename for each in caught] == [__file__]


def test_what_another_rank_has_found_is_reported_also_to_waiting_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readback, "is_on_host", property(lambda self: False))
    scaler = scaled(param := weight(1.0))
    rank, optimizer, notified = agreeing(scaler), Fused([param]), []
    rank.any_ = lambda flags, call: [flag.fill_(1.0) for flag in flags]  # type: ignore[assignment,method-assign]
    scaler.register_step_hook(lambda facts: notified.append(facts.cause))
    scaler.step(optimizer)
    scaler.update()
    scaler.synchronize()
    assert notified == [Cause.ANOTHER_RANK]
