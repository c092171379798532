"""The ranks of a training run, and their communication."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def rank_now() -> int:
    """Return this process's rank; before `torch.distributed` is initialised, the rank that `torchrun` set."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else 0


class Ranks:
    """All ranks of `torch.distributed`, or this process alone if it is not initialised.

    Ranks communicate through host memory, with a separate gloo group if the default group is not gloo, so no work is
    queued on device streams. All ranks must create this object together.
    """

    def __init__(self) -> None:
        self._count()
        self.size, self.is_first = self.world_size, self.rank == 0
        self._group: Any = None
        if self.size > 1 and dist.get_backend() != "gloo" and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo")

    @classmethod
    def alone(cls) -> Ranks:
        """Return an instance for this process alone, which does not communicate and writes its own records."""
        alone = cls.__new__(cls)
        alone._count()
        alone.size, alone.is_first, alone._group = 1, True, None
        return alone

    def _count(self) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.world_size = 1 if is_alone else dist.get_world_size()
        self.rank = 0 if is_alone else dist.get_rank()

    def gather(self, mine: _T) -> list[_T]:
        """Return the values of all ranks in order. All ranks must call this."""
        if self.size == 1:
            return [mine]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self._group)
        return gathered

    def close(self) -> None:
        """Destroy the gloo group if this object created it."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
