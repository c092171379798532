"""`are_bf16`: whether modules returned bf16 numbers, which their digits show. Records have no dtypes.

A bf16 number has 8 significant bits, and records have 4 significant digits, which are about 13. Of numbers with more
bits, between 1 in 60 and 1 in 4 are as near to a bf16 number, so that a few values in a row are no coincidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from castwise.monitor._formats import BF16
from castwise.monitor._records import SampleRecord

# Values of a module that are needed to judge it.
_ENOUGH_VALUES = 8
# Norms, embeddings and what adds to a residual stream return fp32 in autocast regions.
_ENOUGH_MODULES = 0.25
# Numbers with fewer significant bits, such as 6 or 0.5, are numbers of every format.
_TELLING_BITS = 4
_SIGNIFICANT_BITS = BF16.mantissa_bits + 1


def are_bf16(samples: Sequence[SampleRecord]) -> bool:
    """Return True if at least a quarter of the modules with enough samples returned nothing but bf16 numbers."""
    values: dict[str, set[float]] = {}
    for sample in samples:
        for module, stats in sample.activations.items():
            if not stats.nonfinite:
                known = (stats.largest, stats.smallest or 0.0)
                values.setdefault(module, set()).update(value for value in known if 0.0 < value < math.inf)
    telling = [found for found in map(_telling, values.values()) if len(found) >= _ENOUGH_VALUES]
    like_bf16 = sum(all(map(_is_bf16, found)) for found in telling)
    return like_bf16 > 0 and like_bf16 >= _ENOUGH_MODULES * len(telling)


def _telling(values: Iterable[float]) -> list[float]:
    return [value for value in values if not _has_few_bits(value)]


def _has_few_bits(value: float) -> bool:
    scaled = math.ldexp(math.frexp(value)[0], _TELLING_BITS)
    return scaled == int(scaled)


def _is_bf16(value: float) -> bool:
    mantissa, exponent = math.frexp(value)
    nearest = math.ldexp(round(math.ldexp(mantissa, _SIGNIFICANT_BITS)), exponent - _SIGNIFICANT_BITS)
    return f"{nearest:.4g}" == f"{value:.4g}"
