"""Copy many small tensors to the host asynchronously, with few copies."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

import torch

from castwise.amp._readback import Readback

Name = TypeVar("Name", bound=Hashable)


class HostCopies(Generic[Name]):
    """Named tensors that are being copied to the host asynchronously.

    Args:
        tensors: One-dimensional tensors by name. Those with the same device, dtype and length share a copy.
    """

    def __init__(self, tensors: Mapping[Name, torch.Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype, int], list[Name]] = {}
        for name, tensor in tensors.items():
            kinds.setdefault((tensor.device, tensor.dtype, len(tensor)), []).append(name)
        self._groups = [(names, Readback(torch.stack([tensors[name] for name in names]))) for names in kinds.values()]

    def wait(self) -> dict[Name, torch.Tensor]:
        """Wait for the copies and return the tensors on the CPU."""
        return {name: row for names, readback in self._groups for name, row in zip(names, readback.wait(), strict=True)}
