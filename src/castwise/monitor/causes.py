"""Why steps were skipped, as records spell it.

These are the values of `castwise.amp.outcomes.Cause`, without torch: it takes a second to load, and what reads records
has no other use for it.
"""

from __future__ import annotations

OVERFLOW = "overflow"
NONFINITE_LOSS = "non-finite loss"
NONFINITE_WEIGHTS = "non-finite weights"
ANOTHER_RANK = "another rank"
UNKNOWN = "unknown"
