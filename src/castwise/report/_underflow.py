"""Estimates how many numbers of a sample were lost to underflow, including those that are already zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from castwise.monitor._formats import FP16, LOW_PRECISION
from castwise.report._record_numbers import Record, count_below, log2_scale, number

# Gradients computed in fp16 end at its smallest number. A smaller share there is the natural end of a tail.
CUT_OFF_FROM = 0.01
# Share of the nonzero numbers: if most are subnormal, the zeros were smaller numbers.
MOSTLY = 0.5

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
    def of(cls, sample: Record, kind: str) -> Underflow:
        """Estimate the underflow of a sample's "modules" (gradients, which are scaled) or "activations"."""
        is_gradients = kind == "modules"
        scale = number(sample["scale"]) if is_gradients else 1.0
        modules = sample.get(kind, {})
        parts = {module: {"": stats} for module, stats in modules.items()}
        if is_gradients:
            parts |= _by_module(sample.get("gradients", {}), modules)
        cut_off = {
            module: [stats for stats in each.values() if _is_cut_off(stats, scale)] for module, each in parts.items()
        }
        has_cut_off = any(cut_off.values())
        is_moving = any(number(stats["largest"]) > 0 for stats in modules.values())
        counts_empty = has_cut_off or (
            is_gradients and scale != 1.0 and is_moving and not _reaches_below(modules, scale)
        )
        outputs = sample.get("activations", {}) if is_gradients else {}
        zeros = {}
        for module, each in parts.items():
            lost = list(cut_off[module])
            if counts_empty and _took_part(module, outputs):
                lost += [stats for stats in each.values() if number(stats["zero"]) == 1.0]
            elements = sum(int(stats["numel"]) for stats in each.values())
            if lost and elements:
                zeros[module] = sum(number(stats["zero"]) * int(stats["numel"]) for stats in lost) / elements
        return cls(scale, zeros, frozenset(module for module, found in cut_off.items() if found))

    def is_cut_off(self, module: str) -> bool:
        """Return True if fp16 has cut off a histogram of a module."""
        return module in self.cut_off

    def share(self, module: str, stats: Record, number_format: str) -> float:
        """Return the share of all elements that were lost.

        Args:
            module: The module's name in the sample.
            stats: The module's STATS record in the sample.
            number_format: A name in `LOW_PRECISION`.
        """
        measured = number(stats["formats"][number_format]["flush"])
        if number_format in _FINER_THAN_FP16:
            return measured
        return min(measured + self.zeros.get(module, 0.0), 1.0)


def _by_module(gradients: Record, modules: Record) -> dict[str, dict[str, Record]]:
    """Group the STATS of parameters by module, for modules that have records."""
    found: dict[str, dict[str, Record]] = {}
    for parameter, stats in gradients.items():
        module = parameter.rpartition(".")[0]
        if module in modules:
            found.setdefault(module, {})[parameter] = stats
    return found


def _took_part(module: str, outputs: Record) -> bool:
    """Return False if a module has no outputs although others have, and so was not used."""
    return not outputs or module in outputs or not module


def _reaches_below(modules: Record, scale: float) -> bool:
    """Return True if there are numbers below fp16's smallest, so that they were not computed in fp16."""
    smallest = FP16.smallest_subnormal_exponent - log2_scale(scale)
    below = sum(count_below(stats, smallest) for stats in modules.values())
    return below >= CUT_OFF_FROM * sum(sum(stats["exponents"]["counts"]) for stats in modules.values())


def _is_cut_off(stats: Record, scale: float) -> bool:
    counts: list[int] = stats["exponents"]["counts"]
    place = next((place for place, count in enumerate(counts) if count), None)
    if place is None:
        return False
    shift, smallest = log2_scale(scale), FP16.smallest_subnormal_exponent
    lowest = stats["exponents"]["lowest"] + place + shift
    if lowest < smallest or (scale == 1.0 and not _is_fp16s(number(stats["smallest"]))):
        return False
    return count_below(stats, FP16.smallest_normal_exponent - shift) > MOSTLY * sum(counts) or (
        lowest == smallest and counts[place] >= CUT_OFF_FROM * int(stats["numel"])
    )


def _is_fp16s(magnitude: float) -> bool:
    """Return True for one of fp16's seven smallest numbers, which bf16 and fp32 rarely hit exactly."""
    return magnitude / FP16.smallest_subnormal in range(1, 8)
