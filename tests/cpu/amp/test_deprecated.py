"""`castwise.cpu.amp`: both names warn once, name their replacement, and then do the right thing."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from castwise.cpu import amp

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "autocast": (lambda: amp.autocast(), "castwise.autocast('cpu', ...)"),
    "GradScaler": (lambda: amp.GradScaler(), "castwise.GradScaler('cpu', ...)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_use_warns_once_at_the_callers_line(name: str) -> None:
    call, replacement = CALLS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [warning.category for warning in caught] == [FutureWarning]
    assert replacement in str(caught[0].message)
    assert (caught[0].filename, caught[0].lineno) == (__file__, inspect.getsourcelines(call)[1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_region_and_a_scaler_for_the_cpu() -> None:
    x = torch.ones(2, 2)
    with amp.autocast():
        assert (x @ x).dtype is torch.bfloat16
    with amp.autocast(True, torch.float16, False):
        assert (x @ x).dtype is torch.float16
        assert not torch.is_autocast_cache_enabled()
    scaler = amp.GradScaler(2.0, 3.0, 0.25, 7, True)
    assert scaler.scale(torch.ones(())).item() == 2.0
    assert scaler.state_dict() == {
        "scale": 2.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
        "steps_taken": 0,
        "steps_skipped": 0,
        "skips_in_a_row": 0,
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_deprecated_region_breaks_no_graph() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        with amp.autocast():
            return x @ x

    assert forward(torch.ones(2, 2)).dtype is torch.bfloat16
