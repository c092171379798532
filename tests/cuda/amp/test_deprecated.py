"""`castwise.cuda.amp`: every name warns once, names its replacement, and then does the right thing."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import castwise
from castwise.amp.grad_scaler import OptState
from castwise.cuda import amp

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "autocast": (lambda: amp.autocast(enabled=False), "castwise.autocast('cuda', ...)"),
    "GradScaler": (lambda: amp.GradScaler(enabled=False), "castwise.GradScaler('cuda', ...)"),
    "custom_fwd": (lambda: amp.custom_fwd(cast_inputs=torch.float32), "castwise.custom_fwd(..., device_type='cuda')"),
    "custom_bwd": (lambda: amp.custom_bwd(lambda ctx: ctx), "castwise.custom_bwd(..., device_type='cuda')"),
    "_cast": (lambda: amp.autocast_mode._cast([], torch.float32), "castwise.amp.autocast_mode._cast(value, 'cuda', "),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_use_warns_once_at_the_callers_line(name: str) -> None:
    call, replacement = CALLS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [warning.category for warning in caught] == [FutureWarning]
    assert replacement in str(caught[0].message)
    line = inspect.getsourcelines(call)[1]
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_arguments_keep_torchs_positions() -> None:
    region = amp.autocast(False, torch.bfloat16, False)
    assert (region.device, region._enabled, region.fast_dtype, region._cache_enabled) == (
        "cuda",
        False,
        torch.bfloat16,
        False,
    )
    scaler = amp.GradScaler(2.0, 3.0, 0.25, 7, False)
    assert (scaler._init_scale, scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2.0, 3.0, 0.25)
    assert (scaler.get_growth_interval(), scaler.is_enabled(), scaler._device) == (7, False, "cuda")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_decorators_and_casts_are_for_cuda() -> None:
    fwd = amp.custom_fwd(cast_inputs=torch.float16)
    assert fwd(lambda *tensors: tensors[0].dtype)(torch.ones(1)) is torch.float32
    assert amp.custom_fwd(len)([1, 2]) == 2
    tensor = torch.ones(1)
    assert amp.autocast_mode._cast([tensor], torch.float16)[0] is tensor
    bwd: Any = amp.custom_bwd(lambda ctx, grad: grad)
    context = type("Context", (), {"_fwd_used_autocast": False, "_dtype": torch.float16})()
    assert bwd(context, 3) == 3


@pytest.fixture
def in_cudas_region() -> Iterator[None]:
    """The thread's state inside `autocast("cuda", torch.bfloat16)`, which needs no GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == (True, torch.bfloat16)
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("in_cudas_region")
def test_casts_in_cudas_region_are_of_cudas_tensors() -> None:
    def forward(*tensors: torch.Tensor) -> Any:
        return [tensor.dtype for tensor in tensors], torch.is_autocast_enabled("cuda")

    with FakeTensorMode():
        tensors = [torch.ones(1, device="cuda"), torch.ones(1)]
        cast = [torch.float16, torch.float32]
        assert amp.custom_fwd(cast_inputs=torch.float16)(forward)(*tensors) == (cast, False)
        assert amp.custom_fwd(forward)(*tensors) == ([torch.float32] * 2, True)
        assert [tensor.dtype for tensor in amp.autocast_mode._cast(tensors, torch.float16)] == cast


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("in_cudas_region")
@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_a_backward_has_the_state_of_its_forward(cast_inputs: torch.dtype | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("castwise.amp._devices.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=cast_inputs)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @amp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            return 2 * grad

    loss = Double.apply(torch.ones(1, requires_grad=True))
    torch.set_autocast_enabled("cuda", False)
    loss.backward()
    torch.set_autocast_enabled("cuda", True)
    assert seen == [(cast_inputs is None, torch.bfloat16)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_region_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.amp._devices.amp_definitely_not_available", lambda: False)
    with amp.autocast():
        assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == (True, torch.float16)
        assert torch.is_autocast_cache_enabled()
    with amp.autocast(cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cuda")


# torch 2.12 makes an object of the Function while it traces, which it deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_nothing_breaks_a_graph() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @amp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    @torch.compile(fullgraph=True, backend="aot_eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        with amp.autocast(enabled=False):
            return amp.autocast_mode._cast([Double.apply(x)], torch.float16)[0]

    x = torch.ones(2, requires_grad=True)
    forward(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_the_rest_is_the_same_object() -> None:
    assert amp.grad_scaler.OptState is OptState
    assert amp.amp_definitely_not_available is amp.common.amp_definitely_not_available
    assert amp.amp_definitely_not_available() == torch.cuda.amp.common.amp_definitely_not_available()


@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.parametrize("has_xla", [False, True])
def test_xla_can_stand_in_for_cuda(has_cuda: bool, has_xla: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr("castwise.amp._devices._has_torch_xla", lambda: has_xla)
    assert amp.amp_definitely_not_available() == (not has_cuda and not has_xla)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_region_on_a_gpu() -> None:
    x = torch.ones(2, 2, device="cuda")
    with amp.autocast():
        assert (x @ x).dtype is torch.float16
    assert isinstance(amp.GradScaler().scale(x.sum()), torch.Tensor)
    assert castwise.cuda.amp is amp
