"""Observers of a training run's scalers and regions. There are none by default.

Observers are called with the objects themselves, before the event takes effect unless the method's docstring says
otherwise. They must not raise. Compiled code calls no observer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class Observer:
    """An observer of scalers and regions; a subclass overrides what it needs."""

    def scaler_created(self, scaler: Any, *, wanted: bool) -> None:
        """A scaler was created; `wanted` is True if it was meant to be enabled."""

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """An enabled scaler has scaled a loss and is about to return the result."""

    def reading_scale(self, scaler: Any) -> None:
        """The scale is about to be read as a number, with which gradients may be unscaled by hand."""

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The scaler is about to unscale or clip an optimizer's gradients, also as part of a step."""

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` begins, also on a disabled scaler."""

    def skipped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        """The host knows that a step is skipped, and the gradients still exist; `is_scaled` is True if still scaled.

        Not called for a fused optimizer on an accelerator, whose step is skipped on the device without the host.
        """

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` has ended, also with an error."""

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """`update` of an enabled scaler begins; `is_set` is True if it was given a new scale."""

    def saving(self, scaler: Any) -> None:
        """The scaler's state is about to be saved."""

    def loaded(self, scaler: Any) -> None:
        """The scaler has loaded a saved state."""

    def entered(self, region: Any) -> None:
        """An autocast region was entered."""

    def left(self, region: Any) -> None:
        """An autocast region was left."""

    def file_saved(self, saved: object) -> None:
        """An object is about to be written with `torch.save` or `torch.distributed.checkpoint.save`.

        Called while castwise is installed.
        """

    def file_written(self, saved: object, path: object) -> None:
        """An object was written with `torch.save`, while castwise is installed; the path may be a file object."""

    def file_read(self, path: object) -> None:
        """A file is about to be read with `torch.load`, while castwise is installed; the path may be a file object."""

    def state_loaded(self, optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
        """An optimizer has loaded a state, while castwise is installed."""

    def compiled(self, device_type: str, enabled: bool) -> None:
        """`torch.compile` is tracing a region; the compiled code will call no observer."""


OBSERVERS: list[Observer] = []
"""The active observers."""


@contextmanager
def notify_of_step(scaler: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Notify observers of the beginning and end of a step."""
    for observer in OBSERVERS:
        observer.stepping(scaler, optimizer)
    try:
        yield
    finally:
        for observer in OBSERVERS:
            observer.stepped(scaler, optimizer)


def add_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    """Add a hook, and return the handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
