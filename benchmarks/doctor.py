"""Record `castwise doctor` on this machine, also with oneDNN limited to the instructions of older CPUs.

    python -m benchmarks.doctor

Writes benchmarks/results/doctor-cpu.json, which docs/integrations/doctor.md quotes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from benchmarks import recording

CAPPED = ("", "AVX512_CORE", "AVX2")


def checkup(limit: str) -> dict[str, dict[str, object]]:
    """Return the CPU's results by format, with oneDNN limited to the instructions of `limit`."""
    command = [sys.executable, "-m", "castwise", "doctor", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (cpu,) = [device for device in json.loads(run.stdout)["devices"] if device["device"] == "cpu"]
    kept = ("native", "verdict", "gflops", "times_fp32")
    return {entry["format"]: {key: entry[key] for key in kept} for entry in cpu["formats"] if entry["error"] is None}


def main() -> None:
    torch.set_num_threads(1)  # as in the measuring processes
    record = {"machine": recording.machine(), "limits": {limit or "none": checkup(limit) for limit in CAPPED}}
    path = recording.HERE / "results" / "doctor-cpu.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
