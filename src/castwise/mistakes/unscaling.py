"""Gradients that are clipped, measured or stepped on while they are still scaled, and steps that nothing can skip."""

from __future__ import annotations

import linecache
import re
import weakref
from typing import Any

import torch

from castwise.amp.gradients import params_of
from castwise.mistakes.finder import Finder
from castwise.mistakes.mistake import Place, caller
from castwise.mistakes.scaled_gradients import Window, is_one

_NONFINITE = re.compile(r"finite|isnan|isinf|found_inf")


class Unscaling(Finder):
    """Opens a window after each scaled backward, while the watch is looking and may change gradients."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._window: Window | None = None
        self._scaled: dict[int, weakref.ref[torch.Tensor]] = {}
        self._unscaled: weakref.WeakKeyDictionary[torch.optim.Optimizer, Place | None] = weakref.WeakKeyDictionary()
        self._clipped: Place | None = None
        self._measured: Place | None = None
        self._kept: Place | None = None
        self._kept_before: Place | None = None

    def backward_starts(self, leaves: list[torch.Tensor]) -> None:
        """It adds to what is looked at."""
        self._close()

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """Open a window."""
        self._close()
        if is_one(scaler):
            return
        with_gradients = [leaf for leaf in leaves if leaf.grad is not None]
        self._scaled.update((id(leaf), weakref.ref(leaf.grad)) for leaf in with_gradients if leaf.grad is not None)
        if self.watch.may_change_gradients:
            self._window = Window(with_gradients, self.watch.guard, scaler._get_scale_async())

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """From now on they are unscaled; what was done with them before comes to light."""
        self._close()
        self._forget(optimizer)
        self._unscaled[optimizer] = caller() if self.watch.is_looking else None
        self._say()

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """They will be unscaled now; what was done with them before comes to light."""
        self._close()
        if scaler.is_enabled():
            self._forget(optimizer)
            self._unscaled.pop(optimizer, None)
            self._say()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Report it if an optimizer steps by itself, on scaled gradients or on some that the scaler has unscaled."""
        self._close()
        if self.watch.is_stepping:
            return
        unscaled = self._unscaled.pop(optimizer, None)
        if any(param.grad is not None for param in params_of(optimizer)) and unscaled is not None:
            self._say_unskippable(unscaled, caller())
        elif not self.watch.is_by_hand and any(map(self._is_scaled, params_of(optimizer))):
            self.watch.say(
                "stepped-while-scaled",
                "this step takes gradients that are still multiplied by the scale",
                "scaler.step(optimizer)\nscaler.update()",
                caller(),
            )
        self._forget(optimizer)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a step whose closure has computed such gradients."""
        self.optimizer_steps(optimizer)

    def _is_scaled(self, param: torch.Tensor) -> bool:
        """Return True if the gradient is still the one that a scaled backward brought: not set to None since."""
        scaled = self._scaled.get(id(param))
        return scaled is not None and param.grad is not None and scaled() is param.grad

    def _say_unskippable(self, unscaled: Place, stepped: Place | None) -> None:
        if stepped is None or _looks_for_nonfinite(unscaled, stepped):
            return
        self.watch.say(
            "stepped-without-scaler",
            "the scaler has unscaled these gradients, and the optimizer is stepped without it: an inf or a NaN among "
            "them is not skipped, and gets into the weights",
            "scaler.step(optimizer)  # skips it\nscaler.update()",
            stepped,
        )

    def _say(self) -> None:
        clipped, measured, self._clipped, self._measured = self._clipped, self._measured, None, None
        kept, self._kept_before, self._kept = self._kept_before, self._kept, None
        if self.watch.is_by_hand:
            self._kept_before = None
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
        self._say_measured(measured)
        self._say_measured(kept)

    def _say_measured(self, measured: Place | None) -> None:
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
            self._clipped = self._clipped or self._window.clipped
            self._measured = self._measured or self._window.measured
            self._kept = self._window.kept
            self._window = None

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """A norm that was kept may have been divided by the scale after the step."""
        if self.watch.is_by_hand:
            self._kept_before = None

    def ticked(self) -> None:
        """Begin anew."""
        self._close()
        self._clipped = self._measured = self._kept = None
        self._scaled.clear()
        self._unscaled.clear()

    def ending(self) -> None:
        """Close the window, which may have been open for the sake of one that ends; say what has waited."""
        self._close()
        if not self.watch.is_by_hand:
            self._say_measured(self._kept_before)
        self._kept_before = None

    def stop(self) -> None:
        """Close the window."""
        self._close()


def _looks_for_nonfinite(first: Place, last: Place) -> bool:
    """Return True if the script itself looks for infs and NaNs between two of its lines."""
    lines = (linecache.getline(first.file, number) for number in range(first.line, last.line + 1))
    return first.file != last.file or any(_NONFINITE.search(line) for line in lines)
