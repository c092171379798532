"""A run's folder: `settings.json`, `metrics.jsonl`, `checkpoint.pt`, `summary.json`.

All writes are safe if the process is killed at any moment: a new folder gets its final name only when it is complete,
files are written aside and renamed, and metrics beyond the last checkpoint are cut off before new ones are appended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from castwise import _files
from castwise._user_error import UserError

if sys.platform != "win32":
    import fcntl

_FIRST_KEY = b'{"precision": '
SETTINGS, METRICS, CHECKPOINT, SUMMARY = "settings.json", "metrics.jsonl", "checkpoint.pt", "summary.json"


def is_run_folder(folder: Path) -> bool:
    """Return True if a folder was created by `create_run_folder`."""
    try:
        return (folder / SETTINGS).is_file() and (folder / METRICS).is_file()
    except OSError:  # no permission to read the folder
        return False


def create_run_folder(out: Path, settings: dict[str, object]) -> Path:
    """Create `out/<time>` with settings and empty metrics.

    Raises:
        UserError: `out` is not writable.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True, exist_ok=True)
        aside = out / f".{name}-{os.getpid()}"
        aside.mkdir()
        write_json(aside / SETTINGS, settings)
        (aside / METRICS).touch()
        return _rename_to_free_name(aside, out / name)
    except OSError as error:
        raise cannot_write(out, error) from error


def _rename_to_free_name(aside: Path, wanted: Path) -> Path:
    """Rename a folder, with a suffix if the name is taken: two runs may start within one second.

    Renaming onto a run's folder fails because it is never empty.
    """
    for attempt in range(2, 100):
        try:
            return aside.rename(wanted if attempt == 2 else wanted.with_name(f"{wanted.name}-{attempt - 1}"))
        except OSError as error:
            taken = error
    raise taken


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a new file, then replace `path` with it, so that readers see either the old or the new bytes.

    The file and the folder are synced, so this also holds after a power cut.

    Raises:
        UserError: The disk is full or the folder is not writable.
    """
    aside: Path | None = None
    try:
        _files.sweep(path.parent)
        aside, descriptor = _files.open_aside(path.parent, 0o666)
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:  # also on Ctrl-C; after the rename there is nothing to delete
        with contextlib.suppress(OSError):
            if aside is not None:
                aside.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows cannot open a folder, and its renames are journaled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: object) -> None:
    """Write a JSON document atomically."""
    write_atomically(path, lambda file: file.write(json.dumps(content, indent=2).encode() + b"\n"))


def read_settings(folder: Path) -> dict[str, object]:
    """Read the settings that a run was started with.

    Raises:
        UserError: `folder` is not a run's folder.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder} is not the folder of a run, because it has no readable {SETTINGS}: give --resume a folder that "
            "castwise demo has created"
        ) from error
    if not isinstance(settings, dict):
        raise UserError(f"{folder / SETTINGS} was not written by castwise demo: start a new run without --resume")
    return settings


class MetricsFile:
    """A file with one JSON object per line, appended to by one process at a time.

    Args:
        path: An existing file.
        n_bytes: Number of bytes to keep, as recorded in the checkpoint.

    Raises:
        UserError: The file is missing, in use, shorter than `n_bytes`, or not writable.
    """

    def __init__(self, path: Path, n_bytes: int) -> None:
        self._path = path
        try:
            self._file = path.open("r+b")
            _lock(self._file, path)
        except OSError as error:
            raise cannot_write(path, error) from error
        head = self._file.read(len(_FIRST_KEY))
        if head and head != _FIRST_KEY:
            self._file.close()
            raise UserError(f"{path} was not written by castwise demo: start a new run without --resume")
        found = self._file.seek(0, os.SEEK_END)
        if found < n_bytes:
            self._file.close()
            raise UserError(f"{path} was changed: it has {found} bytes, but its checkpoint expects at least {n_bytes}")
        self._file.truncate(n_bytes)
        self._file.seek(n_bytes)

    def append(self, line: dict[str, object]) -> None:
        """Write one line and flush it, so that `tail -f` shows it."""
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def sync(self) -> int:
        """Sync all lines to disk and return the length in bytes, for the checkpoint."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self._path, error) from error
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lock(file: IO[bytes], path: Path) -> None:
    """Lock the file against a second `--resume`; the system releases the lock when this process ends."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"{path.parent} is in use by another process: wait for it or stop it") from error


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error for a full disk or a read-only folder."""
    return UserError(f"cannot write {path}: {error.strerror or error}")
