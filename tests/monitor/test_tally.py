"""What is said of magnitudes, against float64 and against real casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise.monitor import Format
from castwise.monitor._exponents import count, tally
from castwise.monitor._formats import LOW_PRECISION
from castwise.monitor._tally import Tally

magnitudes = st.lists(st.one_of(st.just(0.0), st.floats(-60, 20).map(lambda power: 2.0**power)), min_size=1)
formats = st.sampled_from(list(LOW_PRECISION.values()))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def of(*numbers: float) -> Tally:
    return tally(count(torch.tensor(numbers, dtype=torch.float32)))


@settings(max_examples=300)
@given(magnitudes, formats)
def test_shares_are_those_that_float64_gives(numbers: list[float], number_format: Format) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    exact = values.to(torch.float64)
    half = number_format.smallest_subnormal / 2
    fit = tally(count(values)).stats().formats[number_format.name]
    assert fit.flush == ((exact > 0) & (exact < half)).double().mean().item()
    coarse = (exact > 0) & (exact < number_format.smallest_normal)
    assert fit.subnormal == coarse.double().mean().item() - fit.flush  # to the last bit, as 0.2 computed it
    largest = exact.max().item()
    assert fit.headroom_bits == pytest.approx(math.log2(number_format.largest / largest) if largest else math.inf)


@settings(max_examples=300)
@given(magnitudes, formats)
def test_what_flushes_is_what_a_cast_makes_zero(numbers: list[float], number_format: Format) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    values = values[values != number_format.smallest_subnormal / 2]  # a tie, which goes to zero
    cast = values.to(DTYPES[number_format.name]).float()
    flushed = ((cast == 0) & (values != 0)).sum().item()
    assert round(tally(count(values)).stats().formats[number_format.name].flush * len(values)) == flushed


def test_headroom_is_negative_if_the_largest_overflows() -> None:
    assert of(65504.0 * 4).stats().formats["fp16"].headroom_bits == pytest.approx(-2.0)
    assert of(2.0**-140).stats().formats["bf16"].headroom_bits == pytest.approx(128 + 140, abs=0.01)
    assert of(0.0).stats().formats["fp16"].headroom_bits == math.inf
    assert of(1.0, math.nan).stats().formats["fp16"].headroom_bits == -math.inf


def test_tallies_add_up_to_that_of_all_elements() -> None:
    some, others = [1.0, 0.0, math.inf, 3e-7], [2.5, 1.5, math.nan, 1e-30]
    assert of(*some) + of(*others) == of(*some, *others)
    assert Tally() + of(*some) == of(*some)


@given(st.lists(st.floats(-20, 20).map(lambda power: 2.0**power)), st.integers(-40, 40))
@settings(max_examples=100)
def test_multiplying_by_a_power_of_two_moves_the_exponents(numbers: list[float], power: int) -> None:
    assert of(*numbers).times_two_to_the(power) == of(*(number * 2.0**power for number in numbers))


@given(st.lists(st.floats(-20, 20).map(lambda power: 2.0**power), min_size=1), st.floats(-40, 40))
@settings(max_examples=100)
def test_dividing_by_a_scale_is_exact_but_for_exponents_of_scales_between_powers_of_two(
    numbers: list[float], log2_scale: float
) -> None:
    numbers, scale = torch.tensor(numbers).tolist(), 2.0**log2_scale
    divided = of(*numbers).divided_by(scale)
    quotients = [number / scale for number in numbers]
    assert (divided.largest, divided.smallest) == (max(quotients), min(quotients))
    exact = sorted(math.frexp(quotient)[1] - 1 for quotient in quotients)
    found = sorted(exponent for exponent, n in divided.counts.items() for _ in range(n))
    assert all(abs(mine - right) <= 1 for mine, right in zip(found, exact, strict=True))
    power = 2.0 ** round(log2_scale)
    assert of(*numbers).divided_by(power) == of(*numbers).times_two_to_the(-round(log2_scale))


def test_copies_count_once() -> None:
    elements = of(1.0, 2.0, 0.0, math.inf)
    assert (elements + elements).of_copies(held=2, distinct=1) == elements
    assert elements.of_copies(held=2, distinct=2) == elements


def test_a_record_says_unscaled_magnitudes_and_how_scaled_ones_fit() -> None:
    scaled = of(2.0**-26, 3.0, 0.0, math.inf)
    record = scaled.times_two_to_the(-16).stats(scaled).to_json()
    assert record["numel"] == 4
    assert record["largest"] == 3 * 2.0**-16
    assert record["smallest"] == 2.0**-42
    assert (record["zero"], record["nonfinite"]) == (0.25, 0.25)
    assert record["exponents"]["lowest"] == -42
    assert record["exponents"]["counts"] == [1] + [0] * 26 + [1]
    assert record["formats"]["fp16"]["flush"] == 0.25
    assert record["formats"]["bf16"]["flush"] == 0.0
    assert list(record["formats"]) == ["fp16", "bf16", "e4m3", "e5m2"]


def test_a_record_of_zeros_has_no_smallest_magnitude_and_no_exponents() -> None:
    record = of(0.0, 0.0).stats().to_json()
    assert (record["largest"], record["smallest"]) == (0.0, None)
    assert record["exponents"] == {"lowest": 0, "counts": []}
    assert Tally().stats().to_json()["zero"] == 0.0
