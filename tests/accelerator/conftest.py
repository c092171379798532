"""Tests on an accelerator: `make accelerator` simulates it, `make gpu` has one. Without it, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.accelerator.availability import DEVICE, IS_SIMULATED, why_unavailable

_FOLDER = Path(__file__).parent
if why_unavailable():
    collect_ignore = [path.name for path in _FOLDER.glob("test_*.py") if path.name != "test_device.py"]
elif not IS_SIMULATED:
    collect_ignore = ["test_device.py", "test_counts.py"]  # of the simulation, and counts of launches


@pytest.fixture(autouse=True)
def _no_hazards(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave one tensor in use on two streams at once, or write to pinned memory before it is copied."""
    if why_unavailable() or not IS_SIMULATED:
        yield
        return
    import torch
    from tests.accelerator import device

    device.take_hazards()
    yield
    torch.accelerator.set_device_index(0)
    assert device.take_hazards() == []


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of two ranks whose other rank does the same; its collectives run on the device, as NCCL's do."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def all_reduce(tensor: Any, op: Any = torch.distributed.ReduceOp.SUM, *args: Any) -> None:
        if op == torch.distributed.ReduceOp.SUM:
            tensor.mul_(2.0)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo," + f"{DEVICE}:nccl")
    yield
    torch.distributed.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := why_unavailable():
        terminalreporter.section("NO TEST RAN ON AN ACCELERATOR", red=True, bold=True)
        terminalreporter.line(reason, red=True)
