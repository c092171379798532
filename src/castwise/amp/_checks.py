"""Checks of numeric arguments: each returns a plain number, or raises an error that quotes the value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

# The smallest normal fp32 number and the largest: their reciprocals are finite in fp32 and not 0.
MIN_SCALE = 2.0**-126
MAX_SCALE = (2.0 - 2.0**-23) * 2.0**127


def check_scale(name: str, value: object) -> float:
    """Return `value` as a float; raise unless fp32 can hold it and its reciprocal."""
    scale = real_number(name, value)
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"{name} must be a finite number > 0, within [2**-126, 3.4e38], got {value!r}")
    return scale


def real_number(name: str, value: object) -> float:
    """Return `value` as a float; raise a TypeError unless it is a real number and not a bool."""
    if type(value) is float:  # the usual case; the check against the abstract base class is slow
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def at_least(name: str, value: object, lowest: float) -> float:
    """Return `value` as a float; raise unless it is a finite number >= `lowest`."""
    number = real_number(name, value)
    if not lowest <= number < math.inf:
        raise ValueError(f"{name} must be a finite number >= {lowest:g}, got {value!r}")
    return number


def integer(name: str, value: object) -> int:
    """Return `value` as an int; raise a TypeError unless it is an integer and not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    return int(value)


def count(name: str, value: object, lowest: int, bits: int = 31) -> int:
    """Return `value` as an int; raise unless it is an integer in [lowest, 2**bits)."""
    number = integer(name, value)
    if not lowest <= number < 2**bits:
        raise ValueError(f"{name} must be an integer in [{lowest}, 2**{bits}), got {value!r}")
    return number


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise a ValueError unless `value` is one of the allowed strings."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
