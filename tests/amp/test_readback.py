"""Numbers on their way to the host: `Readback`, `Flag` and `ScaleBound`."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from castwise.amp._readback import Flag, Readback, ScaleBound
from castwise.amp._schedules import Dynamic, Headroom, IterationFacts, Schedule, Static, on_device


def test_it_is_what_the_flag_was() -> None:
    assert not Flag([torch.zeros(())], torch.zeros(()))
    assert Flag([torch.ones(())], torch.ones(()))


def test_it_knows_the_flags_it_was_made_from_until_they_change() -> None:
    flags = [torch.zeros(()), torch.zeros(())]
    flag = Flag(flags, flags[0])
    assert flag.is_of(flags)
    assert not flag.is_of(flags[:1])
    assert not flag.is_of([flags[0], torch.zeros(())])
    flags[1].fill_(1.0)
    assert not flag.is_of(flags)


def test_nobody_waits_for_what_is_on_the_host() -> None:
    there, elsewhere = torch.ones(()), torch.ones((), device="meta")
    assert Readback(there).is_on_host
    assert not Readback(elsewhere).is_on_host
    on_its_way = Readback(there)
    on_its_way._arrived = torch.Event()
    assert not on_its_way.is_on_host


def test_a_flag_that_is_known_is_on_the_host() -> None:
    assert Flag([], torch.ones(())).is_on_host
    flag = Flag([], torch.ones((), device="meta"))
    assert not flag.is_on_host
    flag._known = False
    assert flag.is_on_host
    assert not flag


def test_a_flag_that_the_host_has_read_starts_no_copy() -> None:
    flag = Flag([], torch.ones((), device="meta"), known=False)
    assert flag.is_on_host
    assert not flag


def update(bound: ScaleBound, scale: torch.Tensor, schedule: Schedule, *, finite: bool, known: bool) -> None:
    """Move a scale as `GradScaler.update` does."""
    bound.before_update(scale)
    trackers = on_device({"growth_tracker": 0, **schedule.trackers()}, scale.device)
    facts = IterationFacts(torch.tensor(float(not finite)), torch.zeros(()), torch.tensor(1.0))
    schedule.advance_(scale, trackers, facts)
    bound.after_update(scale, functools.partial(schedule.lowest_after, is_finite=known and finite))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("schedule", [Dynamic(1024.0), Dynamic(64.0, backoff_factor=0.3), Static(8.0), Headroom()])
def test_a_bound_is_never_above_the_scale(schedule: Schedule, known: bool) -> None:
    draw = random.Random(0)
    scale, bound = torch.tensor(schedule.init_scale), ScaleBound()
    bound.set(scale, schedule.init_scale)
    for index in range(200):
        update(bound, scale, schedule, finite=draw.random() > 0.2, known=known)
        if index % 3 == 0:
            assert bound.of(scale) <= scale.item()
        if index % 50 == 49:
            scale.fill_(1e6)
            bound.set(scale, 1e6)


def test_a_bound_of_finite_steps_stays_above_one() -> None:
    schedule = Dynamic(1024.0)
    scale, bound = torch.tensor(1024.0), ScaleBound()
    bound.set(scale, 1024.0)
    for _ in range(100):
        assert bound.of(scale) >= 1.0
        update(bound, scale, schedule, finite=True, known=False)


def test_a_write_that_was_not_noted_makes_the_bound_unknown() -> None:
    scale, bound = torch.tensor(1024.0), ScaleBound()
    assert bound.of(scale) == 0.0
    bound.set(scale, 1024.0)
    assert bound.of(scale) == 1024.0
    assert bound.of(scale.clone()) == 0.0
    scale.fill_(0.5)
    assert bound.of(scale) == 0.0
    update(bound, scale, Dynamic(), finite=True, known=True)
    assert bound.of(scale) <= 0.5
