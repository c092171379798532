"""Accelerate with castwise's scaler, autocast and clipping does what it does with torch's, and right where that errs.

Accelerate has no fp16 on a CPU: it computes in fp32 there. So `fp16` gives an accelerator what it has in fp16 on a GPU,
its flag and torch's scaler, with the CPU for a device; all else is Accelerate's own code.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from tests.distributed.ranks import run
from tests.integrations.regions import region_of_forward
from torch import nn

import castwise
from castwise.integrations.accelerate import prepare, report
from castwise.monitor import Run
from castwise.schedules import Dynamic, Guard, Static

STEPS = 6
BATCHES = 2 * STEPS
pytestmark = pytest.mark.filterwarnings("ignore:this CPU has no units for torch:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and refuses another precision until it is reset."""
    reset()
    yield
    reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def as_it_is(accelerator: Accelerator) -> Accelerator:
    return accelerator


def fp16(handler: GradScalerKwargs | None = None, **options: Any) -> Accelerator:
    handlers = [*options.pop("kwargs_handlers", []), *([handler] if handler else [])]
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=handlers, **options)
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **(handler.to_kwargs() if handler else {}))
    return accelerator


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = BATCHES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, 4, 6, generator=generator))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


class Training:
    """A loop as Accelerate's documentation has it; what can be seen of each step is in `seen`."""

    def __init__(self, accelerator: Accelerator, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> None:
        self.accelerator, model = accelerator, net()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(model, optimizer, scheduler)
        self.seen: list[Any] = []

    def run(self, rows: list[torch.Tensor], clip: Callable[[Training], object] | None = None) -> Training:
        for row in rows:
            with self.accelerator.accumulate(self.model):
                outputs = self.model(row)
                loss = outputs.square().mean()
                self.accelerator.backward(loss)
                norm = clip(self) if clip is not None and self.accelerator.sync_gradients else None
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            scaler = self.accelerator.scaler
            self.seen.append(
                (
                    loss.item(),
                    outputs.dtype,
                    self.optimizer.step_was_skipped,
                    self.scheduler.get_last_lr(),
                    norm,
                    None if scaler is None else scaler.get_scale(),
                )
            )
        return self

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def are_equal(some: Any, others: Any) -> bool:
    """To the last bit; NaN is NaN."""
    return len(some) == len(others) and all(
        torch.equal(torch.nan_to_num(a, 12345.0), torch.nan_to_num(b, 12345.0))
        for a, b in zip(some, others, strict=True)
    )


def both(make: Callable[[], Accelerator], **settings: Any) -> Iterator[tuple[Callable[..., Accelerator], Accelerator]]:
    """Accelerate's own accelerator, then one of castwise's."""
    for change in (as_it_is, lambda accelerator: prepare(accelerator, **settings)):
        reset()
        yield change, change(make())


# -- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make_optimizer", "accumulated"), [(sgd, 1), (fused, 2)])
def test_bf16_is_what_it_is_without(make_optimizer: Callable[[Any], torch.optim.Optimizer], accumulated: int) -> None:
    def clip(training: Training) -> object:
        return training.accelerator.clip_grad_norm_(training.model.parameters(), 0.5)

    def make() -> Accelerator:
        return Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=accumulated)

    theirs, ours = (Training(accelerator, make_optimizer).run(batches(), clip) for _, accelerator in both(make))
    assert ours.accelerator.scaler is None
    assert ours.seen == theirs.seen
    assert are_equal(ours.weights(), theirs.weights())
    reset()
    in_fp32 = Training(Accelerator(cpu=True, gradient_accumulation_steps=accumulated), make_optimizer).run(
        batches(), clip
    )
    assert not are_equal(ours.weights(), in_fp32.weights())


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("make_optimizer", [sgd, fused])
def test_fp16_is_what_it_is_without(make_optimizer: Callable[[Any], torch.optim.Optimizer], accumulated: int) -> None:
    handler = GradScalerKwargs(init_scale=2.0**11, growth_factor=4.0, growth_interval=3)

    def make() -> Accelerator:
        return fp16(handler, gradient_accumulation_steps=accumulated)

    theirs, ours = (Training(accelerator, make_optimizer).run(batches()) for _, accelerator in both(make))
    assert isinstance(ours.accelerator.scaler, castwise.GradScaler)
    assert ours.seen == theirs.seen
    assert are_equal(ours.weights(), theirs.weights())
    assert ours.seen[-1][-1] > 2.0**11  # the scale has grown


def test_a_skipped_step_is_what_it_is_without() -> None:
    rows = batches()
    rows[2] = torch.full_like(rows[2], math.inf)
    theirs, ours = (Training(accelerator).run(rows) for _, accelerator in both(fp16))
    assert str(ours.seen) == str(theirs.seen)  # a loss is nan
    assert [row[2] for row in ours.seen[:4]] == [False, False, True, False]
    assert are_equal(ours.weights(), theirs.weights())


def test_clipping_by_value_is_what_it_is_without() -> None:
    def clip(training: Training) -> None:
        training.accelerator.clip_grad_value_(training.model.parameters(), 0.01)

    theirs, ours = (Training(accelerator).run(batches(), clip) for _, accelerator in both(fp16))
    assert are_equal(ours.weights(), theirs.weights())


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_clipping_by_norm_is_what_it_is_without_but_for_rounding(norm_type: float) -> None:
    def clip(training: Training) -> object:
        norm = training.accelerator.clip_grad_norm_(training.model.parameters(), 0.1, norm_type)
        return norm.item()

    theirs, ours = (Training(accelerator).run(batches(), clip) for _, accelerator in both(fp16))
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        assert mine[4] == pytest.approx(other[4], rel=1e-3)
        assert mine[4] > 0.1  # it was clipped
    for a, b in zip(ours.weights(), theirs.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# -- clipping in one read ---------------------------------------------------------------------------------------


def backward(
    accelerator: Accelerator, make: Callable[[Any], torch.optim.Optimizer]
) -> tuple[Any, Any, list[torch.Tensor]]:
    """A model and an optimizer after a backward, and the gradients in fp32, unscaled."""
    model = net()
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    accelerator.backward(model(batches()[0]).square().mean())
    scale = accelerator.scaler.get_scale()
    return model, optimizer, [param.grad.double() / scale for param in model.parameters()]


def test_clipping_leaves_the_multiplication_to_a_fused_optimizer() -> None:
    accelerator = prepare(fp16())
    model, optimizer, gradients = backward(accelerator, fused)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.125)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad.double(), gradient * 2.0**16, rtol=1e-6, atol=0.0)
    optimizer.step()
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad.double(), gradient * 0.125 / expected, rtol=1e-5, atol=1e-9)


def test_parameters_may_be_given_in_any_order_and_without_those_that_have_no_gradient() -> None:
    accelerator = prepare(fp16())
    model = net()
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model, _ = accelerator.prepare(model, fused(model.parameters()))
    accelerator.backward(model(batches()[0]).square().mean())
    used = [param for param in model.parameters() if param.grad is not None]
    before = [param.grad.clone() for param in used]
    accelerator.clip_grad_norm_(reversed(used), 1e-3)
    assert are_equal([param.grad for param in used], before)  # to be multiplied in the optimizer's step


@pytest.mark.parametrize("by_value", [False, True])
def test_a_part_of_the_parameters_is_clipped_as_accelerate_does(by_value: bool) -> None:
    def clip(training: Training) -> object:
        if by_value:
            training.accelerator.clip_grad_value_(training.model[0].weight, 0.01)
            return None
        return training.accelerator.clip_grad_norm_(training.model[0].parameters(), 0.05).item()

    theirs, ours = (Training(accelerator).run(batches(), clip) for _, accelerator in both(fp16))
    assert ours.seen == theirs.seen
    assert are_equal(ours.weights(), theirs.weights())


# -- several optimizers -----------------------------------------------------------------------------------------


def two(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = net()
    return accelerator.prepare(model, sgd(model[0].parameters()), sgd(model[2].parameters()))


def step_two(accelerator: Accelerator, max_norm: float | None, steps: int = STEPS) -> list[torch.Tensor]:
    """One backward, and then the steps of two optimizers; in the third iteration the first one's is skipped."""
    model, first, second = two(accelerator)
    for number, row in enumerate(batches(steps)):
        accelerator.backward(model(row).square().mean())
        if number == 2:
            model[0].weight.grad[0, 0] = math.inf
        for optimizer, part in ((first, model[0]), (second, model[2])):
            if max_norm is not None:
                accelerator.clip_grad_norm_(part.parameters(), max_norm)
            optimizer.step()
        assert (first.step_was_skipped, second.step_was_skipped) == (number == 2, False)
        first.zero_grad()
        second.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def as_torch_documents(max_norm: float | None) -> tuple[list[torch.Tensor], float]:
    """The same with torch.amp alone: one update for both, after both."""
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters())]
    for number, row in enumerate(batches(STEPS)):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(row)
        scaler.scale(outputs.float().square().mean()).backward()
        if number == 2:
            model[0].weight.grad[0, 0] = math.inf
        for optimizer in optimizers:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_two_optimizers_are_scaled_by_one_scale_in_an_iteration(max_norm: float | None) -> None:
    expected, scale = as_torch_documents(max_norm)
    accelerator = prepare(fp16())
    assert are_equal(step_two(accelerator, max_norm), expected)
    assert accelerator.scaler.get_scale() == scale == 2.0**15
    reset()
    assert not are_equal(step_two(fp16(), max_norm), expected)  # Accelerate's own divides by another scale, or twice


def test_an_iteration_ends_with_the_step_of_the_last_optimizer_that_has_gradients() -> None:
    accelerator = prepare(fp16())
    model, first, second = two(accelerator)
    for optimizers in ([first, second], [second, first]):
        accelerator.backward(model(batches()[0]).square().mean())
        model[0].weight.grad[0, 0] = math.inf
        before = accelerator.scaler.get_scale()
        for index, optimizer in enumerate(optimizers):
            optimizer.step()
            assert accelerator.scaler.get_scale() == before / (2 if index else 1)
        first.zero_grad()
        second.zero_grad()


def test_what_waits_for_nothing_is_over_before_the_next_loss_and_in_a_checkpoint() -> None:
    accelerator = prepare(fp16())
    model, first, second = two(accelerator)
    scaler, row = accelerator.scaler, batches()[1]
    at_first = scaler.state_dict()
    for end in (
        scaler.state_dict,
        first.step,
        lambda: accelerator.backward(model(row).square().mean()),
        scaler.synchronize,
        lambda: pickle.dumps(scaler),
        lambda: second.step(lambda: accelerator.backward(model(row).square().mean())),
    ):
        scaler.load_state_dict(at_first)
        accelerator.backward(model(row).square().mean())
        model[0].weight.grad[0, 0] = math.inf
        first.step()
        assert scaler.get_scale() == 2.0**16  # the second one may come
        end()
        assert scaler.get_scale() == 2.0**15
        first.zero_grad()
        second.zero_grad()


def test_what_was_still_to_move_the_scale_does_not_move_one_that_is_set_or_loaded() -> None:
    accelerator = prepare(fp16())
    model, first, second = two(accelerator)
    scaler, row = accelerator.scaler, batches()[0]
    saved = {**scaler.state_dict(), "scale": 2.0**8}
    for end in (lambda: scaler.update(2.0**8), lambda: scaler.load_state_dict(saved)):
        accelerator.backward(model(row).square().mean())
        model[0].weight.grad[0, 0] = math.inf
        first.step()
        end()
        assert scaler.get_scale() == 2.0**8
        scaler.scale(torch.ones(()))
        assert scaler.get_scale() == 2.0**8
        first.zero_grad()
        second.zero_grad()


def test_an_optimizer_that_shares_a_parameter_is_waited_for() -> None:
    accelerator = prepare(fp16())
    model = net()
    model, first, second = accelerator.prepare(model, sgd(model.parameters()), sgd(model[2].parameters()))
    accelerator.backward(model(batches()[0]).square().mean())
    expected = model[2].weight.grad / 2.0**16
    first.step()
    second.step()
    assert torch.equal(model[2].weight.grad, expected)  # unscaled once


@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_one_optimizer_leaves_the_gradients_of_another_alone(by_value: bool) -> None:
    accelerator = prepare(fp16())
    model, _, _ = two(accelerator)
    accelerator.backward(model(batches()[0]).square().mean())
    expected = model[2].weight.grad.clone()
    if by_value:
        accelerator.clip_grad_value_(model[0].parameters(), 1e-3)
    else:
        accelerator.clip_grad_norm_(model[0].parameters(), 1e-3)
    assert model[0].weight.grad.abs().max() <= 1e-3
    assert torch.equal(model[2].weight.grad, expected)


def test_one_backward_and_one_step_after_the_other_is_what_it_is_without() -> None:
    """As in adversarial training: each optimizer has its own loss."""

    def train(accelerator: Accelerator) -> list[torch.Tensor]:
        model, first, second = two(accelerator)
        for row in batches():
            for optimizer, other in ((first, second), (second, first)):
                accelerator.backward(model(row).square().mean())
                other.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        return [param.detach() for param in model.parameters()]

    handler = GradScalerKwargs(init_scale=2.0**10, growth_interval=3)
    theirs, ours = (
        (train(accelerator), accelerator.scaler.get_scale()) for _, accelerator in both(lambda: fp16(handler))
    )
    assert are_equal(ours[0], theirs[0])
    assert ours[1] == theirs[1] > 2.0**12


def test_clipping_all_parameters_of_two_optimizers_is_done_once_for_both() -> None:
    accelerator = prepare(fp16())
    model, first, second = two(accelerator)
    accelerator.backward(model(batches()[0]).square().mean())
    gradients = [param.grad / 2.0**16 for param in model.parameters()]
    norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
    assert norm.item() == pytest.approx(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
    first.step()
    second.step()
    assert are_equal([param.grad for param in model.parameters()], gradients)


def test_an_optimizer_that_was_stepped_is_not_unscaled_again() -> None:
    accelerator = prepare(fp16())
    model, first, second = two(accelerator)
    accelerator.backward(model(batches()[0]).square().mean())
    gradients = [param.grad / 2.0**16 for param in model.parameters()]
    first.step()
    accelerator.unscale_gradients()
    assert are_equal([param.grad for param in model.parameters()], gradients)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        accelerator.unscale_gradients(first)
    second.step()
    assert are_equal([param.grad for param in model.parameters()], gradients)


# -- skipped steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "taken"), [(as_it_is, 3), (prepare, 2)], ids=["Accelerate", "castwise"])
def test_a_skip_by_a_fused_optimizer_holds_the_learning_rate(change: Callable[..., Accelerator], taken: int) -> None:
    rows = batches(3)
    rows[1] = torch.full_like(rows[1], math.inf)
    training = Training(change(fp16()), fused).run(rows)
    assert training.scheduler.get_last_lr() == [0.01 * 0.5**taken]
    assert [row[2] for row in training.seen] == [False, taken == 2, False]
    assert training.accelerator.optimizer_step_was_skipped is False


def test_a_closure_is_unscaled_and_checked_at_every_evaluation() -> None:
    accelerator, model = prepare(fp16()), net()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3))
    losses, rows = [], batches(1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(rows[0]).square().mean()
        accelerator.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
        assert not optimizer.step_was_skipped
    assert len(losses) > 3
    assert losses[-1] < 0.1 * losses[0]
    before, rows[0] = [param.detach().clone() for param in model.parameters()], torch.full((4, 6), math.nan)
    optimizer.step(closure)
    assert optimizer.step_was_skipped
    assert are_equal(list(model.parameters()), before)


def test_a_guard_skips_in_bf16_where_accelerate_has_no_scaler() -> None:
    rows = batches(3)
    rows[1] = torch.full_like(rows[1], math.nan)
    make = lambda: Accelerator(mixed_precision="bf16", cpu=True)  # noqa: E731
    theirs, ours = (Training(accelerator).run(rows) for _, accelerator in both(make, schedule=Guard()))
    assert not torch.isfinite(theirs.weights()[0]).any()
    reset()
    without = Training(make()).run([rows[0], rows[2]])
    assert are_equal(ours.weights(), without.weights())
    assert ours.accelerator.optimizer_step_was_skipped is False


# -- what Accelerate is given ------------------------------------------------------------------------------------


def test_the_numbers_of_its_scaler_are_kept() -> None:
    handler = GradScalerKwargs(init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    assert prepare(fp16(handler)).scaler.schedule == Dynamic(8.0, 3.0, 0.25, 7)
    reset()
    assert prepare(fp16()).scaler.schedule == Dynamic()


def test_a_scaler_that_is_off_stays_off() -> None:
    def clip(training: Training) -> object:
        return training.accelerator.clip_grad_norm_(training.model.parameters(), 0.5)

    make = lambda: fp16(GradScalerKwargs(enabled=False))  # noqa: E731
    theirs, ours = (Training(accelerator).run(batches(), clip) for _, accelerator in both(make))
    assert not ours.accelerator.scaler.is_enabled()
    assert ours.seen == theirs.seen
    assert are_equal(ours.weights(), theirs.weights())


def test_a_schedule_takes_the_place_of_the_numbers() -> None:
    accelerator = prepare(fp16(), schedule=Static(2.0**4))
    assert Training(accelerator).run(batches(2)).seen[-1][-1] == 2.0**4
    reset()
    with pytest.raises(
        ValueError,
        match=r"init_scale=8.0 cannot be combined with schedule=: use the arguments of Static\(\.\.\.\) instead",
    ):
        prepare(fp16(GradScalerKwargs(init_scale=8.0)), schedule=Static(2.0**4))


@pytest.mark.parametrize(("make", "dtype"), [(fp16, torch.float16), ("bf16", torch.bfloat16)], ids=["fp16", "bf16"])
def test_all_regions_are_castwises(make: Any, dtype: torch.dtype) -> None:
    accelerator = prepare(make() if callable(make) else Accelerator(mixed_precision=make, cpu=True))
    model = accelerator.prepare(net())
    for region in (region_of_forward(model), accelerator.autocast()):
        assert type(region) is castwise.autocast
        assert (region.device, region.fast_dtype) == ("cpu", dtype)
    with accelerator.autocast():
        assert torch.get_autocast_dtype("cpu") is dtype
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    assert model(torch.ones(1, 6)).dtype is torch.float32


def test_settings_of_its_autocast_are_kept() -> None:
    accelerator = prepare(fp16(kwargs_handlers=[AutocastKwargs(cache_enabled=False)]))
    model = accelerator.prepare(net())
    with accelerator.autocast():
        assert not torch.is_autocast_cache_enabled()
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    assert region_of_forward(model)._cache_enabled is False


def test_without_mixed_precision_nothing_is_changed() -> None:
    theirs, ours = (Training(accelerator).run(batches()) for _, accelerator in both(lambda: Accelerator(cpu=True)))
    assert ours.accelerator.scaler is None
    assert region_of_forward(ours.model) is None
    with ours.accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    ours.accelerator.unscale_gradients()
    assert ours.seen == theirs.seen
    assert are_equal(ours.weights(), theirs.weights())


def test_a_prepared_model_can_be_copied_and_unwrapped() -> None:
    accelerator = prepare(fp16())
    model = accelerator.prepare(net())
    twin = copy.deepcopy(model)
    twin[0].weight.data.zero_()
    assert region_of_forward(twin) is not None
    assert not torch.equal(twin(torch.ones(1, 6)), model(torch.ones(1, 6)))
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert region_of_forward(plain) is None
    assert torch.equal(plain(torch.ones(1, 6)), net()(torch.ones(1, 6)))


def test_other_accelerators_are_left_as_they_are() -> None:
    before = accelerate.accelerator.get_mixed_precision_context_manager
    prepare(fp16()).prepare(net())
    assert accelerate.accelerator.get_mixed_precision_context_manager is before
    other = fp16()
    model, optimizer = other.prepare(net(), sgd(net().parameters()))
    assert type(region_of_forward(model)) is torch.autocast
    assert type(optimizer) is accelerate.optimizer.AcceleratedOptimizer


# -- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", [as_it_is, prepare], ids=["Accelerate", "castwise"])
def test_a_resumed_run_continues_bit_for_bit(saves: Callable[..., Accelerator], tmp_path: Path) -> None:
    handler = GradScalerKwargs(init_scale=2.0**13, growth_interval=2)
    rows = batches()
    whole = Training(prepare(fp16(handler))).run(rows)
    reset()
    first = Training(saves(fp16(handler))).run(rows[:5])
    first.accelerator.save_state(str(tmp_path))
    reset()
    second = Training(prepare(fp16()))
    second.accelerator.load_state(str(tmp_path))
    second.run(rows[5:])
    assert second.seen == whole.seen[5:]
    assert are_equal(second.weights(), whole.weights())
    assert len({row[-1] for row in whole.seen}) > 2  # the scale has moved before and after


def test_a_schedule_of_castwises_is_saved_as_well(tmp_path: Path) -> None:
    schedule = Dynamic(2.0**16, hysteresis=3)
    rows = batches(4)
    rows[1] = torch.full_like(rows[1], math.inf)
    first = Training(prepare(fp16(), schedule=schedule)).run(rows[:2])
    first.accelerator.save_state(str(tmp_path))
    reset()
    second = Training(prepare(fp16(), schedule=schedule))
    second.accelerator.load_state(str(tmp_path))
    assert second.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()
    assert second.accelerator.scaler.state_dict()["steps_skipped"] == 1


def test_a_prepared_optimizer_can_be_pickled() -> None:
    training = Training(prepare(fp16()), fused).run(batches(1))
    optimizer = pickle.loads(pickle.dumps(training.optimizer))
    assert not optimizer.step_was_skipped
    assert optimizer.scaler.get_scale() == 2.0**16


# -- several ranks ----------------------------------------------------------------------------------------------


def test_ranks_agree_and_do_what_they_do_without(tmp_path: Path) -> None:
    """DDP, FSDP1 and FSDP2; in the second step one rank has numbers that are not finite."""
    ranks = run(Path(__file__).with_name("accelerate_worker.py"), 2, tmp_path / "store", "all", frameworks=True)
    for rank in ranks:
        for strategy in ("ddp", "fsdp", "fsdp2"):
            ours, theirs = rank[f"{strategy} ours"], rank[f"{strategy} theirs"]
            assert {**ours, "agrees": True} == theirs
            assert ours["skipped"] == [False, True, False]
            assert ours["agrees"] is (strategy != "ddp")  # where all ranks have the same gradients anyway
        for name in ("fsdp clipped", "fsdp unscaled"):
            ours, theirs = rank[f"{name} ours"], rank[f"{name} theirs"]
            assert list(map(float, ours["norms"])) == pytest.approx(list(map(float, theirs["norms"])), rel=1e-6)
            assert ours["weights"][0] == pytest.approx(theirs["weights"][0], rel=1e-4, abs=1e-6)
        assert rank["fsdp unscaled ours"] == rank["fsdp unscaled theirs"]
        for name in ("fsdp fused ours", "fsdp2 fused ours"):  # torch's scaler fails or does not know of the skip
            assert (rank[name]["skipped"], rank[name]["scale"]) == ([False, True, False], 2.0**15)
            assert rank[name]["norms"] == ranks[0][name]["norms"]
    assert [rank["fsdp ours"]["is sharded"] for rank in ranks] == [True, True]
    assert ranks[0]["fsdp ours"]["weights"] != ranks[1]["fsdp ours"]["weights"]  # each has its part
    assert ranks[0]["ddp ours"] == ranks[1]["ddp ours"]


# -- with the monitor -------------------------------------------------------------------------------------------


def test_a_monitor_sees_every_step() -> None:
    rows = batches(4)
    rows[2] = torch.full_like(rows[2], math.nan)
    records: list[dict[str, Any]] = []
    training = Training(prepare(fp16()))
    with castwise.Monitor(
        training.model, training.optimizer.optimizer, training.accelerator.scaler, sinks=[records.append]
    ):
        training.run(rows)
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["skipped"] for record in steps] == [False, False, True, False]
    assert [record["loss"] for record in steps[:2]] == [row[0] for row in training.seen[:2]]
    assert steps[2]["cause"] == castwise.Cause.NONFINITE_LOSS


# -- what is refused --------------------------------------------------------------------------------------------


def test_the_end_of_training_writes_the_report_and_says_what_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = batches(3)
    rows[1] = torch.full_like(rows[1], math.nan)
    training = Training(prepare(fp16()))
    accelerator = training.accelerator
    monitor = report(accelerator, tmp_path, every=2)
    monitor.step = 11
    training.run(rows)
    assert not (tmp_path / "report.html").exists()
    accelerator.end_training()
    record = Run.read(tmp_path)
    assert ([step.step for step in record.steps], record.ended) == ([11, 12, 13], True)
    assert "non-finite loss" in (tmp_path / "report.html").read_text()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "castwise: 3 steps; skipped: 1 non-finite loss"
    assert said[-1] == f"castwise: report: {tmp_path / 'report.html'}"
    accelerator.end_training()  # of Accelerate alone
    assert capsys.readouterr().err == ""


def test_a_report_needs_what_is_prepared(tmp_path: Path) -> None:
    accelerator = prepare(fp16())
    with pytest.raises(RuntimeError, match="has prepared 0 models and 0 optimizers: call report after"):
        report(accelerator, tmp_path)
    accelerator.prepare(net(), net(), sgd(net().parameters()))
    with pytest.raises(
        RuntimeError, match=r"has prepared 2 models and 1 optimizers.*create a castwise\.Monitor for each"
    ):
        report(accelerator, tmp_path)


def test_a_report_without_castwises_scaler_says_what_is_missing(tmp_path: Path) -> None:
    training = Training(fp16())
    with pytest.raises(TypeError, match=r"use castwise\.GradScaler"):
        report(training.accelerator, tmp_path)


def test_fp16_on_a_cpu_is_pointed_out() -> None:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    with pytest.warns(UserWarning, match="does not autocast to fp16 on a CPU: it computes in fp32"):
        prepare(accelerator)
    assert accelerator.scaler is None


def test_what_was_prepared_before_is_named() -> None:
    accelerator = fp16()
    accelerator.prepare(net(), sgd(net().parameters()))
    with pytest.raises(RuntimeError, match=r"has already prepared Sequential, SGD, .*: call castwise.integrations"):
        prepare(accelerator)


def test_an_accelerator_is_prepared_once() -> None:
    accelerator = prepare(fp16())
    with pytest.raises(RuntimeError, match="already uses castwise"):
        prepare(accelerator)


def test_what_is_no_accelerator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be an accelerate.Accelerator, got Sequential"):
        prepare(net())


def test_accelerate_takes_no_kwargs_handler_of_ours() -> None:
    """If this fails, there is a shorter way than `prepare`."""

    class OurScaler(GradScalerKwargs):
        pass

    with pytest.raises(KeyError):
        Accelerator(cpu=True, kwargs_handlers=[OurScaler()])


def test_mixed_precision_of_another_library_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(ValueError, match="mixed_precision='fp8' another library handles mixed precision"):
        prepare(accelerator)
