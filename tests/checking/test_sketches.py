"""Sketches: linear, sensitive to positions, and as large as the tensors."""

from __future__ import annotations

import math

import pytest
import torch

from castwise.checking._sketches import KEPT, digest_of, relative_error, sketch_of, sketches_of


@pytest.mark.parametrize("size", [1, 7, 128, 1000, 2**20 + 5, 2 * 2**20])
def test_norm_and_sum_are_exact_and_the_buckets_estimate_the_norm(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    found = sketch_of(values)
    assert found.norm == pytest.approx(float(values.double().norm()), rel=1e-12)
    assert found.sum == pytest.approx(float(values.double().sum()), rel=1e-9, abs=1e-9)
    if size >= 128:
        assert 0.2 < math.hypot(*found.buckets) / found.norm < 2.5


@pytest.mark.parametrize("size", [1000, 2**20 + 5])
def test_the_sketch_of_a_sum_is_the_sum_of_sketches(size: int) -> None:
    a, b = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    both = zip(sketch_of(a).buckets, sketch_of(b).buckets, strict=True)
    assert sketch_of(a + b).buckets == pytest.approx([x + y for x, y in both], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("shift", [1, 128, 4096, 2**20])
def test_moved_values_have_another_sketch(shift: int) -> None:
    values = torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    assert relative_error(sketch_of(values.roll(shift)), sketch_of(values)) > 0.1


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_a_relative_error_is_about_that_of_the_tensors(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    a, noise = torch.randn(2, size, dtype=torch.float64, generator=generator)
    true = float((1e-6 * noise).norm() / a.norm())
    assert 0.2 * true < relative_error(sketch_of(a + 1e-6 * noise), sketch_of(a)) < 3 * true


def test_a_sketch_with_fewer_buckets_is_compared_with_their_sums() -> None:
    a = sketch_of(torch.randn(500))
    assert relative_error(a, a._replace(buckets=a.folded(KEPT // 2))) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_differ_from_finite_ones(value: float) -> None:
    finite, other = sketch_of(torch.ones(4)), sketch_of(torch.tensor([1.0, value]))
    assert relative_error(other, finite) == math.inf
    assert relative_error(finite, other) == math.inf


def test_any_tensor_has_a_sketch_and_a_digest() -> None:
    tensors = [
        *(torch.ones(2, 3, dtype=dtype) for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64)),
        *(torch.ones(()), torch.ones(0), torch.ones(3, 4).t(), torch.eye(3).to_sparse(), torch.ones(2, device="cpu")),
    ]
    assert all(math.isfinite(sketch_of(tensor).norm) for tensor in tensors)
    assert len({digest_of([tensor]) for tensor in tensors}) == len(tensors)


def test_tensors_that_are_sketched_together_have_their_own_sketches() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [*range(1, 40), 0, 4096, 200, 5000, 1]
    tensors = [torch.randn(size, generator=generator).to(torch.bfloat16 if size % 2 else None) for size in sizes]
    tensors[3][1] = math.inf
    found = dict(sketches_of((str(i), tensor) for i, tensor in enumerate(tensors)))
    assert [*found] == list(map(str, range(len(sizes))))
    for tensor, sketch in zip(tensors, found.values(), strict=True):
        expected = sketch_of(tensor)
        assert sketch.norm == pytest.approx(expected.norm, rel=1e-14)
        assert (*sketch.buckets, sketch.sum) == pytest.approx(
            (*expected.buckets, expected.sum), rel=1e-13, abs=1e-13, nan_ok=True
        )


def test_a_digest_differs_by_one_bit_of_one_element() -> None:
    a, b = torch.ones(1000), torch.ones(1000)
    b[500] = torch.nextafter(b[500], torch.tensor(2.0))
    assert digest_of([a]) == digest_of([a.clone()]) != digest_of([b])
