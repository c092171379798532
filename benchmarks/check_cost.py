"""Measure what `castwise.checking` costs: the CPU time of a recording and of a check, in plain runs of the same steps.

    python -m benchmarks.check_cost

The programs are two of those in benchmarks/changes, as small as they are there, and wider. The check is that of a
rewrite with other bits, so it takes all of its runs, and once more that of the program itself. Writes
benchmarks/results/check_cost-cpu.json and the table in benchmarks/README.md. Takes some minutes.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import recording
from benchmarks.changes.edits import SAME
from benchmarks.checked_changes import FOLDER, STEPS, changed, compiled, run
from castwise.checking import check, record

REPEATS = {"plain": 5, "record": 1, "check": 3, "identical": 3}
WIDER = {
    "gpt": ("61, 32, 4, 24, 8", "61, 256, 4, 128, 8"),
    "cnn": ("= 7, 8, 12, 12", "= 7, 32, 32, 32"),
}
REWRITE = {"gpt": 1, "cnn": 5}
"""Positions in `SAME` of rewrites that round differently."""


def main() -> None:
    """Measure each program in both sizes, and write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    programs = {}
    for program, wider in WIDER.items():
        source = (FOLDER / f"{program}.py").read_text()
        programs[f"{program}, small"] = measured(source, program)
        programs[f"{program}, wider"] = measured(source.replace(*wider), program)
    about = {"machine": recording.machine(), "steps": STEPS, "programs": programs}
    recording.write("check_cost-cpu", about, table(about))
    print(table(about))


def measured(source: str, program: str) -> dict[str, Any]:
    """Return the CPU time of a plain run, and of a recording and checks in plain runs."""
    before = compiled(source, torch.float32)
    after = compiled(changed(source, SAME[program][REWRITE[program]]), torch.float32)
    golden = record(before, STEPS)
    assert check(after, golden).kind == "same"
    gc.freeze()  # as the command does
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: run(before),
        "record": lambda: record(before, STEPS),
        "check": lambda: check(after, golden),
        "identical": lambda: check(before, golden),
    }
    seconds = {name: cpu_seconds(call, REPEATS[name]) for name, call in calls.items()}
    gc.unfreeze()
    plain = seconds.pop("plain")
    return {"plain_milliseconds": plain * 1e3, **{name: cost / plain for name, cost in seconds.items()}}


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """Return the median CPU time of some calls."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return statistics.median(found)


def table(about: dict[str, Any]) -> str:
    """Return a row for each program and size."""
    rows = ["| program | plain run | recording | check | check, same bits |", "|---|---|---|---|---|"]
    for program, one in about["programs"].items():
        times = " | ".join(f"{one[name]:.1f} x" for name in ("record", "check", "identical"))
        rows.append(f"| {program} | {one['plain_milliseconds']:.0f} ms | {times} |")
    return "\n".join([recording.headline(about["machine"]), "", *rows])


if __name__ == "__main__":
    main()
