"""Locks that the system releases when the process that holds them ends, however it ends."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

_FAR_AWAY = 1 << 30  # Windows locks bytes against readers too, so the locked one lies beyond any file
_HELD = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}


def try_lock(file: int) -> bool | None:
    """Lock an open file without waiting; closing it unlocks it.

    Returns:
        True if it is locked now, False if another process or another open file has locked it, None if this system or
        this file system has no locks.
    """
    try:
        _lock(file)
    except OSError as error:
        return False if error.errno in _HELD else None
    except ModuleNotFoundError:
        return None
    return True


def unlock(file: int) -> None:
    """Unlock a file, also if a forked process has not yet closed its share of it."""
    if sys.platform != "win32":
        with suppress(OSError, ModuleNotFoundError):  # this system or this file system has no locks
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        at = os.lseek(file, 0, os.SEEK_CUR)
        os.lseek(file, _FAR_AWAY, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(file, at, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
