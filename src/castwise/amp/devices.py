"""Where mixed precision can run, and what a tensor is on each of several devices."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from castwise import _torch_private


class MultiDeviceReplicator:
    """Copies of a tensor on other devices, each made when it is first asked for."""

    def __init__(self, master_tensor: torch.Tensor) -> None:
        self.master = master_tensor
        self.copies: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        """Return the copy on `device`; never the master itself, so that it may be written to."""
        if device not in self.copies:
            self.copies[device] = self.master.to(device, non_blocking=True, copy=True)
        return self.copies[device]


def is_autocast_available(device_type: str) -> bool:
    """Say whether torch can autocast on a kind of device.

    Args:
        device_type: A device type as in `torch.device(...).type`, for example `"cuda"` or `"cpu"`.

    Raises:
        RuntimeError: torch does not know such a device type.
    """
    return _torch_private.is_autocast_available(device_type)


def amp_definitely_not_available() -> bool:
    """Say whether there is neither CUDA nor XLA, so that mixed precision for `"cuda"` can only be off."""
    return not (torch.cuda.is_available() or _has_torch_xla())


@functools.cache
def _has_torch_xla() -> bool:
    # A failed search walks sys.path (~0.1 ms), and regions are entered often: ask once.
    return find_spec("torch_xla") is not None


def device_type(device: object) -> str:
    """Return the type of a device, given as such or by name; raise if torch knows no such one."""
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a string such as 'cuda' or 'cpu', got {device!r}")
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ValueError(
            f"device must be a type of device that torch knows, such as 'cuda' or 'cpu', got {device!r}"
        ) from error
