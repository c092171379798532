"""Small faults planted in castwise.amp, one at a time: do the tests notice? mutmut plants them and runs the tests.

`[tool.mutmut]` in pyproject.toml says in which modules, and with which tests. What was run before, and has not changed
since, is not run again; Ctrl-C stops, and the next run goes on from there. Survivors are explained in
`tests/mutants.toml` by what was changed, not by number; one that is not makes this exit with 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomllib
from mutmut.stats import status_by_exit_code

import recording
from castwise.bench.recording import headline

ROOT = Path(__file__).parents[1]
NOT_KILLED = {"survived", "no tests", "suspicious", "segfault"}


def mutmut(*arguments: str) -> str:
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def change(name: str) -> tuple[str, str]:
    """The lines that a mutant takes away, and those it puts in their place."""
    lines = [line for line in mutmut("show", name).splitlines() if not line.startswith(("---", "+++"))]
    was, now = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return was, now


def outcomes(meta: Path) -> dict[str, str]:
    codes = json.loads(meta.read_text())["exit_code_by_key"]
    return {name: status_by_exit_code[code] for name, code in codes.items()}


def forget_survivors() -> None:
    """Have those run again that were not noticed: there may be tests now that notice."""
    for meta in (ROOT / "mutants").rglob("*.meta"):
        content = json.loads(meta.read_text())
        codes = content["exit_code_by_key"]
        content["exit_code_by_key"] = {
            name: None if status_by_exit_code[code] in NOT_KILLED else code for name, code in codes.items()
        }
        meta.write_text(json.dumps(content, indent=4))


def main() -> None:
    forget_survivors()
    with suppress(KeyboardInterrupt):  # what is not reached is recorded as not checked
        subprocess.run([sys.executable, "-m", "mutmut", "run", "--max-children", "2"], cwd=ROOT, check=True)
    known = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    reasons = {
        (each["module"], each["was"], each["now"]): reason
        for reason, group in known.items()
        for each in group["survivors"]
    }
    modules: dict[str, Any] = {}
    unexplained = []
    for meta in sorted((ROOT / "mutants").rglob("*.meta")):
        found = outcomes(meta)
        module = meta.name.removesuffix(".py.meta")
        counts: Counter[str] = Counter(status for status in found.values() if status not in NOT_KILLED)
        for name, status in found.items():
            if status in NOT_KILLED:
                was, now = change(name)
                reason = reasons.get((module, was, now), "unexplained")
                counts[reason] += 1
                if reason == "unexplained":
                    unexplained.append({"module": module, "was": was, "now": now, "status": status})
        modules[module] = {"mutants": len(found), **dict(sorted(counts.items()))}
    about = recording.machine() | {"mutmut": version("mutmut")}
    recording.write("mutants", {**about, "modules": modules, "unexplained": unexplained}, table(about, modules))
    if unexplained:
        sys.exit(f"{len(unexplained)} mutants survive without an explanation in tests/mutants.toml")


def table(about: dict[str, Any], modules: dict[str, Any]) -> str:
    columns = ["mutants", *sorted({name for counts in modules.values() for name in counts} - {"mutants"})]
    rows = [[module, *(str(counts.get(name, 0)) for name in columns)] for module, counts in modules.items()]
    lines = [["castwise.amp", *columns], ["---"] * (len(columns) + 1), *rows]
    return "\n".join([headline(about), "", *(f"| {' | '.join(line)} |" for line in lines)])


if __name__ == "__main__":
    main()
