"""The parts of a benchmark: how to measure, and how to show the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from benchmarks.pairing import Ratio

Record = dict[str, Any]
Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Table:
    """A table with optional lines of text.

    Args:
        columns: The header row.
        rows: The other rows, as long as the header.
        above: A line above the table.
        below: A line below the table.
    """

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    above: str = ""
    below: str = ""

    def markdown(self) -> str:
        """Return the table as GitHub Markdown.

        Example:
            >>> print(Table(["", "us"], [["castwise", "2"]], below="Of one call.").markdown())
            | | us |
            |---|---|
            | castwise | 2 |
            <BLANKLINE>
            Of one call.
        """
        lines = [_line(self.columns), "|---" * len(self.columns) + "|", *map(_line, self.rows)]
        return "\n\n".join(filter(None, [self.above, "\n".join(lines), self.below]))


def _line(cells: list[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


@dataclass(frozen=True)
class Benchmark(Generic[Plan]):
    """A benchmark with its own file of results.

    Args:
        name: Name of the file, and for `--only`.
        title: Title of the tables.
        about: Explanation for readers of the tables.
        quick: Plan without `--full`.
        full: Plan for `--full`.
        measure: Runs a plan on "cpu" or "cuda"; returns JSON-compatible values.
        tables: Builds tables from a result of `measure`.
        on_cpu_alone: Whether it always measures the CPU.
    """

    name: str
    title: str
    about: str
    quick: Plan
    full: Plan
    measure: Callable[[str, Plan], Record]
    tables: Callable[[Record], list[Table]]
    on_cpu_alone: bool = False


def left_out(cases: dict[str, Record]) -> str:
    """Return the reasons why cases are missing, for the line below a table.

    Example:
        >>> left_out({"500M": {"skipped": "left out: no room"}, "1M": {"seconds": 1.0}})
        '500M: left out: no room.'
    """
    return " ".join(f"{name}: {case['skipped']}." for name, case in cases.items() if "skipped" in case)


def shown(ratio: Ratio, digits: int = 3) -> str:
    """Return a ratio's median and quartiles.

    Example:
        >>> shown({"median": 1.5, "quartiles": [1.25, 1.75], "interval": [1.0, 2.0], "rounds": 9}, digits=2)
        '1.50 (1.25 - 1.75)'
    """
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"
