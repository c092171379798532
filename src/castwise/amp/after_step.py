"""Calls that wait until it is known whether a step was taken: of learning-rate schedules, averages of weights, ..."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise.amp import measure
from castwise.amp.outcomes import DELAY
from castwise.amp.readback import Flag


@dataclass(slots=True, eq=False)
class LastStep:
    """The last step of an optimizer: what was found, and which schedules were advanced because of it."""

    iteration: int
    """In which it was, as `GradScaler.iteration`."""
    found_infs: Sequence[torch.Tensor] = ()
    """One element each, not 0 if a gradient was not finite; empty if the scaler is disabled."""
    _flag: Flag | None = None
    _followers: list[object] = field(default_factory=list)

    def follow(self, follower: object) -> bool:
        """Note a schedule that advances because of this step; return False if it has done so before."""
        if any(follower is other for other in self._followers):
            return False
        self._followers.append(follower)
        return True

    def is_skipped(self) -> Flag | None:
        """Return whether it was skipped, perhaps not known on the host yet; None if the scaler is disabled."""
        if self._flag is None and self.found_infs:
            self._flag = Flag(self.found_infs, measure.combine(self.found_infs, self.found_infs[0]))
        return self._flag


class _Call(NamedTuple):
    iteration: int
    flag: Flag | None
    call: Callable[[], object]


class AfterSteps:
    """Calls in the order in which they were asked for, each made if its step was taken."""

    def __init__(self) -> None:
        self.calls: deque[_Call] = deque()

    def add(self, step: LastStep, call: Callable[[], object]) -> None:
        """Ask for a call if a step was taken."""
        self.calls.append(_Call(step.iteration, step.is_skipped(), call))

    def run(self, updates: int | None = None) -> None:
        """Make the calls that are due after so many updates: of steps that the host knows of, or `DELAY` updates ago.

        Without a number all of them are due, which waits for the device.
        """
        while self.calls:
            first = self.calls[0]
            is_known = first.flag is None or first.flag.is_on_host
            if not (updates is None or is_known or updates - first.iteration >= DELAY):
                return
            self.calls.popleft()
            if not first.flag:  # which may wait for the device; None if the scaler is disabled
                first.call()


def advance_of(scheduler: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return what advances a schedule: its `step`, or itself if it is a function.

    Raises:
        TypeError: It is neither, or a module, whose forward is hardly meant.
    """
    step = getattr(scheduler, "step", None)
    if callable(step):
        return lambda: step(*args, **kwargs)
    if isinstance(scheduler, nn.Module):
        raise TypeError(
            f"{type(scheduler).__name__} is a module, whose call is its forward: "
            "give a function, such as lambda: average.update_parameters(model)"
        )
    if not callable(scheduler):
        raise TypeError(f"expected something with a step() or a function, got {type(scheduler).__name__}")
    return lambda: scheduler(*args, **kwargs)
