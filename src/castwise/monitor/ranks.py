"""The processes that train together, and what they tell each other of their numbers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


class Ranks:
    """All processes of `torch.distributed`, or this one alone if it is not initialised.

    What they say to each other goes through the host's memory, by a gloo group of their own where the default group is
    another one: nothing of it is put into the streams of devices. So all of them have to make theirs at the same time.
    """

    def __init__(self) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.size = 1 if is_alone else dist.get_world_size()
        self.is_first = is_alone or dist.get_rank() == 0
        self._group: Any = None
        if self.size > 1 and dist.get_backend() != "gloo" and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo")

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
