"""Atomic replacement of files that castwise itself has written."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from castwise._locks import try_lock

HEAD = 4096
"""Bytes at the start of a file that show what it is."""
AS_IT_IS: int = getattr(os, "O_BINARY", 0)  # without it, Windows changes line ends
_ASIDE = re.compile(r"\.castwise-[0-9a-f]{16}\.tmp")
_NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)


def replace(path: Path, content: bytes, what: str, is_ours: Callable[[bytes], bool]) -> None:
    """Replace a file's content atomically, through a temporary file beside it; write to a device or pipe directly.

    A symbolic link stays a link, and the new file keeps the old one's permissions. Temporary files that a killed
    process left in the folder are removed.

    Args:
        path: A new file, an empty one, or one that castwise has written.
        content: All of the new content.
        what: What the file is, with its article, for the error: "a policy".
        is_ours: Returns True for the first `HEAD` bytes of such a file.

    Raises:
        FileExistsError: The file is something else. It is left as it is.
        OSError: The file cannot be written. The old file is then unchanged, and no temporary file is left.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    refuse_foreign(path, what, is_ours)
    try:
        os.close(exchange(target, content))
    except OSError as error:
        if error.filename is not None:  # that of the temporary file
            error.filename, error.filename2 = str(path), None
        raise


def refuse_foreign(path: Path, what: str, is_ours: Callable[[bytes], bool]) -> None:
    """Raise a FileExistsError if there is a file that is not empty and not castwise's.

    Args:
        path: The file.
        what: See `replace`.
        is_ours: See `replace`.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        return
    if head and not is_ours(head):
        reason = f"it exists and is not {what} that castwise has written; move it or give another path"
        raise FileExistsError(errno.EEXIST, reason, str(path))


def exchange(target: Path, content: bytes) -> int:
    """Put a new file with this content under a name atomically, and return it open for appending, locked.

    Raises:
        OSError: The file cannot be written. The old file is then unchanged, and no temporary file is left.
    """
    sweep(target.parent)
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    aside, file = open_aside(target.parent, 0o666 if mode is None else 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
        if mode is not None:
            os.chmod(aside, mode)  # only now: until here only its owner could open it
        if os.name == "nt":  # which renames no open file
            os.close(file)
            file = -1
        aside.replace(target)
        if file < 0:
            file = os.open(target, os.O_RDWR | os.O_APPEND | AS_IT_IS)
            try_lock(file)
    except BaseException:
        if file >= 0:
            os.close(file)
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    return file


def open_aside(folder: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file in a folder; return its path and the file, open for writing and locked.

    Args:
        folder: The folder.
        mode: Its permissions, less those of the process's umask.
    """
    while True:
        aside = folder / f".castwise-{os.urandom(8).hex()}.tmp"
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | AS_IT_IS, mode)
        if try_lock(file) is not False and is_at(file, aside):
            return aside, file
        os.close(file)  # `sweep` in another process was faster than the lock, and removes it


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed processes: those with our names that no process has locked."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _ASIDE.fullmatch(name):
                _remove_unless_locked(folder / name)


def _remove_unless_locked(aside: Path) -> None:
    with suppress(OSError):
        file = os.open(aside, os.O_RDWR | _NO_LINKS)
        try:
            if stat.S_ISREG(os.fstat(file).st_mode) and try_lock(file):
                aside.unlink()
        finally:
            os.close(file)


def is_at(file: int, path: Path) -> bool:
    """Return True if a path leads to this open file."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False
