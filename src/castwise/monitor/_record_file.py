"""A file of records with one writer: locked, never anyone else's, and as complete as the disk allows."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from castwise import _files
from castwise._locks import try_lock, unlock
from castwise._number_text import several
from castwise._warnings import warn_or_print
from castwise.monitor._gzip_members import HEADER, end_of_whole, gzip_member, samples

FILE_NAME = "monitor.jsonl.gz"
FILE_NAME_0_2 = "monitor.jsonl"
"""The name of the files of castwise 0.2, which are read."""
_SUFFIX = ".jsonl.gz"
RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
"""Names of the folders that `castwise run` and `castwise.install` create, one for each run."""
SAMPLES_BYTES = 8 << 20
"""Limit for the samples in a file, in bytes. Above it, every second sample is dropped, except in the latest quarter."""
BACKLOG_BYTES = 1 << 20
"""Limit for the lines in memory that a full disk did not take: thousands of steps, and some samples."""
CHECK_SECONDS = 1.0
"""Seconds between two looks whether the file is still where it was: one `stat`, as costly as writing a line."""

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}


def is_record(head: bytes) -> bool:
    """Return True for the start of a file of records that castwise has written, also if a crash cut it off."""
    return head.startswith(HEADER) or (len(head) < _files.HEAD and HEADER.startswith(head.rstrip(b"\0")))


class _Line(NamedTuple):
    kind: str
    member: bytes


class RecordFile:
    """Appends records to a file, each as a gzip member of one line in one unbuffered write.

    * A killed process loses at most the record that it is writing, and those that a full disk has not taken.
    * A file that castwise has not written is never changed.
    * A second writer of one file, in any process, gets a file beside it: `runs/x-2/monitor.jsonl.gz`.
    * A forked child that trains writes beside its parent's file: `runs/x-process71/monitor.jsonl.gz`.
    * A file that was deleted or renamed is begun again, with the `run` record.
    * Records that a full disk does not take are kept, up to `BACKLOG_BYTES`, and written as soon as possible. The
      number of those that were dropped is recorded.

    Args:
        path: The file. It is created with the first record.

    Raises:
        FileExistsError: The file exists and is not a record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with suppress(NotADirectoryError, IsADirectoryError, PermissionError):  # the first record shows these
            if path.is_file():
                _files.refuse_foreign(path, "a record", is_record)
        self._file: int | None = None
        self._is_regular = True
        self._ours: tuple[int, int] | None = None
        self._checked = 0.0
        self._samples_bytes = 0
        self._cut_to: int | None = None  # where a member begins that could not be written completely
        self._backlog: deque[_Line] = deque()
        self._lost = 0
        self._run: _Line | None = None  # the last `run` record, and the last one that was written
        self._written_run: _Line | None = None
        self._is_child = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        _IN_THIS_PROCESS.add(self)

    def append(self, kind: str, line: bytes) -> None:
        """Append a record, or keep it in memory while the disk is full.

        Args:
            kind: The kind of the record.
            line: The record as a line of JSON.

        Raises:
            OSError: The file cannot be opened, or is not a record.
        """
        with self._lock:
            if self._is_child and self._file is None and not self._backlog:
                if kind not in ("run", "step"):
                    return  # a child that only loads data, or ends
                self._leave_parent()
            self._backlog.append(_Line(kind, gzip_member(line, is_sample=kind == "sample")))
            if kind == "run":
                self._run = self._backlog[-1]
            self._flush()

    def close(self) -> None:
        """Close the file. A later line opens it again."""
        with self._lock:
            if self._backlog or self._lost:
                with suppress(OSError):
                    self._flush()
            if self._backlog:
                missing = several(len(self._backlog) + self._lost, "record")
                self._warn("lost", f"{missing} of {self.path} could not be written")
                self._backlog.clear()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            unlock(self._file)
            os.close(self._file)
            self._file = None

    def _flush(self) -> None:
        try:
            if self._file is not None and self._is_gone():
                self._close()
                self._warn("gone", f"{self.path} was deleted or renamed: the records continue in a new file there")
            if self._file is None:
                self._open()
            while self._backlog or self._lost:
                if self._lost and (not self._backlog or self._backlog[0].kind != "run"):
                    self._write(_Line("lost", gzip_member(b'{"kind":"lost","records":%d}\n' % self._lost)))
                    self._lost = 0
                    continue
                line = self._backlog[0]
                self._write(line)
                self._backlog.popleft()
                if line.kind == "run":
                    self._written_run = line
        except OSError as error:
            self._drop_oldest()
            if error.errno not in _MAY_PASS:
                raise
            self._warn(
                "full",
                f"{self.path} cannot be written: {error.strerror}. Records are kept, up to {BACKLOG_BYTES >> 10} KiB, "
                "and written when that is possible",
            )

    def _write(self, line: _Line) -> None:
        assert self._file is not None
        self._cut()
        if line.kind == "sample":
            if self._samples_bytes + len(line.member) > SAMPLES_BYTES and self._is_regular:
                self._thin()
            self._samples_bytes += len(line.member)
        rest = line.member
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if len(rest) < len(line.member) and self._is_regular:  # a nearly full disk takes a part
                self._cut_to = os.fstat(self._file).st_size - (len(line.member) - len(rest))
                self._cut()
            raise

    def _cut(self) -> None:
        if self._cut_to is not None and self._file is not None:
            os.ftruncate(self._file, self._cut_to)
            self._cut_to = None

    def _drop_oldest(self) -> None:
        """Drop records, down to three quarters of the limit; the first one of a file cannot be spared."""
        excess = sum(len(line.member) for line in self._backlog) - BACKLOG_BYTES
        if excess <= 0:
            return
        excess += BACKLOG_BYTES // 4
        kept: deque[_Line] = deque()
        for line in self._backlog:
            if excess > 0 and line.kind != "run":
                excess -= len(line.member)
                self._lost += 1
            else:
                kept.append(line)
        self._backlog = kept

    def _is_gone(self) -> bool:
        now = time.monotonic()
        if not self._is_regular or now - self._checked < CHECK_SECONDS:
            return False
        self._checked = now
        try:
            status = os.stat(self.path)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR)
        return (status.st_dev, status.st_ino) != self._ours

    # -- opening ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.path = self.path.absolute()  # a script may change folders
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _files.sweep(self.path.parent)
        file = self._take(self.path)
        if file is None:
            taken = self.path
            for number in count(2):
                self.path = beside(taken, f"-{number}")
                with suppress(FileExistsError):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    file = self._take(self.path, os.O_EXCL)
                if file is not None:
                    break
                _files.sweep(self.path.parent)
            self._warn("taken", f"another monitor is writing {taken}: this one writes {self.path}")
        assert file is not None
        self._file, self._checked, self._cut_to = file, time.monotonic(), None
        status = os.fstat(file)
        self._ours = status.st_dev, status.st_ino
        if self._written_run is not None and not status.st_size:
            self._backlog.appendleft(self._written_run)

    def _take(self, path: Path, flags: int = 0) -> int | None:
        """Open and lock a file, and cut off a broken last record; None if another writer has locked it."""
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _files.AS_IT_IS | flags, 0o666)
            try:
                self._is_regular = stat.S_ISREG(os.fstat(file).st_mode)
                if not self._is_regular:
                    return file
                if try_lock(file) is False:
                    os.close(file)
                    return None
                if not _files.is_at(file, path):  # its writer has just replaced it
                    os.close(file)
                    continue
                self._check(file, path)
                self._samples_bytes = _cut_off_broken_end(file)
            except BaseException:
                os.close(file)
                raise
            return file

    def _check(self, file: int, path: Path) -> None:
        status = os.fstat(file)
        if (status.st_dev, status.st_ino) == self._ours:
            return
        os.lseek(file, 0, os.SEEK_SET)
        head = os.read(file, _files.HEAD)
        if head and not is_record(head):
            raise FileExistsError(errno.EEXIST, "it is not a record that castwise has written", str(path))

    def _thin(self) -> None:
        """Drop every second sample except in the latest quarter, replacing the file atomically."""
        assert self._file is not None
        content = _content(self._file)
        places = [*samples(BytesIO(content))]
        dropped = places[1 : len(places) * 3 // 4 : 2]
        edges = [0, *chain.from_iterable(dropped), len(content)]
        kept = b"".join(content[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
        self._samples_bytes = 0  # where the disk is full: as many samples again before the next try
        with suppress(OSError):
            if not _files.is_at(self._file, self.path):
                return
            if os.name == "nt":  # which replaces no open file
                self._close()
            thinned = _files.exchange(Path(os.path.realpath(self.path)), kept)
            self._close()
            self._file = thinned
            self._samples_bytes = sum(end - start for start, end in samples(BytesIO(kept)))
            status = os.fstat(thinned)
            self._ours = status.st_dev, status.st_ino
        if self._file is None:
            self._open()

    # -- forks --------------------------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        """Let go of the parent's file in a child, which also ends the child's share of the lock."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._is_child = True
        self._backlog.clear()
        self._lost, self._cut_to = 0, None
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)  # not unlocked: the lock is the parent's
        self._file = None

    def _leave_parent(self) -> None:
        self._is_child = False
        self.path = beside(self.path, f"-process{os.getpid()}")
        self._written_run = self._run

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn_or_print(text, RuntimeWarning)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, ImportError):  # `__init__` may have failed, or Python ends
            self._close()


_IN_THIS_PROCESS: weakref.WeakSet[RecordFile] = weakref.WeakSet()


def _forked() -> None:
    for file in list(_IN_THIS_PROCESS):
        file._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def path_to_write(path: str | os.PathLike[str]) -> Path:
    """Return the file to write for a path: the path itself, or `monitor.jsonl.gz` in a folder.

    Raises:
        ValueError: The path ends in `.jsonl`, as files of castwise 0.2 did.
    """
    path = Path(path)
    if path.suffix == ".jsonl" and not path.is_dir():
        raise ValueError(f"records are compressed: give {path}.gz instead of {path}, or a folder")
    return path if path.name.endswith(_SUFFIX) and not path.is_dir() else path / FILE_NAME


def path_to_read(path: str | os.PathLike[str]) -> Path:
    """Return the file to read for a path: a file itself, or that in a folder, which castwise 0.2 may have written."""
    path = Path(path)
    if path.is_file() or (path.name.endswith((_SUFFIX, ".jsonl")) and not path.is_dir()):
        return path
    older = path / FILE_NAME_0_2
    return older if older.is_file() and not (path / FILE_NAME).is_file() else path / FILE_NAME


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file in a folder beside that of `path`, with a suffix in its name."""
    path = path.absolute()
    if path.name == FILE_NAME and path.parent.name:
        return path.parent.with_name(path.parent.name + suffix) / FILE_NAME
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}{suffix}{_SUFFIX}")


def _content(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as opened:
        return opened.read()


def _cut_off_broken_end(file: int) -> int:
    """Cut off what a crash has left of a record, and return the bytes of all samples."""
    if not os.fstat(file).st_size:  # a device file may be endless
        return 0
    with os.fdopen(os.dup(file), "rb") as opened:
        os.ftruncate(file, end_of_whole(opened))
        return sum(end - start for start, end in samples(opened))
