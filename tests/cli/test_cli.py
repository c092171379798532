from __future__ import annotations

import subprocess
import sys

import castwise


def run_python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_version_is_the_packages_own() -> None:
    assert run_python("-m", "castwise", "--version") == f"castwise {castwise.__version__}\n"


def test_the_library_never_loads_its_command_line() -> None:
    loaded = run_python("-c", "import castwise, sys; print(*sys.modules)").split()
    assert {"typer", "rich", "castwise.cli"}.isdisjoint(loaded)
