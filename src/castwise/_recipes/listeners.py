"""Notifications from layers that compute with a recipe, for traces and for a monitor's samples.

Compiled code and torchao send none.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from castwise._recipes.recipe import Recipe
from castwise._recipes.scalings import Quantized, Scaling

Operand = Literal["input", "weight", "grad_output", "weight_t", "grad_output_t", "input_t"]
"""An operand of one of the three products; with `_t` it is transposed."""

Phase = Literal["forward", "backward"]


class Listener(Protocol):
    """An object that is notified while it is in `LISTENERS`."""

    def products(
        self, telling: LayerEvent, phase: Phase, operands: tuple[torch.Tensor, ...]
    ) -> AbstractContextManager[Any] | None:
        """Return a context manager around the products of a forward or backward, given its input tensors, or None."""

    def quantized(
        self, telling: LayerEvent, operand: Operand, tensor: torch.Tensor, by: Scaling, to: Quantized
    ) -> None:
        """Receive an operand with its quantized values, which may come from a cache."""


LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()
"""The objects to notify. The references are weak, so they keep no monitor or model alive."""


class LayerEvent(NamedTuple):
    """Notifies listeners of one call of a layer and of its backward.

    Args:
        layer: The layer.
        recipe: The recipe of the layer.
        is_emulated: Whether the products are computed without torch's kernels.
        wants_gradients: Whether autograd was enabled.
    """

    layer: nn.Module
    recipe: Recipe
    is_emulated: bool
    wants_gradients: bool

    @property
    def label(self) -> str:
        """The recipe and what computes it."""
        return f"{self.recipe.name} ({'emulated' if self.is_emulated else 'torch'})"

    def products(self, phase: Phase, *operands: torch.Tensor) -> ExitStack:
        """Return the listeners' context managers around the products of a forward or backward."""
        stack = ExitStack()
        for listener in tuple(LISTENERS):  # another thread may add one
            if (around := listener.products(self, phase, operands)) is not None:
                stack.enter_context(around)
        return stack

    def quantized(self, operand: Operand, tensor: torch.Tensor, by: Scaling, to: Quantized) -> None:
        """Notify listeners of a quantized operand."""
        for listener in tuple(LISTENERS):  # another thread may add one
            listener.quantized(self, operand, tensor, by, to)
