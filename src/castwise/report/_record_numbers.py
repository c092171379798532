"""Reading numbers from run records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from castwise._number_text import ranks

Record = Mapping[str, Any]


def number(value: object) -> float:
    """Convert a record's value to float; a missing value is NaN."""
    if type(value) is float:  # true for nearly all of millions of values
        return value
    return float(value) if isinstance(value, (int, float)) else math.nan


def exponent_counts(stats: Record) -> dict[int, int]:
    """Return the histogram of a STATS record as counts by exponent."""
    exponents = stats["exponents"]
    return {exponent: count for exponent, count in enumerate(exponents["counts"], exponents["lowest"]) if count}


def count_below(stats: Record, exponent: int) -> int:
    """Return the number of elements v of a STATS record with 0 < |v| < 2^exponent."""
    exponents = stats["exponents"]
    return int(sum(exponents["counts"][: max(exponent - exponents["lowest"], 0)]))


def log2_scale(scale: float) -> int:
    """Return the exponent of the power of two nearest to a scale; 0 for an invalid scale."""
    return round(math.log2(scale)) if scale > 0 and math.isfinite(scale) else 0


def on_ranks(records: Iterable[Record]) -> str:
    """Return text such as " on rank 1" if every record names a rank (for a skip, the rank that caused it), else ""."""
    named = [record.get("rank") for record in records]
    found = {rank for rank in named if rank is not None}
    return f" on {ranks(found)}" if found and None not in named else ""
