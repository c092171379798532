"""Measure the line and branch coverage of castwise.amp and castwise.distributed by their own tests.

    python -m benchmarks.core_coverage

Writes benchmarks/results/coverage.json and the table in benchmarks/README.md. Exits with 1 if less than 95% of the
lines or branches are covered.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.recording import headline

ROOT = Path(__file__).parents[1]
TESTS = ["tests/amp", "tests/cpu", "tests/cuda", "tests/distributed"]
LEAST = 0.95
KINDS = {"lines": ("num_statements", "covered_lines"), "branches": ("num_branches", "covered_branches")}


def coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=True)


def measure() -> dict[str, dict[str, list[int]]]:
    """Run the tests; return the number of lines and branches, and of covered ones, by folder and in total."""
    coverage("erase")
    coverage("run", "-m", "pytest", "-q", *TESTS)
    coverage("combine", "--quiet")
    coverage("report")
    coverage("json", "--quiet", "-o", ".coverage.json")
    files = json.loads((ROOT / ".coverage.json").read_text())["files"]
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: {kind: [0, 0] for kind in KINDS})
    for name, of_file in files.items():
        for room in (Path(name).parts[2], "both"):
            for kind, (there, run) in KINDS.items():
                found[room][kind][0] += of_file["summary"][there]
                found[room][kind][1] += of_file["summary"][run]
    return {room: found[room] for room in sorted(found, key=lambda room: (room == "both", room))}


def table(record: dict[str, Any]) -> str:
    """Return a table of the coverage by folder."""
    lines = ["| | lines | covered | branches | covered |", "|---|---|---|---|---|"]
    for room, found in record["found"].items():
        cells = [
            cell for kind in KINDS for there, run in [found[kind]] for cell in (f"{there:,}", f"{run / there:.1%}")
        ]
        lines.append(f"| {' | '.join([room, *cells])} |")
    return "\n".join([headline(record), "", *lines])


def main() -> None:
    """Measure, record, and fail if coverage is too low."""
    found = measure()
    record = {**recording.machine(), "found": found}
    recording.write("coverage", record, table(record))
    print(table(record))
    short = [kind for kind, (there, run) in found["both"].items() if run < LEAST * there]
    if short:
        sys.exit(f"coverage is below {LEAST:.0%} of {' and of '.join(short)}")


if __name__ == "__main__":
    main()
