"""What it costs ranks to agree: castwise's ShardedGradScaler against torch's, over gloo, between local processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from castwise.bench.benchmark import Benchmark, Record, Table, shown
from castwise.bench.pairing import CASTWISE, TORCH

WORKER = "castwise.bench.scale_out_worker"
LATENCY = "all_reduce of 16 bytes"


@dataclass(frozen=True)
class Plan:
    """How often, and between how many processes."""

    rounds: int
    ranks: tuple[int, ...]


def on_ranks(ranks: int, rounds: int) -> list[Record]:
    """Start the ranks and return what the first one has measured.

    Raises:
        RuntimeError: A rank failed; with its last words.
    """
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", WORKER, str(folder / "store"), str(ranks), str(rounds)]
        try:
            for rank in range(ranks):
                with (folder / f"out{rank}").open("wb") as out, (folder / f"errors{rank}").open("wb") as errors:
                    workers.append(subprocess.Popen([*command, str(rank)], stdout=out, stderr=errors))
            codes: list[int | None] = [None]
            while None in codes and not any(codes):
                time.sleep(0.1)
                codes = [worker.poll() for worker in workers]
        finally:  # one that failed leaves the others waiting for it, and so does Ctrl-C
            for worker in workers:
                worker.kill()
                worker.wait()
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {rank} of {ranks} failed:\n{(folder / f'errors{rank}').read_text()}")
        rows: list[Record] = json.loads((folder / "out0").read_text().splitlines()[-1])
    return rows


def measure(device: str, plan: Plan) -> Record:
    """Measure each number of ranks."""
    if not dist.is_available() or not dist.is_gloo_available():
        return {"ranks": {}, "skipped": "left out: this torch has no torch.distributed with gloo"}
    return {"ranks": {str(ranks): on_ranks(ranks, plan.rounds) for ranks in plan.ranks}}


def tables(record: Record) -> list[Table]:
    """Show one row for each way of splitting and clipping."""
    table = Table(
        [
            *("ranks", "split", "", "torch", "castwise", "castwise / torch (quartiles)", "verdict"),
            *("collectives: torch", "castwise"),
        ],
        below=record.get("skipped", ""),
    )
    latencies = []
    for ranks, (*rows, latency) in record["ranks"].items():
        for row in rows:
            found = row["castwise / torch"]
            cells = [ranks, row["split"], "scaled + clipped" if row["clip"] else "scaled"]
            cells += [f"{row['seconds'][library] * 1e6:,.0f} us" for library in (TORCH, CASTWISE)]
            cells += [shown(found), found["verdict"]]
            table.rows.append([*cells, *(str(row["collectives"][library]) for library in (TORCH, CASTWISE))])
        latencies.append(f"{latency[LATENCY] * 1e6:,.0f} us on {ranks} ranks")
    if latencies:
        below = f"An all-reduce of 16 bytes alone: {', '.join(latencies)}."
        return [replace(table, below=below)]
    return [table]


BENCHMARK = Benchmark(
    name="scale_out",
    title="Ranks that agree",
    about=(
        "16 small layers on processes of this machine, over gloo, so that a step is little more than its overhead. "
        "Medians of the first rank's times, every step after a barrier."
    ),
    quick=Plan(rounds=25, ranks=(2,)),
    full=Plan(rounds=200, ranks=(2, 4)),
    measure=measure,
    tables=tables,
    on_cpu_alone=True,
)
