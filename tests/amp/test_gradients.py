"""`gradients`: which there are, whether they are finite, and their unscaling, each exactly once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from castwise.amp import gradients
from castwise.amp.gradients import Ledger, by_device, gradients_of

CPU = torch.device("cpu")


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROUTES: dict[str, Callable[[list[torch.Tensor], torch.Tensor], None]] = {
    "CPU": gradients._check_finite,
    "accelerator": gradients._check_peaks,
}


def optimizer_of(*grads: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.optim.Optimizer:
    params = []
    for grad in grads:
        like = torch.zeros(2) if grad is None else grad
        param = torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype))
        param.grad = grad
        params.append(param)
    return torch.optim.SGD(params, lr=0.1)


def test_every_gradient_is_listed_once_in_the_order_of_parameters() -> None:
    first, second = torch.ones(2), torch.ones(3)
    optimizer = optimizer_of(first, None, second)
    optimizer.param_groups.append(optimizer.param_groups[0])
    assert [id(grad) for grad in gradients_of(optimizer, allow_fp16=False)] == [id(first), id(second)]


def test_fp16_gradients_are_refused_by_name_or_by_place() -> None:
    module = torch.nn.Linear(2, 1).half()
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    by_name = torch.optim.SGD(module.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients.*weight, bias$"):
        gradients_of(by_name, allow_fp16=False)
    by_place = torch.optim.SGD(module.parameters(), lr=0.1)
    place = re.escape("param_groups[0]['params'][0] of shape (1, 2), param_groups[0]['params'][1] of shape (1,)")
    with pytest.raises(ValueError, match=place):
        gradients_of(by_place, allow_fp16=False)
    assert len(gradients_of(by_place, allow_fp16=True)) == 2


def test_what_is_not_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an optimizer with param_groups, got Linear"):
        gradients_of(torch.nn.Linear(1, 1), allow_fp16=False)  # type: ignore[arg-type]
    optimizer = optimizer_of(torch.ones(1))
    optimizer.param_groups[0]["params"].append(1.0)
    with pytest.raises(TypeError, match="an optimizer's parameters are tensors, got float"):
        gradients_of(optimizer, allow_fp16=False)


def test_an_overflow_of_fp16_duplicates_is_found_when_they_are_summed() -> None:
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([60000.0, 60000.0]).half(), (3,), check_invariants=True
    )
    optimizer = optimizer_of(grad)
    found_inf = torch.zeros(())
    (values,) = by_device(gradients_of(optimizer, allow_fp16=True))[CPU]
    gradients.check(values, torch.ones(()), found_inf)
    assert found_inf.item() == 1.0
    assert optimizer.param_groups[0]["params"][0].grad.is_coalesced()


def test_values_share_memory_with_their_gradients() -> None:
    grads = [
        torch.ones(2, 2).t(),
        torch.full((2,), 1 + 1j),
        torch.full((2,), 1 + 1j).conj(),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)),
        torch.ones(3, dtype=torch.float64),
        torch.empty(0),
    ]
    for lists in by_device(grads).values():
        for values in lists:
            gradients.unscale_(values, torch.tensor(0.5), torch.zeros(()))
    assert torch.equal(grads[0], torch.full((2, 2), 0.5))
    assert torch.equal(grads[1], torch.full((2,), 0.5 + 0.5j))
    assert torch.equal(grads[2].resolve_conj(), torch.full((2,), 0.5 - 0.5j))
    assert torch.equal(grads[3].to_dense(), torch.tensor([1.5, 0.0, 0.0]))
    assert torch.equal(grads[4], torch.full((3,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_empty_gradients_are_finite(dtype: torch.dtype) -> None:
    empty = torch.empty(2, 0, dtype=dtype)
    for others in ([], [torch.ones(2, dtype=dtype)], [torch.full((2,), 3e38, dtype=torch.float32).to(dtype)]):
        for route in ROUTES.values():
            found_inf = torch.zeros(())
            route([empty, *others], found_inf)
            assert bool(found_inf) == any(not other.isfinite().all() for other in others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1.0, torch.finfo(torch.float16).max, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_gradients_are_judged_like_small_ones(dtype: torch.dtype, value: float, transposed: bool) -> None:
    values = torch.full((300, 400), torch.finfo(torch.float16).max, dtype=dtype)
    values[299, 7] = value
    values = values.t() if transposed else values
    for route in ROUTES.values():
        found_inf = torch.zeros(())
        route([values], found_inf)
        assert bool(found_inf) == (not math.isfinite(value))


def test_an_expanded_gradient_is_made_writable_which_torch_refuses_to_do() -> None:
    grad = torch.tensor([4.0]).expand(3)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(()), torch.ones(()))
    (copy,) = gradients_of(optimizer_of(grad), allow_fp16=False)
    gradients.unscale_([copy], torch.tensor(0.5), torch.zeros(()))
    assert torch.equal(copy, torch.full((3,), 2.0))


@pytest.mark.parametrize("route", ROUTES)
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
    found_inf = torch.zeros(())
    ROUTES[route]([torch.ones(2, dtype=dtype), values], found_inf)
    assert bool(found_inf) == (not values.isfinite().all())


def test_opposite_infinities_and_sums_that_overflow_are_told_apart() -> None:
    for route in ROUTES.values():
        found_inf = torch.zeros(())
        route([torch.full((1000,), 3e38)], found_inf)
        assert found_inf.item() == 0.0
        route([torch.tensor([math.inf, -math.inf])], found_inf)
        assert found_inf.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divisor", [2.0**-20, 0.5, 1.0, 2.0**16, math.inf, math.nan, 0.0])
@given(value=st.sampled_from([0.0, 1.0, 6e4, 1e30, 3e38, math.inf, math.nan]))
def test_a_check_agrees_with_the_quotients_of_a_fused_kernel(dtype: torch.dtype, divisor: float, value: float) -> None:
    values = torch.tensor([[1.0, -value]]).to(dtype)
    before = values.clone()
    found_inf = torch.zeros(())
    gradients.check([values], torch.tensor(divisor), found_inf)
    compute = torch.promote_types(dtype, torch.float32)
    quotients = values.to(compute) / torch.tensor(divisor)
    # A step on inf/inf or 0/0 is refused even where the kernel might not meet it.
    assert bool(found_inf) == (not quotients.isfinite().all() or not values.isfinite().all())
    assert torch.equal(values.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_value_that_unscaling_makes_infinite_is_found_after_the_native_op_missed_it(dtype: torch.dtype) -> None:
    peak = torch.finfo(dtype).max
    inv_scale = torch.tensor(4.0)
    native = torch.zeros(())
    values = torch.tensor([peak, 1.0], dtype=dtype)
    torch._amp_foreach_non_finite_check_and_unscale_([values.clone()], native, inv_scale)
    assert native.item() == 0.0
    found_inf = torch.zeros(())
    gradients.unscale_([values], inv_scale, found_inf)
    assert values[0].item() == math.inf
    assert found_inf.item() == 1.0


class TestLedger:
    def test_a_gradient_is_unscaled_once_until_forgotten(self) -> None:
        ledger, grad, other = Ledger(), torch.ones(2), torch.ones(2)
        ledger.record([grad])
        assert [(c, [id(g) for g in part]) for c, part in ledger.split([grad, other])] == [
            (0.0, [id(grad)]),
            (None, [id(other)]),
        ]
        ledger.renew()
        ledger.clear()
        assert ledger.split([grad]) == [(None, [grad])]
        ledger.record([grad])
        grad.mul_(0.5)
        assert ledger.split([grad])[0][0] == 0.0, "no loss was scaled since it was forgotten"

    def test_clipping_does_not_make_it_scaled_again(self) -> None:
        ledger, grad = Ledger(), torch.ones(2)
        ledger.record([grad])
        grad.mul_(0.5)
        assert ledger.split([grad])[0][0] == 0.0
        ledger.renew()
        assert ledger.split([grad])[0][0] == 0.0

    def test_a_write_after_the_next_scale_does(self) -> None:
        ledger, grad = Ledger(), torch.ones(2)
        ledger.record([grad])
        ledger.renew()
        grad.add_(1.0)
        assert ledger.split([grad])[0][0] is None
        ledger.renew()
        assert ledger.split([grad])[0][0] is None

    def test_a_new_tensor_at_the_same_address_is_not_mistaken_for_the_old_one(self) -> None:
        ledger, grad = Ledger(), torch.ones(2)
        ledger.record([grad])
        ledger._entries[id(other := torch.ones(2))] = ledger._entries.pop(id(grad))
        assert ledger.split([other])[0][0] is None

    def test_it_keeps_no_gradient_alive(self) -> None:
        ledger = Ledger()
        ledger.record([torch.ones(2)])
        ledger.renew()
        assert not ledger
