"""Counts of exponents against slow code that looks at one float64 number after another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from castwise.monitor import _exponents as exponents
from castwise.monitor._exponents import count, sum_of_squares, tally
from castwise.monitor._tally import Tally

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]

# Any bits are some number: subnormals, both zeros, inf and NaNs among them.
any_bits = st.lists(st.integers(0, 255), min_size=1, max_size=400).filter(lambda bits: len(bits) >= 8)
smooth = st.lists(st.floats(-45, 38), min_size=1, max_size=50)


def reference(numbers: list[float]) -> Tally:
    finite = [abs(number) for number in numbers if math.isfinite(number)]
    above_zero = [number for number in finite if number != 0.0]
    return Tally(
        numel=len(numbers),
        zero=len(finite) - len(above_zero),
        nonfinite=len(numbers) - len(finite),
        largest=max(above_zero, default=0.0),
        smallest=min(above_zero, default=math.inf),
        counts=Counter(math.frexp(number)[1] - 1 for number in above_zero),
    )


def numbers_of(tensor: torch.Tensor) -> list[float]:
    numbers: list[float] = tensor.to(torch.float64).flatten().tolist()
    return numbers


def from_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return torch.tensor(bits[: len(bits) // size * size], dtype=torch.uint8).view(dtype)


@pytest.fixture(params=["on a CPU", "without a sync", "without a sync, deterministic"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the route of accelerators on the CPU as well, which differs only in its speed."""
    if request.param != "on a CPU":
        monkeypatch.setattr(exponents, "_add_on_cpu", exponents._add_without_a_sync)
    torch.use_deterministic_algorithms("deterministic" in request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("route")
def test_whatever_the_bits_they_are_counted_as_float64_says(dtype: torch.dtype) -> None:
    @settings(max_examples=60)
    @given(any_bits)
    def check(bits: list[int]) -> None:
        tensor = from_bits(bits, dtype)
        assert tally(count(tensor)) == reference(numbers_of(tensor))

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("route")
def test_numbers_at_the_edges_of_the_dtype(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    edges = [0.0, -0.0, smallest, 3 * smallest, info.smallest_normal - smallest, info.smallest_normal, 1.0, info.max]
    tensor = torch.tensor([*edges, -math.inf, math.nan], dtype=dtype)
    assert tally(count(tensor)) == reference(numbers_of(tensor))


@pytest.mark.usefixtures("route")
def test_many_pieces_are_counted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(70, 30, generator=generator) * torch.exp2(torch.randint(-140, 120, (70, 30)).float())
    whole = tally(count(tensor))
    assert whole == reference(numbers_of(tensor))
    monkeypatch.setattr(exponents, "_PIECE_ON_CPU", 64)
    assert tally(count(tensor)) == whole
    assert tally(count(tensor.t())) == whole
    assert tally(count(tensor.repeat(1, 2)[:, ::2])) == reference(numbers_of(tensor.repeat(1, 2)[:, ::2]))
    assert tally(count(torch.tensor(3.0).expand(50, 9))) == reference([3.0] * 450)


@pytest.mark.parametrize(
    ("tensor", "numbers"),
    [
        (torch.empty(0), []),
        (torch.tensor(0.25), [0.25]),
        (torch.tensor([1 + 2j, 0 - 4j]), [1, 2, 0, -4]),
        (torch.tensor([1 + 2j]).conj(), [1, -2]),
        (torch.sparse_coo_tensor(torch.tensor([[0, 5]]), torch.tensor([1.0, 8.0]), (9,)), [1.0, 8.0]),
        (torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to_sparse_csr(), [1.0, 2.0]),
    ],
    ids=["empty", "scalar", "complex", "conjugated", "COO", "CSR"],
)
def test_what_is_counted_of_unusual_tensors(tensor: torch.Tensor, numbers: list[float]) -> None:
    assert tally(count(tensor)) == reference(numbers)


def test_integers_have_no_exponents() -> None:
    with pytest.raises(TypeError, match=r"tensor must be floating-point or complex, got torch\.int64"):
        count(torch.arange(3))


@settings(max_examples=100)
@given(smooth, st.floats(1e-3, 1e3))
def test_a_divisor_is_applied_before_counting(powers: list[float], divisor: float) -> None:
    tensor = torch.tensor([10.0**power for power in powers], dtype=torch.float32)
    by = torch.tensor(divisor)
    assert tally(count(tensor, by)) == reference(numbers_of(tensor / by))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_no_accelerator_is_waited_for(dtype: torch.dtype, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        with FakeTensorMode():  # whose tensors on a GPU have no values to read
            found = count(torch.empty(7, 9, dtype=dtype, device="cuda").t(), torch.ones((), device="cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (found.device.type, found.dtype) == ("cuda", torch.int64)


def test_the_tensor_stays_as_it_was() -> None:
    tensor = torch.randn(1000)
    before = tensor.clone()
    count(tensor)
    assert tensor.equal(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_are_summed_in_fp64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exponents, "_PIECE_ON_CPU", 8)
    tensor = (torch.arange(1.0, 22.0).reshape(3, 7) / 32).to(dtype).t()
    found = sum_of_squares(tensor)
    assert (found.dtype, found.shape) == (torch.float64, (1,))
    assert found.item() == pytest.approx(sum(number**2 for number in numbers_of(tensor)), rel=1e-15)


def test_squares_are_those_of_what_is_stored() -> None:
    assert sum_of_squares(torch.tensor([3 + 4j, 2j])).item() == 29.0
    assert sum_of_squares(torch.tensor([[0.0, 3.0], [0.0, 0.0]]).to_sparse()).item() == 9.0
    assert sum_of_squares(torch.tensor([1e30, 1.0])).item() == pytest.approx(1e60)
    assert sum_of_squares(torch.tensor([1.0, -math.inf])).item() == math.inf
    assert math.isnan(sum_of_squares(torch.tensor([math.nan, math.inf])).item())
    assert sum_of_squares(torch.empty(0)).item() == 0.0
