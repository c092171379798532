"""Training that goes on without the monitor's optimizer or scaler, of which the monitor would record nothing."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from castwise._warnings import warn
from castwise._wrapped_optimizers import unwrapped
from castwise.amp.gradients import params_of
from castwise.amp.observers import OBSERVERS, Observer

_UPDATES = 3


class UnseenSteps(Observer):
    """Warns once if the scale was updated three times after steps of the model, and none of them was the monitor's.

    It is among the observers until `stop`, or until the monitor is gone, and keeps nothing alive.

    Args:
        monitor: Whose it is.
        model: The monitored one.
        optimizers: Those that the monitor was given.
        scaler: The one that it was given; None if it listens to the optimizers alone.
    """

    def __init__(self, monitor: object, model: nn.Module, optimizers: list[torch.optim.Optimizer], scaler: Any) -> None:
        self._monitor = weakref.ref(monitor, self.stop)
        self._model, self._optimizers = weakref.ref(model), weakref.WeakSet(optimizers)
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._is_over = False
        self._unseen: str | None = None
        self._updates = 0
        OBSERVERS.append(self)

    def stop(self, _: object = None) -> None:
        """Look no more."""
        if self in OBSERVERS:
            OBSERVERS.remove(self)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of the model, until the first that the monitor sees."""
        if self._is_over:
            return
        optimizer = unwrapped(optimizer)
        is_ours = self._scaler is None or self._scaler() is scaler
        self._is_over = is_ours and optimizer in self._optimizers
        if not self._is_over and self._trains_model(optimizer):  # another model's may step more often
            self._unseen = _remedy(optimizer, self._optimizers) if is_ours else _OTHER_SCALER

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Count the updates that follow on such steps."""
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
