"""The folder of a run: one for each, shared by the ranks of a launch and the attempts of an elastic job.

    castwise-run/latest                              the name of the newest run, in a plain file
    castwise-run/20261123-133208-1f3a/               one run; times are in UTC
    castwise-run/20261123-133208-1f3a/report.html
    castwise-run/20261123-133208-1f3a/Net/           rank 0; then Net-rank1, Net-rank2, ...
    castwise-run/20261123-133208-1f3a/attempt-2/     where a launcher restarts ranks: the same for each attempt

No rank waits for another. The first rank of a launch creates an entry for it in `castwise-run/.launches`, the others
read the run's name from it. All of it is in the names of files, and a folder gets its name only when it is complete, by
one rename, so a killed process leaves nothing half done.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from castwise import _files
from castwise.monitor._records import LAST_SECOND
from castwise.monitor._run_files import LATEST, MARK, is_latest, run_in

_LAUNCHES = ".launches"
_NEW = re.compile(r"\.new-[0-9a-f]{16}")
_ENTRY = re.compile(r"([0-9a-f]{16})-[1-9]\d*")
_OLD_SECONDS = 3600.0
_LAUNCH_SECONDS = 30 * 86400.0
"""How long nothing of a launch has changed when its entry is removed."""
_LONGEST = 100
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)", re.IGNORECASE)
_LOOPBACK = {"", "localhost", "127.0.0.1", "::1"}


class Launch(NamedTuple):
    """What the ranks of a launch have in common, and this rank's part in it.

    Args:
        key: Equal on all ranks, and not equal on those of another launch, as far as the environment shows.
        agent: The process that started the ranks of this node, if the launcher has one: a node has one in a launch.
        rank: This process's rank.
        ranks: Number of ranks.
        attempt: Number of the attempt, from 1.
        is_elastic: Whether the launcher starts ranks again within one launch.
        has_attempts: Whether the first attempt is in a subfolder too, because more were asked for.
    """

    key: str
    agent: str
    rank: int
    ranks: int
    attempt: int
    is_elastic: bool
    has_attempts: bool


def launch_now() -> Launch | None:
    """Return the launch that this process is a rank of; None if nothing shows that there is one.

    * torchrun: its run id and, over several nodes, the address and port of the first. On one node, and for the default
      id "none", which all launches share, its process id and the time it was started.
    * Slurm's `srun`: job, step and restart count.
    * Other launchers that set `RANK` and `WORLD_SIZE`, and initialised process groups: the address and port of the
      first node, or on one node the parent process.
    """
    environment = os.environ
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    in_step = "SLURM_STEP_ID" in environment and not is_torchrun
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    else:
        names = (
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
            if in_step and "RANK" not in environment
            else ("RANK", "WORLD_SIZE")
        )
        rank, ranks = (_number(name) for name in names)
    if ranks < 2 and not is_torchrun:
        return None
    where = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    local = _number("LOCAL_WORLD_SIZE")
    on_several_nodes = local < ranks if local else where[0] not in _LOOPBACK
    parent = _parent()
    if is_torchrun:
        restarts, limit = _number("TORCHELASTIC_RESTART_COUNT"), _number("TORCHELASTIC_MAX_RESTARTS")
        common = "".join(where) if on_several_nodes else parent
        key = _key("torchrun", environment["TORCHELASTIC_RUN_ID"], common)
        return Launch(key, parent, rank, ranks, restarts + 1, is_elastic=True, has_attempts=limit > 0)
    if in_step:
        step = (environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
        return Launch(_key("slurm", *step), "", rank, ranks, 1, is_elastic=False, has_attempts=False)
    return Launch(
        _key("ranks", *where, "" if on_several_nodes else parent),
        "",
        rank,
        ranks,
        1,
        is_elastic=False,
        has_attempts=False,
    )


class RunFolder:
    """The folder of a run, created when it is first asked for.

    Args:
        out: The folder of all runs. Nothing else in it is changed.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._pid = os.getpid()
        self._began, self._token = _now(), os.urandom(8).hex()
        self._run: Path | None = None
        self._attempt = ""
        self._number = _INSTALLED[out] = _INSTALLED.get(out, 0) + 1

    @property
    def run(self) -> Path | None:
        """The run's folder; None if neither this process nor one forked from it has created it."""
        if self._run is None:
            with suppress(OSError):
                run = next(_names(self.out, self._began, self._token))
                return run if run.is_dir() else None
        return self._run

    def make(self) -> Path:
        """Create the run's folder if it does not exist yet, and return the one for the records of models.

        Raises:
            OSError: A folder cannot be created or written.
        """
        if self._run is None:
            self.out.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(self.out)
            launch = launch_now()
            if launch is not None:
                self._join(launch)
            _remove_old_launches(self.out)  # after `_join`, which shows that this rank's launch is not old
            self._run = _claim(self.out, self._began, self._token)
        records = self._run / self._attempt
        records.mkdir(parents=True, exist_ok=True)
        return records

    def _join(self, launch: Launch) -> None:
        """Take over the run's name from the launch's entry, which the first rank creates."""
        launches = self.out / _LAUNCHES
        launches.mkdir(exist_ok=True)
        of_this_node = f"agent-{_key(platform.node())}-"
        own = f"{of_this_node}{launch.agent}"
        # A forked process that is not a rank belongs to the rank that it was forked from.
        is_rank = os.getpid() == self._pid or (dist.is_available() and dist.is_initialized())
        for number in count(1):
            entry = launches / f"{_key(launch.key, str(self._number))}-{number}"
            _create(entry, f"run-{self._began}-{self._token}", self.out)
            members = os.listdir(entry)
            if launch.agent and any(name.startswith(of_this_node) and name != own for name in members):
                continue  # an earlier launch with the same id
            attempt = _enlist(entry, launch, members) if is_rank else launch.attempt
            if attempt is None:
                continue  # an earlier launch by the same process
            if launch.agent:
                _touch(entry / own)
            (name,) = (name for name in members if name.startswith("run-"))
            self._began, self._token = name.removeprefix("run-").rsplit("-", 1)
            if launch.has_attempts or attempt > 1:
                self._attempt = f"attempt-{attempt}"
            return


_INSTALLED: dict[Path, int] = {}  # by folder: how often this process has installed castwise with it


def _enlist(entry: Path, launch: Launch, members: list[str]) -> int | None:
    """Note that this rank takes part, and return the attempt; None if the rank was already there.

    An elastic launcher may restart ranks without counting, where nodes come and go: the next attempt is the first in
    which this rank was not, and that has no other number of ranks.
    """
    for attempt in count(launch.attempt):
        prefix, size = f"rank-{attempt}-", f"of{launch.ranks}"
        has_other_size = any(name.startswith(prefix) and not name.endswith(size) for name in members)
        if not has_other_size and _touch(entry / f"{prefix}{launch.rank}{size}"):
            return attempt
        if not launch.is_elastic:
            return None
    return None


def _claim(out: Path, began: str, token: str) -> Path:
    """Create the folder of a run, or return it if another rank has created it."""
    for run in _names(out, began, token):
        if _create(run, f"{MARK}{token}", out):
            _point_to(out, run.name)
            return run
        if (run / f"{MARK}{token}").exists():
            return run
    raise AssertionError("unreachable: there are infinitely many names")


def _names(out: Path, began: str, token: str) -> Iterator[Path]:
    """Yield the folders that a run may have, up to the one that is its own."""
    for number in count():
        run = out / f"{began}-{_key(token, str(number))[:4]}"
        is_foreign = run.exists() and not (run / f"{MARK}{token}").exists()
        if not is_foreign:
            yield run


def _create(folder: Path, name: str, out: Path) -> bool:
    """Create a folder with one empty file in it, atomically; return False if the folder exists."""
    if folder.is_dir():
        return False
    aside = out / f".new-{os.urandom(8).hex()}"
    aside.mkdir()
    try:
        _touch(aside / name)
        aside.rename(folder)  # fails if the folder exists, because it is not empty
    except OSError:
        _remove(aside)
        if not folder.is_dir():
            raise
        return False
    return True


def _touch(file: Path) -> bool:
    """Create an empty file; return False if it exists."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    return True


def _point_to(out: Path, run: str) -> None:
    latest = out / LATEST
    if latest.is_symlink() or (latest.exists() and not latest.is_file()):
        return  # not ours
    with suppress(OSError):
        _files.replace(latest, f"{run}\n".encode(), "a run's name", is_latest)


def _remove_left_behind(out: Path) -> None:
    """Remove temporary files of killed processes: in the latest run, and folders that were to become one."""
    with suppress(OSError):
        latest = run_in(out)
        if latest != out:
            for folder, folders, _ in os.walk(latest):
                _files.sweep(Path(folder))
                if len(Path(folder).relative_to(latest).parts) == 2:  # attempt, model
                    folders.clear()
    with suppress(OSError):
        for name in os.listdir(out):
            aside = out / name
            if _NEW.fullmatch(name) and aside.stat().st_mtime < time.time() - _OLD_SECONDS:
                _remove(aside)


def _remove_old_launches(out: Path) -> None:
    """Remove entries of launches without any change in 30 days, neither in the entry nor in the records of its run.

    Entries with the same key are numbered without gaps, so they go together.
    """
    with suppress(OSError):
        launches = out / _LAUNCHES
        by_key: dict[str, list[Path]] = {}
        for name in os.listdir(launches) if launches.is_dir() else ():
            if found := _ENTRY.fullmatch(name):
                by_key.setdefault(found[1], []).append(launches / name)
        for entries in by_key.values():
            if all(_is_over(entry, out) for entry in entries):
                for entry in entries:
                    aside = out / f".new-{os.urandom(8).hex()}"
                    entry.rename(aside)  # at once: ranks that look for an entry find all of it, or nothing
                    _remove(aside)


def _is_over(entry: Path, out: Path) -> bool:
    """Return True if nothing of a launch has changed for long, and its entry has only files of castwise."""
    before, names = time.time() - _LAUNCH_SECONDS, os.listdir(entry)
    if entry.stat().st_mtime > before or not all(name.startswith(("run-", "agent-", "rank-")) for name in names):
        return False
    for began, _, token in (name.removeprefix("run-").rpartition("-") for name in names if name.startswith("run-")):
        for folder, _, files in os.walk(next(_names(out, began, token))):
            if any((Path(folder) / name).stat().st_mtime > before for name in (".", *files)):
                return False
    return True


def _remove(aside: Path) -> None:
    with suppress(OSError):
        for name in os.listdir(aside):
            if name.startswith(("run-", "agent-", "rank-", MARK)) and not (aside / name).stat().st_size:
                (aside / name).unlink()
        aside.rmdir()


def _parent() -> str:
    """Return what distinguishes the parent process from all others on all nodes, as far as the system shows it."""
    parent = os.getppid()
    try:
        # After the program's name in parentheses, which may contain anything: field 22, the time it was started.
        started = Path(f"/proc/{parent}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # no Linux
        started = ""
    return _key(platform.node(), str(parent), started)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(min(max(0.0, time.time()), LAST_SECOND - 1.0)))


def model_folder(name: str, taken: Iterable[str]) -> str:
    """Return a folder's name for a model's class: letters, digits, `_` and `+`, at most 100 bytes, none of those taken.

    Names may be anything (`type("../x", ...)`), and some are special: `-rank1` ends that of another rank, and Windows
    reserves `con` and others.
    """
    safe = "".join(letter if letter.isalnum() or letter in "_+" else "_" for letter in name)
    safe = safe.encode(errors="replace")[:_LONGEST].decode(errors="ignore") or "model"
    if _RESERVED.fullmatch(safe):
        safe += "_"
    known = {other.casefold() for other in taken}  # some file systems do not distinguish cases
    numbered = (safe if number == 1 else f"{safe}-{number}" for number in count(1))
    return next(folder for folder in numbered if folder.casefold() not in known)
