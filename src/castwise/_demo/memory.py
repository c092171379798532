"""Peak memory, from high-water marks kept by torch and the kernel; sampling would miss the peak."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import torch

_SELF = Path("/proc/self")


class PeakMemory:
    """The peak memory since this object was created, minus the memory in use at that time.

    On a GPU this is torch's own count. On Linux it is the growth of the process's resident set, whose high-water mark
    the kernel resets on request. Other systems have no mark that can be reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            self._before = _reset_resident_peak()

    def read(self) -> int | None:
        """Return the growth in bytes, or None if unknown."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _status_bytes("VmHWM") - self._before)


def _reset_resident_peak() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(AttributeError):  # musl has no such call, and returns memory without it
        # glibc keeps the memory that the last training run freed, so the next one would appear to need none.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_SELF / "clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except (OSError, LookupError):  # a container without a writable /proc
        return None


def _status_bytes(field: str) -> int:
    fields = dict(line.split(":", 1) for line in (_SELF / "status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024
