"""`expected_writes`: weights that a script writes on purpose."""

from __future__ import annotations

from contextlib import AbstractContextManager

from castwise._invariants import written_weights


def expected_writes() -> AbstractContextManager[None]:
    """Tell castwise that weights are written on purpose: an average that is swapped in, a clamp, a new initialisation.

    What is written in the block is not reported as `written-weights`, and is the cause of no spike. Does nothing where
    castwise does not watch.

    Example:
        >>> import torch
        >>> weight = torch.nn.Linear(2, 2).weight
        >>> with expected_writes(), torch.no_grad():
        ...     _ = weight.clamp_(-0.1, 0.1)
    """
    return written_weights.expected_writes()
