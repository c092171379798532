"""Destinations of records: a file of JSON lines, TensorBoard, or any function of a dict."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from castwise import _files
from castwise._warnings import warn_or_print
from castwise.monitor import packing
from castwise.monitor.tensorboard_events import TensorBoard

__all__ = ["JSONL", "Record", "Sink", "Sinks", "TensorBoard"]

Record: TypeAlias = dict[str, Any]
"""A record passed to a sink: a dict of plain values, including `kind`."""
Sink: TypeAlias = Callable[[Record], object]
"""A callable that accepts a record. Its `close` method, if it has one, is called at the end."""

FILE_NAME = "monitor.jsonl"
SAMPLES_BYTES = 8 << 20
"""Limit for the samples in a file, in bytes. Above it, every second sample is dropped, except in the latest quarter."""
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_SAMPLE = b'{"kind":"sample"'
_AS_IT_IS: int = getattr(os, "O_BINARY", 0)  # without it, Windows changes line ends


class JSONL:
    """Appends each record to a file as one compact line of JSON (`castwise.monitor.packing`).

    Each line is one unbuffered write, so a killed process loses at most the line it is writing, and other programs can
    read the file while it grows. The remains of a broken last line are removed before the next line is written.
    Non-finite numbers become the strings "nan", "inf" and "-inf", because JSON cannot represent them.

    Args:
        path: A file that ends in `.jsonl`, or a folder, which then gets a `monitor.jsonl`. It is created when the first
            record arrives.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with JSONL(folder) as sink:
        ...     sink({"kind": "step", "step": 1, "loss": float("nan")})
        >>> print(Path(folder, "monitor.jsonl").read_text(), end="")
        {"kind":"step","step":1,"loss":"nan"}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = file_in(path)
        self._file: int | None = None
        self._names: Record | None = None  # the last `names` record written
        self._samples_bytes = 0

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append a record.

        Raises:
            OSError: The record could not be written completely.
            TypeError: The record has a value that JSON cannot represent.
        """
        if record.get("kind") == "step":
            record = packing.shortened(record)
        elif record.get("kind") == "sample" and packing.can_be_packed(record):
            names = packing.names_with(record, self._names or packing.NO_NAMES)
            if names != self._names:
                self._append(names)
                self._names = names
            record = packing.pack(record, names)
        self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        line = _ENCODER.encode(_spelled(record)).encode() + b"\n"
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _AS_IT_IS, 0o666)
            _cut_off_broken_line(self._file)
            self._names, self._samples_bytes = None, _bytes_of_samples(self._file)
        if line.startswith(_SAMPLE):
            if self._samples_bytes + len(line) > SAMPLES_BYTES:
                self._thin()
            self._samples_bytes += len(line)
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"wrote only {written} of {len(line)} bytes to {self.path}")

    def _thin(self) -> None:
        """Drop every second sample except in the latest quarter, replacing the file atomically."""
        assert self._file is not None
        lines = self.path.read_bytes().splitlines(keepends=True)
        samples = [place for place, line in enumerate(lines) if line.startswith(_SAMPLE)]
        dropped = set(samples[1 : len(samples) * 3 // 4 : 2])
        os.close(self._file)
        self._file = None
        _files.replace(self.path, b"".join(line for place, line in enumerate(lines) if place not in dropped))
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | _AS_IT_IS)
        self._samples_bytes = _bytes_of_samples(self._file)

    def set_apart(self, rank: int) -> None:
        """Write into a folder beside this one that has the rank in its name, as `castwise run` does."""
        self.close()
        if self.path.name == FILE_NAME:
            folder = self.path.absolute().parent
            self.path = folder.with_name(f"{folder.name}-rank{rank}") / FILE_NAME
        else:
            self.path = self.path.with_stem(f"{self.path.stem}-rank{rank}")

    def close(self) -> None:
        """Close the file. A later record opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __repr__(self) -> str:
        return f"JSONL({str(self.path)!r})"

    def __enter__(self) -> JSONL:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sinks:
    """Passes each record to several sinks. A sink that fails is dropped with a warning, and training continues.

    Args:
        sinks: Functions of one record, or paths, which become `JSONL` sinks.

    Raises:
        TypeError: A sink is neither.
    """

    def __init__(self, sinks: list[Sink | str | os.PathLike[str]]) -> None:
        self._sinks = [_sink(each) for each in sinks]

    def __repr__(self) -> str:
        return repr(self._sinks)

    def set_apart(self, rank: int) -> None:
        """Write the files of a rank that records alone beside those of rank 0: in `run-rank1` instead of `run`."""
        for sink in self._sinks if rank else []:
            if isinstance(sink, JSONL):
                sink.set_apart(rank)

    def __call__(self, record: Record) -> None:
        """Pass a record to all sinks."""
        for sink in list(self._sinks):
            try:
                sink(record)
            except Exception as error:
                self._sinks.remove(sink)
                warn_or_print(
                    f"the monitor's sink {sink!r} failed and was removed: {type(error).__name__}: {error}",
                    RuntimeWarning,
                )

    def close(self) -> None:
        """Close all sinks that have a `close`."""
        for sink in self._sinks:
            try:
                getattr(sink, "close", lambda: None)()
            except Exception as error:
                text = f"the monitor's sink {sink!r} could not be closed: {type(error).__name__}: {error}"
                warn_or_print(text, RuntimeWarning)


def file_in(path: str | os.PathLike[str]) -> Path:
    """Return the file of records for a path: the path itself, or `monitor.jsonl` in a folder."""
    path = Path(path)
    return path if path.suffix == ".jsonl" and not path.is_dir() else path / FILE_NAME


def _sink(given: object) -> Sink:
    if isinstance(given, (str, os.PathLike)):
        return JSONL(given)
    if not callable(given):
        raise TypeError(f"a sink must be a path or a function of one record (a dict), got {given!r}")
    return given


def _bytes_of_samples(file: int) -> int:
    if not os.fstat(file).st_size:  # a device file may be endless
        return 0
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as lines:
        return sum(len(line) for line in lines if line.startswith(_SAMPLE))


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


def _spelled(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _spelled(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return value if all(type(each) is int for each in value) else [_spelled(each) for each in value]
    return value
