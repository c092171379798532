"""`SharedParams`: which gradients of parameters that two optimizers own are unscaled already."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from castwise.amp._shared_params import SharedParams


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def backward(*params: nn.Parameter) -> None:
    torch.stack([param.sum() for param in params]).sum().backward()


def hooks_of(param: nn.Parameter) -> int:
    return len(param._post_accumulate_grad_hooks or ())


def test_in_the_first_iteration_any_parameter_may_turn_out_to_be_shared() -> None:
    shared, (a, b) = SharedParams(), weights(2)
    shared.add([a, b], [])
    assert shared.watches
    shared.note_unscaled([a, b])
    shared.add([b], [[a, b]])
    assert set(shared.unscaled) == {a, b}
    backward(b)
    assert set(shared.unscaled) == {a}, "a backward has added a scaled gradient"


def test_after_it_only_shared_ones_have_a_hook_and_users_of_one_optimizer_none() -> None:
    shared, (a, b, c) = SharedParams(), weights(3)
    shared.add([a, b], [])
    shared.begin_iteration()
    assert not shared.watches
    assert [hooks_of(param) for param in (a, b, c)] == [0, 0, 0]
    shared.add([b, c], [[a, b]])
    shared.begin_iteration()
    assert shared.watches
    assert [hooks_of(param) for param in (a, b, c)] == [0, 1, 0]
    shared.note_unscaled([a, b])
    assert set(shared.unscaled) == {b}
    backward(a, b, c)
    assert not shared.unscaled


def test_clipping_and_replacing_a_gradient_by_hand_does_not_make_it_scaled() -> None:
    shared, (a,) = SharedParams(), weights(1)
    shared.add([a], [])
    backward(a)
    shared.note_unscaled([a])
    assert a.grad is not None
    a.grad.mul_(0.5)
    a.grad = torch.ones(2)
    torch.autograd.grad(a.sum(), a)
    assert set(shared.unscaled) == {a}


def test_a_condition_goes_with_the_mark_until_the_update() -> None:
    shared, (a, b) = SharedParams(), weights(2)
    shared.add([a, b], [])
    found_inf = torch.ones(())
    shared.note_unscaled([a], unless=found_inf)
    shared.note_unscaled([b])
    assert shared.unscaled[a] is found_inf
    assert shared.unscaled[b] is None
    shared.begin_iteration()
    assert not shared.unscaled


def test_frozen_parameters_and_results_of_ops_are_left_alone() -> None:
    shared, frozen = SharedParams(), nn.Parameter(torch.ones(2), requires_grad=False)
    result = nn.Parameter(torch.ones(2)) * 2.0
    shared.add([frozen, result], [])
    shared.note_unscaled([frozen, result])
    assert not shared.unscaled


def test_it_keeps_no_parameter_alive_beyond_the_iteration() -> None:
    shared, (a,) = SharedParams(), weights(1)
    shared.add([a], [])
    shared.add([a], [[a]])
    shared.note_unscaled([a])
    shared.begin_iteration()
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None


def test_a_parameter_that_turns_out_to_be_shared_later_counts_as_scaled_as_in_torch() -> None:
    shared, (a, b) = SharedParams(), weights(2)
    shared.add([a, b], [])
    shared.begin_iteration()
    shared.mark([a, b])  # as a step with a closure does
    shared.add([b], [[a, b]])
    assert set(shared.unscaled) == {a}


def test_a_mark_holds_for_parameters_of_one_optimizer_as_well() -> None:
    shared, (a, b) = SharedParams(), weights(2)
    shared.mark([a, b])
    shared.forget([a])
    assert set(shared.unscaled) == {b}
    assert shared.watches
    shared.begin_iteration()
    assert not shared.unscaled
    assert not shared.watches
