"""Estimates how many numbers of a sample were lost to underflow, including those that are already zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from castwise.monitor._formats import FP16, LOW_PRECISION
from castwise.monitor._records import SampleRecord, Stats, nearest_exponent

# Gradients computed in fp16 end at its smallest number. A smaller share there is the natural end of a tail.
CUT_OFF_FROM = 0.01
# Share of the nonzero numbers: if most are subnormal, the zeros were smaller numbers.
MOSTLY = 0.5

_ByName: TypeAlias = Mapping[str, Stats]
_FINER_THAN_FP16 = {name for name, each in LOW_PRECISION.items() if each.smallest_subnormal < FP16.smallest_subnormal}


@dataclass(frozen=True)
class Underflow:
    """The share of one sample's numbers lost to underflow, including losses that happened before sampling.

    Numbers that would round to zero are measured directly. Gradients computed in fp16 contain none: they are already
    zero. All zeros of a parameter count as lost if

    - its histogram is cut off: no element is below fp16's smallest number, and some are at that number or most are
      subnormal. Without a scale, its smallest element must also be one of fp16's smallest numbers.
    - all its elements are zero while other gradients are not. Without a scale, which would be a sign of fp16, this
      applies only if fp16 has cut off some histogram of the sample.

    Zeros beside large numbers do not count: they may be rows of an embedding that the batch does not use. Some counted
    zeros may be genuine, so these shares are upper bounds.

    Args:
        scale: The scale that the sampled numbers were multiplied by.
        zeros: Share of a module's elements that are zero, probably because of fp16; modules without any are omitted.
        cut_off: Modules with a histogram that is cut off.
    """

    scale: float
    zeros: Mapping[str, float]
    cut_off: frozenset[str]

    @classmethod
    def of(cls, sample: SampleRecord, kind: str) -> Underflow:
        """Estimate the underflow of a sample's "modules" (gradients, which are scaled) or "activations"."""
        is_gradients = kind == "modules"
        scale = sample.scale if is_gradients else 1.0
        modules = sample.modules if is_gradients else sample.activations
        parts = {module: {"": stats} for module, stats in modules.items()}
        if is_gradients:
            parts |= _by_module(sample.gradients, modules)
        cut_off = {
            module: [stats for stats in each.values() if _is_cut_off(stats, scale)] for module, each in parts.items()
        }
        has_cut_off = any(cut_off.values())
        is_moving = any(stats.largest > 0 for stats in modules.values())
        counts_empty = has_cut_off or (
            is_gradients and scale != 1.0 and is_moving and not _reaches_below(modules, scale)
        )
        outputs = sample.activations if is_gradients else {}
        zeros = {}
        for module, each in parts.items():
            lost = list(cut_off[module])
            if counts_empty and _took_part(module, outputs):
                lost += [stats for stats in each.values() if stats.zero == 1.0]
            elements = sum(stats.numel for stats in each.values())
            if lost and elements:
                zeros[module] = sum(stats.zero * stats.numel for stats in lost) / elements
        return cls(scale, zeros, frozenset(module for module, found in cut_off.items() if found))

    def is_cut_off(self, module: str) -> bool:
        """Return True if fp16 has cut off a histogram of a module."""
        return module in self.cut_off

    def share(self, module: str, stats: Stats, number_format: str) -> float:
        """Return the share of all elements that were lost.

        Args:
            module: The module's name in the sample.
            stats: The module's statistics in the sample.
            number_format: A name in `LOW_PRECISION`.
        """
        measured = stats.formats[number_format].flush
        if number_format in _FINER_THAN_FP16:
            return measured
        return min(measured + self.zeros.get(module, 0.0), 1.0)


def _by_module(gradients: _ByName, modules: _ByName) -> dict[str, dict[str, Stats]]:
    """Group the statistics of parameters by module, for modules that have records."""
    found: dict[str, dict[str, Stats]] = {}
    for parameter, stats in gradients.items():
        module = parameter.rpartition(".")[0]
        if module in modules:
            found.setdefault(module, {})[parameter] = stats
    return found


def _took_part(module: str, outputs: _ByName) -> bool:
    """Return False if a module has no outputs although others have, and so was not used."""
    return not outputs or module in outputs or not module


def _reaches_below(modules: _ByName, scale: float) -> bool:
    """Return True if there are numbers below fp16's smallest, so that they were not computed in fp16."""
    smallest = FP16.smallest_subnormal_exponent - nearest_exponent(scale)
    below = sum(stats.exponents.below(smallest) for stats in modules.values())
    return below >= CUT_OFF_FROM * sum(sum(stats.exponents.counts) for stats in modules.values())


def _is_cut_off(stats: Stats, scale: float) -> bool:
    first = next((index for index, count in enumerate(stats.exponents.counts) if count), None)
    if first is None:
        return False
    shift, smallest = nearest_exponent(scale), FP16.smallest_subnormal_exponent
    lowest = stats.exponents.lowest + first + shift
    if lowest < smallest or (scale == 1.0 and not _is_fp16s(stats.smallest)):
        return False
    return stats.exponents.below(FP16.smallest_normal_exponent - shift) > MOSTLY * sum(stats.exponents.counts) or (
        lowest == smallest and stats.exponents.counts[first] >= CUT_OFF_FROM * stats.numel
    )


def _is_fp16s(magnitude: float | None) -> bool:
    """Return True for one of fp16's seven smallest numbers, which bf16 and fp32 rarely hit exactly."""
    return magnitude is not None and magnitude / FP16.smallest_subnormal in range(1, 8)
