"""`Finder`: base class of the checks. It receives events and reports mistakes to the watch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castwise._guard import ErrorBoundary
from castwise.amp._observers import Observer
from castwise.amp._outcomes import StepFacts

if TYPE_CHECKING:
    from castwise._mistakes.watch import Watch


class Finder(Observer):
    """Looks for one kind of mistake. Subclasses override the events they need.

    Args:
        watch: The watch that sends the events and receives the reports.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        text = f"castwise's check {type(self).__name__} failed and is turned off"
        self._guard = ErrorBoundary(text, is_final=True, on_closed=self.turn_off)

    def turn_off(self) -> None:
        """Remove all hooks and recorded state, whatever has failed."""
        with self._guard:
            self.stop()

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer's first step or unscaling."""

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """Called when a backward of a scaled loss starts, with the leaves it will reach, while the watch is looking."""

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """Called when that backward ends, with the scaler that scaled the loss."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps, with or without `scaler.step`."""

    def optimizer_stepped_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer stepped without `scaler.step`, after which `stepped` is called instead."""

    def step_resolved(self, facts: StepFacts) -> None:
        """Called with the outcome of a scaler's step; on an accelerator two updates later."""

    def judged(self, loss: float | None, gradients_are_finite: bool) -> None:
        """Called by a monitor that diagnoses, with the loss of a step and whether its gradients are finite."""

    def advanced(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when the script advances a learning-rate schedule of an optimizer."""

    def will_draw_again(self) -> None:
        """Called after a checkpointed forward that has drawn random numbers and was not to keep their state."""

    def state_loaded(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Called after an optimizer loaded a checkpoint, while castwise is installed."""

    def model_found(self, model: nn.Module) -> None:
        """Called with a model that is being trained."""

    def ticked(self) -> None:
        """Called at the end of an iteration."""

    def ending(self) -> None:
        """Called when a subscriber ends. Pending mistakes must be reported now."""

    def stop(self) -> None:
        """Remove all hooks and recorded state."""
