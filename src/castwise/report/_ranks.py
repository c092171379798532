"""Words for the ranks that records name."""

from __future__ import annotations

from collections.abc import Iterable

from castwise._number_text import ranks
from castwise.monitor._records import DiagnosisRecord, StepRecord


def on_ranks(records: Iterable[StepRecord | DiagnosisRecord]) -> str:
    """Return text such as " on rank 1" if every record names a rank (for a skip, the rank that caused it), else ""."""
    named = [record.rank for record in records]
    known = {rank for rank in named if rank is not None}
    return f" on {ranks(known)}" if known and None not in named else ""
