"""Where torch's scaler silently goes wrong: each test shows that, and that ours is right."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch

from castwise.amp._checks import MIN_SCALE
from castwise.amp.grad_scaler import GradScaler

THEIRS = torch.amp.GradScaler
KINDS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def weight(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 0.0},
        {"init_scale": -1.0},
        {"init_scale": math.inf},
        {"backoff_factor": 0.0},
        {"backoff_factor": -1.0},
        {"growth_interval": 0},
        {"growth_interval": -5},
        {"growth_factor": math.inf},
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    THEIRS(**({"device": "cpu"} | arguments))
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name} must be .*got {arguments[name]!r}"):
        GradScaler(**({"device": "cpu"} | arguments))
    GradScaler(**({"device": "cpu", "enabled": False} | arguments))


@pytest.mark.parametrize(
    ("setter", "value"), [("set_growth_factor", 0.1), ("set_backoff_factor", 2.0), ("set_growth_interval", 0)]
)
def test_setters_check_as_the_constructor_does(setter: str, value: Any) -> None:
    getattr(THEIRS("cpu"), setter)(value)
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=f"^{setter[4:]} must be .*got {value}"):
        getattr(scaler, setter)(value)
    assert scaler.state_dict() == before


def test_a_disabled_scaler_answers_its_getters() -> None:
    for name in ("get_growth_factor", "get_backoff_factor", "get_growth_interval"):
        with pytest.raises(AttributeError):
            getattr(THEIRS("cpu", enabled=False), name)()
        assert getattr(GradScaler("cpu", enabled=False), name)() == getattr(GradScaler("cpu"), name)()


def test_an_integer_is_a_new_scale() -> None:
    for make, works in ((THEIRS, False), (GradScaler, True)):
        scaler = make("cpu")
        scaler.scale(torch.ones(()))
        if works:
            scaler.update(1024)
            assert scaler.get_scale() == 1024.0
        else:
            with pytest.raises(AttributeError):
                scaler.update(1024)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closures_gradients_are_unscaled(kind: str) -> None:
    for make, weight_after in ((THEIRS, -3.0), (GradScaler, 0.0)):
        scaler, param = make("cpu", init_scale=4.0), weight(1.0)
        optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
        scaler.scale(torch.ones(()))

        def closure(scaler: Any = scaler, param: Any = param, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = param.sum()
            scaler.scale(loss).backward()
            return loss.detach()

        if make is THEIRS:
            optimizer.zero_grad()
            scaler.scale(param.sum() * 0).backward()
            if kind == "fused":
                continue  # torch's unscales there, but looks for inf in the gradients of before the closure
        returned = scaler.step(optimizer, closure)
        assert returned.item() == 1.0
        assert param.item() == weight_after


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_nan_losses_do_not_end_all_training(kind: str) -> None:
    def train(scaler: Any) -> tuple[float, list[float]]:
        param = weight(1.0, 2.0)
        optimizer = torch.optim.SGD([param], lr=0.1, **KINDS[kind])
        for step in range(202):
            optimizer.zero_grad()
            scaler.scale(param.sum() * (math.nan if step < 200 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), param.tolist()

    scale, weights = train(THEIRS("cpu"))
    assert scale == 0.0
    assert not all(map(math.isfinite, weights))
    scale, weights = train(GradScaler("cpu"))
    assert scale == MIN_SCALE
    assert weights == pytest.approx([0.8, 1.8], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_gradient_that_unscaling_makes_infinite_skips_the_step(kind: str) -> None:
    def train(scaler: Any) -> list[float]:
        param = weight(1.0, 2.0)
        optimizer = torch.optim.SGD([param], lr=0.1, **KINDS[kind])
        scaler.scale(torch.ones(()))
        param.grad = torch.tensor([1e35, 1.0])
        scaler.step(optimizer)
        scaler.update()
        return param.tolist()

    assert train(THEIRS("cpu", init_scale=2.0**-20))[0] == -math.inf
    scaler = GradScaler("cpu", init_scale=2.0**-20)
    assert train(scaler) == [1.0, 2.0]
    assert scaler.get_scale() == 2.0**-21


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("order", ["step step", "unscale step unscale step", "unscale clip unscale step step"])
def test_a_parameter_of_two_optimizers_is_unscaled_once(first: str, second: str, order: str) -> None:
    def train(scaler: Any) -> list[float]:
        shared, a, b = weight(1.0), weight(1.0), weight(1.0)
        one = torch.optim.SGD([a, shared], lr=1.0, **KINDS[first])
        two = torch.optim.SGD([shared, b], lr=1.0, **KINDS[second])
        scaler.scale((a + shared + b).sum()).backward()
        waiting = [one, two]
        unscaled = [one, two]
        for action in order.split():
            if action == "step":
                scaler.step(waiting.pop(0))
            elif action == "unscale":
                scaler.unscale_(unscaled.pop(0))
            else:
                shared.grad.mul_(0.5)
        scaler.update()
        return [a.item(), shared.item(), b.item()]

    half = 0.5 if "clip" in order else 1.0
    expected = [0.0, 1.0 - 2 * half, 0.0]
    assert train(THEIRS("cpu", init_scale=4.0)) != expected
    assert train(GradScaler("cpu", init_scale=4.0)) == expected


def test_a_shared_gradient_is_unscaled_by_the_second_when_the_first_fused_one_skipped() -> None:
    scaler, shared, a = GradScaler("cpu", init_scale=4.0), weight(1.0), weight(1.0)
    one = torch.optim.SGD([a, shared], lr=1.0, fused=True)
    two = torch.optim.SGD([shared], lr=1.0)
    scaler.scale((a * math.inf + shared).sum()).backward()
    scaler.step(one)
    scaler.step(two)
    assert (a.item(), shared.item()) == (1.0, 0.0)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_shared_parameter_with_a_second_scaled_loss_is_unscaled_again(set_to_none: bool) -> None:
    # A GAN whose generator and discriminator share a layer; torch is right here, and so must we be.
    for scaler in (THEIRS("cpu", init_scale=4.0), GradScaler("cpu", init_scale=4.0)):
        shared = weight(1.0)
        one, two = torch.optim.SGD([shared], lr=1.0), torch.optim.SGD([shared], lr=1.0)
        for _ in range(2):
            for optimizer in (one, two):
                optimizer.zero_grad(set_to_none)
                for _ in range(2):
                    scaler.scale(shared.sum()).backward()
                scaler.step(optimizer)
            scaler.update()
        assert shared.item() == 1.0 - 8.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retained", [False, True])
def test_a_loss_scaled_before_the_first_step_adds_scaled_gradients_after_it(kind: str, retained: bool) -> None:
    # Torch is right here as well.
    for scaler in (THEIRS("cpu", init_scale=1024.0), GradScaler("cpu", init_scale=1024.0)):
        shared = weight(1.0)
        one, two = (torch.optim.SGD([shared], lr=1.0, **KINDS[kind]) for _ in range(2))
        losses = scaler.scale([shared.sum(), 1 * shared.sum()])
        losses[0].backward(retain_graph=retained)
        scaler.step(one)
        two.zero_grad(set_to_none=False)
        losses[0 if retained else 1].backward()
        scaler.step(two)
        assert shared.item() == -1.0


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", ["for-loop", "foreach"])
def test_a_parameter_listed_twice_is_unscaled_once(kind: str) -> None:
    def grad(scaler: Any) -> float:
        param = weight(1.0)
        optimizer = torch.optim.SGD([param, param], lr=1.0, **KINDS[kind])
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        return param.grad.item()

    assert grad(THEIRS("cpu", init_scale=4.0)) == 0.25
    assert grad(GradScaler("cpu", init_scale=4.0)) == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscale", [False, True])
def test_an_optimizer_without_gradients_steps_and_counts_as_finite(kind: str, unscale: bool) -> None:
    def train(scaler: Any) -> int:
        frozen = weight(1.0)
        optimizer = torch.optim.SGD([frozen], lr=1.0, **KINDS[kind])
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        scaler.scale(torch.ones(()))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return len(steps)

    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        train(THEIRS("cpu"))
    scaler = GradScaler("cpu")
    assert train(scaler) == 1
    assert scaler._get_growth_tracker() == 1


def test_an_optimizer_of_no_parameters_left_is_fine() -> None:
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD([weight(1.0)], lr=1.0)
    optimizer.param_groups.clear()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


def test_the_inf_of_an_optimizer_that_only_the_scaler_holds_still_counts() -> None:
    def scale_after(scaler: Any) -> float:
        for bad in (True, False):
            param = weight(1.0)
            scaler.scale(param.sum() * (math.inf if bad else 1.0)).backward()
            scaler.step(torch.optim.SGD([param], lr=1.0))
            gc.collect()
        scaler.update()
        scale: float = scaler.get_scale()
        return scale

    # torch tells optimizers apart by `id`, which the second one may inherit: it counts one of the two, or raises.
    assert scale_after(GradScaler("cpu", init_scale=4.0)) == 2.0


def test_the_scaler_holds_no_optimizer_after_the_update() -> None:
    scaler, param = GradScaler("cpu"), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_complex_gradients_can_be_scaled() -> None:
    for make, works in ((THEIRS, False), (GradScaler, True)):
        scaler = make("cpu", init_scale=4.0)
        param = torch.nn.Parameter(torch.tensor([1 + 1j]))
        scaler.scale(param.abs().sum()).backward()
        if works:
            scaler.unscale_(torch.optim.SGD([param], lr=1.0))
            assert param.grad.abs().item() == pytest.approx(1.0)
        else:
            with pytest.raises(NotImplementedError):
                scaler.unscale_(torch.optim.SGD([param], lr=1.0))


def test_a_one_element_tensor_is_a_new_scale_whatever_its_shape() -> None:
    theirs, ours = THEIRS("cpu"), GradScaler("cpu")
    for scaler in (theirs, ours):
        scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError):
        theirs.update(torch.tensor([2.0]))
    ours.update(torch.tensor([2.0]))
    assert ours.get_scale() == 2.0


def test_a_wrong_state_dict_is_neither_accepted_nor_partly_loaded() -> None:
    good = GradScaler("cpu").state_dict()
    nan = good | {"scale": math.nan}
    partial = {name: value for name, value in (good | {"scale": 8.0}).items() if name != "growth_interval"}

    theirs = THEIRS("cpu")
    theirs.load_state_dict(nan)
    assert math.isnan(theirs.get_scale())
    theirs = THEIRS("cpu")
    with pytest.raises(KeyError):
        theirs.load_state_dict(partial)
    assert theirs.get_scale() == 8.0

    ours = GradScaler("cpu")
    for wrong in (nan, partial):
        with pytest.raises(ValueError, match=r"scale|growth_interval"):
            ours.load_state_dict(wrong)
        assert ours.state_dict() == good


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_fused_sgd_that_skips_its_first_step_has_no_momentum_of_it(nesterov: bool) -> None:
    """Torch has: whatever was in the memory that it makes room in, and the next step adds that to the weights."""

    def trained(scaler: Any, steps: int) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        param = weight(1.0, 2.0)
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True, nesterov=nesterov)
        for step in range(steps):
            optimizer.zero_grad()
            scaler.scale((param * (math.inf if step == 0 and steps > 1 else 3.0)).sum()).backward()
            scaler.step(optimizer)
            if step == 0:
                has_momentum.append("momentum_buffer" in optimizer.state[param])
            scaler.update()
        return param, optimizer

    has_momentum: list[bool] = []
    trained(THEIRS("cpu"), 2)
    skipped, of_skipped = trained(GradScaler("cpu"), 2)
    assert has_momentum == [True, False]
    alone, of_alone = trained(GradScaler("cpu"), 1)
    assert torch.equal(skipped, alone)
    assert torch.equal(of_skipped.state[skipped]["momentum_buffer"], of_alone.state[alone]["momentum_buffer"])


def test_momentum_that_was_there_outlives_a_skipped_step() -> None:
    param = weight(1.0, 2.0)
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
    scaler = GradScaler("cpu")
    for factor in (3.0, math.inf):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[param]["momentum_buffer"].tolist() == [3.0, 3.0]
