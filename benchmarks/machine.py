"""The machine, the versions and the free memory, which measurements depend on."""

from __future__ import annotations

import datetime
import gc
import os
import platform
from pathlib import Path
from typing import Any

import torch

import castwise

_CPUS = Path("/proc/cpuinfo")
_MEMORY = Path("/proc/meminfo")
# A container's memory limit and use, in both versions of the kernel's control groups.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def machine(device: str, command: str) -> dict[str, Any]:
    """Return the machine, the versions, the date and the command of a measurement.

    Args:
        device: "cpu" or "cuda".
        command: The command that repeats the measurement.

    Example:
        >>> machine("cpu", "python -m benchmarks")["command"]
        'python -m benchmarks'
    """
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "castwise": castwise.__version__,
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def described(about: dict[str, Any]) -> str:
    """Format a result of `machine`, without the command, for a line above measurements.

    Example:
        >>> of = {"device": "a CPU", "cores": 4, "threads": 1, "torch": "2.13.0", "python": "3.12.1"}
        >>> described({**of, "date": "2026-11-01"})
        'a CPU, 4 cores, 1 thread, torch 2.13.0, Python 3.12.1, 2026-11-01'
    """
    return (
        f"{about['device']}, {_number(about['cores'], 'core')}, {_number(about['threads'], 'thread')}, "
        f"torch {about['torch']}, Python {about['python']}, {about['date']}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _cpu() -> str:
    if _CPUS.exists():
        for line in _CPUS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_bytes(device: str) -> int | None:
    """Return the free memory of a device in bytes, or None if unknown."""
    gc.collect()  # optimizers and their tensors form reference cycles
    if device == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])
    if not _MEMORY.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    free = [int(fields["MemAvailable"].split()[0]) * 1024]
    for limit, taken in _GROUPS:
        try:
            free.append(int(Path(limit).read_text()) - int(Path(taken).read_text()))
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
    return min(free)


def why_it_does_not_fit(needed: int, device: str) -> str | None:
    """Return the reason to skip a measurement that needs the given bytes; None if it fits."""
    free = free_bytes(device)
    if free is None or needed <= free:
        return None
    return f"left out: needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
