"""`castwise check --bisect`: the first commit that changes a computation, found in a work tree of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castwise._user_error import UserError

SAME, DIFFERENT = 0, 1


@dataclass(frozen=True)
class Tried:
    """What `castwise check` said of a commit: its exit code, and its JSON or its error."""

    exit_code: int
    result: dict[str, Any]
    error: str = ""


@dataclass(frozen=True)
class Bisection:
    """Looks for the first commit after a good one, up to a bad one, whose script is another computation.

    Args:
        good: A commit.
        bad: A later commit.
        check: Checks the script in a folder of the work tree; called once for each commit that is tried.
        say: Called with a line for each commit.
    """

    good: str
    bad: str
    check: Callable[[Path], Tried]
    say: Callable[[str], None]

    @classmethod
    def between(cls, commits: str, check: Callable[[Path], Tried], say: Callable[[str], None]) -> Bisection:
        """Return the bisection for "GOOD..BAD".

        Raises:
            UserError: It is not of this form, or git does not know a commit.
        """
        good, dots, bad = commits.partition("..")
        if not (good and dots and bad) or bad.startswith("."):
            raise UserError(f"--bisect must be GOOD..BAD, as in --bisect v1.2..HEAD, got {commits!r}")
        return cls(commit_named(good), commit_named(bad), check, say)

    def first(self, record: Callable[[Path], None]) -> tuple[str, Tried]:
        """Return the first commit that differs, and what was said of it.

        Args:
            record: Records the script in a folder of the work tree, at the good commit.

        Raises:
            UserError: Nothing differs at the bad commit, or a commit that may be the first cannot be checked.
        """
        with work_tree(self.good) as folder:
            record(folder)
            _git("checkout", "--quiet", "--detach", self.bad, cwd=folder)
            found = {self.bad: self._tried(folder, self.bad)}
            if found[self.bad].exit_code != DIFFERENT:
                raise UserError(
                    f"nothing to look for: at {_named(self.bad)} the script is no other computation than at "
                    f"{_named(self.good)}, or cannot run. It must import what changes from its own folder: an "
                    f"installed package stays as it is. {found[self.bad].error}".rstrip()
                )
            said = _git("bisect", "start", self.bad, self.good, cwd=folder)
            try:
                while "is the first bad commit" not in said:
                    commit = commit_named("HEAD", folder)
                    found[commit] = self._tried(folder, commit)
                    word = {SAME: "good", DIFFERENT: "bad"}.get(found[commit].exit_code, "skip")
                    said = _git("bisect", word, cwd=folder)
                first = commit_named("refs/bisect/bad", folder)
            finally:
                _git("bisect", "reset", self.good, cwd=folder)
        return first, found[first]

    def _tried(self, folder: Path, commit: str) -> Tried:
        tried = self.check(folder)
        self.say(f"{_named(commit)}: {tried.result.get('verdict', 'cannot be checked')}")
        return tried


@dataclass(frozen=True)
class Command:
    """`castwise check` of a script in a folder, in a process of its own.

    Args:
        script: The script as it is named, with the options before it.
        arguments: The script's own.
        golden: The golden file, not in the work tree.
    """

    script: tuple[str, ...]
    arguments: tuple[str, ...]
    golden: Path

    def record(self, folder: Path) -> None:
        """Record the script.

        Raises:
            UserError: It cannot be recorded.
        """
        done = self._run(folder, "record", *self.script, "--out", str(self.golden))
        if done.returncode:
            raise UserError(f"the script cannot be recorded at the good commit: {done.stderr.strip()}")

    def check(self, folder: Path) -> Tried:
        """Compare the script with the golden file."""
        done = self._run(folder, *self.script, "--against", str(self.golden), "--json")
        result = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        return Tried(done.returncode, result, done.stderr.strip())

    def _run(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "castwise", "check", *words, "--", *self.arguments]
        paths = (moved(path, folder) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
        named = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, cwd=folder, env=named, capture_output=True, text=True)


def moved(path: str, folder: Path) -> str:
    """Return the folder of another checkout that corresponds to one of this checkout; this one, if there is none.

    Args:
        path: An entry of PYTHONPATH.
        folder: What corresponds to the current folder.
    """
    other = Path(folder, os.path.relpath(path))
    return os.path.abspath(other if other.is_dir() else path)


def subject(commit: str) -> str:
    """Return a commit's short hash and the first line of its message."""
    return _git("log", "-1", "--format=%h %s", commit).strip()


@contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """Check a commit out outside the repository; give the folder in it that corresponds to the current one."""
    prefix = _git("rev-parse", "--show-prefix").strip()
    with tempfile.TemporaryDirectory(prefix="castwise-tree-") as outside:
        tree = Path(outside, "tree")
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree / prefix
        finally:
            _git("worktree", "remove", "--force", str(tree))


def commit_named(name: str, folder: Path | None = None) -> str:
    """Return the hash of a commit.

    Raises:
        UserError: There is no git, or it knows no such commit.
    """
    why = f"git knows no commit {name!r}"
    return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", cwd=folder, why=why)


def _named(commit: str) -> str:
    return commit[:10]


def _git(*words: str, cwd: Path | None = None, why: str = "") -> str:
    try:
        done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("this needs git: install it") from None
    if done.returncode:
        raise UserError(why or f"git {' '.join(words[:2])}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()
