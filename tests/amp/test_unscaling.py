"""`unscaling`: one optimizer's gradients of whatever kinds, multiplied, checked and measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from castwise.amp import unscaling
from castwise.amp.gradients import Collector, Gradients


def grads_of(*tensors: torch.Tensor) -> Gradients:
    params = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor
    return Collector()(torch.optim.SGD(params, lr=1.0))


def test_each_group_is_multiplied_by_its_factor_and_what_is_not_finite_is_found() -> None:
    grads = grads_of(torch.ones(2), torch.ones(3).double(), torch.ones(2))
    zero = torch.tensor(0.0)
    found, _ = unscaling.unscale_([(torch.tensor(0.5), grads.part([0, 1])), (torch.tensor(3.0), grads.part([2]))], zero)
    assert [tensor[0].item() for tensor in grads.tensors] == [0.5, 0.5, 3.0]
    assert {device.type: flag.item() for device, flag in found.items()} == {"cpu": 0.0}
    grads.tensors[1][0] = math.nan
    (flag,) = unscaling.unscale_([(torch.tensor(1.0), grads)], zero)[0].values()
    assert (flag.item(), zero.item()) == (1.0, 0.0)
    assert unscaling.unscale_([(torch.tensor(1.0), grads.part([]))], zero) == ({}, [])


def test_a_multiplication_does_not_look() -> None:
    grads = grads_of(torch.tensor([3e38, 1.0]), torch.ones(3).double())
    unscaling.multiply_([(torch.tensor(2.0), grads)])
    assert [tensor.tolist() for tensor in grads.tensors] == [[math.inf, 2.0], [2.0, 2.0, 2.0]]


def test_a_check_says_of_each_parameter_whether_its_quotient_is_finite_in_fp32() -> None:
    grads = grads_of(torch.ones(2), torch.tensor([math.inf]), torch.tensor([6e4]).half(), torch.tensor([1e30]))
    (single, half) = unscaling.check(grads, torch.tensor(2.0**-40))
    assert single.are_finite.tolist() == [True, False, False]
    assert [id(param) for param in single.params] == [id(grads.params[index]) for index in (0, 1, 3)]
    assert half.are_finite.tolist() == [True], "6e16 is no fp16 number, but the arithmetic is in fp32"
    assert [tensor[0].item() for tensor in grads.tensors[:3]] == [1.0, math.inf, 6e4]


@pytest.mark.parametrize(("in_fp32", "fits"), [(True, True), (False, False)])
def test_the_arithmetic_decides_what_fits(in_fp32: bool, fits: bool) -> None:
    _, facts = unscaling.measure([(torch.tensor(4.0), grads_of(torch.tensor([6e4]).half()))], 2.0, in_fp32=in_fp32)
    assert facts[0].are_finite.tolist() == [fits]


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 9.0, math.inf])
def test_the_norm_of_all_is_the_norm_of_their_norms(norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw).double() for shape in [(5,), (2, 3), (1,)]]
    grads, like = grads_of(*tensors), torch.tensor(1.0)
    factors = [(torch.tensor(0.5), grads.part([0])), (torch.tensor(3.0), grads.part([1, 2]))]
    measured, _ = unscaling.measure(factors, norm_type, in_fp32=True)
    flat = torch.cat([tensor.flatten() * factor for tensor, factor in zip(tensors, (0.5, 3.0, 3.0), strict=True)])
    expected = torch.linalg.vector_norm(flat, norm_type)
    torch.testing.assert_close(unscaling.total_norm(measured, norm_type, like), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 200.0, math.inf])
def test_large_small_and_missing_norms_add_up(norm_type: float) -> None:
    like = torch.tensor(1.0)

    def total(*norms: float) -> float:
        measured = [(torch.tensor(1.0), torch.tensor(norms, dtype=torch.float64))] if norms else []
        return unscaling.total_norm(measured, norm_type, like).item()

    assert total() == 0.0
    assert total(0.0, 0.0) == 0.0
    assert total(1e200, 0.0) == pytest.approx(1e200)
    assert total(1e-200, 0.0) == pytest.approx(1e-200, abs=0.0)
    assert total(math.inf, 1.0) == math.inf
    assert math.isnan(total(math.nan, 1.0))


def test_found_inf_is_one_number_a_device() -> None:
    facts = [unscaling.Facts([], torch.tensor([True, True])), unscaling.Facts([], torch.tensor([True]))]
    (flag,) = unscaling.found_infs(facts).values()
    assert (flag.item(), flag.dtype, tuple(flag.shape)) == (0.0, torch.float32, ())
    facts.insert(0, unscaling.Facts([], torch.tensor([False, True])))
    assert [flag.item() for flag in unscaling.found_infs(facts).values()] == [1.0]
    assert unscaling.found_infs([]) == {}
    (known,) = unscaling.all_finite([torch.ones(1)] * 3)
    assert known.are_finite.tolist() == [True, True, True]


def test_norms_are_on_the_device_of_the_scale_in_its_widest_dtype() -> None:
    like = torch.ones((), device="meta")
    total = unscaling.total_norm([(torch.ones((), device="meta"), torch.ones(2))], 2.0, like)
    assert (total.device, total.dtype) == (like.device, torch.float64)
    assert unscaling.total_norm([], 2.0, torch.tensor(1.0)).dtype is torch.float64


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_what_ranks_share_counts_once(norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, generator=draw).double(), torch.randn(3, generator=draw).double()]
    grads = dataclasses.replace(grads_of(*tensors), shares=[0.25, 0.5])
    with torch.device("meta"):  # what a user has set is not where shares are
        ((_, norms),), _ = unscaling.measure([(torch.tensor(1.0, device="cpu"), grads)], norm_type, in_fp32=False)
    whole = torch.stack([torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors])
    powers = torch.ones(2) if norm_type == math.inf else torch.tensor([0.25, 0.5]).double() ** (1 / norm_type)
    torch.testing.assert_close(norms, whole * powers.double(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_count_by_their_magnitude(norm_type: float, dtype: torch.dtype) -> None:
    values = torch.randn(3, 2, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(values.to(torch.complex128).flatten(), norm_type)
    ((_, norms),), _ = unscaling.measure([(torch.tensor(1.0), grads_of(values))], norm_type, in_fp32=False)
    assert norms.dtype is torch.float64
    torch.testing.assert_close(norms[0], expected, rtol=1e-7 if dtype is torch.complex64 else 1e-12, atol=0.0)


def test_complex_magnitudes_are_taken_in_fp64() -> None:
    values = torch.full((3,), 3e38 + 3e38j, dtype=torch.complex64)
    ((_, norms),), _ = unscaling.measure([(torch.tensor(1.0), grads_of(values))], 1.0, in_fp32=False)
    assert norms.item() == pytest.approx(3 * 3e38 * math.sqrt(2), rel=1e-6)


class OfARank:
    """As a DTensor: it has a part that is this rank's."""

    def __init__(self, part: torch.Tensor) -> None:
        self._part = part

    def to_local(self) -> torch.Tensor:
        return self._part


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_local_check_takes_every_kind_of_number_and_leaves_out_what_is_none() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([math.nan]), (3,), check_invariants=True)
    whole = {
        "fp32": (torch.ones(2), True),
        "inf": (torch.tensor([1.0, math.inf]), False),
        "fp16": (torch.ones(2).half(), True),
        "complex": (torch.tensor([1 + 1j]).conj(), True),
        "nan in an imaginary part": (torch.tensor([complex(1.0, math.nan)]), False),
        "sparse": (sparse, False),
        "of a rank": (OfARank(torch.tensor([-math.inf])), False),
    }
    left_out = [torch.ones(2).int(), torch.ones(2, 2).to_sparse_csr()]
    params = [torch.nn.Parameter(torch.ones(1)) for _ in [*left_out, *whole]]
    facts = unscaling.check_local(params, [*left_out, *(tensor for tensor, _ in whole.values())])  # type: ignore[list-item]
    found = {
        id(param): flag
        for of_group in facts
        for param, flag in zip(of_group.params, of_group.are_finite.tolist(), strict=True)
    }
    assert found == {id(params[place]): flag for place, (_, flag) in enumerate(whole.values(), start=len(left_out))}
    (of_meta,) = unscaling.check_local(params[:1], [torch.ones(2, device="meta")])
    assert of_meta.are_finite.device.type == "meta"


def test_several_found_infs_are_one_number_where_it_is_wanted() -> None:
    clear, found, flat = torch.zeros(()), torch.ones(()), torch.zeros(1)
    assert unscaling.combine([clear], clear) is clear
    assert unscaling.combine(iter([flat]), clear).shape == ()
    assert unscaling.combine([clear, found], clear).item() == 1.0
    assert unscaling.combine([found, flat], clear).item() == 1.0
    assert unscaling.combine([clear, clear], clear).item() == 0.0
    assert unscaling.combine([clear], torch.zeros((), device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("gradient", "dtype"),
    [
        (torch.ones(1), torch.float32),
        (torch.ones(1).half(), torch.float32),
        (torch.ones(1).double(), torch.float64),
        (torch.ones(1, dtype=torch.complex128), torch.float64),
        (None, torch.float32),
    ],
)
def test_a_norm_is_of_the_gradients_dtype(gradient: torch.Tensor | None, dtype: torch.dtype) -> None:
    grads = grads_of(*([] if gradient is None else [gradient]) or [torch.ones(1)])
    norm = torch.ones((), dtype=torch.float64)
    found = unscaling.like_gradients(norm, grads.part([]) if gradient is None else grads)
    assert (found.dtype, found.device.type) == (dtype, "cpu")


def test_a_norm_is_on_the_device_of_the_first_gradient() -> None:
    grads = grads_of(torch.ones(1, device="meta"))
    assert unscaling.like_gradients(torch.ones(()), grads).device.type == "meta"


def test_known_facts_are_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        (known,) = unscaling.all_finite([torch.ones(1)])
    assert (known.are_finite.device.type, known.are_finite.dtype) == ("cpu", torch.bool)


def test_a_local_check_asks_where_the_gradients_are() -> None:
    with torch.device("meta"):
        (facts,) = unscaling.check_local([torch.ones(1)], [torch.full((2,), math.nan, device="cpu")])
    assert facts.are_finite.tolist() == [False]


def test_shares_go_to_the_device_of_the_norms() -> None:
    grads = dataclasses.replace(grads_of(torch.ones(2, device="meta")), shares=[0.5])
    ((_, norms),), _ = unscaling.measure([(torch.ones((), device="meta"), grads)], 2.0, in_fp32=False)
    assert norms.device.type == "meta"
