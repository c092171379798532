"""Checkpoints with an optimizer's state and without its scaler's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from castwise._guard import guarded
from castwise._mistakes.corrected_code import saved_with_scaler
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import Place, caller


class Checkpoints(Finder):
    """Finds checkpoints saved without the scaler's state, at the next step or at the end of the run."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._hooks: list[RemovableHandle] = []
        self._is_scaled: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._saved_alone: Place | None = None
        self._scaler_saved = False
        self._file_saved = False

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the optimizer's `state_dict`."""
        with suppress(AttributeError):  # a wrapper that is not a full Optimizer
            self._hooks.append(optimizer.register_state_dict_post_hook(self._optimizer_asked))

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report the checkpoint before this step if it lacks the scaler's state."""
        self._report()
        self._scaler_saved = self._file_saved = False
        self._is_scaled[optimizer] = scaler.is_enabled()

    def file_saved(self, saved: object) -> None:
        """Record that a state requested before was written to a file."""
        self._file_saved = self._saved_alone is not None

    @guarded
    def _optimizer_asked(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        if self._is_scaled.get(optimizer) and not self._scaler_saved:
            self._saved_alone = self._saved_alone or caller()

    def saving(self, scaler: Any) -> None:
        """Record that the scaler's state was saved too."""
        self._scaler_saved = True
        self._saved_alone = None

    def ending(self) -> None:
        """Report the last checkpoint, after which no step follows."""
        self._report()

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _report(self) -> None:
        place, self._saved_alone = self._saved_alone, None
        if place is not None and self._file_saved:
            self.watch.report(
                "scaler-not-saved",
                "the optimizer's state is saved here without the scaler's: a run resumed from it starts from the "
                "initial scale and skips steps until the scale fits again",
                saved_with_scaler,
                place,
            )
