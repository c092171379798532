"""Differences that are meant: each has a name, an explanation, and a pattern of what it may concern."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Exempt:
    """A difference that does not count.

    Args:
        name: For the table.
        why: One sentence.
        row: A pattern that matches the whole name of a row.
        fact: A pattern that matches the beginning of what was noted.
        torch: A pattern that matches the beginning of what it is under torch; "" if there is nothing.
        castwise: The same under castwise.
    """

    name: str
    why: str
    row: str
    fact: str
    torch: str = "$"
    castwise: str = "$"

    def covers(self, row: str, fact: str, torch: str | None, castwise: str | None) -> bool:
        """Return True if it is about this difference."""
        return bool(
            re.fullmatch(self.row, row)
            and re.match(rf"(rank \d+: )?{self.fact}", fact, re.DOTALL)
            and re.match(self.torch, torch or "", re.DOTALL)
            and re.match(self.castwise, castwise or "", re.DOTALL)
        )


EXEMPT = [
    Exempt(
        "emulated dtype",
        "castwise warns where the CPU has no units for the dtype; torch does not.",
        ".*",
        "warning: UserWarning: this CPU has no units for torch",
        castwise="given",
    ),
    Exempt(
        "mistakes",
        "castwise warns of mistakes in the use of mixed precision, each once.",
        ".*",
        "warning: MixedPrecisionMistake: ",
        castwise="given",
    ),
    Exempt(
        "16-bit averages",
        "ArcFaceLoss converts its weights to the dtype of embeddings, bf16 here; castwise run warns that averages of "
        "AdamW in bf16 cannot fall.",
        r".*\(pytorch-metric-learning\)",
        "warning: RuntimeWarning: raw-half-optimizer-state: ",
        castwise="given",
    ),
]
