"""Benchmark castwise against torch.amp on this machine, in the root of a checkout.

    python -m benchmarks [--full] [--device cpu|cuda] [--only NAME] [--out FOLDER]

Writes a JSON file for each benchmark, and README.md with the tables. Use an idle machine: on a busy one the verdict is
"cannot tell".
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import catalogue, recording
from benchmarks.benchmark import Benchmark, Record
from benchmarks.machine import machine

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line, or explain it and exit."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in catalogue.BENCHMARKS]
    parser.add_argument("--full", action="store_true", help="run all sizes, not only small ones (half an hour)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available, else cpu")
    parser.add_argument(
        "--only", choices=names, metavar="NAME", action="append", help=f"repeatable: {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, default=Path("runs", "benchmarks"), help="folder for the results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; omit the option or use --device cpu")
    return options


def command(options: argparse.Namespace) -> str:
    """Return the command that repeats a measurement, anywhere."""
    words = ["python", "-m", "benchmarks", *(["--full"] if options.full else [])]
    words += ["--device", options.device] if options.device else []
    return shlex.join([*words, *(word for name in options.only or [] for word in ("--only", name))])


def measure(benchmark: Benchmark[Any], device: str, full: bool) -> Record | None:
    """Return a benchmark's measurements, or None, with the traceback on stderr, if it fails."""
    print(f"\n## {benchmark.title}: {benchmark.name}\n", flush=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about emulated fp16, and from torch's own classes
            return benchmark.measure(device, benchmark.full if full else benchmark.quick)
    except Exception:
        print(f"{benchmark.name} failed:\n{traceback.format_exc()}", file=sys.stderr)
        return None


def run_all(options: argparse.Namespace) -> int:
    """Run benchmarks in turn, print and record their results, and return the exit code."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [each for each in catalogue.BENCHMARKS if not options.only or each.name in options.only]
    code, doubts = 0, []
    recording.check_folder(options.out)
    print(recording.headline(machine(device, command(options))))
    for benchmark in chosen:
        start = time.perf_counter()
        measured = measure(benchmark, device, options.full)
        if measured is None:
            code = FAILED
            continue
        taken = time.perf_counter() - start
        about = machine("cpu" if benchmark.on_cpu_alone else device, command(options))
        record = {"machine": about, "took_s": round(taken, 1), **measured}
        recording.write_result(options.out, recording.file_of(benchmark, device), record, catalogue.BENCHMARKS)
        print(*(table.markdown() for table in benchmark.tables(measured)), sep="\n\n")
        print(f"\n{benchmark.about} Took {taken:.0f} s.", flush=True)
        if unclear := recording.doubt(measured):
            doubts.append(f"{benchmark.name}: {unclear}")
    if doubts:
        advice = "stop other programs" if options.full else "stop other programs, or use --full"
        print(f"this machine is too noisy for some comparisons; {advice}", *doubts, sep="\n  ", file=sys.stderr)
    print(f"\nresults: {options.out}")
    return code


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    options = parse(arguments)
    try:
        return run_all(options)
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only add a traceback
        print(f"stopped; finished results are in {options.out}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
