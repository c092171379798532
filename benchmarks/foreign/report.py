"""What `compare.py` recorded, as text."""

from __future__ import annotations

from typing import Any

from benchmarks.recording import headline

SHOWN = 160  # characters of a fact


def cut(text: str) -> str:
    """Return the beginning of a text in one line."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def is_wrong(record: dict[str, Any]) -> bool:
    """Return True if a row should not be released."""
    return bool(record["torch fails"] or any(side["differences"] for side in record["sides"].values()))


def verdict(record: dict[str, Any]) -> str:
    """Return the last cell of a row."""
    if record["torch fails"]:
        return f"**torch fails**: {cut(record['torch fails'])}"
    parts = []
    for name, side in record["sides"].items():
        known = "; ".join(side["exceptions"])
        count = side["differences"]
        parts.append(f"{name}: " + (f"**{count} differ**" if count else "same") + (f" ({known})" if known else ""))
    unsteady = record["not repeated by torch"]["values"]
    return ", ".join(parts) + (f"; torch does not repeat {unsteady}" if unsteady else "")


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = [f"{headline(record['machine'])}", "", "| | code | torch.amp | castwise |", "|---|---|---|---|"]
    for row in record["rows"]:
        cells = (f"{row['kind']}: {row['name']}", row["source"], row["torch"], verdict(row))
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    named = "".join(f"\n* {each['name']}: {each['why']}" for each in record["exceptions"])
    return "\n".join(lines) + f"\n\nWith {versions}. Exceptions, in parentheses above:\n{named}"
