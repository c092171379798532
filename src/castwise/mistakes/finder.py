"""`Finder`: what looks for one kind of evidence. It is told what happens, and tells the watch what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castwise.amp.observers import Observer
from castwise.amp.outcomes import StepFacts

if TYPE_CHECKING:
    from castwise.mistakes.watch import Watch


class Finder(Observer):
    """Looks for mistakes; a subclass overrides the calls it needs.

    Args:
        watch: Whom it belongs to.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, or to be unscaled, for the first time."""

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """A backward of a scaled loss, which will reach these, has begun; while the watch is looking."""

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """It has ended; with the scaler that has scaled the loss."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, within `scaler.step` or without."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, without `scaler.step`."""

    def told(self, facts: StepFacts) -> None:
        """What became of a step with a scaler: on an accelerator two updates later."""

    def advanced(self, optimizer: torch.optim.Optimizer) -> None:
        """A learning-rate schedule of an optimizer is advanced, in the line of the script that is running."""

    def file_saved(self) -> None:
        """`torch.save` is called, while castwise is installed."""

    def state_loaded(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """An optimizer has loaded a checkpoint, while castwise is installed."""

    def model_found(self, model: nn.Module) -> None:
        """A model is known to be trained."""

    def ticked(self) -> None:
        """An iteration is over."""

    def ending(self) -> None:
        """A subscriber ends: what is left to say has to be said now."""

    def stop(self) -> None:
        """Remove all that was put anywhere."""
