"""Steps on an accelerator: torch.amp's bits, and no more waits and launches than torch.amp's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tests.accelerator.availability import DEVICE, IS_SIMULATED, simulated
from tests.accelerator.training import (
    CLIPPING,
    KINDS,
    MAX_NORM,
    Counted,
    Training,
    as_on_a_cpu,
    batches,
    bits,
    counted_step,
    net,
)
from tests.amp.test_autocast_ops import AutocastTestLists, ops_of, outcome
from torch import nn

import castwise
from castwise.amp._readback import DELAY
from castwise.schedules import Dynamic, Guard, Headroom, Schedule, Static

SPOILT = (2, 6)
CALLS = ["unscale_", "clip_grad_norm_", "clip_grad_value_"]
ORDERS = [order for count in range(4) for order in itertools.permutations(CALLS, count)]
SCHEDULES = [
    Headroom(),
    Dynamic(2.0**10, growth_interval=3, hysteresis=2, on_nonfinite_loss="hold"),
    Static(2.0**10),
    Guard(),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", ["none", "unscale_ and torch's"])
def test_the_same_calls_give_the_bits_of_torch(kind: str, clipping: str) -> None:
    ours, theirs = (
        Training(library, kind, clipping).run(batches(10, spoilt=SPOILT)) for library in (castwise, torch.amp)
    )
    assert ours == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_the_scaler_is_torchs_clipping(kind: str) -> None:
    ours, theirs = Training(castwise, kind, "clip_grad_norm_"), Training(torch.amp, kind, "unscale_ and torch's")
    for index, batch in enumerate(batches(10, spoilt=SPOILT)):
        ours.step(batch)
        theirs.step(batch)
        assert ours.scaler.get_scale() == theirs.scaler.get_scale()
        assert bool(ours.scaler.step_skipped) == (index in SPOILT)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach().cpu(), rtol=1e-5, atol=1e-7)


def prepared(training: Training, order: tuple[str, ...], norm_type: float) -> None:
    """Make calls between a backward and the step."""
    for call in order:
        if call == "clip_grad_norm_":
            norm = training.scaler.clip_grad_norm_(training.optimizer, MAX_NORM, norm_type)
            assert (norm.device.type, norm.dtype, tuple(norm.shape)) == (DEVICE, torch.float32, ())
        elif call == "clip_grad_value_":
            training.scaler.clip_grad_value_(training.optimizer, MAX_NORM)
        elif "clip_grad_value_" not in order or order.index(call) == 0:
            training.scaler.unscale_(training.optimizer)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_no_order_of_calls_waits_before_the_step_has_to_know(order: tuple[str, ...], norm_type: float) -> None:
    for kind in KINDS:
        training = Training(castwise, kind)
        training.backward(batches(1)[0])
        with Counted() as counted:
            prepared(training, order, norm_type)
        assert counted.waits == {}
        with Counted() as counted:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        assert counted.waits == ({} if kind == "fused" else {"event": 1}), counted.lines


@pytest.mark.parametrize("clipping", [*CLIPPING, "clip_grad_value_"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_a_fused_step_never_waits_whatever_the_schedule(schedule: Schedule, clipping: str) -> None:
    training = Training(castwise, "fused", clipping, schedule=schedule)
    if clipping == "clip_grad_value_":
        training.clip = lambda: training.scaler.clip_grad_value_(training.optimizer, 0.5)  # type: ignore[method-assign]
    assert counted_step(training).waits == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_schedules_move_the_scale_as_on_a_cpu(schedule: Schedule, kind: str) -> None:
    scales = []
    for device in (DEVICE, "cpu"):
        training = Training(castwise, kind, device=device, low=False, schedule=schedule)
        scales.append([])
        for batch in batches(12, device, SPOILT):
            training.step(batch)
            scales[-1].append(training.scaler.get_scale())
    assert scales[0] == scales[1]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 5.0, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_a_cpu(norm_type: float, kind: str) -> None:
    norms = []
    for device in (DEVICE, "cpu"):
        training = Training(castwise, kind, device=device, low=False)
        training.backward(batches(1, device)[0])
        with Counted() as counted:
            norm = training.scaler.clip_grad_norm_(training.optimizer, MAX_NORM, norm_type)
        assert counted.waits == {}
        norms.append(norm.item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6 if IS_SIMULATED else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_a_gradient_that_unscaling_makes_infinite_skips_the_step(kind: str, clipping: str) -> None:
    scaler = castwise.GradScaler(DEVICE, init_scale=2.0**-20)
    param = nn.Parameter(torch.zeros(2, device=DEVICE))
    optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
    scaler.scale(torch.ones((), device=DEVICE))
    param.grad = torch.tensor([1e35, 1.0], device=DEVICE)
    if clipping == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, 1.0)
    elif clipping != "none":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([param], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert bits([param]) == [[0.0, 0.0]]
    assert scaler.get_scale() == 2.0**-21


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_falls_below_one_still_finds_what_unscaling_makes_infinite(kind: str) -> None:
    scaler = castwise.GradScaler(DEVICE, init_scale=4.0)
    param = nn.Parameter(torch.zeros(2, device=DEVICE))
    optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
    for large in [math.inf] * 8 + [3e37]:
        param.grad = torch.tensor([large, 1.0], device=DEVICE)
        scaler.scale(torch.ones((), device=DEVICE))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert bits([param]) == [[0.0, 0.0]]
    assert scaler.get_scale() == 2.0**-7


@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_advance_once_for_each_step_taken(kind: str) -> None:
    training, rates = Training(castwise, kind), list[float]()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1, gamma=0.5)
    for batch in batches(8, spoilt=SPOILT):
        training.backward(batch)
        training.scaler.step(training.optimizer)
        training.scaler.step_scheduler(scheduler)
        training.scaler.update()
        rates.append(training.optimizer.param_groups[0]["lr"])
    training.scaler.synchronize()
    assert training.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**6
    expected, taken = [], 0
    for index in range(8):
        taken += index not in SPOILT
        expected.append(0.01 * 0.5**taken)
    assert rates == (expected if kind != "fused" else [0.01] * DELAY + expected[:-DELAY])


def test_a_scheduler_of_a_fused_step_waits_only_for_events_that_are_two_updates_old() -> None:
    training = Training(castwise, "fused")
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1)

    def step(batch: torch.Tensor) -> None:
        training.backward(batch)
        training.scaler.step(training.optimizer)
        training.scaler.step_scheduler(scheduler)
        training.scaler.update()

    training.step = step  # type: ignore[method-assign]
    assert counted_step(training).waits == {"event": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_get_the_facts_of_each_step(kind: str) -> None:
    training, facts = Training(castwise, kind, "clip_grad_norm_"), list[Any]()
    training.scaler.register_step_hook(facts.append)
    shown = list[float]()
    training.scaler.register_gradients_hook(lambda optimizer, scale: shown.append(scale))
    training.run(batches(8, spoilt=SPOILT))
    training.scaler.synchronize()
    assert [step.number for step in facts] == list(range(1, 9))
    assert [index for index, step in enumerate(facts) if step.skipped] == list(SPOILT)
    assert {str(step.cause) for step in facts if step.skipped} == {"non-finite loss"}
    assert len(facts[2].parameters) == 8
    assert all(step.grad_norm > 0.0 and 0.0 < step.loss < 1.0 for step in facts if not step.skipped)
    assert [float(scale) for scale in shown] == [training.scaler.get_scale()] * 8  # one tensor, which moves
    assert [step.scale for step in facts] == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 512.0]


def test_hooks_wait_only_for_events_that_are_two_updates_old() -> None:
    training = Training(castwise, "fused")
    training.scaler.register_step_hook(lambda step: None)
    assert counted_step(training).waits == {"event": 1}


def closure_steps(optimizer: Any, device: str) -> list[list[float]]:
    """Return the weights and the scale after four steps with a closure, of which the second is not finite."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False).to(device)
    steps, scaler = optimizer(model.parameters(), lr=0.1), castwise.GradScaler(device, init_scale=8.0)
    for batch in batches(4, device, (1,)):

        def evaluate(batch: torch.Tensor = batch) -> torch.Tensor:
            steps.zero_grad()
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            return loss

        scaler.step(steps, evaluate)
        scaler.update()
    return [*bits(model.parameters()), [scaler.get_scale()]]


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures_step_as_on_a_cpu(optimizer: Any) -> None:
    assert as_on_a_cpu(closure_steps(optimizer, DEVICE), closure_steps(optimizer, "cpu"))
    assert closure_steps(optimizer, DEVICE)[-1] == [4.0]


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="there is one device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_gradients_on_two_devices(kind: str, clipping: str) -> None:
    params = [nn.Parameter(torch.ones(3, device=f"{DEVICE}:{index}")) for index in (0, 1)]
    optimizer = torch.optim.SGD(params, lr=1.0, **KINDS[kind])
    scaler = castwise.GradScaler(DEVICE, init_scale=2.0**10)
    for bad in (False, True, False):
        with Counted() as counted:
            scaler.scale(torch.ones((), device=f"{DEVICE}:1"))
            for param in params:
                param.grad = torch.full_like(param, 2.0**10)
            if bad:
                params[1].grad[0] = math.nan  # type: ignore[index]
            if clipping == "clip_grad_norm_":
                scaler.clip_grad_norm_(optimizer, 100.0)
            elif clipping != "none":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert kind != "fused" or counted.waits == {}
    assert scaler.get_scale() == 2.0**9
    assert bits(params) == [[-2.0] * 3] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_parameter_is_unscaled_once(kind: str) -> None:
    weights = []
    for device in (DEVICE, "cpu"):
        params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        first, second = (torch.optim.SGD(some, lr=1.0, **KINDS[kind]) for some in (params, params[:1]))
        scaler = castwise.GradScaler(device, init_scale=4.0)
        for large in (1.0, math.inf, 1.0):
            for param in params:
                param.grad = None
            scaler.scale(sum((param * large).sum() for param in params)).backward()
            scaler.step(first)
            scaler.clip_grad_norm_(second, 100.0)
            scaler.step(second)
            scaler.update()
        weights.append([*bits(params), [scaler.get_scale()]])
    assert weights[0] == weights[1] == [[-3.0] * 3, [-1.0] * 3, [2.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_iteration_on_a_side_stream(kind: str) -> None:
    """The hazards that the device finds fail every test of this folder."""
    plain, on_side = (Training(castwise, kind, "clip_grad_norm_") for _ in range(2))
    data, side = batches(8, spoilt=SPOILT), torch.Stream(DEVICE)
    plain.run(data)
    on_side.scaler.register_step_hook(lambda step: None)
    for batch in data:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            on_side.step(batch)
        torch.accelerator.current_stream().wait_stream(side)
    on_side.scaler.synchronize()
    assert on_side.state() == plain.state()


def test_batches_from_pinned_memory() -> None:
    plain, pinned = Training(castwise), Training(castwise)
    plain.run(batches(5))
    for batch in [batch.pin_memory() for batch in batches(5, "cpu")]:
        pinned.step(batch.to(DEVICE, non_blocking=True))
    assert pinned.state() == plain.state()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_a_checkpoint_continues_the_run(kind: str, schedule: Schedule) -> None:
    data = batches(10, spoilt=SPOILT)
    through, resumed = (Training(castwise, kind, schedule=schedule) for _ in range(2))
    first = Training(castwise, kind, schedule=schedule)
    first.run(data[:5])
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.scaler.load_state_dict(first.scaler.state_dict())
    assert resumed.run(data[5:]) == through.run(data)
    assert resumed.scaler.state_dict() == through.scaler.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_interchangeable_with_torchs(kind: str) -> None:
    data = batches(10, spoilt=SPOILT)
    states = []
    for order in ((castwise, torch.amp), (torch.amp, castwise)):
        first, second = (Training(library, kind) for library in order)
        first.run(data[:5])
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.scaler.load_state_dict(first.scaler.state_dict())
        states.append(second.run(data[5:]))
    assert states[0] == states[1] == Training(torch.amp, kind).run(data)


def test_autocast_computes_the_bits_of_torch() -> None:
    torch.manual_seed(0)
    image, x = torch.randn(2, 3, 6, 6, device=DEVICE), torch.randn(4, 8, device=DEVICE)
    conv, model = nn.Conv2d(3, 4, 3).to(DEVICE), net().to(DEVICE)
    for dtype in (torch.float16, torch.bfloat16):
        results = []
        for library in (castwise, torch.amp):
            with library.autocast(DEVICE, dtype=dtype):
                results.append(
                    [conv(image), model(x), model(x).softmax(-1), x.exp(), x @ x.T, torch.cat([x, x.half()])]
                )
        for mine, other in zip(*results, strict=True):
            assert mine.dtype is other.dtype
            assert bits([mine]) == bits([other])


@simulated  # tests/amp/test_autocast_ops.py has them on a GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_op_on_torchs_lists_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    entries = ops_of(AutocastTestLists(torch.device(DEVICE)))
    ours, theirs = (
        [outcome(library.autocast, DEVICE, dtype, name, entry) for name, entry in entries]
        for library in (castwise, torch.amp)
    )
    assert ours == theirs
    assert sum(isinstance(result, list) for result in ours) > 80


def test_a_scale_that_compiled_code_creates() -> None:
    plain, compiled = (Training(castwise, "fused", "unscale_ and torch's") for _ in range(2))
    scale = torch.compile(compiled.scaler.scale, backend="eager", fullgraph=True)
    for batch in batches(8, spoilt=SPOILT):
        plain.step(batch)
        compiled.optimizer.zero_grad()
        with castwise.autocast(DEVICE, dtype=torch.float16):
            loss = compiled.model(batch).square().mean()
        scale(loss).backward()
        compiled.clip()
        compiled.scaler.step(compiled.optimizer)
        compiled.scaler.update()
    assert compiled.state() == plain.state()


def over_all_gradients(counted: Counted) -> int:
    """Return how often all gradients were read."""
    return sum(launches for op, (launches, _, _) in counted.ops.items() if "_foreach_" in op)


@simulated
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_slow_in_fp64_adds_up_squares_of_unscaled_gradients_in_fp32(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castwise.amp._measure.sums_in_fp64", lambda device: False)
    dtypes = set[Any]()
    foreach_norm = torch._foreach_norm

    def noted(tensors: Any, ord: Any = 2, dtype: Any = None) -> Any:
        dtypes.add(dtype)
        return foreach_norm(tensors, ord, dtype=dtype)

    monkeypatch.setattr(torch, "_foreach_norm", noted)
    ours, theirs = Training(castwise, kind, "clip_grad_norm_"), Training(torch.amp, kind, "unscale_ and torch's")
    weights, passes = [], []
    for training in (ours, theirs):
        for step, batch in enumerate(batches(6)):
            training.backward(batch)
            grads = [param.grad for param in training.model.parameters()]
            with torch.no_grad():
                torch._foreach_mul_(grads, 1e19 if step else 1.0)  # scaled, their squares are above fp32
            dtypes.clear()
            with Counted() as counted:
                training.clip()
                training.scaler.step(training.optimizer)
                training.scaler.update()
        passes.append(over_all_gradients(counted))
        weights.append(bits(training.model.parameters()))
    assert weights[0] == weights[1]
    assert passes[0] <= passes[1]
    assert torch.float64 not in dtypes
    assert ours.scaler.get_scale() == theirs.scaler.get_scale() > 2.0**10


@simulated
@pytest.mark.parametrize("scale", [2.0**10, 2.0**-20])
def test_headroom_measures_gradients_and_needs_no_other_read_to_find_what_unscaling_makes_infinite(
    scale: float,
) -> None:
    headroom, static = (
        over_all_gradients(counted_step(Training(castwise, "fused", "unscale_ and torch's", schedule=schedule)))
        for schedule in (Headroom(scale, max_scale=scale), Static(2.0**10))
    )
    assert headroom == static + 1
