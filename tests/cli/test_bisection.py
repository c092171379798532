"""`castwise check --bisect` finds the commit that changes a computation, and leaves the repository as it was."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.cli.test_check import SCRIPT, castwise

from castwise._cli.bisection import Bisection, Tried
from castwise._user_error import UserError

pytestmark = pytest.mark.usefixtures("warm_python")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def committed(folder: Path, versions: list[str]) -> list[str]:
    """Commit versions of train.py in a new repository; return the commits."""
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.name", "A"), git(folder, "config", "user.email", "a@example.com")
    commits = []
    for number, text in enumerate(versions):
        (folder / "train.py").write_text(text)
        git(folder, "add", "train.py")
        git(folder, "commit", "--quiet", "--message", f"version {number}")
        commits.append(git(folder, "rev-parse", "HEAD"))
    return commits


def of_text(folder: Path) -> Tried:
    """What a check would say of a script that is a word."""
    word = (folder / "train.py").read_text().split()[0]
    code = {"same": 0, "other": 1, "broken": 125}[word]
    return Tried(code, {"verdict": word} if code < 2 else {}, "it is broken" if code > 1 else "")


@pytest.mark.parametrize("place", [1, 63])
def test_one_of_64_commits_is_found_in_eight_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    commits = committed(tmp_path, [f"{'same' if number < place else 'other'} {number}" for number in range(64)])
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    first, tried = Bisection.between(f"{commits[0]}..main", of_text, said.append).first(lambda folder: None)
    assert (first, tried.result["verdict"]) == (commits[place], "other")
    assert len(said) <= 8
    assert git(tmp_path, "status", "--porcelain", "--branch") == "## main"
    assert git(tmp_path, "worktree", "list").count("\n") == 0
    assert git(tmp_path, "for-each-ref", "refs/bisect") == ""


def test_commits_that_cannot_be_checked_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["same", "same", "broken", "same", "other", "other"]
    commits = committed(tmp_path, [f"{word} {number}" for number, word in enumerate(words)])
    monkeypatch.chdir(tmp_path)
    first, _ = Bisection.between("main~5..main", of_text, lambda line: None).first(lambda folder: None)
    assert first == commits[4]


@pytest.mark.parametrize(
    ("words", "commits", "said"),
    [
        (["same", "same"], "main~1..main", "nothing to look for"),
        (["same", "broken"], "main~1..main", "it is broken"),
        (["same", "broken", "other"], "main~2..main", "only 'skip'ped commits left"),
        (["same"], "main..nothing", "git knows no commit 'nothing'"),
        (["same"], "main", "--bisect must be GOOD..BAD, as in --bisect v1.2..HEAD, got 'main'"),
        (["same"], "main...main", "--bisect must be GOOD..BAD"),
    ],
)
def test_what_cannot_be_found_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], commits: str, said: str
) -> None:
    committed(tmp_path, [f"{word} {number}" for number, word in enumerate(words)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        Bisection.between(commits, of_text, lambda line: None).first(lambda folder: None)
    assert git(tmp_path, "worktree", "list").count("\n") == 0


def test_the_command_names_the_commit_and_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [SCRIPT, SCRIPT.replace("else 1e-5", "else 1e-4")]
    commits = committed(tmp_path, versions)
    monkeypatch.chdir(tmp_path)
    code, out, err = castwise("train.py", "--bisect", "main~1..main", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["commit"], found["kind"], found["where"]) == (commits[1], "different", "1, forward")
    assert castwise("record", "train.py", "--bisect", "main~1..main")[0] == 125


def test_ops_are_compared_with_those_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    committed(tmp_path / "runs", [SCRIPT])
    (tmp_path / "runs" / "train.py").write_text(SCRIPT.replace("else 1e-5", "else 1e-4"))
    monkeypatch.chdir(tmp_path / "runs")
    code, out, err = castwise("train.py", "--ops", "HEAD")
    assert (code, err) == (0, "")
    summary, line, _ = out.splitlines()
    assert summary.endswith("now: 1 difference")
    assert line.startswith("  1, forward (train.py:")
    assert line.endswith("): native_layer_norm, eps 1e-05 is now 0.0001")
    assert git(tmp_path / "runs", "worktree", "list").count("\n") == 0
    assert castwise("train.py", "--ops", "nothing") == (125, "", "castwise check: git knows no commit 'nothing'\n")
