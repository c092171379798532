"""`measure`: whether gradients are finite, how long they are, unscaling and clipping, on every route."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from castwise.amp import _gradients as gradients
from castwise.amp import _measure as measure
from castwise.amp._gradients import Group

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ONE = torch.ones(())


class OnAccelerator(torch.Tensor):
    """Not a plain tensor, so the route of accelerators and DTensors is taken."""


def groups_of(*tensors: torch.Tensor, on_accelerator: bool = False) -> list[Group]:
    params = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor
    groups = gradients.collect(torch.optim.SGD(params, lr=1.0), allow_fp16=True).groups
    if not on_accelerator:
        return groups
    return [group._replace(tensors=[tensor.as_subclass(OnAccelerator) for tensor in group.tensors]) for group in groups]


def is_found(found: measure.FoundInfs) -> bool:
    (flag,) = found.values()
    assert (flag.dtype, flag.device.type) == (torch.float32, "cpu")
    return bool(flag.item())


# -- finite or not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_accelerator", [False, True])
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.integers(0, 39),
    st.sampled_from([0.0, 1.0, -math.inf, math.inf, math.nan, 3e38, -3e38, 6e4, 1e-45]),
    st.sampled_from([2.0**-20, 0.5, 1.0, 2.0**16]),
    st.booleans(),
    st.integers(0, 9),
)
def test_a_check_agrees_with_the_quotients_of_a_fused_kernel(
    on_accelerator: bool,
    dtype: torch.dtype,
    size: int,
    place: int,
    value: float,
    divisor: float,
    transposed: bool,
    seed: int,
) -> None:
    values = (torch.randn(size, 3, generator=torch.Generator().manual_seed(seed)) * 1e4).to(dtype)
    values[place % size, seed % 3] = value
    values = values.t() if transposed else values
    before = values.clone()
    groups = groups_of(torch.ones(2, dtype=dtype), values, on_accelerator=on_accelerator)
    found, _ = measure.check(groups, torch.tensor(divisor))
    compute = torch.promote_types(dtype, torch.float32)
    quotients = values.to(compute) / torch.tensor(divisor)
    assert is_found(found) == (not quotients.isfinite().all() or not values.isfinite().all())
    assert torch.equal(values.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_sums_that_overflow_and_opposite_infinities_are_distinguished(on_accelerator: bool) -> None:
    for tensor, expected in ((torch.full((5000,), 3e38), False), (torch.tensor([math.inf, -math.inf]), True)):
        found, _ = measure.check(groups_of(tensor, on_accelerator=on_accelerator), ONE)
        assert is_found(found) is expected


@pytest.mark.parametrize("divisor", [0.5, 1.0, 2.0**16])
@pytest.mark.parametrize("small", [0, 3, measure._SMALL])
@pytest.mark.parametrize("bad", range(3))
def test_an_inf_in_one_dtype_is_kept_if_the_next_is_finite(
    monkeypatch: pytest.MonkeyPatch, bad: int, small: int, divisor: float
) -> None:
    monkeypatch.setattr(measure, "_SMALL", small)
    tensors = [torch.ones(size, dtype=dtype) for size, dtype in zip((4, 2, 5), DTYPES[1:], strict=True)]
    tensors[bad][0] = math.inf
    found, _ = measure.check(groups_of(*tensors), torch.tensor(divisor))
    assert is_found(found)


def test_norms_of_an_accelerators_check_tell_which_parameters_are_bad() -> None:
    groups = groups_of(
        torch.ones(2), torch.tensor([math.inf]), torch.tensor([1e30]), torch.empty(0), on_accelerator=True
    )
    _, ((params, norms),) = measure.check(groups, torch.tensor(2.0**-40))
    assert [norm.isfinite().item() for norm in norms] == [True, False, False, True]
    assert [tuple(param.shape) for param in params] == [(2,), (1,), (1,), (0,)]


class OfARank:
    """As a DTensor: it has a part that is this rank's."""

    def __init__(self, part: torch.Tensor) -> None:
        self._part = part

    def to_local(self) -> torch.Tensor:
        return self._part


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_local_flags_take_every_kind_of_number_and_leave_out_what_is_none() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([math.nan]), (3,), check_invariants=True)
    whole = {
        "fp32": (torch.ones(2), True),
        "inf": (torch.tensor([1.0, math.inf]), False),
        "too large once it is divided": (torch.tensor([3e38]), False),
        "fp16": (torch.ones(2).half(), True),
        "complex": (torch.tensor([1 + 1j]).conj(), True),
        "nan in an imaginary part": (torch.tensor([complex(1.0, math.nan)]), False),
        "sparse": (sparse, False),
        "of a rank": (OfARank(torch.tensor([-math.inf])), False),
    }
    left_out = [torch.ones(2).int(), torch.ones(2, 2).to_sparse_csr()]
    params = [torch.nn.Parameter(torch.ones(1)) for _ in [*left_out, *whole]]
    tensors = [*left_out, *(tensor for tensor, _ in whole.values())]
    with torch.device("meta"):  # what a user has set is not where gradients are
        ((of_group, flags),) = measure.local_flags(params, tensors, torch.tensor(0.5, device="cpu"))  # type: ignore[arg-type]
    assert [id(param) for param in of_group] == [id(param) for param in params[len(left_out) :]]
    assert flags.tolist() == [flag for _, flag in whole.values()]


def test_several_found_infs_are_one_number_where_it_is_wanted() -> None:
    clear, found, flat = torch.zeros(()), torch.ones(()), torch.zeros(1)
    assert measure.combine([clear], clear) is clear
    assert measure.combine(iter([flat]), clear).shape == ()
    assert measure.combine([clear, found], clear).item() == 1.0
    assert measure.combine([found, flat], clear).item() == 1.0
    assert measure.combine([clear, clear], clear).item() == 0.0
    assert measure.combine([], clear).item() == 0.0
    assert measure.combine([clear], torch.zeros((), device="meta")).device.type == "meta"


# -- unscaling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [3.0, 1e-3, 2.0**16, 1.1754944e-38, 65537.0])
def test_the_reciprocal_is_rounded_once(scale: float) -> None:
    given_scale = torch.tensor(scale)
    assert torch.equal(measure.reciprocal(given_scale), given_scale.double().reciprocal().float())
    assert measure.reciprocal(torch.ones((), device="meta")).device.type == "meta"


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_gradients_are_multiplied_as_torch_does(on_accelerator: bool, dtype: torch.dtype, bad: float | None) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype)
    if bad is not None:
        values[7] = bad
    expected, theirs = values.clone(), torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([expected], theirs, torch.tensor(0.3))
    found: measure.FoundInfs = {}
    measure.multiply_(groups_of(values, on_accelerator=on_accelerator), torch.tensor(0.3), found)
    assert is_found(found) is (bad is not None) is bool(theirs.item())
    assert torch.equal(values.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_what_was_found_before_stands(on_accelerator: bool) -> None:
    found = {torch.device("cpu"): torch.ones(())}
    measure.multiply_(groups_of(torch.ones(2), on_accelerator=on_accelerator), ONE, found)
    measure.find_new_infs(groups_of(torch.ones(2), on_accelerator=on_accelerator), torch.tensor(2.0), found)
    assert is_found(found)


@pytest.mark.parametrize(("factor", "is_looked_at"), [(1.0, False), (1.5, True)])
def test_only_a_factor_above_one_makes_new_infs(factor: float, is_looked_at: bool) -> None:
    found = {torch.device("cpu"): torch.zeros(())}
    measure.find_new_infs(groups_of(torch.tensor([1.0, math.inf])), torch.tensor(factor), found)
    assert is_found(found) is is_looked_at


# -- norms ------------------------------------------------------------------------------------------------------------


def norm_of(groups: list[Group], norm_type: float, scale: float = 1.0, max_norm: float = 1.0) -> torch.Tensor:
    return measure.norm_of(groups, norm_type, torch.tensor(scale), max_norm)[0]


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_that_of_one_vector(norm_type: float, on_accelerator: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw) for shape in [(5,), (2, 3), (0,), (), (300, 40)]]
    tensors.append(torch.randn(7, generator=draw, dtype=torch.float64))
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    got = norm_of(groups_of(*tensors, on_accelerator=on_accelerator), norm_type)
    torch.testing.assert_close(got.double(), torch.linalg.vector_norm(flat, norm_type), rtol=1e-5, atol=0.0)
    assert got.shape == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_on_a_cpu_it_is_torchs_own(dtype: torch.dtype, norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw).to(dtype) for shape in [(5,), (2, 3), (300, 40)]]
    theirs = torch.nn.utils.get_total_norm(tensors, norm_type)
    torch.testing.assert_close(norm_of(groups_of(*tensors), norm_type).to(dtype), theirs, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("value", "scale"), [(1e25, 1.0), (3e38, 1.0), (1e-30, 2.0**-90), (1e-44, 2.0**-126)])
def test_squares_that_fp32_cannot_hold_are_added_up_in_fp64(value: float, scale: float) -> None:
    exact = torch.full((2, 50), value)
    torch.testing.assert_close(
        norm_of(groups_of(*exact), 2.0, scale), torch.linalg.vector_norm(exact.double()), rtol=1e-6, atol=0.0
    )


def test_small_numbers_that_cannot_matter_are_not_read_again() -> None:
    assert norm_of(groups_of(torch.full((2,), 1e-30)), 2.0, scale=4.0, max_norm=1.0).dtype is torch.float32


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_the_norm_is_finite_only_if_all_gradients_are(bad: float, norm_type: float, on_accelerator: bool) -> None:
    groups = groups_of(torch.ones(300), torch.tensor([1.0, bad]), on_accelerator=on_accelerator)
    assert not norm_of(groups, norm_type).isfinite()


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert norm_of([], 2.0).item() == 0.0


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_what_ranks_share_counts_once(norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, generator=draw).double(), torch.randn(3, generator=draw).double()]
    (group,) = groups_of(*tensors)
    with torch.device("meta"):  # what a user has set is not where shares are
        got = measure.norm_of([group._replace(shares=[0.25, 0.5])], norm_type, torch.ones((), device="cpu"), 1.0)[0]
    whole = torch.stack([torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors])
    powers = torch.ones(2) if norm_type == math.inf else torch.tensor([0.25, 0.5]).double() ** (1 / norm_type)
    torch.testing.assert_close(got, torch.linalg.vector_norm(whole * powers.double(), norm_type), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_count_by_their_magnitude(norm_type: float, dtype: torch.dtype) -> None:
    values = torch.randn(3, 2, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(values.to(torch.complex128).flatten(), norm_type)
    torch.testing.assert_close(
        norm_of(groups_of(values), norm_type).double(),
        expected,
        rtol=2e-7 if dtype is torch.complex64 else 1e-12,
        atol=0.0,
    )


def test_norms_are_on_the_device_of_the_scale() -> None:
    (group,) = groups_of(torch.ones(2))
    meta = group._replace(device=torch.device("meta"), tensors=[torch.ones(2, device="meta")], shares=[0.5])
    total, _ = measure.norm_of([meta], 2.0, torch.ones((), device="meta"), 1.0)
    assert (total.device.type, total.dtype) == ("meta", torch.float64)
