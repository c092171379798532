"""`simulate`: what a schedule would have done in a recorded training."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_what_is_flushed_is_summed_over_the_steps_that_are_taken() -> None:
    taken = [GradientRange(1.0, {-26: 3, 0: 1}), GradientRange(1.0, {-26: 1, 0: 5})]
    overflow, bad_loss = GradientRange(1e6, {-26: 9}), GradientRange(1.0, {-26: 9}, loss_is_finite=False)
    assert simulate([taken[0], overflow, bad_loss, taken[1]], Static(1.0)).flushed == 0.4


def test_the_largest_number_itself_does_not_overflow() -> None:
    assert simulate([GradientRange(65504.0)], Static(1.0)).skips == 0
    assert simulate([GradientRange(65505.0)], Static(1.0)).skips == 1


def test_the_largest_exponents_of_fp64_are_no_reason_to_fail() -> None:
    assert simulate([GradientRange(0.0, {1023: 1, -1074: 1})], Static(2.0**126)).flushed == 0.5


def test_the_scale_grows_after_the_interval_and_not_before() -> None:
    assert simulate([GradientRange(1.0)] * 4, Dynamic(1.0, growth_interval=2)).scales == (1.0, 1.0, 2.0, 2.0)


@pytest.mark.parametrize("schedule", [Dynamic(1.0, growth_factor=1.1, growth_interval=1), Headroom()], ids=repr)
def test_defaults_of_torch_do_not_matter(schedule: Schedule) -> None:
    trace = [GradientRange(1.0), GradientRange(1.5, loss_is_finite=False), GradientRange(0.1)]
    expected = simulate(trace, schedule)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        assert simulate(trace, schedule) == expected
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


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
        (lambda: simulate([1.0], Dynamic()), TypeError, "trace must contain GradientRange, got 1.0 at index 0"),  # type: ignore[list-item]
        (lambda: simulate([], "Dynamic"), TypeError, "schedule must be one of castwise.schedules"),  # type: ignore[arg-type]
        (lambda: simulate([], Dynamic(), largest_number=0), ValueError, "largest_number must be a finite number > 0"),
        (
            lambda: simulate([], Dynamic(), flushed_below=math.nan),
            ValueError,
            "flushed_below must be a finite number >= 0",
        ),
        (lambda: GradientRange(math.nan), ValueError, "largest must be a finite number >= 0, got nan"),
        (lambda: GradientRange(1.0, {-1075: 1}), ValueError, "an exponent must be in [-1074, 1023], got -1075"),
        (lambda: GradientRange(1.0, {1.5: 1}), TypeError, "an exponent must be an integer, got 1.5 of type float"),  # type: ignore[dict-item]
        (lambda: GradientRange("1"), TypeError, "largest must be a number, got '1' of type str"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        wrong()
    assert message in str(caught.value)


def test_a_trace_is_kept_in_a_file(tmp_path: Path) -> None:
    trace = [
        GradientRange(1.5, {-3: 2, 0: 1}),
        GradientRange(0.0, None, loss_is_finite=False),
        GradientRange(0.5, {-1074: 2**40, 1023: 0}, loss_is_finite=False),
    ]
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, "") for line in ("{}", "[1.0]", "no json", "\xff", "[" * 9000)),
        ("[-1.0, true, null]", "largest must be a finite number >= 0, got -1.0"),
        ('["a", true, null]', "largest must be a number, got 'a' of type str"),
        ("[1, true, [2]]", "exponents must be an object or null, got [2]"),
        ("[1, 2, null]", "loss_is_finite must be true or false, got 2"),
        ('[1, true, {"1": 1e999}]', "a count of exponents must be an integer, got inf of type float"),
        ('[1, true, {"1": -1}]', "a count of exponents must be an integer in [0, 2**63), got -1"),
        ('[1, true, {"1024": 1}]', "an exponent must be in [-1074, 1023], got 1024"),
        *(
            (
                f'[1, true, {{"{exponent}": 1}}]',
                "an exponent must be written as an integer in [-1074, 1023], got ",
            )
            for exponent in ("a", " 1", "1_0", "01", "-0", "+1", "10000", "1" * 5000)
        ),
        ("[1, true]", "expected a list of the largest gradient, whether the loss is finite, and exponents"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(f"[1.0, true, null]\n{line}\n".encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(f"trace.jsonl, line 2 is not a step of a trace: {message}")):
        read_trace(file)
