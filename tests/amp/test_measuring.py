"""`measuring`: whether gradients are finite, how long they are, and their multiplication, on every route."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from castwise.amp import measuring

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ONE = torch.ones(())
NORM_TYPES = [0.5, 1.0, 2.0, 3.0, 10.0, math.inf]


def on_accelerator(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The route of accelerators, run on a CPU."""
    subclassed = [tensor.as_subclass(Accelerated) for tensor in tensors]
    return measuring.norms(subclassed, norm_type)


class Accelerated(torch.Tensor):
    """Not a plain tensor, so the CPU's own route is not taken."""


def judged_on_accelerator(tensors: list[torch.Tensor], divisor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return measuring.are_finite([tensor.as_subclass(Accelerated) for tensor in tensors], divisor, dtype)


NORMS: dict[str, Callable[[list[torch.Tensor], float], torch.Tensor]] = {
    "CPU": measuring.norms,
    "accelerator": on_accelerator,
}
JUDGES = {"CPU": measuring.are_finite, "accelerator": judged_on_accelerator}


def reference(tensor: torch.Tensor, norm_type: float) -> float:
    values = tensor.double().flatten()
    peak = values.abs().max().item() if values.numel() else 0.0
    if norm_type == math.inf or peak == 0.0 or not math.isfinite(peak):
        return peak
    return peak * torch.linalg.vector_norm(values / peak, norm_type).item()


# -- finite or not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, torch.finfo(torch.float16).max, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_gradients_are_judged_like_small_ones(dtype: torch.dtype, value: float, transposed: bool) -> None:
    values = torch.full((300, 400), torch.finfo(torch.float16).max, dtype=dtype)
    values[299, 7] = value
    values = values.t() if transposed else values
    for judge in JUDGES.values():
        assert judge([values, torch.ones(3, dtype=dtype)], ONE, dtype).tolist() == [math.isfinite(value), True]


@pytest.mark.parametrize("route", JUDGES)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.integers(0, 39),
    st.sampled_from([0.0, 1.0, -math.inf, math.inf, math.nan, 3e38, -3e38, 6e4, 1e-45]),
    st.booleans(),
    st.integers(0, 9),
)
def test_one_bad_value_anywhere_is_found_and_huge_ones_are_not_blamed(
    route: str, dtype: torch.dtype, size: int, place: int, value: float, transposed: bool, seed: int
) -> None:
    values = (torch.randn(size, 3, generator=torch.Generator().manual_seed(seed)) * 1e4).to(dtype)
    values[place % size, seed % 3] = value
    values = values.t() if transposed else values
    flags = JUDGES[route]([torch.ones(2, dtype=dtype), values], ONE, dtype)
    assert flags.tolist() == [True, bool(values.isfinite().all())]


def test_opposite_infinities_and_sums_that_overflow_are_told_apart() -> None:
    for judge in JUDGES.values():
        flags = judge([torch.full((5000,), 3e38), torch.tensor([math.inf, -math.inf])], ONE, torch.float32)
        assert flags.tolist() == [True, False]


@pytest.mark.parametrize("route", JUDGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [2.0**-20, 0.5, 1.0, 2.0**16, math.inf, math.nan, 0.0])
@given(value=st.sampled_from([0.0, 1.0, 6e4, 1e30, 3e38, math.inf, math.nan]))
def test_a_judgement_agrees_with_the_quotients_of_a_fused_kernel(
    route: str, dtype: torch.dtype, divisor: float, value: float
) -> None:
    values = torch.tensor([[1.0, -value]]).to(dtype)
    before = values.clone()
    compute = torch.promote_types(dtype, torch.float32)
    (flag,) = JUDGES[route]([values], torch.tensor(divisor), compute)
    quotients = values.to(compute) / torch.tensor(divisor)
    # A step on inf/inf or 0/0 is refused even where the kernel might not meet it.
    assert bool(flag) == bool(quotients.isfinite().all() and values.isfinite().all())
    assert torch.equal(values.nan_to_num(), before.nan_to_num())


class TestProbe:
    def test_it_proves_what_is_so(self) -> None:
        grads = [torch.ones(3), torch.ones(2, 2), torch.ones(3), torch.ones(5000), torch.tensor(2.0)]
        probe = measuring.Probe()
        for _ in range(2):
            assert probe.proves_finite(grads, ONE, torch.float32)
        assert probe.proves_finite([], ONE, torch.float32)

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("index", range(4))
    def test_it_proves_nothing_false(self, bad: float, index: int) -> None:
        grads = [torch.ones(3), torch.ones(3), torch.ones(5000), torch.ones(2, 2)]
        probe = measuring.Probe()
        assert probe.proves_finite(grads, ONE, torch.float32)
        grads[index].view(-1)[-1] = bad
        for _ in range(2):
            assert not probe.proves_finite(grads, ONE, torch.float32)
        grads[index].view(-1)[-1] = 1.0
        assert probe.proves_finite(grads, ONE, torch.float32)

    @pytest.mark.parametrize(
        "other",
        [
            torch.ones(4),
            torch.ones(3).to_sparse(),
            torch.ones(3, device="meta"),
            torch.ones(3, dtype=torch.complex64),
            torch.ones(3).as_subclass(Accelerated),
            torch.ones(5000),
        ],
        ids=["shape", "sparse", "device", "complex", "subclass", "large"],
    )
    @pytest.mark.parametrize("single", [False, True])
    def test_a_gradient_of_another_kind_than_last_time_proves_nothing_false(
        self, other: torch.Tensor, single: bool
    ) -> None:
        probe = measuring.Probe()
        grads = [torch.ones(3), torch.full((3,), math.inf)] if not single else [torch.ones(3)]
        probe.proves_finite(grads, ONE, torch.float32)
        grads[0] = other
        proved = probe.proves_finite(grads, ONE, torch.float32)
        is_plain = type(other) is torch.Tensor and other.layout is torch.strided and other.dtype is torch.float32
        assert not proved or (single and is_plain and other.device.type == "cpu")

    @pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
    @pytest.mark.parametrize("index", range(4))
    def test_gradients_of_several_dtypes_and_sizes_are_looked_at_together(self, bad: float, index: int) -> None:
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
        grads = [torch.ones(size, dtype=dtype) for size, dtype in zip((5000, 3000, 4000, 3), dtypes, strict=True)]
        grads[index][1] = bad
        assert measuring.Probe().proves_finite(grads, ONE, torch.float32) is (bad == 1.0)

    def test_every_gradient_adds_to_the_bound(self) -> None:
        divisor = torch.tensor(300.0 * 2.0 / torch.finfo(torch.float32).max)  # what may be divided is below 300
        for shape in ((256, 257), (2**12,)):  # beyond lists of norms, and within
            few = torch.full(shape, 1e-4)
            large = torch.full(shape, 256.0 / math.sqrt(few.numel()))
            assert measuring.Probe().proves_finite([few, few + 0], divisor, torch.float32)
            assert not measuring.Probe().proves_finite([large, few], divisor, torch.float32)
            assert not measuring.Probe().proves_finite([few, large], divisor, torch.float32)

    def test_a_large_gradient_is_proved_finite_however_it_lies_in_memory(self) -> None:
        large = torch.ones(300, 301)
        for grad in (large, large.t(), torch.ones(600, 301)[::2]):
            assert measuring.Probe().proves_finite([grad], ONE, torch.float32)

    def test_half_of_the_largest_number_is_kept_free_for_what_norms_are_off(self) -> None:
        for value, proved in ((0.8e38, True), (0.9e38, False)):
            grads = [torch.tensor([value], dtype=torch.float64)]
            assert measuring.Probe().proves_finite(grads, ONE, torch.float32) is proved

    def test_zeros_are_proved_finite_at_any_scale_but_zero(self) -> None:
        grads = [torch.zeros(size) for size in range(1, 6)] + [torch.zeros(2**16 + 1)]
        assert measuring.Probe().proves_finite(grads, torch.tensor(2.0**-130), torch.float32)
        assert not measuring.Probe().proves_finite(grads, torch.tensor(0.0), torch.float32)

    def test_it_looks_again_at_a_single_gradient_as_well(self) -> None:
        probe = measuring.Probe()
        assert not probe.proves_finite([torch.ones(1, device="meta")], ONE, torch.float32)
        assert probe.proves_finite([torch.ones(1), torch.ones(1)], ONE, torch.float32)
        assert not probe.proves_finite([torch.ones(1), torch.ones(2)], ONE, torch.float32)
        assert probe.proves_finite([torch.ones(1)], ONE, torch.float32)

    def test_it_looks_again_after_it_failed(self) -> None:
        probe = measuring.Probe()
        assert probe.proves_finite([torch.ones(3), torch.ones(3)], ONE, torch.float32)
        others = [torch.ones(4), torch.ones(5)]
        assert [probe.proves_finite(others, ONE, torch.float32) for _ in range(2)] == [False, True]

    def test_quotients_count(self) -> None:
        probe, grads = measuring.Probe(), [torch.full((2,), 1e15)]
        assert probe.proves_finite(grads, ONE, torch.float32)
        assert not probe.proves_finite(grads, torch.tensor(1e-30), torch.float32)
        assert not probe.proves_finite(grads, torch.tensor(0.0), torch.float32)
        assert probe.proves_finite(grads, torch.tensor(1e-30), torch.float64)

    def test_a_divisor_elsewhere_is_not_read(self) -> None:
        assert not measuring.Probe().proves_finite([torch.ones(2)], torch.ones((), device="meta"), torch.float32)


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("route", NORMS)
def test_norms_are_those_of_float64(route: str, dtype: torch.dtype, norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=draw).mul(100).to(dtype)
        for shape in [(3,), (3,), (2, 5), (), (0,), (2, 0), (70, 90), (2**18 + 3,)]
    ]
    tensors += [
        torch.randn(80, 60, generator=draw).to(dtype).t(),
        torch.randn(80, 60, generator=draw).to(dtype)[:, ::2],
    ]
    found = NORMS[route](tensors, norm_type)
    assert found.dtype is torch.float64
    expected = torch.tensor([reference(tensor, norm_type) for tensor in tensors], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def test_a_norm_of_millions_of_numbers_is_right_where_torchs_is_not() -> None:
    values = torch.randn(2**24, generator=torch.Generator().manual_seed(0))
    exact = values.double().norm().item()
    assert abs(torch._foreach_norm([values])[0].item() / exact - 1) > 1e-5
    assert abs(measuring.norms([values], 2.0).item() / exact - 1) < 3e-7


@pytest.mark.parametrize("count", [1000, 5000, 100_001, 2**20 + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_errors_of_equal_numbers_do_not_add_up(norm_type: float, dtype: torch.dtype, count: int) -> None:
    tensors = [torch.full((count,), 1 / 3, dtype=dtype), torch.full((count,), 1 / 7, dtype=dtype)]
    expected = [reference(tensor, norm_type) for tensor in tensors]
    assert measuring.norms(tensors, norm_type).tolist() == pytest.approx(expected, rel=3e-7, abs=0.0)


def test_large_tensors_of_several_dtypes_and_shapes_have_norms_together() -> None:
    draw = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    tensors = [torch.randn(2**15 + size, generator=draw).to(dtype) for dtype in dtypes for size in (5, 6)]
    expected = [reference(tensor, 2.0) for tensor in tensors]
    assert measuring.norms(tensors, 2.0).tolist() == pytest.approx(expected, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-20, 1e19, 1e30, 3e38])
@pytest.mark.parametrize("count", [7, 5000])
def test_squares_that_fp32_cannot_hold_do_no_harm_on_a_cpu(norm_type: float, magnitude: float, count: int) -> None:
    tensors = [torch.full((count,), magnitude), torch.zeros(3)]
    found = measuring.norms(tensors, norm_type)
    expected = [reference(tensor, norm_type) for tensor in tensors]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=0.0)


def test_fp64_norms_beyond_fp64_are_its_largest_number_and_not_inf() -> None:
    values = torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert measuring.norms([values], 2.0).isfinite().all()
    assert measuring.fit(measuring.norms([values], 2.0), [values], ONE, torch.float64).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("route", NORMS)
def test_a_norm_is_finite_exactly_if_the_tensor_is(route: str, norm_type: float, bad: float) -> None:
    spoilt, large = torch.ones(5), torch.ones(6000)
    spoilt[3] = large[17] = bad
    found = NORMS[route]([torch.ones(5), spoilt, large], norm_type)
    assert found.isfinite().tolist() == [True, False, False]
    tensors = [torch.ones(5), spoilt, large]
    assert measuring.fit(measuring.norms(tensors, norm_type), tensors, ONE, torch.float32).tolist() == [
        True,
        False,
        False,
    ]


def test_a_norm_that_does_not_fit_does_not_condemn_a_finite_gradient_on_a_cpu() -> None:
    tensors = [torch.full((100,), 3e38)]
    assert measuring.fit(measuring.norms(tensors, 2.0), tensors, ONE, torch.float32).all()
    assert not measuring.fit(measuring.norms(tensors, 2.0), tensors, torch.tensor(0.5), torch.float32).any()


# -- multiplication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_value_that_unscaling_makes_infinite_is_found_which_the_native_op_misses(
    dtype: torch.dtype, accelerated: bool
) -> None:
    peak = torch.finfo(dtype).max
    factor = torch.tensor(4.0)
    native = torch.zeros(())
    values = torch.tensor([peak, 1.0], dtype=dtype)
    torch._amp_foreach_non_finite_check_and_unscale_([values.clone()], native, factor)
    assert native.item() == 0.0
    found_inf = torch.zeros(())
    measuring.unscale_([values.as_subclass(Accelerated) if accelerated else values], factor, found_inf)
    assert values[0].item() == math.inf
    assert found_inf.item() == 1.0


def test_fp16_is_multiplied_in_fp32_arithmetic() -> None:
    values = torch.tensor([6e4, 3.0]).half()
    expected = (values.float() * torch.tensor(1e-9)).half()
    measuring.unscale_([values], torch.tensor(1e-9), torch.zeros(()))
    assert torch.equal(values, expected)
    assert values[0] > 0, "1e-9 itself is zero in fp16"


def test_a_sum_that_no_fp64_holds_is_inf() -> None:
    assert measuring._sum([1e308, 1e308]) == math.inf
    assert measuring._sum([1.0, 2.0]) == 3.0


# -- where and what results are ---------------------------------------------------------------------------------------


def test_an_accelerator_tells_what_is_finite_and_a_cpu_does_not() -> None:
    assert measuring.unscale_([torch.ones(2)], ONE, torch.zeros(())) is None
    on_meta = torch.ones(2, device="meta")
    flags = measuring.unscale_([on_meta, on_meta], ONE.to("meta"), torch.zeros((), device="meta"))
    assert flags is not None
    assert (flags.device.type, flags.dtype, flags.shape) == ("meta", torch.bool, (2,))


@pytest.mark.parametrize(("factor", "looks"), [(0.5, 0), (1.0, 0), (1.5, 1)])
def test_products_are_looked_at_if_they_can_be_larger(
    factor: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    judge = measuring.are_finite
    monkeypatch.setattr(measuring, "are_finite", lambda *given: [asked.append(given), judge(*given)][1])
    measuring.unscale_([torch.ones(2)], torch.tensor(factor), torch.zeros(()))
    assert len(asked) == looks


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
def test_nothing_depends_on_what_tensors_are_made_by_default(norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=draw).half() for size in (3, 2**16)]
    expected = [reference(tensor, norm_type) for tensor in tensors]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found, flags = measuring.norms(tensors, norm_type), measuring.are_finite(tensors, ONE, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.device.type, found.dtype, flags.device.type, flags.dtype) == ("cpu", torch.float64, "cpu", torch.bool)
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=0.0)


def test_norms_of_subclasses_are_plain_and_whole() -> None:
    class Split(torch.Tensor):
        """As a DTensor: what it holds is a part."""

        def full_tensor(self) -> torch.Tensor:
            return torch.tensor([7.0])

    assert type(on_accelerator([torch.ones(1)], 2.0)) is torch.Tensor
    assert on_accelerator([torch.full((4,), 2.0)], 2.0).tolist() == [4.0]
    assert measuring.norms([torch.ones(1).as_subclass(Split)], 2.0).tolist() == [7.0]
    assert measuring.norms([torch.ones(1).as_subclass(Accelerated), torch.ones(0)], math.inf).tolist() == [1.0, 0.0]


def test_on_an_accelerator_a_norm_that_does_not_fit_condemns() -> None:
    tensors: list[torch.Tensor] = [torch.full((100,), 3e38).as_subclass(Accelerated)]
    assert not measuring.fit(measuring.norms(tensors, 2.0), tensors, ONE, torch.float32).any()


def test_the_widest_dtype_of_a_device() -> None:
    assert measuring.wide(torch.device("mps")) is torch.float32
    assert measuring.wide(torch.device("cpu")) is measuring.wide(torch.device("cuda")) is torch.float64


def test_squares_that_fp32_cannot_hold_are_noticed_however_many_there_are() -> None:
    tensors = [torch.full((2**22,), 1.234e-20)]
    assert measuring.norms(tensors, 2.0).tolist() == pytest.approx([reference(tensors[0], 2.0)], rel=3e-7, abs=0.0)
