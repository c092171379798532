"""`ShardedModelRanks`: ranks that hold a part of a model each agree on faults, and gather the weights for a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from castwise._warnings import warn_or_print
from castwise.amp._devices import free_bytes
from castwise.monitor._exchange import Exchange, NoExchangeError
from castwise.monitor._gathered_weights import gathered
from castwise.monitor._local_shards import is_dtensor

_MOST_OF_FREE = 0.25  # of the memory that is free, for the parts of the other ranks
_MOST_BYTES = 2**30  # where it is not known how much is free
_LIMIT = 600.0  # seconds that a rank waits for others that replay, as in collectives of the training itself
_LIMIT_OF_STEP = 60.0  # at a step, where ranks have just exchanged gradients: one may leave a step out by its own loss
_FLAGS = 4


class ShardedModelRanks:
    """Gathers the weights of a model on each rank, so that each replays its batch alone.

    Ranks meet in an `Exchange`. If one does not come, or fails, nothing is replayed any more. Each rank says so once.

    Args:
        model: The model, of which the weights can be gathered; see `can_be_gathered`.

    Raises:
        NoExchangeError: Some ranks have not come.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._steps = model, 0
        self._exchange: Exchange | None = Exchange("replay", type(model).__name__)

    @property
    def is_over(self) -> bool:
        """Whether the ranks do not meet any more."""
        return self._exchange is None

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set on any rank; this rank's own ones once ranks do not meet any more.

        All ranks call this at the same steps.

        Args:
            flags: At most four.
        """
        self._steps += 1
        return self._maximum(*flags, limit=_LIMIT_OF_STEP)

    @contextmanager
    def gathered(self, is_wanted: bool) -> Iterator[bool]:
        """Give the modules all of their weights within the context, if any rank wants that and all have the memory.

        No collectives run inside, also where the model's own forward has some to gather weights. At the end, ranks wait
        for the slowest.

        Yields:
            Whether the modules have them.
        """
        wanted, lacks_memory = self.any(is_wanted, not self._has_memory())
        if self._exchange is None or not wanted or lacks_memory:
            yield False
            return
        try:
            with gathered(self._model):
                yield True
        finally:
            self._maximum()

    def _maximum(self, *flags: bool, limit: float = _LIMIT) -> tuple[bool, ...]:
        # Of one size, so that ranks that are not where others are get wrong flags and no error that ends the process.
        numbers = torch.tensor([*flags, *[False] * (_FLAGS - len(flags))], dtype=torch.uint8)
        if self._exchange is not None:
            try:
                self._exchange.maximum_of_step(self._steps, numbers, limit)
            except NoExchangeError as why:
                self._exchange = None
                text = "batches of this model, which is split over ranks, are not replayed any more, nor steps skipped"
                warn_or_print(f"{text} without a scaler: {why}", RuntimeWarning)
        return tuple(map(bool, numbers.tolist()[: len(flags)]))

    def close(self) -> None:
        """Leave the other ranks, which go on without."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def _has_memory(self) -> bool:
        params: list[Any] = [param for param in self._model.parameters() if is_dtensor(param)]
        nbytes = sum(param.numel() * param.element_size() for param in params)
        # The mesh has the device of the gathered weights, also where the parts are kept in the host's memory.
        free = free_bytes(params[0].device_mesh.device_type) if params else None
        return float(nbytes) <= (_MOST_BYTES if free is None else _MOST_OF_FREE * free)
