"""`scaler.step(optimizer, closure)`: every evaluation is unscaled and checked, and all count or none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from castwise.amp import _closures as closures
from castwise.amp.grad_scaler import GradScaler

KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Problem:
    """A small regression, an optimizer for it, and closures with and without a scaler."""

    def __init__(self, scaler: GradScaler | None, optimizer: type[Any], **options: Any) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(16, 4, generator=draw), torch.randn(16, 1, generator=draw)
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in [(4, 1), (1,)]]
        self.optimizer = optimizer(self.params, **options)
        self.scaler = scaler
        self.evaluations = 0
        self.spoilt_evaluation = -1
        self.max_norm: float | None = None

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        weight, bias = self.params
        loss = (torch.tanh(self.x @ weight + bias) - self.y).pow(2).mean()
        if self.evaluations == self.spoilt_evaluation:
            loss = loss * torch.inf
        self.evaluations += 1
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.max_norm is not None:
            if self.scaler is None:
                torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
            else:
                self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        return loss.detach()

    def step(self) -> Any:
        if self.scaler is None:
            return self.optimizer.step(self.closure)
        returned = self.scaler.step(self.optimizer, self.closure)
        self.scaler.update()
        return returned

    def contents(self) -> Any:
        return copy.deepcopy(([param.tolist() for param in self.params], self.optimizer.state_dict()))


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("scale", [2.0**16, 8.0, 2.0**-10])
def test_lbfgs_goes_the_way_it_goes_without_a_scaler(line_search: str | None, scale: float) -> None:
    options = {"lr": 0.5, "max_iter": 6, "line_search_fn": line_search}
    plain = Problem(None, torch.optim.LBFGS, **options)
    scaled = Problem(GradScaler("cpu", init_scale=scale, growth_interval=2), torch.optim.LBFGS, **options)
    for _ in range(5):
        expected, got = plain.step(), scaled.step()
        assert got.item() == pytest.approx(expected.item(), rel=1e-6)
        for ours, theirs in zip(scaled.params, plain.params, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert scaled.evaluations == plain.evaluations > 20
    assert scaled.scaler is not None
    assert scaled.scaler.get_scale() == scale * 4.0


@pytest.mark.parametrize("spoilt", [0, 1, 4])
def test_one_bad_evaluation_undoes_the_whole_step(spoilt: int) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    problem = Problem(scaler, torch.optim.LBFGS, lr=0.5, max_iter=6)
    problem.step()
    before = problem.contents()
    problem.spoilt_evaluation = problem.evaluations + spoilt
    assert problem.step() is None
    assert str(problem.contents()) == str(before)
    assert scaler.get_scale() == 4.0
    problem.spoilt_evaluation = -1
    assert problem.step() is not None
    assert str(problem.contents()) != str(before)


def test_a_loss_that_is_not_finite_skips_though_its_gradients_are() -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(1))

    def closure() -> torch.Tensor:
        scaler.scale(param.sum()).backward()
        return torch.tensor(torch.inf)

    assert scaler.step(torch.optim.SGD([param], lr=1.0), closure) is None
    scaler.update()
    assert param.item() == 1.0
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer_takes_one(kind: str, max_norm: float | None, keyword: bool) -> None:
    plain = Problem(None, torch.optim.AdamW, **KINDS[kind])
    scaled = Problem(GradScaler("cpu"), torch.optim.AdamW, **KINDS[kind])
    assert scaled.scaler is not None
    for problem in (plain, scaled):
        problem.max_norm = max_norm
    for _ in range(3):
        plain.step()
        if keyword:
            scaled.scaler.step(scaled.optimizer, closure=scaled.closure)
            scaled.scaler.update()
        else:
            scaled.step()
    for ours, theirs in zip(scaled.params, plain.params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_before_the_closure_are_unscaled_once(kind: str) -> None:
    for call in ("nothing", "unscale_", "clip_grad_norm_"):
        scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
        scaler.scale(param.sum()).backward()
        if call == "unscale_":
            scaler.unscale_(optimizer)
        if call == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, 0.5)
        assert scaler.step(optimizer, lambda: 7.0) == 7.0
        assert param.item() == pytest.approx(0.5 if call == "clip_grad_norm_" else 0.0, abs=1e-6)
        scaler.update()


@pytest.mark.parametrize("kind", KINDS)
def test_the_closure_may_unscale_and_clip(kind: str) -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])

    def closure() -> float:
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        assert param.grad is not None
        assert param.grad.item() == 1.0
        scaler.clip_grad_norm_(optimizer, 0.5)
        return 1.0

    assert scaler.step(optimizer, closure) == 1.0
    assert param.item() == pytest.approx(0.5, abs=1e-6)


def test_an_error_in_the_closure_leaves_everything_as_it_was() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    problem = Problem(scaler, torch.optim.LBFGS, lr=0.5, max_iter=6)
    problem.step()
    before = problem.contents()

    def closure() -> torch.Tensor:
        if problem.evaluations == 10:
            raise KeyError("mine")
        return problem.closure()

    with pytest.raises(KeyError, match="mine"):
        scaler.step(problem.optimizer, closure)
    assert problem.evaluations == 10
    assert str(problem.contents()) == str(before)
    copy.deepcopy(scaler)  # would be refused in the middle of an iteration
    problem.evaluations = 0
    problem.step()


def test_a_settings_change_is_put_back() -> None:
    class Restless(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["lr"] *= 2
            closure()

    scaler, param = GradScaler("cpu"), torch.nn.Parameter(torch.ones(1))
    optimizer = Restless([param], lr=1.0)

    def closure() -> None:
        scaler.scale(param.sum() * torch.nan).backward()

    assert scaler.step(optimizer, closure) is None
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_that_a_closure_assigns_are_unscaled_in_every_evaluation(zero: bool) -> None:
    def trajectory(scaler: GradScaler) -> list[float]:
        param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.LBFGS([param], lr=0.1, max_iter=4)

        def closure() -> torch.Tensor:
            if zero:
                optimizer.zero_grad()
            loss = ((param - 3) ** 2).sum()
            (param.grad,) = torch.autograd.grad(scaler.scale(loss), [param])
            return loss.detach()

        for _ in range(2):
            scaler.step(optimizer, closure)
            scaler.update()
        return param.tolist()

    assert trajectory(GradScaler("cpu", init_scale=4.0)) == trajectory(GradScaler("cpu", enabled=False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
def test_a_step_after_an_error_in_a_closure_takes_gradients_for_what_they_are(kind: str, late: bool) -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
    scaler.scale(param.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 0.5)

    def closure() -> None:
        if late:
            optimizer.zero_grad()
            scaler.scale(param.sum()).backward()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scaler.step(optimizer, closure)
    scaler.step(optimizer)
    assert param.item() == pytest.approx(0.0 if late else 0.5, abs=1e-5)


def test_only_the_closure_is_replaced_among_the_arguments_of_a_step() -> None:
    def theirs() -> None: ...
    def ours() -> None: ...

    assert closures.with_closure((theirs, 1, 2), {"x": 3}, ours) == ((ours, 1, 2), {"x": 3})
    assert closures.with_closure((1,), {"closure": theirs, "x": 3}, ours) == ((1,), {"closure": ours, "x": 3})


# -- what an optimizer is given for its step -------------------------------------------------------------------------


def test_facts_are_on_an_optimizer_for_its_step_alone() -> None:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.grad_scale = "mine"
    with closures.temporary_attributes(optimizer, grad_scale="ours", found_inf="found"):  # type: ignore[arg-type]  # anything is a fact
        assert (optimizer.grad_scale, optimizer.found_inf) == ("ours", "found")
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    optimizer.grad_scale = "mine"
    error = KeyError("in the step")
    with (
        pytest.raises(KeyError, match="in the step") as caught,
        closures.temporary_attributes(optimizer, grad_scale=None, found_inf=None),
    ):
        raise error
    assert caught.value is error
    assert optimizer.grad_scale == "mine"
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_room_for_a_momentum_that_a_skipped_step_has_made_is_not_left_as_it_is(device: str, found: float) -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.SGD([third, first, second], momentum=0.9)
    optimizer.state[first]["momentum_buffer"] = torch.full((2,), 5.0)
    found_inf = torch.tensor(found)
    if device == "meta":  # not on the host, so it is not read; it is brought to where the momentum is
        found_inf = OnAnAccelerator(found_inf)
    with closures.no_momentum_of_a_skipped_step(optimizer, found_inf):
        optimizer.state[second]["momentum_buffer"] = torch.full((2,), torch.nan)
    assert optimizer.state[first]["momentum_buffer"].tolist() == [5.0, 5.0]
    assert "momentum_buffer" not in optimizer.state.get(third, {})
    made = optimizer.state.get(second, {}).get("momentum_buffer")
    if device == "cpu":  # where it is called for skipped steps alone
        assert made is None
    elif not found:
        assert made.isnan().all()
    else:
        assert made.tolist() == [0.0, 0.0]


class OnAnAccelerator(torch.Tensor):
    """A tensor of the host that says it is elsewhere, and cannot be read until it is brought back."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
        return torch.device("meta")

    def item(self) -> Any:
        raise AssertionError("the host waits for it")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert args == (torch.device("cpu"),)
        return self.as_subclass(torch.Tensor)
