"""What a region costs: castwise against torch.amp, in one process, in random order.

    python benchmarks/autocast_overhead.py [--device cpu] [--rounds 60]

Writes benchmarks/results/autocast_overhead-<device>.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import castwise

HERE = Path(__file__).parent
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


def seconds(call: Callable[[], Any], repetitions: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repetitions


def import_seconds(library: str) -> float:
    # An installed package has its bytecode; without this a checkout might be compiled again at every import.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {library}"], check=True, env=environment)
    return time.perf_counter() - start


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [ours / theirs for ours, theirs in zip(times["castwise"], times["torch"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {library: statistics.median(values) * 1e6 for library, values in times.items()}
    return {"median_us": medians, "ratio": {"median": middle, "quartiles": [low, high]}}


def measure(device: str, rounds: int, import_rounds: int) -> dict[str, Any]:
    calls = {library: cases(autocast, device) for library, autocast in LIBRARIES.items()}
    results = {}
    for name in calls["torch"]:
        times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        for index in range(rounds + 3):
            for library in random.sample(list(LIBRARIES), 2):
                taken = seconds(*calls[library][name], device)
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


def machine(device: str) -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "castwise": castwise.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def table(record: dict[str, Any]) -> str:
    about = record["machine"]
    lines = [
        f"{about['device']}, {about['cores']} cores, {about['threads']} threads, torch {about['torch']}, "
        f"Python {about['python']}, {about['date']}, `{about['command']}`:",
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


def write(record: dict[str, Any], device: str) -> None:
    path = HERE / "results" / f"autocast_overhead-{device}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    readme = HERE / "README.md"
    begin, end = (f"<!-- autocast_overhead-{device} {word} -->" for word in ("begins", "ends"))
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n{table(record)}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--import-rounds", type=int, default=25)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    record = {
        "machine": machine(arguments.device),
        "results": measure(arguments.device, arguments.rounds, arguments.import_rounds),
    }
    write(record, arguments.device)
    print(table(record))


if __name__ == "__main__":
    main()
