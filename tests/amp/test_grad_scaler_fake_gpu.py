"""The scaler on fake CUDA tensors, which have a device and no values: reading one, or mixing devices, fails."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from castwise.amp import _measure as measure
from castwise.amp import _readback as readback
from castwise.amp import grad_scaler
from castwise.amp._readback import DELAY
from castwise.amp.grad_scaler import GradScaler
from castwise.schedules import Dynamic, Guard, Headroom, Schedule, Static

CALLS = ["unscale_", "clip_grad_norm_", "clip_grad_value_"]
ORDERS = [order for count in range(4) for order in itertools.permutations(CALLS, count)]


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A fake tensor is a subclass; what is tested is the route of plain tensors on a GPU.
    monkeypatch.setattr(measure, "is_plain", lambda tensor: True)
    monkeypatch.setattr(grad_scaler, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(readback, "copies_asynchronously", lambda device_type: False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def optimizer_on(fused: bool, *devices: str) -> torch.optim.Optimizer:
    dtypes = [torch.float32, torch.float32, torch.bfloat16]
    params = [
        torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        for device in devices
        for shape, dtype in zip([(4, 4), (3,), (300, 400)], dtypes, strict=True)
    ]
    optimizer = torch.optim.SGD(params, lr=0.1, fused=fused)
    # Whether torch's own kernels run on fake tensors is not the question here.
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return optimizer


def prepare(scaler: GradScaler, optimizer: torch.optim.Optimizer, order: tuple[str, ...], norm_type: float) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.empty_like(param)
    scaler.scale(torch.empty((), device="cuda"))  # autograd itself needs a real GPU
    for call in order:
        if call == "clip_grad_norm_":
            norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
            assert (norm.device.type, norm.dtype, tuple(norm.shape)) == ("cuda", torch.float32, ())
        elif call == "clip_grad_value_":
            scaler.clip_grad_value_(optimizer, 1.0)
        elif "clip_grad_value_" not in order or order.index(call) == 0:
            scaler.unscale_(optimizer)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_nothing_is_read_from_the_gpu_for_a_fused_optimizer(order: tuple[str, ...], norm_type: float) -> None:
    scaler, optimizer = GradScaler("cuda"), optimizer_on(True, "cuda")
    for _ in range(2):
        prepare(scaler, optimizer, order, norm_type)
        scaler.step(optimizer)
        scaler.update()
    assert scaler._scale is not None
    assert scaler._scale.device.type == "cuda"


SCHEDULES = [
    Headroom(),
    Dynamic(hysteresis=2, cooldown=3, on_nonfinite_loss="hold"),
    Static(4.0),
    Guard(),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) < 2], ids="-".join)
def test_nothing_is_read_for_any_schedule_and_not_for_what_the_program_asks(
    schedule: Schedule, order: tuple[str, ...]
) -> None:
    scaler, optimizer = GradScaler("cuda", schedule=schedule), optimizer_on(True, "cuda")
    scaler.register_gradients_hook(lambda *_: None)
    for _ in range(DELAY):  # the facts of the first are looked at after that
        prepare(scaler, optimizer, order, 2.0)
        scaler.step(optimizer)
        assert scaler.step_skipped.device.type == "cuda"
        scaler.step_scheduler(lambda: None)
        scaler.update()
    with pytest.raises(DataDependentOutputException):
        scaler.synchronize()


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_nothing_is_read_for_others_before_the_step_has_to_know(order: tuple[str, ...]) -> None:
    scaler, optimizer = GradScaler("cuda"), optimizer_on(False, "cuda")
    prepare(scaler, optimizer, order, 2.0)
    with pytest.raises(DataDependentOutputException):
        scaler.step(optimizer)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_gradients_on_two_gpus_are_no_reason_to_read_either(order: tuple[str, ...]) -> None:
    scaler, optimizer = GradScaler("cuda"), optimizer_on(True, "cuda:0", "cuda:1")
    prepare(scaler, optimizer, order, 2.0)
    scaler.step(optimizer)
    scaler.update()


def test_a_shared_parameter_is_no_reason_to_read() -> None:
    scaler, first = GradScaler("cuda"), optimizer_on(True, "cuda")
    second = torch.optim.SGD(first.param_groups[0]["params"][:2], lr=0.1, fused=True)
    second.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    prepare(scaler, first, (), 2.0)
    scaler.step(first)
    scaler.clip_grad_norm_(second, 1.0)
    scaler.step(second)
    scaler.update()


def test_a_fake_tensor_that_is_read_raises() -> None:
    with pytest.raises(DataDependentOutputException):
        torch.empty((), device="cuda").item()
