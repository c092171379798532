"""Plant one bug in a repository of 64 commits, and let `castwise check --bisect` find the commit, unattended.

    python -m benchmarks.bisected

There is a repository for each program in benchmarks/changes. Each of its commits makes or takes back a rewrite that
changes nothing but rounding, except one at random, which has a bug. Writes benchmarks/results/bisected-cpu.json and the
table in benchmarks/README.md. Takes about ten minutes.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.changes.edits import SAME, WRONG, Edit
from benchmarks.checked_changes import FOLDER, changed

COMMITS = 64


def main() -> None:
    """Bisect a repository of each program, and write the table."""
    found = {program: bisected(program) for program in SAME}
    about = {"machine": recording.machine(), "commits": COMMITS, "programs": found, **summed(found)}
    recording.write("bisected-cpu", about, table(about))
    print(table(about))


def bisected(program: str) -> dict[str, Any]:
    """Return which commit has the bug, which was found, and at what cost."""
    rng = random.Random(program)
    bug, place = rng.choice(WRONG[program]), rng.randrange(1, COMMITS)
    source = (FOLDER / f"{program}.py").read_text() + "\n\ntrain(lambda name, value: None)\n"
    with tempfile.TemporaryDirectory() as folder:
        commits = committed(Path(folder), versions(source, SAME[program], bug, place, rng))
        command = [sys.executable, "-m", "castwise", "check", "--bisect", f"{commits[0]}..main", "train.py", "--json"]
        before = cpu_seconds()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        seconds = cpu_seconds() - before
    failure = {"commit": None, "verdict": done.stderr.strip().rpartition("\n")[2]}
    result = json.loads(done.stdout) if done.returncode == 0 else failure
    return {
        "bug": bug.new.strip() or f"without {bug.old.strip()}",
        "commit": place,
        "found": commits.index(result["commit"]) if result["commit"] in commits else None,
        "verdict": result["verdict"],
        "checks": done.stderr.count("\n"),
        "cpu_seconds": seconds,
    }


def versions(source: str, rewrites: list[Edit], bug: Edit, place: int, rng: random.Random) -> list[str]:
    """Return a program at each commit: rewritten again and again, and with a bug from one commit on."""
    texts, made = [source], set[Edit]()
    for number in range(1, COMMITS):
        while number != place:
            edit = rng.choice(rewrites)
            old, new = (edit.new, edit.old) if edit in made else (edit.old, edit.new)
            text = source.replace(old, new)
            # The bug must be possible in each version, and the rewrite must be the only change of the commit.
            if source.count(old) == 1 and text.count(new) == 1 and text.count(bug.old) == 1:
                source, made = text, made ^ {edit}
                break
        texts.append(changed(source, bug) if number >= place else source)
    return texts


def committed(folder: Path, texts: list[str]) -> list[str]:
    """Commit each version of train.py in a new repository; return the commits."""

    def git(*words: str) -> str:
        author = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        return subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "--initial-branch", "main")
    for number, text in enumerate(texts):
        (folder / "train.py").write_text(text)
        git("add", "train.py")
        git("commit", "--quiet", "--message", f"version {number}")
    return git("rev-list", "--reverse", "main").split()


def cpu_seconds() -> float:
    """Return what all ended child processes have computed."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summed(found: dict[str, Any]) -> dict[str, Any]:
    """Return how many bugs were found, and the largest cost."""
    return {
        "right": sum(one["found"] == one["commit"] for one in found.values()),
        "of": len(found),
        "most_checks": max(one["checks"] for one in found.values()),
        "most_cpu_seconds": max(one["cpu_seconds"] for one in found.values()),
    }


def table(about: dict[str, Any]) -> str:
    """Return a row for each program."""
    rows = ["| program | bug | commit | found | checks | CPU time | what was said |", f"|{'---|' * 7}"]
    for program, one in about["programs"].items():
        bug, seconds = one["bug"].replace("\n", " ").replace("|", "\\|"), one["cpu_seconds"]
        found = "none" if one["found"] is None else one["found"]
        verdict = one["verdict"].partition("\n")[0]
        rows.append(
            f"| {program} | `{bug}` | {one['commit']} | {found} | {one['checks']} | {seconds:.0f} s | {verdict} |"
        )
    return "\n".join([recording.headline(about["machine"]), "", *rows])


if __name__ == "__main__":
    main()
