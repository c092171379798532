"""Rivals that take turns, and what may be said of the difference between them.

In each round every rival runs once, in random order: a change of clock or a busy neighbour hits all of them, and a
ratio is one of times of the same round. torch's library runs twice in a round, as `TORCH` and as `AGAIN`. How far it
seems to be from itself is what this machine makes of no difference at all, and nothing smaller than that is believed.
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
FEWEST = 9  # rounds of which the lowest and the highest ratio may be forgotten at this confidence
QUICK_S = 2.0  # patience of `--quick`
SAME_WITHIN = 0.05  # no reason to train with another library

Verdict = Literal["faster", "slower", "as fast", "cannot tell"]
CANNOT_TELL: Verdict = "cannot tell"
_Rival = TypeVar("_Rival")


@dataclass(frozen=True)
class Rounds:
    """How often rivals take turns.

    Args:
        most: So many times, if that is soon enough; at least 2.
        patience_s: After so many seconds nine rounds are enough.
    """

    most: int
    patience_s: float = math.inf


class Ratio(TypedDict):
    """Ratios of times that were taken in pairs.

    Attributes:
        median: The median ratio.
        quartiles: First and third quartile.
        interval: Bounds that hold the median of all rounds there could be, with a confidence of 95%.
        rounds: How many there were.
    """

    median: float
    quartiles: list[float]
    interval: list[float]
    rounds: int


class Comparison(Ratio):
    """castwise's seconds over torch's, and what may be said of them.

    Attributes:
        null: Of torch to itself; how far it is from 1 is what nothing makes on this machine.
        verdict: Of castwise.
    """

    null: Ratio
    verdict: Verdict


def race(
    rivals: Mapping[_Rival, Callable[[], float]], rounds: Rounds, warm_up: int = 2, seed: int = 0
) -> dict[_Rival, list[float]]:
    """Let rivals take turns, in an order that is drawn anew for each round.

    Args:
        rivals: By name, what runs a rival once and returns how many seconds that took.
        rounds: How many to keep.
        warm_up: How many rounds to forget: these load kernels and fill caches.
        seed: Decides the orders; ranks that take turns together draw the same ones.

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
    """Return how many seconds a call takes, the mean of some, with all that it has started on the device."""
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    _wait_for(device)
    return (time.perf_counter() - start) / repetitions


def host_seconds(call: Callable[[], object], device: str) -> float:
    """Return how many seconds a call takes to return, whatever the device is still busy with then."""
    _wait_for(device)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratios of two rivals' seconds, by round; two rounds at least.

    Example:
        >>> ratio([2.0, 2.0, 3.0], [1.0, 2.0, 2.0])
        {'median': 1.5, 'quartiles': [1.0, 2.0], 'interval': [1.0, 2.0], 'rounds': 3}
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    bounds = interval_of_median(ratios)
    return {"median": middle, "quartiles": [low, high], "interval": list(bounds), "rounds": len(ratios)}


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds on the median that assume nothing about how values are distributed.

    The median lies below the k-th smallest of n values if fewer than k fall below it, and each value does so with a
    probability of 1/2: the sign test. Fewer than six values cannot give a confidence of 95%; all of them are in then.

    Example:
        >>> interval_of_median([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0])
        (2.0, 8.0)
    """
    ordered, n = sorted(values), len(values)
    tails = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n // 2))
    left_out = max(sum(tail <= (1 - CONFIDENCE) / 2 for tail in tails) - 1, 0)
    return ordered[left_out], ordered[n - 1 - left_out]


def compare(ours: Sequence[float], theirs: Sequence[float], null: Ratio) -> Comparison:
    """Return the ratios of castwise's seconds to torch's, by round, with a verdict."""
    found = ratio(ours, theirs)
    return {**found, "null": null, "verdict": verdict(found, null)}


def verdict(ours_to_theirs: Ratio, theirs_to_itself: Ratio) -> Verdict:
    """Say which of two rivals is faster, if the machine was quiet enough to tell.

    A rival is faster or slower if the whole interval of the ratio lies beyond what the other shows against itself.
    Both are as fast if neither interval leaves 1 by more than 5%. Otherwise the rounds do not tell.

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
