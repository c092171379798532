"""The numbers of recorded steps, counted or set by the training loop."""

from __future__ import annotations

from collections import deque


class StepNumbers:
    """Counts steps, starting from any number that is set.

    It counts the monitor's own steps, because the scaler also counts steps of other models. The outcome of a step may
    arrive two steps later, so a number that was set is kept with its scaler iteration.
    """

    def __init__(self) -> None:
        self.last = 0
        """The number of the last step with facts; 0 before the first."""
        self._counted = 0  # the scaler's count
        self._given: int | None = None
        self._waiting: deque[tuple[int, int]] = deque()  # iterations of the scaler, and the numbers of their steps

    @property
    def next(self) -> int:
        """The number of the next step, as far as it is known."""
        if self._given is not None:
            return self._given
        return (self._waiting[-1][1] if self._waiting else self.last) + 1

    @next.setter
    def next(self, number: int) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"step must be an integer >= 0, got {number!r}")
        self._given = number

    def current(self, iteration: int, counted: int) -> int:
        """Return the number of the step that is about to be taken. Facts of steps before may not have arrived.

        Args:
            iteration: The scaler's iteration.
            counted: The scaler's count of the steps before.
        """
        if self._given is not None:
            return self._given
        if self._waiting:
            begun, number = self._waiting[-1]
            return number + iteration - begun
        return self.last + 1 + counted - self._counted

    def begin(self, iteration: int) -> None:
        """Assign a number that was set to the scaler's iteration, in which the next step runs."""
        if self._given is not None:
            self._waiting.append((iteration, self._given))
            self._given = None

    def start(self, counted: int) -> None:
        """Start from a scaler's step count, which usually comes from a checkpoint."""
        self.last = self._counted = counted

    def of(self, iteration: int, counted: int | None = None) -> int:
        """Return the number of a step. Must be called once per step, in order.

        Args:
            iteration: The scaler's iteration in which the step ran.
            counted: The scaler's number for the step, if it counts the step.
        """
        if counted is not None:
            if counted <= self._counted:  # the scaler loaded an earlier state
                self.last = counted - 1
            self._counted = counted
        self.last += 1
        while self._waiting and self._waiting[0][0] <= iteration:
            self.last = self._waiting.popleft()[1]
        return self.last
