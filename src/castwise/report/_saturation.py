"""`saturated_layer`: the first layer whose outputs are all 0, or at the ends of a tanh or sigmoid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from castwise.monitor._records import SampleRecord, Stats

SATURATED = 0.9
"""Share of the outputs from which on a layer passes hardly any gradient on."""


class SaturatedLayer(NamedTuple):
    """A layer whose outputs do not depend on small changes of its inputs.

    Args:
        name: Name of the module.
        share: Share of its outputs that are 0 or 1 in magnitude.
        step: The first sampled step from which on they are.
        is_zero: Whether all of them are 0.
        stops_gradients: Whether most modules get gradients of exactly 0.
    """

    name: str
    share: float
    step: int
    is_zero: bool
    stops_gradients: bool

    def __str__(self) -> str:
        what = "All outputs" if self.is_zero else f"{self.share:.0%} of the outputs"
        values = "0" if self.is_zero else "0, 1 or -1"
        where = f"of {self.name}" if self.name else "of the model"
        then = ", and most modules get no gradients" if self.stops_gradients else ""
        return f"{what} {where} are {values} from step {self.step:,} on{then}."


def saturated_layer(samples: Sequence[SampleRecord]) -> SaturatedLayer | None:
    """Return the first such layer of the last sample, in the order of the modules; None if there is none.

    Args:
        samples: The samples of a run.
    """
    last = next((sample for sample in reversed(samples) if sample.activations), None)
    if last is None:
        return None
    for name, stats in last.activations.items():
        share = _share(stats)
        if share < SATURATED:
            continue
        since = last.step
        for sample in reversed(samples):
            if name in sample.activations and _share(sample.activations[name]) < SATURATED:
                break
            since = sample.step if name in sample.activations else since
        gradients = [module.largest for module in last.modules.values()]
        stops = sum(largest == 0.0 for largest in gradients) * 2 > len(gradients)
        return SaturatedLayer(name, share, since, stats.zero == 1.0, stops)
    return None


def _share(stats: Stats) -> float:
    """Return the share of elements that are 0 or 1 in magnitude, 0 if any is larger or the layer is not bounded."""
    if not stats.numel or stats.nonfinite or stats.largest > 1.0:
        return 0.0
    if stats.zero == 1.0:
        return 1.0
    ones = sum(count for exponent, count in stats.exponents.items() if exponent == 0)
    return stats.zero + ones / stats.numel if ones else 0.0
