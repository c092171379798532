"""Where mixed precision can run. What regions make of it is in `test_autocast_mode`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from castwise.amp import _devices as devices
from castwise.amp.grad_scaler import GradScaler, _MultiDeviceReplicator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_copies_are_made_once_for_each_device_and_are_never_the_master() -> None:
    master = torch.ones(())
    copies = _MultiDeviceReplicator(master)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert copies.get(cpu) is copies.get(cpu)
    assert copies.get(cpu) is not master
    assert torch.equal(copies.get(cpu), master)
    assert copies.get(meta).device == meta


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("xla", [False, True])
def test_cuda_or_xla_will_do(cuda: bool, xla: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(devices, "_has_torch_xla", lambda: xla)
    assert devices.amp_definitely_not_available() is not (cuda or xla)


def test_torch_xla_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(devices, "find_spec", lambda name: asked.append(name) or object())  # type: ignore[func-returns-value]  # None is falsy
    assert devices._has_torch_xla.__wrapped__() is True
    assert asked == ["torch_xla"]


def test_what_is_no_device_has_no_autocast() -> None:
    assert devices.has_autocast("cpu")
    assert not devices.has_autocast("no device")


@pytest.mark.parametrize(
    ("device", "dtype", "text"),
    [
        ("cuda", FP16, "Disabling autocast. The CPU has autocast('cpu')"),
        (
            "cpu",
            FP32,
            "autocast on 'cpu' supports torch.bfloat16, torch.float16, got torch.float32",
        ),
    ],
)
def test_what_cannot_be_cast_to_is_warned_of(
    device: str, dtype: torch.dtype, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match=f"{re.escape(text)}$"):
        assert devices.can_autocast_to(device, dtype) is False


def test_what_can_be_cast_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.can_autocast_to("cpu", BF16) is True
    monkeypatch.setattr(devices, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert devices.can_autocast_to("cuda", FP16) is True
    text = "this CUDA device does not support torch.bfloat16: use dtype=torch.float16"
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        devices.can_autocast_to("cuda", BF16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert devices.can_autocast_to("cuda", BF16) is True


def test_a_backend_of_ones_own_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.amp._devices.custom_backend", lambda: "npu")
    text = (
        "backend 'npu' does not list the dtypes that it can autocast to: register a module for it with "
        "torch._register_device_module that has a function get_amp_supported_dtype() -> list[torch.dtype]"
    )
    for module in (None, object()):
        if module is not None:
            monkeypatch.setattr(torch, "npu", module, raising=False)
        with pytest.raises(RuntimeError, match=f"{re.escape(text)}$"):
            devices.can_autocast_to("npu", FP32)
    module = type("module", (), {"get_amp_supported_dtype": staticmethod(lambda: [FP32])})
    monkeypatch.setattr(torch, "npu", module)
    assert devices.can_autocast_to("npu", FP32)
    assert all(devices.can_autocast_to("cpu", dtype) for dtype in (BF16, FP16))


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_a_device_has_a_type(device: Any) -> None:
    assert devices.device_type(device) == "cuda"


@pytest.mark.parametrize(
    ("device", "initialized", "capturing"), [("cpu", True, False), ("cuda", False, False), ("cuda", True, True)]
)
def test_a_graph_is_captured_on_cuda_alone(
    device: str, initialized: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class There(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
            return torch.device(device)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert devices.is_capturing(torch.ones(()).as_subclass(There)) is capturing


@pytest.mark.parametrize("device", [object(), "gpu", "auto"])
def test_what_is_no_device_is_left_as_torch_leaves_it(device: Any) -> None:
    assert devices.device_type(device) is device
    for scaler in (torch.amp.GradScaler, GradScaler):
        assert scaler(device).scale(torch.ones(())).item() == 65536.0
