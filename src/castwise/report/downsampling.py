"""Fewer points for long runs, chosen so that nothing worth seeing is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Point = tuple[int, float]
T = TypeVar("T")

# A line across a projector has about 2000 pixels, and each bucket gives two points.
MAX_BUCKETS = 750


def extremes(points: Sequence[Point], buckets: int = MAX_BUCKETS) -> list[Point]:
    """Return the lowest and highest finite point of each of `buckets` runs of points, in order.

    At most `2 * buckets + 2` points, the first and the last among them; all of them if they are as few.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= 2 * buckets + 2:
        return finite
    kept = {finite[0], finite[-1]}
    for bucket in in_buckets(finite, buckets):
        kept.add(min(bucket, key=lambda point: point[1]))
        kept.add(max(bucket, key=lambda point: point[1]))
    return sorted(kept)


def changes(points: Sequence[Point], buckets: int = MAX_BUCKETS) -> list[Point]:
    """Return the points of a step function at which it changes, and the last; their extremes if these are too many."""
    kept = [
        point for before, point in zip([None, *points], points, strict=False) if not before or before[1] != point[1]
    ]
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return extremes(kept, buckets)


def in_buckets(items: Sequence[T], buckets: int) -> list[Sequence[T]]:
    """Return items in at most `buckets` runs of nearly equal length, none empty."""
    count = min(buckets, len(items))
    edges = [len(items) * number // count for number in range(count + 1)] if count else []
    return [items[begin:end] for begin, end in pairwise(edges)]
