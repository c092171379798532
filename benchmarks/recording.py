"""What the benchmarks share: what machine it was, and where the figures go."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import castwise

HERE = Path(__file__).parent


def machine(device: str) -> dict[str, Any]:
    """Return what a figure depends on besides the code."""
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


def title(about: dict[str, Any]) -> str:
    """Return the line above a table."""
    return (
        f"{about['device']}, {about['cores']} cores, {about['threads']} threads, torch {about['torch']}, "
        f"Python {about['python']}, {about['date']}, `{about['command']}`:"
    )


def seconds(call: Callable[[], object], device: str, repetitions: int = 1) -> float:
    """Return how long a call takes, the mean of some repetitions, with all that it has started on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repetitions


def ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return the median and the quartiles of ratios of measurements that were taken in pairs."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return {"median": middle, "quartiles": [low, high]}


def write(name: str, record: dict[str, Any], table: str) -> None:
    """Put a record into `results/<name>.json` and its table between the marks in the README."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    readme = HERE / "README.md"
    begin, end = (f"<!-- {name} {word} -->" for word in ("begins", "ends"))
    before, _, rest = readme.read_text().partition(begin)
    _, _, after = rest.partition(end)
    readme.write_text(f"{before}{begin}\n{table}\n{end}{after}")
