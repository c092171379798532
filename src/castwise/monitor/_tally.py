"""`Tally`: statistics of the magnitudes of elements, on the host. Tallies of several tensors can be added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from castwise.monitor._records import Exponents, Stats


@dataclass(frozen=True)
class Tally:
    """Elements by the binary exponents of their magnitudes.

    Args:
        numel: Number of elements, including zeros and non-finite ones.
        zero: Number of zeros.
        nonfinite: Number of infs and NaNs.
        largest: The largest finite magnitude; 0 if there is no finite non-zero element.
        smallest: The smallest non-zero finite magnitude; inf if there is none.
        counts: By exponent e, the number of elements v with 2**e <= |v| < 2**(e + 1), where it is not zero.
    """

    numel: int = 0
    zero: int = 0
    nonfinite: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    counts: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        counts = dict(self.counts)
        for exponent, n in other.counts.items():
            counts[exponent] = counts.get(exponent, 0) + n
        return Tally(
            numel=self.numel + other.numel,
            zero=self.zero + other.zero,
            nonfinite=self.nonfinite + other.nonfinite,
            largest=max(self.largest, other.largest),
            smallest=min(self.smallest, other.smallest),
            counts=counts,
        )

    def times_two_to_the(self, power: int) -> Tally:
        """Return the tally of the elements multiplied by 2**power, without limits on the exponents."""
        return replace(
            self,
            largest=_ldexp(self.largest, power),
            smallest=_ldexp(self.smallest, power),
            counts={exponent + power: n for exponent, n in self.counts.items()},
        )

    def divided_by(self, scale: float) -> Tally:
        """Return the tally of the elements divided by a scale > 0.

        Exponents are shifted by log2(scale), rounded: exact for a power of two, otherwise accurate to within one.
        """
        if scale == 1.0:
            return self
        moved = self.times_two_to_the(-round(math.log2(scale)))
        return replace(moved, largest=self.largest / scale, smallest=self.smallest / scale)

    def of_copies(self, held: int, distinct: int) -> Tally:
        """Return the tally without copies, for a tensor of `distinct` parts that was counted in `held` parts."""
        if held == distinct:
            return self
        return replace(
            self,
            numel=self.numel * distinct // held,
            zero=self.zero * distinct // held,
            nonfinite=self.nonfinite * distinct // held,
            counts={exponent: n * distinct // held for exponent, n in self.counts.items()},
        )

    def stats(self, given: Tally | None = None) -> Stats:
        """Return the statistics of these elements for a record.

        Args:
            given: The tally to use for formats instead, such as that of the gradients while they are scaled.
        """
        stats = self._without_formats()
        scaled = stats if given is None or given == self else given._without_formats()
        return replace(stats, formats=scaled.fits())

    def _without_formats(self) -> Stats:
        lowest, highest = (min(self.counts), max(self.counts)) if self.counts else (0, -1)
        return Stats(
            numel=self.numel,
            largest=self.largest,
            smallest=self.smallest if math.isfinite(self.smallest) else None,
            zero=self.zero / max(self.numel, 1),
            nonfinite=self.nonfinite / max(self.numel, 1),
            exponents=Exponents(lowest, [self.counts.get(exponent, 0) for exponent in range(lowest, highest + 1)]),
        )


def _ldexp(number: float, power: int) -> float:
    try:
        return math.ldexp(number, power)
    except OverflowError:
        return math.inf
