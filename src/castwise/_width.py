"""The width of the lines that castwise prints."""

from __future__ import annotations

import os
from typing import IO


def columns() -> int | None:
    """Return the environment variable COLUMNS as an integer; None if it is unset or not a positive integer."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def width_of(file: IO[str], width: int) -> int:
    """Return COLUMNS if set, else the width of the terminal if `file` is one, else `width`."""
    asked = columns()
    if asked is not None:
        return asked
    try:
        return os.get_terminal_size(file.fileno()).columns or width
    except (AttributeError, OSError, ValueError):  # not a terminal, or not a real file
        return width
