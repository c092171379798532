"""Gradients that are clipped, looked at or stepped on while they are still scaled."""

from __future__ import annotations

from typing import Any

import torch

from castwise._torch_private import at_the_end_of_this_backward
from castwise.amp.gradients import params_of
from castwise.monitor.mistakes.finder import Finder
from castwise.monitor.mistakes.graph import leaves_of
from castwise.monitor.mistakes.mistake import Place, caller
from castwise.monitor.mistakes.scaled_gradients import Window, is_one


class Unscaling(Finder):
    """Opens a window after each scaled backward, while the watch is looking."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._window: Window | None = None
        self._scaled: dict[int, torch.Tensor] = {}
        self._clipped: Place | None = None
        self._measured: Place | None = None
        self._by_hand = False

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Open a window when the backward that starts here is over."""
        if not (scaled.requires_grad and self.watch.is_looking) or is_one(scaler):
            return
        leaves = leaves_of(scaled)

        def start(_: torch.Tensor) -> None:
            self._close()
            at_the_end_of_this_backward(end)

        def end() -> None:
            self._close()
            with_gradients = [leaf for leaf in leaves if leaf.grad is not None]
            self._scaled.update((id(leaf), leaf) for leaf in with_gradients)
            self._window = Window(with_gradients)

        scaled.register_hook(start)  # type: ignore[no-untyped-call]

    def asked(self, scaler: Any) -> None:
        """Gradients or their norms may be unscaled by hand with it."""
        self._by_hand = True

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
        if self.watch.is_stepping or self._by_hand or not self._scaled:
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
        if self._by_hand:
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
        self._by_hand = False
        self._clipped = self._measured = None
        self._scaled.clear()

    def stop(self) -> None:
        """Close the window."""
        self._close()
