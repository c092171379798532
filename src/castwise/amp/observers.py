"""Observers: told what a training run does with its scalers and regions. There are none unless something observes it.

Observers are called where things happen, with the objects themselves, and see them as they are before the call goes on
(unless its docstring says otherwise). None may raise. Compiled code calls no observer.
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

    def scaler_made(self, scaler: Any, *, wanted: bool) -> None:
        """A scaler was made; `wanted` says whether it was to be enabled."""

    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """A loss was given to an enabled scaler, and what came of it is about to be returned."""

    def asked(self, scaler: Any) -> None:
        """The scale is asked for as a number: gradients may be unscaled by hand."""

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's gradients are about to be unscaled or clipped by the scaler; also from within its step."""

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` begins, of a disabled scaler as well."""

    def skipped(self, scaler: Any, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        """The host knows that a step is skipped, and the gradients are there; `is_scaled` says whether still scaled.

        A fused optimizer's step on an accelerator is skipped on the device: the host does not know.
        """

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` ends, also with an error."""

    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """`update` of an enabled scaler begins; `is_set` says whether it was given a new scale."""

    def saved(self, scaler: Any) -> None:
        """The scaler's state was asked for, to be saved."""

    def loaded(self, scaler: Any) -> None:
        """The scaler has got a state that was saved."""

    def entered(self, region: Any) -> None:
        """An autocast region was entered."""

    def left(self, region: Any) -> None:
        """An autocast region was left."""

    def compiled(self, device_type: str, enabled: bool) -> None:
        """`torch.compile` is tracing a region; when what it compiles runs, no observer is told."""


OBSERVERS: list[Observer] = []
"""The active observers."""


@contextmanager
def step_of(scaler: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tell of a step's beginning and end."""
    for observer in OBSERVERS:
        observer.stepping(scaler, optimizer)
    try:
        yield
    finally:
        for observer in OBSERVERS:
            observer.stepped(scaler, optimizer)


def registered(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    """Add a hook to those of a user, who may remove it with the handle."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
