"""`SavedFiles`: which files with an optimizer's state runs have saved, for runs that resume from them.

Each run's folder has one line of JSON for each such file. Another run beside it finds the line by the file's size and
time of change, so that of a file that was written since, or copied, nothing is known.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from castwise._invariants.resumed import SavedStep, averages_of, count_states

_FILE = "saved_files.jsonl"
_MOST_RUNS, _MOST_BYTES, _DEEPEST = 50, 1 << 20, 3


class _Identity(NamedTuple):
    size: int
    changed: int

    @classmethod
    def of(cls, path: object) -> _Identity | None:
        """Return that of a file; None if it is no path, or there is none."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return None
        return cls(found.st_size, found.st_mtime_ns)


class SavedFiles:
    """The files that are saved and read in a run.

    Args:
        out: The folder of runs.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._read: deque[_Identity] = deque(maxlen=8)

    def read(self, path: object) -> None:
        """Note that a file is read."""
        identity = _Identity.of(path)
        if identity is not None:
            self._read.append(identity)

    def written(self, run: Path, saved: object, path: object, step: int, usual: tuple[float, float] | None) -> None:
        """Write a line about a file, if it has the state of a single optimizer.

        Args:
            run: The run's folder.
            saved: What the file holds.
            path: The file.
            step: The last step.
            usual: The median of the last losses, and the sigma of their logarithms; None if they are not known.
        """
        identity, found = _Identity.of(path), list(_optimizer_states(saved))
        if identity is None or len(found) != 1:
            return
        name = Path(path)  # type: ignore[arg-type]  # a path, as it has an identity
        line = {
            "file": name.parent.name if name.name == ".metadata" else name.name,  # of torch.distributed.checkpoint
            "size": identity.size,
            "changed": identity.changed,
            "step": step,
            "loss": None if usual is None else usual[0],
            "sigma": 0.0 if usual is None else usual[1],
            "states": count_states(found[0]),
            "averages": averages_of(found[0]["state"].values()),
        }
        with suppress(OSError), (run / _FILE).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    def loaded(self, own: str) -> SavedStep | None:
        """Return what another run has recorded of a file that was read; None if there is none, or there are several.

        Args:
            own: The name of this run's folder.
        """
        read, self._read = set(self._read), deque(maxlen=8)
        found = {line.file: line for identity, line in self._lines(own) if identity in read} if read else {}
        return next(iter(found.values())) if len(found) == 1 else None

    def _lines(self, own: str) -> Iterator[tuple[_Identity, SavedStep]]:
        with suppress(OSError):
            runs = sorted((path for path in self._out.iterdir() if path.name != own), reverse=True)
            for run in runs[:_MOST_RUNS]:
                yield from _lines_of(run)


def _lines_of(run: Path) -> Iterator[tuple[_Identity, SavedStep]]:
    try:
        with (run / _FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        # One that a full disk has cut off, or that castwise has not written.
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            value = json.loads(line)
            loss = None if value["loss"] is None else float(value["loss"])
            averages = {str(name): float(norm) for name, norm in value["averages"].items()}
            numbers = int(value["step"]), loss, float(value["sigma"]), int(value["states"])
            identity = _Identity(int(value["size"]), int(value["changed"]))
            yield identity, SavedStep(str(value["file"]), run.name, *numbers, averages)


def _optimizer_states(value: object, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the states of optimizers in what is saved."""
    if not isinstance(value, Mapping) or depth > _DEEPEST:
        return
    if isinstance(value.get("state"), Mapping) and "param_groups" in value:
        yield value
        return
    items: Iterable[object] = value.values()
    for item in items:
        yield from _optimizer_states(item, depth + 1)
