"""Tests on the simulated accelerator, run by `make accelerator`. Where it cannot be built, they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.accelerator.availability import why_unavailable

_FOLDER = Path(__file__).parent
if why_unavailable():
    collect_ignore = [path.name for path in _FOLDER.glob("test_*.py") if path.name != "test_device.py"]


@pytest.fixture(autouse=True)
def _no_hazards(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave one tensor in use on two streams at once, or write to pinned memory before it is copied."""
    if why_unavailable():
        yield
        return
    import torch
    from tests.accelerator import device

    device.take_hazards()
    yield
    torch.accelerator.set_device_index(0)
    assert device.take_hazards() == []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := why_unavailable():
        terminalreporter.section("NO TEST RAN ON THE SIMULATED ACCELERATOR", red=True, bold=True)
        terminalreporter.line(reason, red=True)
