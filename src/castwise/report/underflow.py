"""How much of a sample's numbers was lost to underflow, where what was lost is zero already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from castwise.monitor.formats import FP16, LOW_PRECISION
from castwise.report.record_numbers import Record, count_below, log2_scale, number

# Gradients that fp16 has computed end at its smallest number. Fewer there are a tail that ends by itself.
CUT_OFF_FROM = 0.01
# Of the numbers that are not zero: where most are subnormal, zeros are what was smaller still.
MOSTLY = 0.5

_FINER_THAN_FP16 = {name for name, each in LOW_PRECISION.items() if each.smallest_subnormal < FP16.smallest_subnormal}


@dataclass(frozen=True)
class Underflow:
    """How much of the numbers of one sample was lost to underflow, in a format that they may have been through.

    What would round to zero is measured. Gradients that were computed in fp16 hold nothing that would: it is zero
    already. All zeros of a parameter are counted

    - if its histogram is cut off: it has elements at fp16's smallest number and none below, or most are subnormal
      and none below; without a scale, its smallest must also be one of fp16's smallest;
    - if they are all that it has, beside gradients that are not zero; without a scale, which is no sign of fp16, only
      where fp16 has cut off a histogram of the sample.

    Zeros beside large numbers are not: rows of an embedding that a batch does not use. Some of those that are counted
    may be honest, so these shares are upper bounds.

    Args:
        scale: What the numbers were held times of.
        zeros: Share of a module's elements that are zeros which fp16 has probably made; modules without are left out.
        cut_off: The modules with a histogram that is cut off.
    """

    scale: float
    zeros: Mapping[str, float]
    cut_off: frozenset[str]

    @classmethod
    def of(cls, sample: Record, kind: str) -> Underflow:
        """Of the "modules" (gradients, which are scaled) or the "activations" of a sample."""
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
        """Whether fp16 has cut off a histogram of a module."""
        return module in self.cut_off

    def share(self, module: str, stats: Record, number_format: str) -> float:
        """Share of all elements that were lost.

        Args:
            module: Its name in the sample.
            stats: Its STATS record there.
            number_format: A name in `LOW_PRECISION`.
        """
        measured = number(stats["formats"][number_format]["flush"])
        if number_format in _FINER_THAN_FP16:
            return measured
        return min(measured + self.zeros.get(module, 0.0), 1.0)


def _by_module(gradients: Record, modules: Record) -> dict[str, dict[str, Record]]:
    """The STATS of parameters by the module that holds them, for those modules that have records."""
    found: dict[str, dict[str, Record]] = {}
    for parameter, stats in gradients.items():
        module = parameter.rpartition(".")[0]
        if module in modules:
            found.setdefault(module, {})[parameter] = stats
    return found


def _took_part(module: str, outputs: Record) -> bool:
    """Whether a module may have been used: one without outputs was not, if outputs of others were seen."""
    return not outputs or module in outputs or not module


def _reaches_below(modules: Record, scale: float) -> bool:
    """Whether numbers go on below fp16's smallest, which they do not after fp16."""
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
    """Whether a number is one of the seven smallest of fp16, as hardly any is that bf16 or fp32 made there."""
    return magnitude / FP16.smallest_subnormal in range(1, 8)
