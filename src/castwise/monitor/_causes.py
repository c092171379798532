"""The causes of skipped steps, as spelled in records.

These are the values of `castwise.amp.Cause`, repeated so that reading records does not import torch, which
takes a second.
"""

from __future__ import annotations

OVERFLOW = "overflow"
NONFINITE_GRADIENTS = "non-finite gradients"
NONFINITE_LOSS = "non-finite loss"
NONFINITE_WEIGHTS = "non-finite weights"
ANOTHER_RANK = "another rank"
UNKNOWN = "unknown"
