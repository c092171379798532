"""`Ledger`: which gradients are unscaled already, whatever happens between two optimizers' steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from castwise.amp.gradients import Collector
from castwise.amp.ledger import Ledger

INV_SCALE = torch.tensor(0.25)


def shared(count: int = 1) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(2)
    return params, torch.optim.SGD(params, lr=0.1)


def factors(ledger: Ledger, optimizer: torch.optim.Optimizer) -> list[float]:
    """The factor of each of an optimizer's gradients."""
    grads = Collector()(optimizer)
    by_grad = {id(t): factor.item() for factor, part in ledger.factors(grads, INV_SCALE) for t in part.tensors}
    assert ledger.knows_any(grads) == any(factor == 1.0 for factor in by_grad.values())
    return [by_grad[id(tensor)] for tensor in grads.tensors]


def scaled_backward(ledger: Ledger, *params: torch.nn.Parameter) -> None:
    loss = torch.stack([param.sum() for param in params]).sum() * 4.0
    ledger.watch(loss)
    loss.backward()


def test_a_gradient_is_unscaled_once_until_forgotten() -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    assert factors(ledger, optimizer) == [0.25, 0.25]
    ledger.record(params[:1])
    assert factors(ledger, optimizer) == [1.0, 0.25]
    ledger.clear()
    assert not ledger
    assert factors(ledger, optimizer) == [0.25, 0.25]


def in_place(param: torch.nn.Parameter) -> None:
    param.grad.clamp_(-0.5, 0.5)


def out_of_place(param: torch.nn.Parameter) -> None:
    param.grad = param.grad.clamp(-0.5, 0.5)


def through_data(param: torch.nn.Parameter) -> None:
    param.grad.data.mul_(0.5)


@pytest.mark.parametrize("clip", [in_place, out_of_place, through_data])
@pytest.mark.parametrize("other_backward", ["none", "before", "after"])
def test_clipping_does_not_make_it_scaled_again(
    clip: Callable[[torch.nn.Parameter], None], other_backward: str
) -> None:
    ledger, (params, optimizer), (others, _) = Ledger(), shared(), shared()
    ledger.record(params)
    if other_backward == "before":
        scaled_backward(ledger, *others)
    clip(params[0])
    if other_backward == "after":
        scaled_backward(ledger, *others)
    assert factors(ledger, optimizer) == [1.0]


@pytest.mark.parametrize("zero", [None, False, True])
def test_a_backward_that_adds_to_it_does(zero: bool | None) -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    ledger.record(params)
    if zero is not None:
        optimizer.zero_grad(set_to_none=zero)
    scaled_backward(ledger, params[0])
    if zero is not None:
        params[1].grad = torch.ones(2)
    assert factors(ledger, optimizer) == [0.25, 1.0]


def test_a_backward_that_is_not_seen_lasts_until_the_next_look() -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    ledger.record(params)
    ledger.backward_starts()
    params[0].grad.add_(1.0)
    assert factors(ledger, optimizer) == [0.25, 1.0]
    params[1].grad.add_(1.0)
    assert factors(ledger, optimizer) == [0.25, 1.0]


def test_a_backward_whose_start_is_hidden_as_well_has_lasted_since_the_gradient_was_unscaled() -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    ledger.backward_is_hidden()
    ledger.record(params)
    in_place(params[0])
    assert factors(ledger, optimizer) == [1.0, 1.0]
    ledger.backward_is_hidden()
    params[1].grad.add_(1.0)
    assert factors(ledger, optimizer) == [0.25, 0.25]
    ledger.record(params)
    ledger.backward_is_hidden()
    params[1].grad.add_(1.0)
    assert factors(ledger, optimizer) == [1.0, 0.25]


def test_gradients_that_are_not_accumulated_leave_it_alone() -> None:
    ledger, (params, optimizer) = Ledger(), shared()
    ledger.record(params)
    loss = params[0].sum() * 4.0
    ledger.watch(loss)
    torch.autograd.grad(loss, params)
    assert factors(ledger, optimizer) == [1.0]


def test_one_tensor_of_two_parameters_is_one_gradient() -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    params[1].grad = params[0].grad
    ledger.record(params[:1])
    assert factors(ledger, torch.optim.SGD(params[1:], lr=0.1)) == [1.0]
    assert factors(ledger, optimizer) == [1.0]


def test_a_condition_decides_on_the_device() -> None:
    ledger, (params, optimizer) = Ledger(), shared(3)
    ledger.record(params[:1], unless=torch.tensor(0.0))
    ledger.record(params[1:2], unless=torch.tensor(1.0))
    grads = Collector()(optimizer)
    got = {id(t): factor.item() for factor, part in ledger.factors(grads, INV_SCALE) for t in part.tensors}
    assert [got[id(tensor)] for tensor in grads.tensors] == [1.0, 0.25, 0.25]


def test_parameters_without_gradients_are_none_of_its_business() -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    params[0].grad = None
    ledger.record(params)
    scaled_backward(ledger, params[0])
    assert factors(ledger, optimizer) == [0.25, 1.0]


def test_it_keeps_no_gradient_alive() -> None:
    ledger, (params, _) = Ledger(), shared()
    ledger.record(params)
    ledger.backward_starts()
    grad = weakref.ref(params[0].grad)
    params[0].grad = None
    assert grad() is None


def test_gradients_of_a_later_backward_are_told_until_they_are_recorded_again() -> None:
    ledger, (params, optimizer) = Ledger(), shared(3)
    assert ledger.forgotten(optimizer) == []
    ledger.record(params)
    assert ledger.forgotten(optimizer) == []
    scaled_backward(ledger, params[0], params[1])
    assert [id(param) for param in ledger.forgotten(optimizer)] == [id(params[0]), id(params[1])]
    assert ledger.forgotten(torch.optim.SGD(params[2:], lr=0.1)) == []
    params[1].grad = None
    assert [id(param) for param in ledger.forgotten(optimizer)] == [id(params[0])]
    ledger.record(params[2:])  # was not forgotten
    assert [id(param) for param in ledger.forgotten(optimizer)] == [id(params[0])]
    ledger.record(params[:1])
    assert ledger.forgotten(optimizer) == []


def test_a_backward_may_start_where_no_forward_has_come_yet() -> None:
    ledger, (params, optimizer) = Ledger(), shared()
    ledger.record(params)
    ledger.backward_may_start()
    in_place(params[0])
    assert factors(ledger, optimizer) == [1.0], "nothing was computed, so nothing has gone backward"
    ledger.backward_may_start()
    params[0].sum().backward()
    assert factors(ledger, optimizer) == [0.25]


def test_what_a_closure_changes_is_scaled_however_it_does() -> None:
    ledger, (params, optimizer) = Ledger(), shared(4)
    ledger.record(params)
    with ledger.closure():
        in_place(params[0])
        params[1].grad = torch.ones(2)
        params[2].sum().backward()
    assert factors(ledger, optimizer) == [0.25, 0.25, 0.25, 1.0]
    assert [id(param) for param in ledger.forgotten(optimizer)] == [id(param) for param in params[:3]]


def test_what_a_closure_records_itself_is_unscaled() -> None:
    ledger, (params, optimizer) = Ledger(), shared(3)
    ledger.record(params)
    with ledger.closure():
        for param in params[:2]:
            param.grad = torch.ones(2)
        ledger.record(params[:1])
        in_place(params[0])
    assert factors(ledger, optimizer) == [1.0, 0.25, 1.0]
    assert [id(param) for param in ledger.forgotten(optimizer)] == [id(params[1])]


def test_a_gradient_that_comes_to_a_parameter_without_one_is_scaled() -> None:
    ledger, (params, optimizer) = Ledger(), shared(2)
    params[0].grad = None
    ledger.record(params)
    ledger.backward_starts()
    params[0].grad = torch.ones(2)
    assert factors(ledger, optimizer) == [0.25, 1.0]


def test_a_condition_on_another_device_goes_to_the_factors() -> None:
    ledger, (params, optimizer) = Ledger(), shared()
    ledger.record(params, unless=torch.tensor(1.0))
    inv_scale = torch.tensor(0.25, device="meta")
    ((factor, _),) = ledger.factors(Collector()(optimizer), inv_scale)
    assert factor.device.type == "meta"
