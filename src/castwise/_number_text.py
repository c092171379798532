"""Formatting of a run's numbers, shared by the verdict, the report and the terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def power_of_two(scale: float) -> str:
    """Format a positive number as a power of two, as scales usually are: 65536 is "2^16"."""
    if not math.isfinite(scale) or scale <= 0:
        return f"{scale:g}"
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"2^{math.log2(scale):.1f}"


def percent(share: float) -> str:
    """Format a share with two significant digits; only exactly 0 and 1 become 0% and 100%."""
    if share in (0.0, 1.0) or not math.isfinite(share):
        return f"{100 * share:g}%"
    if share < 1e-6:
        return "under 0.0001%"
    if share > 0.995:
        return "over 99.5%"
    return f"{float(f'{100 * share:.2g}'):g}%"


def bits(value: float) -> str:
    """Format a number of bits to a tenth, which is as precise as a sample is."""
    return f"{value:.1f}" if math.isfinite(value) else f"{value:g}"


def headroom(value: float) -> str:
    """Format bits of headroom; the headroom is infinite where all numbers are zero."""
    return f"{bits(value)} bits" if math.isfinite(value) else "all zero"


def loss_text(loss: float) -> str:
    """Format a loss with four significant digits, and as "NaN" and "inf"."""
    return "NaN" if math.isnan(loss) else f"{loss:.4g}"


def several(count: int, singular: str) -> str:
    """Format a count with its noun: "1 step", "2,000 steps"."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def joined(words: Sequence[str]) -> str:
    """Return words as they stand in a sentence: "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def ranks(numbers: Collection[int]) -> str:
    """Format ranks as "rank 1" or "ranks 0 and 2", and four or more by their count: "4 ranks"."""
    if len(numbers) > 3:
        return several(len(numbers), "rank")
    return f"rank{'' if len(numbers) == 1 else 's'} {joined([*map(str, sorted(numbers))])}"
