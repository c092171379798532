"""How wide lines are that castwise prints."""

from __future__ import annotations

import os
from typing import IO


def columns() -> int | None:
    """Return what the environment has as COLUMNS; None if it has none."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def width_of(file: IO[str], width: int) -> int:
    """Return COLUMNS, else the width of the terminal that a file is, else `width`."""
    asked = columns()
    if asked is not None:
        return asked
    try:
        return os.get_terminal_size(file.fileno()).columns or width
    except (AttributeError, OSError, ValueError):  # no terminal, or no file at all
        return width
