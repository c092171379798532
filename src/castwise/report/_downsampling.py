"""Downsampling of long runs that keeps extremes and changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Point = tuple[int, float]
T = TypeVar("T")

# A plot is at most about 2000 pixels wide, and each bucket yields two points.
MAX_BUCKETS = 750


def extremes(points: Sequence[Point], buckets: int = MAX_BUCKETS) -> list[Point]:
    """Return the lowest and highest finite point of each of `buckets` consecutive groups, in order.

    The result includes the first and last point and has at most `2 * buckets + 2` points. Fewer points are returned
    unchanged.
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
    """Return the points where a step function changes, and the last point; their extremes if there are too many."""
    kept = [
        point for before, point in zip([None, *points], points, strict=False) if not before or before[1] != point[1]
    ]
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return extremes(kept, buckets)


def in_buckets(items: Sequence[T], buckets: int) -> list[Sequence[T]]:
    """Split items into at most `buckets` non-empty groups of nearly equal length."""
    count = min(buckets, len(items))
    edges = [len(items) * number // count for number in range(count + 1)] if count else []
    return [items[begin:end] for begin, end in pairwise(edges)]
