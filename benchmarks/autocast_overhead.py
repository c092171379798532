"""What a region costs: castwise against torch.amp, in one process, in random order.

    python benchmarks/autocast_overhead.py [--device cpu] [--rounds 60]

Writes benchmarks/results/autocast_overhead-<device>.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import castwise
import recording

LIBRARIES = {"torch": torch.autocast, "castwise": castwise.autocast}


def cases(autocast: Any, device: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return what is timed, each with its number of repetitions per measurement."""
    ready = autocast(device, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).to(device)
    x = torch.randn(8, 256, device=device)

    def make_and_enter() -> None:
        with autocast(device, dtype=torch.bfloat16):
            pass

    def enter() -> None:
        with ready:
            pass

    @ready
    def decorated() -> None:
        pass

    def forward() -> torch.Tensor:
        with autocast(device, dtype=torch.bfloat16):
            return model(x)

    def forward_and_backward() -> None:
        forward().float().sum().backward()

    return {
        "make, enter and leave a region": (make_and_enter, 2000),
        "enter and leave a region made before": (enter, 2000),
        "call a decorated function": (decorated, 2000),
        "forward of a small MLP": (forward, 100),
        "forward and backward of a small MLP": (forward_and_backward, 50),
    }


def import_seconds(library: str) -> float:
    # An installed package has its bytecode; without this a checkout might be compiled again at every import.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {library}"], check=True, env=environment)
    return time.perf_counter() - start


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {library: statistics.median(values) * 1e6 for library, values in times.items()}
    return {"median_us": medians, "ratio": recording.ratio(times["castwise"], times["torch"])}


def measure(device: str, rounds: int, import_rounds: int) -> dict[str, Any]:
    calls = {library: cases(autocast, device) for library, autocast in LIBRARIES.items()}
    results = {}
    for name in calls["torch"]:
        times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        for index in range(rounds + 3):
            for library in random.sample(list(LIBRARIES), 2):
                call, repetitions = calls[library][name]
                taken = recording.seconds(call, device, repetitions)
                if index >= 3:
                    times[library].append(taken)
        results[name] = summary(times)
    times = {library: [] for library in LIBRARIES}
    for index in range(import_rounds + 1):
        for library in random.sample(list(LIBRARIES), 2):
            taken = import_seconds(library)
            if index >= 1:
                times[library].append(taken)
    return results | {"import the library, in a new process": summary(times)}


def table(record: dict[str, Any]) -> str:
    lines = [
        recording.title(record["machine"]),
        "",
        "| | torch.amp | castwise | castwise / torch.amp (quartiles) |",
        "|---|---|---|---|",
    ]
    for name, result in record["results"].items():
        theirs, ours = (result["median_us"][library] for library in ("torch", "castwise"))
        low, high = result["ratio"]["quartiles"]
        lines.append(
            f"| {name} | {theirs:,.2f} us | {ours:,.2f} us | {result['ratio']['median']:.3f} ({low:.3f} - {high:.3f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--import-rounds", type=int, default=25)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    record = {
        "machine": recording.machine(arguments.device),
        "results": measure(arguments.device, arguments.rounds, arguments.import_rounds),
    }
    recording.write(f"autocast_overhead-{arguments.device}", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
