"""`simulate`: what a schedule would have done in a recorded training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from castwise.schedules import (
    Dynamic,
    GradientRange,
    Guard,
    Headroom,
    Schedule,
    Static,
    read_trace,
    simulate,
    write_trace,
)


def test_the_steps_that_overflow_are_skipped_until_the_scale_has_fallen() -> None:
    run = simulate([GradientRange(8.0)] * 5, Dynamic(2.0**15, growth_interval=2))
    # 8 * 2**13 = 65536 is just too large for fp16.
    assert run.scales == (2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**12)
    assert (run.skipped, run.skips, run.wasted_steps, run.flushed) == ((0, 1, 2), 3, 3, None)


def test_a_step_whose_loss_was_not_finite_is_lost_whatever_the_scale() -> None:
    trace = [GradientRange(0.0, loss_is_finite=False)] * 3 + [GradientRange(1.0)]
    holds, backs_off = Dynamic(64.0, on_nonfinite_loss="hold"), Dynamic(64.0)
    assert simulate(trace, holds).scales == (64.0,) * 4
    assert simulate(trace, backs_off).scales == (64.0, 32.0, 16.0, 8.0)
    for schedule in (holds, backs_off):
        assert (simulate(trace, schedule).skips, simulate(trace, schedule).wasted_steps) == (3, 0)


def test_gradients_below_half_of_the_smallest_number_are_flushed() -> None:
    step = GradientRange(1.0, {-26: 3, -25: 5, -30: 2})  # 3 in [2**-26, 2**-25), ...
    assert simulate([step], Static(1.0)).flushed == 0.5
    assert simulate([step], Static(2.0)).flushed == 0.2
    assert simulate([step], Static(2.0**5)).flushed == 0.0
    assert simulate([step], Static(1.0), flushed_below=2.0**-24).flushed == 1.0


def test_headroom_moves_before_anything_overflows() -> None:
    growing = [GradientRange(2.0 ** (step / 20)) for step in range(300)]
    settled = simulate(growing, Headroom(2.0**10, headroom_bits=2.0))
    assert settled.skips == 0
    assert simulate(growing, Dynamic(2.0**15, growth_interval=20)).skips > 10


@pytest.mark.parametrize("schedule", [Dynamic(), Static(), Guard(), Headroom()], ids=repr)
def test_every_schedule_can_be_simulated(schedule: Schedule) -> None:
    assert len(simulate([GradientRange(1.0)] * 3, schedule).scales) == 3


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: simulate([1.0], Dynamic()), TypeError, "a trace is made of GradientRange, got 1.0 at 0"),  # type: ignore[list-item]
        (lambda: simulate([], "Dynamic"), TypeError, "schedule must be one of castwise.schedules"),  # type: ignore[arg-type]
        (lambda: simulate([], Dynamic(), largest_number=0), ValueError, "largest_number must be a finite number > 0"),
        (
            lambda: simulate([], Dynamic(), flushed_below=math.nan),
            ValueError,
            "flushed_below must be a finite number >= 0",
        ),
        (lambda: GradientRange(math.nan), ValueError, "largest must be a finite number >= 0, got nan"),
        (lambda: GradientRange("1"), TypeError, "largest must be a number, got '1' of type str"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        wrong()
    assert message in str(caught.value)


def test_a_trace_is_kept_in_a_file(tmp_path: Path) -> None:
    trace = [GradientRange(1.5, {-3: 2, 0: 1}), GradientRange(0.0, None, loss_is_finite=False)]
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    "line",
    [
        *("{}", "[1.0]", "[-1.0, true, null]", '["a", true, null]', "no json", "[1, true, [2]]", "\xff", "[" * 9000),
        *("[1, 2, null]", '[1, true, {"1": 1e999}]', '[1, true, {"1": -1}]', '[1, true, {"1024": 1}]'),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(f"[1.0, true, null]\n{line}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2 is no step of a trace"):
        read_trace(file)
