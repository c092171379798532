"""Choices of a format for each module, from the most exact to the cheapest, by savings per added effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Choice = dict[str, str]
"""The format of each module, by module name."""


@dataclass(frozen=True)
class Option:
    """One format for one module.

    Args:
        format: Name of the format.
        cost: Cost of the module in the format.
        effect: Expected square of the error that the module's rounding adds to the loss; inf if a value overflows.
        digits: Mantissa bits of the format. Among formats of equal effect, more bits are more exact.
    """

    format: str
    cost: float
    effect: float
    digits: int = 0


def exact_choice(options: Mapping[str, list[Option]]) -> Choice:
    """Return for each module the format with the least effect; among equals, the one with the most digits."""
    return {name: _exact(module_options).format for name, module_options in options.items()}


def path(options: Mapping[str, list[Option]]) -> list[Choice]:
    """Return choices from the most exact to the cheapest; each changes the format of one module.

    Each step makes the change that saves the most cost per added effect. A format that saves less for its effect than a
    mixture of two others is left out, so the savings per effect decrease along the path. Each choice is then the
    cheapest one for its total effect, up to the saving of the last change (the linear relaxation of the multiple-choice
    knapsack problem, Kellerer, Pferschy and Pisinger 2004, chapter 11).

    Example:
        >>> a = [Option("float32", 4.0, 0.0), Option("bfloat16", 2.0, 1.0)]
        >>> b = [Option("float32", 4.0, 0.0), Option("bfloat16", 2.0, 9.0)]
        >>> [choice["b"] for choice in path({"a": a, "b": b})]
        ['float32', 'float32', 'bfloat16']
    """
    changes: list[tuple[float, int, str, str]] = []
    for name, module_options in options.items():
        hull = _hull(module_options)
        for index, (before, after) in enumerate(pairwise(hull)):
            changes.append(((after.effect - before.effect) / (before.cost - after.cost), index, name, after.format))
    choices = [exact_choice(options)]
    for _, _, name, chosen in sorted(changes):
        choices.append({**choices[-1], name: chosen})
    return choices


def _exact(options: list[Option]) -> Option:
    return min(options, key=lambda option: (option.effect, -option.digits, option.cost))


def _hull(options: list[Option]) -> list[Option]:
    """Return the options on the lower convex hull of effect over cost, most exact first."""
    hull = [_exact(options)]
    while True:
        last = hull[-1]
        cheaper = [option for option in options if option.cost < last.cost and math.isfinite(option.effect)]
        if not cheaper:
            return hull
        slopes = [(option.effect - last.effect) / (last.cost - option.cost) for option in cheaper]
        hull.append(min(zip(slopes, cheaper, strict=True), key=lambda pair: (pair[0], pair[1].cost))[1])
