"""`castwise.cuda.amp`: every name warns once, names its replacement, and then does the right thing."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    with pytest.raises(ValueError, match="init_scale must be"):
        amp.GradScaler(0.0)


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


def test_the_rest_is_the_same_object() -> None:
    assert amp.grad_scaler.OptState is OptState
    assert amp.amp_definitely_not_available is amp.common.amp_definitely_not_available
    assert amp.amp_definitely_not_available() == torch.cuda.amp.common.amp_definitely_not_available()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_region_on_a_gpu() -> None:
    x = torch.ones(2, 2, device="cuda")
    with amp.autocast():
        assert (x @ x).dtype is torch.float16
    assert isinstance(amp.GradScaler().scale(x.sum()), torch.Tensor)
    assert castwise.cuda.amp is amp
