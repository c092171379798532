"""Asynchronous copies of numbers from a device to the host; `outcomes` interprets most of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from castwise._torch_private import version
from castwise.amp._devices import copies_asynchronously, is_capturing

DELAY = 2
"""Updates after which the results of a step on an accelerator are read."""


class Readback:
    """A copy of a device tensor on the host: started at once, waited for when it is needed.

    Args:
        tensor: Of any shape. A CPU tensor is not copied, so it must not be written to.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._arrived: torch.Event | None = None
        if copies_asynchronously(tensor.device.type):  # pragma: only on a GPU
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


def any_set(flags: Iterable[torch.Tensor]) -> bool:
    """Return True if a flag is not zero; waits for the copies of all flags and not for their devices."""
    copies = [Readback(flag) for flag in flags]
    return any(bool(copy.wait().item()) for copy in copies)


class Flag:
    """Whether any of several flags is not zero: the copy starts at once, and is waited for when it is needed.

    Args:
        flags: The flags, kept to detect later writes.
        combined: One element, non-zero if any of the flags is, on any device.
        known: Whether any of them is, if the host has read them already.
    """

    def __init__(self, flags: Sequence[torch.Tensor], combined: torch.Tensor, known: bool | None = None) -> None:
        self._flags = [(flag, version(flag)) for flag in flags]
        self._readback = Readback(combined) if known is None else None
        self._known = known

    def is_of(self, flags: Sequence[torch.Tensor]) -> bool:
        """Return True if these are the same flags, and none was written to since."""
        return len(flags) == len(self._flags) and all(
            flag is before and version(flag) == writes
            for flag, (before, writes) in zip(flags, self._flags, strict=True)
        )

    @property
    def is_on_host(self) -> bool:
        """Whether the value can be read without a wait."""
        return self._readback is None or self._known is not None or self._readback.is_on_host

    def __bool__(self) -> bool:
        if self._known is None:
            assert self._readback is not None
            self._known = bool(self._readback.wait().item())
        return self._known


class ScaleBound:
    """A lower bound of a scale on an accelerator, which the host knows without waiting.

    It begins with a number that the host has set. With each update it falls as far as the scale may have fallen. Before
    it gets low, the scale is read back, which takes `DELAY` updates.
    """

    _LOW = 2.0**8  # two back-offs above 1 even if `backoff_factor` is 2**-4

    def __init__(self) -> None:
        self._number = 0.0
        self._written: tuple[torch.Tensor, int] | None = None
        self._readback: Readback | None = None
        self._updates_since: list[Callable[[float], float]] = []
        self._is_used = self._is_in_graph = False

    def of(self, scale: torch.Tensor) -> float:
        """Return the bound; 0.0 if it is unknown, as after a write to the scale that was not noted here."""
        self._is_used = True
        if self._is_in_graph or is_capturing(scale):
            return 0.0
        return self._number if self._is_as_written(scale) else 0.0

    def _is_as_written(self, scale: torch.Tensor) -> bool:
        return self._written is not None and self._written[0] is scale and self._written[1] == version(scale)

    def set(self, scale: torch.Tensor, number: float) -> None:
        """Note that the host has written this number to the scale."""
        self._number, self._written, self._readback = number, (scale, version(scale)), None

    def before_update(self, scale: torch.Tensor) -> None:
        """Forget the bound if the scale was written to since it was last noted."""
        if not self._is_as_written(scale):
            self.set(scale, 0.0)

    def after_update(self, scale: torch.Tensor, lowest_after: Callable[[float], float]) -> None:
        """Note that a schedule has moved the scale.

        Args:
            scale: The scale.
            lowest_after: Returns the lowest scale that a number may have become.
        """
        if self._is_in_graph or is_capturing(scale):
            self._is_in_graph = True  # replays of a CUDA graph move the scale, and the host does not see it
            return
        before, self._number, self._written = self._number, lowest_after(self._number), (scale, version(scale))
        if self._readback is not None:
            self._updates_since.append(lowest_after)
            if len(self._updates_since) >= DELAY:
                self._number = float(self._readback.wait().item())
                for lowest in self._updates_since:
                    self._number = lowest(self._number)
                self._readback = None
        elif self._is_used and self._number < max(1.0, min(before, self._LOW)):
            self._readback, self._updates_since = Readback(scale), []
