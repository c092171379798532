"""Schedules: each moves the scale by the rule of its docstring, and refuses numbers that cannot work."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from castwise.amp._checks import MAX_SCALE, MIN_SCALE
from castwise.amp._schedules import Dynamic, Guard, Headroom, IterationFacts, Schedule, Static, on_device

REFUSED = [
    (
        "init_scale",
        0.0,
        ValueError,
        "init_scale must be a finite number > 0, within [2**-126, 3.4e38], got 0.0",
    ),
    (
        "init_scale",
        -1,
        ValueError,
        "init_scale must be a finite number > 0, within [2**-126, 3.4e38], got -1",
    ),
    (
        "init_scale",
        math.inf,
        ValueError,
        "init_scale must be a finite number > 0, within [2**-126, 3.4e38], got inf",
    ),
    (
        "init_scale",
        math.nan,
        ValueError,
        "init_scale must be a finite number > 0, within [2**-126, 3.4e38], got nan",
    ),
    (
        "init_scale",
        1e-40,
        ValueError,
        "init_scale must be a finite number > 0, within [2**-126, 3.4e38], got 1e-40",
    ),
    (
        "init_scale",
        2.0**128,
        ValueError,
        "init_scale must be a finite number > 0, within [2**-126, 3.4e38], got 3.40",
    ),
    ("init_scale", "1024", TypeError, "init_scale must be a number, got '1024' of type str"),
    ("init_scale", True, TypeError, "init_scale must be a number, got True of type bool"),
    ("growth_factor", 1.0, ValueError, "growth_factor must be a finite number > 1, got 1.0"),
    ("growth_factor", math.inf, ValueError, "growth_factor must be a finite number > 1, got inf"),
    ("growth_factor", math.nan, ValueError, "growth_factor must be a finite number > 1, got nan"),
    ("backoff_factor", 0.0, ValueError, "backoff_factor must be in [2**-149, 1), got 0.0"),
    ("backoff_factor", 1.0, ValueError, "backoff_factor must be in [2**-149, 1), got 1.0"),
    ("backoff_factor", -1, ValueError, "backoff_factor must be in [2**-149, 1), got -1"),
    ("backoff_factor", math.nan, ValueError, "backoff_factor must be in [2**-149, 1), got nan"),
    ("growth_interval", 0, ValueError, "growth_interval must be an integer in [1, 2**63), got 0"),
    ("growth_interval", -5, ValueError, "growth_interval must be an integer in [1, 2**63), got -5"),
    ("growth_interval", 2**63, ValueError, "growth_interval must be an integer in [1, 2**63), got 9223372036854775808"),
    ("growth_interval", 10.0, TypeError, "growth_interval must be an integer, got 10.0 of type float"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_numbers_that_cannot_work_are_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Dynamic(**{name: value})


def test_numbers_of_other_types_that_work_are_accepted() -> None:
    schedule = Dynamic(numpy.float32(4.0), 3, numpy.float64(0.25), numpy.int64(7))
    scale, tracker = torch.tensor(4.0), torch.tensor(6, dtype=torch.int32)
    schedule.advance_(scale, {"growth_tracker": tracker}, IterationFacts(torch.tensor(0.0)))
    assert scale.item() == 12.0


@pytest.mark.parametrize(
    ("tracker", "found_inf", "scale_after", "tracker_after"),
    [(0, 0.0, 8.0, 1), (1, 0.0, 8.0, 2), (2, 0.0, 24.0, 0), (2, 1.0, 2.0, 0), (0, 1.0, 2.0, 0), (1, 2.0, 2.0, 0)],
)
def test_the_rule_of_the_docstring(tracker: int, found_inf: float, scale_after: float, tracker_after: int) -> None:
    scale, growth_tracker = torch.tensor(8.0), torch.tensor(tracker, dtype=torch.int32)
    Dynamic(8.0, 3.0, 0.25, 3).advance_(
        scale, {"growth_tracker": growth_tracker}, IterationFacts(torch.tensor(found_inf))
    )
    assert (scale.item(), growth_tracker.item()) == (scale_after, tracker_after)


@pytest.mark.parametrize(("found_inf", "bound"), [(1.0, MIN_SCALE), (0.0, 2.0**127)])
def test_the_scale_stays_where_it_and_its_reciprocal_are_finite(found_inf: float, bound: float) -> None:
    scale, growth_tracker = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    tiny = torch.finfo(torch.float32).tiny
    for _ in range(300):
        Dynamic(growth_interval=1).advance_(
            scale, {"growth_tracker": growth_tracker}, IterationFacts(torch.tensor(found_inf))
        )
        assert tiny <= scale.item() < math.inf
        assert 0.0 < scale.reciprocal().item() < math.inf
    assert scale.item() == bound


# -- every rule, against plain Python that follows the docstring ----------------------------------------------------

STEPS = st.lists(
    st.sampled_from([("finite", 0.0), ("finite", 3.0), ("finite", 1e-3), ("inf", 0.0), ("nan loss", 0.0)]), max_size=60
)


def advance(schedule: Schedule, steps: list[tuple[str, float]]) -> list[float]:
    """Return the scale after each step."""
    scale = torch.tensor(schedule.init_scale)
    trackers = on_device({"growth_tracker": 0, **schedule.trackers()}, scale.device)
    scales = []
    for kind, largest in steps:
        found_inf, is_nonfinite = torch.tensor(float(kind != "finite")), torch.tensor(float(kind == "nan loss"))
        given = found_inf.clone(), is_nonfinite.clone()
        schedule.advance_(scale, trackers, IterationFacts(found_inf, is_nonfinite, torch.tensor(largest)))
        assert (found_inf, is_nonfinite) == given
        scales.append(scale.item())
    return scales


def dynamic(schedule: Dynamic, steps: list[tuple[str, float]]) -> list[float]:
    scale, t, h, c, scales = schedule.init_scale, 0, schedule.hysteresis, 0, []
    for kind, _ in steps:
        if kind == "nan loss" and schedule.on_nonfinite_loss == "hold":
            pass
        elif kind == "finite":
            t, c = t + 1, max(c - 1, 0)
            if t == schedule.growth_interval:
                scale, t, h = scale * schedule.growth_factor, 0, schedule.hysteresis
        elif c > 0:
            t, c = 0, c - 1
        else:
            t, h = 0, max(h - 1, 0)
            if h == 0:
                scale, c = scale * schedule.backoff_factor, schedule.cooldown
        scale = min(max(scale, schedule.min_scale), schedule.max_scale)
        scales.append(scale)
    return scales


@given(
    STEPS,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["backoff", "hold"]),
    st.sampled_from([(MIN_SCALE, MAX_SCALE), (4.0, 16.0)]),
)
def test_dynamic_follows_the_rule_of_its_docstring(
    steps: list[tuple[str, float]],
    interval: int,
    hysteresis: int,
    cooldown: int,
    on_nonfinite_loss: Literal["backoff", "hold"],
    bounds: tuple[float, float],
) -> None:
    schedule = Dynamic(
        8.0,
        growth_interval=interval,
        hysteresis=hysteresis,
        cooldown=cooldown,
        on_nonfinite_loss=on_nonfinite_loss,
        min_scale=bounds[0],
        max_scale=bounds[1],
    )
    assert advance(schedule, steps) == dynamic(schedule, steps)


@given(STEPS, st.floats(1.01, 5.0), st.floats(0.1, 0.9))
def test_options_that_are_not_used_leave_torchs_arithmetic(
    steps: list[tuple[str, float]], growth: float, backoff: float
) -> None:
    torchs = Dynamic(1000.0, growth, backoff, 3)
    with_options = dataclasses.replace(torchs, on_nonfinite_loss="hold")
    steps = [(kind, largest) for kind, largest in steps if kind != "nan loss"]
    assert advance(with_options, steps) == advance(torchs, steps)


def test_the_cooldown_runs_down_at_every_step_and_ends() -> None:
    schedule = Dynamic(16.0, cooldown=2)
    inf, finite = ("inf", 0.0), ("finite", 1.0)
    assert advance(schedule, [inf, finite, inf, inf]) == [8.0, 8.0, 8.0, 4.0]
    assert advance(schedule, [inf, finite, finite, inf]) == [8.0, 8.0, 8.0, 4.0]


@pytest.mark.parametrize("kind", [Dynamic, Headroom])
def test_a_scale_from_another_schedule_is_taken_over_within_the_bounds(kind: type[Dynamic | Headroom]) -> None:
    schedule = kind(16.0, min_scale=8.0, max_scale=32.0)
    assert [schedule.adopt(scale) for scale in (4.0, 20.0, 64.0)] == [8.0, 20.0, 32.0]


def test_a_schedule_without_a_rule_says_which_there_are() -> None:
    scale = torch.tensor(1.0)
    with pytest.raises(TypeError, match="Schedule does not define how the scale moves: override"):
        Schedule().advance_(scale, {}, IterationFacts(scale))
    assert Schedule().adopt(3.0) == 3.0


def headroom(schedule: Headroom, steps: list[tuple[str, float]]) -> list[float]:
    scale, t, p, margin, scales = schedule.init_scale, 0, 0.0, 0.0, []
    for kind, g in steps:
        exponent = math.floor(math.log2(scale))
        if kind == "finite":
            p, t = max(g, p * 2 ** (-1 / schedule.half_life)), t + 1
            if p > 0:
                target = schedule.largest_number * 2 ** -(schedule.headroom_bits + margin) / p
                scale = 2.0 ** min(math.floor(math.log2(target) + 2**-10), exponent + 1)
            if t == schedule.relax_interval:
                margin, t = max(margin - 1, 0.0), 0
        elif kind == "inf":
            scale, t = 2.0 ** (exponent - math.ceil(max(schedule.headroom_bits, 1))), 0
            if p > 0:
                margin = max(math.log2(schedule.largest_number / (scale * p)) - schedule.headroom_bits, 0.0)
        scale = min(max(scale, schedule.min_scale), schedule.max_scale)
        scales.append(scale)
    return scales


@given(STEPS, st.sampled_from([0.0, 1.0, 2.5, 3.0]), st.sampled_from([3.7, 50.0]), st.sampled_from([3, 2000]))
def test_headroom_follows_the_rule_of_its_docstring(
    steps: list[tuple[str, float]], bits: float, half_life: float, relax_interval: int
) -> None:
    schedule = Headroom(headroom_bits=bits, half_life=half_life, relax_interval=relax_interval)
    ours, reference = advance(schedule, steps), headroom(schedule, steps)
    assert ours == reference


def test_headroom_leaves_its_bits_free_below_the_largest_number() -> None:
    for largest in (1e-6, 0.3, 7.0, 1e4):
        scale = advance(Headroom(headroom_bits=3.0, max_scale=MAX_SCALE), [("finite", largest)] * 40)[-1]
        assert 2.0**3 <= 65504.0 / (scale * largest) < 2.0**4


def test_headroom_does_not_overflow_at_the_same_place_again() -> None:
    # Gradients of activations are 100 times larger than those that are measured.
    schedule, skips = Headroom(headroom_bits=2.0), []
    scale = torch.tensor(schedule.init_scale)
    trackers = on_device({"growth_tracker": 0, **schedule.trackers()}, scale.device)
    for step in range(1500):
        overflows = scale.item() * 0.1 * 100 > 65504.0
        skips += [step] * overflows
        found_inf = torch.tensor(float(overflows))
        schedule.advance_(scale, trackers, IterationFacts(found_inf, torch.tensor(0.0), torch.tensor(0.1)))
    assert skips == [0, 1, 3]  # before it has seen a gradient it cannot know


@pytest.mark.parametrize("schedule", [Static(1024.0), Guard()])
def test_a_static_scale_stays(schedule: Static) -> None:
    steps = [("finite", 1.0), ("inf", 0.0), ("nan loss", 0.0)] * 30
    assert set(advance(schedule, steps)) == {schedule.init_scale}
    assert schedule.adopt(8.0) == schedule.init_scale


def test_guard_has_the_scale_one() -> None:
    assert Guard().init_scale == 1.0
    with pytest.raises(TypeError, match="init_scale"):
        Guard(init_scale=2.0)  # type: ignore[call-arg]


OPTIONS_REFUSED: list[tuple[type[Schedule], dict[str, Any], type[Exception], str]] = [
    (Dynamic, {"hysteresis": 0}, ValueError, "hysteresis must be an integer in [1, 2**31), got 0"),
    (Dynamic, {"cooldown": -1}, ValueError, "cooldown must be an integer in [0, 2**31), got -1"),
    (Dynamic, {"cooldown": 1.5}, TypeError, "cooldown must be an integer, got 1.5 of type float"),
    (Dynamic, {"min_scale": 0.0}, ValueError, "min_scale must be a finite number > 0"),
    (Dynamic, {"max_scale": math.inf}, ValueError, "max_scale must be a finite number > 0"),
    (Dynamic, {"max_scale": 4.0}, ValueError, "init_scale must be within [min_scale, max_scale] = ["),
    (
        Dynamic,
        {"min_scale": 2.0, "max_scale": 1.0},
        ValueError,
        "min_scale must not be above max_scale, got 2.0 and 1.0",
    ),
    (Dynamic, {"on_nonfinite_loss": "ignore"}, ValueError, "must be one of 'backoff', 'hold', got 'ignore'"),
    (Static, {"patience": 0}, ValueError, "patience must be an integer in [1, 2**31), got 0"),
    (Guard, {"on_exhausted": "stop"}, ValueError, "on_exhausted must be one of 'warn', 'raise', got 'stop'"),
    (Headroom, {"headroom_bits": -1.0}, ValueError, "headroom_bits must be a finite number >= 0, got -1.0"),
    (Headroom, {"half_life": 0.0}, ValueError, "half_life must be a finite number > 0, got 0.0"),
    (Headroom, {"relax_interval": 0}, ValueError, "relax_interval must be an integer in [1, 2**31), got 0"),
    (Headroom, {"largest_number": 0.0}, ValueError, "largest_number must be a finite number > 0"),
    (Headroom, {"init_scale": 2.0**30}, ValueError, "init_scale must be within [min_scale, max_scale] = ["),
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), OPTIONS_REFUSED)
def test_options_that_cannot_work_are_refused(
    kind: type[Schedule], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        kind(**options)


def test_megatrons_scale_is_one_dynamic() -> None:
    """The rule that Megatron-LM documents: the delay is used up by non-finite steps, and refilled by growth alone."""
    schedule = Dynamic(2.0**32, growth_interval=4, hysteresis=2, min_scale=1.0)
    steps = [("inf", 0.0)] * 3 + [("finite", 1.0)] * 4 + [("inf", 0.0)] * 2
    assert [math.log2(scale) for scale in advance(schedule, steps)] == [32, 31, 30, 30, 30, 30, 31, 31, 30]


NUMBERS: dict[type[Schedule], list[str]] = {
    kind: [field.name for field in dataclasses.fields(kind) if field.init and field.type in ("float", "int")]
    for kind in (Dynamic, Headroom, Static)
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NUMBERS.items() for name in names])
def test_what_is_no_number_is_refused_by_its_name(kind: type[Schedule], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an? (number|integer), got 'x' of type str$"):
        kind(**{name: "x"})


@pytest.mark.parametrize("kind", [Dynamic, Headroom])
@pytest.mark.parametrize("name", ["min_scale", "max_scale"])
def test_a_bound_that_is_no_scale_is_refused_by_its_name(kind: type[Schedule], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a finite number > 0"):
        kind(**{name: 0.0})


@pytest.mark.parametrize("kind", [Dynamic, Headroom])
def test_bounds_may_be_equal_to_each_other_and_to_the_first_scale(kind: type[Dynamic | Headroom]) -> None:
    assert kind(8.0, min_scale=8.0, max_scale=8.0).min_scale == 8.0
    for scale in (4.0, 16.0):
        assert kind(scale, min_scale=4.0, max_scale=16.0).init_scale == scale


@pytest.mark.parametrize("kind", [Dynamic, Headroom, Static])
def test_all_numbers_are_kept_as_plain_ones(kind: type[Schedule]) -> None:
    given = {"init_scale": 8, "min_scale": 2, "max_scale": 64, "growth_factor": 3, "backoff_factor": numpy.float32(0.5)}
    given |= {"half_life": 7, "headroom_bits": 1, "largest_number": 448, "relax_interval": numpy.int64(3)}
    given |= {"growth_interval": numpy.int64(9), "hysteresis": numpy.int8(2), "cooldown": numpy.int8(1)}
    schedule = kind(**{name: given[name] for name in NUMBERS[kind] if name in given})
    for field in dataclasses.fields(kind):
        if field.name in given:
            value = getattr(schedule, field.name)
            assert (value, type(value).__name__) == (given[field.name], field.type)


def test_what_to_do_at_a_nonfinite_loss_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match=r"^on_nonfinite_loss must be one of 'backoff', 'hold', got 'wait'$"):
        Dynamic(on_nonfinite_loss="wait")  # type: ignore[arg-type]


def test_torchs_own_rule_remembers_nothing_more_than_torch() -> None:
    assert Dynamic(growth_interval=3, min_scale=1.0).trackers() == {}
    for options in ({"hysteresis": 2}, {"cooldown": 1}, {"on_nonfinite_loss": "hold"}):
        assert Dynamic(**options).trackers() == {"hysteresis_left": options.get("hysteresis", 1), "cooldown_left": 0}


def test_a_half_life_is_any_finite_time() -> None:
    assert Headroom(half_life=0.25).half_life == 0.25
    with pytest.raises(ValueError, match=r"^half_life must be a finite number > 0, got inf$"):
        Headroom(half_life=math.inf)


def after_a_step(scale: float, peak: float, facts: IterationFacts, **options: Any) -> tuple[float, float]:
    """The scale and the margin after a step."""
    now = torch.tensor(scale)
    trackers = {"growth_tracker": torch.tensor(0, dtype=torch.int32), "peak": torch.tensor(peak)}
    trackers["margin"] = torch.tensor(0.0)
    Headroom(scale, **options).advance_(now, trackers, facts)
    return now.item(), trackers["margin"].item()


def test_headroom_stays_within_its_bounds() -> None:
    clear, found = torch.tensor(0.0), torch.tensor(1.0)
    tiny = IterationFacts(clear, clear, torch.tensor(1e-9))
    assert after_a_step(32.0, 0.0, tiny, max_scale=32.0)[0] == 32.0
    assert after_a_step(32.0, 0.0, tiny, max_scale=100.0)[0] == 64.0
    assert after_a_step(32.0, 1.0, IterationFacts(found, clear, clear), min_scale=32.0)[0] == 32.0
    assert after_a_step(32.0, 1.0, IterationFacts(found, clear, clear), min_scale=1.0)[0] == 8.0


def test_headroom_learns_a_margin_of_less_than_a_bit() -> None:
    peak = 2.0 ** (math.log2(65504.0) - 2.0 - 8.0 - 0.5)
    scale, margin = after_a_step(1024.0, peak, IterationFacts(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0)))
    assert (scale, margin) == (256.0, pytest.approx(0.5, abs=1e-3))


def test_headroom_takes_the_largest_gradient_in_any_dtype() -> None:
    facts = [
        IterationFacts(torch.tensor(0.0), None, torch.tensor(300.0, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    assert after_a_step(64.0, 0.0, facts[0]) == after_a_step(64.0, 0.0, facts[1]) == (32.0, 0.0)


@pytest.mark.parametrize(
    ("schedule", "loss", "largest"),
    [
        (Static(8.0), False, False),
        (Guard(), False, False),
        (Dynamic(), False, False),
        (Dynamic(on_nonfinite_loss="hold"), True, False),
        (Headroom(), True, True),
    ],
)
def test_what_a_schedule_has_to_know(schedule: Schedule, loss: bool, largest: bool) -> None:
    assert (schedule.needs_loss, schedule.needs_largest) == (loss, largest)
