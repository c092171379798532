"""Find the records in a folder, and read them as runs: ranks are merged, and attempts of a job are one history.

`castwise run` and `castwise.install` write a folder for each run, with the records of each model in a subfolder (see
`castwise._installation.run_folder`). A `Monitor` writes to its sinks alone.
"""

from __future__ import annotations

import calendar
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from castwise.monitor._merged_ranks import merge_ranks, name_and_rank, ranks_of
from castwise.monitor._record_file import RUN_NAME, path_to_read
from castwise.monitor._recorded_run import Run

LATEST = "latest"
MARK = ".run-"
"""What the name of a file begins with that marks the folder of a run."""
_TOGETHER_SECONDS = 600
_ATTEMPT = re.compile(r"attempt-([1-9]\d{0,8})")


def is_latest(head: bytes) -> bool:
    """Return True for the content of a file with the name of the latest run."""
    return RUN_NAME.fullmatch(head.decode(errors="replace").strip()) is not None


def run_in(folder: Path) -> Path:
    """Return the latest run's folder in a folder of runs, and any other folder unchanged.

    Raises:
        OSError: The folder cannot be read.
    """
    names = [] if path_to_read(folder).is_file() else [name for name in os.listdir(folder) if _is_run(folder / name)]
    if not names:
        return folder
    latest = ""
    with suppress(OSError):  # the run was killed before it wrote the file
        if (folder / LATEST).is_file():  # a pipe would block
            with (folder / LATEST).open("rb") as file:
                latest = file.read(64).decode(errors="replace").strip()
    return folder / (latest if latest in names else max(names))


def records_in(path: Path) -> list[Path]:
    """Return a file itself, a folder's record, or those of all models, ranks and attempts of the latest run in it.

    Raises:
        OSError: The folder cannot be read.
    """
    return run_with_records(path)[1]


def run_with_records(path: Path) -> tuple[Path, list[Path]]:
    """Return the latest run's folder in a folder of runs, or another path unchanged, and what `records_in` returns.

    Raises:
        OSError: The folder cannot be read.
    """
    if not path.is_dir():
        return path, [path]
    if path_to_read(path).is_file():
        return path, [path_to_read(path)]
    run = run_in(path)
    return run, _of_run(run) if run == path else _with_other_ranks(run)


def _of_run(run: Path) -> list[Path]:
    attempts = [run / name for name in os.listdir(run) if _ATTEMPT.fullmatch(name)]
    folders = [run, *sorted(attempts, key=_attempt_of)]
    return [file for folder in folders if folder.is_dir() for file in _of_models(folder)]


def _of_models(folder: Path) -> list[Path]:
    files = (path_to_read(folder / name) for name in sorted(os.listdir(folder)) if (folder / name).is_dir())
    return [file for file in files if file.is_file()]


def _with_other_ranks(run: Path) -> list[Path]:
    """Return a run's records, with those of ranks that wrote folders of their own, because nothing connected them."""
    files = _of_run(run)
    sizes = {name_and_rank(file)[0]: ranks_of(file) for file in files}
    known = set(map(name_and_rank, files))
    if all((name, rank) in known for name, size in sizes.items() for rank in range(size)):
        return files
    for other in sorted(run.parent.iterdir(), key=lambda folder: _seconds_between(folder, run)):
        if other == run or not _is_run(other) or _seconds_between(other, run) > _TOGETHER_SECONDS:
            continue
        for file in _of_run(other):
            name, rank = name_and_rank(file)
            if (name, rank) not in known and sizes.get(name, 0) == ranks_of(file) > rank:
                known.add((name, rank))
                files.append(file)
    return files


def _seconds_between(one: Path, other: Path) -> float:
    try:
        first, second = (calendar.timegm(time.strptime(run.name[:15], "%Y%m%d-%H%M%S")) for run in (one, other))
    except ValueError:
        return math.inf
    return abs(first - second)


def _is_run(folder: Path) -> bool:
    if RUN_NAME.fullmatch(folder.name) is None or not folder.is_dir():
        return False
    try:
        return any(name.startswith(MARK) for name in os.listdir(folder))
    except OSError:  # another user's, or just deleted
        return False


def read_runs(runs: Iterable[str | os.PathLike[str] | Run]) -> list[Run]:
    """Read runs, merge their ranks, and join the attempts of a job.

    Args:
        runs: Record files, folders with records, or runs.

    Raises:
        OSError: A record cannot be read, or a folder has none.
        ValueError: A file is not a record.
    """
    read: list[Run] = []
    for run in runs:
        if isinstance(run, Run):
            read.append(run)
            continue
        files = records_in(Path(run))
        read += [Run.read(file) for file in files or [Path(run)]]  # without any, the error names the file
    return join_attempts(merge_ranks(read))


def join_attempts(runs: Sequence[Run]) -> list[Run]:
    """Join the attempts of a job into one run per model, in the order of attempts.

    An attempt that numbers its steps from 1 again is counted on from the last step before it. One that continues with
    later numbers, because it loaded a checkpoint, replaces the steps that were taken twice.

    Args:
        runs: Runs in any order. A joined run takes the position of its first attempt.
    """
    jobs: dict[tuple[Path, str], list[tuple[int, Run]]] = {}
    for run in runs:
        folder = run.path.resolve().parent
        found = _ATTEMPT.fullmatch(folder.parent.name)
        job = folder.parent.parent if found else folder.parent
        is_run = found is not None or any((job / f"attempt-{number}").is_dir() for number in (1, 2))
        key = (job, folder.name) if is_run else (folder, run.path.name)
        jobs.setdefault(key, []).append((int(found[1]) if found else 1, run))
    return [_joined([run for _, run in sorted(attempts, key=lambda pair: pair[0])]) for attempts in jobs.values()]


def _joined(attempts: Sequence[Run]) -> Run:
    if len(attempts) == 1:
        return attempts[0]
    joined = replace(attempts[-1], steps=[], samples=[], diagnoses=[], mistakes=[], invariants=[], alone=[], lost=0)
    joined.settings = {**joined.settings, "attempts": len(attempts)}
    for attempt in attempts:
        last, first = (run.steps[at].step if run.steps else 0 for run, at in ((joined, -1), (attempt, 0)))
        joined.extend(attempt, last if first == 1 else 0)
    return joined


def _attempt_of(folder: Path) -> int:
    found = _ATTEMPT.fullmatch(folder.name)
    return int(found[1]) if found else 1
