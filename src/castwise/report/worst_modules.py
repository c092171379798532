"""Modules in order of how near they are to losing numbers in fp16."""

from __future__ import annotations

import math
from dataclasses import dataclass

from castwise.report.range_advice import ACTIVATION_HEADROOM_BITS
from castwise.report.run_facts import Ranges, RunFacts
from castwise.report.scale_window import FLUSH_MATTERS, GRADIENT_HEADROOM_BITS


@dataclass(frozen=True)
class WorstModule:
    """A module's worst numbers in fp16.

    Args:
        name: Qualified; "" is the model.
        gradients: Ranges of the gradients of its own parameters; None if it has none.
        outputs: Ranges of its outputs; None if they were not sampled.
        blamed: Overflows in which a gradient of one of its parameters was not finite, as far as they were named.
        is_diagnosed: Whether a diagnosis names it.
    """

    name: str
    gradients: Ranges | None
    outputs: Ranges | None
    blamed: int
    is_diagnosed: bool = False

    @property
    def danger(self) -> float:
        """How many times over the verdict's worst threshold it is, in linear numbers: 1 is at the threshold."""
        over = [float(self.blamed)]
        if self.gradients:
            over.append(_times_over(self.gradients.headroom_bits, GRADIENT_HEADROOM_BITS))
            over.append(self.gradients.flush / FLUSH_MATTERS)
        if self.outputs:
            over.append(_times_over(self.outputs.headroom_bits, ACTIVATION_HEADROOM_BITS))
        return max(over)


def worst_modules(facts: RunFacts) -> list[WorstModule]:
    """All sampled modules: those that a diagnosis names, then the most endangered; equals in the model's order."""
    diagnosed = {each.module: None for each in facts.diagnosed if each.module}
    names = {**diagnosed, **facts.gradients, **facts.activations}
    found = [
        WorstModule(name, facts.gradients.get(name), facts.activations.get(name), facts.blamed(name), name in diagnosed)
        for name in names
    ]
    return sorted(found, key=lambda module: (not module.is_diagnosed, -module.danger))


def _times_over(headroom_bits: float, wanted_bits: float) -> float:
    return math.inf if headroom_bits < -1000 else 2.0 ** (wanted_bits - headroom_bits)
