"""What is told of layers that compute by a recipe: to a trace, and to a monitor's samples.

Nothing is told of compiled code, nor of what torchao computes.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from castwise.recipes.recipe import Recipe
from castwise.recipes.scalings import Quantized, Scaling

Operand = Literal["input", "weight", "grad_output", "weight_t", "grad_output_t", "input_t"]
"""Of the output, of the gradient of the input, and of that of the weight: as they are, or transposed."""

Phase = Literal["forward", "backward"]


class Listener(Protocol):
    """Who is told, while it is in `LISTENERS`."""

    def products(
        self, telling: Telling, phase: Phase, operands: tuple[torch.Tensor, ...]
    ) -> AbstractContextManager[Any]:
        """Return what surrounds the products of a forward or backward, given the tensors that it begins with."""

    def quantized(self, telling: Telling, operand: Operand, tensor: torch.Tensor, by: Scaling, to: Quantized) -> None:
        """Look at an operand that was quantized, or at the copy of one that was kept."""


LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()
"""Those who are told; a monitor, and with it its model, is not kept alive by that."""


class Telling(NamedTuple):
    """Tells listeners of one call of a layer, and of its backward.

    Args:
        layer: The layer.
        recipe: By which it computes.
        is_emulated: Whether no kernels of torch's compute the products.
        wants_gradients: Whether autograd was on.
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
        """Surround the products of a forward or backward."""
        stack = ExitStack()
        for listener in tuple(LISTENERS):  # another thread may add one
            stack.enter_context(listener.products(self, phase, operands))
        return stack

    def quantized(self, operand: Operand, tensor: torch.Tensor, by: Scaling, to: Quantized) -> None:
        """Tell of an operand."""
        for listener in tuple(LISTENERS):  # another thread may add one
            listener.quantized(self, operand, tensor, by, to)
