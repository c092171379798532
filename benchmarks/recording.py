"""Write the results of this folder's scripts: a JSON file in `results/` and a table in README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import castwise.bench.machine
from castwise.demo.run_folder import write_atomically, write_json

HERE = Path(__file__).parent


def machine() -> dict[str, Any]:
    """Return the machine, the versions and the command of this process."""
    return castwise.bench.machine.machine("cpu", " ".join(["python", *sys.argv]))


def write(name: str, record: dict[str, Any], table: str) -> None:
    """Write a record to `results/<name>.json` and its table between the marks in the README."""
    write_json(HERE / "results" / f"{name}.json", record)
    readme = HERE / "README.md"
    begin, end = (f"<!-- {name} {word} -->" for word in ("begins", "ends"))
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    text = f"{before}{begin}\n{table}\n{end}{after}"
    write_atomically(readme, lambda file: file.write(text.encode()))
