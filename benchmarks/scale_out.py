"""The cost of agreement between ranks: castwise's ShardedGradScaler against torch's, over gloo, on one machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Record, Table, shown
from benchmarks.pairing import CASTWISE, TORCH

ROOT = Path(__file__).parents[1]
WORKER = "benchmarks.scale_out_worker"
LATENCY = "all_reduce of 16 bytes"
LAYERS, WIDTH = 16, 64
PATIENCE_S = 1800.0


@dataclass(frozen=True)
class Plan:
    """Rounds, numbers of processes, and, for two processes, the numbers and widths of layers."""

    rounds: int
    ranks: tuple[int, ...]
    layers: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


def on_ranks(ranks: int, layers: int, rounds: int, width: int = WIDTH, patience_s: float = PATIENCE_S) -> list[Record]:
    """Start the ranks and return the first rank's measurements.

    Raises:
        RuntimeError: A rank failed (the message has its errors), or the ranks took longer than `patience_s` seconds.
    """
    give_up = time.monotonic() + patience_s
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = map(str, (folder / "store", ranks, layers, width, rounds))
        command = [sys.executable, "-m", WORKER, *given]
        try:
            for rank in range(ranks):
                with (folder / f"out{rank}").open("wb") as out, (folder / f"errors{rank}").open("wb") as errors:
                    workers.append(subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=out, stderr=errors))
            codes: list[int | None] = [None]
            while None in codes and not any(codes):
                if time.monotonic() > give_up:
                    raise RuntimeError(f"{ranks} ranks did not finish within {patience_s:.0f} s")
                time.sleep(0.1)
                codes = [worker.poll() for worker in workers]
        finally:  # after a failure or Ctrl-C, the other ranks would wait forever
            for worker in workers:
                worker.kill()
                worker.wait()
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {rank} of {ranks} failed:\n{(folder / f'errors{rank}').read_text()}")
        rows: list[Record] = json.loads((folder / "out0").read_text().splitlines()[-1])
    return rows


def measure(device: str, plan: Plan) -> Record:
    """Measure for each number of ranks."""
    if not dist.is_available() or not dist.is_gloo_available():
        return {
            "ranks": {},
            "layers": {},
            "widths": {},
            "skipped": "left out: this torch has no torch.distributed with gloo",
        }
    return {
        "ranks": {str(ranks): on_ranks(ranks, LAYERS, plan.rounds) for ranks in plan.ranks},
        "layers": {str(layers): on_ranks(2, layers, plan.rounds) for layers in plan.layers},
        "widths": {str(width): on_ranks(2, LAYERS, min(plan.rounds, 25), width) for width in plan.widths},
    }


def tables(record: Record) -> list[Table]:
    """Return a table with one row for each way of splitting and clipping."""
    table = Table(
        [
            *(
                "ranks",
                "layers",
                "width",
                "split",
                "",
                "torch",
                "castwise",
                "castwise / torch (quartiles)",
                "verdict",
            ),
            *("collectives: torch", "castwise"),
        ],
        below=record.get("skipped", ""),
    )
    cases = [(ranks, str(LAYERS), str(WIDTH), found) for ranks, found in record["ranks"].items()]
    cases += [("2", layers, str(WIDTH), found) for layers, found in record["layers"].items()]
    cases += [("2", str(LAYERS), width, found) for width, found in record["widths"].items()]
    for ranks, layers, width, (*rows, _) in cases:
        for row in rows:
            found = row["castwise / torch"]
            cells = [ranks, layers, width, row["split"], "scaled + clipped" if row["clip"] else "scaled"]
            cells += [f"{row['seconds'][library] * 1e6:,.0f} us" for library in (TORCH, CASTWISE)]
            cells += [shown(found), found["verdict"]]
            table.rows.append([*cells, *(str(row["collectives"][library]) for library in (TORCH, CASTWISE))])
    latencies = [f"{rows[-1][LATENCY] * 1e6:,.0f} us on {ranks} ranks" for ranks, rows in record["ranks"].items()]
    if latencies:
        below = f"An all-reduce of 16 bytes alone: {', '.join(latencies)}."
        return [replace(table, below=below)]
    return [table]


BENCHMARK = Benchmark(
    name="scale_out",
    title="Ranks that agree",
    about=(
        "Linear layers on several processes of one machine, over gloo. A step of the small models is mostly overhead; "
        "the wide ones have 1, 17 and 67 million parameters. Times are medians of the first rank, and each step starts "
        "after a barrier."
    ),
    quick=Plan(rounds=25, ranks=(2,)),
    full=Plan(rounds=100, ranks=(2, 4), layers=(4, 160), widths=(256, 1024, 2048)),
    measure=measure,
    tables=tables,
    on_cpu_alone=True,
)
