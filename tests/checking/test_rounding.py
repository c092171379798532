"""Random rounding: each result is moved by up to one rounding of its dtype, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from castwise.checking._promotion import exact_arithmetic
from castwise.checking._rounding import UNITS, RandomRounding

A, B = torch.randn(2, 40, 30, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_results_are_moved_and_their_arguments_are_not(dtype: torch.dtype, layout: str) -> None:
    a, b = A.to(dtype), B.to(dtype)
    if layout == "transposed":
        a, b = a.t(), b.t()
    elif layout == "expanded":
        a, b = a[:, :1].expand_as(a), b[:, :1].expand_as(b)
    expected, before = a * b, a.clone()
    with RandomRounding(1) as rounding:
        moved = a * b
    error = ((moved.double() - expected.double()) / expected.double()).abs()
    assert 0 < error.max() <= 4 * UNITS[dtype]
    assert torch.equal(a, before)
    assert rounding.dtypes == {dtype}


def test_parts_that_share_the_memory_of_a_weight_leave_it_as_it_is() -> None:
    weight = torch.randn(8, 4)
    before = weight.clone()
    with RandomRounding(1):
        first, second = torch.unsafe_split(weight, 4)  # which torch does not count as views
    assert torch.equal(weight, before)
    assert torch.equal(torch.cat([first, second]), before)


def test_ops_that_do_not_round_are_left_alone() -> None:
    with RandomRounding(1):
        moved = [A.t().clone(), torch.cat([A, B]), A.relu(), A.clone().mul_(3)]
    assert all(map(torch.equal, moved, [A.t(), torch.cat([A, B]), A.relu(), A * 3]))


def test_what_a_backward_needs_is_not_moved_after_it_was_saved() -> None:
    x = A.clone().requires_grad_()
    with RandomRounding(1):
        y = x.exp()
        kept = y.detach().clone()
        y.sum().backward()
    assert torch.equal(y.detach(), kept)
    assert torch.allclose(x.grad, kept, rtol=1e-6)


def test_float64_is_moved_in_the_same_mode() -> None:
    """Two modes would take twice the time."""
    with exact_arithmetic():
        expected = A * B
    with exact_arithmetic(RandomRounding(1)):
        moved = A * B
    error = ((moved - expected) / expected).abs()
    assert moved.dtype == torch.float64
    assert 0 < error.max() <= 4 * UNITS[torch.float64]
