"""Other people's code under torch's mixed precision and under castwise, side by side.

    make foreign                 # all rows; writes results/foreign-cpu.json and the table in benchmarks/README.md
    make foreign ONLY=peft       # rows whose kind or name has this in it; writes nothing
    make foreign ONLY=peft AGAIN=1    # and replaces these rows in the result file, if all else in it is as now

Each side of a row is a process of its own (`side.py`), with the same seed and one thread, which notes what it found:
outcomes of tests, or the bits of losses, weights and outputs. Where castwise differs, torch runs once more, and what it
does not repeat itself is set aside. Exits with 1 if anything else differs and is not in `exceptions.py`, or if torch's
own side does not run.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))

from exceptions import EXEMPT
from report import cut, is_wrong, table, verdict
from rows import ROWS, Row, Side

from benchmarks import recording

SDISTS = Path(sys.prefix) / "sdists"
NAMED = 5  # differences that a result names
Facts = dict[str, str]
running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Difference:
    """One fact, and what it is on the two sides; None where it is missing."""

    fact: str
    torch: str | None
    castwise: str | None

    def __str__(self) -> str:
        torch, castwise = (cut(side or "nothing") for side in (self.torch, self.castwise))
        return f"{cut(self.fact)}: torch {torch}; castwise {castwise}"


def environment(folder: str) -> dict[str, str]:
    """Return the environment of one side: one thread, no network, and all caches in its own folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    caches = ("HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "YOLO_CONFIG_DIR", "MPLCONFIGDIR")
    return {
        **kept,
        **dict.fromkeys(caches, folder),
        **dict.fromkeys(("HF_HUB_OFFLINE", "YOLO_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(HERE),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "COLUMNS": "120",
    }


def run(row: Row, side: Side) -> Facts:
    """Run one side of a row in an empty folder, or in that of its sdist; return what it noted, and how it ended."""
    with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
        noted = Path(folder, "facts.json")
        file, *arguments = row.program
        program = [file if file == "-m" else str(HERE / file), *arguments, *side.arguments]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
        launcher = [sys.executable, *(torchrun if row.ranks > 1 else [])]
        work = SDISTS / row.sdist if row.sdist else Path(folder)
        process = subprocess.Popen(
            [*launcher, str(HERE / "side.py"), side.under, str(noted), *program],
            cwd=work,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its own children can be ended with it
        )
        running.add(process)
        try:
            out, errors = process.communicate(timeout=row.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            errors += f"ended after {row.seconds} s"
        finally:
            running.discard(process)
        facts: Facts = {}
        for path in sorted(Path(folder).glob("facts*.json")):
            _, _, rank = path.stem.partition(".")
            facts |= {f"rank {rank}: {name}" if rank else name: value for name, value in _read(path).items()}
        facts = {name.replace(folder, "FOLDER"): value.replace(folder, "FOLDER") for name, value in facts.items()}
        facts["exit code"] = str(process.returncode)
        if row.kind != "suite":
            lines = out.replace(folder, "FOLDER").splitlines()
            facts |= {f"line {number} of the output": line for number, line in enumerate(lines, 1)}
        if process.returncode:
            facts["last line of errors"] = (errors.strip().splitlines() or ["nothing"])[-1]
        return facts


def _read(path: Path) -> Facts:
    facts: Facts = json.loads(path.read_text())
    return facts


def differences(torch: Facts, castwise: Facts) -> list[Difference]:
    """Return what is not the same, in the order of torch's side."""
    names = dict.fromkeys([*torch, *castwise])
    every = [Difference(name, torch.get(name), castwise.get(name)) for name in names]
    return [each for each in every if each.torch != each.castwise]


def compared(row: Row) -> dict[str, Any]:
    """Run all sides of a row, and return its record."""
    begun = time.perf_counter()
    (_, side), *others = row.sides.items()
    torch = run(row, side)
    found = {name: differences(torch, run(row, other)) for name, other in others}
    unsteady: set[str] = set()
    if any(found.values()):
        unsteady = {each.fact for each in differences(torch, run(row, side))}
    record: dict[str, Any] = {
        "kind": row.kind,
        "name": row.name,
        "source": row.source,
        "torch": told(row, torch),
        "torch fails": None if ran(row, torch) else torch.get("last line of errors", "no test has passed"),
        "not repeated by torch": {"values": len(unsteady), "of which": sorted(unsteady)[:NAMED]},
        "sides": {},
    }
    for name, every in found.items():
        rest = [each for each in every if each.fact not in unsteady]
        names = {each: exception(row, each) for each in rest}
        wrong = [each for each, known in names.items() if known is None]
        record["sides"][name] = {
            "differences": len(wrong),
            "exceptions": dict(sorted(collections.Counter(known for known in names.values() if known).items())),
            "of which": list(map(str, wrong[:NAMED])),
        }
    record["seconds"] = round(time.perf_counter() - begun)
    return record


def exception(row: Row, difference: Difference) -> str | None:
    """Return the name of the exception that a difference is."""
    here = (row.name, difference.fact, difference.torch, difference.castwise)
    return next((each.name for each in EXEMPT if each.covers(*here)), None)


def outcomes(facts: Facts) -> collections.Counter[str]:
    """Return how many tests of a suite passed, failed and were skipped."""
    tests = [value for name, value in facts.items() if "::" in name]
    return collections.Counter(value.partition(":")[0] for value in tests)


def ran(row: Row, torch: Facts) -> bool:
    """Return True if torch's side is worth a comparison."""
    return outcomes(torch)["passed"] > 0 if row.kind == "suite" else torch["exit code"] == "0"


def told(row: Row, torch: Facts) -> str:
    """Return what torch's side has done, in a few words."""
    if row.kind == "suite":
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes(torch).items(), reverse=True))
    if row.kind == "optimizers":
        runs = [name.rpartition(": ") for name in torch if ": step " in name or name.endswith(": raises")]
        return f"{len({run for run, _, _ in runs})} runs, {sum(end == 'raises' for _, _, end in runs)} refused"
    steps = sum("weights after " in name for name in torch)
    values = sum("warning: " not in name for name in torch)
    return f"{steps} steps, {values} values" if steps else f"{values} values"


def required() -> list[str]:
    """Return the names of the packages that the rows need, without their extras."""
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return sorted(line.partition("[")[0] for line in lines if not line.startswith("#"))


def write(records: list[dict[str, Any]], *, again: bool = False) -> None:
    """Write the result file, and the table into benchmarks/README.md.

    Args:
        records: The rows.
        again: The rows replace those of the same name in a result file of this machine, day and versions.
    """
    record = {
        "machine": {**recording.machine(), "threads": 1, "command": "make foreign"},
        "versions": {name: version(name) for name in required()},
        "exceptions": [{"name": each.name, "why": each.why} for each in EXEMPT],
        "rows": records,
    }
    if again:
        last = json.loads((HERE.parent / "results" / "foreign-cpu.json").read_text())
        changed = [key for key in ("machine", "versions") if last[key] != record[key]]
        if changed:
            raise SystemExit(f"the result file has another {' and '.join(changed)}: run all rows")
        by_name = {(each["kind"], each["name"]): each for each in records}
        record["rows"] = [by_name.get((each["kind"], each["name"]), each) for each in last["rows"]]
    recording.write("foreign-cpu", record, table(record))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="rows whose kind or name has this in it; writes nothing")
    parser.add_argument("--again", action="store_true", help="with --only: replace these rows in the result file")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="rows at once")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only.lower() in f"{row.kind}: {row.name}".lower()]
    if not rows:
        parser.error(f"no row has {options.only!r} in its name; there are {', '.join(row.name for row in ROWS)}")
    records = []
    pool = ThreadPoolExecutor(options.jobs)
    try:
        for record in pool.map(compared, rows):
            records.append(record)
            print(f"{record['seconds']:4d} s  {record['kind']}: {record['name']}: {verdict(record)}", flush=True)
            for name, side in record["sides"].items():
                for line in side["of which"]:
                    print(f"          {name}: {line}", flush=True)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):  # Ctrl-C does not reach them
            os.killpg(process.pid, signal.SIGKILL)
        raise
    if not options.only or options.again:
        write(records, again=options.again)
    wrong = [record["name"] for record in records if is_wrong(record)]
    print(f"{len(records)} rows, " + (f"different: {', '.join(wrong)}" if wrong else "no difference"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
