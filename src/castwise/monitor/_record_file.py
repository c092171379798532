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
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from castwise import _files
from castwise._locks import try_lock, unlock
from castwise._number_text import several
from castwise._warnings import warn_or_print

FILE_NAME = "monitor.jsonl"
RUN_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
"""Names of the folders that `castwise run` and `castwise.install` create, one for each run."""
SAMPLES_BYTES = 8 << 20
"""Limit for the samples in a file, in bytes. Above it, every second sample is dropped, except in the latest quarter."""
BACKLOG_BYTES = 1 << 20
"""Limit for the lines in memory that a full disk did not take: thousands of steps, and some samples."""
CHECK_SECONDS = 1.0
"""Seconds between two looks whether the file is still where it was: one `stat`, as costly as writing a line."""

_KINDS = "run|step|names|sample|diagnosis|mistake|lost|alone|end"
_FIRST_LINE = re.compile(rb'\{"kind": ?"(%s)"[,}]' % _KINDS.encode())
_BROKEN_LINE = re.compile(rb'\{("(k(i(n(d(":?( ?("[a-z]*)?)?)?)?)?)?)?)?')  # `{"kind": "r`, cut off anywhere
_KIND = re.compile(rb'\{"kind":"(\w+)"')
_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE}


def is_record(head: bytes) -> bool:
    """Return True for the start of a record that castwise has written, also if a crash cut it off."""
    if _FIRST_LINE.match(head):
        return True
    is_all = len(head) < _files.HEAD and b"\n" not in head
    return is_all and (not head.strip(b"\0") or _BROKEN_LINE.fullmatch(head) is not None)


class RecordFile:
    """Appends lines to a file, each in one unbuffered write, so that a killed process loses at most the last.

    * A file of which the first line is not a record's is never changed.
    * A second writer of one file, in any process, gets a file beside it: `runs/x-2/monitor.jsonl`.
    * A forked child that trains writes beside its parent's file: `runs/x-process71/monitor.jsonl`.
    * A file that was deleted or renamed is begun again, with the run's first line.
    * Lines that a full disk does not take are kept, up to `BACKLOG_BYTES`, and written as soon as possible. The number
      of those that were dropped is recorded.

    Args:
        path: The file. It is created with the first line.

    Raises:
        FileExistsError: The file exists and is not a record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with suppress(NotADirectoryError, IsADirectoryError, PermissionError):  # the first line shows these
            if path.is_file():
                _files.refuse_foreign(path, "a record", is_record)
        self._file: int | None = None
        self._is_regular = True
        self._ours: tuple[int, int] | None = None
        self._checked = 0.0
        self._samples_bytes = 0
        self._cut_to: int | None = None  # where a line begins that could not be written completely
        self._backlog: deque[bytes] = deque()
        self._lost = 0
        self._queued: dict[bytes, bytes] = {}  # the last `run` line and the last `names` line
        self._written: dict[bytes, bytes] = {}
        self._is_child = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        _IN_THIS_PROCESS.add(self)

    def append(self, line: bytes) -> None:
        """Append a line, or keep it in memory while the disk is full.

        Raises:
            OSError: The file cannot be opened, or is not a record.
        """
        with self._lock:
            kind = _kind_of(line)
            if self._is_child and self._file is None and not self._backlog:
                if kind not in (b"run", b"step"):
                    return  # a child that only loads data, or ends
                self._leave_parent()
            self._backlog.append(line)
            if kind in (b"run", b"names"):
                self._queued[kind] = line
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
                if self._lost and (not self._backlog or _kind_of(self._backlog[0]) not in (b"run", b"names")):
                    self._write(b'{"kind":"lost","records":%d}\n' % self._lost)
                    self._lost = 0
                    continue
                line = self._backlog[0]
                self._write(line)
                self._backlog.popleft()
                if (kind := _kind_of(line)) in (b"run", b"names"):
                    self._written[kind] = line
        except OSError as error:
            self._drop_oldest()
            if error.errno not in _MAY_PASS:
                raise
            self._warn(
                "full",
                f"{self.path} cannot be written: {error.strerror}. Records are kept, up to {BACKLOG_BYTES >> 10} KiB, "
                "and written when that is possible",
            )

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        self._cut()
        if line.startswith(b'{"kind":"sample"'):
            if self._samples_bytes + len(line) > SAMPLES_BYTES and self._is_regular:
                self._thin()
            self._samples_bytes += len(line)
        rest = line
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if len(rest) < len(line) and self._is_regular:  # a nearly full disk takes a part
                self._cut_to = os.fstat(self._file).st_size - (len(line) - len(rest))
                self._cut()
            raise

    def _cut(self) -> None:
        if self._cut_to is not None and self._file is not None:
            os.ftruncate(self._file, self._cut_to)
            self._cut_to = None

    def _drop_oldest(self) -> None:
        """Drop lines, down to three quarters of the limit; the first lines of a file and names cannot be spared."""
        excess = sum(map(len, self._backlog)) - BACKLOG_BYTES
        if excess <= 0:
            return
        excess += BACKLOG_BYTES // 4
        kept: deque[bytes] = deque()
        for line in self._backlog:
            if excess > 0 and _kind_of(line) not in (b"run", b"names"):
                excess -= len(line)
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
        self._samples_bytes = _bytes_of_samples(file)
        again = [self._written[b"run"]] if not status.st_size and b"run" in self._written else []
        again += [self._written[b"names"]] if b"names" in self._written else []
        self._backlog.extendleft(reversed(again))

    def _take(self, path: Path, flags: int = 0) -> int | None:
        """Open and lock a file, and cut off a broken last line; None if another writer has locked it."""
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
                _cut_off_broken_line(file)
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
        lines = _content(self._file).splitlines(keepends=True)
        samples = [row for row, line in enumerate(lines) if line.startswith(b'{"kind":"sample"')]
        dropped = set(samples[1 : len(samples) * 3 // 4 : 2])
        kept = b"".join(line for row, line in enumerate(lines) if row not in dropped)
        self._samples_bytes = 0  # where the disk is full: as many samples again before the next try
        with suppress(OSError):
            if not _files.is_at(self._file, self.path):
                return
            if os.name == "nt":  # which replaces no open file
                self._close()
            thinned = _files.exchange(Path(os.path.realpath(self.path)), kept)
            self._close()
            self._file = thinned
            self._samples_bytes = _bytes_of_samples(thinned)
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
        self._written = dict(self._queued)  # what the child's samples refer to

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn_or_print(text, RuntimeWarning)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # `__init__` may have failed
            self._close()


_IN_THIS_PROCESS: weakref.WeakSet[RecordFile] = weakref.WeakSet()


def _forked() -> None:
    for file in list(_IN_THIS_PROCESS):
        file._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def file_in(path: str | os.PathLike[str]) -> Path:
    """Return the file of records for a path: the path itself, or `monitor.jsonl` in a folder."""
    path = Path(path)
    return path if path.suffix == ".jsonl" and not path.is_dir() else path / FILE_NAME


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file in a folder beside that of `path`, with a suffix in its name."""
    path = path.absolute()
    if path.name == FILE_NAME and path.parent.name:
        return path.parent.with_name(path.parent.name + suffix) / FILE_NAME
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def _kind_of(line: bytes) -> bytes:
    found = _KIND.match(line)
    return found[1] if found else b""


def _content(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as opened:
        return opened.read()


def _bytes_of_samples(file: int) -> int:
    if not os.fstat(file).st_size:  # a device file may be endless
        return 0
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as lines:
        return sum(len(line) for line in lines if line.startswith(b'{"kind":"sample"'))


def _cut_off_broken_line(file: int) -> None:
    end = os.fstat(file).st_size
    for start, block in _blocks_from_the_end(file, end):
        if block.endswith(b"\n") and start + len(block) == end:
            return
        newline = block.rfind(b"\n")
        if newline >= 0:
            os.ftruncate(file, start + newline + 1)
            return
    if end:
        os.ftruncate(file, 0)


def _blocks_from_the_end(file: int, end: int, size: int = 2**16) -> Iterator[tuple[int, bytes]]:
    while end > 0:
        start = max(0, end - size)
        os.lseek(file, start, os.SEEK_SET)
        yield start, os.read(file, end - start)
        end = start
