"""Asynchronous copies of numbers from a device to the host; `outcomes` interprets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from castwise._torch_private import version

# Types of device whose streams and pinned memory are known to work with events.
_WITH_EVENTS = ("cuda", "xpu")


class Readback:
    """A copy of a device tensor on the host: started at once, waited for when it is needed.

    Args:
        tensor: Of any shape. A CPU tensor is not copied, so it must not be written to.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._arrived: torch.Event | None = None
        if tensor.device.type in _WITH_EVENTS:  # pragma: only on a GPU
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.accelerator.current_stream(tensor.device).record_event()

    @property
    def is_on_host(self) -> bool:
        """Whether the tensor was on the host from the start, so that no wait is needed."""
        return self._arrived is None and self._host.device.type == "cpu"

    @property
    def has_arrived(self) -> bool:
        """Whether the tensor has reached the host."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> torch.Tensor:
        """Wait for the copy, and return the tensor on the CPU."""
        if self._arrived is not None:  # pragma: only on a GPU
            self._arrived.synchronize()
        return self._host.cpu()


class Flag:
    """Whether any of several flags is not zero: the copy starts at once, and is waited for when it is needed.

    Args:
        flags: The flags, kept to detect later writes.
        combined: One element, non-zero if any of the flags is, on any device.
    """

    def __init__(self, flags: Sequence[torch.Tensor], combined: torch.Tensor) -> None:
        self._flags = [(flag, version(flag)) for flag in flags]
        self._readback = Readback(combined)
        self._known: bool | None = None

    def is_of(self, flags: Sequence[torch.Tensor]) -> bool:
        """Return True if these are the same flags, and none was written to since."""
        return len(flags) == len(self._flags) and all(
            flag is before and version(flag) == writes
            for flag, (before, writes) in zip(flags, self._flags, strict=True)
        )

    @property
    def is_on_host(self) -> bool:
        """Whether the value can be read without a wait."""
        return self._known is not None or self._readback.is_on_host

    def __bool__(self) -> bool:
        if self._known is None:
            self._known = bool(self._readback.wait().item())
        return self._known
