"""Numbers of the records of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from castwise._number_text import ranks

Record = Mapping[str, Any]


def number(value: object) -> float:
    """Return what a record holds as a float; a missing value is NaN."""
    if type(value) is float:  # as nearly all of the millions of them are
        return value
    return float(value) if isinstance(value, (int, float)) else math.nan


def exponent_counts(stats: Record) -> dict[int, int]:
    """The histogram of a STATS record, by exponent."""
    exponents = stats["exponents"]
    return {exponent: count for exponent, count in enumerate(exponents["counts"], exponents["lowest"]) if count}


def count_below(stats: Record, exponent: int) -> int:
    """Number of elements v of a STATS record with 0 < |v| < 2^exponent."""
    exponents = stats["exponents"]
    return int(sum(exponents["counts"][: max(exponent - exponents["lowest"], 0)]))


def log2_scale(scale: float) -> int:
    """The nearest power of two, by which a scale shifts exponents; 0 for what is no scale."""
    return round(math.log2(scale)) if scale > 0 and math.isfinite(scale) else 0


def on_ranks(records: Iterable[Record]) -> str:
    """Return " on rank 1" if each of these records names a rank, such as the one for whose fault a step was skipped."""
    named = [record.get("rank") for record in records]
    found = {rank for rank in named if rank is not None}
    return f" on {ranks(found)}" if found and None not in named else ""
