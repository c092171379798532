"""The result of `tune`: a policy, its cost, and its error against the reference."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise._frames import new_frame
from castwise._shown import Block, Shown, Table
from castwise.comparison._drift import SHOWN_MODULES, Drift, plain, plain_policy
from castwise.comparison._drift_map import tiles
from castwise.policy._policy import Policy

if TYPE_CHECKING:
    import pandas

MODULES_IN_TITLE = 3
LESS_MATTERS = 2.0


@dataclass(frozen=True)
class Point:
    """A policy that was run.

    Args:
        cost: Cost relative to float32 everywhere.
        error: Mean over the search batches of `|loss - reference loss| / |reference loss|`.
        policy: The policy.
        is_chosen: Whether `tune` returned this policy.
    """

    cost: float
    error: float
    policy: Policy
    is_chosen: bool = False


@dataclass(frozen=True)
class Frontier(Shown):
    """The policies for which no other policy that was run is both cheaper and closer to the reference.

    Args:
        points: The policies, cheapest first. The chosen one is always included.
    """

    points: tuple[Point, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table as text, header first."""
        rows = [
            (
                f"{point.cost:.3f}",
                f"{point.error:.2e}" if point.error else "0",
                _formats(point.policy),
                "chosen" if point.is_chosen else "",
            )
            for point in self.points
        ]
        return [("cost", "error", "policy", ""), *rows]

    def _blocks(self) -> Iterator[Block]:
        yield Table(self.rows(), right=(0, 1))


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The cheapest policy found that keeps the loss; prints as a summary.

    The search compares losses of single steps. These do not show that a long run ends where one in float32 ends.

    Args:
        policy: The policy, not bound.
        is_within_tolerance: Whether the error on held-out batches is at most `tolerance`. If not, `policy` is the one
            with the least error found.
        tolerance: The requested tolerance.
        error: Mean over the held-out batches of `|loss - reference loss| / |reference loss|`.
        search_error: The same over the search batches.
        cost: Cost relative to float32 everywhere.
        cost_kind: "flops", "bytes" or "measured".
        formats: The format of each module in the search, by module name.
        frontier: Cost against error of the policies that were run.
        drift: The comparison of the formats' uniform policies, from which the effects come.
        evaluations: Number of policies that were run.
        not_called: Modules that no batch called; they keep the default.
        not_tried: What the search left out.
        notes: Other remarks, such as formats that the device emulates.
    """

    policy: Policy
    is_within_tolerance: bool
    tolerance: float
    error: float
    search_error: float
    cost: float
    cost_kind: str
    formats: Mapping[str, str]
    frontier: Frontier
    drift: Drift
    evaluations: int
    not_called: tuple[str, ...]
    not_tried: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def cost_in_words(self) -> str:
        """The unit of the cost: "flops", "bytes" or "measured time"."""
        return "measured time" if self.cost_kind == "measured" else self.cost_kind

    def __repr__(self) -> str:
        return f"Tuned({self._headline()})"

    def _headline(self) -> str:
        return f"{_formats(self.policy)}: {self.cost:.3f} of the {self.cost_in_words} of float32"

    def _title(self) -> str:
        """Return the result in a few words, with the modules in other formats if they are few."""
        others = list(self.policy.modules.items())
        if len(others) > MODULES_IN_TITLE:
            rules = _formats(self.policy)
        else:
            named = ", ".join(f"{name or '(root)'} in {format_name}" for name, format_name in others)
            rules = f"{self.policy.compute}, but {named}" if named else f"{self.policy.compute} everywhere"
        return f"{rules}: {self.cost:.3g} of the {self.cost_in_words} of float32"

    def _beside_tolerance(self) -> str:
        if not self.is_within_tolerance:
            return f"not within the tolerance of {self.tolerance:g}"
        times = self.tolerance / self.error if self.error else 1.0
        less = f": {float(f'{times:.2g}'):,g} times less" if times >= LESS_MATTERS else ""
        return f"within the tolerance of {self.tolerance:g}{less}"

    def _blocks(self) -> Iterator[Block]:
        yield from tiles(self.drift, self.formats, self.drift.batches, SHOWN_MODULES)
        verdict = "within" if self.is_within_tolerance else "not within"
        lines = [
            self._headline(),
            f"error on held-out batches: {self.error:.2e}, {verdict} the tolerance of {self.tolerance:g}",
            *_rules(self.policy),
        ]
        if not self.is_within_tolerance:
            lines.insert(2, "none of the policies that were run is within the tolerance: this is the closest")
        yield "\n".join(lines)
        yield from self.frontier._blocks()
        lines = [f"not tried: {reason}" for reason in self.not_tried]
        if self.not_called:
            lines.append(f"never called, so left at the default: {', '.join(self.not_called)}")
        lines += [f"note: {note}" for note in self.notes]
        if lines:
            yield "\n".join(lines)

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each policy of the frontier.

        The columns are `cost`, `error`, `compute`, `rules` (the policy's `modules`) and `is_chosen`. For modules, see
        `drift.frame()`.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        rows = [
            (point.cost, point.error, point.policy.compute, dict(point.policy.modules), point.is_chosen)
            for point in self.frontier.points
        ]
        return new_frame(("cost", "error", "compute", "rules", "is_chosen"), rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON-serializable lists and dicts."""
        points = [
            {
                "cost": point.cost,
                "error": plain(point.error),
                "policy": plain_policy(point.policy),
                "is_chosen": point.is_chosen,
            }
            for point in self.frontier.points
        ]
        own = ("is_within_tolerance", "tolerance", "cost", "cost_kind", "evaluations")
        return {
            "policy": plain_policy(self.policy),
            **{name: getattr(self, name) for name in own},
            "error": plain(self.error),
            "search_error": plain(self.search_error),
            "formats": dict(self.formats),
            "frontier": points,
            "not_called": list(self.not_called),
            "not_tried": list(self.not_tried),
            "notes": list(self.notes),
            "drift": self.drift.as_dict(),
        }

    def report(self, path: str | os.PathLike[str], *, shared_script: bool | str | os.PathLike[str] = False) -> Path:
        """Write the result as one HTML page with plots; see `Drift.report`.

        Args:
            path: See `Drift.report`.
            shared_script: See `Drift.report`.

        Returns:
            `path`.
        """
        from castwise.comparison._drift_map import abbreviated
        from castwise.comparison._drift_report import write_drift_report

        points = [point for point in self.frontier.points if math.isfinite(point.error)]
        frontier = {
            "cost": [point.cost for point in points],
            "error": [point.error for point in points],
            "labels": [abbreviated(_formats(point.policy)) for point in points],
            "numbers": [1 + number for number, point in enumerate(self.frontier.points) if point in points],
            "chosen": [point.is_chosen for point in points],
            "tolerance": self.tolerance,
            "kind": self.cost_in_words,
        }
        return write_drift_report(self.drift, path, self, frontier, shared_script=shared_script)


def _rules(policy: Policy) -> list[str]:
    """Return a line for each format with rules, listing its modules."""
    lines = []
    for chosen in dict.fromkeys(policy.modules.values()):
        names = [name or "(root)" for name, format_name in policy.modules.items() if format_name == chosen]
        more = len(names) - SHOWN_MODULES
        rest = f", and {more:,} more: best.policy.modules" if more > 0 else ""
        lines.append(f"in {chosen}: {', '.join(names[:SHOWN_MODULES])}{rest}")
    return lines


def _formats(policy: Policy) -> str:
    rules: dict[str, int] = {}
    for chosen in policy.modules.values():
        rules[chosen] = rules.get(chosen, 0) + 1
    others = ", ".join(f"{count} in {name}" for name, count in rules.items())
    return f"{policy.compute}, {others}" if others else policy.compute
