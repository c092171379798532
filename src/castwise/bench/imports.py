"""The time of `import castwise` on top of `import torch`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from dataclasses import dataclass

from castwise._child_process import python
from castwise.bench.benchmark import Benchmark, Record, Table, shown
from castwise.bench.pairing import ratio

# Both are timed in one process: the time to start and to load torch varies more than castwise adds to it.
# `import castwise` alone would load nothing, because names are imported on first use.
USED = "castwise.GradScaler, castwise.autocast, castwise.Policy, castwise.WeightCache, castwise.trace"
CODE = f"""\
import json, time
start = time.perf_counter()
import torch
between = time.perf_counter()
import castwise
{USED}
print(json.dumps([between - start, time.perf_counter() - between]))
"""


@dataclass(frozen=True)
class Plan:
    """Number of processes."""

    rounds: int


def seconds() -> tuple[float, float]:
    """Return the seconds that a new process takes to import torch, and then castwise."""
    # Installed packages have bytecode; a checkout might otherwise be compiled again at every import.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(python(CODE), check=True, env=environment, stdout=subprocess.PIPE, text=True)
    torch_s, castwise_s = json.loads(run.stdout)
    return torch_s, castwise_s


def measure(device: str, plan: Plan) -> Record:
    """Start processes and ignore the first one, which may have to compile or read from disk."""
    taken = [seconds() for _ in range(plan.rounds + 1)][1:]
    of_torch = [torch_s for torch_s, _ in taken]
    return {
        "rows": {
            "import": {
                "median_ms": {
                    "torch": statistics.median(of_torch) * 1e3,
                    "castwise, after torch": statistics.median(own for _, own in taken) * 1e3,
                },
                "castwise and torch / torch": ratio([sum(both) for both in taken], of_torch),
            }
        }
    }


def tables(record: Record) -> list[Table]:
    """Return a table with one row."""
    table = Table(["", "torch", "castwise, after torch", "both / torch (quartiles)"])
    for name, row in record["rows"].items():
        times = [f"{value:,.1f} ms" for value in row["median_ms"].values()]
        table.rows.append([name, *times, shown(row["castwise and torch / torch"])])
    return [table]


BENCHMARK = Benchmark(
    name="imports",
    title="Import time",
    about="Each new process imports torch, then castwise and the names that a training script uses.",
    quick=Plan(rounds=5),
    full=Plan(rounds=20),
    measure=measure,
    tables=tables,
    on_cpu_alone=True,
)
