"""Warnings that may be raised in code that `torch.compile` traces, where `warnings.warn` would break the graph."""

from __future__ import annotations

import warnings

from castwise._torch_private import run_while_tracing


@run_while_tracing
def warn(message: str, category: type[Warning], stacklevel: int) -> None:
    """Warn as `warnings.warn` does, with `stacklevel` counted from the caller of this function."""
    warnings.warn(message, category, stacklevel=stacklevel + 1)
