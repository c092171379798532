"""Accumulation of gradients that is cut up: unscaled, or ended by an update, before all of them are there."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from castwise.amp.gradients import params_of
from castwise.mistakes.finder import Finder
from castwise.mistakes.mistake import Place, caller


class _Gradient:
    """A gradient that something was done with, and where."""

    def __init__(self, place: Place | None, gradient: torch.Tensor) -> None:
        self.place, self._gradient = place, weakref.ref(gradient)

    def is_of(self, param: torch.Tensor) -> bool:
        """Return True if it is there still, and was not set to zero."""
        return param.grad is not None and param.grad is self._gradient() and bool(param.grad.any())


class Accumulation(Finder):
    """Finds backwards that add to gradients which were unscaled, or for which the scale was updated, without a step."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._trained: set[int] = set()
        self._scaled: dict[int, torch.Tensor] = {}
        self._unscaled: dict[int, _Gradient] = {}
        self._updated: dict[int, _Gradient] = {}
        self._has_stepped_alone = False

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Ignore gradients that no optimizer steps with."""
        self._trained.update(map(id, params_of(optimizer)))

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """Look at the gradients that it adds to."""
        for leaf in [leaf for leaf in leaves if id(leaf) in self._trained]:
            self._scaled[id(leaf)] = leaf
            unscaled, updated = self._unscaled.pop(id(leaf), None), self._updated.pop(id(leaf), None)
            if updated is not None and updated.is_of(leaf):
                self._say_updated(updated.place)
            elif unscaled is not None and unscaled.is_of(leaf):
                self._say_unscaled(unscaled.place)

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Remember which gradients, and where."""
        place = caller() if self.watch.is_looking else None
        for param in params_of(optimizer) if self.watch.is_looking else ():
            if param.grad is not None:
                self._unscaled[id(param)] = _Gradient(place, param.grad)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The accumulation is over."""
        waiting = [gradients for gradients in (self._unscaled, self._updated, self._scaled) if gradients]
        for param in params_of(optimizer) if waiting else ():
            for gradients in waiting:
                gradients.pop(id(param), None)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """It is, without the scaler as well."""
        self._has_stepped_alone = self._has_stepped_alone or not self.watch.is_stepping
        self.stepping(None, optimizer)

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Remember which gradients are waiting for their step."""
        if not is_set and not scaler._per_optimizer_states and not self._has_stepped_alone:
            self._say_updated(caller())  # it will raise
        self._has_stepped_alone = False
        place = caller() if self._scaled else None
        for key, param in self._scaled.items():
            if param.grad is not None:
                self._updated[key] = _Gradient(place, param.grad)
        self._scaled.clear()

    def _say_unscaled(self, place: Place | None) -> None:
        source = place.source if place else "scaler.unscale_(optimizer)"
        self.watch.say(
            "unscaled-inside-accumulation",
            "gradients are unscaled here, and a later backward adds scaled ones to them before the step: the sum is "
            "of neither",
            f"if (i + 1) % accumulation_steps == 0:\n    {source}\n    scaler.step(optimizer)\n    scaler.update()",
            place,
        )

    def _say_updated(self, place: Place | None) -> None:
        source = place.source if place else "scaler.update()"
        self.watch.say(
            "updated-inside-accumulation",
            "the scale is updated here although gradients are still being accumulated: they are sums of gradients at "
            "different scales then",
            f"if (i + 1) % accumulation_steps == 0:\n    scaler.step(optimizer)\n    {source}",
            place,
        )

    def stop(self) -> None:
        """Let go of all of them."""
        for gradients in (self._unscaled, self._updated, self._scaled):
            gradients.clear()
