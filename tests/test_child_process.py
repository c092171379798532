"""Processes of our own do not look for modules in the folder that the user is in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import castwise
from castwise._child_process import module


def test_a_module_is_run_with_its_arguments() -> None:
    done = subprocess.run(module("castwise", "--version"), capture_output=True, text=True, check=True)
    assert done.stdout == f"castwise {castwise.__version__}\n"


@pytest.mark.parametrize("name", ["json.py", "runpy.py", "castwise.py", "linecache.py"])
def test_a_file_of_the_users_is_not_taken_for_a_module(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("raise SystemExit('this was run')")
    subprocess.run(module("json.tool", "--help"), cwd=tmp_path, capture_output=True, check=True)
    subprocess.run(module("castwise", "--version"), cwd=tmp_path, capture_output=True, check=True)
