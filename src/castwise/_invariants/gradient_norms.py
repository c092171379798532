"""`GradientNorms`: the norms of gradients by parameter in the last steps, which are recorded around a spike alone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from castwise.amp._readback import Readback

BEFORE, AFTER = 32, 8
"""Steps around a spike whose norms are recorded."""
_MOST = 40  # parameters


@dataclass(frozen=True)
class NormsAround:
    """Norms of gradients in the steps around a spike.

    Args:
        step: The step of the spike.
        steps: The steps, relative to it.
        norms: The norm in each of these steps by parameter, that which has risen most first; at most 40 parameters.
    """

    step: int
    steps: tuple[int, ...]
    norms: Mapping[str, tuple[float, ...]]


class GradientNorms:
    """Keeps the norms of the last steps of an optimizer."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Sequence[torch.Tensor], Sequence[float] | Readback]]
        self._kept = deque(maxlen=BEFORE + 1 + AFTER)
        self._spike: int | None = None

    def note(self, step: int, params: Sequence[torch.Tensor], norms: Sequence[float] | Readback) -> None:
        """Note the norms of a step, which may still be on their way to the host."""
        self._kept.append((step, params, norms))

    def beside_second_moments(self, optimizer: torch.optim.Optimizer) -> dict[int, float]:
        """Return the last gradients' root mean squares over the roots of their mean second moments, by parameter's id.

        Empty without second moments as those of Adam, and for norms that are still on an accelerator.
        """
        _, params, norms = self._kept[-1] if self._kept else (0, (), ())
        found = {}
        for param, norm in zip(params, () if isinstance(norms, Readback) else norms, strict=False):
            second = optimizer.state.get(param, {}).get("exp_avg_sq")
            if type(second) is torch.Tensor and second.shape == param.shape and (total := float(second.sum())) > 0.0:
                found[id(param)] = norm / math.sqrt(total)
        return found

    def note_spike(self, step: int) -> None:
        """Note a spike, whose norms are due a few steps later."""
        self._spike = step if self._spike is None else self._spike

    def due(self, names: Callable[[], Mapping[int, str]], *, is_end: bool = False) -> Iterator[NormsAround]:
        """Yield the norms around a spike, once, if all of them are known or the run ends.

        Args:
            names: Returns the names of parameters by their ids.
            is_end: Whether no more steps follow.
        """
        spike = self._spike
        if spike is None or not self._kept or (self._kept[-1][0] < spike + AFTER and not is_end):
            return
        self._spike = None
        params, by_id = self._kept[-1][1], names()
        near = [kept for kept in self._kept if kept[0] >= spike - BEFORE]
        same = [(step, _known(norms)) for step, of_step, norms in near if [*map(id, of_step)] == [*map(id, params)]]
        columns = {by_id[id(p)]: [norms[i] for _, norms in same] for i, p in enumerate(params) if id(p) in by_id}
        before = sum(step < spike for step, _ in same)
        largest = sorted(columns, key=lambda name: -_rise(columns[name], before))[:_MOST]
        if largest and before:
            yield NormsAround(spike, tuple(step - spike for step, _ in same), {n: tuple(columns[n]) for n in largest})


def _known(norms: Sequence[float] | Readback) -> Sequence[float]:
    """Return norms on the host, which waits for those of the last steps of a run alone."""
    return norms.wait().tolist() if isinstance(norms, Readback) else norms


def _rise(norms: Sequence[float], before: int) -> float:
    """Return the largest logarithm of a norm over the median of those before the spike; inf if one is not finite."""
    usual = median(norms[: max(before, 1)])
    if not all(map(math.isfinite, norms)):
        return math.inf
    return math.log(max(norms) / usual) if usual > 0.0 and max(norms) > 0.0 else 0.0
