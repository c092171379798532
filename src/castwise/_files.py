"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write a file aside and put it in the place of what is there, if anything.

    Raises:
        OSError: It cannot be written; then what was there is as it was, and nothing is beside it.
    """
    path = Path(os.path.realpath(path))
    unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
