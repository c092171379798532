"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write a file aside and replace what is there, if anything; into a device or a pipe just write.

    A link stays one, and a file that was there hands its permissions on.

    Raises:
        OSError: It cannot be written; then what was there is as it was, and nothing is beside it.
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
