"""Calls that wait for the outcome of a step: of learning-rate schedulers, weight averages, ..."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise.amp import _measure as measure
from castwise.amp._readback import DELAY, Flag


@dataclass(slots=True, eq=False)
class LastStep:
    """An optimizer's last step: its result, and the schedulers that it has advanced."""

    iteration: int
    """The step's `GradScaler.iteration`."""
    found_infs: Sequence[torch.Tensor] = ()
    """One element each, not 0 if a gradient was not finite; empty if the scaler is disabled."""
    _flag: Flag | None = None
    _followers: list[object] = field(default_factory=list)
    step_taken: bool | None = None
    """Whether the step was taken; None if the host has not read `found_infs`."""

    def claim(self, follower: object) -> bool:
        """Note that a scheduler advances because of this step; return False if it already has."""
        if any(follower is other for other in self._followers):
            return False
        self._followers.append(follower)
        return True

    def skip_flag(self) -> Flag | None:
        """Return a flag for whether the step was skipped; None if the scaler is disabled. Reading it may wait."""
        if self._flag is None and self.found_infs:
            known = None if self.step_taken is None else not self.step_taken
            self._flag = Flag(self.found_infs, measure.combine(self.found_infs, self.found_infs[0]), known)
        return self._flag


class _Call(NamedTuple):
    iteration: int
    flag: Flag | None
    call: Callable[[], object]


class AfterSteps:
    """A queue of calls, each made in order if its step was taken."""

    def __init__(self) -> None:
        self.calls: deque[_Call] = deque()

    def add(self, step: LastStep, call: Callable[[], object]) -> None:
        """Queue a call that is made if `step` was taken."""
        self.calls.append(_Call(step.iteration, step.skip_flag(), call))

    def run(self, updates: int | None = None) -> None:
        """Run the calls whose step result is known without a wait, or at least `DELAY` updates old.

        Args:
            updates: Number of updates so far. None runs all calls, which waits for the device.
        """
        while self.calls:
            first = self.calls[0]
            is_known = first.flag is None or first.flag.is_on_host
            if not (updates is None or is_known or updates - first.iteration >= DELAY):
                return
            self.calls.popleft()
            if not first.flag:  # the read may wait for the device; the flag is None if the scaler is disabled
                first.call()


def scheduler_call(scheduler: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return a function that advances a scheduler: by its `step`, or by a call if it is a function.

    Raises:
        TypeError: `scheduler` is neither, or it is a module, whose call would run its forward.
    """
    step = getattr(scheduler, "step", None)
    if callable(step):
        return lambda: step(*args, **kwargs)
    if isinstance(scheduler, nn.Module):
        raise TypeError(
            f"{type(scheduler).__name__} is a module, and a call would run its forward: "
            "pass a function, such as lambda: average.update_parameters(model)"
        )
    if not callable(scheduler):
        raise TypeError(f"scheduler must be a function or have a step() method, got {type(scheduler).__name__}")
    return lambda: scheduler(*args, **kwargs)
