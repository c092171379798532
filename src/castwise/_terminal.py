"""Where commands print their tables. It needs rich, so the library never imports it."""

from __future__ import annotations

import os
import sys
from typing import IO

from rich.console import Console


def new_console(width: int, file: IO[str] | None = None) -> Console:
    """Return a console for a file, or for stdout, that prints paths and names as they are.

    Args:
        width: Columns in a file or a pipe, unless the environment has COLUMNS; a terminal knows its own.
        file: Where to print; None is stdout.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        wide: int | None = int(columns)
    else:
        wide = None if file is None and sys.stdout.isatty() else width
    return Console(file=file, width=wide, highlight=False, markup=False, emoji=False)
