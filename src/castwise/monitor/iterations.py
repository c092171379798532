"""Which steps of several optimizers belong together, and the pending results of each."""

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
    from castwise.diagnosis.recording import MicroBatches


@dataclass
class Iteration:
    """The steps from one of an optimizer to the next of the same.

    Args:
        number: From 1.
        seconds: Since the iteration before began; None of the first.
        sample: Its measurements, if it is sampled.
        begun: The optimizers whose gradients have been seen, with the number of their scaler's iteration.
        batches: What those gradients were computed from, if that is recorded; the same object for several optimizers
            if it was one backward for all of them.
        told: What is known of their steps.
        left_out: Those that were not stepped after all.
    """

    number: int
    seconds: float | None
    sample: Sample | None = None
    begun: dict[torch.optim.Optimizer, int] = field(default_factory=dict)
    batches: dict[torch.optim.Optimizer, MicroBatches] = field(default_factory=dict)
    told: dict[torch.optim.Optimizer, StepFacts] = field(default_factory=dict)
    left_out: set[torch.optim.Optimizer] = field(default_factory=set)

    def note_batches(self, optimizer: torch.optim.Optimizer, recorded: MicroBatches) -> None:
        """Take note of what was recorded since the optimizer before; if that is nothing, they share a backward."""
        before = next(reversed(self.batches.values()), None)
        self.batches[optimizer] = recorded if before is None or len(recorded) else before

    def leave_out_before(self, number: int) -> None:
        """Expect no facts any more of steps in the scaler's iterations before one of which there are facts."""
        late = {each for each, began in self.begun.items() if began < number and each not in self.told}
        for optimizer in late - self.left_out:
            self.left_out.add(optimizer)
            self.batches.pop(optimizer, None)
            if self.sample is not None:
                self.sample.forget_weights(optimizer)

    def expects(self, optimizer: torch.optim.Optimizer, number: int) -> bool:
        """Return True if gradients were seen for a step in the scaler's iteration, and no facts of it."""
        return self.begun.get(optimizer) == number and optimizer not in self.told

    @property
    def is_told(self) -> bool:
        """Whether all is known of it that there is to know."""
        return len(self.told) + len(self.left_out) == len(self.begun)


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

    def note_gradients(self, optimizer: torch.optim.Optimizer, number: int) -> Iteration:
        """Return the iteration of the step that an optimizer is about to take, in an iteration of its scaler's."""
        last = self._current
        if last is not None and optimizer not in last.begun:
            last.begun[optimizer] = number
            return last
        now = time.perf_counter()
        self._current = new = Iteration(1, None) if last is None else Iteration(last.number + 1, now - self._began)
        new.begun[optimizer] = number
        self._began = now
        self._open.append(new)
        if last is not None and last.sample is not None:
            last.sample.forget_weights()  # an optimizer that has not stepped by now does not step
        self._begin(new)
        return new

    def note_facts(self, optimizer: torch.optim.Optimizer, facts: StepFacts) -> Iteration | None:
        """Return the iteration that the facts of a step belong to; None if its beginning was not seen."""
        found = None
        for iteration in self._open:
            iteration.leave_out_before(facts.iteration)
            if iteration.expects(optimizer, facts.iteration):
                found = iteration
        if found is not None:
            found.told[optimizer] = facts
            if facts.skipped and found.sample is not None:
                found.sample.forget_weights(optimizer)
        return found

    def over(self, *, all_: bool = False) -> Iterator[Iteration]:
        """Yield, once, the iterations of which all is known; or all of which anything is."""
        while self._open:
            oldest = self._open[0]
            is_last = oldest is self._current and len(oldest.begun) < self._optimizers
            if not all_ and (not oldest.is_told or is_last):
                return
            self._open.popleft()
            if oldest.told:
                yield oldest
            oldest.sample = None  # of the current one there is a reference left
            oldest.batches.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._open.clear()
        self._current = None
