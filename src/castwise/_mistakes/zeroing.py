"""Gradients that are never zeroed: each step adds those of all steps before."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from castwise._mistakes.corrected_code import zeroed_after
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import caller
from castwise._torch_private import version
from castwise.amp._gradients import params_of

_STEPS = 3  # in a row with gradients that were not zeroed, until it is reported


class _Followed:
    """One parameter of an optimizer, whose gradient is followed from one step to the next.

    A backward adds to the gradient in place, which counts one write. So a gradient that is another tensor, or was
    written to in between, was zeroed, or changed on purpose.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.param = weakref.ref(param)
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._is_kept = self._has_grown = False
        self.steps = 0
        self.hook: RemovableHandle | None = None

    def stepped(self) -> None:
        """Note the gradient after a step."""
        param = self.param()
        gradient = None if param is None else param.grad
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = -1 if gradient is None else version(gradient)
        self._is_kept, self._has_grown = gradient is not None, False

    def grows(self) -> None:
        """Note that a backward has added to the gradient."""
        param = self.param()
        gradient = None if param is None else param.grad
        is_same = gradient is not None and self._gradient is not None and gradient is self._gradient()
        self._version += 1
        self._is_kept = self._is_kept and is_same and gradient is not None and version(gradient) == self._version
        self._has_grown = True

    def steps_now(self) -> bool:
        """Return True if this is one of several steps in a row with a gradient that was not zeroed."""
        self.steps = self.steps + 1 if self._is_kept and self._has_grown else 0
        return self.steps >= _STEPS


class Zeroing(Finder):
    """Finds such gradients by a hook on one parameter of each optimizer, while the watch is looking."""

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._followed: WeakKeyDictionary[torch.optim.Optimizer, _Followed] = WeakKeyDictionary()

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the gradient of the first parameter that has one."""
        param = next((p for p in params_of(optimizer) if p.requires_grad and p.is_leaf and p.grad is not None), None)
        if param is None or not self.watch.is_looking:
            return
        self._followed[optimizer] = followed = _Followed(param)
        grows = self._guard.door(lambda _: followed.grows())
        followed.hook = param.register_post_accumulate_grad_hook(grows)  # type: ignore[no-untyped-call]  # torch's

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Report an optimizer that steps with gradients of earlier steps."""
        followed = self._followed.get(optimizer)
        if followed is not None and followed.steps_now():
            self.watch.report(
                "never-zeroed",
                "gradients are not zeroed between steps: each step is taken with the sum of the gradients of all steps "
                "before",
                zeroed_after,
                caller(),
            )
            self._forget(optimizer)

    def optimizer_stepped_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradient."""
        if (followed := self._followed.get(optimizer)) is not None:
            followed.stepped()

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Do the same for a step by a scaler."""
        self.optimizer_stepped_alone(optimizer)

    def ticked(self) -> None:
        """Stop after the first iterations: a script that zeroes gradients then does so later too."""
        if self._followed and not self.watch.is_looking:
            self.stop()

    def stop(self) -> None:
        """Remove the hooks."""
        for optimizer in list(self._followed):
            self._forget(optimizer)

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        followed = self._followed.pop(optimizer, None)
        if followed is not None and followed.hook is not None:
            followed.hook.remove()
