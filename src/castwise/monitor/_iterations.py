"""Group the steps of several optimizers into iterations, and keep their pending results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from castwise.amp._outcomes import StepFacts
from castwise.amp._readback import DELAY
from castwise.monitor._sample import Sample

if TYPE_CHECKING:
    from castwise.diagnosis._recording import MicroBatches


@dataclass
class MonitoredIteration:
    """The steps of all optimizers until one of them steps again.

    Args:
        number: Number of the iteration, from 1.
        seconds: Time since the previous iteration began; None for the first.
        sample: Its measurements, if it is sampled.
        started: The optimizers whose gradients were seen, with the number of the scaler's iteration.
        batches: The recorded batches that these gradients come from; optimizers that share a backward share the object.
        facts: The facts received about their steps.
        unstepped: The optimizers that did not step after all.
        rates: Learning rates, if they are recorded; None for unknown ones.
        is_combined: Whether ranks combine their samples of it, including those that have none.
    """

    number: int
    seconds: float | None
    sample: Sample | None = None
    started: dict[torch.optim.Optimizer, int] = field(default_factory=dict)
    batches: dict[torch.optim.Optimizer, MicroBatches] = field(default_factory=dict)
    facts: dict[torch.optim.Optimizer, StepFacts] = field(default_factory=dict)
    unstepped: set[torch.optim.Optimizer] = field(default_factory=set)
    rates: dict[torch.optim.Optimizer, float | None] = field(default_factory=dict)
    is_combined: bool = False

    def note_batches(self, optimizer: torch.optim.Optimizer, recorded: MicroBatches) -> None:
        """Assign batches recorded since the previous optimizer. If there are none, the two share a backward."""
        before = next(reversed(self.batches.values()), None)
        self.batches[optimizer] = recorded if before is None or len(recorded) else before

    def leave_out_before(self, number: int) -> None:
        """Stop waiting for facts of steps in scaler iterations before `number`."""
        late = {
            optimizer for optimizer, began in self.started.items() if began < number and optimizer not in self.facts
        }
        for optimizer in late - self.unstepped:
            self.unstepped.add(optimizer)
            self.batches.pop(optimizer, None)
            if self.sample is not None:
                self.sample.forget_weights(optimizer)

    def expects(self, optimizer: torch.optim.Optimizer, number: int) -> bool:
        """Return True if gradients but no facts were seen for a step in this iteration of the scaler."""
        return self.started.get(optimizer) == number and optimizer not in self.facts

    @property
    def is_reported(self) -> bool:
        """Whether all facts have arrived."""
        return len(self.facts) + len(self.unstepped) == len(self.started)


class Iterations:
    """The few iterations that are still running or waiting for facts.

    Args:
        optimizers: Number of optimizers.
        begin: Called with each new iteration.
    """

    def __init__(self, optimizers: int, begin: Callable[[MonitoredIteration], None]) -> None:
        self._optimizers, self._begin = optimizers, begin
        # Facts arrive within DELAY iterations or never, as when the script does not step an optimizer.
        self._open: deque[MonitoredIteration] = deque(maxlen=DELAY + 2)
        self._current: MonitoredIteration | None = None
        self._began = 0.0

    @property
    def current(self) -> MonitoredIteration | None:
        """The latest iteration."""
        return self._current

    def note_gradients(self, optimizer: torch.optim.Optimizer, number: int) -> MonitoredIteration:
        """Return the iteration of the step that an optimizer is about to take.

        Args:
            optimizer: The optimizer.
            number: Number of the scaler's iteration.
        """
        last = self._current
        if last is not None and optimizer not in last.started:
            last.started[optimizer] = number
            return last
        now = time.perf_counter()
        self._current = new = (
            MonitoredIteration(1, None) if last is None else MonitoredIteration(last.number + 1, now - self._began)
        )
        new.started[optimizer] = number
        self._began = now
        self._open.append(new)
        if last is not None and last.sample is not None:
            last.sample.forget_weights()  # an optimizer that has not stepped by now never will
        self._begin(new)
        return new

    def note_facts(self, optimizer: torch.optim.Optimizer, facts: StepFacts) -> MonitoredIteration | None:
        """Return the iteration that the facts of a step belong to; None if its start was not seen."""
        found = None
        for iteration in self._open:
            iteration.leave_out_before(facts.iteration)
            if iteration.expects(optimizer, facts.iteration):
                found = iteration
        if found is not None:
            found.facts[optimizer] = facts
            if facts.skipped and found.sample is not None:
                found.sample.forget_weights(optimizer)
        return found

    def over(self, *, all_: bool = False) -> Iterator[MonitoredIteration]:
        """Yield the complete iterations, each once; with `all_` all iterations that have any facts."""
        while self._open:
            oldest = self._open[0]
            is_last = oldest is self._current and len(oldest.started) < self._optimizers
            if not all_ and (not oldest.is_reported or is_last):
                return
            self._open.popleft()
            if oldest.facts:
                yield oldest
            oldest.sample = None  # `_current` may still refer to it
            oldest.batches.clear()

    def clear(self) -> None:
        """Forget all iterations."""
        self._open.clear()
        self._current = None
