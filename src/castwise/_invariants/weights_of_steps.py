"""`WeightsOfSteps`: digests of the weights before each step, which tell ranks from which step on theirs differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from castwise._digests import digest, digests
from castwise.amp._devices import is_capturing
from castwise.amp._readback import Readback

_KEPT = 100  # steps: those between three checks


class Differ(NamedTuple):
    """The last step before which weights were equal, and the first before which they were not; 0 if not known."""

    equal: int = 0
    apart: int = 0


class WeightsOfSteps:
    """Keeps digests of each weight before the last steps. No step waits for the device."""

    def __init__(self) -> None:
        self._noted: deque[tuple[int, torch.Tensor]] = deque(maxlen=_KEPT)
        self._sent: tuple[Sequence[int], Readback] | None = None
        self._known: dict[int, tuple[int, torch.Tensor]] = {}  # eight bytes for all weights, and those of each

    def note(self, step: int, weights: Iterable[torch.Tensor]) -> None:
        """Compute the digests before a step."""
        local = [_local(weight) for weight in weights]
        if local and not any(map(is_capturing, local)):
            self._noted.append((step, digests(local)))

    def send(self) -> None:
        """Start to copy the digests to the host."""
        if self._noted:
            steps, rows = zip(*self._noted, strict=True)
            self._sent = steps, Readback(torch.stack(rows))
            self._noted.clear()

    def receive(self) -> None:
        """Take the digests that were sent; waits for them."""
        if self._sent is not None:
            steps, readback = self._sent
            found = {step: (int(digest(row)), row) for step, row in zip(steps, readback.wait(), strict=True)}
            self._known, self._sent = dict([*self._known.items(), *found.items()][-_KEPT:]), None

    def before(self, step: int) -> Sequence[int]:
        """Return the digest of each weight before a step; empty if it is not known."""
        return self._known[step][1].tolist() if step in self._known else ()

    def written(self) -> str:
        """Return text with each step and eight bytes for all weights before it; empty if none is known."""
        return " ".join(f"{step}:{total}" for step, (total, _) in self._known.items())

    def differ(self, written: str, since: int, until: int) -> Differ:
        """Return the first difference from the steps another rank has written, in a range of steps."""
        pairs = (pair.split(":") for pair in written.split())
        theirs = {int(step): int(total) for step, total in pairs}
        steps = sorted(step for step in self._known.keys() & theirs.keys() if since <= step <= until)
        apart = next((step for step in steps if self._known[step][0] != theirs[step]), 0)
        return Differ(max((step for step in steps if step < apart), default=since), apart) if apart else Differ()


def _local(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight; zeros instead of what has no bits to compare."""
    if weight.is_meta or weight.layout is not torch.strided:
        return torch.zeros(1)
    return weight.to_local() if hasattr(weight, "to_local") else weight
