"""torch's own tests of autocast and of gradient scaling, under torch and after `castwise.install()`.

    python -m benchmarks.torch_tests pytorch/test                 # of a checkout of pytorch at the installed version
    python -m benchmarks.torch_tests pytorch/test --simulated     # device tests on the simulated accelerator
    python -m benchmarks.torch_tests pytorch/test --only jit      # groups with this in their names; the others are kept

Each group of files runs once per side, in a process of its own. What became of each test, with the exception if it
failed, is compared by name. Needs pytest and expecttest. Writes benchmarks/results/torch_tests.json and the tables in
benchmarks/README.md. Exits with 1 if a test ends in another way under castwise.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import recording

NAME = "torch_tests"
SIDES = ("torch", "castwise")


@dataclass(frozen=True)
class Group:
    """Files of torch's tests, and which of their tests are run, in pytest's words; all of them if empty."""

    name: str
    files: tuple[str, ...]
    chosen: str = ""


AMP = "autocast or amp_ or grad_scal or gradscal or grad_scaler"
DYNAMO = ("ctx_manager", "misc", "repros", "recompiles", "functions", "graph_deduplication", "activation_checkpointing")
GROUPS = (
    Group("autocast", ("test_autocast.py",)),
    Group("scaler", ("test_torch.py",), AMP),
    Group("jit", ("test_jit_autocast.py",)),
    Group("dynamo", tuple(f"dynamo/test_{name}.py" for name in DYNAMO), AMP),
    Group("functorch", ("functorch/test_aotdispatch.py", "functorch/test_vmap.py"), AMP),
    Group("export", ("export/test_passes.py", "export/test_export.py"), AMP),
    Group("autograd", ("test_autograd.py", "test_custom_ops.py", "test_fake_tensor.py", "test_proxy_tensor.py"), AMP),
    Group("fsdp", ("distributed/fsdp/test_fsdp_sharded_grad_scaler.py",)),
    Group("fully_shard", ("distributed/_composable/fsdp/test_fully_shard_grad_scaler.py",)),
)
ON_DEVICES = ("scaler",)  # groups whose tests take a device from torch's list of them

# Runs a group: arguments are the side, "simulated" or "cpu", the file of outcomes, and pytest's arguments.
PROGRAM = """
import json, sys
side, device, noted, *arguments = sys.argv[1:]
sys.argv = sys.argv[:1]
if device == "simulated":
    import tests.accelerator.device
if side == "castwise":
    import castwise
    castwise.install()
import pytest
from torch.testing._internal import common_utils
common_utils.parse_cmd_line_args()  # some files ask for it when they are imported

class Outcomes:
    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else "").partition("\\n")[0]
            self.found[report.nodeid] = f"{report.outcome}: {why}" if why else report.outcome

    def pytest_collectreport(self, report):
        if report.failed:
            self.found[f"{report.nodeid}::collecting"] = "error: " + str(report.longrepr).splitlines()[-1]

outcomes = Outcomes()
pytest.main(arguments, plugins=[outcomes])
with open(noted, "w") as file:
    json.dump(outcomes.found, file)
"""


def outcomes(group: Group, folder: Path, side: str, device: str) -> dict[str, str]:
    """Return what became of each test of a group on one side."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (recording.HERE.parent, folder)))}
    own = ("--noconftest", "-c", os.devnull, "--rootdir=.", "-p", "no:cacheprovider", "-q")
    chosen = ("-k", group.chosen) if group.chosen else ()
    with tempfile.TemporaryDirectory() as scratch:
        noted = Path(scratch, "outcomes.json")
        command = [sys.executable, "-c", PROGRAM, side, device, str(noted), *own, *chosen, *group.files]
        subprocess.run(command, cwd=folder, env=os.environ | settings, check=True)
        found: dict[str, str] = json.loads(noted.read_text())
        return found


def compared(group: Group, folder: Path, device: str) -> dict[str, Any]:
    """Run a group on both sides; return its record."""
    torchs, ours = (outcomes(group, folder, side, device) for side in SIDES)
    tally = collections.Counter(outcome.partition(":")[0] for outcome in torchs.values())
    other = {
        name: {"torch": torchs.get(name, "missing"), "castwise": ours.get(name, "missing")}
        for name in sorted({*torchs, *ours})
        if _kind(torchs.get(name, "missing")) != _kind(ours.get(name, "missing"))
    }
    counts = {kind: tally[kind] for kind in ("passed", "failed", "skipped", "error")}
    return {"files": list(group.files), **counts, "ends in another way": other}


def _kind(outcome: str) -> list[str]:
    """Return an outcome without the text of its exception, to which castwise adds its own words."""
    return outcome.split(":")[:2]


def table(record: dict[str, Any]) -> str:
    """Return the tables of a record, one for each device."""
    return "\n\n".join(_table(device, of_device) for device, of_device in sorted(record.items()))


def _table(device: str, record: dict[str, Any]) -> str:
    where = "the CPU" if device == "cpu" else "the simulated accelerator"
    head = f"Tests of torch {record['tests of']}, with torch {record['torch']}, on {where}:"
    lines = [head, "", "| group | passed | failed | skipped | otherwise under castwise |", "|---|---|---|---|---|"]
    for name, group in record["groups"].items():
        other = ", ".join(f"`{test.rpartition('::')[2]}`" for test in group["ends in another way"]) or "0"
        lines.append(f"| {name} | {group['passed']} | {group['failed']} | {group['skipped']} | {other} |")
    return "\n".join(lines)


def main() -> None:
    """Compare the groups; fail if a test ends in another way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="pytorch's folder of tests")
    parser.add_argument("--simulated", action="store_true", help="device tests on the simulated accelerator")
    parser.add_argument("--only", default="", help="groups with this in their names; the others keep their results")
    options = parser.parse_args()
    device = "simulated" if options.simulated else "cpu"
    groups = [group for group in GROUPS if options.only in group.name]
    if options.simulated:
        groups = [group for group in groups if group.name in ON_DEVICES]
    found = {group.name: compared(group, options.folder.absolute(), device) for group in groups}
    print(json.dumps(found, indent=2))
    written = recording.HERE / "results" / f"{NAME}.json"
    record = json.loads(written.read_text()) if written.exists() else {}
    about = {
        "torch": torch.__version__,
        "tests of": (options.folder.parent / "version.txt").read_text().strip(),
        "date": datetime.date.today().isoformat(),
    }
    earlier = record.get(device, {})
    kept = earlier["groups"] if options.only and about.items() <= earlier.items() else {}
    record[device] = {**about, "groups": {**kept, **found}}
    recording.write(NAME, record, table(record))
    if any(group["ends in another way"] for group in found.values()):
        sys.exit("tests end in another way under castwise")


if __name__ == "__main__":
    main()
