"""Recorded results: JSON files, and the pages with their tables. Results of this folder's scripts are in `results/`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import machine as machines
from benchmarks.benchmark import Benchmark, Record
from benchmarks.pairing import CANNOT_TELL
from castwise import _files

HERE = Path(__file__).parent
PAGE = "README.md"
HEAD = """\
# Benchmarks: castwise and torch.amp

`python -m benchmarks` writes this page from the JSON files in this folder. Both libraries run in the same processes, in
a new random order in each round. Each ratio is the median over the ratios of all rounds, with quartiles. Compare
ratios, not times. torch runs twice per round to measure the noise. If a difference does not exceed the noise but may be
larger than 5%, the verdict is "cannot tell".
"""


def machine() -> Record:
    """Return the machine, the versions and the command of this process, a script that measures the CPU."""
    spec = sys.modules["__main__"].__spec__
    words = sys.argv if spec is None else ["-m", spec.name, *sys.argv[1:]]
    return machines.machine("cpu", " ".join(["python", *words]))


def headline(about: Record) -> str:
    """Return the line above tables, which describes the machine and the command."""
    return f"{machines.described(about)}, `{about['command']}`:"


def write(name: str, record: Record, table: str) -> None:
    """Write a script's record to `results/<name>.json`, and its table between the marks in this folder's README."""
    (HERE / "results" / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    readme = HERE / "README.md"
    begin, end = (f"<!-- {name} {word} -->" for word in ("begins", "ends"))
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def file_of(benchmark: Benchmark[Any], device: str) -> str:
    """Return the name of a benchmark's results file."""
    return f"{benchmark.name}-{'cpu' if benchmark.on_cpu_alone else device}.json"


def check_folder(folder: Path) -> None:
    """Create a folder for results.

    Raises:
        OSError: It cannot be created, or its README.md is not a page of results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _files.refuse_foreign(folder / PAGE, "a page of results", _is_page)


def write_result(folder: Path, name: str, record: Record, benchmarks: Iterable[Benchmark[Any]]) -> None:
    """Write a benchmark's record to a folder, and update the page of all results there.

    Raises:
        OSError: The folder is not writable, or has another file of one of these names. Old files are then unchanged.
    """
    _files.replace(folder / name, json.dumps(record, indent=2).encode() + b"\n", "a result", _is_result)
    _files.replace(folder / PAGE, page(folder, benchmarks).encode(), "a page of results", _is_page)


def _is_page(head: bytes) -> bool:
    return head.startswith(HEAD.partition("\n")[0].encode())


def _is_result(head: bytes) -> bool:
    return re.match(rb'\{\s*"machine": \{', head) is not None


def page(folder: Path, benchmarks: Iterable[Benchmark[Any]]) -> str:
    """Return the tables of all results in a folder as Markdown, or a note for a file that is not a result."""
    parts = [HEAD]
    for benchmark in benchmarks:
        of_a_device = re.compile(rf"{benchmark.name}-[a-z]+\.json")
        found = sorted(path for path in folder.iterdir() if of_a_device.fullmatch(path.name))
        if found:
            parts.append(f"## {benchmark.title}: `{benchmark.name}`\n\n{benchmark.about}\n")
        parts += [f"{_shown(path, benchmark)}\n" for path in found]
    return "\n".join(parts)


def _shown(path: Path, benchmark: Benchmark[Any]) -> str:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        tables = [table.markdown() for table in benchmark.tables(record)]
        return "\n\n".join([headline(record["machine"]), *tables])
    except Exception:  # a record of another shape can raise anything
        return f"{path.name} was not written by this version: run `python -m benchmarks --only {benchmark.name}` again."


def verdicts(record: object) -> list[str]:
    """Return all verdicts in a record, at any depth.

    Example:
        >>> verdicts({"rows": [{"verdict": "faster"}, {"skipped": "no room"}, {"verdict": "cannot tell"}]})
        ['faster', 'cannot tell']
    """
    if isinstance(record, dict):
        own = [record["verdict"]] if isinstance(record.get("verdict"), str) else []
        return own + [found for value in record.values() for found in verdicts(value)]
    return [found for value in record for found in verdicts(value)] if isinstance(record, list) else []


def doubt(record: Record) -> str | None:
    """Return how many comparisons the machine was too noisy for; None if all have a verdict."""
    found = verdicts(record)
    unclear = found.count(CANNOT_TELL)
    return f"cannot tell in {unclear} of {len(found)} comparisons" if unclear else None
