"""The numbers of recorded steps: the scaler's own, or those that the training loop gives them."""

from __future__ import annotations

from collections import deque

from castwise.amp.outcomes import StepFacts


class StepNumbers:
    """Counts steps on from the numbers that are given.

    What became of a step may be known two steps later, so a given number waits with the scaler's iteration that it
    belongs to.
    """

    def __init__(self) -> None:
        self.last = 0
        """That of the last step of which there are facts; 0 before any."""
        self._given: int | None = None
        self._waiting: deque[tuple[int, int]] = deque()  # iterations of the scaler, and the numbers of their steps
        self._offset = 0

    @property
    def next(self) -> int:
        """That of the step that comes next, as far as is known."""
        if self._given is not None:
            return self._given
        return (self._waiting[-1][1] if self._waiting else self.last) + 1

    @next.setter
    def next(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"step must be the number of the next step, an integer >= 0, got {number!r}")
        self._given = number

    def begin(self, iteration: int) -> None:
        """Note that the step that comes next is one of the scaler's iteration."""
        if self._given is not None:
            self._waiting.append((iteration, self._given))
            self._given = None

    def of_step_by_hand(self, iteration: int) -> int:
        """Return the number of a step that the scaler does not count, of one of its iterations."""
        counted, number = self.last - self._offset, self.last + 1
        while self._waiting and self._waiting[0][0] <= iteration:
            number = self._waiting.popleft()[1]
        self.last, self._offset = number, number - counted
        return number

    def of(self, facts: StepFacts) -> int:
        """Return the number of a step; steps are asked for in their order, each once."""
        while self._waiting and self._waiting[0][0] <= facts.iteration:
            self._offset = self._waiting.popleft()[1] - facts.number
        self.last = facts.number + self._offset
        return self.last
