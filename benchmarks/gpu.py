"""Test castwise on this machine's GPU, measure it there, and show the figures on the first pages: `make gpu`.

    PYTHONPATH=src python -m benchmarks.gpu              # nine minutes; needs torch, pytest, hypothesis, rich, typer
    PYTHONPATH=src python -m benchmarks.gpu --rehearse   # the same on a CPU, with small sizes; keeps no result

Runs the tests that need a GPU; those of the simulated accelerator, on the GPU; the benchmarks of steps, regions,
`MasterWeights` and `Monitor`; and the demo in three precisions. Writes benchmarks/results/*-cuda.json, README.md and
the manual's start page. What fails or takes too long is named at the end, and the rest is run all the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ("step_cost", "small_steps", "autocast_overhead", "master_weights", "monitor_cost")


class Part(NamedTuple):
    """A command: what it does, Python's arguments, the seconds it may take, and variables of its environment."""

    name: str
    arguments: tuple[str, ...]
    seconds: int
    environment: tuple[tuple[str, str], ...] = ()


def parts(device: str, out: Path) -> list[Part]:
    """Return the commands for "cuda", or those that rehearse them on a "cpu".

    Args:
        device: "cuda" or "cpu".
        out: The folder for results.
    """
    is_gpu = device == "cuda"
    tests, sizes = ("-m", "pytest", "-q", "-p", "no:cacheprovider"), ("--full",) if is_gpu else ()
    only = tuple(word for name in BENCHMARKS for word in ("--only", name))
    where = (("CASTWISE_ACCELERATOR", "cuda"),) if is_gpu else ()
    collect = () if is_gpu else ("--collect-only",)
    return [
        Part("tests that need a GPU", (*tests, "-m", "gpu", "tests", *collect), 130),
        Part("tests of the simulated accelerator", (*tests, "tests/accelerator"), 130, where),
        Part("benchmarks", ("-m", "benchmarks", "--device", device, *sizes, *only, "--out", str(out)), 200),
        Part("demo", ("-m", "castwise", "demo", "--device", device, "--steps", "150" if is_gpu else "3"), 70),
    ]


def run(part: Part) -> str:
    """Run a command; return what went wrong, or an empty string."""
    print(f"\n# {part.name}: python {' '.join(part.arguments)}", flush=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    start = time.perf_counter()
    try:
        code = subprocess.run(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **dict(part.environment)},
            timeout=part.seconds,
        ).returncode
    except subprocess.TimeoutExpired:
        return f"{part.name}: not done after {part.seconds} s"
    print(f"# took {time.perf_counter() - start:.0f} s", flush=True)
    return f"{part.name}: exit code {code}" if code else ""


def main(arguments: list[str] | None = None) -> int:
    """Run all parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with small sizes; keeps no result")
    is_rehearsal = parser.parse_args(arguments).rehearse
    with tempfile.TemporaryDirectory() as folder:
        problems = [run(part) for part in parts(*(("cpu", Path(folder)) if is_rehearsal else ("cuda", RESULTS)))]
    if not is_rehearsal:
        problems.append(run(Part("first pages", ("-m", "benchmarks.readme"), 10)))
    print("\n" + ("\n".join(filter(None, problems)) or "all parts are done"))
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
