"""The processes that train together, and what they tell each other."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def rank_now() -> int:
    """Return the number of this process among those that train together; before they have met, that of `torchrun`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else 0


class Ranks:
    """All processes of `torch.distributed`, or this one alone if it is not initialised.

    What they say to each other goes through the host's memory, by their own gloo group where the default group is
    another one: nothing of it is put into the streams of devices. So all of them have to make theirs at the same time.
    """

    def __init__(self) -> None:
        self._count()
        self.size, self.is_first = self.world_size, self.rank == 0
        self._group: Any = None
        if self.size > 1 and dist.get_backend() != "gloo" and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo")

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process by itself, whatever others there are: it hears of none, and writes what it knows."""
        alone = cls.__new__(cls)
        alone._count()
        alone.size, alone.is_first, alone._group = 1, True, None
        return alone

    def _count(self) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.world_size = 1 if is_alone else dist.get_world_size()
        self.rank = 0 if is_alone else dist.get_rank()

    def gather(self, mine: _T) -> list[_T]:
        """Return what each rank has given, in their order; all of them have to call it."""
        if self.size == 1:
            return [mine]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self._group)
        return gathered

    def close(self) -> None:
        """Leave the group, if it was made for this."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
