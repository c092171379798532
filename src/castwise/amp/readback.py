"""A flag on its way from a device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from castwise._torch_private import version

# Types of device whose streams and pinned memory are known to work with events.
_WITH_EVENTS = ("cuda", "xpu")


class Readback:
    """Whether any of some flags is not zero: asked for at once, waited for when it is needed.

    Args:
        flags: Where they come from; kept to tell whether they are still the same.
        combined: One element, non-zero if any of them is, on any device.
    """

    def __init__(self, flags: Sequence[torch.Tensor], combined: torch.Tensor) -> None:
        self._flags = [(flag, version(flag)) for flag in flags]
        self._host = combined
        self._arrived: torch.Event | None = None
        if combined.device.type in _WITH_EVENTS:
            self._host = torch.empty((), dtype=combined.dtype, device="cpu", pin_memory=True)
            self._host.copy_(combined, non_blocking=True)
            self._arrived = torch.accelerator.current_stream(combined.device).record_event()

    def is_of(self, flags: Sequence[torch.Tensor]) -> bool:
        """Say whether it was made from these flags as they are now."""
        return len(flags) == len(self._flags) and all(
            flag is before and version(flag) == writes
            for flag, (before, writes) in zip(flags, self._flags, strict=True)
        )

    def __bool__(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._host.item())
