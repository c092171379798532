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
SUITES = [torch_versions.SMALL_SET, torch_versions.ALL_TESTS, torch_versions.LIGHT_TESTS]


def test_every_private_name_is_looked_up() -> None:
    names = {part for name in torch_versions.NAMES for part in name.replace(":", ".").split(".")}
    assert names_of_torch_private() <= names


def test_the_look_up_finds_names_and_misses_others() -> None:
    absent = ["torch.Tensor._no_name", "torch._no_module.x", "torch._jit_internal:_no_name", "grad_fn:_no_name"]
    names = json.dumps([*torch_versions.NAMES, *absent])
    run = subprocess.run(
        [sys.executable, "-c", torch_versions.LOOK_UP, names], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout)["missing"] == absent


def test_every_path_of_a_suite_exists() -> None:
    paths = {path for suite in SUITES for path in suite.tests if not path.startswith("-")}
    assert len(paths) > 10
    assert all((ROOT / path).exists() for path in paths)


def test_a_version_that_was_not_run_has_a_row_that_says_so() -> None:
    row = torch_versions.table(torch_versions.LIGHT_TESTS, {}).splitlines()[-1]
    assert row == f"| - | {torch_versions.PYTHONS[-1]} | - {'| not run ' * 5}| - | - <!-- no promise --> |"


WARN = "import warnings; warnings.warn('old', DeprecationWarning)"
WARNING_TESTS = f"""
import subprocess, sys
from tests import forked
from tests.forked import Python

forked._SERVER.set_forkserver_preload([])  # to load less takes less

def test_in_this_process():
    {WARN}

def test_in_a_subprocess():
    subprocess.run([sys.executable, "-c", {WARN!r}], check=True)

def test_in_a_forked_process(tmp_path):
    (tmp_path / "script.py").write_text({WARN!r})
    process = Python([tmp_path / "script.py"])
    process.communicate()
    assert process.returncode == 0
"""


def test_warnings_are_errors_in_processes_of_tests_as_well(tmp_path: Path, warm_python: None) -> None:
    (tmp_path / "test_warnings.py").write_text(WARNING_TESTS)
    arguments = ("-n0", f"--confcutdir={tmp_path}", str(tmp_path / "test_warnings.py"))
    counts = {
        warnings: torch_versions.pytest(Path(sys.executable), arguments, warnings)
        for warnings in ((), torch_versions.WARNINGS)
    }
    assert [(found["passed"], found["failed"]) for found in counts.values()] == [(3, 0), (0, 3)]


def test_no_rank_ignores_deprecations() -> None:
    workers = [path for path in (ROOT / "tests").rglob("*worker.py") if path.parent.name != "integrations"]
    assert len(workers) > 3
    assert [path for path in workers if 'simplefilter("ignore")' in path.read_text()] == []


def test_no_filter_has_a_comma_at_which_python_would_end_it() -> None:
    assert not any("," in one for one in torch_versions.WARNINGS)


def test_a_missing_name_is_shown_with_what_is_off() -> None:
    counts = {"passed": 1, "skipped": 0, "failed": 0, "error": 1, "minutes": 1, "minutes to install": 2}
    missing = ["torch._jit_internal:_jit_override_qualname"]
    found: dict[str, Any] = {"torch": "9.0", "python": "3", "date": "-", **counts, "missing": missing}
    row = torch_versions.table(SUITES[0]._replace(versions=("9.0",)), {"9.0": found}).splitlines()[-1]
    shown = "`torch._jit_internal:_jit_override_qualname`: torch.jit.script is off"
    assert row == f"| 9.0 | 3 | - | 1 | 0 | 0 | 1 | 1 | 2 | {shown} <!-- no promise --> |"
