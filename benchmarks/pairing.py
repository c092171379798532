"""Paired timing of rivals, and the verdict on their difference.

In each round every rival runs once, in random order, so that a clock change or a busy neighbour affects all of them.
Ratios compare times of the same round. torch runs twice in a round, as `TORCH` and as `AGAIN`; the apparent difference
between the two is the machine's noise, and smaller differences do not count.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar

import torch

TORCH, CASTWISE, AGAIN = "torch", "castwise", "torch again"
CONFIDENCE = 0.95
FEWEST = 9  # with this many rounds, the interval excludes the lowest and the highest ratio
QUICK_S = 2.0  # patience of a quick plan
SAME_WITHIN = 0.05  # a smaller difference is no reason to switch libraries

Verdict = Literal["faster", "slower", "as fast", "cannot tell"]
CANNOT_TELL: Verdict = "cannot tell"
_Rival = TypeVar("_Rival")


@dataclass(frozen=True)
class Rounds:
    """The number of rounds.

    Args:
        most: Maximum number of rounds; at least 2.
        patience_s: Seconds after which nine rounds are enough.
    """

    most: int
    patience_s: float = math.inf


class Ratio(TypedDict):
    """Ratios of paired times.

    Attributes:
        median: The median ratio.
        quartiles: First and third quartile.
        interval: Confidence interval of the median, at 95%.
        rounds: Number of rounds.
    """

    median: float
    quartiles: list[float]
    interval: list[float]
    rounds: int


class Comparison(Ratio):
    """castwise's seconds over torch's, with a verdict.

    Attributes:
        null: Ratio of torch to itself; its distance from 1 is the machine's noise.
        verdict: The verdict on castwise.
    """

    null: Ratio
    verdict: Verdict


def race(
    rivals: Mapping[_Rival, Callable[[], float]], rounds: Rounds, warm_up: int = 2, seed: int = 0
) -> dict[_Rival, list[float]]:
    """Run rivals in turns, in a new random order for each round.

    Args:
        rivals: By name, a function that runs a rival once and returns the seconds it took.
        rounds: Number of rounds to keep.
        warm_up: Number of rounds to discard, which load kernels and fill caches.
        seed: Seed for the orders; ranks that run together need the same one.

    Returns:
        The seconds of each rival, by round.

    Example:
        >>> race({"a": lambda: 1.0, "b": lambda: 2.0}, Rounds(2))
        {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    draw, names = random.Random(seed), list(rivals)
    taken: dict[_Rival, list[float]] = {name: [] for name in names}
    give_up = time.perf_counter() + rounds.patience_s
    for number in range(warm_up + rounds.most):
        if number >= warm_up + FEWEST and time.perf_counter() > give_up:
            break
        for name in draw.sample(names, len(names)):
            seconds = rivals[name]()
            if number >= warm_up:
                taken[name].append(seconds)
    return taken


def seconds(call: Callable[[], object], device: str, repetitions: int = 1) -> float:
    """Return the mean seconds of a call over some repetitions, including the work it starts on the device."""
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    _wait_for(device)
    return (time.perf_counter() - start) / repetitions


def host_seconds(call: Callable[[], object], device: str) -> float:
    """Return the seconds until a call returns, without waiting for the device."""
    _wait_for(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Compute statistics of the ratios of two rivals' seconds, by round; at least two rounds are needed.

    Example:
        >>> ratio([2.0, 2.0, 3.0], [1.0, 2.0, 2.0])
        {'median': 1.5, 'quartiles': [1.0, 2.0], 'interval': [1.0, 2.0], 'rounds': 3}
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    bounds = interval_of_median(ratios)
    return {"median": middle, "quartiles": [low, high], "interval": list(bounds), "rounds": len(ratios)}


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median that assumes nothing about the distribution (the sign test).

    The median lies below the k-th smallest of n values if fewer than k values are below the median, and each value is
    below it with probability 1/2. Fewer than six values cannot give 95% confidence; the interval then spans them all.

    Example:
        >>> interval_of_median([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0])
        (2.0, 8.0)
    """
    ordered, n = sorted(values), len(values)
    tails = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n // 2))
    left_out = max(sum(tail <= (1 - CONFIDENCE) / 2 for tail in tails) - 1, 0)
    return ordered[left_out], ordered[n - 1 - left_out]


def compare(ours: Sequence[float], theirs: Sequence[float], null: Ratio) -> Comparison:
    """Compare castwise's seconds with torch's, by round."""
    found = ratio(ours, theirs)
    return {**found, "null": null, "verdict": verdict(found, null)}


def verdict(ours_to_theirs: Ratio, theirs_to_itself: Ratio) -> Verdict:
    """Return which of two rivals is faster, if the machine was quiet enough to tell.

    A rival is faster or slower if the whole interval of the ratio lies outside the noise, which is the other's ratio to
    itself. They are as fast if neither interval deviates from 1 by more than 5%. Otherwise the verdict is open.

    Example:
        >>> quiet = ratio([1.0, 1.01, 0.99] * 5, [1.0] * 15)
        >>> busy = ratio([1.0, 1.2, 0.8] * 5, [1.0] * 15)
        >>> ours = ratio([0.9, 0.91, 0.89] * 5, [1.0] * 15)
        >>> verdict(ours, quiet), verdict(ours, busy)
        ('faster', 'cannot tell')
    """
    low, high = ours_to_theirs["interval"]
    below, above = theirs_to_itself["interval"]
    margin = max(above, 1 / below, 1.0)
    if low > margin:
        return "slower"
    if high < 1 / margin:
        return "faster"
    return "as fast" if max(margin, high, 1 / low) <= 1 + SAME_WITHIN else CANNOT_TELL
