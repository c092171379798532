"""Measure how 8-bit and 4-bit recipes quantize the operands of linear layers, in one forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from castwise._guard import ErrorBoundary, guarded
from castwise._recipes.listeners import LISTENERS, LayerEvent
from castwise._recipes.scalings import Float8, Quantized, Scaling
from castwise._torch_private import is_backward_running
from castwise.monitor import _module_names as names
from castwise.monitor._host_copies import HostCopies
from castwise.monitor._records import Operand, QuantizedLayer

_OPERANDS = ("input", "weight", "grad_output")


class QuantizedLayers:
    """Measures the quantized operands of each layer in one forward and backward, while it is watching.

    Args:
        model: The model with the layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._guard = ErrorBoundary()
        self._labels: dict[nn.Module, str] = {}
        self._found: dict[tuple[nn.Module, str], torch.Tensor] = {}

    def watch(self) -> None:
        """Start measuring with the next forward."""
        self._labels, self._found = {}, {}
        LISTENERS.add(self)

    def stop(self) -> QuantizedSample | None:
        """Stop measuring, and return the measurements; None if there are none."""
        LISTENERS.discard(self)
        found, labels, self._found, self._labels = self._found, self._labels, {}, {}
        return QuantizedSample(self._model, labels, found) if found else None

    @guarded
    def products(self, telling: LayerEvent, phase: str, operands: tuple[torch.Tensor, ...]) -> None:
        """Do nothing, because only operands are measured."""

    @guarded
    def quantized(self, telling: LayerEvent, operand: str, tensor: torch.Tensor, by: Scaling, to: Quantized) -> None:
        """Measure a layer's operand the first time it occurs."""
        is_forward = operand != "grad_output"
        if operand not in _OPERANDS or (telling.layer, operand) in self._found:
            return
        if not telling.wants_gradients or (is_forward and is_backward_running()):  # a validation, a checkpoint
            return
        self._labels[telling.layer] = telling.label
        self._found[telling.layer, operand] = _measured(tensor, by, to)


class QuantizedSample:
    """Measurements of a step that are being copied to the host.

    Args:
        model: The model with the layers.
        labels: The recipe of each layer, with the implementation that computes it.
        found: Results of `_measured` by layer and operand.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: Mapping[nn.Module, str],
        found: Mapping[tuple[nn.Module, str], torch.Tensor],
    ) -> None:
        self._labels = {name: labels[layer] for name, layer in names.modules(model).items() if layer in labels}
        of_layer = {layer: name for name, layer in names.modules(model).items()}
        self._copies = HostCopies(
            {(of_layer[layer], operand): one for (layer, operand), one in found.items() if layer in of_layer}
        )

    def layers(self) -> dict[str, QuantizedLayer]:
        """Return the record of layers with recipes. Waits for the copies from an accelerator.

        Returns:
            For each layer its `recipe`, and for `input`, `weight` and `grad_output`: `saturated`, the share of elements
            above the largest number of the format; `flushed`, the share of non-zero elements that became zero;
            `relative_error`, the 2-norm of the error over that of the operand; `scale`, the smallest and the largest
            number that elements were divided by.
        """
        layers = {name: QuantizedLayer(label) for name, label in self._labels.items()}
        for (name, operand), numbers in self._copies.wait().items():
            saturated, flushed, error, smallest, largest = (float(f"{number:.4g}") for number in numbers.tolist())
            measured: dict[str, Any] = {operand: Operand(saturated, flushed, error, (smallest, largest))}
            layers[name] = replace(layers[name], **measured)
        return layers


def _measured(operand: torch.Tensor, by: Scaling, to: Quantized) -> torch.Tensor:
    """Return saturated, flushed, relative error, smallest and largest scale of an operand."""
    with torch.no_grad():
        given, kept, numbers = operand.float(), by.dequantize_(to._replace(values=to.values.clone())), by.numbers
        # Values up to half a step above the largest number round to it; values beyond are saturated.
        step = 2.0 ** (math.floor(math.log2(numbers.largest)) - numbers.mantissa_bits)
        rounded = kept.abs() * (1 + step / 2 / numbers.largest)
        beyond = (to.values.abs() == numbers.largest) & (given.abs() > rounded)
        # Divide by the largest number, because squares may overflow fp32; an operand of zeros has no error.
        largest = given.abs().amax()
        largest = largest.masked_fill(largest == 0, 1.0)
        lost, norm = (torch.linalg.vector_norm(operand / largest) for operand in (given - kept, given))
        error = lost / norm.masked_fill(norm == 0, 1.0)
        scale = to.scale.reciprocal() if isinstance(by, Float8) else to.scale
        flushed = ((kept == 0) & (given != 0)).float().mean()
        return torch.stack([beyond.float().mean(), flushed, error, scale.amin(), scale.amax()])
