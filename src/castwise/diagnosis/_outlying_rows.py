"""`outlying_row`: find the row of a weight that is far larger than the others, as after a corrupted load."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from castwise.diagnosis._fault_search import named_parameters
from castwise.diagnosis._ranges import Range, stored

HUGE = 1e15
"""A product of two numbers of this size is near the largest one of fp32 and bf16."""
_TIMES = 1e6


class OutlyingRow(NamedTuple):
    """A row of a weight, compared with the weight's median row."""

    name: str
    row: int
    magnitude: float
    median: float

    def __str__(self) -> str:
        return (
            f"{self.name}[{self.row}] has the magnitude {self.magnitude:.2g}, and the median row {self.median:.2g}: "
            "repair this row, or load a checkpoint from before"
        )


def has_huge_input(inputs: tuple[Range, ...]) -> bool:
    """Return True if an input of an op is so large that the op overflows in any format."""
    return any(given.largest is not None and given.largest > HUGE for given in inputs)


def outlying_row(model: nn.Module) -> OutlyingRow | None:
    """Return the largest row of a model's weights if it is huge and the others of its weight are not."""
    largest: OutlyingRow | None = None
    for name, _, param in named_parameters(model):
        values = stored(param.detach())
        if values is None or values.dim() < 2 or not values.numel():
            continue
        rows = values.float().abs().flatten(1).amax(1)
        row = int(rows.argmax())
        candidate = OutlyingRow(name, row, float(rows[row]), float(rows.median()))
        is_outlying = candidate.magnitude > HUGE and candidate.magnitude > _TIMES * candidate.median
        if is_outlying and (largest is None or candidate.magnitude > largest.magnitude):
            largest = candidate
    return largest
