"""What dashboards show of a record."""

from __future__ import annotations

import math

import pytest
from tests.monitor.recorded import sample, step

from castwise.monitor._curves import Histogram, Spread, exponents, norm_of_sample, of_sample, of_step
from castwise.monitor._records import Exponents, SampleRecord, Stats, StepRecord


def test_a_step_has_the_numbers_that_are_known() -> None:
    found = of_step(StepRecord.from_json(step(3, 2.0, "overflow", grad_norm=None, loss=math.inf)))
    assert found == {"step/scale": 2.0, "step/loss": math.inf, "step/seconds": 0.01, "step/skipped": 1.0}


def test_the_norm_of_a_sampled_step_is_on_the_curve_of_the_steps() -> None:
    assert norm_of_sample(SampleRecord(3, 2.0, grad_norm=1.5)) == {"step/grad_norm": 1.5}
    assert norm_of_sample(SampleRecord(3, 2.0)) == {}


@pytest.mark.parametrize("modules", [1, 5, 300])
def test_there_are_as_many_curves_for_a_model_of_any_size(modules: int) -> None:
    names = [f"blocks.{index}" for index in range(modules)]
    record = SampleRecord.from_json(sample(1, 1024.0, dict.fromkeys(names, -20.0), dict.fromkeys(names, 1.0)))
    assert len(of_sample(record)) == 18
    assert len(of_step(StepRecord.from_json(step(1, 1024.0)))) == 5


def test_the_worst_of_a_statistic_is_named() -> None:
    record = sample(1, 1.0, {"small": -30.0, "fine": -10.0, "large": 14.0}, {"": 1.0})
    found = {(each.group, each.name): each for each in of_sample(SampleRecord.from_json(record))}
    flush, headroom = found["gradients", "flush fp16"], found["gradients", "headroom_bits fp16"]
    assert (flush.worst, flush.worst_value) == ("small", record["modules"]["small"]["formats"]["fp16"]["flush"])
    assert headroom.worst == "large"
    assert headroom.worst_value < 0
    assert [*flush.values] == ["small", "fine", "large"]
    assert found["outputs", "flush fp16"].worst == "whole model"
    assert found["updates", "lost_in_bf16"].values == {f"{name}.weight": 0.01 for name in ("small", "fine", "large")}


def test_what_is_not_finite_is_left_out() -> None:
    record = sample(1, 1.0, {"a": -10.0, "b": -10.0}, {})
    for name, value in (("a", math.inf), ("b", -math.inf)):
        record["modules"][name]["formats"]["fp16"]["headroom_bits"] = value
    record["modules"]["a"]["formats"]["bf16"]["headroom_bits"] = math.inf
    found = {each.name: each for each in of_sample(SampleRecord.from_json(record)) if each.group == "gradients"}
    assert "headroom_bits fp16" not in found
    assert found["headroom_bits bf16"].worst == "b"


@pytest.mark.parametrize(("values", "filled"), [([0.0, 3.0], {0: 1, 29: 1}), ([0.0, 1.5, 3.0], {0: 1, 15: 1, 29: 1})])
def test_a_histogram_counts_each_value_once(values: list[float], filled: dict[int, int]) -> None:
    edges, counts = Spread("gradients", "x", dict(zip("abc", values, strict=False)), "a").histogram()
    assert {index: count for index, count in enumerate(counts) if count} == filled
    assert (len(edges), len(counts)) == (31, 30)
    assert (edges[0], edges[-1]) == pytest.approx((0.0, 3.0))


def test_values_that_are_all_the_same_are_in_one_bin() -> None:
    edges, counts = Spread("gradients", "x", {"a": 0.25, "b": 0.25}, "a").histogram()
    assert counts == [2, *[0] * 29]
    assert edges[:2] == [0.25, 1.25]


def test_exponents_of_several_modules_are_added() -> None:
    def of(lowest: int, *counts: int) -> Stats:
        return Stats(9, 1.0, None, 0.0, 0.0, Exponents(lowest, counts))

    assert exponents([of(-3, 1, 0, 4), of(-2, 2, 2, 2), of(0)]) == Histogram([-3.0, -2.0, -1.0, 0.0, 1.0], [1, 2, 6, 2])
    assert exponents([of(0)]) is None
