"""Destinations of records: a compressed file of JSON lines, TensorBoard, or any function of a dict."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from castwise._warnings import warn_or_print
from castwise.monitor._record_file import RecordFile, beside, path_to_write
from castwise.monitor._records import Record
from castwise.monitor._tensorboard_events import TensorBoard

__all__ = ["JSONL", "RecordSink", "Sink", "Sinks", "TensorBoard"]


@runtime_checkable
class RecordSink(Protocol):
    """A sink that accepts records as objects. Its `close` method, if it has one, is called at the end."""

    def write_record(self, record: Record) -> None:
        """Write a record.

        Args:
            record: The record.
        """


Sink: TypeAlias = RecordSink | Callable[[dict[str, Any]], object]
"""A `RecordSink`, or a callable that accepts a record as a dict of plain values, including its `kind`."""

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class JSONL:
    """Appends each record to a file, as one compact line of JSON in a gzip member of its own.

    `zcat` prints the file, also while it grows. Each record is one unbuffered write, so a killed process loses at most
    the one it is writing. The remains of a broken last record are removed before the next one is written. Non-finite
    numbers become the strings "nan", "inf" and "-inf", because JSON cannot represent them.

    A file has one writer. A second one gets a folder beside it (`x-2` beside `x`), and a forked child that trains gets
    `x-process71`; `path` is the file that is written. A full disk loses nothing as long as the records fit into 1 MiB
    of memory; the file gets the number of the others as soon as it can be written again. A file that was deleted or
    renamed is begun again.

    Args:
        path: A file that ends in `.jsonl.gz`, or a folder, which then gets a `monitor.jsonl.gz`. It is created when the
            first record arrives. Records are appended to those of an earlier monitor.

    Raises:
        FileExistsError: The file exists, and castwise has not written it.
        ValueError: The path ends in `.jsonl`.

    Example:
        >>> import gzip, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with JSONL(folder) as sink:
        ...     sink({"kind": "step", "step": 1, "loss": float("nan")})
        >>> print(gzip.decompress(Path(folder, "monitor.jsonl.gz").read_bytes()).decode(), end="")
        {"kind":"step","step":1,"loss":"nan"}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = RecordFile(path_to_write(path))

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append a record that is given as a dict.

        Raises:
            OSError: The file cannot be opened, or castwise has not written it. A full disk raises no error, but warns
                once.
            TypeError: The record has a value that JSON cannot represent.
        """
        try:
            line = _ENCODER.encode(record)
        except (TypeError, ValueError):  # rare, so most steps need no copy
            line = _ENCODER.encode(_as_json(record))
        self._file.append(record.get("kind", ""), line.encode() + b"\n")

    def write_record(self, record: Record) -> None:
        """Append a record, rounded and without fields that have their default value.

        Args:
            record: The record.

        Raises:
            OSError, TypeError: As for a dict.
        """
        self(record.in_file())

    def set_apart(self, rank: int) -> None:
        """Write into a folder beside this one that has the rank in its name, as `castwise run` does.

        Args:
            rank: The rank, >= 1.

        Raises:
            FileExistsError: As for a new `JSONL`.
        """
        self._file.close()
        self._file = RecordFile(beside(self.path, f"-rank{rank}"))

    def close(self) -> None:
        """Close the file. A later record opens it again."""
        self._file.close()

    def __repr__(self) -> str:
        return f"JSONL({str(self.path)!r})"

    def __enter__(self) -> JSONL:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sinks:
    """Passes each record to several sinks. A sink that fails is dropped with a warning, and training continues.

    Args:
        sinks: Sinks, or paths, which become `JSONL` sinks.

    Raises:
        TypeError: A sink is neither.
    """

    def __init__(self, sinks: list[Sink | str | os.PathLike[str]]) -> None:
        self._sinks = [(sink, _writer(sink)) for sink in map(_sink, sinks)]

    def __repr__(self) -> str:
        return repr([sink for sink, _ in self._sinks])

    def set_apart(self, rank: int) -> None:
        """Write the files of a rank that records alone beside those of rank 0: in `run-rank1` instead of `run`.

        Args:
            rank: The rank.
        """
        for sink, _ in self._sinks if rank else []:
            if isinstance(sink, JSONL):
                sink.set_apart(rank)

    def __call__(self, record: Record) -> None:
        """Pass a record to all sinks."""
        for sink, write in list(self._sinks):
            try:
                write(record)
            except Exception as error:
                self._sinks.remove((sink, write))
                warn_or_print(
                    f"the monitor's sink {sink!r} failed and was removed: {type(error).__name__}: {error}",
                    RuntimeWarning,
                )

    def close(self) -> None:
        """Close all sinks that have a `close`."""
        for sink, _ in self._sinks:
            try:
                getattr(sink, "close", lambda: None)()
            except Exception as error:
                text = f"the monitor's sink {sink!r} could not be closed: {type(error).__name__}: {error}"
                warn_or_print(text, RuntimeWarning)


def _sink(given: object) -> Sink:
    if isinstance(given, (str, os.PathLike)):
        return JSONL(given)
    if not (isinstance(given, RecordSink) or callable(given)):
        raise TypeError(f"a sink must be a path or a function of one record (a dict), got {given!r}")
    return given


def _writer(sink: Sink) -> Callable[[Record], object]:
    """Return what writes a record to a sink; asked once, because `isinstance` of a protocol is slow."""
    return sink.write_record if isinstance(sink, RecordSink) else lambda record: sink(record.to_json())


def _as_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if all(type(item) is int for item in value) else [_as_json(item) for item in value]
    return value
