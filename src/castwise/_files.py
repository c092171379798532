"""Atomic replacement of files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Replace a file's content atomically, through a temporary file beside it; write to a device or pipe directly.

    A symbolic link stays a link, and the new file keeps the old one's permissions.

    Raises:
        OSError: The file cannot be written. The old file is then unchanged, and no temporary file is left.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    aside = target.with_name(f".{os.urandom(8).hex()}")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, aside)
        aside.replace(target)
    except OSError as error:
        if error.filename == str(aside):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        aside.unlink(missing_ok=True)
