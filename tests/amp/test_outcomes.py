"""What became of each step: why it was skipped, who is notified, and what is counted."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.amp.scalers import agreeing
from torch import nn

import castwise
from castwise.amp import Cause, ScaleExhausted, StepFacts
from castwise.amp._readback import DELAY, Readback
from castwise.amp.grad_scaler import GradScaler
from castwise.schedules import Dynamic, Guard, Headroom, Schedule, Static

KINDS = [("for-loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})]


class World:
    """Two weights, an optimizer and a scaler; steps that go wrong on demand."""

    def __init__(self, schedule: Schedule | None = None, **implementation: Any) -> None:
        self.good, self.bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.good, self.bad], lr=0.125, **implementation)
        self.scaler = GradScaler("cpu", schedule=schedule or Dynamic(1024.0))
        self.reported: list[StepFacts] = []

    def listen(self) -> World:
        self.scaler.register_step_hook(self.reported.append)
        return self

    def backward(self, loss: float = 1.0, gradient: float = 1.0) -> None:
        """Let the loss be so, and the gradient of `bad`."""
        self.optimizer.zero_grad()
        term = (self.good.sum() + self.bad.sum()) * 0.0 + loss
        self.scaler.scale(term + self.good.sum() * 0.0).backward()
        for param, value in ((self.good, 1.0), (self.bad, gradient)):
            param.grad = torch.full_like(param, value) * self.scaler.get_scale()

    def step(self, loss: float = 1.0, gradient: float = 1.0, *, clip: bool = False, unscale: bool = False) -> None:
        self.backward(loss, gradient)
        if unscale:
            self.scaler.unscale_(self.optimizer)
        if clip:
            self.scaler.clip_grad_norm_(self.optimizer, 100.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.fixture(params=KINDS, ids=[kind for kind, _ in KINDS])
def implementation(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param[1]
    return options


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not know at once what the device knows, as of an accelerator."""
    monkeypatch.setattr(Readback, "is_on_host", property(lambda self: False))


# -- causes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_is_taken_has_no_cause(implementation: dict[str, Any], clip: bool) -> None:
    world = World(**implementation).listen()
    world.step(loss=2.5, clip=clip)
    norm = pytest.approx(math.sqrt(5.0)) if clip else None
    assert world.reported == [
        StepFacts(1, world.optimizer, 1024.0, skipped=False, loss=2.5, grad_norm=norm, iteration=1)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("gradient", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_of_a_finite_loss_are_an_overflow(
    implementation: dict[str, Any], gradient: float, clip: bool, unscale: bool
) -> None:
    world = World(**implementation).listen()
    world.step(gradient=gradient, clip=clip, unscale=unscale)
    facts = world.reported[0]
    assert (facts.skipped, facts.cause, facts.scale, facts.loss) == (True, Cause.OVERFLOW, 1024.0, 1.0)
    assert [param is world.bad for param in facts.parameters] == [True]


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_the_cause(implementation: dict[str, Any], loss: float) -> None:
    world = World(**implementation).listen()
    world.step(loss=loss, gradient=math.nan)
    assert world.reported[0].cause is Cause.NONFINITE_LOSS


def test_one_micro_batch_whose_loss_is_not_finite_is_enough(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    world.scaler.scale(torch.tensor(math.nan, requires_grad=True))
    world.scaler.scale([torch.ones(2, requires_grad=True)])
    world.step(gradient=math.inf)
    assert world.reported[0].cause is Cause.NONFINITE_LOSS


def test_weights_that_are_not_finite_are_the_cause(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    with torch.no_grad():
        world.good[1] = math.nan
    world.step(loss=math.nan, gradient=math.nan)
    assert world.reported[0].cause is Cause.NONFINITE_WEIGHTS


def test_without_a_loss_the_cause_is_unknown(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    world.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    world.bad.grad = torch.tensor([math.inf, 0.0])
    world.scaler.step(world.optimizer)
    world.scaler.update()
    assert world.reported[0].cause is Cause.UNKNOWN


def test_a_frozen_mask_of_infs_is_no_broken_weight(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    mask = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
    world.optimizer.add_param_group({"params": [mask]})
    world.step(loss=math.nan, gradient=math.nan)
    assert world.reported[0].cause is Cause.NONFINITE_LOSS


def test_a_norm_that_fp32_cannot_hold_is_no_other_ranks_fault() -> None:
    world = World(Dynamic(2.0**120)).listen()
    world.backward()
    world.scaler.clip_grad_norm_(world.optimizer, 1e-6)
    world.scaler.step(world.optimizer)
    world.scaler.update()
    assert world.reported[0].cause is Cause.OVERFLOW


@pytest.mark.parametrize(
    ("other_gradient", "causes"),
    [(1.0, [Cause.UNKNOWN, None]), (math.nan, [Cause.NONFINITE_LOSS, Cause.NONFINITE_LOSS])],
)
def test_of_several_losses_and_optimizers_it_is_known_whose_loss_it_was_if_all_are_skipped(
    other_gradient: float, causes: list[Cause | None]
) -> None:
    world = World().listen()
    other = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=1.0)
    world.scaler.scale(torch.tensor(math.nan, requires_grad=True))
    world.backward(gradient=math.inf)
    weight.grad = torch.full((1,), other_gradient)
    world.scaler.step(world.optimizer)
    world.scaler.step(other)
    world.scaler.update()
    assert [facts.cause for facts in world.reported] == causes


def test_a_closure_forgets_no_other_optimizers_loss() -> None:
    world = World().listen()
    world.scaler.scale(torch.tensor(math.inf, requires_grad=True))

    def closure() -> torch.Tensor:
        world.backward(gradient=math.inf)
        return torch.tensor(1.0)

    world.scaler.step(world.optimizer, closure)
    world.scaler.update()
    assert world.reported[0].loss == math.inf


def test_an_update_that_is_refused_counts_no_step() -> None:
    world = World().listen()
    world.backward()
    world.scaler.step(world.optimizer)
    for _ in range(3):
        with pytest.raises(ValueError, match="new_scale must be a finite number > 0"):
            world.scaler.update(-1.0)
    world.scaler.update()
    assert world.scaler.state_dict()["steps_taken"] == len(world.reported) == 1


def test_facts_are_of_the_iteration_in_which_their_gradients_were_shown() -> None:
    world, shown = World().listen(), []
    world.scaler.register_gradients_hook(lambda *_: shown.append(world.scaler.iteration))
    for number in range(4):
        world.backward()
        if number == 1:
            world.scaler.unscale_(world.optimizer)
            world.scaler.skip(world.optimizer)
        elif number != 2:
            world.scaler.step(world.optimizer)
        world.scaler.update(1024.0)
    assert shown == [1, 2, 4]
    assert [(facts.number, facts.iteration) for facts in world.reported] == [(1, 1), (2, 4)]


def test_the_loss_of_an_iteration_is_not_that_of_the_next(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    world.step(loss=math.nan, gradient=math.nan)
    world.step(gradient=math.inf)
    assert [facts.cause for facts in world.reported] == [Cause.NONFINITE_LOSS, Cause.OVERFLOW]


def test_a_closure_has_the_loss_of_its_last_evaluation() -> None:
    world = World().listen()

    def closure() -> torch.Tensor:
        world.backward(loss=3.0)
        return torch.tensor(3.0)

    world.scaler.step(world.optimizer, closure)
    world.scaler.update()
    assert world.reported[0].loss == 3.0


def test_a_gradient_that_is_gone_before_the_update_is_still_named(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    world.backward(gradient=math.inf)
    world.scaler.step(world.optimizer)
    world.optimizer.zero_grad()
    world.scaler.update()
    assert [param is world.bad for param in world.reported[0].parameters] == [True]


def test_each_of_several_optimizers_is_reported_by_itself() -> None:
    world = World().listen()
    other = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=1.0)
    world.backward(gradient=math.inf)
    weight.grad = torch.ones(1)
    world.scaler.step(world.optimizer)
    world.scaler.step(other)
    world.scaler.update()
    assert [(facts.number, facts.optimizer, facts.skipped) for facts in world.reported] == [
        (1, world.optimizer, True),
        (2, other, False),
    ]


def test_what_is_deliberately_skipped_is_no_step() -> None:
    world = World().listen()
    world.backward()
    world.scaler.skip(world.optimizer)
    world.scaler.update()
    assert world.reported == []
    assert world.scaler.state_dict()["steps_taken"] == 0


def test_a_hook_that_is_removed_hears_nothing() -> None:
    world = World()
    handle = world.scaler.register_step_hook(world.reported.append)
    handle.remove()
    world.step()
    assert world.reported == []


@pytest.mark.usefixtures("slow_host")
def test_an_accelerators_facts_come_two_updates_later_and_all_of_them(implementation: dict[str, Any]) -> None:
    world = World(**implementation).listen()
    counts = []
    for gradient in (1.0, math.inf, 1.0, 1.0):
        world.step(gradient=gradient)
        counts.append(len(world.reported))
    assert counts == [0, 0, 1, 2]
    assert DELAY == 2
    world.scaler.synchronize()
    assert [facts.skipped for facts in world.reported] == [False, True, False, False]
    assert [facts.scale for facts in world.reported] == [1024.0, 1024.0, 512.0, 512.0]
    assert [facts.parameters for facts in world.reported] == [(), (world.bad,), (), ()]


@pytest.mark.usefixtures("slow_host")
def test_a_finite_step_that_is_known_earlier_than_skips_before_it_ends_their_streak(
    implementation: dict[str, Any],
) -> None:
    world = World(**implementation)
    for gradient in (math.inf, 1.0, math.inf, math.inf):
        world.step(gradient=gradient)
    assert world.scaler.state_dict()["skips_in_a_row"] == 2
    world.step()
    assert world.scaler.state_dict()["skips_in_a_row"] == 0


@pytest.mark.usefixtures("slow_host")
def test_skips_with_finite_steps_between_them_exhaust_no_patience(implementation: dict[str, Any]) -> None:
    world = World(Dynamic(2.0**60, patience=2, on_exhausted="raise"), **implementation)
    for gradient in (math.inf, 1.0) * 20:
        world.step(gradient=gradient)
    world.scaler.synchronize()


# -- gradients, as they are before anything is done to them ------------------------------------------------------------


@pytest.mark.parametrize("calls", [[], ["unscale_"], ["clip_grad_norm_"], ["unscale_", "clip_grad_norm_"]])
def test_gradients_are_shown_once_and_still_scaled(implementation: dict[str, Any], calls: list[str]) -> None:
    world, shown = World(**implementation), []
    world.scaler.register_gradients_hook(
        lambda optimizer, scale: shown.append((optimizer is world.optimizer, scale.item(), world.bad.grad.tolist()))  # type: ignore[union-attr]
    )
    for _ in range(2):
        world.backward(gradient=2.0)
        for call in calls:
            getattr(world.scaler, call)(world.optimizer, *[1.0][: call.startswith("clip")])
        world.scaler.step(world.optimizer)
        world.scaler.update()
    assert shown == [(True, 1024.0, [2048.0, 2048.0])] * 2


def test_gradients_of_a_closure_are_shown_when_it_has_made_them() -> None:
    world, shown = World(), []
    world.scaler.register_gradients_hook(lambda *_: shown.append(world.bad.grad.tolist()))  # type: ignore[union-attr]

    def closure() -> torch.Tensor:
        world.backward(gradient=2.0)
        return torch.tensor(1.0)

    world.scaler.step(world.optimizer, closure)
    assert shown == [[2048.0, 2048.0]]


# -- what the program sees ---------------------------------------------------------------------------------------------


def test_step_skipped_is_about_the_last_step(implementation: dict[str, Any]) -> None:
    world = World(**implementation)
    seen = [world.scaler.step_skipped]
    for gradient in (1.0, math.inf, 1.0):
        world.backward(gradient=gradient)
        world.scaler.step(world.optimizer)
        seen.append(world.scaler.step_skipped)
        world.scaler.update()
        assert torch.equal(seen[-1], world.scaler.step_skipped)
    assert [skipped.item() for skipped in seen] == [False, False, True, False]
    assert all((skipped.dtype, skipped.shape) == (torch.bool, ()) for skipped in seen)


def test_steps_are_counted_and_the_numbers_travel() -> None:
    world = World()
    for gradient in (1.0, math.inf, 1.0, 1.0, math.nan, math.nan):
        world.step(gradient=gradient)
    numbers = {"steps_taken": 3, "steps_skipped": 3, "skips_in_a_row": 2}
    state = world.scaler.state_dict()
    assert state.items() >= numbers.items()
    fresh, started = GradScaler("cpu"), GradScaler("cpu")
    started.scale(torch.ones(()))
    for scaler in (fresh, started):
        scaler.load_state_dict(state)
    for scaler in (fresh, started, copy.deepcopy(world.scaler), pickle.loads(pickle.dumps(world.scaler))):
        scaler.scale(torch.ones(()))
        assert scaler.state_dict() == state
        assert scaler._outcomes.counts == (6, 3, 2)


def test_a_disabled_scaler_answers() -> None:
    scaler, weight = GradScaler("cpu", enabled=False), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    scaler.step_scheduler(scheduler)
    scaler.synchronize()
    assert not scaler.step_skipped
    assert scheduler.last_epoch == 1
    assert scaler.state_dict() == {}


# -- schedules of learning rates ---------------------------------------------------------------------------------------

GRADIENTS = st.lists(st.sampled_from([1.0, 1.0, math.inf, math.nan]), max_size=30)


@given(GRADIENTS, st.sampled_from(KINDS), st.booleans(), st.booleans(), st.booleans())
def test_a_schedule_is_advanced_as_often_as_the_optimizer_was_stepped(
    gradients: list[float], kind: tuple[str, dict[str, Any]], is_late: bool, before_update: bool, saves: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of collapsing scales
        if is_late:
            patch.setattr(Readback, "is_on_host", property(lambda self: False))
        world = World(**kind[1])
        scheduler = torch.optim.lr_scheduler.LambdaLR(world.optimizer, lambda _: 1.0)
        calls: list[float] = []
        taken = 0
        for gradient in gradients:
            world.backward(gradient=gradient)
            world.scaler.step(world.optimizer)
            taken += math.isfinite(gradient)
            if not before_update:
                world.scaler.update()
            for _ in range(2):  # a second call for the same step is none
                world.scaler.step_scheduler(scheduler)
            world.scaler.step_scheduler(calls.append, gradient)
            if before_update:
                world.scaler.update()
            assert taken - DELAY - before_update <= scheduler.last_epoch <= taken
            assert is_late or scheduler.last_epoch == taken
        if saves:
            world.scaler.state_dict()
        else:
            world.scaler.synchronize()
        assert scheduler.last_epoch == taken == len(calls) == world.scaler.state_dict()["steps_taken"]


def test_functions_are_called_as_often_as_it_is_asked_for_until_something_is_scaled_again() -> None:
    world, calls = World(), []
    for step in range(6):
        world.backward()
        if step % 3 == 2:  # three micro-batches a step
            world.scaler.step(world.optimizer)
            world.scaler.update()
        for name in ("first", "second"):
            world.scaler.step_scheduler(lambda: calls.append(name))  # noqa: B023
        world.scaler.step_scheduler(calls.append, "argument")
        world.scaler.step_scheduler(functools.partial(calls.append, "partial"))
    assert calls == ["first", "second", "argument", "partial"] * 2


def test_a_schedule_of_an_optimizer_that_nobody_steps_is_pointed_out_once() -> None:
    world = World()
    stranger = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 1)
    world.scaler.step_scheduler(stranger)  # nothing was stepped at all
    world.step()
    with pytest.warns(UserWarning, match="the optimizer of this StepLR was never stepped with this scaler") as caught:
        world.scaler.step_scheduler(stranger)
    world.scaler.step_scheduler(stranger)
    assert len(caught) == 1
    assert stranger.last_epoch == 0


@pytest.mark.usefixtures("slow_host")
def test_loading_drops_what_is_still_on_its_way() -> None:
    world = World(fused=True).listen()
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1)
    world.step()
    state = world.scaler.state_dict()
    world.step()
    world.scaler.step_scheduler(scheduler)
    world.scaler.load_state_dict(state)
    world.scaler.step_scheduler(scheduler)
    world.scaler.synchronize()
    assert scheduler.last_epoch == 0
    assert len(world.reported) == 1


def test_torchs_idiom_advances_the_schedule_on_skipped_steps_and_warns() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    assert scheduler.last_epoch == 1


def test_ours_does_neither(recwarn: pytest.WarningsRecorder) -> None:
    world = World()
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1)
    world.step(gradient=math.inf)
    world.scaler.step_scheduler(scheduler)
    world.step()
    world.scaler.step_scheduler(scheduler)
    assert scheduler.last_epoch == 1
    assert not recwarn.list


def test_a_schedule_follows_its_own_optimizer() -> None:
    world = World()
    other = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in (world.optimizer, other)]
    calls: list[str] = []
    world.backward(gradient=math.inf)
    weight.grad = torch.ones(1)
    world.scaler.step(world.optimizer)
    world.scaler.step(other)
    for scheduler in schedulers:
        world.scaler.step_scheduler(scheduler)
    world.scaler.step_scheduler(lambda: calls.append("last"))
    world.scaler.step_scheduler(lambda: calls.append("first"), optimizer=world.optimizer)
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 1]
    assert calls == ["last"]


def test_arguments_are_passed_on() -> None:
    world = World()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(world.optimizer, patience=0, factor=0.5)
    for metric in (1.0, 2.0):
        world.step()
        world.scaler.step_scheduler(plateau, metric)
    assert world.optimizer.param_groups[0]["lr"] == 0.0625


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (None, r"scheduler must be a function or have a step\(\) method, got NoneType"),
        (torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)), "AveragedModel is a module, and a call would run"),
    ],
)
def test_what_cannot_be_advanced_is_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        World().scaler.step_scheduler(scheduler)


# -- no silent collapse ------------------------------------------------------------------------------------------------


def collapse(schedule: Schedule, times: int, **step: float) -> World:
    world = World(schedule)
    for _ in range(times):
        world.step(**{"gradient": math.nan, **step})
    return world


@pytest.mark.parametrize("implementation", [options for _, options in KINDS])
def test_after_so_many_skips_in_a_row_there_is_one_warning_with_the_cause(implementation: dict[str, Any]) -> None:
    world = World(Dynamic(2.0**100, patience=3), **implementation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gradient in [math.nan, math.nan, 1.0, *[math.nan] * 8]:
            before = len(caught)
            world.step(gradient=gradient)
        assert len(caught) == 1
        assert before == 1
    assert str(caught[0].message).startswith(
        "the last 3 steps were skipped, the last one at scale 7.92282e+28. Cause: overflow: the loss was finite but "
        "the gradients were not"
    )
    assert caught[0].filename == __file__


def test_skips_in_a_row_are_those_of_one_optimizer() -> None:
    world = World(Dynamic(2.0**100, patience=3))
    other = torch.optim.SGD([weight := nn.Parameter(torch.ones(1))], lr=1.0)

    def step() -> None:
        world.backward(gradient=math.nan)
        weight.grad = torch.ones(1)
        world.scaler.step(world.optimizer)
        world.scaler.step(other)
        world.scaler.update()

    step()
    step()
    assert world.scaler.state_dict()["skips_in_a_row"] == 2
    with pytest.warns(UserWarning, match="the last 3 steps were skipped"):
        step()


def test_the_twentieth_skip_warns_by_default_and_the_nineteenth_does_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collapse(Dynamic(2.0**100), 19)
    with pytest.warns(UserWarning, match="the last 20 steps were skipped"):
        collapse(Dynamic(2.0**100), 20)


def test_a_scale_that_falls_below_one_warns() -> None:
    with pytest.warns(
        UserWarning, match=r"the scale has fallen below 1, to 0.5, and the last 3 .*Cause: non-finite loss"
    ):
        collapse(Dynamic(4.0), 3, loss=math.nan)


@pytest.mark.parametrize(
    "schedule",
    [
        Dynamic(4.0, patience=3, on_exhausted="raise"),
        Static(4.0, patience=3, on_exhausted="raise"),
        Guard(patience=3, on_exhausted="raise"),
        Headroom(4.0, patience=3, on_exhausted="raise"),
    ],
)
def test_an_error_carries_the_facts(schedule: Schedule) -> None:
    world = World(schedule)
    diagnoses: list[str] = []
    world.scaler.register_step_hook(lambda facts: diagnoses.append(f"diagnosis {facts.number}") or diagnoses[-1])  # type: ignore[func-returns-value]
    with pytest.raises(castwise.ScaleExhausted, match="Cause: overflow") as caught:
        run(world, [math.inf] * 3)
    facts = caught.value.step
    assert facts.cause is Cause.OVERFLOW
    assert facts.parameters == (world.bad,)
    assert caught.value.diagnosis == f"diagnosis {facts.number}"
    assert str(caught.value).endswith(f". diagnosis {facts.number}")
    assert isinstance(caught.value, ScaleExhausted)
    world.step()  # it was raised by a finished update
    assert torch.equal(world.bad, torch.full((2,), 0.875))


def test_a_nan_loss_that_holds_the_scale_exhausts_patience_alone() -> None:
    with pytest.warns(UserWarning, match="the last 5 steps were skipped, the last one at scale 4"):
        world = collapse(Dynamic(4.0, on_nonfinite_loss="hold", patience=5), 6, loss=math.nan)
    assert world.scaler.get_scale() == 4.0


# -- schedules in a scaler ---------------------------------------------------------------------------------------------

SCHEDULES: list[Schedule] = [
    Dynamic(1024.0, 4.0, 0.25, 2),
    Dynamic(1024.0, growth_interval=3, hysteresis=2, cooldown=2, on_nonfinite_loss="hold", max_scale=2048.0),
    Static(512.0),
    Guard(),
    Headroom(64.0, half_life=4.0, relax_interval=3, min_scale=2.0),
]


def run(world: World, gradients: list[float]) -> list[float]:
    scales = []
    for gradient in gradients:
        world.step(gradient=gradient)
        scales.append(world.scaler.get_scale())
    return scales


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("kind", [options for _, options in KINDS], ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("clip", [False, True])
def test_weights_are_those_without_a_scaler(schedule: Schedule, kind: dict[str, Any], clip: bool) -> None:
    world, plain = World(schedule, **kind), World(**kind)
    for gradient in (1.0, 3.0, math.inf, 0.5, 0.25):
        world.step(gradient=gradient, clip=clip)
        if math.isfinite(gradient):
            for param, value in ((plain.good, 1.0), (plain.bad, gradient)):
                param.grad = torch.full_like(param, value)
            plain.optimizer.step()
    assert torch.equal(world.good, plain.good)
    assert torch.equal(world.bad, plain.bad)


@pytest.mark.parametrize("kind", [options for _, options in KINDS], ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("calls", [[], ["unscale_"], ["clip_grad_norm_"], ["clip_grad_value_"]])
def test_headroom_sees_the_largest_gradient_before_it_is_clipped(kind: dict[str, Any], calls: list[str]) -> None:
    world = World(Headroom(64.0, headroom_bits=3.0), **kind)
    for _ in range(20):
        world.backward(gradient=-100.0)
        for call in calls:
            getattr(world.scaler, call)(world.optimizer, *[1.0][: call.startswith("clip")])
        world.scaler.step(world.optimizer)
        world.scaler.update()
    assert world.scaler._trackers["peak"].item() == 100.0
    assert world.scaler.get_scale() == 64.0  # 2**floor(log2(65504 / 8 / 100)) = 2**6


@pytest.mark.parametrize("load", ["state_dict", "pickle", "deepcopy", "started"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_goes_on_where_it_was(schedule: Schedule, load: str) -> None:
    first: list[float] = [1.0, math.inf, 5.0, 3.0, math.inf, math.inf, 2.0]
    then: list[float] = [1.0, math.inf, 1.0, 1.0, 1.0, math.inf, math.inf, 1.0, 1.0, 1.0]
    world, whole = World(schedule), World(schedule)
    expected = run(whole, first + then)[len(first) :]
    run(world, first)
    if load == "deepcopy":
        world.scaler = copy.deepcopy(world.scaler)
    elif load == "pickle":
        world.scaler = pickle.loads(pickle.dumps(world.scaler))
    else:
        state, world.scaler = world.scaler.state_dict(), GradScaler("cpu", schedule=type(schedule)())
        if load == "started":
            world.scaler.scale(torch.ones(()))
        world.scaler.load_state_dict(state)
    assert run(world, then) == expected
    assert world.scaler.state_dict() == whole.scaler.state_dict()


def test_a_scale_that_was_set_by_hand_is_kept_by_its_own_schedule() -> None:
    scaler = GradScaler("cpu", schedule=Static(1024.0))
    scaler.scale(torch.ones(()))
    scaler.update(512.0)
    restored = GradScaler("cpu", schedule=Static(1024.0))
    restored.load_state_dict(scaler.state_dict())
    assert restored.scale(torch.ones(())).item() == 512.0


@pytest.mark.parametrize(("other", "scale"), [(Headroom(64.0), 128.0), (Static(64.0), 64.0), (Guard(), 2.0**16)])
def test_another_kind_of_schedule_gives_its_scale_and_nothing_else(other: Schedule, scale: float) -> None:
    world, schedule = World(other), Dynamic(growth_factor=4.0, growth_interval=3, max_scale=2.0**20)
    run(world, [100.0, 100.0])
    dynamic = GradScaler("cpu", schedule=schedule)
    dynamic.load_state_dict(world.scaler.state_dict())
    assert dynamic.schedule == schedule
    assert (dynamic.scale(torch.ones(())).item(), dynamic._get_growth_tracker()) == (scale, 0)


def test_torchs_checkpoint_gives_its_scale_to_any_schedule() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_factor=4.0)
    for schedule, scale in (
        (Headroom(), 2.0**24),
        (Static(8.0), 8.0),
        (Guard(), 1.0),
        (Dynamic(max_scale=2.0**20), 2.0**20),
    ):
        scaler = GradScaler("cpu", schedule=schedule)
        scaler.load_state_dict(torchs.state_dict())
        assert scaler.scale(torch.ones(())).item() == scale


def test_torch_reads_what_any_schedule_has_saved() -> None:
    for schedule in SCHEDULES:
        world, torchs = World(schedule), torch.amp.GradScaler("cpu")
        world.step()
        torchs.load_state_dict(world.scaler.state_dict())
        assert torchs.get_scale() == world.scaler.get_scale()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps_taken": -1}, ValueError, "steps_taken must be an integer in [0, 2**63), got -1"),
        ({"skips_in_a_row": 1.5}, TypeError, "skips_in_a_row must be an integer, got 1.5"),
        ({"schedule": {"name": "Headroom"}}, ValueError, "schedule must have the entries name, settings and trackers"),
        (
            {"schedule": {"name": "Headroom", "settings": {"bits": 1}, "trackers": {}}},
            ValueError,
            "the settings of Headroom must be among half_life, headroom_bits",
        ),
        (
            {"schedule": {"name": "Headroom", "settings": {}, "trackers": {"peak": 1.0}}},
            ValueError,
            "the trackers of Headroom must be peak, margin, got {'peak': 1.0}",
        ),
        (
            {"schedule": {"name": "Headroom", "settings": {"half_life": -1.0}, "trackers": {}}},
            ValueError,
            "half_life must be a finite number > 0, got -1.0",
        ),
        (
            {"schedule": {"name": "Headroom", "settings": {}, "trackers": {"peak": 1.0, "margin": math.nan}}},
            ValueError,
            "margin must be a finite number >= 0, got nan",
        ),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    world = World(Headroom(64.0))
    run(world, [1.0, math.inf, 3.0])
    before = world.scaler.state_dict()
    with pytest.raises(error) as caught:
        world.scaler.load_state_dict(before | change)
    assert message in str(caught.value)
    assert world.scaler.state_dict() == before


@pytest.mark.parametrize(
    "number", [{"init_scale": 65536.0}, {"growth_factor": 2.0}, {"backoff_factor": 0.5}, {"growth_interval": 2000}]
)
@pytest.mark.parametrize("scaler", [GradScaler, castwise.ShardedGradScaler])
def test_a_schedule_and_a_number_beside_it_are_refused(scaler: Callable[..., Any], number: dict[str, float]) -> None:
    (name, value), *_ = number.items()
    # A number that equals the default, but was given.
    given = {name: type(value)(str(value))}
    with pytest.raises(
        ValueError, match=f"{name}={value!r} cannot be combined with schedule=: use the arguments of Static"
    ):
        scaler("cpu", schedule=Static(), **given)
    assert scaler("cpu", schedule=Static(), enabled=False, **given).get_scale() == 1.0  # it is not used


def test_the_schedule_can_be_asked_for() -> None:
    assert GradScaler("cpu", schedule=Static(4.0)).schedule == Static(4.0)
    scaler = GradScaler("cpu", 8.0)
    scaler.set_growth_factor(3.0)
    assert scaler.schedule == Dynamic(8.0, 3.0)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(TypeError, match="schedule must be one of castwise"):
        GradScaler("cpu", schedule=2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="schedule must be one of castwise"):
        GradScaler("cpu", schedule=Schedule())
    scaler = GradScaler("cpu", schedule=Static(4.0))
    with pytest.raises(RuntimeError, match=r"Static\(init_scale=4.0.* has no growth_factor, so it cannot be set"):
        scaler.set_growth_factor(3.0)


# -- what a sentence about a skip says -------------------------------------------------------------------------------


def test_the_words_for_one_step_and_for_several() -> None:
    world = World(Dynamic(2.0**100, patience=2))
    world.step(gradient=math.nan)
    world.backward(gradient=math.nan)
    world.good.grad.fill_(math.nan)
    world.scaler.step(world.optimizer)
    with pytest.warns(UserWarning, match="Cause") as caught:
        world.scaler.update()
    assert str(caught[0].message) == (
        "the last 2 steps were skipped, the last one at scale 6.33825e+29. Cause: overflow: the loss was finite but "
        "the gradients were not, so the scale is too high or the backward itself produces an inf or NaN "
        "(2 gradients were not finite). castwise.diagnose(model, loss_fn, batch, scaler) finds the origin"
    )
    assert [each.filename for each in caught] == [__file__]

    one = World(Dynamic(1.0, patience=1))
    one.backward(gradient=math.nan)
    one.scaler.step(one.optimizer)
    with pytest.warns(UserWarning, match="Cause") as caught:
        one.scaler.update()
    assert [each.filename for each in caught] == [__file__]
    assert str(caught[0].message).startswith("the last step was skipped, the last one at scale 1. Cause: ")
    assert " (gradient was not finite). " in str(caught[0].message)

    below = World(Dynamic(1.0))
    below.backward(gradient=math.nan)
    below.scaler.step(below.optimizer)
    with pytest.warns(UserWarning, match="^the scale has fallen below 1, to 0.5, and the last step was skipped. Cause"):
        below.scaler.update()

    none = World(Dynamic(2.0, patience=1))
    none.backward()
    none.scaler.unscale_(none.optimizer)
    found = none.scaler._per_optimizer_states[id(none.optimizer)]["found_inf_per_device"]
    for found_inf in found.values():
        found_inf.fill_(1.0)  # as a tool does that knows so from another rank
    none.scaler.step(none.optimizer)
    with pytest.warns(UserWarning, match="Cause: ") as caught:
        none.scaler.update()
    assert " produces an inf or NaN. castwise.diagnose(" in str(caught[0].message), "and no parameters"


def test_an_error_says_what_was_found_out_or_how_to_find_out() -> None:
    facts = StepFacts(1, None, 1.0, skipped=True)
    error = ScaleExhausted("the end", facts)
    assert str(error) == "the end. castwise.diagnose(model, loss_fn, batch, scaler) finds the origin"
    error.diagnosis = "it was the head"
    assert str(error) == "the end. it was the head"


def test_the_first_diagnosis_is_not_lost_to_a_hook_that_has_none() -> None:
    world = World(Dynamic(1024.0, patience=1, on_exhausted="raise"))
    for answer in ("of the first", None):
        world.scaler.register_step_hook(lambda _, answer=answer: answer)  # type: ignore[misc]  # bound now
    with pytest.raises(ScaleExhausted) as caught:
        world.step(gradient=math.nan)
    assert caught.value.diagnosis == "of the first"


def test_the_warning_shows_the_last_diagnosis_of_the_row_of_skips() -> None:
    for returned, shown in ((["it was the head", None], "it was the head"), ([None, None], "castwise.diagnose(")):
        world = World(Dynamic(1024.0, patience=2))
        answers = iter(returned)
        world.scaler.register_step_hook(lambda _, answers=answers: next(answers))  # type: ignore[misc]  # bound now
        world.step(gradient=math.nan)
        with pytest.warns(UserWarning, match="Cause") as caught:
            world.step(gradient=math.nan)
        assert shown in str(caught[0].message)
        assert ("castwise.diagnose(" in str(caught[0].message)) == (returned[0] is None)


@pytest.mark.usefixtures("slow_host")
def test_a_dead_optimizer_has_no_steps_in_a_row() -> None:
    world = World(Dynamic(1024.0, patience=1), fused=True)
    world.step(gradient=math.nan)
    del world.optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.scaler.synchronize()


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "known"),
    [
        ([torch.tensor(3.0), torch.tensor(4.0)], 7.0),
        ([torch.tensor([3.0, 4.0])], 7.0),
        ([torch.tensor([6e4, 6e4], dtype=torch.float16)], 120000.0),  # which fp16 could not hold
        ([torch.tensor(6e4, dtype=torch.float16)] * 2, 120000.0),
        ([torch.tensor(3)], None),
        ([], None),
    ],
)
def test_the_loss_of_a_step_is_the_sum_in_fp32_of_what_was_scaled(
    losses: list[torch.Tensor], known: float | None
) -> None:
    world = World().listen()
    world.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    for loss in losses:
        world.scaler.scale(loss)
    for param in (world.good, world.bad):
        param.grad = torch.ones_like(param)
    world.scaler.step(world.optimizer)
    world.scaler.update()
    assert [facts.loss for facts in world.reported] == [known]


def test_several_losses_of_an_iteration_are_forgotten_with_it() -> None:
    world, other = World().listen(), nn.Parameter(torch.ones(1))
    second = torch.optim.SGD([other], lr=0.125)
    world.scaler.scale(world.good.sum()).backward()
    world.scaler.scale(world.bad.sum()).backward()
    world.scaler.step(world.optimizer)
    world.scaler.update()
    world.backward(loss=math.nan, gradient=math.nan)
    other.grad = torch.ones(1)
    world.scaler.step(world.optimizer)
    world.scaler.step(second)
    world.scaler.update()
    assert [facts.cause for facts in world.reported] == [None, Cause.NONFINITE_LOSS, None]


# -- what is asked for, and where --------------------------------------------------------------------------------------


def test_of_a_step_that_was_taken_nothing_is_asked_for_unless_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("castwise.amp._outcomes.Readback", lambda numbers: asked.append(numbers) or Readback(numbers))
    world = World()
    world.step()
    assert asked == []
    world.step(gradient=math.nan)
    assert len(asked) == 1
    world.listen().step()
    assert len(asked) == 2


def test_a_default_device_elsewhere_does_not_matter_to_facts() -> None:
    world = World().listen()
    world.backward(gradient=math.nan)
    world.scaler.step(world.optimizer)
    with torch.device("meta"):
        world.scaler.update()
    assert [(facts.loss, facts.grad_norm, facts.skipped) for facts in world.reported] == [(1.0, None, True)]


def test_of_a_step_that_was_taken_all_the_same_no_parameter_is_named() -> None:
    world = World().listen()
    world.backward(gradient=math.nan)
    world.scaler.clip_grad_norm_(world.optimizer, 1.0)
    found = world.scaler._per_optimizer_states[id(world.optimizer)]["found_inf_per_device"]
    for found_inf in found.values():
        found_inf.zero_()  # as a tool does that knows better
    world.scaler.step(world.optimizer)
    world.scaler.update()
    assert [(facts.skipped, facts.parameters) for facts in world.reported] == [(False, ())]


@pytest.mark.parametrize(("gradient", "cause"), [(math.nan, Cause.OVERFLOW), (1.0, Cause.ANOTHER_RANK)])
def test_among_ranks_a_skip_is_another_ranks_if_the_gradients_here_were_finite(gradient: float, cause: Cause) -> None:
    world = World().listen()
    ranks = agreeing(world.scaler)
    ranks.any_ = lambda flags, call: [flag.fill_(1.0) for flag in flags]  # type: ignore[assignment,method-assign]
    world.step(gradient=gradient)
    assert [facts.cause for facts in world.reported] == [cause]
