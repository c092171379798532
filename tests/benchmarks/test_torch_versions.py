"""The script that runs tests with every torch looks up all private names, and its table is that of the record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.test_package import names_of_torch_private

from benchmarks import torch_versions

ROOT = Path(__file__).parents[2]


def test_every_private_name_is_looked_up() -> None:
    names = {part for name in torch_versions.NAMES for part in name.replace(":", ".").split(".")}
    fragment = {"_autocast"}  # of `_enter_autocast` and `_exit_autocast`
    assert names_of_torch_private() - fragment <= names


def test_the_look_up_finds_names_and_misses_others() -> None:
    absent = ["torch.Tensor._no_name", "torch._no_module.x", "torch._jit_internal:_no_name"]
    names = json.dumps([*torch_versions.NAMES, *absent])
    run = subprocess.run(
        [sys.executable, "-c", torch_versions.LOOK_UP, names], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout)["missing"] == absent


def test_the_page_shows_what_was_recorded() -> None:
    page = torch_versions.PAGE.read_text()
    assert (
        torch_versions.BEGINS
        + torch_versions.table(json.loads(torch_versions.RESULT.read_text()))
        + torch_versions.ENDS
        in page
    )


def test_every_path_of_the_small_set_exists() -> None:
    assert all((ROOT / path).is_file() for path in torch_versions.SMALL)


def test_a_missing_name_is_shown_with_what_is_off() -> None:
    counts = {"passed": 1, "skipped": 0, "failed": 0, "error": 1, "minutes": 1}
    missing = ["torch._jit_internal:_jit_override_qualname"]
    found: dict[str, Any] = {"torch": "9.0", "python": "3", "date": "-", **counts, "missing": missing}
    row = torch_versions.table({"9.0": found}).splitlines()[-1]
    shown = "`torch._jit_internal:_jit_override_qualname`: torch.jit.script is off"
    assert row == f"| 9.0 | 3 | - | 1 | 0 | 0 | 1 | 1 | {shown} <!-- no promise --> |"
