"""Warnings that name the user's line, and may be raised in code that `torch.compile` traces."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress

_PASSED_OVER = {"castwise", "torch", "contextlib", "functools"}


def warn(message: str, category: type[Warning]) -> None:
    """Warn as `warnings.warn` does, at the first line outside castwise and torch.

    Dynamo runs this function while it traces, because `castwise._torch_private` marks it; this file needs no torch.
    `warnings.warn` itself would break the graph.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_or_print(message: str, category: type[Warning]) -> None:
    """Warn; where such warnings are errors, print to standard error instead, because watching must not end a run."""
    try:
        warn(message, category)
    except category:
        with suppress(OSError, ValueError):  # a closed stream
            print(f"castwise: {message}", file=sys.stderr)
