"""Formats against torch.finfo and against what torch's casts do."""

from __future__ import annotations

import math

import pytest
import torch

from castwise.monitor import BF16, E4M3, E5M2, FP16, FP32, Format
from castwise.monitor._formats import LOW_PRECISION

DTYPES = {
    FP32: torch.float32,
    FP16: torch.float16,
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
}
ALL = list(DTYPES)


@pytest.mark.parametrize("number_format", ALL, ids=lambda each: each.name)
def test_quantities_are_those_of_torch(number_format: Format) -> None:
    info = torch.finfo(DTYPES[number_format])
    assert number_format.largest == info.max
    assert number_format.smallest_normal == info.smallest_normal
    assert number_format.mantissa_bits == -math.log2(info.eps)


@pytest.mark.parametrize("number_format", ALL, ids=lambda each: each.name)
def test_what_is_half_of_the_smallest_subnormal_or_less_is_cast_to_zero(number_format: Format) -> None:
    half = number_format.smallest_subnormal / 2
    values = torch.tensor([half, half * 1.0001, 2 * half, 3.001 * half], dtype=torch.float64)
    cast = values.to(DTYPES[number_format]).to(torch.float64)
    assert cast.tolist() == [0, 2 * half, 2 * half, 4 * half]


@pytest.mark.parametrize("number_format", ALL, ids=lambda each: each.name)
def test_there_is_no_number_above_the_largest(number_format: Format) -> None:
    largest = torch.tensor([number_format.largest], dtype=torch.float64)
    assert largest.to(DTYPES[number_format]).to(torch.float64).equal(largest)
    beyond = (largest * (1 + 2.0**-number_format.mantissa_bits)).to(DTYPES[number_format]).to(torch.float64)
    assert beyond.equal(largest) or not beyond.isfinite()  # torch's cast to e4m3 saturates


def test_the_formats_that_are_judged() -> None:
    assert list(LOW_PRECISION) == ["fp16", "bf16", "e4m3", "e5m2"]
    assert [each.largest for each in LOW_PRECISION.values()] == [65504.0, 3.3895313892515355e38, 448.0, 57344.0]
