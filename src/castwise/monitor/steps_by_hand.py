"""Steps that an optimizer takes without its scaler's `step`, as in scripts that look for infs and NaNs themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from castwise.amp.outcomes import DELAY, StepFacts
from castwise.amp.readback import Readback


class StepsByHand:
    """Facts of such steps, which reach the host as late as those of a scaler's: none of them was skipped.

    Args:
        optimizers: How many there are.
    """

    def __init__(self, optimizers: int) -> None:
        self._optimizers = optimizers
        self._waiting: deque[tuple[torch.optim.Optimizer, int, bool, Readback]] = deque()

    def add(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Note a step of the scaler's iteration under way."""
        scale = scaler._made_scale()
        loss = scaler._iteration.loss(scale.device)
        numbers = torch.stack([scale, scale if loss is None else loss])
        self._waiting.append((optimizer, scaler.iteration, loss is not None, Readback(numbers)))

    def facts(self, *, all_: bool = False) -> Iterator[StepFacts]:
        """Yield, once, what is known; or all, which waits for the device. They have no numbers yet."""
        while self._waiting:
            optimizer, iteration, has_loss, readback = self._waiting[0]
            if not all_ and not readback.is_on_host and len(self._waiting) <= DELAY * self._optimizers:
                return
            self._waiting.popleft()
            scale, loss = readback.wait().tolist()
            yield StepFacts(0, optimizer, scale, skipped=False, loss=loss if has_loss else None, iteration=iteration)
