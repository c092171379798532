"""Gradient accumulation that is interrupted by an unscaling or a scale update before it is complete."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from castwise._mistakes.corrected_code import unscaled_before_step, updated_after_step
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller
from castwise.amp._gradients import params_of


class _Gradient:
    """A gradient, and the line that unscaled it or updated its scale."""

    def __init__(self, place: Place | None, gradient: torch.Tensor) -> None:
        self.place, self._gradient = place, weakref.ref(gradient)

    def is_of(self, param: torch.Tensor) -> bool:
        """Return True if a parameter still has this gradient, and it was not zeroed."""
        return param.grad is not None and param.grad is self._gradient() and bool(param.grad.any())


class Accumulation(Finder):
    """Finds backwards that add to gradients after an unscaling or a scale update without a step."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._trained: set[int] = set()
        self._scaled: dict[int, torch.Tensor] = {}
        self._unscaled: dict[int, _Gradient] = {}
        self._updated: dict[int, _Gradient] = {}
        self._has_stepped_alone = False

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Track the optimizer's parameters. Gradients of others are ignored."""
        self._trained.update(map(id, params_of(optimizer)))

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """Check the gradients that this backward adds to."""
        for leaf in [leaf for leaf in leaves if id(leaf) in self._trained]:
            self._scaled[id(leaf)] = leaf
            unscaled, updated = self._unscaled.pop(id(leaf), None), self._updated.pop(id(leaf), None)
            if updated is not None and updated.is_of(leaf):
                self._report_updated(updated.place)
            elif unscaled is not None and unscaled.is_of(leaf):
                self._report_unscaled(unscaled.place)

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Record the unscaled gradients and the calling line."""
        place = caller() if self.watch.is_looking else None
        for param in params_of(optimizer) if self.watch.is_looking else ():
            if param.grad is not None:
                self._unscaled[id(param)] = _Gradient(place, param.grad)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Forget the optimizer's gradients, because their accumulation is complete."""
        waiting = [gradients for gradients in (self._unscaled, self._updated, self._scaled) if gradients]
        for param in params_of(optimizer) if waiting else ():
            for gradients in waiting:
                gradients.pop(id(param), None)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Do the same for a step without the scaler."""
        self._has_stepped_alone = self._has_stepped_alone or not self.watch.is_stepping
        self.stepping(None, optimizer)

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Record the gradients that have not been stepped with yet, and report an update without a step."""
        if not is_set and not scaler._per_optimizer_states and not self._has_stepped_alone:
            self._report_updated(caller())  # it will raise
        self._has_stepped_alone = False
        place = caller() if self._scaled else None
        for key, param in self._scaled.items():
            if param.grad is not None:
                self._updated[key] = _Gradient(place, param.grad)
        self._scaled.clear()

    def _report_unscaled(self, place: Place | None) -> None:
        self.watch.report(
            "unscaled-inside-accumulation",
            "gradients are unscaled here, and a later backward adds scaled gradients to them before the step: the sum "
            "mixes two scales",
            unscaled_before_step,
            place,
        )

    def _report_updated(self, place: Place | None) -> None:
        self.watch.report(
            "updated-inside-accumulation",
            "the scale is updated here while gradients are still being accumulated: they become sums of gradients at "
            "different scales",
            updated_after_step,
            place,
        )

    def stop(self) -> None:
        """Forget all gradients."""
        for gradients in (self._unscaled, self._updated, self._scaled):
            gradients.clear()
