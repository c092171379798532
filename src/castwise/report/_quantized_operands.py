"""Quantization errors of the operands of layers with 8- and 4-bit recipes, over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from castwise.monitor._records import Operand, SampleRecord

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


def quantized_operands(samples: Iterable[SampleRecord]) -> list[QuantizedOperand]:
    """Collect the samples of layers with recipes, in model order."""
    measured: dict[tuple[str, str], list[Operand]] = {}
    recipes: dict[str, str] = {}
    for sample in samples:
        for layer, quantized in sample.quantized.items():
            recipes[layer] = quantized.recipe
            for name in OPERANDS:
                if (operand := getattr(quantized, name)) is not None:
                    measured.setdefault((layer, name), []).append(operand)
    return [
        QuantizedOperand(
            layer,
            recipes[layer],
            operand,
            _mean([one.relative_error for one in same]),
            max(one.flushed for one in same),
            max(one.saturated for one in same),
            _range([scale for one in same for scale in one.scale]),
        )
        for (layer, operand), same in measured.items()
    ]


def _mean(numbers: list[float]) -> float:
    finite = [each for each in numbers if math.isfinite(each)]
    return sum(finite) / len(finite) if finite else math.nan


def _range(numbers: list[float]) -> tuple[float, float]:
    finite = [each for each in numbers if math.isfinite(each)]
    return (min(finite), max(finite)) if finite else (math.nan, math.nan)
