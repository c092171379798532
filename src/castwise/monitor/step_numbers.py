"""The numbers of recorded steps: counted, or as the training loop gives them."""

from __future__ import annotations

from collections import deque


class StepNumbers:
    """Counts steps on from the numbers that are given.

    Counted are the monitor's own steps: the scaler's count has those of other models, too. What became of a step may be
    known two steps later, so a given number waits with the scaler's iteration that it belongs to.
    """

    def __init__(self) -> None:
        self.last = 0
        """That of the last step of which there are facts; 0 before any."""
        self._counted = 0  # by the scaler
        self._given: int | None = None
        self._waiting: deque[tuple[int, int]] = deque()  # iterations of the scaler, and the numbers of their steps

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

    def start(self, counted: int) -> None:
        """Count on from the steps that a scaler has counted: those of a checkpoint, most often."""
        self.last = self._counted = counted

    def of(self, iteration: int, counted: int | None = None) -> int:
        """Return the number of a step; steps are asked for in their order, each once.

        Args:
            iteration: The scaler's, in which it was.
            counted: The scaler's number for it, if it counts it.
        """
        if counted is not None:
            if counted <= self._counted:  # it has loaded an earlier state
                self.last = counted - 1
            self._counted = counted
        self.last += 1
        while self._waiting and self._waiting[0][0] <= iteration:
            self.last = self._waiting.popleft()[1]
        return self.last
