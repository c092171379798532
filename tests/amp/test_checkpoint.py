"""The format of a saved scaler: what is read for which schedule, and how everything else is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from castwise.amp import _checkpoint as checkpoint
from castwise.schedules import Dynamic, Guard, Headroom, Schedule, Static

TORCHS = {"scale": 64.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}


def saved(schedule: Schedule, trackers: dict[str, float] | None = None, **entries: Any) -> dict[str, Any]:
    entry = checkpoint.of_schedule(schedule, schedule.trackers() if trackers is None else trackers)
    return {**TORCHS, "schedule": entry, **entries}


def test_the_entry_of_a_schedule_holds_all_that_makes_it_and_what_it_remembers() -> None:
    assert checkpoint.of_schedule(Static(4.0, patience=3), {}) == {
        "name": "Static",
        "settings": {"init_scale": 4.0, "patience": 3, "on_exhausted": "warn"},
        "trackers": {},
    }
    assert "init_scale" not in checkpoint.of_schedule(Guard(), {})["settings"]


def test_torchs_state_sets_the_factors_of_dynamic_and_keeps_its_other_options() -> None:
    read = checkpoint.read(TORCHS, Dynamic(32.0, min_scale=2.0, max_scale=32.0))
    expected = Dynamic(32.0, 3.0, 0.25, 7, min_scale=2.0, max_scale=32.0)
    assert read == checkpoint.Saved(32.0, expected, 5, {}, (0, 0, 0))


def test_a_state_of_the_same_kind_brings_its_options_trackers_and_counts() -> None:
    other = Dynamic(8.0, hysteresis=3, cooldown=2)
    counts = {"steps_taken": 2**40, "steps_skipped": 4, "skips_in_a_row": 1}
    read = checkpoint.read(saved(other, {"hysteresis_left": 2, "cooldown_left": 0}, **counts), Dynamic())
    trackers = {"hysteresis_left": 2, "cooldown_left": 0}
    assert read == checkpoint.Saved(64.0, other, 5, trackers, (2**40, 4, 1))


def test_floats_are_remembered_as_floats() -> None:
    read = checkpoint.read(saved(Headroom(), {"peak": 3, "margin": 0.5}), Headroom(half_life=9.0))
    assert read == checkpoint.Saved(64.0, Headroom(), 5, {"peak": 3.0, "margin": 0.5}, (0, 0, 0))
    assert type(read.trackers["peak"]) is float


@pytest.mark.parametrize(
    ("state", "schedule", "scale"),
    [
        (TORCHS, Headroom(max_scale=32.0, init_scale=16.0), 32.0),
        (TORCHS, Static(8.0), 8.0),
        (saved(Headroom()), Dynamic(), 64.0),
        (saved(Guard()), Dynamic(2.0**10), 2.0**10),
        (saved(Guard()), Headroom(2.0**12), 2.0**12),
    ],
)
def test_a_schedule_of_another_kind_starts_at_the_scale_unless_that_was_none(
    state: dict[str, Any], schedule: Schedule, scale: float
) -> None:
    assert checkpoint.read(state, schedule) == checkpoint.Saved(scale, schedule, 0, schedule.trackers(), (0, 0, 0))


SETTINGS = {"init_scale": 4.0}
ENTRIES = (
    "state_dict must have the entries scale, growth_factor, backoff_factor, growth_interval, _growth_tracker and "
    "may have steps_taken, steps_skipped, skips_in_a_row, schedule: "
)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([], TypeError, "state_dict must be a mapping from state_dict(), got list"),
    (
        {},
        RuntimeError,
        "Do not load it, or load it into a disabled scaler",
    ),
    (
        {**{name: TORCHS[name] for name in list(TORCHS)[1:]}, "x": 1},
        ValueError,
        f"{ENTRIES}missing ['scale'], unknown ['x']",
    ),
    (dict.fromkeys(list(TORCHS)[:4], 1.0), ValueError, f"{ENTRIES}missing ['_growth_tracker'], unknown []"),
    ({**TORCHS, 2: 1}, ValueError, f"{ENTRIES}missing [], unknown ['2']"),
    (
        {**TORCHS, "scale": 0.0},
        ValueError,
        "scale must be a finite number > 0, within [2**-126, 3.4e38], got 0.0",
    ),
    ({**TORCHS, "_growth_tracker": -1}, ValueError, "_growth_tracker must be an integer in [0, 2**31), got -1"),
    ({**TORCHS, "steps_taken": -1}, ValueError, "steps_taken must be an integer in [0, 2**63), got -1"),
    ({**TORCHS, "steps_skipped": 0.5}, TypeError, "steps_skipped must be an integer, got 0.5 of type float"),
    ({**TORCHS, "growth_factor": 1.0}, ValueError, "growth_factor must be a finite number > 1, got 1.0"),
    (
        {**TORCHS, "schedule": {"name": ["x"], "settings": {}, "trackers": {}}},
        TypeError,
        "the name of a schedule must be a string, got ['x']",
    ),
    ({**TORCHS, "schedule": 3}, ValueError, "schedule must have the entries name, settings and trackers, got 3"),
    (
        {**TORCHS, "schedule": {"name": "Static", "settings": {"x": 1}, "trackers": {}}},
        ValueError,
        "the settings of Static must be among init_scale, on_exhausted, patience, got {'x': 1}",
    ),
    (
        {**TORCHS, "schedule": {"name": "Static", "settings": [], "trackers": {}}},
        ValueError,
        "the settings of Static must be among init_scale, on_exhausted, patience, got []",
    ),
    (
        {**TORCHS, "schedule": {"name": "Static", "settings": SETTINGS, "trackers": {"t": 1}}},
        ValueError,
        "the trackers of Static must be empty, got {'t': 1}",
    ),
    (
        {**TORCHS, "schedule": {"name": "Static", "settings": SETTINGS, "trackers": 1}},
        ValueError,
        "the trackers of Static must be empty, got 1",
    ),
]


@pytest.mark.parametrize(("state", "error", "message"), REFUSED)
def test_what_is_no_state_is_refused(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{re.escape(message)}$"):
        checkpoint.read(state, Static())


@pytest.mark.parametrize(
    ("schedule", "trackers", "message"),
    [
        (Headroom(), {"peak": 1.0}, "the trackers of Headroom must be peak, margin, got {'peak': 1.0}"),
        (Headroom(), {"peak": 1.0, "margin": -0.5}, "margin must be a finite number >= 0, got -0.5"),
        (
            Dynamic(cooldown=1),
            {"hysteresis_left": -1, "cooldown_left": 0},
            "hysteresis_left must be an integer in ",
        ),
    ],
)
def test_what_a_schedule_cannot_remember_is_refused(
    schedule: Schedule, trackers: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint.read(saved(schedule, trackers), schedule)
