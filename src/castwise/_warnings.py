"""Warnings that may be raised in code that `torch.compile` traces, where `warnings.warn` would break the graph."""

from __future__ import annotations

import warnings


def warn(message: str, category: type[Warning], stacklevel: int) -> None:
    """Warn as `warnings.warn` does, with `stacklevel` counted from the caller of this function.

    Dynamo runs it while it traces: `castwise._torch_private` marks it, so that this file needs no torch.
    """
    warnings.warn(message, category, stacklevel=stacklevel + 1)
