"""Numbers of the records of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def number(value: object) -> float:
    """Return what a record holds as a float; a missing value is NaN."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def exponent_counts(stats: Record) -> dict[int, int]:
    """The histogram of a STATS record, by exponent."""
    lowest = int(stats["exponents"]["lowest"])
    return {lowest + offset: int(count) for offset, count in enumerate(stats["exponents"]["counts"]) if count}


def log2_scale(scale: float) -> int:
    """The nearest power of two, by which a scale shifts exponents; 0 for what is no scale."""
    return round(math.log2(scale)) if scale > 0 and math.isfinite(scale) else 0
