"""`Board`: ranks write texts for each other and read them later, and none waits for any."""

from __future__ import annotations

import zlib
from typing import Any

import torch.distributed as dist

_dist: Any = dist  # whose stubs do not export all public names


class Board:
    """Texts in a store that ranks share, under keys of its own. No collective, and no wait.

    The n-th board of a subject on a rank is the same as the n-th of that subject on the others.

    Args:
        store: The store, a `torch.distributed.Store`.
        rank: This rank.
        subject: What the board is for, the same on all ranks.

    Raises:
        RuntimeError: The store failed. So do all methods.
    """

    def __init__(self, store: Any, rank: int, subject: str) -> None:
        ours = _dist.PrefixStore(f"castwise/board/{zlib.crc32(subject.encode())}", store)
        self._store = _dist.PrefixStore(str(ours.add(f"of rank {rank}", 1)), ours)

    @classmethod
    def of_all_ranks(cls, subject: str) -> Board:
        """Return a board in the store of the default group.

        Raises:
            RuntimeError: The group has no store, or the store failed.
        """
        world: Any = dist.group.WORLD
        if not hasattr(world, "get_group_store"):
            raise RuntimeError("this version of torch does not give access to its store")
        return cls(world.get_group_store(), dist.get_rank(), subject)

    def write(self, key: str, text: str) -> None:
        """Write a text for all ranks, instead of an earlier one."""
        self._store.set(key, text)

    def read(self, key: str) -> str:
        """Return the text under a key, empty if there is none yet."""
        return self._store.get(key).decode() if self._store.check([key]) else ""  # `get` alone would wait for it

    def count(self, key: str) -> int:
        """Count one more, and return the count of all ranks so far."""
        return int(self._store.add(key, 1))

    def counted(self, key: str) -> int:
        """Return the count of all ranks so far."""
        return int(self._store.add(key, 0))
