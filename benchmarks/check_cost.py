"""Measure what `castwise.checking` costs: CPU time of a recording and of a check, in plain runs, and memory of each.

    python -m benchmarks.check_cost

The programs are two of those in benchmarks/changes, as small as they are there, and wider. The check is that of a
rewrite with other bits, so it takes all of its runs, and once more that of the program itself. Writes
benchmarks/results/check_cost-cpu.json and the table in benchmarks/README.md. Takes some minutes.
"""

from __future__ import annotations

import gc
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import recording
from benchmarks.changes.edits import SAME, Edit
from benchmarks.checked_changes import FOLDER, STEPS, changed, compiled, run
from castwise.checking import Golden, check, record

REPEATS = {"record": 1, "check": 5, "identical": 5}
WIDER = {
    "gpt": ("61, 32, 4, 24, 8", "61, 256, 4, 128, 8"),
    "cnn": ("= 7, 8, 12, 12", "= 7, 32, 32, 32"),
}
REWRITE = {"gpt": 1, "cnn": 5}
"""Positions in `SAME` of rewrites that round differently."""


def main() -> None:
    """Measure each program in both sizes, and write the table."""
    settings()
    programs = {}
    for program, wider in WIDER.items():
        source = (FOLDER / f"{program}.py").read_text()
        programs[f"{program}, small"] = measured(source, program)
        programs[f"{program}, wider"] = measured(source.replace(*wider), program)
    about = {"machine": recording.machine(), "steps": STEPS, "programs": programs}
    recording.write("check_cost-cpu", about, table(about))
    print(table(about))


def settings() -> None:
    """Set what each process needs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def measured(source: str, program: str) -> dict[str, Any]:
    """Return the CPU time of a plain run, and of a recording and checks in plain runs; and the memory of each."""
    golden = record(compiled(source, torch.float32), STEPS)
    calls = calls_of(source, program, golden)
    assert check(compiled(changed(source, rewrite(program)), torch.float32), golden).kind == "same"
    gc.freeze()  # as the command does
    found: dict[str, list[float]] = {name: [] for name in calls}
    for name, times in REPEATS.items():
        for _ in range(times):  # beside plain runs, because other programs of this machine slow both
            plain = statistics.median(cpu_seconds(calls["plain"]) for _ in range(5))
            found["plain"].append(plain * 1e3)
            found[name].append(cpu_seconds(calls[name]) / plain)
    gc.unfreeze()
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        golden.save(path := Path(folder, "golden.cwcheck"))
        megabytes = {name: pool.apply(memory, (source, program, path, name)) for name in calls}
    medians = {name: statistics.median(costs) for name, costs in found.items()}
    return {"plain_milliseconds": medians.pop("plain"), **medians, "megabytes": megabytes}


def rewrite(program: str) -> Edit:
    """Return the change of a program that is checked."""
    return SAME[program][REWRITE[program]]


def calls_of(source: str, program: str, golden: Golden) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    before = compiled(source, torch.float32)
    after = compiled(changed(source, rewrite(program)), torch.float32)
    return {
        "plain": lambda: run(before),
        "record": lambda: record(before, STEPS),
        "check": lambda: check(after, golden),
        "identical": lambda: check(before, golden),
    }


def memory(source: str, program: str, golden: Path, name: str) -> float:
    """Return by how many MB a call raises the peak memory of this new process, which has trained another model."""
    settings()
    call = calls_of(source, program, Golden.load(golden))[name]
    run(compiled((FOLDER / "lstm.py").read_text(), torch.float32))
    before = peak()
    call()
    return peak() - before


def peak() -> float:
    """Return the peak memory of this process in MB; `getrusage` has that of the process that started it, too."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) / 1024


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def table(about: dict[str, Any]) -> str:
    """Return a row for each program and size."""
    names = ("record", "check", "identical")
    columns = "plain run | recording | check | check, same bits"
    rows = [f"| program | {columns} | memory: {columns} |", f"|{'---|' * 9}"]
    for program, one in about["programs"].items():
        times = " | ".join(f"{one[name]:.1f} x" for name in names)
        memories = " | ".join(f"{one['megabytes'][name]:.0f} MB" for name in ("plain", *names))
        rows.append(f"| {program} | {one['plain_milliseconds']:.0f} ms | {times} | {memories} |")
    return "\n".join([recording.headline(about["machine"]), "", *rows])


if __name__ == "__main__":
    main()
