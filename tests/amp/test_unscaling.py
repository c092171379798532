"""`unscaling`: one optimizer's gradients of whatever kinds, multiplied, checked and measured."""

from __future__ import annotations

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
    assert total(1e-200, 0.0) == pytest.approx(1e-200)
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
