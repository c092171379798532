"""No fault in what watches a training run ends it or changes its weights; the long form is the script itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fault_injection.py"


def test_a_function_that_raises_ends_no_run_and_changes_no_weight() -> None:
    command = [sys.executable, str(SCRIPT), "--small"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["functions"] > 50
    assert counts["same weights"] > 50
