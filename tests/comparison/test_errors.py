"""Sums of errors: the figures are those of plain fp64, whatever the sizes and signs of the values."""

from __future__ import annotations

import math

import pytest
import torch

from castwise.comparison import Errors
from castwise.comparison import _errors as errors
from castwise.comparison._errors import EffectSums, ErrorSums


def of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Errors:
    sums = ErrorSums()
    for reference, value in pairs:
        sums.add(reference, value)
    found = sums.errors()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e25])
def test_figures_are_those_of_plain_fp64(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    reference = torch.randn(3, 7, dtype=torch.float64).to(dtype) * size
    value = (reference.double() * (1 + 0.05 * torch.randn(3, 7, dtype=torch.float64)) + 0.01 * size).to(dtype)
    a, b = reference.double(), value.double()
    found = of((reference, value))
    assert found.relative_rms == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-5)
    assert found.bias == pytest.approx(float((b - a).mean() / a.square().mean().sqrt()), rel=1e-4)
    assert found.cosine == pytest.approx(float((a * b).sum() / (a.norm() * b.norm())), rel=1e-6)
    assert found.largest == pytest.approx(float((b - a).abs().max()), rel=1e-6)
    assert found.nonfinite == 0.0


def test_tensors_are_added_in_parts_and_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, value = torch.randn(2, 50), torch.randn(2, 50)
    whole = of((reference, value))
    monkeypatch.setattr(errors, "_CHUNK", 7)
    parts = of((reference[0], value[0]), (reference[1].T, value[1].T))
    assert parts.relative_rms == pytest.approx(whole.relative_rms, rel=1e-5)
    assert parts.largest == whole.largest


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    inf, nan = math.inf, math.nan
    found = of((torch.tensor([1.0, 2.0, 3.0, -inf, nan]), torch.tensor([1.5, inf, nan, -inf, 1.0])))
    assert found.nonfinite == pytest.approx(2 / 3)
    assert found.relative_rms == pytest.approx(0.5)
    nothing = of((torch.ones(2), torch.full((2,), nan)))
    assert nothing.nonfinite == 1.0
    assert math.isnan(nothing.relative_rms)


def test_a_reference_of_zeros_has_no_relative_errors_but_infinite_ones() -> None:
    zeros = torch.zeros(3)
    assert of((zeros, zeros)) == Errors(0.0, 0.0, 1.0, 0.0, 0.0)
    off = of((zeros, torch.ones(3)))
    assert off.relative_rms == math.inf
    assert math.isnan(off.cosine)
    assert off.largest == 1.0


def test_without_elements_there_are_no_figures() -> None:
    sums = ErrorSums()
    sums.add(torch.ones(0), torch.ones(0))
    assert sums.errors() is None


def test_the_norm_ratio_is_that_of_all_values() -> None:
    sums = ErrorSums()
    sums.add(torch.tensor([3.0]), torch.tensor([6.0]))
    sums.add(torch.tensor([4.0]), torch.tensor([8.0]))
    assert sums.norm_ratio() == pytest.approx(2.0)


def test_an_effect_is_the_rms_of_gradients_times_errors() -> None:
    sums = EffectSums()
    gradient, reference, value = (torch.randn(10) for _ in range(3))
    sums.add(gradient, reference, value)
    sums.add(gradient, reference, reference)  # exact: it made nothing
    shift = gradient.double() * (value.double() - reference.double())
    assert sums.rms() == pytest.approx(float(shift.square().mean().sqrt()))
    assert sums.root() == pytest.approx(float(shift.norm()))


def test_an_error_that_is_not_finite_has_an_infinite_effect_even_where_the_gradient_is_zero() -> None:
    sums = EffectSums()
    sums.add(torch.zeros(2), torch.ones(2), torch.tensor([1.0, math.nan]))
    assert sums.rms() == math.inf
    masked = EffectSums()
    masked.add(torch.ones(2), torch.tensor([-math.inf, 1.0]), torch.tensor([-math.inf, 1.5]))
    assert masked.root() == 0.5


def test_values_of_which_none_is_finite_have_no_cosine_and_no_norm_ratio() -> None:
    sums = ErrorSums()
    sums.add(torch.ones(3), torch.full((3,), math.nan))
    assert math.isnan(sums.cosine())
    assert math.isnan(sums.norm_ratio())


def test_what_is_not_finite_in_the_reference_is_no_error_with_an_effect() -> None:
    inf, nan = math.inf, math.nan
    sums = EffectSums()
    sums.add(torch.ones(4), torch.tensor([1.0, nan, -inf, nan]), torch.tensor([1.5, nan, 3.0, 2.0]))
    assert sums.root() == 0.5
    sums.add(torch.ones(1), torch.ones(1), torch.tensor([inf]))
    assert sums.root() == inf
    assert not sums.lacks_gradient


def test_a_gradient_that_is_not_finite_leaves_the_effect_unknown_where_there_is_an_error() -> None:
    sums, gradient = EffectSums(), torch.tensor([math.nan, 1.0])
    sums.add(gradient, torch.ones(2), torch.tensor([1.0, 2.0]))
    assert (sums.root(), sums.lacks_gradient) == (1.0, False)
    sums.add(gradient, torch.ones(2), torch.tensor([2.0, 1.0]))
    assert sums.lacks_gradient


def test_a_difference_is_noticed_that_the_sums_are_too_large_to_show() -> None:
    sums = ErrorSums()
    assert sums.add(torch.tensor([0.0]), torch.tensor([1e12]))
    before = sums.squares
    assert sums.add(torch.tensor([0.0]), torch.tensor([1e-3]))
    assert sums.squares == before
    assert not sums.add(torch.ones(2), torch.ones(2))
    assert sums.add(torch.ones(2), torch.tensor([1.0, math.nan]))
