"""Observe scalers for a monitor: whether one is stepping, what it skips, and whether any step is the monitor's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castwise._guard import ErrorBoundary, guarded
from castwise._warnings import warn_or_print
from castwise._wrapped_optimizers import unwrapped
from castwise.amp._gradients import params_of
from castwise.amp._observers import OBSERVERS, Observer

_UPDATES = 3


class ScalerObserver(Observer):
    """Tracks whether a scaler is stepping, notifies a monitor of skips, and warns once if the monitor sees no step.

    It warns if the scale was updated three times after steps of the model and none of these steps was the monitor's.
    The object observes scalers until `remove`, or until the monitor is garbage-collected. It refers to the monitor
    weakly, because otherwise the process would keep every trained model alive.

    Args:
        on_skip: A method of the monitor, called like `Observer.skipped`.
        model: The monitored model.
        optimizers: The monitor's optimizers.
        scaler: The monitor's scaler; None if it observes only the optimizers.
        guard: The monitor's guard, so that a fault is reported once.
    """

    def __init__(
        self,
        on_skip: Callable[..., None],
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scaler: Any,
        guard: ErrorBoundary,
    ) -> None:
        self._on_skip = weakref.WeakMethod(on_skip, self.remove)
        self._model, self._optimizers = weakref.ref(model), weakref.WeakSet(optimizers)
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.is_stepping = False
        self._is_over = False
        self._guard = guard
        self._unseen: str | None = None
        self._updates = 0
        OBSERVERS.append(self)

    def remove(self, _: object = None) -> None:
        """Stop observing."""
        if self in OBSERVERS:
            OBSERVERS.remove(self)

    @guarded
    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record a step. Until the monitor sees its first, check whether the step trains the model."""
        self.is_stepping = True
        if self._is_over:
            return
        optimizer = unwrapped(optimizer)
        is_ours = self._scaler is None or self._scaler() is scaler
        self._is_over = is_ours and optimizer in self._optimizers
        if not self._is_over and self._trains_model(optimizer):  # another model's may step more often
            self._unseen = _remedy(optimizer, self._optimizers) if is_ours else _OTHER_SCALER

    @guarded
    def skipped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        """Notify the monitor of a skip."""
        if (notify := self._on_skip()) is not None:
            notify(scaler, optimizer, is_scaled=is_scaled)

    @guarded
    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record the end of the step."""
        self.is_stepping = False

    @guarded
    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Count updates after steps of the model that the monitor did not see, and warn at the third."""
        if self._is_over or self._unseen is None:
            return
        self._updates += 1
        if self._updates == _UPDATES:
            self._is_over = True
            text = f"the monitor saw no step in {_UPDATES} updates of the scale and records nothing: {self._unseen}"
            warn_or_print(text, UserWarning)

    def _trains_model(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self._model()
        params = set() if model is None else set(map(id, model.parameters()))
        return any(id(param) in params for param in params_of(optimizer))


_OTHER_SCALER = "the steps use a different GradScaler than the monitor's. Pass Monitor the scaler that steps"


def _remedy(stepped: torch.optim.Optimizer, given: weakref.WeakSet[torch.optim.Optimizer]) -> str:
    names = ", ".join(type(one).__name__ for one in given)
    return (
        f"scaler.step() receives a different optimizer ({type(stepped).__name__}) than the monitor ({names}). "
        "Pass Monitor the optimizer that scaler.step() receives"
    )
