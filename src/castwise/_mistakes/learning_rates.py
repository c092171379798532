"""Learning-rate schedules that advance after a skipped step."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from castwise._mistakes.corrected_code import advanced_after_taken_step
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller
from castwise._torch_private import version
from castwise._wrapped_optimizers import unwrapped
from castwise.amp._outcomes import StepFacts

_REMEMBERED = 8


class _Step:
    """A step of an optimizer in one iteration of its scaler."""

    def __init__(self, iteration: int, rates: list[object], place: Place | None) -> None:
        self.iteration, self.rates, self.place, self.skipped = iteration, rates, place, False


class LearningRates(Finder):
    """Finds schedules that change the learning rate after every step, including skipped ones.

    A schedule that advances once per epoch may do so after a skipped step.
    """

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, deque[_Step]] = WeakKeyDictionary()
        self._places: WeakKeyDictionary[torch.optim.Optimizer, Place | None] = WeakKeyDictionary()

    def advanced(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the calling line."""
        self._places[unwrapped(optimizer)] = caller()

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record the learning rate."""
        if not scaler.is_enabled() or not (optimizer in self._places or _has_schedule(optimizer)):
            return  # without a schedule, the script computes the rate itself, on purpose
        steps = self._steps.setdefault(optimizer, deque(maxlen=_REMEMBERED))
        place = self._places[optimizer] if optimizer in self._places else caller()
        steps.append(_Step(scaler.iteration, [_now(group["lr"]) for group in optimizer.param_groups], place))
        self._look(optimizer, list(steps))

    def step_resolved(self, facts: StepFacts) -> None:
        """Record a skipped step."""
        optimizer = facts.optimizer
        if not facts.skipped or optimizer is None:
            return
        for step in self._steps.get(optimizer, ()):
            step.skipped = step.skipped or step.iteration == facts.iteration

    def _look(self, optimizer: torch.optim.Optimizer, steps: list[_Step]) -> None:
        moved = [before.rates != after.rates for before, after in pairwise(steps)]
        for index, (first, second) in enumerate(pairwise(moved)):
            if first and second and (steps[index].skipped or steps[index + 1].skipped):
                self._report(self._places.get(optimizer) or steps[index].place)

    def _report(self, place: Place | None) -> None:
        self.watch.report(
            "schedule-advanced-on-skip",
            "a step was skipped, and the learning-rate schedule advanced anyway: it runs ahead of the optimizer",
            advanced_after_taken_step,
            place,
        )


def _has_schedule(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a schedule of torch's was made for an optimizer: it notes the first rate, and patches `step`."""
    return "step" in vars(optimizer) and any("initial_lr" in group for group in optimizer.param_groups)


def _now(rate: object) -> object:
    return (id(rate), version(rate)) if isinstance(rate, torch.Tensor) else rate
