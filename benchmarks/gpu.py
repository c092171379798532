"""Test castwise on this machine's GPU, measure it there, and show the figures on the first pages: `make gpu`.

    PYTHONPATH=src python -m benchmarks.gpu              # nine minutes; needs torch, numpy, pytest, hypothesis, rich,
                                                         # typer
    PYTHONPATH=src python -m benchmarks.gpu --rehearse   # on the simulated accelerator; keeps no result

Runs the tests that need a GPU; those of the simulated accelerator, on the GPU; the benchmarks of steps, regions,
`MasterWeights`, `Monitor` and recipes (beside torchao, if that is installed); and the demo in three precisions. Writes
benchmarks/results/*-cuda.json, README.md and the manual's start page. What fails or takes too long is named at the end,
and the rest is run all the same.
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

from benchmarks.gpu_rehearsal import project_on_sim

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Of the tests that need a GPU, what the simulated accelerator lacks: compilers, sparse tensors, tensor cores, the name
# "cuda" for `torch.cuda.amp` and the doctor, and NCCL. The demo takes minutes there, and is a part of its own.
NOT_SIMULATED = (
    *("inductor", "test_master_weights_gpu", "SparseAdam", "tf32", "test_deprecated", "test_checkup", "nccl"),
    "demo",
)
BENCHMARKS = ("step_cost", "small_steps", "autocast_overhead", "master_weights", "monitor_cost")


class Part(NamedTuple):
    """A command: what it does, Python's arguments, the seconds it may take, and variables of its environment."""

    name: str
    arguments: tuple[str, ...]
    seconds: int
    environment: tuple[tuple[str, str], ...] = ()


def files_of_gpu_tests() -> list[str]:
    """Return the files that have such tests: others may import what a machine with a GPU lacks."""
    files = ROOT.glob("tests/**/test_*.py")
    return sorted(str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text())


def parts(*, is_small: bool = False) -> list[Part]:
    """Return the commands.

    Args:
        is_small: Whether to measure small sizes, in as much time as they take, and leave out `NOT_SIMULATED`.
    """
    # Without the conftest.py that runs the manual's code, whose libraries a machine with a GPU may lack.
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests", "--continue-on-collection-errors")
    sizes = () if is_small else ("--full",)
    only = tuple(word for name in BENCHMARKS for word in ("--only", name))
    left_out = ("-k", " and ".join(f"not {name}" for name in NOT_SIMULATED)) if is_small else ()
    return [
        Part("tests that need a GPU", (*tests, "-m", "gpu", *files_of_gpu_tests(), *left_out), 120),
        Part(
            "tests of the simulated accelerator",
            (*tests, "tests/accelerator", *left_out),
            100,
            (("CASTWISE_ACCELERATOR", "cuda"),),
        ),
        Part("benchmarks", ("-m", "benchmarks", "--device", "cuda", *sizes, *only, "--out", str(RESULTS)), 190),
        Part("recipes", ("-m", "benchmarks.recipe_speed", "--device", "cuda", *sizes), 60),
        Part("demo", ("-m", "castwise", "demo", "--device", "cuda", "--steps", "3" if is_small else "150"), 60),
        Part("first pages", ("-m", "benchmarks.readme"), 10),
    ]


def run(part: Part, *, patience: int = 1) -> str:
    """Run a command, in `patience` times its seconds; return what went wrong, or an empty string."""
    print(f"\n# {part.name}: python {' '.join(part.arguments)}", flush=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    start = time.perf_counter()
    try:
        code = subprocess.run(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **dict(part.environment)},
            timeout=patience * part.seconds,
        ).returncode
    except subprocess.TimeoutExpired:
        return f"{part.name}: not done after {patience * part.seconds} s"
    print(f"# took {time.perf_counter() - start:.0f} s", flush=True)
    return f"{part.name}: exit code {code}" if code else ""


def rehearse() -> int:
    """Run all parts in a copy of the project in which "cuda" is the simulated accelerator."""
    with tempfile.TemporaryDirectory() as folder:
        project_on_sim(Path(folder))
        path = os.pathsep.join([str(Path(folder) / "src"), folder])
        small = [sys.executable, "-m", "benchmarks.gpu", "--small"]
        return subprocess.run(small, cwd=folder, env={**os.environ, "PYTHONPATH": path}).returncode


def main(arguments: list[str] | None = None) -> int:
    """Run all parts; return 1 if one of them failed."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on the simulated accelerator; keeps no result")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # what a rehearsal runs
    options = parser.parse_args(arguments)
    if options.rehearse:
        return rehearse()
    patience = 4 if options.small else 1
    problems = [run(part, patience=patience) for part in parts(is_small=options.small)]
    print("\n" + ("\n".join(filter(None, problems)) or "all parts are done"))
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
