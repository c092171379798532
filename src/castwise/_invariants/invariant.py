"""The invariants by name, what is exempt from them, and what is reported of one that does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from castwise._suggestions import listed, nearest

INVARIANTS = (
    *("not-in-optimizer", "never-updated", "raw-half-optimizer-state", "train-eval-mode", "dtype-of-checkpoint"),
    "resumed-apart",
    *("replicas-differ", "gradients-not-reduced", "same-data-on-ranks", "reduced-in-16-bits"),
    *("written-weights", "learning-rate-jump", "loss-spike"),
)
"""The names of all invariants."""

EVENTS = "written-weights", "loss-spike"
"""Those of which each warning is reported, and not only the first for the same parameters."""
_NAMED = 3
_OFTEN_INTENDED = {"replicas-differ": " (local SGD, experts)", "gradients-not-reduced": " (local SGD)"}


@dataclass(frozen=True)
class Violation:
    """An invariant that does not hold.

    Args:
        name: The invariant.
        text: What was seen.
        remedy: What to do.
        severity: "warning", or "note" if what was seen is often intended.
        parameters: Names of the parameters concerned; empty if it is not about parameters.
    """

    name: str
    text: str
    remedy: str
    severity: Literal["warning", "note"] = "warning"
    parameters: tuple[str, ...] = ()


class Exemptions:
    """What invariants are not checked, and for which parameters.

    Args:
        wanted: True for none; or for each invariant that is not checked the names of the parameters that it does not
            hold for, as patterns of `fnmatch`.

    Raises:
        TypeError: It is neither.
        ValueError: There is no invariant of a name.
    """

    def __init__(self, wanted: bool | Mapping[str, Sequence[str]] = True) -> None:
        if not isinstance(wanted, (bool, Mapping)):
            raise TypeError(
                f"invariants must be True, False or a mapping from invariants to patterns of names, got {wanted!r}"
            )
        self._patterns = {} if isinstance(wanted, bool) else dict(wanted)
        for name, patterns in self._patterns.items():
            if name not in INVARIANTS:
                raise ValueError(f"invariants: there is no {name!r}{nearest(str(name), INVARIANTS)}")
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise TypeError(f"invariants[{name!r}] must be a list of patterns of names, got {patterns!r}")

    @classmethod
    def parsed(cls, options: Iterable[str]) -> dict[str, list[str]]:
        """Return the mapping of options such as "never-updated=experts.*", or "never-updated" for all parameters.

        Raises:
            ValueError: There is no invariant of a name.
        """
        patterns: dict[str, list[str]] = {}
        for option in options:
            name, _, pattern = option.partition("=")
            patterns.setdefault(name, []).append(pattern or "*")
            if name not in INVARIANTS:
                raise ValueError(
                    f"must begin with one of {listed(INVARIANTS)}, got {name!r}{nearest(name, INVARIANTS)}"
                )
        return patterns

    def has(self, invariant: str, parameter: str = "*") -> bool:
        """Return True if an invariant is not to hold for a parameter; without one, for any."""
        return any(pattern == "*" or fnmatchcase(parameter, pattern) for pattern in self._patterns.get(invariant, ()))


def how_to_exempt(invariant: str) -> str:
    """Return a sentence with the option that exempts an invariant, empty for one that is exempted in another way."""
    if invariant in EVENTS:  # writes on purpose are named in the script, and no spike is intended
        return ""
    return f" If it is intended{_OFTEN_INTENDED.get(invariant, '')}: castwise run --exempt {invariant}."


def named(parameters: Sequence[str]) -> str:
    """Return text with the first few of some names, and the count of the others."""
    shown, more = ", ".join(parameters[:_NAMED]), len(parameters) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown
