"""Steps of an optimizer without `scaler.step`, as in scripts that check for inf and NaN themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from castwise.amp.outcomes import DELAY, StepFacts
from castwise.amp.readback import Readback


class StepsByHand:
    """Facts about steps that the script takes itself; none is skipped. They reach the host as late as a scaler's.

    Args:
        optimizers: Number of optimizers.
    """

    def __init__(self, optimizers: int) -> None:
        self._optimizers = optimizers
        self._waiting: deque[tuple[torch.optim.Optimizer, int, bool, Readback]] = deque()

    def add(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Record a step in the scaler's current iteration."""
        scale = scaler._made_scale()
        loss = scaler._iteration.loss(scale.device)
        numbers = torch.stack([scale, scale if loss is None else loss])
        self._waiting.append((optimizer, scaler.iteration, loss is not None, Readback(numbers)))

    def facts(self, *, all_: bool = False) -> Iterator[StepFacts]:
        """Yield the facts that have arrived, each once; with `all_` wait for the rest. They have no numbers yet."""
        while self._waiting:
            optimizer, iteration, has_loss, readback = self._waiting[0]
            if not all_ and not readback.is_on_host and len(self._waiting) <= DELAY * self._optimizers:
                return
            self._waiting.popleft()
            scale, loss = readback.wait().tolist()
            yield StepFacts(0, optimizer, scale, skipped=False, loss=loss if has_loss else None, iteration=iteration)
