"""Tables for terminals."""

from __future__ import annotations

from castwise._text_table import aligned


def test_columns_stand_under_each_other_and_numbers_flush_right() -> None:
    rows = [["name", "count", "of"], ["a", "10", "what is wide"], ["long one", "9", ""]]
    assert aligned(rows, right=[1]).splitlines() == [
        "name      count  of",
        "a            10  what is wide",
        "long one      9",
    ]
    assert aligned([[" a", "b"]]) == " a  b"
