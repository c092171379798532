"""Gradients that are clipped, read or stepped with while still scaled, and steps that the scaler cannot skip."""

from __future__ import annotations

import linecache
import re
import weakref
from typing import Any

import torch

from castwise._mistakes.corrected_code import clipped_after_unscaling, stepped_by_scaler, unscaled_before
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller
from castwise._mistakes.scaled_gradients import Window, is_one
from castwise.amp._gradients import params_of

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
        """Close the window, because this backward adds to the gradients in it."""
        self._close()

    def backward_ended(self, leaves: list[torch.Tensor], scaler: Any) -> None:
        """Open a window for the new gradients."""
        self._close()
        if is_one(scaler):
            return
        with_gradients = [leaf for leaf in leaves if leaf.grad is not None]
        self._scaled.update((id(leaf), weakref.ref(leaf.grad)) for leaf in with_gradients if leaf.grad is not None)
        if self.watch.may_change_gradients:
            self._window = Window(with_gradients, self._guard, scaler._get_scale_async())

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report uses of the gradients before this unscaling."""
        self._close()
        self._forget(optimizer)
        self._unscaled[optimizer] = caller() if self.watch.is_looking else None
        self._report()

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report uses of the gradients before this step, which unscales them."""
        self._close()
        if scaler.is_enabled():
            self._forget(optimizer)
            self._unscaled.pop(optimizer, None)
            self._report()

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a step without the scaler on scaled gradients, or on gradients that the scaler unscaled."""
        self._close()
        if self.watch.is_stepping or not (self._scaled or self._unscaled):
            return
        unscaled = self._unscaled.pop(optimizer, None)
        if any(param.grad is not None for param in params_of(optimizer)) and unscaled is not None:
            self._report_unskippable(unscaled, caller())
        elif not self.watch.is_by_hand and any(map(self._is_scaled, params_of(optimizer))):
            self.watch.report(
                "stepped-while-scaled",
                "this step uses gradients that are still multiplied by the scale",
                stepped_by_scaler,
                caller(),
            )
        self._forget(optimizer)

    def optimizer_stepped_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Report a step whose closure computed such gradients."""
        self.optimizer_steps(optimizer)

    def _is_scaled(self, param: torch.Tensor) -> bool:
        """Return True if a parameter's gradient is still the one from a scaled backward."""
        scaled = self._scaled.get(id(param))
        return scaled is not None and param.grad is not None and scaled() is param.grad

    def _report_unskippable(self, unscaled: Place, stepped: Place | None) -> None:
        if stepped is None or _looks_for_nonfinite(unscaled, stepped):
            return
        self.watch.report(
            "stepped-without-scaler",
            "the scaler unscaled these gradients, but the optimizer steps without it: a step with an inf or NaN is not "
            "skipped, and the weights become inf or NaN",
            stepped_by_scaler,
            stepped,
        )

    def _report(self) -> None:
        clipped, measured, self._clipped, self._measured = self._clipped, self._measured, None, None
        kept, self._kept_before, self._kept = self._kept_before, self._kept, None
        if self.watch.is_by_hand:
            self._kept_before = None
            return
        if clipped is not None:
            self.watch.report(
                "clipped-while-scaled",
                "gradients are clipped here while they are still multiplied by the scale: the bound is too small by "
                "that factor",
                clipped_after_unscaling,
                clipped,
            )
        self._report_measured(measured)
        self._report_measured(kept)

    def _report_measured(self, measured: Place | None) -> None:
        if measured is not None:
            self.watch.report(
                "measured-while-scaled",
                "gradients are read here while they are still multiplied by the scale: logged values are too large by "
                "that factor",
                unscaled_before,
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
        """Drop a kept norm if the script asked for the scale, because it may have divided the norm by it."""
        if self.watch.is_by_hand:
            self._kept_before = None

    def ticked(self) -> None:
        """Reset for the next iteration."""
        self._close()
        self._clipped = self._measured = self._kept = None
        self._scaled.clear()
        self._unscaled.clear()

    def ending(self) -> None:
        """Close the window, and report a kept norm."""
        self._close()
        if not self.watch.is_by_hand:
            self._report_measured(self._kept_before)
        self._kept_before = None

    def stop(self) -> None:
        """Close the window."""
        self._close()


def _looks_for_nonfinite(first: Place, last: Place) -> bool:
    """Return True if the script itself checks for inf or NaN between two of its lines."""
    lines = (linecache.getline(first.file, number) for number in range(first.line, last.line + 1))
    return first.file != last.file or any(_NONFINITE.search(line) for line in lines)
