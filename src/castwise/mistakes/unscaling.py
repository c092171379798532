"""Gradients that are clipped, looked at or stepped on while they are still scaled."""

from __future__ import annotations

from typing import Any

import torch

from castwise.amp.gradients import params_of
from castwise.mistakes.finder import Finder
from castwise.mistakes.mistake import Place, caller
from castwise.mistakes.scaled_gradients import Window, is_one


class Unscaling(Finder):
    """Opens a window after each scaled backward, while the watch is looking and may change gradients."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._window: Window | None = None
        self._scaled: dict[int, torch.Tensor] = {}
        self._clipped: Place | None = None
        self._measured: Place | None = None

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """It adds to what is looked at."""
        self._close()

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """Open a window."""
        self._close()
        if is_one(scaler):
            return
        with_gradients = [leaf for leaf in leaves if leaf.grad is not None]
        self._scaled.update((id(leaf), leaf) for leaf in with_gradients)
        if self.watch.may_change_gradients:
            self._window = Window(with_gradients, self.watch.guard)

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """From now on they are unscaled; what was done with them before comes to light."""
        self._close()
        self._forget(optimizer)
        self._say()

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """They will be unscaled now; what was done with them before comes to light."""
        self._close()
        if scaler.is_enabled():
            self._forget(optimizer)
            self._say()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Say so if an optimizer steps on scaled gradients by itself."""
        self._close()
        if self.watch.is_stepping or self.watch.is_by_hand or not self._scaled:
            return
        if any(id(param) in self._scaled and param.grad is not None for param in params_of(optimizer)):
            place = caller()
            self.watch.say(
                "stepped-while-scaled",
                "this step takes gradients that are still multiplied by the scale",
                "scaler.step(optimizer)\nscaler.update()",
                place,
            )
        self._forget(optimizer)

    def _say(self) -> None:
        clipped, measured, self._clipped, self._measured = self._clipped, self._measured, None, None
        if self.watch.is_by_hand:
            return
        if clipped is not None:
            self.watch.say(
                "clipped-while-scaled",
                "gradients are clipped here while they are still multiplied by the scale: the bound is as many times "
                "too small",
                f"scaler.unscale_(optimizer)\n{clipped.source}\n"
                "# or castwise's scaler.clip_grad_norm_(optimizer, max_norm), which reads them once",
                clipped,
            )
        if measured is not None:
            self.watch.say(
                "measured-while-scaled",
                "gradients are looked at here while they are still multiplied by the scale: what is logged is as many "
                "times too large",
                f"scaler.unscale_(optimizer)\n{measured.source}",
                measured,
            )

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        for param in params_of(optimizer) if self._scaled else ():
            self._scaled.pop(id(param), None)

    def _close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._clipped, self._measured = self._window.clipped, self._window.measured
            self._window = None

    def ticked(self) -> None:
        """Begin anew."""
        self._close()
        self._clipped = self._measured = None
        self._scaled.clear()

    def ending(self) -> None:
        """Close the window: it may have been somebody's who wants to know no more."""
        self._close()

    def stop(self) -> None:
        """Close the window."""
        self._close()
