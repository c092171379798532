"""How numbers of a run are written for people, the same in the verdict, the report and the terminal."""

from __future__ import annotations

import math
from collections.abc import Collection


def power_of_two(scale: float) -> str:
    """Return a positive number as a power of two, the unit scales are chosen in: 65536 is "2^16"."""
    if not math.isfinite(scale) or scale <= 0:
        return f"{scale:g}"
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"2^{math.log2(scale):.1f}"


def percent(share: float) -> str:
    """Return a share with two significant digits, and never as 0% or 100% what is not."""
    if share in (0.0, 1.0) or not math.isfinite(share):
        return f"{100 * share:g}%"
    if share < 1e-6:
        return "under 0.0001%"
    if share > 0.995:
        return "over 99.5%"
    return f"{float(f'{100 * share:.2g}'):g}%"


def bits(value: float) -> str:
    """Return a number of bits, of which a tenth is as much as a sample tells."""
    return f"{value:.1f}" if math.isfinite(value) else f"{value:g}"


def headroom(value: float) -> str:
    """Return bits of headroom, which are without end where all numbers are zero."""
    return f"{bits(value)} bits" if math.isfinite(value) else "all zero"


def several(count: int, singular: str) -> str:
    """Return a count and what is counted."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def ranks(numbers: Collection[int]) -> str:
    """Return "rank 1", "ranks 0 and 2", or how many there are."""
    *others, last = map(str, sorted(numbers))
    if len(others) >= 3:
        return several(len(numbers), "rank")
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
