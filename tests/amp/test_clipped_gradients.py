"""How a scaler clips, where `test_clipping` with its reference does not look."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.amp.scalers import Fused, scaled, weight

from castwise.amp.grad_scaler import GradScaler


def test_a_disabled_scaler_raises_as_it_is_asked_to() -> None:
    param = weight(1.0)
    param.grad = torch.tensor([torch.nan])
    with pytest.raises(RuntimeError, match="non-finite"):
        GradScaler("cpu", enabled=False).clip_grad_norm_(torch.optim.SGD([param]), 1.0, error_if_nonfinite=True)


def test_after_clipping_by_an_unscaling_of_ones_own_unscale_may_be_called_once() -> None:
    class Own(GradScaler):
        def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
            return super()._unscale_grads_(*args, **kwargs)

    scaler, param = Own("cpu", init_scale=4.0), weight(1.0)
    scaler.scale(param.sum()).backward()
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.clip_grad_norm_(optimizer, 100.0)
    scaler.unscale_(optimizer)
    assert param.grad.item() == 1.0
    with pytest.raises(RuntimeError, match="has already been called"):
        scaler.unscale_(optimizer)


def test_a_norm_that_is_finite_of_gradients_that_are_not_once_they_are_unscaled_is_an_error_if_asked_for() -> None:
    scaler, param = GradScaler("cpu", init_scale=2.0**-10), weight(1.0)
    scaler.scale(param.sum())
    param.grad = torch.tensor([3e38])
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradients is ") as caught:
        scaler.clip_grad_norm_(Fused([param]), 1.0, error_if_nonfinite=True)
    assert str(caught.value).endswith(
        "so they cannot be clipped: skip the step with error_if_nonfinite=False, or find the cause with "
        "castwise.diagnose()"
    )
    assert param.grad.item() == torch.tensor(3e38).item()


@pytest.mark.parametrize(
    ("scale", "max_norms", "unscale", "steps"),
    [
        (2.0**100, [1e-5], False, True),
        (2.0**100, [1e-5, 1e-10], False, False),  # 1 / scale * 1e-5 * 1e-5 is no normal number
        (2.0**126, [0.75], False, True),
        (2.0**126, [1e-3], False, False),  # scale * norm / max_norm is infinite
        (2.0**126, [0.75], True, True),  # nothing is left to multiply with 1 / scale
    ],
)
def test_what_is_clipped_is_an_overflow_once_fp32_cannot_hold_the_factor(
    scale: float, max_norms: list[float], unscale: bool, steps: bool
) -> None:
    param = weight(1.0)
    scaler = GradScaler("cpu", init_scale=scale)
    scaled(param, scaler=scaler)
    optimizer = Fused([param])
    if unscale:
        scaler.unscale_(optimizer)
    for max_norm in max_norms:
        scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale() == scale) is steps


def test_the_largest_number_of_a_dtype_bounds_an_inf_as_torchs_function_does() -> None:
    largest = torch.finfo(torch.float32).max
    scaler = scaled(param := weight(1.0, 2.0))
    param.grad = torch.tensor([torch.inf, 4.0])
    scaler.clip_grad_value_(torch.optim.SGD([param]), largest)
    other = weight(1.0, 2.0)
    other.grad = torch.tensor([torch.inf, 1.0])
    torch.nn.utils.clip_grad_value_([other], largest)
    assert torch.equal(param.grad, other.grad)


def test_a_message_is_whole() -> None:
    scaler = scaled(param := weight(1.0))
    param.grad.fill_(torch.nan)
    text = (
        "the norm of order 2.0 of the gradients is nan, so they cannot be clipped: skip the step with "
        "error_if_nonfinite=False, or find the cause with castwise.diagnose()"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scaler.clip_grad_norm_(torch.optim.SGD([param]), 1.0, error_if_nonfinite=True)


def test_a_gradient_that_only_unscaling_makes_infinite_is_named_by_clipping() -> None:
    param, reported = weight(1.0), []
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**-10), Fused([param])
    scaler.register_step_hook(lambda facts: reported.append(len(facts.parameters)))
    scaler.scale(param.sum())
    param.grad = torch.tensor([3e38])
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert reported == [1]


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_that_come_to_be_one_between_clippings_are_clipped_once_by_each(times: int) -> None:
    first, second = weight(1.0), weight(1.0)
    scaler, optimizer = scaled(first, second), Fused([first, second])
    scaler.clip_grad_norm_(optimizer, 0.5**0.5)  # by a half
    second.grad = first.grad
    for _ in range(times):
        scaler.clip_grad_norm_(optimizer, 100.0)
    scaler.step(optimizer)
    assert [first.item(), second.item()] == pytest.approx([0.5, 0.5], rel=1e-5)


def test_an_inf_written_after_clipping_skips_a_fused_step_also_when_another_loss_is_scaled() -> None:
    param, other = weight(1.0), weight(1.0)
    scaler, optimizer = scaled(param), Fused([param])
    scaler.clip_grad_norm_(optimizer, 100.0)
    assert param.grad is not None
    param.grad.fill_(torch.inf)
    scaler.scale(other.sum()).backward()
    scaler.step(optimizer)
    assert param.item() == 1.0
    assert scaler.step_skipped


@pytest.mark.parametrize("has_later_loss", [False, True])
def test_gradients_that_changed_after_clipping_stay_scaled_without_a_step(has_later_loss: bool) -> None:
    param, other = weight(1.0), weight(1.0)
    scaler, optimizer = scaled(param), Fused([param])
    scaler.clip_grad_norm_(optimizer, 0.5)
    assert param.grad is not None
    param.grad.add_(0.0)
    if has_later_loss:
        scaler.scale(other.sum()).backward()
    scaler.update()
    assert param.grad.item() == 4.0


def test_a_tool_that_checks_gradients_again_does_not_use_up_unscale() -> None:
    param = weight(1.0)
    scaler, optimizer = scaled(param), torch.optim.SGD([{"params": [param, param]}], lr=1.0)
    scaler.clip_grad_norm_(optimizer, 100.0)
    scaler._check_inf_per_device(optimizer)
    scaler.unscale_(optimizer)
    assert param.grad is not None
    assert param.grad.item() == 1.0
