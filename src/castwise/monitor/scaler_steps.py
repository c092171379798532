"""What a monitor hears of scalers: whether one is stepping, what it skips, and that none takes the monitor's steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from castwise._warnings import warn
from castwise._wrapped_optimizers import unwrapped
from castwise.amp.gradients import params_of
from castwise.amp.observers import OBSERVERS, Observer

_UPDATES = 3


class ScalerSteps(Observer):
    """Knows whether a step of a scaler is running, tells a monitor of skips, and warns once if it sees no step.

    That is so if the scale was updated three times after steps of the model, and none of them was the monitor's. It is
    among the observers until `remove`, or until the monitor is gone, and does not keep that alive, as the process would
    then keep every model that was trained.

    Args:
        told_of_skip: A method of the monitor, called as `Observer.skipped` is.
        model: The monitored one.
        optimizers: Those that the monitor was given.
        scaler: The one that it was given; None if it listens to the optimizers alone.
    """

    def __init__(
        self, told_of_skip: Callable[..., None], model: nn.Module, optimizers: list[torch.optim.Optimizer], scaler: Any
    ) -> None:
        self._told_of_skip = weakref.WeakMethod(told_of_skip, self.remove)
        self._model, self._optimizers = weakref.ref(model), weakref.WeakSet(optimizers)
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.is_stepping = False
        self._is_over = False
        self._unseen: str | None = None
        self._updates = 0
        OBSERVERS.append(self)

    def remove(self, _: object = None) -> None:
        """Look no more."""
        if self in OBSERVERS:
            OBSERVERS.remove(self)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Note a step; whether it is one of the model, until the first that the monitor sees."""
        self.is_stepping = True
        if self._is_over:
            return
        optimizer = unwrapped(optimizer)
        is_ours = self._scaler is None or self._scaler() is scaler
        self._is_over = is_ours and optimizer in self._optimizers
        if not self._is_over and self._trains_model(optimizer):  # another model's may step more often
            self._unseen = _remedy(optimizer, self._optimizers) if is_ours else _OTHER_SCALER

    def skipped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        """Tell of a skip."""
        if (told := self._told_of_skip()) is not None:
            told(scaler, optimizer, is_scaled=is_scaled)

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Note the step's end."""
        self.is_stepping = False

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Count the updates that follow on steps of the model that the monitor has not seen."""
        if self._is_over or self._unseen is None:
            return
        self._updates += 1
        if self._updates == _UPDATES:
            self._is_over = True
            text = f"the monitor has seen no step in {_UPDATES} updates of the scale, and records none: {self._unseen}"
            with suppress(UserWarning):  # where warnings are errors
                warn(text, UserWarning, 3)

    def _trains_model(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self._model()
        params = set() if model is None else set(map(id, model.parameters()))
        return any(id(param) in params for param in params_of(optimizer))


_OTHER_SCALER = "the steps go through another GradScaler than the monitor's. Give Monitor the one that takes them"


def _remedy(stepped: torch.optim.Optimizer, given: weakref.WeakSet[torch.optim.Optimizer]) -> str:
    names = ", ".join(type(each).__name__ for each in given)
    return (
        f"scaler.step() gets another optimizer ({type(stepped).__name__}) than the monitor ({names}). "
        "Give Monitor the one that scaler.step() gets"
    )
