"""Warnings from code that `torch.compile` traces, where `warnings.warn` would break the graph."""

from __future__ import annotations

import warnings


def warn(message: str, category: type[Warning], stacklevel: int) -> None:
    """Warn as `warnings.warn` does, with `stacklevel` counted from the caller of this function.

    Dynamo runs this function while tracing. `castwise._torch_private` sets the mark, so this file does not need torch.
    """
    warnings.warn(message, category, stacklevel=stacklevel + 1)
