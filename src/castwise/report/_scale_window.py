"""The range of scales at which sampled gradients fit into fp16."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from castwise.monitor._formats import FP16
from castwise.report._run_facts import Ranges

# Half of fp16's smallest subnormal; smaller numbers round to zero.
FP16_FLUSH_EXPONENT = FP16.smallest_subnormal_exponent - 1

# Micikevicius et al. 2018 (section 3.1) found accuracy lost where about 5% of gradient values were below 2^-24.
FLUSH_MATTERS = 0.05
# One bit in case Dynamic doubles the scale between two samples, and one for steps that were not sampled.
GRADIENT_HEADROOM_BITS = 2.0


@dataclass(frozen=True)
class Fit:
    """The scales at which all sampled gradients fit into fp16, as exponents of two.

    Args:
        lowest: Lowest exponent at which every module loses less than `FLUSH_MATTERS` of its gradients to underflow. For
            gradients that fp16 has cut off, a lower bound: one more than the exponent in use.
        neediest: The module that needs `lowest`.
        highest: Highest exponent that leaves `GRADIENT_HEADROOM_BITS` above the largest gradient.
        largest: The module with the largest gradient.
    """

    lowest: int
    neediest: Ranges
    highest: int
    largest: Ranges

    @classmethod
    def of(cls, gradients: Collection[Ranges]) -> Fit | None:
        """Return the scales that fit `gradients`, or None if all are zero; no scale fits if lowest > highest."""
        moving = [ranges for ranges in gradients if ranges.largest > 0]
        if not moving:
            return None
        largest = max(moving, key=lambda ranges: ranges.largest)
        highest = math.floor(math.log2(FP16.largest / largest.largest) - GRADIENT_HEADROOM_BITS)
        neediest = max((ranges for ranges in gradients if ranges.exponents or ranges.cut_off), key=_lowest_scale)
        return cls(_lowest_scale(neediest), neediest, highest, largest)

    @property
    def is_guess(self) -> bool:
        """Whether `lowest` is only a lower bound: more than the scale in use."""
        return _is_lost(self.neediest)

    def headroom_bits(self, exponent: int) -> float:
        """Return the bits between the largest gradient at scale 2^exponent and fp16's largest number."""
        return math.log2(FP16.largest / self.largest.largest) - exponent

    def nearest(self, scale: float) -> int:
        """Return the exponent of the fitting scale nearest to `scale`."""
        return min(max(math.floor(math.log2(scale)), self.lowest), self.highest)


def flush_at(ranges: Ranges, exponent: int) -> float:
    """Return the exact share of a module's gradients that round to zero in fp16 at scale 2^exponent."""
    return ranges.share_below(FP16_FLUSH_EXPONENT - exponent)


def _is_lost(ranges: Ranges) -> bool:
    return ranges.cut_off > 0 and ranges.cut_off >= FLUSH_MATTERS * ranges.elements


def _lowest_scale(ranges: Ranges) -> int:
    """Return the lowest scale exponent at which less than `FLUSH_MATTERS` of the gradients round to zero."""
    if _is_lost(ranges):
        return math.floor(math.log2(ranges.scale)) + 1
    lost = 0
    for exponent in sorted(ranges.exponents):
        lost += ranges.exponents[exponent]
        if lost >= FLUSH_MATTERS * ranges.elements:
            return FP16_FLUSH_EXPONENT - exponent  # this bin must survive: 2^exponent scaled is 2^-25
    return FP16_FLUSH_EXPONENT - max(ranges.exponents)  # too many zeros for any scale to matter
