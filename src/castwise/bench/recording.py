"""Recorded results: a JSON file for each benchmark, and one page of tables generated from these files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from castwise._files import refuse_foreign
from castwise.bench.benchmark import Benchmark, Record
from castwise.bench.machine import described
from castwise.bench.pairing import CANNOT_TELL
from castwise.demo.run_folder import cannot_write, write_atomically, write_json

PAGE = "README.md"
HEAD = """\
# Benchmarks: castwise and torch.amp

`castwise bench` writes this page from the JSON files in this folder. Both libraries run in the same processes, in a new
random order in each round (imports: always torch first). Each ratio is the median over the ratios of all rounds, with
quartiles. Compare ratios, not times. torch runs twice per round to measure the noise. If a difference does not exceed
the noise but may be larger than 5%, the verdict is "cannot tell".
"""


def file_of(benchmark: Benchmark[Any], device: str) -> str:
    """Return the name of a benchmark's results file."""
    return f"{benchmark.name}-{'cpu' if benchmark.on_cpu_alone else device}.json"


def headline(about: dict[str, Any]) -> str:
    """Return the line above tables, which describes the machine and the command."""
    return f"{described(about)}, `{about['command']}`:"


def is_not_ours(folder: Path) -> bool:
    """Return True if the page's file exists and was not written by `castwise bench`."""
    page = folder / PAGE
    return page.exists() and not page.read_text(encoding="utf-8", errors="replace").startswith(HEAD.partition("\n")[0])


def write(folder: Path, name: str, record: Record, benchmarks: Iterable[Benchmark[Any]]) -> None:
    """Write a record to a folder, and update the page of all results there.

    Raises:
        UserError: The folder is not writable, or has another file of this name.
    """
    try:
        refuse_foreign(folder / name, "a result", _is_result)
    except OSError as error:
        raise cannot_write(folder / name, error) from error
    write_json(folder / name, record)
    text = page(folder, benchmarks)
    write_atomically(folder / PAGE, lambda file: file.write(text.encode()))


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
        return f"{path.name} was not written by this version: run `castwise bench --only {benchmark.name}` again."


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
