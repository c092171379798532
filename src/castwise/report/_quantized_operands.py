"""Quantization errors of the operands of layers with 8- and 4-bit recipes, over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from castwise.report._record_numbers import number

OPERANDS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class QuantizedOperand:
    """One operand of one layer, over all samples.

    Args:
        layer: Name of the layer.
        recipe: The recipe, and whether it is native or emulated.
        operand: "input", "weight" or "grad_output".
        relative_error: Mean of the finite errors; NaN if there are none.
        flushed: Largest share of elements that became zero.
        saturated: Largest share of elements above the format's largest number.
        scale: Smallest and largest finite scale; NaN if there are none.
    """

    layer: str
    recipe: str
    operand: str
    relative_error: float
    flushed: float
    saturated: float
    scale: tuple[float, float]


def quantized_operands(samples: Iterable[Any]) -> list[QuantizedOperand]:
    """Collect the samples of layers with recipes, in model order."""
    found: dict[tuple[str, str], list[Any]] = {}
    recipes: dict[str, str] = {}
    for sample in samples:
        for layer, numbers in sample.get("quantized", {}).items():
            recipes[layer] = numbers["recipe"]
            for operand in OPERANDS:
                if operand in numbers:
                    found.setdefault((layer, operand), []).append(numbers[operand])
    return [
        QuantizedOperand(
            layer,
            recipes[layer],
            operand,
            _mean([number(each["relative_error"]) for each in of_samples]),
            max(number(each["flushed"]) for each in of_samples),
            max(number(each["saturated"]) for each in of_samples),
            _range([number(scale) for each in of_samples for scale in each["scale"]]),
        )
        for (layer, operand), of_samples in found.items()
    ]


def _mean(numbers: list[float]) -> float:
    finite = [each for each in numbers if math.isfinite(each)]
    return sum(finite) / len(finite) if finite else math.nan


def _range(numbers: list[float]) -> tuple[float, float]:
    finite = [each for each in numbers if math.isfinite(each)]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)
