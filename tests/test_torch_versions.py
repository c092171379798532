"""The script that runs tests with every torch looks up all private names, and its table is that of the record."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.test_package import names_of_torch_private

ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("torch_versions")


def test_every_private_name_is_looked_up(script: ModuleType) -> None:
    names = {part for name in script.NAMES for part in name.replace(":", ".").split(".")}
    fragment = {"_autocast"}  # of `_enter_autocast` and `_exit_autocast`
    assert names_of_torch_private() - fragment <= names


def test_the_look_up_finds_names_and_misses_others(script: ModuleType) -> None:
    absent = ["torch.Tensor._no_name", "torch._no_module.x", "torch._jit_internal:_no_name"]
    names = json.dumps([*script.NAMES, *absent])
    run = subprocess.run([sys.executable, "-c", script.LOOK_UP, names], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["missing"] == absent


def test_the_page_shows_what_was_recorded(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    assert script.BEGINS + script.table(json.loads(script.RESULT.read_text())) + script.ENDS in page


def test_every_path_of_the_small_set_exists(script: ModuleType) -> None:
    assert all((ROOT / path).is_file() for path in script.SMALL)


def test_a_missing_name_is_shown_with_what_is_off(script: ModuleType) -> None:
    found = {
        "torch": "9.0",
        "python": "3",
        "date": "-",
        "passed": 1,
        "skipped": 0,
        "failed": 0,
        "error": 1,
        "minutes": 1,
    }
    row = script.table({"9.0": {**found, "missing": ["torch._jit_internal:_jit_override_qualname"]}}).splitlines()[-1]
    assert row == (
        "| 9.0 | 3 | - | 1 | 0 | 0 | 1 | 1 | `torch._jit_internal:_jit_override_qualname`: torch.jit.script is off <!-- no promise --> |"
    )
