"""What tests and benchmarks call of `torch.cuda`, on the simulated accelerator; for `benchmarks.gpu --rehearse`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.accelerator import device

_MEMORY = 8 << 30
_waits: list[str] = []


def is_available() -> bool:
    return True


def device_count() -> int:
    return torch.accelerator.device_count()


def get_device_name(of: Any = None) -> str:
    return "simulated accelerator"


def get_device_properties(of: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), total_memory=_MEMORY)


def synchronize(of: Any = None) -> None:
    torch.accelerator.synchronize()


def set_sync_debug_mode(mode: str) -> None:
    """Fail when "error" ends if the host has waited for anything but an event since it began."""
    device._C.on_wait(_waits.append if mode == "error" else None)
    waits = [wait for wait in _waits if wait != "event"]
    _waits.clear()
    assert mode == "error" or not waits, waits


def empty_cache() -> None:
    pass


def mem_get_info(of: Any = None) -> tuple[int, int]:
    return _MEMORY, _MEMORY


def reset_peak_memory_stats(of: Any = None) -> None:
    pass


def memory_allocated(of: Any = None) -> int:
    return 0


max_memory_allocated = memory_allocated


class Event:
    """Takes the host's time, as kernels are run at once."""

    def __init__(self, *, enable_timing: bool) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._seconds - self._seconds)


def Stream() -> Any:  # noqa: N802  # torch's name
    pytest.skip("the simulated accelerator has no graphs, for which tests use streams")
