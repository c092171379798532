"""Modules ranked by how close they are to overflow or underflow in fp16."""

from __future__ import annotations

import math
from dataclasses import dataclass

from castwise.report._range_advice import ACTIVATION_HEADROOM_BITS
from castwise.report._run_facts import Ranges, RunFacts
from castwise.report._scale_window import FLUSH_MATTERS, GRADIENT_HEADROOM_BITS


@dataclass(frozen=True)
class WorstModule:
    """A module's worst numbers in fp16.

    Args:
        name: Qualified name; "" is the model.
        gradients: Ranges of the gradients of the module's own parameters; None if it has none.
        outputs: Ranges of the module's outputs; None if they were not sampled.
        blamed: Number of recorded overflows that name one of the module's parameters.
        is_diagnosed: Whether a diagnosis names the module.
    """

    name: str
    gradients: Ranges | None
    outputs: Ranges | None
    blamed: int
    is_diagnosed: bool = False

    @property
    def nonfinite(self) -> int:
        """Number of samples in which its gradients or its outputs had an inf or NaN."""
        return len({step for ranges in (self.gradients, self.outputs) if ranges for step in ranges.nonfinite_steps})

    @property
    def danger(self) -> float:
        """The worst ratio to a threshold of the verdict, on a linear scale; 1 is at the threshold."""
        over = [float(self.blamed)]
        if self.gradients:
            over.append(_times_over(self.gradients.headroom_bits, GRADIENT_HEADROOM_BITS))
            over.append(self.gradients.flush / FLUSH_MATTERS)
        if self.outputs:
            over.append(_times_over(self.outputs.headroom_bits, ACTIVATION_HEADROOM_BITS))
        return max(over)


def worst_modules(facts: RunFacts) -> list[WorstModule]:
    """Return all sampled modules: diagnosed ones first, then the most endangered; ties in model order."""
    diagnosed = {each.module: None for each in facts.diagnosed if each.module}
    names = {**diagnosed, **facts.gradients, **facts.activations}
    found = [
        WorstModule(name, facts.gradients.get(name), facts.activations.get(name), facts.blamed(name), name in diagnosed)
        for name in names
    ]
    return sorted(found, key=lambda module: (not module.is_diagnosed, -module.danger))


def _times_over(headroom_bits: float, wanted_bits: float) -> float:
    return math.inf if headroom_bits < -1000 else 2.0 ** (wanted_bits - headroom_bits)
