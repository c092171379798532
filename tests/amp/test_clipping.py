"""`GradScaler.clip_grad_norm_`, `clip_grad_value_` and `skip`: the reference gradients in every order of calls."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.amp import _measure as measure
from castwise.amp.grad_scaler import GradScaler, OptState

KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
GRADIENT = torch.tensor([3.0, -4.0, 12.0])


class World:
    """A scaler, an optimizer of some kind with a step of 1, and one parameter of zeros with a scaled gradient."""

    def __init__(self, kind: str, *, scale: float = 8.0, gradient: torch.Tensor = GRADIENT, **options: Any) -> None:
        self.scaler = GradScaler("cpu", init_scale=scale, **options)
        self.param = torch.nn.Parameter(torch.zeros_like(gradient))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0, **KINDS[kind])
        self.backward(gradient)

    def backward(self, gradient: torch.Tensor) -> None:
        self.scaler.scale((self.param * gradient).sum().float()).backward()

    def clip(self, max_norm: float, **options: Any) -> torch.Tensor:
        return self.scaler.clip_grad_norm_(self.optimizer, max_norm, **options)

    def unscale_(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> torch.Tensor:
        """Step and return the gradient that the optimizer saw."""
        before = self.param.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return before - self.param.detach()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)


def clipped(gradient: torch.Tensor, *max_norms: float, norm_type: float = 2.0) -> torch.Tensor:
    """The gradient after torch's own clipping, one after the other."""
    param = torch.nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient.clone()
    for max_norm in max_norms:
        torch.nn.utils.clip_grad_norm_([param], max_norm, norm_type)
    return param.grad


# -- every order of calls ---------------------------------------------------------------------------------------------

ORDERS: dict[str, tuple[list[str | float], list[float]]] = {
    "clip": ([6.5], [6.5]),
    "clip nothing": ([1e9], [1e9]),
    "only measure": ([math.inf], [math.inf]),
    "clip to nothing": ([0.0], [0.0]),
    "unscale, clip": (["unscale_", 6.5], [6.5]),
    "clip, unscale": ([6.5, "unscale_"], [6.5]),
    "clip twice": ([6.5, 1.0], [6.5, 1.0]),
    "clip, unscale, clip": ([6.5, "unscale_", 1.0], [6.5, 1.0]),
    "unscale, clip twice": (["unscale_", 6.5, 1.0], [6.5, 1.0]),
    "clip tighter and looser": ([1.0, 6.5], [1.0, 6.5]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("calls", "norms"), ORDERS.values(), ids=ORDERS)
def test_each_order_of_calls_gives_the_reference_gradient(
    calls: list[str | float], norms: list[float], kind: str
) -> None:
    world = World(kind)
    expected = clipped(GRADIENT, *norms)
    for call in calls:
        if call == "unscale_":
            world.unscale_()
        else:
            world.clip(float(call))
    close(world.step(), expected)
    assert world.param.grad is not None
    close(world.param.grad, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients_are_clipped_together(kind: str) -> None:
    world = World(kind)
    world.backward(torch.tensor([1.0, 1.0, 1.0]))
    close(world.clip(2.0), (GRADIENT + 1.0).norm())
    close(world.step(), clipped(GRADIENT + 1.0, 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_unscale_is_still_refused_the_second_time(kind: str) -> None:
    for calls in itertools.permutations(["clip", "unscale_", "unscale_"]):
        world = World(kind)
        refusals = []
        for call in calls:
            try:
                _ = world.unscale_() if call == "unscale_" else world.clip(1.0)
            except RuntimeError as refusal:
                refusals.append((call, str(refusal)[:38]))
        assert refusals == [("unscale_", "unscale_() has already been called on ")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_is_that_of_the_unscaled_gradients_at_every_call(kind: str) -> None:
    world = World(kind)
    assert world.clip(6.5).item() == 13.0
    close(world.clip(1.0), torch.tensor(6.5))
    world.unscale_()
    close(world.clip(math.inf), torch.tensor(1.0))


def test_what_a_gradient_holds_between_clipping_and_the_step() -> None:
    for kind in KINDS:
        world = World(kind)
        world.clip(6.5)
        stage = world.scaler._per_optimizer_states[id(world.optimizer)]["stage"]
        if kind == "fused":
            assert torch.equal(world.param.grad, GRADIENT * 8.0)
            assert stage is OptState.READY
        else:
            close(world.param.grad, clipped(GRADIENT, 6.5))
            assert stage is OptState.UNSCALED
        world.unscale_()
        close(world.param.grad, clipped(GRADIENT, 6.5))


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scale_of_the_users_takes_part(unscale: bool) -> None:
    world = World("fused")
    world.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    if unscale:
        world.unscale_()
    assert world.clip(6.5).item() == 13.0
    close(world.step(), clipped(GRADIENT, 6.5) / 2.0)


# -- gradients that are not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscale", [False, True])
def test_a_gradient_that_is_not_finite_skips_the_step_as_without_clipping(kind: str, bad: float, unscale: bool) -> None:
    gradient = torch.tensor([3.0, bad, 12.0])
    grads = []
    for clip in (False, True):
        world = World(kind, gradient=gradient)
        if unscale:
            world.unscale_()
        if clip:
            norm = world.clip(1.0)
            assert norm.isnan() if math.isnan(bad) else norm.item() == math.inf
        assert world.step().tolist() == [0.0, 0.0, 0.0]
        assert world.scaler.get_scale() == 4.0
        assert world.param.grad is not None
        grads.append(world.param.grad.tolist())
    assert str(grads[0]) == str(grads[1])
    assert grads[0][2] == (12.0 * 8.0 if kind == "fused" and not unscale else 12.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscale", [False, True])
def test_an_error_if_not_finite_comes_before_anything_is_changed(kind: str, unscale: bool) -> None:
    world = World(kind, gradient=torch.tensor([3.0, math.inf]))
    if unscale:
        world.unscale_()
    before = [3.0, math.inf] if unscale else [24.0, math.inf]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the norm of order 2.0 of the gradients is inf, so they cannot be"):
            world.clip(1.0, error_if_nonfinite=True)
    assert world.param.grad is not None
    assert world.param.grad.tolist() == before
    if not unscale:
        pickle.dumps(world.scaler)
    world.step()
    assert world.param.tolist() == [0.0, 0.0]
    finite = World(kind)
    finite.clip(6.5, error_if_nonfinite=True)
    close(finite.step(), clipped(GRADIENT, 6.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scale", "magnitude"), [(2.0**100, 1.0), (2.0**-100, 1e-3), (2.0**-60, 1e30), (1.0, 1e25)])
def test_squares_that_fp32_cannot_hold_neither_skip_a_good_step_nor_spoil_the_norm(
    kind: str, scale: float, magnitude: float
) -> None:
    gradient = GRADIENT * magnitude
    world = World(kind, scale=scale, gradient=gradient)
    max_norm = min(0.5, magnitude)
    close(world.clip(max_norm), gradient.double().norm().float())
    torch.testing.assert_close(world.step(), GRADIENT / GRADIENT.norm() * max_norm, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_unscaling_makes_infinite_skips_the_step(kind: str) -> None:
    for clip in (False, True):
        world = World(kind, scale=2.0**-20)
        world.param.grad = torch.tensor([1e35, 0.0, 0.0])
        if clip:
            world.clip(1.0)
        assert world.step().tolist() == [0.0, 0.0, 0.0]
        assert world.scaler.get_scale() == 2.0**-21


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_is_clipped_and_not_stepped_in_an_iteration_stays_clipped(kind: str) -> None:
    scaler, params = GradScaler("cpu", init_scale=8.0), [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([param], lr=1.0, **KINDS[kind]) for param in params)
    scaler.scale(sum(param.sum() for param in params) * 3.0).backward()
    scaler.clip_grad_norm_(first, 1.0)
    scaler.step(second)
    scaler.update()
    close(params[0].grad, torch.full((2,), 0.5**0.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("then", ["unscale_", "clip_grad_value_"])
def test_what_clipping_has_found_is_not_forgotten(kind: str, then: str) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, **KINDS[kind]), GradScaler("cpu", init_scale=2.0**100)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 2.0**127)
    scaler.clip_grad_norm_(optimizer, 2.0**-110)  # scale * norm / max_norm is beyond fp32
    getattr(scaler, then)(optimizer, *([1.0] if then == "clip_grad_value_" else []))
    scaler.step(optimizer)
    assert scaler.step_skipped
    scaler.update()
    assert scaler.get_scale() == 2.0**99


@pytest.mark.parametrize("kind", KINDS)
def test_what_unscaling_has_found_is_not_forgotten(kind: str) -> None:
    world = World(kind, gradient=torch.tensor([3.0, math.inf]))
    world.unscale_()
    world.param.grad.zero_()
    world.clip(1.0)
    world.step()
    assert world.scaler.get_scale() == 4.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_", "clip_grad_value_"])
def test_a_backward_that_adds_to_clipped_gradients_is_refused(kind: str, call: str) -> None:
    world = World(kind)
    world.clip(1.0)
    world.backward(torch.tensor([0.0, 1.0, 0.0]))
    before = world.param.grad.clone()
    arguments = (1.0,) if call.startswith("clip") else ()
    with pytest.raises(RuntimeError, match=f"^{call}.* after a backward has added to gradients that were already"):
        getattr(world.scaler, call)(world.optimizer, *arguments)
    assert torch.equal(world.param.grad, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip_again", [False, True])
@pytest.mark.parametrize("bad", [1.0, math.inf])
def test_a_batch_that_is_thrown_away_after_clipping_leaves_no_trace(kind: str, clip_again: bool, bad: float) -> None:
    for _ in range(20):  # the memory of the old gradient may come to be that of the new one
        world = World(kind, gradient=torch.tensor([3.0, bad, 0.0]))
        world.clip(1.0)
        world.optimizer.zero_grad()
        world.backward(torch.tensor([0.0, 6.0, 8.0]))
        if clip_again:
            close(world.clip(5.0), torch.tensor(10.0))
        factor = 0.5 if clip_again else 1.0
        close(world.step(), torch.tensor([0.0, 6.0, 8.0]) * factor)


def test_an_infinite_batch_after_a_clipped_one_is_skipped() -> None:
    for _ in range(50):
        world = World("fused")
        world.clip(1.0)
        world.optimizer.zero_grad()
        world.backward(torch.tensor([0.0, math.inf, 0.0]))
        assert world.step().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_batch_for_some_of_the_parameters(kind: str) -> None:
    scaler, params = GradScaler("cpu", 8.0), [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0, **KINDS[kind])
    scaler.scale(3.0 * params[0].sum() + 4.0 * params[1].sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    params[1].grad = None
    scaler.scale(2.0 * params[1].sum()).backward()
    scaler.step(optimizer)
    close(torch.cat([param.detach() for param in params]), torch.tensor([-0.6, -2.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_clipping_has_found_stands_when_gradients_are_repaired(kind: str) -> None:
    world = World(kind, gradient=torch.tensor([math.inf, 0.0, 0.0]))
    world.clip(1.0)
    world.param.grad = torch.tensor([8.0, 16.0, 0.0])
    assert world.step().tolist() == [0.0, 0.0, 0.0]
    assert world.scaler.get_scale() == 4.0


# -- gradients of every kind ------------------------------------------------------------------------------------------


def mixed() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3,), (2, 2), (0,), (), (5000,), (40, 30)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float32, torch.complex64]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float32).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 1.5, 2.0, 3.0, 7.0, math.inf, "inf"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_is_torchs(norm_type: float, fused: bool) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    params = [param for param in mixed() if not (fused and param.dtype.is_complex)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, fused=fused)
    for param in params:
        scaler.scale((param * param.detach().conj() * 3).real.sum().float()).backward()
    exact = [param.grad.to(torch.complex128 if param.is_complex() else torch.float64) / 1024.0 for param in params]
    flat = torch.cat([grad.flatten().abs() for grad in exact])
    got = scaler.clip_grad_norm_(optimizer, 1.5, norm_type)
    assert got.dtype is torch.float64
    expected = torch.linalg.vector_norm(flat, float(norm_type))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)  # torch's own norm of bf16 gradients is in bf16
    scaler.step(optimizer)
    for param, grad in zip(params, exact, strict=True):
        assert param.grad is not None
        wide = param.grad.to(grad.dtype)
        torch.testing.assert_close(
            wide, grad * 1.5 / (expected + 1e-6), rtol=1e-2 if param.dtype is torch.bfloat16 else 1e-5, atol=0.0
        )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_of_complex_gradients_is_that_of_torchs_own_function(norm_type: float) -> None:
    gradient = torch.complex(torch.linspace(-1.0, 2.0, 7), torch.linspace(3.0, -5.0, 7))
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    param.grad = gradient * 4.0
    close(scaler.clip_grad_norm_(optimizer, 1.0, norm_type), torch.nn.utils.get_total_norm([gradient], norm_type))
    close(param.grad, clipped(gradient, 1.0, norm_type=norm_type))
    param.grad = torch.full_like(gradient, complex(1e30, 1e30))
    scaler.update(4.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0, norm_type).isfinite()
    scaler.step(optimizer)
    assert param.detach().abs().max() > 0


def test_the_norm_of_a_sparse_gradient_is_that_of_its_sums() -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), param, sparse=True)
    scaler.scale((rows * torch.tensor([1.0, 2.0])).sum()).backward()
    dense = torch.tensor([[0.0, 0.0], [2.0, 4.0], [0.0, 0.0], [1.0, 2.0]])
    close(scaler.clip_grad_norm_(optimizer, 1.0), dense.norm())
    scaler.step(optimizer)
    close(-param.detach(), dense / (dense.norm() + 1e-6))


def test_nothing_to_clip_is_a_norm_of_zero_and_a_step_as_without_a_scaler() -> None:
    for fused in (False, True):
        scaler, param = GradScaler("cpu"), torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
        scaler.scale(torch.ones(()))
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        assert (norm.item(), norm.dtype, tuple(norm.shape)) == (0.0, torch.float32, ())
        scaler.clip_grad_value_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("kind", KINDS)
def test_several_optimizers_are_clipped_each_for_itself(kind: str) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=1.0, **KINDS[kind]) for param in params]
    scaler.scale((params[0] * GRADIENT).sum() + (params[1] * GRADIENT * 2).sum()).backward()
    norms = [scaler.clip_grad_norm_(optimizer, 1.0).item() for optimizer in optimizers]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert norms == [13.0, 26.0]
    for param in params:
        close(-param.detach(), clipped(GRADIENT, 1.0))


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids=str)
@pytest.mark.parametrize("order", ["clip before", "clip after", "clip both"])
def test_two_optimizers_of_the_same_parameters_clip_as_if_there_were_no_scale(
    kinds: tuple[str, str], order: str
) -> None:
    scaler, shared = GradScaler("cpu", init_scale=8.0), torch.nn.Parameter(torch.zeros(3))
    first, second = (torch.optim.SGD([shared], lr=1.0, **KINDS[kind]) for kind in kinds)
    scaler.scale((shared * GRADIENT).sum()).backward()
    if order != "clip after":
        scaler.clip_grad_norm_(second, 6.5)
    scaler.step(first)
    if order != "clip before":
        scaler.clip_grad_norm_(second, 1.0)
    scaler.step(second)
    scaler.update()
    close(scaled_by(shared.grad, GRADIENT), torch.tensor(1.0 / 13.0 if order != "clip before" else 0.5))


def scaled_by(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The one number that a reference was multiplied with."""
    ratios = values / reference
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))
    return ratios[0]


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids=str)
def test_a_parameter_of_two_optimizers_is_unscaled_once_by_any_kind_of_clipping(kinds: tuple[str, str]) -> None:
    for first_clips, second_clips in itertools.product([False, True], repeat=2):
        scaler, shared = GradScaler("cpu", init_scale=8.0), torch.nn.Parameter(torch.zeros(3))
        own = torch.nn.Parameter(torch.zeros(3))
        first = torch.optim.SGD([shared], lr=1.0, **KINDS[kinds[0]])
        second = torch.optim.SGD([shared, own], lr=1.0, **KINDS[kinds[1]])
        scaler.scale((shared * GRADIENT).sum() + (own * GRADIENT).sum()).backward()
        seen = GRADIENT
        if first_clips:
            scaler.clip_grad_norm_(first, 6.5)
            seen = clipped(GRADIENT, 6.5)
        scaler.step(first)
        close(-shared.detach(), seen)
        both = torch.cat([seen, GRADIENT])
        if second_clips:
            close(scaler.clip_grad_norm_(second, 1.0), both.norm())
            both = clipped(both, 1.0)
        scaler.step(second)
        scaler.update()
        close(-shared.detach(), seen + both[:3])
        close(-own.detach(), both[3:])


def test_an_overridden_unscale_grads_unscales_for_clipping_too() -> None:
    class Counting(GradScaler):
        calls = 0

        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            self.calls += 1
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    for kind in KINDS:
        world = World(kind)
        world.scaler = scaler = Counting("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        assert world.clip(6.5).item() == 13.0
        assert scaler.calls == 1
        close(world.step(), clipped(GRADIENT, 6.5))
        assert scaler.calls == 1


# -- fp16 gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [False, True])
def test_fp16_gradients_are_unscaled_if_allowed(kind: str, clip: bool) -> None:
    world = World(kind, gradient=GRADIENT.half(), allow_fp16_gradients=True)
    if clip:
        norm = world.clip(6.5)
        assert (norm.item(), norm.dtype) == (13.0, torch.float32)
    else:
        world.unscale_()
    seen = world.step()
    torch.testing.assert_close(seen, clipped(GRADIENT, 6.5 if clip else 1e9).half(), rtol=1e-3, atol=0.0)


def test_the_norm_of_fp16_gradients_does_not_overflow_fp16() -> None:
    world = World("foreach", scale=1.0, gradient=torch.full((100,), 6e4).half(), allow_fp16_gradients=True)
    assert world.clip(1.0).item() == pytest.approx(6e5, rel=1e-3)
    torch.testing.assert_close(world.step().float(), torch.full((100,), 0.1), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", ["for-loop", "foreach"])
@pytest.mark.parametrize("clip", [False, True])
def test_fp16_gradients_that_unscaling_makes_infinite_skip_the_step(kind: str, clip: bool) -> None:
    world = World(kind, scale=2.0**-4, gradient=torch.tensor([1.0]).half(), allow_fp16_gradients=True)
    world.param.grad = torch.tensor([6e4]).half()
    if clip:
        world.clip(1.0)
    assert world.step().item() == 0.0
    assert world.scaler.get_scale() == 2.0**-5


def test_fp16_gradients_are_refused_otherwise_before_anything_changes() -> None:
    world = World("foreach", gradient=GRADIENT.half())
    calls: list[Callable[[], Any]] = [
        lambda: world.clip(1.0),
        lambda: world.scaler.clip_grad_value_(world.optimizer, 1.0),
        world.unscale_,
        world.step,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients.*allow_fp16_gradients=True"):
            call()
        assert torch.equal(world.param.grad, (GRADIENT * 8.0).half())
        pickle.dumps(world.scaler)
    fused = World("fused", gradient=GRADIENT.half())
    fused.clip(6.5)
    torch.testing.assert_close(fused.step(), clipped(GRADIENT, 6.5).half(), rtol=1e-3, atol=0.0)


# -- clip_grad_value_ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [[], ["unscale_"], ["norm"], ["unscale_", "norm"], ["value"]], ids=str)
@pytest.mark.parametrize("after", [[], ["unscale_"]], ids=str)
def test_values_are_clipped_after_all_that_was_asked_for_before(kind: str, before: list[str], after: list[str]) -> None:
    if after and "unscale_" in before:
        return
    world, expected = World(kind), GRADIENT
    for call in before:
        if call == "norm":
            world.clip(6.5)
            expected = clipped(expected, 6.5)
        elif call == "value":
            world.scaler.clip_grad_value_(world.optimizer, 5.0)
            expected = expected.clamp(-5.0, 5.0)
        else:
            world.unscale_()
    world.scaler.clip_grad_value_(world.optimizer, 3.5)
    for _ in after:
        world.unscale_()
    close(world.step(), expected.clamp(-3.5, 3.5))


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_values_does_not_hide_an_inf(kind: str) -> None:
    world = World(kind, gradient=torch.tensor([math.inf, 1.0]))
    world.scaler.clip_grad_value_(world.optimizer, 1.0)
    assert world.step().tolist() == [0.0, 0.0]
    assert world.scaler.get_scale() == 4.0


def test_values_of_sparse_gradients_are_those_of_their_sums() -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.zeros(4, 1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.nn.functional.embedding(torch.tensor([1, 1, 3]), param, sparse=True).sum()).backward()
    scaler.clip_grad_value_(optimizer, 1.5)
    scaler.step(optimizer)
    assert param.flatten().tolist() == [0.0, -1.5, 0.0, -1.0]


def test_complex_values_have_no_order() -> None:
    scaler, param = GradScaler("cpu"), torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    scaler.scale(param.abs().sum()).backward()
    assert param.grad is not None
    before = param.grad.clone()
    with pytest.raises(TypeError, match="complex gradients cannot be clipped by value"):
        scaler.clip_grad_value_(torch.optim.SGD([param], lr=1.0), 1.0)
    assert torch.equal(param.grad, before)


# -- arguments, order, disabled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1.0,), ValueError, "max_norm must be a number >= 0, got -1.0"),
        ((math.nan,), ValueError, "max_norm must be a number >= 0, got nan"),
        (("1",), TypeError, "max_norm must be a number, got '1' of type str"),
        ((1.0, 0.0), ValueError, "norm_type must be a number > 0 or inf, got 0.0"),
        ((1.0, -math.inf), ValueError, "norm_type must be a number > 0 or inf, got -inf"),
        ((1.0, math.nan), ValueError, "norm_type must be a number > 0 or inf, got nan"),
        ((1.0, "two"), TypeError, "norm_type must be a number, got 'two' of type str"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_and_nothing_is_changed(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    for enabled in (False, True):
        world = World("foreach", enabled=enabled)
        before = world.param.grad.clone()
        with pytest.raises(error, match=re.escape(message)):
            world.scaler.clip_grad_norm_(world.optimizer, *arguments)
        assert torch.equal(world.param.grad, before)
    with pytest.raises(ValueError, match="clip_value must be a number >= 0, got -2"):
        World("foreach").scaler.clip_grad_value_(world.optimizer, -2)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "skip"])
def test_they_are_refused_after_a_step_and_for_what_is_no_optimizer(name: str) -> None:
    world = World("foreach")
    arguments = () if name == "skip" else (1.0,)
    with pytest.raises(TypeError, match="expected an optimizer with param_groups, got Linear"):
        getattr(world.scaler, name)(torch.nn.Linear(1, 1), *arguments)
    world.scaler.step(world.optimizer)
    with pytest.raises(RuntimeError, match=re.escape(f"{name}() is being called after step() of the same optimizer")):
        getattr(world.scaler, name)(world.optimizer, *arguments)
    if name != "skip":
        with pytest.raises(RuntimeError, match=re.escape(f"{name}() needs a scale, which the first scale() creates")):
            getattr(GradScaler("cpu"), name)(world.optimizer, *arguments)


def test_a_disabled_scaler_clips() -> None:
    world = World("foreach", enabled=False)
    close(world.clip(6.5), GRADIENT.norm())
    assert torch.equal(world.param.grad, clipped(GRADIENT, 6.5))
    world.scaler.clip_grad_value_(world.optimizer, 1.0)
    assert world.param.grad.tolist() == [1.0, -1.0, 1.0]
    world.scaler.skip(world.optimizer)
    world.scaler.skip(world.optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [1e-6, 0.0])
def test_a_scale_too_large_for_the_coefficient_is_an_overflow(kind: str, max_norm: float) -> None:
    """Gradients divided by what is infinite in fp32 would be 0."""
    scaler, param = GradScaler("cpu", init_scale=2.0**120), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([3e-3, 4e-3]) * 2.0**120
    close(scaler.clip_grad_norm_(optimizer, max_norm), torch.tensor(5e-3))
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == (2.0**119 if max_norm else 2.0**120)


# -- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_deliberate_skip_leaves_all_in_order(kind: str) -> None:
    world = World(kind)
    world.scaler.skip(world.optimizer)
    with pytest.raises(RuntimeError, match=re.escape("step() is being called after skip() of the same optimizer")):
        world.scaler.step(world.optimizer)
    world.scaler.update()
    assert world.scaler.get_scale() == 8.0
    assert world.scaler._get_growth_tracker() == 0
    assert torch.equal(world.param.grad, GRADIENT * 8.0)
    assert torch.equal(world.step(), GRADIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_after_unscaling_or_clipping_reports_what_was_found(kind: str) -> None:
    for bad, scale in ((1.0, 16.0), (math.inf, 4.0)):
        for prepare in ("unscale_", "clip"):
            world = World(kind, gradient=torch.tensor([1.0, bad]), growth_interval=1)
            _ = world.unscale_() if prepare == "unscale_" else world.clip(1.0)
            world.scaler.skip(world.optimizer)
            world.scaler.update()
            assert world.scaler.get_scale() == scale
            assert world.param.tolist() == [0.0, 0.0]


def test_other_optimizers_still_move_the_scale_and_a_skip_before_any_loss_is_fine() -> None:
    world = World("foreach", growth_interval=1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    world.scaler.skip(other)
    world.step()
    assert world.scaler.get_scale() == 16.0
    fresh = GradScaler("cpu")
    fresh.skip(other)
    fresh.update()
    assert fresh.get_scale() == 2.0**16


# -- what it costs ----------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts how many gradient elements ops read and write, up to a fused optimizer's own op."""

    def __init__(self, *grads: torch.Tensor) -> None:
        super().__init__()
        self.storages = {grad.untyped_storage().data_ptr() for grad in grads}
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if not is_view and not func.overloadpacket.__name__.startswith("_fused_"):
            touched = {}
            for argument, value in zip(func._schema.arguments, args, strict=False):
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self.storages:
                        touched[tensor.data_ptr()] = tensor.numel(), argument.alias_info is not None
            self.read += sum(numel for numel, _ in touched.values())
            self.written += sum(numel for numel, is_written in touched.values() if is_written)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_are_read_once_before_a_fused_step_and_multiplied_once_before_others(
    kind: str, clip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_SMALL", 0)  # small ones, in a cache, are multiplied by 1
    scaler = GradScaler("cpu")
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(7,), (7,), (3, 5), (300, 1000)]]
    optimizer = torch.optim.AdamW(params, **KINDS[kind])
    optimizer.step()
    scaler.scale(torch.stack([param.sum() for param in params]).sum()).backward()
    elements = sum(param.numel() for param in params)
    if kind != "fused":
        optimizer.step = lambda: None  # type: ignore[method-assign]
    with Traffic(*(param.grad for param in params)) as traffic:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    reads, writes = (1, 0) if kind == "fused" else (1 + clip, 1)
    assert (traffic.read / elements, traffic.written / elements) == (reads, writes)


def test_the_counter_sees_torchs_traffic() -> None:
    scaler, param = torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([param], fused=True)
    scaler.scale(param.sum()).backward()
    with Traffic(param.grad) as traffic:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
    assert (traffic.read, traffic.written) == (3000, 2000)


def test_gradients_in_another_order_of_memory_have_norms() -> None:
    scaler, conv = GradScaler("cpu", init_scale=4.0), torch.nn.Conv2d(8, 1, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(conv.parameters(), lr=1.0)
    scaler.scale(conv(torch.ones(1, 8, 3, 3)).sum()).backward()
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        exact = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in conv.parameters()]), norm_type)
        got = scaler.clip_grad_norm_(optimizer, math.inf, norm_type)
        close(got, exact / 4.0 if norm_type == 1.0 else torch.linalg.vector_norm(torch.ones(73), norm_type))


def test_a_norm_beyond_all_numbers_is_infinite_and_clips_to_nothing_as_in_torch() -> None:
    param = torch.nn.Parameter(torch.zeros(10_000))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), GradScaler("cpu", init_scale=1.0)
    scaler.scale(param.sum()).backward()
    assert torch.nn.utils.get_total_norm([param.grad], 0.01) == math.inf
    assert scaler.clip_grad_norm_(optimizer, 1.0, norm_type=0.01) == math.inf


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e6), (torch.float32, 1e300), (torch.float32, math.inf)])
def test_a_bound_beyond_the_numbers_of_a_dtype_clips_nothing(dtype: torch.dtype, bound: float) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, allow_fp16_gradients=True)
    param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 800.0, dtype=dtype)
    scaler.clip_grad_value_(optimizer, bound)
    assert param.grad.tolist() == [100.0, 100.0, 100.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "tensors"])
def test_the_coefficient_is_torchs_bit_for_bit(device: str, dtype: torch.dtype) -> None:
    scale = torch.tensor(1024.0)
    if device == "tensors":  # the route of an accelerator
        scale = scale.as_subclass(OfAnAccelerator)
    draw = torch.Generator().manual_seed(0)
    norms = torch.rand(200, generator=draw, dtype=dtype).mul_(10).tolist()
    bounds = torch.rand(200, generator=draw, dtype=torch.float64).mul_(8).tolist()
    cases = [*zip(norms, bounds, strict=True), (13.0, 13.0), (13.0, 1e9), (0.0, 1.0), (0.0, 0.0), (1e-9, 1e-9)]
    for norm, max_norm in [*cases, (13.0, 0.0), (13.0, math.inf), (1e30, 1e-3)]:
        param = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        param.grad = torch.ones(1, dtype=dtype)
        torch.nn.utils.clip_grads_with_norm_([param], max_norm, torch.tensor(norm, dtype=dtype))
        clip = measure.clip(torch.tensor(norm * 1024.0, dtype=dtype), scale, max_norm, dtype)
        assert clip.norm.item() == torch.tensor(norm, dtype=dtype).item()
        assert clip.coefficient.item() == param.grad.float().item()
        close(clip.coefficient.as_subclass(torch.Tensor), 1024.0 / clip.divisor.as_subclass(torch.Tensor))
        assert clip.found_inf == 0.0


class OfAnAccelerator(torch.Tensor):
    """A tensor in the memory of the CPU that says that it is not."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize("norm", [math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
def test_a_norm_that_is_not_finite_is_an_overflow(norm: float, max_norm: float) -> None:
    assert measure.clip(torch.tensor(norm), torch.tensor(4.0), max_norm).found_inf == 1.0
