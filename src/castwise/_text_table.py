"""Tables for terminals, where the core may not ask for rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Return rows with their columns under each other, the columns `right` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = set(right)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if position in right else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
