"""Which steps of several optimizers belong together, and what is on its way of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from castwise.amp.outcomes import DELAY, StepFacts
from castwise.monitor.sample import Sample

if TYPE_CHECKING:
    from castwise.monitor.recording import MicroBatches


@dataclass
class Iteration:
    """The steps from one of an optimizer to the next of the same.

    Args:
        number: From 0.
        seconds: Since the iteration before began; None of the first.
        sample: Its measurements, if it is sampled.
        begun: The optimizers whose gradients have been seen.
        batches: What they were computed from, if that is recorded.
        told: What is known of their steps.
    """

    number: int
    seconds: float | None
    sample: Sample | None = None
    begun: list[torch.optim.Optimizer] = field(default_factory=list)
    batches: dict[torch.optim.Optimizer, MicroBatches] = field(default_factory=dict)
    told: dict[torch.optim.Optimizer, StepFacts] = field(default_factory=dict)


class Iterations:
    """The iterations that are not over or of which not all facts are there; no more than a few.

    Args:
        optimizers: How many there are.
        begin: Called with each new iteration.
    """

    def __init__(self, optimizers: int, begin: Callable[[Iteration], None]) -> None:
        self._optimizers, self._begin = optimizers, begin
        # Facts come within DELAY iterations, if they do: not of an optimizer that the user has had the scaler skip.
        self._open: deque[Iteration] = deque(maxlen=DELAY + 2)
        self._current: Iteration | None = None
        self._began = 0.0

    @property
    def current(self) -> Iteration | None:
        """The last one that has begun."""
        return self._current

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> Iteration:
        """Return the iteration of the step that an optimizer is about to take."""
        if self._current is None or optimizer in self._current.begun:
            now = time.perf_counter()
            number = 0 if self._current is None else self._current.number + 1
            self._current = Iteration(number, now - self._began if number else None)
            self._began = now
            self._open.append(self._current)
            self._begin(self._current)
        self._current.begun.append(optimizer)
        return self._current

    def note_facts(self, optimizer: torch.optim.Optimizer, facts: StepFacts) -> Iteration | None:
        """Return the iteration that the facts of a step belong to; None if its beginning was not seen."""
        for iteration in self._open:
            if optimizer in iteration.begun and optimizer not in iteration.told:
                iteration.told[optimizer] = facts
                return iteration
        return None

    def over(self, *, all_: bool = False) -> Iterator[Iteration]:
        """Yield, once, the iterations of which all is known; or all of which anything is."""
        while self._open:
            oldest = self._open[0]
            is_told = len(oldest.told) == len(oldest.begun)
            is_last = oldest is self._current and len(oldest.begun) < self._optimizers
            if not all_ and (not is_told or is_last):
                return
            self._open.popleft()
            if oldest.told:
                yield oldest
